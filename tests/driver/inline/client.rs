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
        let reported =
            driver.cli_json(&[&["volume", "inline", "stats", "pod-1"], &at[..]].concat());
        assert_eq!(reported["abnormal"], false);
        assert!(
            reported["total_bytes"].as_u64().is_some_and(|bytes| bytes > 20 << 20),
            "{reported}"
        );
        let secret = driver.scratch().join("secret");
        fs::write(&secret, "hunter2").unwrap();
        let secret = format!("token={}", secret.display());
        let refused = driver.cli(&[&publish[..], &["--secret", &secret]].concat());
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("readonly"), "{said}");
        assert!(!said.contains("hunter2"));
        let gone = [&["volume", "inline", "unpublish", "pod-1"], &at[..]].concat();
        for _ in 0..2 {
            driver.cli_json(&gone);
            assert!(!is_mounted(&target) && !target.exists());
        }
    });
}
