//! NodePublishVolume of a pod's own volume (KEP-596): attributes, secrets and flags of the request, in the backend's types.

use std::collections::{BTreeMap, HashMap};

use tonic::Status;

use super::{Plugin, request};
use crate::backend::{Access, Content, Error, InlineRequest, PublishInline, Result as Checked};
use crate::inline::{self, Attributes, Medium};
use crate::proto::csi::v1 as csi;

/// Which inline volumes are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// New ones at all (`--inline`).
    pub new: bool,
    /// From snapshots (`--inline-from-snapshot`).
    pub from_snapshot: bool,
}

pub fn publish(
    plugin: &Plugin,
    asked: csi::NodePublishVolumeRequest,
) -> Result<csi::NodePublishVolumeResponse, Status> {
    let handle = request::id("volume_id", &asked.volume_id)?;
    let target = request::path("target_path", &asked.target_path)?;
    request::keys("publish_context", &asked.publish_context, &[])?;
    if !plugin.inline.new && plugin.backend.inline(handle)?.is_none() {
        let off = "volume_context: inline volumes are switched off on this node (--inline=false); use a PersistentVolumeClaim";
        return Err(Error::Precondition(off.to_owned()).into());
    }
    let attributes = attributes(&asked.volume_context)?;
    let wanted = wanted(&plugin.inline, &asked, &attributes)?;
    let content = content(attributes.content, asked.secrets)?;
    let publish = PublishInline { handle, target: &target, request: &wanted, content: &content };
    plugin.backend.publish_inline(&publish)?;
    Ok(csi::NodePublishVolumeResponse {})
}

fn attributes(context: &HashMap<String, String>) -> Checked<Attributes> {
    let own = context.iter().filter(|(key, _)| !request::is_kubernetes_key(key));
    Attributes::read(own.map(|(key, value)| (key.as_str(), value.as_str())))
        .map_err(|problem| Error::invalid("volume_context", problem.to_string()))
}

fn wanted(
    policy: &Policy,
    asked: &csi::NodePublishVolumeRequest,
    attributes: &Attributes,
) -> Checked<InlineRequest> {
    let capability = request::capability("volume_capability", asked.volume_capability.as_ref())?;
    if capability.access == Access::Block {
        return Err(Error::invalid(
            "volume_capability",
            "an inline volume is mounted; it cannot be a block device",
        ));
    }
    let read_only_content = attributes.is_read_only_content(!asked.secrets.is_empty());
    if read_only_content && !asked.readonly {
        return Err(Error::invalid(
            "readonly",
            "has to be set for a volume of read-only content: set volumes[].csi.readOnly, or let the admission webhook do it",
        ));
    }
    if attributes.from_snapshot.is_some() && !policy.from_snapshot {
        return Err(Error::Precondition(
            "volume_context: fromSnapshot: is switched off on this node; start the driver with --inline-from-snapshot".to_owned(),
        ));
    }
    Ok(InlineRequest {
        size_bytes: attributes.size,
        capability,
        readonly: asked.readonly,
        in_memory: attributes.medium == Medium::Memory,
        from_snapshot: attributes.from_snapshot.clone(),
        read_only_content,
    })
}

/// The files that attributes and secrets make together.
fn content(
    attributes: BTreeMap<String, String>,
    secrets: HashMap<String, String>,
) -> Checked<Content> {
    let has_secrets = !secrets.is_empty();
    let mut files: BTreeMap<String, Vec<u8>> =
        attributes.into_iter().map(|(name, value)| (name, value.into_bytes())).collect();
    for (name, value) in secrets {
        inline::check_file_name(&name).map_err(|reason| Error::invalid("secrets", reason))?;
        if files.insert(name, value.into_bytes()).is_some() {
            return Err(Error::invalid(
                "secrets",
                "a key of the secret is also the name of a content/… attribute; rename one of them",
            ));
        }
    }
    inline::check_amount(files.iter().map(|(name, value)| (name.as_str(), value.len())))
        .map_err(|reason| Error::invalid("secrets", reason))?;
    Ok(Content::new(files, has_secrets))
}
