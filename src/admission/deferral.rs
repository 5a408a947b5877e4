//! The policy of deferred volumes (KEP-2857, "Setting DeferFSMount in PodSpec"). An entry lists
//! what a StorageClass and a RuntimeClass support together. The driver is the webhooks' driver;
//! inline volumes, which have no class, use the empty class.
//!
//! If no entry supports all that a pod needs, the volume is not deferred, and the driver mounts it
//! as usual.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::volumes;
use kubernetes::name;
use kubernetes::pod::{Container, PodSpec};

const NO_RUNTIME: &str = "the pod has no runtimeClassName, and deferred volumes need a runtime that mounts them; set one, or remove the \
    annotation";
/// Mount propagation that csi-loopback-runc rejects.
const BIDIRECTIONAL: &str = "Bidirectional";

/// PodSecurityContext.fsGroupChangePolicy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
enum GroupChangePolicy {
    Always,
    OnRootMismatch,
}

/// An entry of the policy. A missing field means unsupported.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Entry {
    storage_class: String,
    runtime_class: String,
    #[serde(default)]
    fs_group: bool,
    #[serde(default)]
    fs_group_change_policies: BTreeSet<GroupChangePolicy>,
    #[serde(default)]
    sub_path: bool,
    #[serde(default)]
    se_linux: bool,
}

/// What a StorageClass and a RuntimeClass support together.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Supported {
    /// Supported policies; empty if fsGroup is unsupported.
    groups: BTreeSet<GroupChangePolicy>,
    sub_path: bool,
    se_linux: bool,
}

/// Validated entries by RuntimeClass and StorageClass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Deferral(BTreeMap<String, BTreeMap<String, Supported>>);

impl Deferral {
    /// # Errors
    /// An entry is invalid. The message names the entry and the field.
    pub fn read(entries: Vec<Entry>) -> Result<Self, String> {
        let mut read = Self::default();
        for (index, entry) in entries.into_iter().enumerate() {
            read.add(entry).map_err(|problem| format!("deferral[{index}].{problem}"))?;
        }
        Ok(read)
    }

    fn add(&mut self, entry: Entry) -> Result<(), String> {
        let Entry { storage_class, runtime_class, .. } = entry;
        if !name::is_object(&runtime_class) {
            return Err("runtimeClass: is not a valid name of a RuntimeClass".to_owned());
        }
        if !storage_class.is_empty() && !name::is_object(&storage_class) {
            return Err(
                "storageClass: is not a valid name of a StorageClass; use \"\" for inline volumes"
                    .to_owned(),
            );
        }
        if entry.fs_group == entry.fs_group_change_policies.is_empty() {
            return Err(
                "fsGroupChangePolicies: must be Always, OnRootMismatch or both with fsGroup: true, and empty otherwise"
                    .to_owned(),
            );
        }
        let supported = Supported {
            groups: entry.fs_group_change_policies,
            sub_path: entry.sub_path,
            se_linux: entry.se_linux,
        };
        let of_runtime = self.0.entry(runtime_class).or_default();
        match of_runtime.insert(storage_class, supported) {
            None => Ok(()),
            Some(_) => {
                Err("storageClass: duplicates an entry with the same runtimeClass".to_owned())
            }
        }
    }

    /// The entries of the pod's RuntimeClass. `None`: the driver mounts its volumes as usual.
    pub fn of_runtime(&self, spec: &PodSpec) -> Option<Entries<'_>> {
        self.0.get(runtime_class(spec)).map(Entries)
    }

    /// Returns why the pod's runtime cannot mount these volumes; `None` if it can. StorageClasses
    /// are not read: the author of the annotation knows the driver (the proposal's workload
    /// operator).
    pub fn unsupported(&self, spec: &PodSpec, named: &BTreeSet<&str>) -> Option<String> {
        let runtime = runtime_class(spec);
        if runtime.is_empty() {
            return Some(NO_RUNTIME.to_owned());
        }
        let Some(entries) = self.0.get(runtime) else {
            return Some(format!(
                "the policy has no entry for the RuntimeClass {runtime}, so the pod would see an empty directory of the node; \
                 add one (deferral), or use another RuntimeClass"
            ));
        };
        named.iter().find_map(|volume| {
            let needs = Needs::of(spec, volume);
            // One entry that supports everything is enough.
            let missing = entries.values().map(|supported| needs.unsupported_by(supported));
            let missing = missing.reduce(Option::and).flatten()?;
            Some(format!(
                "{volume:?} needs {missing}, which no policy entry for the RuntimeClass {runtime} supports; remove the volume from the annotation"
            ))
        })
    }
}

