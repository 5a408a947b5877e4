//! Inline ephemeral volumes (KEP-596) through the driver's socket, as kubelet asks for them.

mod support;

use std::fs;

use csi_loopback::proto::csi::v1 as csi;
use support::driver::*;
use support::inline::{is_mounted, pod_volume};

#[test]
fn a_volume_is_born_when_it_is_published_and_gone_when_it_is_unpublished() {
    const TEST: &str = "a_volume_is_born_when_it_is_published_and_gone_when_it_is_unpublished";
    with_driver(TEST, |driver| {
        let volume = pod_volume(driver, "uid-1", "scratch");
        let publishing = volume.publishing(&[("size", "64Mi")]);
        driver.ok(publishing.clone());
        fs::write(volume.file("written"), "by the pod").unwrap();
        driver.ok(publishing);
        assert!(volume.file("written").exists(), "a repeated call leaves the volume as it is");
        assert!(driver.ok(csi::ListVolumesRequest::default()).entries.is_empty());
        let at = volume.target.to_str().unwrap();
        assert_eq!(driver.ok(stats(&volume.handle, at)).usage.len(), 2);
        for _ in 0..2 {
            driver.unpublish(&volume.handle, &volume.target);
            assert!(!volume.target.exists() && !is_mounted(&volume.target));
        }
    });
}
