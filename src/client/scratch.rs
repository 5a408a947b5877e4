//! Volumes made for a moment: each is made from a snapshot, attached read-only as a raw block device
//! below a private directory, and removed again, with the directory, whatever happened in between.
//!
//! A call is noted down before it is made, so that the clean-up undoes whatever may have been done.
//! Only a kill of this process leaves something behind: volumes named `verify-…` and a directory
//! `csi-loopback-verify-…`.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tonic::{Code, Status};

use super::connection::{Connection, refused};
use super::stop::Stop;
use super::{capability, names, volume};
use crate::proto::csi::v1 as csi;
use crate::proto::csi::v1::volume_capability::access_mode::Mode;

/// How long to wait before a call of the clean-up is tried again.
const PAUSE: Duration = Duration::from_millis(250);

/// A private directory and the volumes attached below it.
#[derive(Debug)]
pub struct Scratch {
    root: PathBuf,
    nonce: String,
    volumes: Vec<Temporary>,
}

/// A temporary volume and how far it has come.
#[derive(Debug)]
struct Temporary {
    name: String,
    /// Not known until CreateVolume has answered.
    id: Option<String>,
    directory: PathBuf,
    staging: PathBuf,
    target: PathBuf,
    maybe_staged: bool,
    maybe_published: bool,
}

impl Scratch {
    /// Makes the directory, for root alone.
    pub fn new() -> Result<Self> {
        let nonce = format!("{:016x}", getrandom::u64().map_err(|error| anyhow!("{error}"))?);
        let root = std::env::temp_dir().join(format!("csi-loopback-verify-{nonce}"));
        make_dir(&root)?;
        Ok(Self { root, nonce, volumes: Vec::new() })
    }

    /// Attaches the data of a snapshot and returns the path of its block device.
    ///
    /// # Errors
    /// What the driver refuses, and a stop. [`Scratch::clean`] must follow all the same.
    pub async fn attach(
        &mut self,
        connection: &Connection,
        stop: &Stop,
        snapshot: &csi::Snapshot,
    ) -> Result<PathBuf> {
        let name = format!("verify-{}-{}", self.nonce, self.volumes.len());
        let source = csi::volume_content_source::SnapshotSource {
            snapshot_id: snapshot.snapshot_id.clone(),
        };
        let request = csi::CreateVolumeRequest {
            name,
            capacity_range: Some(csi::CapacityRange {
                required_bytes: snapshot.size_bytes,
                limit_bytes: 0,
            }),
            volume_capabilities: vec![reader()],
            parameters: volume::tracking(Some(false)),
            volume_content_source: Some(csi::VolumeContentSource {
                r#type: Some(csi::volume_content_source::Type::Snapshot(source)),
            }),
            ..csi::CreateVolumeRequest::default()
        };
        let volume = self.create(connection, stop, request).await;
        let volume = volume.context("restore the snapshot to a temporary volume")?;
        self.publish(connection, stop, volume, reader(), true).await
    }