/// The entries of one RuntimeClass, by StorageClass.
#[derive(Debug, Clone, Copy)]
pub struct Entries<'a>(&'a BTreeMap<String, Supported>);

impl Entries<'_> {
    /// Whether the runtime can mount the pod's volume if it has this StorageClass (empty for an
    /// inline volume).
    pub fn cover(self, spec: &PodSpec, storage_class: &str, volume: &str) -> bool {
        let supported = self.0.get(storage_class);
        supported
            .is_some_and(|supported| Needs::of(spec, volume).unsupported_by(supported).is_none())
    }

    /// Whether any entry is for claims and not only for inline volumes.
    pub fn have_classes(self) -> bool {
        self.0.keys().any(|class| !class.is_empty())
    }
}

/// What a pod needs from the component that mounts its volume.
#[derive(Debug, PartialEq, Eq)]
struct Needs {
    group: Option<GroupChangePolicy>,
    sub_path: bool,
    se_linux: bool,
    /// Mounts in the container propagate to the host.
    propagation: bool,
    user_namespace: bool,
}

impl Needs {
    fn of(spec: &PodSpec, volume: &str) -> Self {
        let context = spec.security_context.as_ref();
        let policy = context.and_then(|context| context.fs_group_change_policy.as_deref());
        let policy = match policy {
            Some("OnRootMismatch") => GroupChangePolicy::OnRootMismatch,
            // The default of Kubernetes.
            _ => GroupChangePolicy::Always,
        };
        let group = context.and_then(|context| context.fs_group).map(|_| policy);
        let (mut sub_path, mut propagation) = (false, false);
        let mut se_linux = context.is_some_and(|context| context.se_linux_options.is_some());
        for container in containers(spec) {
            let context = container.security_context.as_ref();
            se_linux |= context.is_some_and(|context| context.se_linux_options.is_some());
            for mount in &container.volume_mounts {
                // Of any volume: the runtime cannot determine which mounts would propagate through
                // it.
                propagation |= mount.mount_propagation.as_deref() == Some(BIDIRECTIONAL);
                sub_path |= mount.name == volume && volumes::is_part(mount);
            }
        }
        Self {
            group,
            sub_path,
            se_linux,
            propagation,
            user_namespace: spec.host_users == Some(false),
        }
    }

    /// Returns the first need that the pair does not support.
    fn unsupported_by(&self, supported: &Supported) -> Option<&'static str> {
        let Self { group, sub_path, se_linux, propagation, user_namespace } = *self;
        let needs_policy = |policy| group == Some(policy) && !supported.groups.contains(&policy);
        let missing = [
            (group.is_some() && supported.groups.is_empty(), "fsGroup"),
            (needs_policy(GroupChangePolicy::Always), "fsGroupChangePolicy Always"),
            (needs_policy(GroupChangePolicy::OnRootMismatch), "fsGroupChangePolicy OnRootMismatch"),
            (sub_path && !supported.sub_path, "subPath"),
            (se_linux && !supported.se_linux, "seLinuxOptions"),
            // No runtime supports these.
            (propagation, "mountPropagation Bidirectional"),
            (user_namespace, "hostUsers: false"),
        ];
        missing.into_iter().find(|(is_missing, _)| *is_missing).map(|(_, what)| what)
    }
}

/// All containers of the pod.
fn containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.containers.iter().chain(&spec.init_containers).chain(&spec.ephemeral_containers)
}

