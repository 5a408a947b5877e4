//! Finds the inline volumes of one driver in a pod, and their mounts.

use std::collections::BTreeSet;

use kube::core::admission::Operation;

use common::inline::{Attributes, Problem};
use kubernetes::admission::{Refusal, ReviewRequest};
use kubernetes::name;
use kubernetes::pod::{InlineSource, Pod, PodSpec, Volume as PodVolume, VolumeMount};

/// An inline volume.
#[derive(Debug)]
pub struct Volume<'a> {
    /// Index in `spec.volumes`.
    pub index: usize,
    pub name: &'a str,
    pub source: &'a InlineSource,
    pub attributes: Result<Attributes, Problem>,
}

/// A mount of a volume in a container.
#[derive(Debug)]
pub struct Mount<'a> {
    /// Field of the pod spec that lists the container.
    pub list: &'static str,
    /// Index in that list.
    pub container: usize,
    /// Index in the container's `volumeMounts`.
    pub index: usize,
    pub mount: &'a VolumeMount,
}

/// The part of a pod that a review covers.
#[derive(Debug, PartialEq, Eq)]
pub enum Scope {
    /// A new pod.
    Pod,
    /// New ephemeral containers. `existing` names those that the pod already has, which cannot
    /// change. Everything else was validated when the pod was created.
    NewContainers {
        existing: BTreeSet<String>,
    },
    Nothing,
}

impl Scope {
    pub fn of(request: &ReviewRequest<Pod>) -> Self {
        match (&request.operation, request.sub_resource.as_deref().unwrap_or_default()) {
            (Operation::Create, "") => Self::Pod,
            (Operation::Update, "ephemeralcontainers") => {
                let old = request.old_object.as_ref().and_then(|pod| pod.spec.as_ref());
                let existing = old.into_iter().flat_map(|spec| &spec.ephemeral_containers);
                let existing = existing.map(|container| container.name.clone());
                Self::NewContainers { existing: existing.collect() }
            }
            _ => Self::Nothing,
        }
    }
}

impl Volume<'_> {
    /// Whether only the driver writes to the volume. A volume with invalid attributes is rejected
    /// elsewhere.
    pub fn is_content(&self) -> bool {
        let attributes = self.attributes.as_ref();
        attributes.is_ok_and(|attributes| attributes.is_read_only_content(self.has_secret()))
    }

    pub fn has_secret(&self) -> bool {
        has_secret(self.source)
    }

    /// Path of a field of the volume, for messages.
    pub fn field(&self, name: &str) -> String {
        format!("spec.volumes[{}].csi.{name}", self.index)
    }

    /// Path of an attribute, for messages. The key is escaped: the pod's author chose it.
    pub fn attribute(&self, key: &str) -> String {
        self.field(&format!("volumeAttributes[{}]", key.escape_debug()))
    }
}

impl Mount<'_> {
    /// Path of a field of the mount, for messages.
    pub fn field(&self, name: &str) -> String {
        let Self { list, container, index, .. } = self;
        format!("spec.{list}[{container}].volumeMounts[{index}].{name}")
    }

    pub fn is_read_only(&self) -> bool {
        self.mount.read_only == Some(true)
    }

    /// Whether the mount has a subPath, which is not updated when the content changes.
    pub fn is_part(&self) -> bool {
        is_part(self.mount)
    }
}

/// The inline volumes of the driver.
pub fn of<'a>(spec: &'a PodSpec, driver: &str) -> Vec<Volume<'a>> {
    let all = spec.volumes.iter().enumerate();
    let own = all.filter(|(_, volume)| is_of(volume, driver));
    own.filter_map(|(index, volume)| Some((index, volume, volume.csi.as_deref()?)))
        .map(|(index, volume, source)| Volume {
            index,
            name: &volume.name,
            source,
            attributes: attributes(source),
        })
        .collect()
}

/// The pod's attributes, without those that kubelet adds.
fn attributes(source: &InlineSource) -> Result<Attributes, Problem> {
    let given = source.volume_attributes.iter();
    Attributes::parse(given.map(|(key, value)| (key.as_str(), value.as_str())))
}

/// Whether the volume is an inline volume of the driver.
pub fn is_of(volume: &PodVolume, driver: &str) -> bool {
    volume.csi.as_ref().is_some_and(|source| source.driver == driver)
}

/// Whether a container runtime can mount the inline volume, because the driver does not write to
/// it. A volume with invalid attributes is rejected elsewhere.
pub fn may_be_deferred(volume: &PodVolume) -> bool {
    let Some(source) = &volume.csi else { return false };
    let (has_secret, read_only) = (has_secret(source), source.read_only == Some(true));
    attributes(source).is_ok_and(|attributes| {
        attributes.check_deferred(has_secret).is_ok()
            && !attributes.is_published_as_content(has_secret, read_only)
    })
}

/// The namespace of a review, validated.
pub fn namespace(name: Option<&str>) -> Result<&str, Refusal> {
    let found = name.filter(|name| name::is_namespace(name));
    found.ok_or_else(|| Refusal::invalid("metadata.namespace: is missing or not a valid name"))
}

fn has_secret(source: &InlineSource) -> bool {
    source.node_publish_secret_ref.is_some()
}

/// Whether a mount has a subPath.
pub fn is_part(mount: &VolumeMount) -> bool {
    let some = |path: &Option<String>| path.as_ref().is_some_and(|path| !path.is_empty());
    some(&mount.sub_path) || some(&mount.sub_path_expr)
}

/// The mounts of the given volumes within the scope of the review.
pub fn mounts<'a>(spec: &'a PodSpec, scope: &Scope, volumes: &[&Volume<'_>]) -> Vec<Mount<'a>> {
    let names: BTreeSet<&str> = volumes.iter().map(|volume| volume.name).collect();
    let is_new = |name: &str| match scope {
        Scope::Pod => true,
        Scope::NewContainers { existing } => !existing.contains(name),
        Scope::Nothing => false,
    };
    let mut found = Vec::new();
    let mut add = |list, container, mounts: &'a [VolumeMount]| {
        let mounts = mounts.iter().enumerate();
        let ours = mounts.filter(|(_, mount)| names.contains(mount.name.as_str()));
        found.extend(ours.map(|(index, mount)| Mount { list, container, index, mount }));
    };
    if *scope == Scope::Pod {
        for (index, container) in spec.containers.iter().enumerate() {
            add("containers", index, &container.volume_mounts);
        }
        for (index, container) in spec.init_containers.iter().enumerate() {
            add("initContainers", index, &container.volume_mounts);
        }
    }
    for (index, container) in spec.ephemeral_containers.iter().enumerate() {
        if is_new(&container.name) {
            add("ephemeralContainers", index, &container.volume_mounts);
        }
    }
    found
}
