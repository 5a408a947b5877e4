//! Data of released versions: tests/data/releases has a pool and a repository of backups of each, by
//! hack/release/former.sh. This version reads them. (The tests of each format check that others are
//! refused.)

use std::fs;
use std::path::Path;
use std::process::Command;

use csi_loopback::backend::PoolKind;
use serde_json::Value;
use sha2::{Digest, Sha256};
use support::driver::Driver;
use support::{directory, have_root, path};

/// The archives, one for each version.
fn releases() -> Vec<std::path::PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/releases");
    let found = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let found: Vec<_> = found.collect();
    assert!(!found.is_empty());
    found
}

#[test]
fn the_pool_and_the_backups_of_each_release_are_read() {
    if !have_root() {
        return;
    }
    for archive in releases() {
        assert!(fs::metadata(&archive).unwrap().len() < 1 << 20, "{archive:?} is large");
        let place = directory();
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--sparse", "--file", path(&archive), "--directory"]);
        assert!(tar.arg(place.path()).status().unwrap().success());
        let expected = fs::read(place.path().join("expected.json")).unwrap();
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        fs::rename(place.path().join("pool"), place.path().join("data")).unwrap();

        // The retention of the deleted base began when the archive was made.
        let flags = ["--pool-size", "320Mi", "--change-record-retention", "36500days"];
        let driver = Driver::in_place(PoolKind::Image, place.path(), &flags);
        let text = |field: &str| expected[field].as_str().unwrap();
        let delta = driver.cli_json(&["snapshot", "delta", text("base"), text("target")]);
        assert_eq!(delta["extents"], expected["delta"], "{archive:?}");
        assert_ne!(delta["extents"], Value::Array(Vec::new()));
        let allocated = driver.cli_json(&["snapshot", "allocated", text("target")]);
        assert_eq!(allocated["extents"], expected["allocated"], "{archive:?}");

        let repository = place.path().join("repository");
        let restored = place.path().join("restored.img");
        let backup = |arguments: &[&str]| {
            let output = driver.cli(&[arguments, &["--repository", path(&repository)]].concat());
            assert!(output.status.success(), "{arguments:?}: {output:?}");
        };
        backup(&["backup", "verify"]);
        backup(&["restore", text("target"), "--to", path(&restored)]);
        let found = Sha256::digest(fs::read(&restored).unwrap());
        let found: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, text("sha256"), "{archive:?}");
        // The next backup is incremental: it finds its base in pool and repository.
        backup(&["backup", "create", text("target")]);
    }
}
