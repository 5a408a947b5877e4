//! Which volumes a container runtime mounts in the host's place (KEP-2857, "Setting DeferFSMount in PodSpec"): triples of storage
//! class, runtime class and what that pair does of what a pod wants of a volume once it is mounted. Inline volumes have no class and
//! are entered under the empty one; of them the webhook says so in the pod. Pods whose volumes are deferred and whose runtime has no
//! entry for them are refused: nobody would mount the volume, and the pod would write to the node's disk.
//!
//! Where no entry has all that a pod needs, nothing is said, and the driver mounts as ever.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{PodSpec, SecurityContext, Volume as PodVolume, VolumeMount};
use serde::Deserialize;
use serde_json::json;

use super::volumes::{self, Volume};
use crate::inline::DEFER_FS_MOUNT;
use crate::kubernetes::admission::Set;
use crate::kubernetes::name;

const NO_RUNTIME: &str = "needs a runtime that mounts it, and the pod has no runtimeClassName";
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

    /// What of the pod has to be changed for its inline volumes to be left to its runtime: those of which it says nothing itself,
    /// and for which the runtime does all that it needs.
    pub fn mend(&self, spec: &PodSpec, driver: &str) -> Vec<Set> {
        let volumes = volumes::of(spec, driver);
        let unsaid = volumes.iter().filter(|volume| may_be_deferred(volume));
        let covered = unsaid.filter(|volume| self.lacks(spec, "", volume.name).is_none());
        covered.map(opt_in).collect()
    }

    /// Why a pod cannot have volumes left to its runtime at all; None when it may have some.
    pub fn lacks_runtime(&self, spec: Option<&PodSpec>) -> Option<String> {
        let runtime = spec.map(runtime_class).unwrap_or_default();
        match runtime {
            "" => Some(NO_RUNTIME.to_owned()),
            known if self.0.contains_key(known) => None,
            _ => Some(format!(
                "the policy has no entry for the RuntimeClass {runtime}, which would leave the pod with the node's empty directory; \
                 add one (deferral), or use another RuntimeClass"
            )),
        }
    }

    /// What would have a pod write to the node's disk: volumes that nobody would mount, of its inline volumes and of the claims that it
    /// makes for itself.
    pub fn problems(&self, spec: &PodSpec, driver: &str) -> Vec<String> {
        let inline = volumes::of(spec, driver).into_iter().filter_map(|volume| {
            let opted_in = volume.attributes.as_ref().is_ok_and(|said| said.has_opted_in());
            let lack = opted_in.then(|| self.lacks(spec, "", volume.name)).flatten()?;
            Some(format!("{}: {lack}", volume.attribute(DEFER_FS_MOUNT)))
        });
        let claims = spec.volumes.iter().flatten().enumerate().filter_map(|(index, volume)| {
            let class = class_of_claim(volume).filter(|class| self.is_of_interest(class))?;
            let lack = self.lacks(spec, class, &volume.name)?;
            Some(format!(
                "spec.volumes[{index}].ephemeral.volumeClaimTemplate.spec.storageClassName: {lack}"
            ))
        });
        inline.chain(claims).collect()
    }

    /// Whether claims of the class are deferred for somebody: what the policy does not name is other drivers' or mounted as ever.
    fn is_of_interest(&self, storage_class: &str) -> bool {
        self.0.values().any(|of_runtime| of_runtime.contains_key(storage_class))
    }

    /// Why a volume of the class (the empty one: inline) is not to be left to the pod's runtime; None when it may be.
    fn lacks(&self, spec: &PodSpec, storage_class: &str, volume: &str) -> Option<String> {
        let runtime = runtime_class(spec);
        if runtime.is_empty() {
            return Some(NO_RUNTIME.to_owned());
        }
        let entry = self.0.get(runtime).and_then(|of_runtime| of_runtime.get(storage_class));
        let Some(supported) = entry else {
            return Some(format!(
                "the policy has no entry that leaves it to the RuntimeClass {runtime}"
            ));
        };
        let needs = Needs::of(spec, volume);
        let lack = needs.beyond(supported)?;
        Some(format!("the RuntimeClass {runtime} does not do {lack}, which the pod asks for"))
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

/// The class of the claim that is made for the pod (a generic ephemeral volume), where it names one.
fn class_of_claim(volume: &PodVolume) -> Option<&str> {
    let template = volume.ephemeral.as_ref()?.volume_claim_template.as_ref()?;
    template.spec.storage_class_name.as_deref().filter(|class| !class.is_empty())
}

/// Whether the pod leaves it open who mounts the volume, and anybody may: not what the driver has to fill.
fn may_be_deferred(volume: &Volume<'_>) -> bool {
    let Ok(said) = &volume.attributes else { return false };
    let read_only = volume.source.read_only == Some(true);
    said.defer_fs_mount.is_none()
        && said.check_deferred(volume.has_secret()).is_ok()
        && !said.is_published_as_content(volume.has_secret(), read_only)
}

fn opt_in(volume: &Volume<'_>) -> Set {
    let (index, value) = (volume.index.to_string(), "true");
    let attributes = ["spec", "volumes", &index, "csi", "volumeAttributes"];
    // What holds the field has to be there.
    match volume.source.volume_attributes.as_ref().is_some_and(|said| !said.is_empty()) {
        true => Set::new(attributes.into_iter().chain([DEFER_FS_MOUNT]), value),
        false => Set::new(attributes, json!({ DEFER_FS_MOUNT: value })),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

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
        let changes = policy.mend(&pod(change), DRIVER);
        let changes = serde_json::to_value(changes).unwrap();
        let expected = json!([{
            "op": "add", "path": "/spec/volumes/1/csi/volumeAttributes/deferFSMount", "value": "true",
        }]);
        assert!(changes == expected || changes == json!([]), "{changes}");
        changes == expected
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
    fn what_the_pod_says_itself_and_what_cannot_be_deferred_are_left() {
        let all = policy(json!([full("")]));
        let changes: [Change; 9] = [
            &|csi| csi["volumeAttributes"]["deferFSMount"] = "true".into(),
            &|csi| csi["volumeAttributes"]["deferFSMount"] = "false".into(),
            &|csi| csi["volumeAttributes"]["deferFSMount"] = "nonsense".into(),
            &|csi| csi["volumeAttributes"]["content/a"] = "x".into(),
            &|csi| csi["volumeAttributes"]["readOnlyContent"] = "true".into(),
            &|csi| csi["nodePublishSecretRef"] = json!({ "name": "s" }),
            // Which makes a volume of content of it, whose secret may come later.
            &|csi| csi["readOnly"] = true.into(),
            &|csi| csi["driver"] = "o.example".into(),
            &|csi| csi["volumeAttributes"]["sise"] = "1Gi".into(),
        ];
        for change in changes {
            let changed = pod(&|spec| change(&mut spec["volumes"][1]["csi"]));
            assert!(all.mend(&changed, DRIVER).is_empty(), "{:?}", changed.volumes);
        }
    }

    #[test]
    fn a_volume_without_attributes_gets_them() {
        let bare = pod(&|spec| spec["volumes"][1]["csi"] = json!({ "driver": DRIVER }));
        let changes = policy(json!([full("")])).mend(&bare, DRIVER);
        let expected = json!([{
            "op": "add", "path": "/spec/volumes/1/csi/volumeAttributes",
            "value": { "deferFSMount": "true" },
        }]);
        assert_eq!(serde_json::to_value(changes).unwrap(), expected);
    }

    #[test]
    fn what_does_not_go_with_the_runtime_is_a_problem() {
        let asked = |change: &dyn Fn(&mut Value)| {
            pod(&|spec| {
                spec["volumes"][1]["csi"]["volumeAttributes"]["deferFSMount"] = "true".into();
                change(spec);
            })
        };
        let all = policy(json!([full(""), full("fast")]));
        assert!(all.problems(&asked(&|_| ()), DRIVER).is_empty());
        let bare = asked(&|spec| drop(spec.as_object_mut().unwrap().remove("runtimeClassName")));
        for policy in [&all, &Deferral::default()] {
            let told = policy.problems(&bare, DRIVER);
            assert_eq!(told.len(), 1);
            assert!(told[0].starts_with("spec.volumes[1].csi.volumeAttributes[deferFSMount]: "));
            assert!(told[0].contains("runtimeClassName"), "{told:?}");
        }
        let users = asked(&|spec| spec["hostUsers"] = false.into());
        assert!(all.problems(&users, DRIVER)[0].contains("hostUsers"));
        let claim = |class: &str| {
            json!({ "name": "claim", "ephemeral": { "volumeClaimTemplate": { "spec": {
                "accessModes": ["ReadWriteOncePod"], "resources": {}, "storageClassName": class,
            } } } })
        };
        let of = |class: &str, runtime: &str| {
            let spec = pod(&|spec| {
                spec["volumes"][0] = claim(class);
                spec["runtimeClassName"] = runtime.into();
            });
            all.problems(&spec, DRIVER)
        };
        assert!(of("fast", "microvm").is_empty());
        // Of a class that nobody defers there is nothing to say.
        assert!(of("slow", "microvm").is_empty() && of("slow", "other").is_empty());
        let told = of("fast", "other");
        let field = "spec.volumes[0].ephemeral.volumeClaimTemplate.spec.storageClassName: ";
        assert!(told.len() == 1 && told[0].starts_with(field), "{told:?}");
        assert!(told[0].contains("RuntimeClass other"), "{told:?}");
    }
}
