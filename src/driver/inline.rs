//! Inline volumes (KEP-596) in CSI's Node service: converts attributes, secrets and flags of a
//! request to the backend's types.
//!
//! An invalid request is reported before a disabled feature, so that a disabled driver reports this
//! only for requests that it would otherwise serve. The staging path is ignored: CSI requires one
//! from callers that do not know inline volumes, but kubelet sends none.

use std::collections::{BTreeMap, HashMap};

use super::{Plugin, deferral, request};
use crate::status::Answer;
use common::inline::{self, Attributes};
use common::text::truncate;
use grpc::proto::csi::v1 as csi;
use storage::{Access, Content, Error, InlineRequest, PublishInline, SectorSize};
use storage::{Capability, Result as Checked};

/// Maximum bytes of a secret's key in an error.
const MAX_SHOWN: usize = 128;

/// NodePublishVolume.
pub fn publish(
    plugin: &Plugin,
    req: csi::NodePublishVolumeRequest,
) -> Answer<csi::NodePublishVolumeResponse> {
    let handle = request::id("volume_id", &req.volume_id)?;
    let target = plugin.node_path("target_path", &req.target_path)?;
    request::keys("publish_context", &req.publish_context, &[])?;
    let (request, content) = inline_request(&req)?;
    // Existing volumes are served regardless of the flag.
    if !plugin.new_inline_volumes && plugin.backend.inline(handle)?.is_none() {
        return Err(Error::Precondition(
            "volume_context: inline volumes are disabled on this node (--inline=false); use a PersistentVolumeClaim"
                .to_owned(),
        )
        .into());
    }
    let publish = PublishInline { handle, target: &target, request: &request, content: &content };
    plugin.deferrals.publish(&plugin.backend, &req, request.deferred, || {
        plugin.backend.publish_inline(&publish)
    })?;
    Ok(csi::NodePublishVolumeResponse {})
}

/// Refuses to expand an inline volume, which keeps its size.
pub fn refuse_expansion(plugin: &Plugin, id: &str) -> Checked<()> {
    match plugin.backend.inline(id)? {
        None => Ok(()),
        Some(_) => Err(Error::Precondition(format!(
            "volume_id: {id:?} is an inline volume, which cannot be expanded; create a pod with a larger size"
        ))),
    }
}

/// The requested volume, and the files of its content.
pub fn inline_request(req: &csi::NodePublishVolumeRequest) -> Checked<(InlineRequest, Content)> {
    let capability = mount(req.volume_capability.as_ref())?;
    let own = req.volume_context.iter().filter(|(key, _)| !request::is_kubernetes_key(key));
    let attributes = Attributes::parse(own.map(|(key, value)| (key.as_str(), value.as_str())))
        .map_err(|problem| Error::invalid("volume_context", problem.to_string()))?;
    let has_secret = !req.secrets.is_empty();
    let deferred = deferral::from_publish(req, &capability, deferral::Volume::Inline)?;
    let read_only_content = match deferred {
        None => attributes.is_published_as_content(has_secret, req.readonly),
        Some(_) => {
            attributes
                .check_deferred(has_secret)
                .map_err(|reason| Error::invalid("defer_fs_ops", reason))?;
            false
        }
    };
    let in_memory = attributes.is_in_memory(has_secret, read_only_content);
    check_writes(req.readonly, &capability, read_only_content, in_memory)?;
    let sector_size = sector_size(&attributes, in_memory)?;
    let request = InlineRequest {
        size_bytes: attributes.size,
        capability,
        readonly: req.readonly,
        in_memory,
        read_only_content,
        sector_size,
        deferred,
    };
    Ok((request, content(attributes.content, &req.secrets)?))
}

fn sector_size(attributes: &Attributes, in_memory: bool) -> Checked<SectorSize> {
    let invalid = |reason: &str| {
        Error::invalid("volume_context", format!("{}: {reason}", inline::SECTOR_SIZE))
    };
    match attributes.sector_size {
        Some(_) if in_memory => Err(invalid("a volume in memory has no sectors; omit it")),
        Some(bytes) => SectorSize::try_from(bytes).map_err(invalid),
        None => Ok(SectorSize::default()),
    }
}

fn mount(capability: Option<&csi::VolumeCapability>) -> Checked<Capability> {
    let capability = request::capability("volume_capability", capability)?;
    match capability.access {
        Access::Mount { .. } => Ok(capability),
        Access::Block => Err(Error::invalid(
            "volume_capability",
            "an inline volume cannot be a raw block device; use a mount capability",
        )),
    }
}

/// Checks who may write. Only the driver writes to a content volume (KEP-596, "Read-only volumes").
/// Not every cluster has the webhook that sets the flag.
fn check_writes(
    readonly: bool,
    capability: &Capability,
    read_only_content: bool,
    in_memory: bool,
) -> Checked<()> {
    if read_only_content && !readonly {
        return Err(Error::invalid(
            "readonly",
            "must be true for read-only content; set volumes[].csi.readOnly, or install the admission webhook",
        ));
    }
    if read_only_content && capability.is_read_only() {
        return Err(Error::invalid(
            "volume_capability",
            "the driver writes the content; omit the mount flag ro, and use a writable access mode",
        ));
    }
    let writes = !readonly && !capability.is_read_only();
    if in_memory && !read_only_content && !writes {
        return Err(Error::invalid(
            "readonly",
            "a volume in memory or with files must be writable; omit readOnlyContent or readOnly",
        ));
    }
    Ok(())
}

/// The files of the attributes and secrets.
fn content(
    attributes: BTreeMap<String, String>,
    secrets: &HashMap<String, String>,
) -> Checked<Content> {
    let refused = |reason: String| Error::invalid("secrets", reason);
    let mut files: BTreeMap<String, Vec<u8>> =
        attributes.into_iter().map(|(name, value)| (name, value.into_bytes())).collect();
    // In order, so that the error is deterministic.
    for (name, value) in secrets.iter().collect::<BTreeMap<_, _>>() {
        let shown = || truncate(name, MAX_SHOWN);
        inline::check_file_name(name)
            .map_err(|reason| refused(format!("key {:?}: {reason}", shown())))?;
        if files.insert(name.clone(), value.clone().into_bytes()).is_some() {
            return Err(refused(format!(
                "key {:?} is also the name of a content/… attribute; rename one of them",
                shown()
            )));
        }
    }
    inline::check_content_limits(files.iter().map(|(name, value)| (name.as_str(), value.len())))
        .map_err(refused)?;
    Ok(Content::new(files))
}

#[cfg(test)]
#[path = "inline_tests.rs"]
mod tests;
