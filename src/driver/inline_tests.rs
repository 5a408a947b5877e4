use super::*;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, MountVolume};

fn mounted(flags: &[&str]) -> Option<csi::VolumeCapability> {
    let mount_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    let mount = MountVolume { mount_flags, ..Default::default() };
    let access_mode = Some(AccessMode { mode: Mode::SingleNodeMultiWriter.into() });
    Some(csi::VolumeCapability { access_type: Some(AccessType::Mount(mount)), access_mode })
}

fn publish_request(
    attributes: &[(&str, &str)],
    secrets: &[(&str, &str)],
) -> csi::NodePublishVolumeRequest {
    let owned = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    csi::NodePublishVolumeRequest {
        volume_capability: mounted(&[]),
        volume_context: owned(attributes),
        secrets: owned(secrets),
        ..Default::default()
    }
}

fn readonly(req: csi::NodePublishVolumeRequest) -> csi::NodePublishVolumeRequest {
    csi::NodePublishVolumeRequest { readonly: true, ..req }
}

/// The field and reason of a refusal.
fn refusal(req: &csi::NodePublishVolumeRequest) -> (&'static str, String) {
    match inline_request(req) {
        Err(Error::Invalid { field, reason }) => (field, reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn kubernetes_keys_are_not_attributes() {
    let req = publish_request(
        &[
            ("size", "64Mi"),
            ("csi.storage.k8s.io/serviceAccount.tokens", "{}"),
            ("csi.storage.k8s.io/x", ""),
        ],
        &[],
    );
    let (request, content) = inline_request(&req).unwrap();
    assert_eq!((request.size_bytes, request.read_only_content), (Some(64 << 20), false));
    assert!(content.is_empty() && !request.in_memory);
}

#[test]
fn content_must_be_published_read_only() {
    for req in [
        publish_request(&[("content/a", "x")], &[]),
        publish_request(&[("readOnlyContent", "true")], &[]),
        publish_request(&[], &[("token", "x")]),
    ] {
        let (field, message) = refusal(&req);
        assert_eq!(field, "readonly");
        assert!(message.contains("volumes[].csi.readOnly"), "{message}");
        let (request, _) = inline_request(&readonly(req.clone())).unwrap();
        assert!(request.read_only_content && !request.is_read_only());
        let ro = csi::NodePublishVolumeRequest { volume_capability: mounted(&["ro"]), ..req };
        assert_eq!(refusal(&readonly(ro)).0, "volume_capability");
    }
}

#[test]
fn files_of_a_read_only_volume_are_refused() {
    let seeded = publish_request(&[("content/a", "x"), ("readOnlyContent", "false")], &[]);
    assert!(!inline_request(&seeded).unwrap().0.read_only_content);
    assert_eq!(refusal(&readonly(seeded.clone())).0, "readonly");
    let ro = csi::NodePublishVolumeRequest { volume_capability: mounted(&["ro"]), ..seeded };
    assert_eq!(refusal(&ro).0, "readonly");
}

#[test]
fn a_secret_key_is_a_file_name_and_its_value_stays_hidden() {
    for key in ["", "..", "..data", "a/b", "a b", "a\0", &"k".repeat(5000)] {
        let (field, message) =
            refusal(&readonly(publish_request(&[], &[(key, "hunter2"), ("z", "hunter2")])));
        assert_eq!(field, "secrets");
        assert!(!message.contains("hunter2") && message.len() < 500, "{message}");
    }
    let twice = readonly(publish_request(&[("content/token", "hunter2")], &[("token", "hunter2")]));
    let (field, message) = refusal(&twice);
    assert!(field == "secrets" && message.contains("\"token\"") && !message.contains("hunter2"));
    let half = "x".repeat(inline::MAX_CONTENT_BYTES / 2);
    let large = readonly(publish_request(&[("content/a", &half)], &[("b", &half)]));
    assert_eq!(refusal(&large).0, "secrets");
}

#[test]
fn an_inline_volume_can_be_deferred_in_any_mode() {
    let sized = publish_request(&[("size", "64Mi")], &[]);
    let deferred = csi::NodePublishVolumeRequest { defer_fs_ops: true, ..sized.clone() };
    for req in [&deferred, &readonly(deferred.clone())] {
        let (request, _) = inline_request(req).unwrap();
        assert!(request.deferred.is_some() && !request.read_only_content, "{req:?}");
    }
    assert_eq!(inline_request(&sized).unwrap().0.deferred, None);
}

#[test]
fn content_written_by_the_driver_cannot_be_deferred() {
    let defer = |req| csi::NodePublishVolumeRequest { defer_fs_ops: true, ..req };
    for req in [
        defer(publish_request(&[("content/a", "x")], &[])),
        defer(publish_request(&[("readOnlyContent", "true")], &[])),
    ] {
        let (field, message) = refusal(&readonly(req));
        assert_eq!(field, "defer_fs_ops");
        assert!(message.contains("content/…"), "{message}");
    }
    let (_, message) = refusal(&readonly(defer(publish_request(&[], &[("t", "hunter2")]))));
    assert!(message.contains("nodePublishSecretRef") && !message.contains("hunter2"), "{message}");
}
