//! Which volumes a container runtime mounts in the host's place (KEP-2857, "Setting DeferFSMount in PodSpec"): triples of storage
//! class, runtime class and what that pair does of what a pod needs of a mounted volume. The driver is that of the webhooks. Inline
//! volumes have no class and are entered under the empty one.
//!
//! Where no entry has all that a pod needs, its volume is not named, and the driver mounts it as usual.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{PodSpec, SecurityContext, VolumeMount};
use serde::Deserialize;

use super::volumes;
use crate::kubernetes::name;

const NO_RUNTIME: &str = "needs a runtime that mounts the volumes, and the pod has no runtimeClassName; set one, or leave the \
    annotation out";
/// What mounts can see of each other that the runtime refuses (oci-runtime).
const BIDIRECTIONAL: &str = "Bidirectional";

/// How files are given to a pod's group (PodSecurityContext.fsGroupChangePolicy).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
enum GroupChangePolicy {
    Always,
    OnRootMismatch,
}

/// One entry, as the policy has it. What it does not say the pair does not do.
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

/// What a storage class and a runtime class do together.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Supported {
    /// None: the group is not applied.
    groups: BTreeSet<GroupChangePolicy>,
    sub_path: bool,
    se_linux: bool,
}

/// All entries, checked: by runtime class, and there by storage class.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Deferral(BTreeMap<String, BTreeMap<String, Supported>>);

impl Deferral {
    /// # Errors
    /// An entry means nothing; which one and why.
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
            return Err("runtimeClass: is not the name of a RuntimeClass".to_owned());
        }
        if !storage_class.is_empty() && !name::is_object(&storage_class) {
            return Err(
                "storageClass: is not the name of a StorageClass; empty for inline volumes"
                    .to_owned(),
            );
        }
        if entry.fs_group == entry.fs_group_change_policies.is_empty() {
            return Err(
                "fsGroupChangePolicies: goes with fsGroup: true, and that with Always, OnRootMismatch or both"
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
            Some(_) => Err("storageClass: has an entry with this runtimeClass already".to_owned()),
        }
    }

    /// The entries of a runtime class; none where its pods are mounted by the driver as usual.
    pub fn of_runtime(&self, spec: &PodSpec) -> Option<Entries<'_>> {
        self.0.get(runtime_class(spec)).map(Entries)
    }

    /// Why a pod cannot have these volumes left to its runtime; None when it can. Their StorageClasses are not read: who names a
    /// volume knows its driver (the proposal's workload operator).
    pub fn lacks(&self, spec: &PodSpec, named: &BTreeSet<&str>) -> Option<String> {
        let runtime = runtime_class(spec);
        if runtime.is_empty() {
            return Some(NO_RUNTIME.to_owned());
        }
        let Some(entries) = self.0.get(runtime) else {
            return Some(format!(
                "the policy has no entry for the RuntimeClass {runtime}, which would leave the pod with the node's empty directory; \
                 add one (deferral), or use another RuntimeClass"
            ));
        };
        named.iter().find_map(|volume| {
            let needs = Needs::of(spec, volume);
            // One entry that has all of it is enough.
            let lacks = entries.values().map(|supported| needs.beyond(supported));
            let lack = lacks.reduce(Option::and).flatten()?;
            Some(format!(
                "{volume:?} needs {lack}, which the policy has in no entry for the RuntimeClass {runtime}; leave the volume out"
            ))
        })
    }
}

/// What one runtime class does, by storage class.
#[derive(Debug, Clone, Copy)]
pub struct Entries<'a>(&'a BTreeMap<String, Supported>);

impl Entries<'_> {
    /// Whether the pod's volume is left to its runtime if it is of this storage class (the empty one: inline).
    pub fn cover(self, spec: &PodSpec, storage_class: &str, volume: &str) -> bool {
        let supported = self.0.get(storage_class);
        supported.is_some_and(|supported| Needs::of(spec, volume).beyond(supported).is_none())
    }

    /// Whether claims of any class are left to the runtime, and not inline volumes only.
    pub fn have_classes(self) -> bool {
        self.0.keys().any(|class| !class.is_empty())
    }
}

/// What a pod wants of a volume that is mounted for it.
#[derive(Debug, PartialEq, Eq)]
struct Needs {
    group: Option<GroupChangePolicy>,
    sub_path: bool,
    se_linux: bool,
    /// That mounts in the container are seen on the host.
    propagation: bool,
    user_namespace: bool,
}

