//! Makes content volumes read-only for pods (KEP-596, "Read-only volumes"). `readOnly` of the
//! volume makes kubelet keep the owners of its files and pass the flag to the driver; `readOnly` of
//! each mount prevents writes by containers.

use super::volumes::{self, Mount, Scope, Volume};
use kubernetes::admission::{Allowed, Set};
use kubernetes::pod::PodSpec;

const READ_ONLY: &str = "readOnly";

/// Returns the changes that the pod needs, and warnings.
pub fn mutate(spec: &PodSpec, driver: &str, scope: &Scope) -> Allowed {
    let (volumes, mounts) = of_content(spec, driver, scope);
    let volumes = volumes.iter().filter(|_| *scope == Scope::Pod);
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

/// Returns a problem for each field that must be read-only and is not.
pub fn problems(spec: &PodSpec, driver: &str, scope: &Scope) -> Vec<String> {
    let (volumes, mounts) = of_content(spec, driver, scope);
    let volumes = volumes.iter().filter(|_| *scope == Scope::Pod);
    let writable = volumes.filter(|volume| volume.source.read_only != Some(true));
    let exposed = mounts.iter().filter(|mount| !mount.is_read_only());
    let fields = writable.map(|volume| volume.field(READ_ONLY));
    let fields = fields.chain(exposed.map(|mount| mount.field(READ_ONLY)));
    fields.map(|field| format!("{field}: must be true for a content volume")).collect()
}

fn of_content<'a>(
    spec: &'a PodSpec,
    driver: &str,
    scope: &Scope,
) -> (Vec<Volume<'a>>, Vec<Mount<'a>>) {
    let mut volumes = volumes::of(spec, driver);
    volumes.retain(Volume::is_content);
    let mounts = volumes::mounts(spec, scope, &volumes.iter().collect::<Vec<_>>());
    (volumes, mounts)
}

fn warnings(mounts: &[Mount<'_>]) -> Vec<String> {
    let parts = mounts.iter().filter(|mount| mount.is_part());
    let warning = |mount: &Mount<'_>| {
        let path = mount.field("subPath");
        format!("{path}: is not updated when the content changes; mount the volume without subPath")
    };
    parts.map(warning).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const DRIVER: &str = "d.example";

    fn pod() -> PodSpec {
        let spec = json!({
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
        });
        serde_json::from_value(spec).unwrap()
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
    fn only_content_volumes_and_their_mounts_become_read_only() {
        let response = mutate(&pod(), DRIVER, &Scope::Pod);
        let expected = [
            "/spec/volumes/1/csi/readOnly",
            "/spec/containers/0/volumeMounts/1/readOnly",
            "/spec/containers/1/volumeMounts/1/readOnly",
            "/spec/initContainers/0/volumeMounts/0/readOnly",
            "/spec/ephemeralContainers/0/volumeMounts/0/readOnly",
            "/spec/ephemeralContainers/1/volumeMounts/0/readOnly",
        ];
        assert_eq!(paths(&response), expected);
        assert_eq!(problems(&pod(), DRIVER, &Scope::Pod).len(), expected.len());
    }

    #[test]
    fn only_new_containers_of_a_running_pod_are_changed() {
        let scope = Scope::NewContainers { existing: ["old".to_owned()].into() };
        let response = mutate(&pod(), DRIVER, &scope);
        assert_eq!(paths(&response), ["/spec/ephemeralContainers/1/volumeMounts/0/readOnly"]);
        assert_eq!(problems(&pod(), DRIVER, &scope).len(), 1);
        assert_eq!(mutate(&pod(), DRIVER, &Scope::Nothing), Allowed::default());
    }
}
