//! The command `volume inline`, which sends the requests of kubelet.

use std::fs;

use support::driver::*;
use support::inline::is_mounted;
use support::path;

#[test]
fn the_inline_command_creates_shows_and_removes_a_volume() {
    with_driver(|driver| {
        let target = driver.scratch().join("not/yet/there");
        let publish = ["volume", "inline", "publish", "pod-1", "--target", path(&target)];
        let at = ["--target", path(&target)];
        driver.cli_json(&[&publish[..], &["--attribute", "size=32Mi"]].concat());
        fs::write(target.join("mine"), "x").unwrap();
        let stats = driver.cli_json(&[&["volume", "inline", "stats", "pod-1"], &at[..]].concat());
        assert_eq!(stats["abnormal"], false);
        assert!(stats["total_bytes"].as_u64().is_some_and(|bytes| bytes > 20 << 20), "{stats}");
        let listed = driver.cli_json(&["volume", "inline", "list"]);
        assert_eq!((&listed[0]["handle"], &listed[0]["medium"]), (&"pod-1".into(), &"pool".into()));
        assert_eq!(listed[0]["target_path"], path(&target));
        let secret = driver.scratch().join("secret");
        fs::write(&secret, "hunter2").unwrap();
        let secret = format!("token={}", secret.display());
        let refused = driver.cli(&[&publish[..], &["--secret", &secret]].concat());
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("readonly"), "{said}");
        assert!(!said.contains("hunter2"));
        let gone = [&["volume", "inline", "unpublish", "pod-1"], &at[..]].concat();
        driver.cli_json(&gone);
        assert!(!is_mounted(&target) && !target.exists());
        let repeated = driver.cli(&gone);
        let said = String::from_utf8_lossy(&repeated.stderr).into_owned();
        assert!(!repeated.status.success() && said.contains("is not published"), "{said}");
        let accepted = driver.cli_json(&[&gone[..], &["--if-published"]].concat());
        assert_eq!(accepted["changed"], false);
        assert_eq!(driver.cli_json(&["volume", "inline", "list"]), serde_json::json!([]));
    });
}
