//! Temporary volumes: each is created from a snapshot, attached read-only as a raw block device
//! below a private directory or mounted, and removed with the directory, whatever happens in between.
//!
//! A call is noted before it is made, so that the clean-up undoes whatever may have happened. Only
//! a killed process leaves volumes named `verify-…` and its [`PrivateDir`]; the next command that
//! needs temporary volumes removes both.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tonic::{Code, Status};

use super::connection::{Connection, refused};
use super::private_dir::{self, PrivateDir};
use super::stop::Stop;
use super::{capability, names, progress, volume};
use grpc::proto::csi::v1 as csi;
use grpc::proto::csi::v1::volume_capability::access_mode::Mode;

/// Wait before the clean-up repeats a call.
const PAUSE: Duration = Duration::from_millis(250);

/// Time limit of a clean-up.
const CLEAN_UP: Duration = Duration::from_secs(60);

/// Names of private directories and of temporary volumes, before the number of the process's run.
const DIRECTORY_PREFIX: &str = "csi-loopback-verify-";
const VOLUME_PREFIX: &str = "verify-";

/// Name of the file with the path at which a volume is published.
const NOTE: &str = "target";

/// A private directory and the volumes attached below it.
#[derive(Debug)]
pub struct Scratch {
    directory: PrivateDir,
    volumes: Vec<Temporary>,
}

/// A temporary volume and the calls that were made for it.
#[derive(Debug)]
struct Temporary {
    name: String,
    /// Unknown until CreateVolume has returned.
    id: Option<String>,
    directory: PathBuf,
    staging: PathBuf,
    target: PathBuf,
    maybe_staged: bool,
    maybe_published: bool,
}

/// Removes the volumes and the directories below `parent` of killed processes. Returns a message
/// for each.
///
/// # Errors
/// The volumes cannot be listed.
pub async fn remove_leftovers(connection: &Connection, parent: &Path) -> Result<Vec<String>> {
    let abandoned = PrivateDir::abandoned(parent, DIRECTORY_PREFIX);
    if abandoned.is_empty() {
        return Ok(Vec::new());
    }
    let mut listed = Vec::new();
    names::each_volume(connection, |entry| {
        let volume = entry.volume.unwrap_or_default();
        listed.push(names::name_of(&volume.volume_id).to_owned());
    })
    .await?;
    let mut messages = Vec::new();
    for directory in abandoned {
        let of_run = format!("{VOLUME_PREFIX}{}-", directory.nonce);
        let entries = fs::read_dir(&directory.root).into_iter().flatten().flatten();
        let directories = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = listed.iter().cloned().chain(directories).collect();
        names.retain(|name| name.starts_with(&of_run));
        names.sort();
        names.dedup();
        let volumes = names.into_iter().map(|name| Temporary {
            maybe_staged: true,
            maybe_published: true,
            ..Temporary::new(&directory.root, name)
        });
        let volumes = volumes.collect();
        let root = directory.root.display().to_string();
        let scratch = Scratch { directory, volumes };
        let count = scratch.volumes.len();
        messages.push(match scratch.clean(connection).await {
            Ok(()) => format!("removed {root} and {count} volumes of a killed command"),
            Err(error) => format!("a killed command left {root}: {error:#}"),
        });
    }
    Ok(messages)
}

impl Scratch {
    /// Removes what killed processes left in the directory for temporary files, with a note on
    /// stderr for each, and creates a private directory there.
    ///
    /// # Errors
    /// The volumes cannot be listed, or the directory cannot be created.
    pub async fn start(connection: &Connection) -> Result<Self> {
        let parent = std::env::temp_dir();
        for leftover in remove_leftovers(connection, &parent).await? {
            progress::note(&leftover);
        }
        Self::new(&parent)
    }

    /// Creates the directory below `parent`; only the user can read it.
    pub fn new(parent: &Path) -> Result<Self> {
        let directory = PrivateDir::create(parent, DIRECTORY_PREFIX)?;
        Ok(Self { directory, volumes: Vec::new() })
    }

    /// Attaches the data of a snapshot and returns the path of its block device.
    ///
    /// # Errors
    /// The driver refuses, or a stop. [`Scratch::clean`] must follow in any case.
    pub async fn attach(
        &mut self,
        connection: &Connection,
        stop: &Stop,
        snapshot: &csi::Snapshot,
    ) -> Result<PathBuf> {
        let reader = capability::block(Mode::SingleNodeReaderOnly);
        self.restore(connection, stop, snapshot, reader, None).await
    }

    /// Mounts the filesystem of a snapshot at `target`, read-only.
    ///
    /// # Errors
    /// The driver refuses, or a stop. [`Scratch::clean`] must follow in any case.
    pub async fn mount(
        &mut self,
        connection: &Connection,
        stop: &Stop,
        snapshot: &csi::Snapshot,
        target: &Path,
    ) -> Result<()> {
        let capability = capability::mounted(Mode::SingleNodeReaderOnly, String::new());
        self.restore(connection, stop, snapshot, capability, Some(target)).await.map(drop)
    }

