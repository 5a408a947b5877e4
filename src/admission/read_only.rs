//! What makes a volume of content one that only the driver writes to (KEP-596, "Read-only volumes"): `readOnly` of the volume, for
//! which kubelet leaves its files' owners alone and tells the driver so, and of each mount, for which containers cannot write.

use k8s_openapi::api::core::v1::PodSpec;

use super::volumes::{self, Asked, Mount, Volume};
use crate::kubernetes::admission::{Allowed, Set};

const READ_ONLY: &str = "readOnly";

/// What of the pod has to be changed, and no more.
pub fn mend(spec: &PodSpec, driver: &str, asked: &Asked) -> Allowed {
    let (volumes, mounts) = of_content(spec, driver, asked);
    let volumes = volumes.iter().filter(|_| *asked == Asked::Whole);
    let writable = volumes.filter(|volume| volume.source.read_only != Some(true));
    let of_volume = |volume: &Volume<'_>| {
        Set::new(["spec", "volumes", &volume.index.to_string(), "csi", READ_ONLY], true)
    };
    let of_mount = |mount: &Mount<'_>| {
        let (container, index) = (mount.container.to_string(), mount.index.to_string());
        Set::new(["spec", mount.list, &container, "volumeMounts", &index, READ_ONLY], true)
    };
    let exposed = mounts.iter().filter(|mount| !mount.is_read_only());
    Allowed {
        changes: writable.map(of_volume).chain(exposed.map(of_mount)).collect(),
        warnings: warnings(&mounts),
    }
}

/// What of the pod is as it may not be: each field.
pub fn problems(spec: &PodSpec, driver: &str, asked: &Asked) -> Vec<String> {
    let (volumes, mounts) = of_content(spec, driver, asked);
    let volumes = volumes.iter().filter(|_| *asked == Asked::Whole);
    let writable = volumes.filter(|volume| volume.source.read_only != Some(true));
    let exposed = mounts.iter().filter(|mount| !mount.is_read_only());
    let fields = writable.map(|volume| volume.field(READ_ONLY));
    let fields = fields.chain(exposed.map(|mount| mount.field(READ_ONLY)));
    fields.map(|field| format!("{field}: has to be true for a volume of content")).collect()
}

fn of_content<'a>(
    spec: &'a PodSpec,
    driver: &str,
    asked: &Asked,
) -> (Vec<Volume<'a>>, Vec<Mount<'a>>) {
    let mut volumes = volumes::of(spec, driver);
    volumes.retain(Volume::is_content);
    let mounts = volumes::mounts(spec, asked, &volumes.iter().collect::<Vec<_>>());
    (volumes, mounts)
}