impl Needs {
    fn of(spec: &PodSpec, volume: &str) -> Self {
        let context = spec.security_context.as_ref();
        let policy = context.and_then(|context| context.fs_group_change_policy.as_deref());
        let policy = match policy {
            Some("OnRootMismatch") => GroupChangePolicy::OnRootMismatch,
            // So it is where nothing is said.
            _ => GroupChangePolicy::Always,
        };
        let group = context.and_then(|context| context.fs_group).map(|_| policy);
        let (mut sub_path, mut propagation) = (false, false);
        let mut se_linux = context.is_some_and(|context| context.se_linux_options.is_some());
        for (context, mounts) in containers(spec) {
            se_linux |= context.is_some_and(|context| context.se_linux_options.is_some());
            for mount in mounts.iter().flatten() {
                // Of whatever volume: the runtime cannot tell whose mounts come back by it.
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

    /// The first of them that the pair does not do.
    fn beyond(&self, supported: &Supported) -> Option<&'static str> {
        let Self { group, sub_path, se_linux, propagation, user_namespace } = *self;
        let needs_policy = |policy| group == Some(policy) && !supported.groups.contains(&policy);
        let lacks = [
            (group.is_some() && supported.groups.is_empty(), "fsGroup"),
            (needs_policy(GroupChangePolicy::Always), "fsGroupChangePolicy Always"),
            (needs_policy(GroupChangePolicy::OnRootMismatch), "fsGroupChangePolicy OnRootMismatch"),
            (sub_path && !supported.sub_path, "subPath"),
            (se_linux && !supported.se_linux, "seLinuxOptions"),
            // Of these no runtime says that it does them.
            (propagation, "mountPropagation Bidirectional"),
            (user_namespace, "hostUsers: false"),
        ];
        lacks.into_iter().find(|(is_lacking, _)| *is_lacking).map(|(_, what)| what)
    }
}

/// What containers of all kinds have in common.
fn containers(
    spec: &PodSpec,
) -> impl Iterator<Item = (Option<&SecurityContext>, &Option<Vec<VolumeMount>>)> {
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let ephemeral = ephemeral.map(|one| (one.security_context.as_ref(), &one.volume_mounts));
    let plain = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    plain.map(|one| (one.security_context.as_ref(), &one.volume_mounts)).chain(ephemeral)
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

    /// A pod of that runtime class with a plain volume, whose spec `change` changes.
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

    /// What a pod can need, and the keys of an entry without which it is not done.
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
    fn a_volume_is_deferred_where_the_entry_has_all_that_the_pod_needs() {
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
    fn no_runtime_does_what_cannot_be_entered() {
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
    fn a_pod_of_another_runtime_class_or_class_of_volumes_is_left_as_it_is() {
        let nothing: Change = &|_| ();
        assert!(!is_deferred(&Deferral::default(), nothing));
        assert!(!is_deferred(&policy(json!([full("fast")])), nothing));
        let all = policy(json!([full("")]));
        let other: Change = &|pod| pod["runtimeClassName"] = "other".into();
        let none: Change = &|pod| drop(pod.as_object_mut().unwrap().remove("runtimeClassName"));
        assert!(!is_deferred(&all, other) && !is_deferred(&all, none));
    }

    #[test]
    fn a_volume_is_named_where_an_entry_of_the_runtime_has_all_that_it_needs() {
        let mut plain = full("fast");
        plain.as_object_mut().unwrap().remove("subPath");
        let all = policy(json!([full(""), plain]));
        let lacks = |policy: &Deferral, change: Change| policy.lacks(&pod(change), &["v"].into());
        let part: Change =
            &|pod| pod["containers"][0]["volumeMounts"][0]["subPath"] = "part".into();
        assert_eq!(lacks(&all, &|_| ()), None);
        assert_eq!(lacks(&all, part), None);
        let mut without = full("");
        without["subPath"] = false.into();
        let lack = lacks(&policy(json!([without])), part).unwrap();
        assert!(lack.contains("\"v\"") && lack.contains("subPath"), "{lack}");
        let users: Change = &|pod| pod["hostUsers"] = false.into();
        assert!(lacks(&all, users).unwrap().contains("hostUsers"));
        let other: Change = &|pod| pod["runtimeClassName"] = "other".into();
        assert!(lacks(&all, other).unwrap().contains("RuntimeClass other"));
        let none: Change = &|pod| drop(pod.as_object_mut().unwrap().remove("runtimeClassName"));
        assert!(lacks(&all, none).unwrap().contains("runtimeClassName"));
    }
}