    /// Publishes a new volume with the data of a snapshot, and returns where.
    async fn restore(
        &mut self,
        connection: &Connection,
        stop: &Stop,
        snapshot: &csi::Snapshot,
        capability: csi::VolumeCapability,
        target: Option<&Path>,
    ) -> Result<PathBuf> {
        let name = format!("{VOLUME_PREFIX}{}-{}", self.directory.nonce, self.volumes.len());
        let source = csi::volume_content_source::SnapshotSource {
            snapshot_id: snapshot.snapshot_id.clone(),
        };
        let request = csi::CreateVolumeRequest {
            secrets: connection.secrets(),
            name,
            capacity_range: Some(csi::CapacityRange {
                required_bytes: snapshot.size_bytes,
                limit_bytes: 0,
            }),
            volume_capabilities: vec![capability.clone()],
            parameters: volume::tracking(Some(false)),
            volume_content_source: Some(csi::VolumeContentSource {
                r#type: Some(csi::volume_content_source::Type::Snapshot(source)),
            }),
            ..csi::CreateVolumeRequest::default()
        };
        let doing = "restore the snapshot to a temporary volume";
        let volume = self.create(connection, stop, request, doing).await?;
        if let (Some(target), Some(temporary)) = (target, self.volumes.last_mut()) {
            temporary.target = target.to_owned();
        }
        self.publish(connection, stop, volume, capability, true).await
    }

    /// Creates and attaches an empty volume of this name and returns the path of its writable block
    /// device.
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
            secrets: connection.secrets(),
            name: name.to_owned(),
            capacity_range: Some(csi::CapacityRange {
                required_bytes: i64::try_from(bytes)?,
                limit_bytes: 0,
            }),
            volume_capabilities: vec![writer.clone()],
            ..csi::CreateVolumeRequest::default()
        };
        let volume = self.create(connection, stop, request, "create the volume").await?;
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
            bail!("the temporary volume is not recorded");
        };
        private_dir::make(&temporary.directory)?;
        // For the next command, if this one is killed.
        fs::write(temporary.note(), text(&temporary.target)?).context("note the target")?;
        private_dir::make(&temporary.staging)?;

        temporary.maybe_staged = true;
        let request = csi::NodeStageVolumeRequest {
            secrets: connection.secrets(),
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
            secrets: connection.secrets(),
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
        mut request: csi::CreateVolumeRequest,
        doing: &'static str,
    ) -> Result<csi::Volume> {
        stop.check()?;
        self.volumes.push(Temporary::new(&self.directory.root, request.name.clone()));
        let mut controller = connection.controller();
        let first = request.clone();
        let mut response = stop.step(async { Ok(controller.create_volume(first).await) }).await?;
        // Another driver may refuse this driver's parameters.
        let is_refused = response.as_ref().is_err_and(|it| it.code() == Code::InvalidArgument);
        if is_refused && !request.parameters.is_empty() {
            request.parameters.clear();
            response = stop.step(async { Ok(controller.create_volume(request).await) }).await?;
        }
        match response {
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
                Err(refused(status).context(doing))
            }
        }
    }

    /// Undoes everything that [`Scratch::attach`] did or may have done, within a minute.
    ///
    /// # Errors
    /// What remains, and why.
    pub async fn clean(self, connection: &Connection) -> Result<()> {
        self.undo(connection, true).await
    }

    /// Like [`Scratch::clean`], but the volumes remain.
    pub async fn release(self, connection: &Connection) -> Result<()> {
        self.undo(connection, false).await
    }

    async fn undo(self, connection: &Connection, delete: bool) -> Result<()> {
        let connection = &connection.until(tokio::time::Instant::now() + CLEAN_UP);
        let Self { directory: PrivateDir { root, .. }, volumes } = &self;
        let mut remaining = Vec::new();
        for temporary in volumes.iter().rev() {
            let removal = tokio::time::timeout_at(
                connection.deadline(),
                temporary.remove(connection, delete),
            );
            match removal.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => remaining.push(format!("volume {}: {error:#}", temporary.name)),
                Err(_) => remaining.push(format!("volume {}: no response in time", temporary.name)),
            }
        }
        for volume in volumes {
            // Missing if the volume was not published.
            let _ = fs::remove_file(volume.note());
        }
        // Not recursive: the files of a mount that remains must not be touched.
        let directories = volumes.iter().flat_map(|volume| [&volume.staging, &volume.directory]);
        for directory in directories.chain([root]) {
            match fs::remove_dir(directory) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    remaining.push(format!("directory {}: {error}", directory.display()));
                }
                _ => {}
            }
        }
        if remaining.is_empty() {
            return Ok(());
        }
        bail!("not removed: {}", remaining.join("; "))
    }
}

impl Temporary {
    fn new(root: &Path, name: String) -> Self {
        let directory = root.join(&name);
        let noted = fs::read_to_string(directory.join(NOTE)).ok().filter(|path| !path.is_empty());
        Self {
            id: None,
            staging: directory.join("staging"),
            target: noted.map_or_else(|| directory.join("device"), PathBuf::from),
            directory,
            name,
            maybe_staged: false,
            maybe_published: false,
        }
    }

    /// The file with the target.
    fn note(&self) -> PathBuf {
        self.directory.join(NOTE)
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
        let request = csi::DeleteVolumeRequest { volume_id, secrets: connection.secrets() };
        retried(async || connection.controller().delete_volume(request.clone()).await)
            .await
            .context("delete")
    }
}

/// Repeats a call until its response is final; the caller limits the time.
pub(crate) async fn retried<T>(call: impl AsyncFn() -> Result<T, Status>) -> Result<()> {
    loop {
        match call().await {
            Ok(_) => return Ok(()),
            Err(status) if is_final(status.code()) => return Err(refused(status)),
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Whether a code means that the call did nothing and never will. After other codes the driver may
/// still be working, or may have done it and failed to respond.
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

fn text(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
}
