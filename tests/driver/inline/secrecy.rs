//! Secrets, tokens and content appear in no log and no error, at any level.

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;

use support::driver::*;
use support::inline::{PodVolume, is_mounted, pod_volume};

/// A part of every value in which a pod may keep a secret.
const SECRET: &str = "1481516234";

/// Requests with the secret in every field that can contain one, most of them invalid in another
/// field.
fn requests(volume: &PodVolume) -> Vec<csi::NodePublishVolumeRequest> {
    let token = ("csi.storage.k8s.io/serviceAccount.tokens", SECRET);
    let secret = [("password", SECRET)];
    let attributes: [&[(&str, &str)]; 9] = [
        &[token],
        &[token, ("content/motd", SECRET)],
        &[token, ("content/motd", SECRET), ("readOnlyContent", "false")],
        &[token, ("colour", SECRET)],
        &[token, ("readOnlyContent", SECRET)],
        &[token, ("medium", SECRET)],
        &[token, ("content/..", SECRET)],
        &[token, ("content/password", SECRET)],
        &[("csi.storage.k8s.io/ephemeral", SECRET)],
    ];
    let mut requests = Vec::new();
    for attributes in attributes {
        for (name, value) in [secret[0], ("..", SECRET), ("a/b", SECRET)] {
            requests.push(volume.publishing_content(attributes, &[(name, value)]));
        }
        requests.push(volume.publishing_content(attributes, &[]));
        requests.push(volume.publishing(attributes));
        let flagged = with_flags(
            "",
            csi::volume_capability::access_mode::Mode::SingleNodeMultiWriter,
            &[SECRET],
        );
        requests.push(csi::NodePublishVolumeRequest {
            volume_capability: Some(flagged),
            ..volume.publishing_content(attributes, &secret)
        });
        let publish_context = map(&[("colour", SECRET)]);
        requests.push(csi::NodePublishVolumeRequest {
            publish_context,
            ..volume.publishing_content(attributes, &secret)
        });
    }
    requests
}

#[test]
fn no_secret_token_or_content_is_logged_or_returned() {
    for format in ["text", "json"] {
        let flags = ["--log-level", "trace", "--log-format", format];
        let Some(mut driver) = driver_with(PoolKind::Copy, &flags) else { return };
        let volume = pod_volume(&driver, "uid-1", "content");
        let mut some_succeed = false;
        for request in requests(&volume) {
            for _ in 0..2 {
                if let Err(status) = driver.call(request.clone()) {
                    assert!(!format!("{status:?}").contains(SECRET), "{status:?}");
                }
            }
            some_succeed |= is_mounted(&volume.target);
            driver.unpublish(&volume.handle, &volume.target);
        }
        assert!(some_succeed);
        // Nor in messages of a driver about existing volumes.
        let _ = driver.call(volume.publishing_content(&[("content/motd", SECRET)], &[]));
        driver.kill();
        driver.start_again();
        driver.unpublish(&volume.handle, &volume.target);
        driver.stop();
        let log = driver.log();
        let said: Vec<_> = log.lines().filter(|line| line.contains(SECRET)).collect();
        assert!(said.is_empty(), "{said:#?}");
        for word in ["TRACE", "NodePublishVolume", "INVALID_ARGUMENT", &volume.handle] {
            assert!(log.contains(word), "{word}");
        }
    }
}
