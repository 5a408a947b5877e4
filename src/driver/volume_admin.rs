//! The VolumeAdmin service: volumes and their use on this node, and the inline volumes.

use std::path::{Path, PathBuf};

use tonic::{Request, Response, Status};

use super::request::page;
use super::{Plugin, request};
use crate::status::Answer;
use admin::volume_admin_server::VolumeAdmin;
use grpc::proto::admin::v1 as admin;
use storage::{Condition, Inline, Publication, Source, VolumeDetails};

#[tonic::async_trait]
impl VolumeAdmin for Plugin {
    async fn get_volume(
        &self,
        request: Request<admin::GetVolumeRequest>,
    ) -> Result<Response<admin::GetVolumeResponse>, Status> {
        self.call("GetVolume", request, get).await
    }

    async fn list_inline_volumes(
        &self,
        request: Request<admin::ListInlineVolumesRequest>,
    ) -> Result<Response<admin::ListInlineVolumesResponse>, Status> {
        self.call("ListInlineVolumes", request, list_inline).await
    }
}

fn get(plugin: &Plugin, request: admin::GetVolumeRequest) -> Answer<admin::GetVolumeResponse> {
    let id = request::id("volume_id", &request.volume_id)?;
    let details = plugin.backend.volume_details(id)?;
    Ok(admin::GetVolumeResponse { volume: Some(volume(details)) })
}

fn volume(details: VolumeDetails) -> admin::Volume {
    let VolumeDetails { volume, attachment, device, allocated_bytes, used_bytes, condition } =
        details;
    let (source_snapshot_id, source_volume_id) = match volume.source {
        Some(Source::Snapshot(id)) => (id, String::new()),
        Some(Source::Volume(id)) => (String::new(), id),
        None => (String::new(), String::new()),
    };
    let format = volume.format.filter(|format| !format.unfinished);
    let (staging_path, published) = match attachment {
        Some(attachment) => (text(&attachment.staging_path), attachment.published),
        None => Default::default(),
    };
    let (abnormal, message) = health(condition);
    admin::Volume {
        volume_id: volume.id,
        name: volume.name,
        capacity_bytes: volume.capacity_bytes,
        allocated_bytes,
        raw_block: volume.request.fs_type.is_none(),
        fs_type: format.map(|format| format.fs_type.to_string()).unwrap_or_default(),
        change_tracking: volume.change_tracking,
        sector_size_bytes: volume.sector_size.bytes(),
        source_snapshot_id,
        source_volume_id,
        staging_path,
        device: device.unwrap_or_default(),
        publications: published.iter().map(publication).collect(),
        used_bytes,
        abnormal,
        message,
    }
}

fn publication((target, publication): (&PathBuf, &Publication)) -> admin::Publication {
    admin::Publication {
        target_path: text(target),
        read_only: publication.is_read_only(),
        deferred: publication.deferred.is_some(),
    }
}

fn list_inline(
    plugin: &Plugin,
    request: admin::ListInlineVolumesRequest,
) -> Answer<admin::ListInlineVolumesResponse> {
    let max = page(request::max_entries(request.max_entries)?);
    let page = plugin.backend.inline_volumes(request::token(&request.starting_token), max)?;
    Ok(admin::ListInlineVolumesResponse {
        volumes: page.items.into_iter().map(inline).collect(),
        next_token: page.next.unwrap_or_default(),
    })
}

fn inline((row, condition): (Inline, Condition)) -> admin::InlineVolume {
    let (abnormal, message) = health(condition);
    admin::InlineVolume {
        target_path: text(&row.target),
        capacity_bytes: row.capacity_bytes,
        in_memory: row.request.in_memory,
        read_only_content: row.request.read_only_content,
        deferred: row.request.deferred.is_some(),
        fs_type: row.format.map(|format| format.fs_type.to_string()).unwrap_or_default(),
        handle: row.handle,
        abnormal,
        message,
    }
}

fn health(condition: Condition) -> (bool, String) {
    (condition.is_abnormal(), condition.message)
}

/// CSI paths are UTF-8, so nothing is lost.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