fn runtime_class(spec: &PodSpec) -> &str {
    spec.runtime_class_name.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const DRIVER: &str = "d.example";

    fn policy(entries: Value) -> Deferral {
        Deferral::read(serde_json::from_value(entries).unwrap()).unwrap()
    }

    fn full(storage_class: &str) -> Value {
        json!({
            "storageClass": storage_class, "runtimeClass": "microvm", "fsGroup": true,
            "fsGroupChangePolicies": ["Always", "OnRootMismatch"], "subPath": true, "seLinux": true,
        })
    }

    /// A pod of that RuntimeClass with a plain volume, changed by `change`.
    fn pod(change: &dyn Fn(&mut Value)) -> PodSpec {
        let mut spec = json!({
            "runtimeClassName": "microvm",
            "volumes": [
                { "name": "other", "emptyDir": {} },
                { "name": "v", "csi": { "driver": DRIVER, "volumeAttributes": { "size": "1Gi" } } },
            ],
            "containers": [{ "name": "c", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] }],
            "initContainers": [{ "name": "i", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] }],
        });
        change(&mut spec);
        serde_json::from_value(spec).unwrap()
    }

    fn is_deferred(policy: &Deferral, change: &dyn Fn(&mut Value)) -> bool {
        let spec = pod(change);
        policy.of_runtime(&spec).is_some_and(|entries| entries.cover(&spec, "", "v"))
    }

    type Change = &'static dyn Fn(&mut Value);

    /// Needs of a pod, and the keys of an entry that they require.
    const NEEDS: [(Change, &[&str]); 8] = [
        (
            &|pod| pod["securityContext"] = json!({ "fsGroup": 1 }),
            &["fsGroup", "fsGroupChangePolicies", "Always"],
        ),
        (
            &|pod| {
                pod["securityContext"] =
                    json!({ "fsGroup": 1, "fsGroupChangePolicy": "OnRootMismatch" });
            },
            &["fsGroup", "fsGroupChangePolicies", "OnRootMismatch"],
        ),
        (&|pod| pod["containers"][0]["volumeMounts"][0]["subPath"] = "a".into(), &["subPath"]),
        (
            &|pod| pod["initContainers"][0]["volumeMounts"][0]["subPathExpr"] = "$(A)".into(),
            &["subPath"],
        ),
        (
            &|pod| {
                let mount = json!({ "name": "v", "mountPath": "/v", "subPath": "a" });
                pod["ephemeralContainers"] = json!([{ "name": "e", "volumeMounts": [mount] }]);
            },
            &["subPath"],
        ),
        (
            &|pod| pod["securityContext"] = json!({ "seLinuxOptions": { "level": "s0" } }),
            &["seLinux"],
        ),
        (
            &|pod| {
                let context = json!({ "seLinuxOptions": { "level": "s0" } });
                pod["initContainers"][0]["securityContext"] = context;
            },
            &["seLinux"],
        ),
        (&|_| (), &[]),
    ];

    #[test]
    fn a_volume_is_deferred_if_its_entry_supports_all_needs() {
        let all = policy(json!([full("")]));
        for (need, keys) in NEEDS {
            assert!(is_deferred(&all, need), "{keys:?}");
            for without in [&["fsGroup", "fsGroupChangePolicies"][..], &["subPath"], &["seLinux"]] {
                let mut entry = full("");
                for key in without {
                    entry.as_object_mut().unwrap().remove(*key);
                }
                let is_needed = keys.iter().any(|key| without.contains(key));
                let deferred = is_deferred(&policy(json!([entry])), need);
                assert_eq!(deferred, !is_needed, "{keys:?} without {without:?}");
            }
            for one in ["Always", "OnRootMismatch"] {
                let mut entry = full("");
                entry["fsGroupChangePolicies"] = json!([one]);
                let is_needed = keys.contains(&"fsGroup") && !keys.contains(&one);
                let deferred = is_deferred(&policy(json!([entry])), need);
                assert_eq!(deferred, !is_needed, "{keys:?} with {one}");
            }
        }
    }

    #[test]
    fn needs_without_a_policy_field_prevent_deferral() {
        let all = policy(json!([full("")]));
        let shared: Change = &|pod| {
            pod["containers"][0]["volumeMounts"][0]["mountPropagation"] = "Bidirectional".into();
        };
        let users: Change = &|pod| pod["hostUsers"] = false.into();
        assert!(!is_deferred(&all, shared) && !is_deferred(&all, users));
        let seen: Change = &|pod| {
            pod["containers"][0]["volumeMounts"][0]["mountPropagation"] = "HostToContainer".into();
        };
        assert!(is_deferred(&all, seen));
    }

    #[test]
    fn a_volume_can_be_named_if_any_entry_supports_its_needs() {
        let mut plain = full("fast");
        plain.as_object_mut().unwrap().remove("subPath");
        let all = policy(json!([full(""), plain]));
        let problem =
            |policy: &Deferral, change: Change| policy.unsupported(&pod(change), &["v"].into());
        let part: Change =
            &|pod| pod["containers"][0]["volumeMounts"][0]["subPath"] = "part".into();
        assert_eq!(problem(&all, &|_| ()), None);
        assert_eq!(problem(&all, part), None);
        let mut without = full("");
        without["subPath"] = false.into();
        let missing = problem(&policy(json!([without])), part).unwrap();
        assert!(missing.contains("\"v\"") && missing.contains("subPath"), "{missing}");
        let users: Change = &|pod| pod["hostUsers"] = false.into();
        assert!(problem(&all, users).unwrap().contains("hostUsers"));
        let other: Change = &|pod| pod["runtimeClassName"] = "other".into();
        assert!(problem(&all, other).unwrap().contains("RuntimeClass other"));
        let none: Change = &|pod| drop(pod.as_object_mut().unwrap().remove("runtimeClassName"));
        assert!(problem(&all, none).unwrap().contains("runtimeClassName"));
    }
}
