//! A pod's own volume (KEP-596) in CSI's Node service: attributes, secrets and flags of the request, in the backend's types.
//!
//! What is wrong with a request is told before what this node does not do: a switched-off driver says so of requests alone
//! that it would serve otherwise. A staging path is not looked at. CSI wants one of every caller that knows nothing of inline
//! volumes; kubelet, which does, sends none.

use std::collections::{BTreeMap, HashMap};

use tonic::Status;

use super::{Plugin, deferral, request};
use crate::backend::{Access, Content, Error, InlineRequest, PublishInline};
use crate::backend::{Capability, Result as Checked};
use crate::grpc::cut;
use crate::inline::{self, Attributes};
use crate::proto::csi::v1 as csi;

/// Bytes of a secret's key that an error repeats.
const MAX_SHOWN: usize = 128;

/// NodePublishVolume.
pub fn publish(
    plugin: &Plugin,
    asked: csi::NodePublishVolumeRequest,
) -> Result<csi::NodePublishVolumeResponse, Status> {
    let handle = request::id("volume_id", &asked.volume_id)?;
    let target = request::path("target_path", &asked.target_path)?;
    request::keys("publish_context", &asked.publish_context, &[])?;
    let (request, content) = wanted(&asked)?;
    // Existing volumes are served whatever the flag says.
    if !plugin.new_inline_volumes && plugin.backend.inline(handle)?.is_none() {
        return Err(Error::Precondition(
            "volume_context: inline volumes are switched off on this node (--inline=false); use a PersistentVolumeClaim"
                .to_owned(),
        )
        .into());
    }
    let publish = PublishInline { handle, target: &target, request: &request, content: &content };
    plugin.deferrals.publish(&plugin.backend, &asked, request.deferred, || {
        plugin.backend.publish_inline(&publish)
    })?;
    Ok(csi::NodePublishVolumeResponse {})
}

/// That the volume may grow: an inline one keeps the size that its pod asks for.
pub fn refuse_to_grow(plugin: &Plugin, id: &str) -> Checked<()> {
    match plugin.backend.inline(id)? {
        None => Ok(()),
        Some(_) => Err(Error::Precondition(format!(
            "volume_id: {id:?} is an inline volume, which keeps its size; make a pod that asks for a larger one"
        ))),
    }
}

/// What the request asks for, and the files that go into it.
pub fn wanted(asked: &csi::NodePublishVolumeRequest) -> Checked<(InlineRequest, Content)> {
    let capability = mount(asked.volume_capability.as_ref())?;
    let own = asked.volume_context.iter().filter(|(key, _)| !request::is_kubernetes_key(key));
    let attributes = Attributes::read(own.map(|(key, value)| (key.as_str(), value.as_str())))
        .map_err(|problem| Error::invalid("volume_context", problem.to_string()))?;
    let has_secret = !asked.secrets.is_empty();
    let deferred = deferral::of_publish(asked, &capability, deferral::Volume::Inline)?;
    let read_only_content = match deferred {
        None => attributes.is_published_as_content(has_secret, asked.readonly),
        Some(_) => {
            attributes
                .check_deferred(has_secret)
                .map_err(|reason| Error::invalid("defer_fs_ops", reason))?;
            false
        }
    };
    let in_memory = attributes.is_in_memory(has_secret, read_only_content);
    check_writes(asked.readonly, &capability, read_only_content, in_memory)?;
    let request = InlineRequest {
        size_bytes: attributes.size,
        capability,
        readonly: asked.readonly,
        in_memory,
        read_only_content,
        deferred,
    };
    Ok((request, content(attributes.content, &asked.secrets)?))
}

fn mount(capability: Option<&csi::VolumeCapability>) -> Checked<Capability> {
    let capability = request::capability("volume_capability", capability)?;
    match capability.access {
        Access::Mount { .. } => Ok(capability),
        Access::Block => Err(Error::invalid(
            "volume_capability",
            "an inline volume is mounted; it cannot be a block device",
        )),
    }
}

/// Who may write. To a content volume the driver does, and so nobody else (KEP-596, "Read-only volumes"): not every
/// cluster has the webhook that sets the flag.
fn check_writes(
    readonly: bool,
    capability: &Capability,
    read_only_content: bool,
    in_memory: bool,
) -> Checked<()> {
    if read_only_content && !readonly {
        return Err(Error::invalid(
            "readonly",
            "has to be set for a volume of read-only content: set volumes[].csi.readOnly, or let the admission webhook do it",
        ));
    }
    if read_only_content && capability.is_read_only() {
        return Err(Error::invalid(
            "volume_capability",
            "the driver writes to a volume of read-only content; leave the flag ro out, and use a mode that writes",
        ));
    }
    let writes = !readonly && !capability.is_read_only();
    if in_memory && !read_only_content && !writes {
        return Err(Error::invalid(
            "readonly",
            "a volume in memory, and one that files are put into, has to be writable; leave readOnlyContent out, or readOnly",
        ));
    }
    Ok(())
}

/// The files that attributes and secrets make together.
fn content(
    attributes: BTreeMap<String, String>,
    secrets: &HashMap<String, String>,
) -> Checked<Content> {
    let refused = |reason: String| Error::invalid("secrets", reason);
    let mut files: BTreeMap<String, Vec<u8>> =
        attributes.into_iter().map(|(name, value)| (name, value.into_bytes())).collect();
    // In order, so that the answer is the same each time.
    for (name, value) in secrets.iter().collect::<BTreeMap<_, _>>() {
        let shown = || cut(name, MAX_SHOWN);
        inline::check_file_name(name)
            .map_err(|reason| refused(format!("key {:?}: {reason}", shown())))?;
        if files.insert(name.clone(), value.clone().into_bytes()).is_some() {
            return Err(refused(format!(
                "key {:?} is also the name of a content/… attribute; rename one of them",
                shown()
            )));
        }
    }
    inline::check_amount(files.iter().map(|(name, value)| (name.as_str(), value.len())))
        .map_err(refused)?;
    Ok(Content::new(files))
}

#[cfg(test)]
#[path = "inline_tests.rs"]
mod tests;