fn warnings(mounts: &[Mount<'_>]) -> Vec<String> {
    let parts = mounts.iter().filter(|mount| mount.is_part());
    let warning = |mount: &Mount<'_>| {
        let path = mount.field("subPath");
        format!(
            "{path}: is not refreshed when the volume's content changes; mount the volume whole"
        )
    };
    parts.map(warning).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const DRIVER: &str = "d.example";

    fn spec(value: Value) -> PodSpec {
        serde_json::from_value(value).unwrap()
    }

    fn pod() -> PodSpec {
        spec(json!({
            "volumes": [
                { "name": "scratch", "csi": { "driver": DRIVER, "volumeAttributes": { "size": "1Gi" } } },
                { "name": "content", "csi": { "driver": DRIVER, "volumeAttributes": { "content/a": "x" } } },
                { "name": "other", "csi": { "driver": "o.example", "volumeAttributes": { "content/a": "x" } } },
                { "name": "secret", "csi": {
                    "driver": DRIVER, "nodePublishSecretRef": { "name": "s" }, "readOnly": true,
                } },
                { "name": "own", "csi": {
                    "driver": DRIVER,
                    "volumeAttributes": { "content/a": "x", "readOnlyContent": "false" },
                } },
                { "name": "wrong", "csi": {
                    "driver": DRIVER, "volumeAttributes": { "content/a": "x", "size": "much" },
                } },
                { "name": "empty", "emptyDir": {} },
            ],
            "containers": [
                { "name": "a", "volumeMounts": [
                    { "name": "scratch", "mountPath": "/0" }, { "name": "content", "mountPath": "/1" },
                    { "name": "other", "mountPath": "/2" }, { "name": "own", "mountPath": "/3" },
                    { "name": "wrong", "mountPath": "/4" }, { "name": "empty", "mountPath": "/5" },
                ] },
                { "name": "b", "volumeMounts": [
                    { "name": "secret", "mountPath": "/0", "readOnly": true },
                    { "name": "content", "mountPath": "/1", "readOnly": false, "subPath": "a" },
                ] },
            ],
            "initContainers": [
                { "name": "i", "volumeMounts": [{ "name": "secret", "mountPath": "/0" }] },
            ],
            "ephemeralContainers": [
                { "name": "old", "volumeMounts": [{ "name": "content", "mountPath": "/0" }] },
                { "name": "new", "volumeMounts": [{ "name": "content", "mountPath": "/0" }] },
            ],
        }))
    }

    fn paths(allowed: &Allowed) -> Vec<String> {
        let changes = serde_json::to_value(&allowed.changes).unwrap();
        let changes = changes.as_array().unwrap().iter();
        changes
            .map(|change| {
                assert_eq!((&change["op"], &change["value"]), (&json!("add"), &json!(true)));
                change["path"].as_str().unwrap().to_owned()
            })
            .collect()
    }

    #[test]
    fn volumes_of_content_and_their_mounts_become_read_only_and_nothing_else_changes() {
        let mended = mend(&pod(), DRIVER, &Asked::Whole);
        let expected = [
            "/spec/volumes/1/csi/readOnly",
            "/spec/containers/0/volumeMounts/1/readOnly",
            "/spec/containers/1/volumeMounts/1/readOnly",
            "/spec/initContainers/0/volumeMounts/0/readOnly",
            "/spec/ephemeralContainers/0/volumeMounts/0/readOnly",
            "/spec/ephemeralContainers/1/volumeMounts/0/readOnly",
        ];
        assert_eq!(paths(&mended), expected);
        assert_eq!(problems(&pod(), DRIVER, &Asked::Whole).len(), expected.len());
    }

    #[test]
    fn of_a_pod_that_runs_only_new_containers_are_changed() {
        let asked = Asked::NewContainers { had: ["old".to_owned()].into() };
        let mended = mend(&pod(), DRIVER, &asked);
        assert_eq!(paths(&mended), ["/spec/ephemeralContainers/1/volumeMounts/0/readOnly"]);
        assert_eq!(problems(&pod(), DRIVER, &asked).len(), 1);
        assert_eq!(mend(&pod(), DRIVER, &Asked::Nothing), Allowed::default());
    }

    #[test]
    fn what_was_mended_is_as_it_should_be() {
        let mut pod = pod();
        for volume in pod.volumes.iter_mut().flatten().filter_map(|one| one.csi.as_mut()) {
            volume.read_only = Some(true);
        }
        let of_containers =
            pod.containers.iter_mut().chain(pod.init_containers.iter_mut().flatten());
        let mounts = of_containers.filter_map(|one| one.volume_mounts.as_mut());
        let ephemeral = pod.ephemeral_containers.iter_mut().flatten();
        let mounts = mounts.chain(ephemeral.filter_map(|one| one.volume_mounts.as_mut()));
        mounts.flatten().for_each(|mount| mount.read_only = Some(true));
        assert!(mend(&pod, DRIVER, &Asked::Whole).changes.is_empty());
        assert!(problems(&pod, DRIVER, &Asked::Whole).is_empty());
    }

    #[test]
    fn a_part_of_content_that_is_mounted_is_warned_of() {
        let warnings = mend(&pod(), DRIVER, &Asked::Whole).warnings;
        assert!(warnings[0].starts_with("spec.containers[1].volumeMounts[1].subPath: "));
        assert_eq!(warnings.len(), 1);
    }
}
