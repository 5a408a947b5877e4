//! The door through a driver's sockets: CSI calls, as an orchestrator on the driver's node makes
//! them, and raw block volumes that this process writes and reads.
//!
//! What a call makes is noted before the call, so that the clean-up removes whatever may exist.

mod calls;
mod clean_up;
mod metadata;
mod paths;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Display;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::args::{DriverArgs, PathArgs, SecretsFile, VolumeArgs, document};
use super::calls::Calls;
use super::content::{Image, Patterns, Ranges};
use super::device;
use super::door::{
    About, Done, Door, Edit, Failure, Query, Refusal, Sidecar, Snapshot, Source, Stream, Volume,
    Window,
};
use super::world::lock;
use crate::client::{capability, connection};
use grpc::Endpoint;
use grpc::proto::csi::v1 as csi;

/// How long a call is repeated that the driver postpones.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit of the clean-up.
pub const CLEAN_UP: Duration = Duration::from_secs(60);

/// A driver at its sockets.
pub struct SocketDoor {
    calls: Calls,
    csi: Channel,
    controller: Channel,
    metadata: Channel,
    /// Of the SnapshotMetadata service.
    endpoint: Endpoint,
    about: About,
    abilities: Abilities,
    secrets: SecretsFile,
    parameters: Parameters,
    paths: PathArgs,
    patterns: Patterns,
    /// Volumes by id, as the driver described them.
    volumes: Mutex<HashMap<String, csi::Volume>>,
    /// Volumes that the node must grow when it has them, by id.
    to_expand: Mutex<BTreeSet<String>>,
    made: Mutex<Vec<clean_up::Made>>,
}

/// What the driver advertises.
#[derive(Debug, Default)]
struct Abilities {
    metadata: bool,
    attaches: bool,
    stages: bool,
    expands: bool,
    clones: bool,
    node_id: String,
    topology: Option<csi::Topology>,
}

#[derive(Debug, Default)]
struct Parameters {
    volume: HashMap<String, String>,
    mutable: HashMap<String, String>,
    snapshot: HashMap<String, String>,
}

impl SocketDoor {
    /// Connects to the driver and reads what it advertises.
    ///
    /// # Errors
    /// The driver cannot be reached, or a file cannot be read.
    pub fn open(
        driver: &DriverArgs,
        volumes: &VolumeArgs,
        paths: &PathArgs,
        patterns: Patterns,
        calls: Calls,
    ) -> Result<Self> {
        let csi_endpoint = driver.endpoint.clone().context("--endpoint is missing")?;
        let controller_endpoint =
            driver.controller_endpoint.clone().unwrap_or_else(|| csi_endpoint.clone());
        let endpoint =
            driver.metadata_endpoint.clone().unwrap_or_else(|| controller_endpoint.clone());
        let secrets = document("--secrets", driver.secrets.as_deref())?;
        let file = |flag, path: &Option<PathBuf>| document(flag, path.as_deref());
        let parameters = Parameters {
            volume: file("--testvolumeparameters", &volumes.parameters)?,
            mutable: file("--testvolumemutableparameters", &volumes.mutable_parameters)?,
            snapshot: file("--testsnapshotparameters", &volumes.snapshot_parameters)?,
        };
        let connect = |endpoint: &Endpoint| calls.runtime.block_on(connection::channel(endpoint));
        let csi = connect(&csi_endpoint)?;
        let controller = connect(&controller_endpoint)?;
        let metadata = connect(&endpoint)?;
        let mut door = Self {
            calls,
            csi,
            controller,
            metadata,
            endpoint,
            about: About::default(),
            abilities: Abilities::default(),
            secrets,
            parameters,
            paths: paths.clone(),
            patterns,
            volumes: Mutex::default(),
            to_expand: Mutex::default(),
            made: Mutex::default(),
        };
        door.discover(!driver.no_node).map_err(|refusal| anyhow::anyhow!("{refusal}"))?;
        Ok(door)
    }

