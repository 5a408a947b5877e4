//! The inline volumes of one driver in a pod, and where they are mounted.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{CSIVolumeSource, Pod, PodSpec, Volume as PodVolume, VolumeMount};
use kube::core::admission::{AdmissionRequest, Operation};

use crate::inline::{Attributes, Problem};
use crate::kubernetes::admission::Refusal;
use crate::kubernetes::name;

/// A pod's own volume.
#[derive(Debug)]
pub struct Volume<'a> {
    /// In `spec.volumes`.
    pub index: usize,
    pub name: &'a str,
    pub source: &'a CSIVolumeSource,
    pub attributes: Result<Attributes, Problem>,
}

/// Where a container has a volume.
#[derive(Debug)]
pub struct Mount<'a> {
    /// Field of the spec that lists the container.
    pub list: &'static str,
    /// In that list.
    pub container: usize,
    /// In its `volumeMounts`.
    pub index: usize,
    pub mount: &'a VolumeMount,
}

/// What of a pod is asked about.
#[derive(Debug, PartialEq, Eq)]
pub enum Asked {
    /// A pod that begins.
    Whole,
    /// Ephemeral containers, without those that the pod had before, which nobody can change. All else was judged when it began.
    NewContainers {
        had: BTreeSet<String>,
    },
    Nothing,
}

impl Asked {
    pub fn by(request: &AdmissionRequest<Pod>) -> Self {
        match (&request.operation, request.sub_resource.as_deref().unwrap_or_default()) {
            (Operation::Create, "") => Self::Whole,
            (Operation::Update, "ephemeralcontainers") => {
                let old = request.old_object.as_ref().and_then(|pod| pod.spec.as_ref());
                let had = old.and_then(|spec| spec.ephemeral_containers.as_ref());
                let had = had.into_iter().flatten().map(|container| container.name.clone());
                Self::NewContainers { had: had.collect() }
            }
            _ => Self::Nothing,
        }
    }
}

impl Volume<'_> {
    /// Whether only the driver may write to it. One whose attributes mean nothing is refused in any case.
    pub fn is_content(&self) -> bool {
        let attributes = self.attributes.as_ref();
        attributes.is_ok_and(|attributes| attributes.is_read_only_content(self.has_secret()))
    }

    pub fn has_secret(&self) -> bool {
        has_secret(self.source)
    }

    /// The field, for people.
    pub fn field(&self, name: &str) -> String {
        format!("spec.volumes[{}].csi.{name}", self.index)
    }

    /// One of its attributes, for people: who wrote the pod chose the key.
    pub fn attribute(&self, key: &str) -> String {
        self.field(&format!("volumeAttributes[{}]", key.escape_debug()))
    }
}

impl Mount<'_> {
    /// The mount or a field of it, for people.
    pub fn field(&self, name: &str) -> String {
        let Self { list, container, index, .. } = self;
        format!("spec.{list}[{container}].volumeMounts[{index}].{name}")
    }

    pub fn is_read_only(&self) -> bool {
        self.mount.read_only == Some(true)
    }

    /// Such a part is not exchanged when the content is.
    pub fn is_part(&self) -> bool {
        is_part(self.mount)
    }
}

/// The volumes of the driver.
pub fn of<'a>(spec: &'a PodSpec, driver: &str) -> Vec<Volume<'a>> {
    let all = spec.volumes.iter().flatten().enumerate();
    let own = all.filter(|(_, volume)| is_of(volume, driver));
    own.filter_map(|(index, volume)| Some((index, volume, volume.csi.as_ref()?)))
        .map(|(index, volume, source)| Volume {
            index,
            name: &volume.name,
            source,
            attributes: attributes(source),
        })
        .collect()
}

/// A pod says none of the keys that kubelet adds.
fn attributes(source: &CSIVolumeSource) -> Result<Attributes, Problem> {
    let said = source.volume_attributes.iter().flatten();
    Attributes::read(said.map(|(key, value)| (key.as_str(), value.as_str())))
}

/// Whether it is an inline volume of the driver.
pub fn is_of(volume: &PodVolume, driver: &str) -> bool {
    volume.csi.as_ref().is_some_and(|source| source.driver == driver)
}

/// Whether a container runtime can mount the inline volume: the driver does not have to write to it. One whose attributes mean
/// nothing is refused in any case.
pub fn may_be_deferred(volume: &PodVolume) -> bool {
    let Some(source) = &volume.csi else { return false };
    let (has_secret, read_only) = (has_secret(source), source.read_only == Some(true));
    attributes(source).is_ok_and(|said| {
        said.check_deferred(has_secret).is_ok()
            && !said.is_published_as_content(has_secret, read_only)
    })
}

/// The namespace of a review.
pub fn namespace(said: Option<&str>) -> Result<&str, Refusal> {
    let found = said.filter(|name| name::is_namespace(name));
    found.ok_or_else(|| Refusal::invalid("metadata.namespace: is missing or no name"))
}

fn has_secret(source: &CSIVolumeSource) -> bool {
    source.node_publish_secret_ref.is_some()
}

/// Whether a mount shows a part of its volume (subPath).
pub fn is_part(mount: &VolumeMount) -> bool {
    let some = |path: &Option<String>| path.as_ref().is_some_and(|path| !path.is_empty());
    some(&mount.sub_path) || some(&mount.sub_path_expr)
}

/// Every mount of one of the volumes that is asked about.
pub fn mounts<'a>(spec: &'a PodSpec, asked: &Asked, volumes: &[&Volume<'_>]) -> Vec<Mount<'a>> {
    let names: BTreeSet<&str> = volumes.iter().map(|volume| volume.name).collect();
    let is_new = |name: &str| match asked {
        Asked::Whole => true,
        Asked::NewContainers { had } => !had.contains(name),
        Asked::Nothing => false,
    };
    let mut found = Vec::new();
    let mut add = |list, container, mounts: &'a Option<Vec<VolumeMount>>| {
        let mounts = mounts.iter().flatten().enumerate();
        let ours = mounts.filter(|(_, mount)| names.contains(mount.name.as_str()));
        found.extend(ours.map(|(index, mount)| Mount { list, container, index, mount }));
    };
    if *asked == Asked::Whole {
        for (index, container) in spec.containers.iter().enumerate() {
            add("containers", index, &container.volume_mounts);
        }
        for (index, container) in spec.init_containers.iter().flatten().enumerate() {
            add("initContainers", index, &container.volume_mounts);
        }
    }
    for (index, container) in spec.ephemeral_containers.iter().flatten().enumerate() {
        if is_new(&container.name) {
            add("ephemeralContainers", index, &container.volume_mounts);
        }
    }
    found
}
