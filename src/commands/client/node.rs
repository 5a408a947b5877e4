//! `volume stage`, `publish`, `unpublish` and `unstage`: the CSI Node calls. CSI's are idempotent,
//! so a driver reports success for a wrong path; these commands check the state first and report
//! it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use tonic::Code;

use super::capability::CapabilityArgs;
use super::connection::{Connection, refused};
use super::names;
use super::volume::{Change, absolute};
use csi::node_service_capability::{Rpc, Type, rpc};
use grpc::proto::admin::v1 as admin;
use grpc::proto::csi::v1 as csi;

#[derive(Debug, Args)]
pub struct StageArgs {
    /// Name or id
    volume: String,
    /// Directory to mount at; created if it is missing
    #[arg(long, value_name = "PATH")]
    staging: PathBuf,
    #[command(flatten)]
    capability: CapabilityArgs,
}

#[derive(Debug, Args)]
pub struct PublishArgs {
    /// Name or id
    volume: String,
    /// Path at which the volume is staged
    #[arg(long, value_name = "PATH")]
    staging: PathBuf,
    /// Directory (filesystem) or file (raw block) to create
    #[arg(long, value_name = "PATH")]
    target: PathBuf,
    /// Refuse writes through the target
    #[arg(long)]
    read_only: bool,
    /// Leave the mount to a container runtime
    #[arg(long)]
    defer_fs_ops: bool,
    #[command(flatten)]
    capability: CapabilityArgs,
}

#[derive(Debug, Args)]
pub struct UnpublishArgs {
    /// Name or id
    volume: String,
    /// Path at which the volume is published
    #[arg(long, value_name = "PATH")]
    target: PathBuf,
    /// Exit with 0 if the volume is not published there
    #[arg(long)]
    if_published: bool,
    /// Require that a container runtime mounts the volume
    #[arg(long)]
    defer_fs_ops: bool,
}

#[derive(Debug, Args)]
pub struct UnstageArgs {
    /// Name or id
    volume: String,
    /// Path at which the volume is staged
    #[arg(long, value_name = "PATH")]
    staging: PathBuf,
    /// Exit with 0 if the volume is not staged there
    #[arg(long)]
    if_staged: bool,
}

/// The volume and its use on this node; `None` from a driver without VolumeAdmin.
pub async fn details(connection: &Connection, volume_id: &str) -> Result<Option<admin::Volume>> {
    let request = admin::GetVolumeRequest { volume_id: volume_id.to_owned() };
    match connection.volume_admin().get_volume(request).await {
        Ok(response) => Ok(response.into_inner().volume),
        Err(status) if status.code() == Code::Unimplemented => Ok(None),
        Err(status) => Err(refused(status)),
    }
}

/// All inline volumes; `None` from a driver without VolumeAdmin.
pub async fn inline_volumes(connection: &Connection) -> Result<Option<Vec<admin::InlineVolume>>> {
    let mut volumes = Vec::new();
    let listed = names::pages(async |starting_token| {
        let max_entries = names::PAGE;
        let request = admin::ListInlineVolumesRequest { max_entries, starting_token };
        let page = connection.volume_admin().list_inline_volumes(request).await?.into_inner();
        volumes.extend(page.volumes);
        Ok(page.next_token)
    });
    match listed.await {
        Ok(()) => Ok(Some(volumes)),
        Err(status) if status.code() == Code::Unimplemented => Ok(None),
        Err(status) => Err(refused(status)),
    }
}

pub async fn stage(connection: &Connection, args: StageArgs) -> Result<Change> {
    let StageArgs { volume, staging, capability } = args;
    let volume = names::volume(connection, &volume).await?;
    let staging_path = absolute(&staging)?;
    let state = details(connection, &volume.volume_id).await?;
    if let Some(state) = &state {
        check_access(state, &capability)?;
    }
    // CSI NodeStageVolume: the caller creates the directory.
    fs::create_dir_all(&staging).with_context(|| format!("create {}", staging.display()))?;
    let request = csi::NodeStageVolumeRequest {
        secrets: connection.secrets(),
        volume_id: volume.volume_id.clone(),
        staging_target_path: staging_path.clone(),
        volume_capability: Some(capability.capability()),
        volume_context: volume.volume_context,
        ..csi::NodeStageVolumeRequest::default()
    };
    connection.node().node_stage_volume(request).await.map_err(refused)?;
    let was_staged = state.is_some_and(|state| state.staging_path == staging_path);
    Ok(Change::of(volume.volume_id, "staged", !was_staged))
}

/// Refuses to create a filesystem that the user did not request on a raw block volume.
fn check_access(state: &admin::Volume, capability: &CapabilityArgs) -> Result<()> {
    let is_blank = state.raw_block && state.fs_type.is_empty();
    ensure!(
        !is_blank || capability.has_access(),
        "volume {} is a raw block volume: stage it with --block, or with --fs TYPE to create a filesystem on it",
        state.volume_id
    );
    Ok(())
}

