use super::*;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};

fn used(access: AccessType, mode: Mode) -> Option<csi::VolumeCapability> {
    let access_mode = Some(AccessMode { mode: mode.into() });
    Some(csi::VolumeCapability { access_type: Some(access), access_mode })
}

fn mounted(flags: &[&str]) -> Option<csi::VolumeCapability> {
    let mount_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    let mount = MountVolume { mount_flags, ..Default::default() };
    used(AccessType::Mount(mount), Mode::SingleNodeMultiWriter)
}

fn asked(attributes: &[(&str, &str)], secrets: &[(&str, &str)]) -> csi::NodePublishVolumeRequest {
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

fn readonly(asked: csi::NodePublishVolumeRequest) -> csi::NodePublishVolumeRequest {
    csi::NodePublishVolumeRequest { readonly: true, ..asked }
}

/// The field and the words of a refusal.
fn refused(asked: &csi::NodePublishVolumeRequest) -> (&'static str, String) {
    match wanted(asked) {
        Err(Error::Invalid { field, reason }) => (field, reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn keys_of_kubernetes_are_no_attributes() {
    let asked = asked(
        &[
            ("size", "64Mi"),
            ("csi.storage.k8s.io/serviceAccount.tokens", "{}"),
            ("csi.storage.k8s.io/x", ""),
        ],
        &[],
    );
    let (request, content) = wanted(&asked).unwrap();
    assert_eq!((request.size_bytes, request.read_only_content), (Some(64 << 20), false));
    assert!(content.is_empty() && !request.in_memory);
}

#[test]
fn content_is_published_read_only_or_not_at_all() {
    for asked in [
        asked(&[("content/a", "x")], &[]),
        asked(&[("readOnlyContent", "true")], &[]),
        asked(&[], &[("token", "x")]),
    ] {
        let (field, words) = refused(&asked);
        assert_eq!(field, "readonly");
        assert!(words.contains("volumes[].csi.readOnly"), "{words}");
        let (request, _) = wanted(&readonly(asked.clone())).unwrap();
        assert!(request.read_only_content && !request.is_read_only());
        let ro = csi::NodePublishVolumeRequest { volume_capability: mounted(&["ro"]), ..asked };
        assert_eq!(refused(&readonly(ro)).0, "volume_capability");
    }
}

#[test]
fn files_that_could_not_be_written_are_refused_and_not_left_out() {
    let seeded = asked(&[("content/a", "x"), ("readOnlyContent", "false")], &[]);
    assert!(!wanted(&seeded).unwrap().0.read_only_content);
    assert_eq!(refused(&readonly(seeded.clone())).0, "readonly");
    let ro = csi::NodePublishVolumeRequest { volume_capability: mounted(&["ro"]), ..seeded };
    assert_eq!(refused(&ro).0, "readonly");
}

#[test]
fn a_key_of_a_secret_is_the_name_of_a_file_and_its_value_is_never_repeated() {
    for key in ["", "..", "..data", "a/b", "a b", "a\0", &"k".repeat(5000)] {
        let (field, words) = refused(&readonly(asked(&[], &[(key, "hunter2"), ("z", "hunter2")])));
        assert_eq!(field, "secrets");
        assert!(!words.contains("hunter2") && words.len() < 500, "{words}");
    }
    let twice = readonly(asked(&[("content/token", "hunter2")], &[("token", "hunter2")]));
    let (field, words) = refused(&twice);
    assert!(field == "secrets" && words.contains("\"token\"") && !words.contains("hunter2"));
    let half = "x".repeat(inline::MAX_CONTENT_BYTES / 2);
    let large = readonly(asked(&[("content/a", &half)], &[("b", &half)]));
    assert_eq!(refused(&large).0, "secrets");
}

#[test]
fn a_block_device_is_no_inline_volume() {
    let block = used(AccessType::Block(BlockVolume {}), Mode::SingleNodeWriter);
    let asked = csi::NodePublishVolumeRequest { volume_capability: block, ..asked(&[], &[]) };
    let (field, words) = refused(&asked);
    assert!(field == "volume_capability" && words.contains("block"), "{words}");
}

#[test]
fn an_inline_volume_is_left_to_a_runtime_whatever_its_mode() {
    let sized = asked(&[("size", "64Mi")], &[]);
    let deferred = csi::NodePublishVolumeRequest { defer_fs_ops: true, ..sized.clone() };
    for asked in [&deferred, &readonly(deferred.clone())] {
        let (request, _) = wanted(asked).unwrap();
        assert!(request.deferred.is_some() && !request.read_only_content, "{asked:?}");
    }
    assert_eq!(wanted(&sized).unwrap().0.deferred, None);
    let (field, words) = refused(&asked(&[("deferFSMount", "true")], &[]));
    assert!(field == "volume_context" && words.contains("defer-fs-mount"), "{words}");
}

#[test]
fn what_the_driver_writes_is_not_left_to_a_runtime() {
    let defer = |asked| csi::NodePublishVolumeRequest { defer_fs_ops: true, ..asked };
    for asked in [
        defer(asked(&[("content/a", "x")], &[])),
        defer(asked(&[("readOnlyContent", "true")], &[])),
    ] {
        let (field, words) = refused(&readonly(asked));
        assert_eq!(field, "defer_fs_ops");
        assert!(words.contains("content/…"), "{words}");
    }
    let (_, words) = refused(&readonly(defer(asked(&[], &[("t", "hunter2")]))));
    assert!(words.contains("nodePublishSecretRef") && !words.contains("hunter2"), "{words}");
}