    /// Makes a call, and repeats it while the driver postpones it.
    fn call<T>(
        &self,
        what: &str,
        mut make: impl AsyncFnMut() -> Result<Response<T>, Status>,
    ) -> Done<T> {
        let until = Instant::now() + PATIENCE;
        let mut wait = Duration::from_millis(50);
        loop {
            let result = self.calls.once(make());
            match result {
                Some(Ok(response)) => return Ok(response.into_inner()),
                Some(Err(status)) => {
                    let passes = matches!(status.code(), Code::Aborted | Code::Unavailable);
                    if !passes || Instant::now() >= until || self.calls.stop.is_now() {
                        let is_final = calls::makes_nothing(status.code());
                        let reason = format!("{what} returned {}", Failure::from(status));
                        return Err(match is_final {
                            true => Refusal::Final(reason),
                            false => Refusal::Refused(reason),
                        });
                    }
                }
                None => return Err(Refusal::Stopped),
            }
            sleep(wait);
            wait = (wait * 2).min(Duration::from_secs(2));
        }
    }
}

/// An error of this machine.
fn local(what: &str, error: impl Display) -> Refusal {
    Refusal::Refused(format!("{what}: {error}"))
}

fn capability() -> csi::VolumeCapability {
    use csi::volume_capability::access_mode::Mode;
    capability::block(Mode::SingleNodeWriter)
}

fn range(bytes: u64) -> Option<csi::CapacityRange> {
    let required_bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
    Some(csi::CapacityRange { required_bytes, limit_bytes: 0 })
}

fn size(bytes: i64) -> u64 {
    u64::try_from(bytes).unwrap_or(0)
}

impl Door for SocketDoor {
    fn about(&self) -> &About {
        &self.about
    }

    fn has_metadata(&self) -> bool {
        self.abilities.metadata
    }

    fn make_volume(&self, name: &str, bytes: u64, source: Option<Source<'_>>) -> Done<Volume> {
        if matches!(source, Some(Source::Volume(_))) && !self.abilities.clones {
            return Err(Refusal::Final("the driver does not clone volumes".to_owned()));
        }
        let request = self.create_request(name, bytes, source);
        let volume = self.create_volume(request)?;
        let capacity = size(volume.capacity_bytes);
        let id = volume.volume_id.clone();
        lock(&self.volumes).insert(id.clone(), volume);
        // A capacity of 0 is unknown.
        let size = if capacity == 0 { bytes } else { capacity };
        Ok(Volume { name: name.to_owned(), id, size })
    }

    fn change(&self, volume: &Volume, edits: &[Edit]) -> Done<u64> {
        self.with_device(volume, |file| device::change(file, self.patterns, edits))
    }

    fn compare(&self, volume: &Volume, image: &Image) -> Done<Ranges> {
        self.with_device(volume, |file| device::compare(file, self.patterns, image))
    }

    fn while_used(&self, volume: &Volume, work: &mut dyn FnMut()) -> Done<()> {
        self.with_device(volume, |_| {
            work();
            Ok(())
        })
    }

    fn grow(&self, volume: &Volume, bytes: u64) -> Done<u64> {
        self.expand(volume, bytes)
    }

    fn snapshot(&self, volume: &Volume, name: &str) -> Done<Snapshot> {
        self.create_snapshot(volume, name)
    }

    fn delete_snapshot(&self, snapshot: &Snapshot) -> Done<()> {
        self.remove_snapshot(&snapshot.id)?;
        lock(&self.made).retain(|made| !made.is_snapshot(&snapshot.id));
        Ok(())
    }

    fn delete_volume(&self, volume: &Volume) -> Done<()> {
        self.remove_volume(&volume.id)?;
        lock(&self.made).retain(|made| !made.is_volume(&volume.id));
        Ok(())
    }

    fn stream(&self, query: &Query, window: Window, patience: Duration) -> Stream {
        self.metadata_stream(query, window, patience)
    }

    fn stream_past_deadline(
        &self,
        query: &Query,
        window: Window,
        deadline: Duration,
    ) -> Option<Stream> {
        Some(self.calls.runtime.block_on(self.raw_stream(query, window, deadline)))
    }

    fn sidecar(&self) -> Option<&dyn Sidecar> {
        None
    }

    fn clean_up(&self) -> Vec<String> {
        self.remove_all()
    }
}

impl SocketDoor {
    /// Publishes the volume, does `work` with its device, and unpublishes it.
    fn with_device<T>(
        &self,
        volume: &Volume,
        work: impl FnOnce(&File) -> std::io::Result<T>,
    ) -> Done<T> {
        let published = self.publish(volume);
        let done = published.and_then(|target| {
            let named = |error| local(&format!("use {}", target.display()), error);
            let file = open(&target).map_err(named)?;
            work(&file).map_err(named)
        });
        self.unpublish(volume)?;
        done
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    File::options().read(true).write(true).open(path)
}