    /// Creates and attaches an empty volume of this name and returns the path of its block device, which can be written.
    ///
    /// # Errors
    /// The driver refuses, or a stop. [`Scratch::clean`] or [`Scratch::release`] must follow.
    pub async fn attach_empty(
        &mut self,
        connection: &Connection,
        stop: &Stop,
        name: &str,
        bytes: u64,
    ) -> Result<PathBuf> {
        let writer = capability::block(Mode::SingleNodeWriter);
        let request = csi::CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(csi::CapacityRange {
                required_bytes: i64::try_from(bytes)?,
                limit_bytes: 0,
            }),
            volume_capabilities: vec![writer.clone()],
            ..csi::CreateVolumeRequest::default()
        };
        let volume = self.create(connection, stop, request).await?;
        self.publish(connection, stop, volume, writer, false).await
    }

    /// Stages and publishes the volume that was created last.
    async fn publish(
        &mut self,
        connection: &Connection,
        stop: &Stop,
        volume: csi::Volume,
        capability: csi::VolumeCapability,
        readonly: bool,
    ) -> Result<PathBuf> {
        let Some(temporary) = self.volumes.last_mut() else {
            bail!("the temporary volume was not noted down");
        };
        make_dir(&temporary.directory)?;
        make_dir(&temporary.staging)?;

        temporary.maybe_staged = true;
        let request = csi::NodeStageVolumeRequest {
            volume_id: volume.volume_id.clone(),
            staging_target_path: text(&temporary.staging)?,
            volume_capability: Some(capability.clone()),
            volume_context: volume.volume_context.clone(),
            ..csi::NodeStageVolumeRequest::default()
        };
        let mut node = connection.node();
        stop.step(async { node.node_stage_volume(request).await.map_err(refused) }).await?;

        temporary.maybe_published = true;
        let request = csi::NodePublishVolumeRequest {
            volume_id: volume.volume_id,
            staging_target_path: text(&temporary.staging)?,
            target_path: text(&temporary.target)?,
            volume_capability: Some(capability),
            readonly,
            volume_context: volume.volume_context,
            ..csi::NodePublishVolumeRequest::default()
        };
        let mut node = connection.node();
        stop.step(async { node.node_publish_volume(request).await.map_err(refused) }).await?;
        Ok(temporary.target.clone())
    }

    async fn create(
        &mut self,
        connection: &Connection,
        stop: &Stop,
        request: csi::CreateVolumeRequest,
    ) -> Result<csi::Volume> {
        stop.check()?;
        self.volumes.push(Temporary::new(&self.root, request.name.clone()));
        let mut controller = connection.controller();
        let answer = stop.step(async { Ok(controller.create_volume(request).await) }).await?;
        match answer {
            Ok(response) => {
                let volume = response.into_inner().volume.unwrap_or_default();
                if let Some(temporary) = self.volumes.last_mut() {
                    temporary.id = Some(volume.volume_id.clone());
                }
                Ok(volume)
            }
            Err(status) => {
                if is_final(status.code()) {
                    self.volumes.pop();
                }
                Err(refused(status))
            }
        }
    }

    /// Undoes all that [`Scratch::attach`] did or may have done. `connection` brings the time that
    /// this may take.
    ///
    /// # Errors
    /// What is left behind, and why.
    pub async fn clean(self, connection: &Connection) -> Result<()> {
        self.undo(connection, true).await
    }

    /// Like [`Scratch::clean`], but the volumes remain.
    pub async fn release(self, connection: &Connection) -> Result<()> {
        self.undo(connection, false).await
    }

    async fn undo(self, connection: &Connection, delete: bool) -> Result<()> {
        let Self { root, volumes, .. } = self;
        let mut left = Vec::new();
        for temporary in volumes.iter().rev() {
            let removal = tokio::time::timeout_at(
                connection.deadline(),
                temporary.remove(connection, delete),
            );
            match removal.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => left.push(format!("volume {}: {error:#}", temporary.name)),
                Err(_) => left.push(format!("volume {}: no answer in time", temporary.name)),
            }
        }
        // Not recursive: should something still be mounted below, its files must not be touched.
        let directories = volumes.iter().flat_map(|volume| [&volume.staging, &volume.directory]);
        for directory in directories.chain([&root]) {
            match fs::remove_dir(directory) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    left.push(format!("directory {}: {error}", directory.display()));
                }
                _ => {}
            }
        }
        if left.is_empty() {
            return Ok(());
        }
        bail!("left behind: {}", left.join("; "))
    }
}

impl Temporary {
    fn new(root: &Path, name: String) -> Self {
        let directory = root.join(&name);
        Self {
            id: None,
            staging: directory.join("staging"),
            target: directory.join("device"),
            directory,
            name,
            maybe_staged: false,
            maybe_published: false,
        }
    }

    async fn remove(&self, connection: &Connection, delete: bool) -> Result<()> {
        let volume_id = match &self.id {
            Some(id) => id.clone(),
            None => match names::find_volume(connection, &self.name).await? {
                Some(volume) => volume.volume_id,
                None => return Ok(()),
            },
        };
        if self.maybe_published {
            let request = csi::NodeUnpublishVolumeRequest {
                volume_id: volume_id.clone(),
                target_path: text(&self.target)?,
                ..Default::default()
            };
            retried(async || connection.node().node_unpublish_volume(request.clone()).await)
                .await
                .context("unpublish")?;
        }
        if self.maybe_staged {
            let request = csi::NodeUnstageVolumeRequest {
                volume_id: volume_id.clone(),
                staging_target_path: text(&self.staging)?,
            };
            retried(async || connection.node().node_unstage_volume(request.clone()).await)
                .await
                .context("unstage")?;
        }
        if !delete {
            return Ok(());
        }
        let request = csi::DeleteVolumeRequest { volume_id, ..csi::DeleteVolumeRequest::default() };
        retried(async || connection.controller().delete_volume(request.clone()).await)
            .await
            .context("delete")
    }
}

/// Calls until the answer is final; the caller bounds the time.
async fn retried<T>(call: impl AsyncFn() -> Result<T, Status>) -> Result<()> {
    loop {
        match call().await {
            Ok(_) => return Ok(()),
            Err(status) if is_final(status.code()) => return Err(refused(status)),
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Whether a code says that the call did nothing and never will. After the others the driver may
/// still be at work, or may have done it without being able to say so.
const fn is_final(code: Code) -> bool {
    matches!(
        code,
        Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Unauthenticated
    )
}

/// A raw block device that nobody writes to.
fn reader() -> csi::VolumeCapability {
    capability::block(Mode::SingleNodeReaderOnly)
}

fn make_dir(path: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .mode(0o700)
        .create(path)
        .with_context(|| format!("make {}", path.display()))
}

fn text(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
}