pub async fn publish(connection: &Connection, args: PublishArgs) -> Result<Change> {
    let PublishArgs { volume, staging, target, read_only, defer_fs_ops, capability } = args;
    if defer_fs_ops {
        check_defers(connection).await?;
    }
    let volume = names::volume(connection, &volume).await?;
    let (staging_path, target_path) = (absolute(&staging)?, absolute(&target)?);
    let state = details(connection, &volume.volume_id).await?;
    if let Some(state) = &state {
        ensure!(
            state.staging_path == staging_path,
            "volume {} is {}; stage it first: csi-loopback volume stage {} --staging {staging_path}",
            volume.volume_id,
            staged_where(state, &staging_path),
            names::name_of(&volume.volume_id)
        );
    }
    make_parent(&target)?;
    let request = csi::NodePublishVolumeRequest {
        secrets: connection.secrets(),
        volume_id: volume.volume_id.clone(),
        staging_target_path: staging_path,
        target_path: target_path.clone(),
        volume_capability: Some(capability.capability()),
        readonly: read_only,
        volume_context: volume.volume_context,
        defer_fs_ops,
        ..csi::NodePublishVolumeRequest::default()
    };
    connection.node().node_publish_volume(request).await.map_err(refused)?;
    let was_published = state.is_some_and(|state| is_published(&state, &target_path));
    Ok(Change::of(volume.volume_id, "published", !was_published))
}

pub async fn unpublish(connection: &Connection, args: UnpublishArgs) -> Result<Change> {
    let UnpublishArgs { volume, target, if_published, defer_fs_ops } = args;
    let volume_id = names::volume(connection, &volume).await?.volume_id;
    let target_path = absolute(&target)?;
    let problem = match details(connection, &volume_id).await? {
        Some(state) if is_published(&state, &target_path) => None,
        Some(state) => Some(published_where(&state, &target_path)),
        None => nothing_at(&target),
    };
    if let Some(problem) = problem {
        return not_in_use(volume_id, "unpublished", &problem, if_published, "--if-published");
    }
    let request =
        csi::NodeUnpublishVolumeRequest { volume_id: volume_id.clone(), target_path, defer_fs_ops };
    connection.node().node_unpublish_volume(request).await.map_err(refused)?;
    Ok(Change::of(volume_id, "unpublished", true))
}

pub async fn unstage(connection: &Connection, args: UnstageArgs) -> Result<Change> {
    let UnstageArgs { volume, staging, if_staged } = args;
    let volume_id = names::volume(connection, &volume).await?.volume_id;
    let staging_path = absolute(&staging)?;
    let problem = match details(connection, &volume_id).await? {
        Some(state) if state.staging_path == staging_path => None,
        Some(state) => Some(staged_where(&state, &staging_path)),
        None => nothing_at(&staging),
    };
    if let Some(problem) = problem {
        return not_in_use(volume_id, "unstaged", &problem, if_staged, "--if-staged");
    }
    let request = csi::NodeUnstageVolumeRequest {
        volume_id: volume_id.clone(),
        staging_target_path: staging_path,
    };
    connection.node().node_unstage_volume(request).await.map_err(refused)?;
    Ok(Change::of(volume_id, "unstaged", true))
}

/// The report when there is nothing to undo: a success if `accept`, for scripts.
pub fn not_in_use(
    volume_id: String,
    state: &'static str,
    problem: &str,
    accept: bool,
    flag: &str,
) -> Result<Change> {
    if accept {
        return Ok(Change::of(volume_id, state, false));
    }
    bail!("volume {volume_id} is {problem} ({flag} accepts this)")
}

fn staged_where(state: &admin::Volume, path: &str) -> String {
    match state.staging_path.as_str() {
        "" => "not staged".to_owned(),
        other => format!("not staged at {path} but at {other}"),
    }
}

fn is_published(state: &admin::Volume, path: &str) -> bool {
    state.publications.iter().any(|one| one.target_path == path)
}

fn published_where(state: &admin::Volume, path: &str) -> String {
    let targets: Vec<_> = state.publications.iter().map(|one| one.target_path.as_str()).collect();
    match targets.as_slice() {
        [] => "not published".to_owned(),
        targets => format!("not published at {path} but at {}", targets.join(", ")),
    }
}

/// For a driver that does not report the use of a volume: a path that does not exist is no mount.
fn nothing_at(path: &Path) -> Option<String> {
    let missing = fs::symlink_metadata(path).is_err();
    missing.then(|| format!("not in use at {}, which does not exist", path.display()))
}

/// Checks that the driver has DEFER_FS_OPS: a driver without it ignores the field and mounts on
/// this host.
pub async fn check_defers(connection: &Connection) -> Result<()> {
    let request = csi::NodeGetCapabilitiesRequest {};
    let response = connection.node().node_get_capabilities(request).await.map_err(refused)?;
    ensure!(
        defers(response.get_ref()),
        "--defer-fs-ops: the driver lacks the capability DEFER_FS_OPS; start it with --enable-defer-fs-ops, or upgrade it"
    );
    Ok(())
}

fn defers(response: &csi::NodeGetCapabilitiesResponse) -> bool {
    let wanted = Some(Type::Rpc(Rpc { r#type: rpc::Type::DeferFsOps.into() }));
    response.capabilities.iter().any(|one| one.r#type == wanted)
}

/// CSI NodePublishVolume: the caller creates the parent of the target, the driver the target.
pub fn make_parent(target: &Path) -> Result<()> {
    match target.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        Some(parent) => {
            fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_without_the_final_capability_does_not_defer() {
        let with = |numbers: &[i32]| {
            let rpc = |number: &i32| Some(Type::Rpc(Rpc { r#type: *number }));
            let capability = |number| csi::NodeServiceCapability { r#type: rpc(number) };
            let capabilities = numbers.iter().map(capability).collect();
            defers(&csi::NodeGetCapabilitiesResponse { capabilities })
        };
        assert!(with(&[1, 2857]));
        assert!(!with(&[]) && !with(&[1, 7, 8]) && !with(&[1, 7, 8, 9]));
    }
}
