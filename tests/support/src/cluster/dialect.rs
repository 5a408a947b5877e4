//! A CSI driver in memory with the habits of other vendors' drivers: what identifies a base, what
//! its calls require, how it lists blocks, and where it listens. Its volumes are files, so that it
//! needs neither root nor devices.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use csi_loopback::proto::csi::v1 as csi;
use prost::Message;
use tonic::Code;

use super::Cluster;
use super::fake_driver::{Answers, Fake};
use crate::random::Random;

/// Bytes of its volume; no multiple of a block.
pub const SIZE: usize = (9 << 20) + 512;
/// The CSI handle of its volume.
pub const VOLUME: &str = "volume-1";

/// What a driver does in its own way.
#[derive(Debug, Clone, Copy)]
pub struct Dialect {
    pub name: &'static str,
    /// Bases are identified by the value of an annotation.
    pub has_change_ids: bool,
    /// A secret that all calls require.
    pub secret: Option<(&'static str, &'static str)>,
    /// A deleted snapshot cannot be a base.
    pub base_must_exist: bool,
    pub kind: csi::BlockMetadataType,
    /// Bytes of a block of its listings.
    pub unit: usize,
    /// Tuples in a message.
    pub tuples: usize,
    /// It reports the size of snapshots.
    pub has_sizes: bool,
    /// It has ListSnapshots and ListVolumes.
    pub lists: bool,
    /// Bytes by which its volume has grown since: it lists the capacity of the volume.
    pub growth: usize,
    pub place: Place,
}

/// Where it listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Socket,
    Tcp,
    /// SnapshotMetadata has a socket of its own.
    TwoSockets,
}

pub const PLAIN: Dialect = Dialect {
    name: "plain",
    has_change_ids: false,
    secret: None,
    base_must_exist: false,
    kind: csi::BlockMetadataType::VariableLength,
    unit: 4096,
    tuples: 256,
    has_sizes: true,
    lists: true,
    growth: 0,
    place: Place::Socket,
};

/// The dialects of known drivers.
pub const ALL: [Dialect; 6] = [
    Dialect {
        name: "fixed",
        base_must_exist: true,
        kind: csi::BlockMetadataType::FixedLength,
        ..PLAIN
    },
    Dialect {
        name: "objects",
        secret: Some(("userKey", "key-of-the-dialect")),
        base_must_exist: true,
        unit: 4 << 20,
        lists: false,
        ..PLAIN
    },
    Dialect { name: "change-ids", has_change_ids: true, growth: 4 << 20, ..PLAIN },
    Dialect { name: "tuples", tuples: 1, has_sizes: false, place: Place::Tcp, ..PLAIN },
    Dialect {
        name: "coarse",
        kind: csi::BlockMetadataType::FixedLength,
        unit: 64 << 10,
        place: Place::TwoSockets,
        ..PLAIN
    },
    Dialect { name: "unsized", has_sizes: false, ..PLAIN },
];

/// A snapshot in memory.
#[derive(Debug, Clone)]
struct Snapshot {
    id: String,
    image: Vec<u8>,
    change_id: String,
    is_deleted: bool,
}

#[derive(Default)]
struct State {
    image: Vec<u8>,
    /// In the order of their creation.
    snapshots: Vec<Snapshot>,
    /// Snapshot ids by volume id.
    copies: BTreeMap<String, String>,
    /// The secrets of all metadata calls.
    secrets: Vec<BTreeMap<String, String>>,
}

pub struct Driver {
    pub dialect: Dialect,
    /// The driver's name in CSI.
    pub name: String,
    state: Arc<Mutex<State>>,
    csi: Fake,
    metadata: Option<Fake>,
}

pub(super) type Answer = Result<Vec<Vec<u8>>, (Code, String)>;

impl Driver {
    pub fn start(cluster: &Cluster, dialect: Dialect) -> Self {
        let name = format!("{}.{}.example", cluster.unique("csi"), dialect.name);
        let state = Arc::new(Mutex::new(State { image: vec![0; SIZE], ..State::default() }));
        let answers = |metadata: bool, rest: bool| -> Answers {
            let state = state.clone();
            Arc::new(move |method, request| {
                let is_metadata = method.starts_with("GetMetadata");
                let is_identity = method.starts_with("GetPlugin") || method == "Probe";
                match is_identity || (if is_metadata { metadata } else { rest }) {
                    true => answer(dialect, &mut lock(&state), method, request),
                    false => Some(Err((Code::Unimplemented, method.to_owned()))),
                }
            })
        };
        let directory = cluster.scratch();
        let (csi, metadata) = cluster.block_on(async {
            match dialect.place {
                Place::Socket => {
                    (Fake::answering(directory, &name, true, answers(true, true)), None)
                }
                Place::Tcp => {
                    (Fake::answering_at_tcp(&name, true, answers(true, true)).await, None)
                }
                Place::TwoSockets => {
                    let csi = Fake::answering(directory, &name, false, answers(false, true));
                    let socket = directory.join(format!("{name}-metadata.sock"));
                    let metadata = Fake::answering_at(socket, &name, true, answers(true, false));
                    (csi, Some(metadata))
                }
            }
        });
        Self { dialect, name, state, csi, metadata }
    }

    /// The endpoint of all services but SnapshotMetadata.
    pub fn endpoint(&self) -> &str {
        &self.csi.endpoint
    }

    /// The endpoint of SnapshotMetadata.
    pub fn metadata_endpoint(&self) -> &str {
        &self.metadata.as_ref().unwrap_or(&self.csi).endpoint
    }

    /// Changes these blocks of 4 KiB of the volume.
    pub fn write(&self, seed: u64, blocks: &[usize]) {
        let mut random = Random::new(seed);
        let mut state = lock(&self.state);
        for block in blocks {
            let end = ((block + 1) * 4096).min(SIZE);
            state.image[block * 4096..end].fill_with(|| random.below(255) as u8 + 1);
        }
    }

    /// Takes a snapshot; returns its id.
    pub fn snapshot(&self, name: &str) -> String {
        let mut state = lock(&self.state);
        // Not the form of an id of this project.
        let id = format!("{VOLUME}/{name}@{}", state.snapshots.len());
        let change_id = format!("52 21 4f/{}", state.snapshots.len());
        let image = state.image.clone();
        state.snapshots.push(Snapshot { id: id.clone(), image, change_id, is_deleted: false });
        id
    }

    /// Deletes the data of a snapshot.
    pub fn delete(&self, id: &str) {
        let mut state = lock(&self.state);
        state.snapshots.iter_mut().find(|one| one.id == id).unwrap().is_deleted = true;
    }

    pub fn image(&self, id: &str) -> Vec<u8> {
        lock(&self.state).existing(id).unwrap().image.clone()
    }

    pub fn change_id(&self, id: &str) -> String {
        lock(&self.state).existing(id).unwrap().change_id.clone()
    }

    /// What identifies a snapshot as a base.
    pub fn base_id(&self, id: &str) -> String {
        if self.dialect.has_change_ids { self.change_id(id) } else { id.to_owned() }
    }

    /// The number of volumes that were made of snapshots and not deleted.
    pub fn copies(&self) -> usize {
        lock(&self.state).copies.len()
    }

    /// The secrets of the metadata calls so far.
    pub fn secrets(&self) -> Vec<BTreeMap<String, String>> {
        lock(&self.state).secrets.clone()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn existing(&self, id: &str) -> Option<&Snapshot> {
        self.snapshots.iter().find(|one| one.id == id && !one.is_deleted)
    }

    fn target(&self, id: &str) -> Result<&Snapshot, (Code, String)> {
        self.existing(id).ok_or_else(|| (Code::NotFound, format!("snapshot {id:?} was not found")))
    }

    fn base(&self, dialect: Dialect, id: &str) -> Result<&Snapshot, (Code, String)> {
        let mut all = self.snapshots.iter();
        if dialect.has_change_ids {
            let invalid = || (Code::InvalidArgument, format!("{id:?} is not a change id"));
            return all.find(|one| one.change_id == id).ok_or_else(invalid);
        }
        let is_base = |one: &&Snapshot| !(dialect.base_must_exist && one.is_deleted);
        let found = all.find(|one| one.id == id).filter(is_base);
        found.ok_or_else(|| (Code::NotFound, format!("base {id:?} was not found")))
    }
}

pub(super) fn ok(message: impl Message) -> Answer {
    Ok(vec![message.encode_to_vec()])
}

pub(super) fn decoded<T: Message + Default>(request: Bytes) -> T {
    T::decode(request).unwrap()
}

/// Refuses a call without the secret of the dialect.
pub(super) fn check<'s>(
    dialect: Dialect,
    secrets: impl IntoIterator<Item = (&'s String, &'s String)>,
) -> Result<(), (Code, String)> {
    let mut secrets = secrets.into_iter();
    match dialect.secret {
        Some((key, value)) if !secrets.any(|(name, given)| name == key && given == value) => {
            Err((Code::Unauthenticated, format!("the secret {key} is missing")))
        }
        _ => Ok(()),
    }
}

fn answer(dialect: Dialect, state: &mut State, method: &str, request: Bytes) -> Option<Answer> {
    Some(match method {
        "GetMetadataAllocated" => {
            let request: csi::GetMetadataAllocatedRequest = decoded(request);
            state.secrets.push(request.secrets.clone().into_iter().collect());
            check(dialect, &request.secrets).and_then(|()| {
                let target = &state.target(&request.snapshot_id)?.image;
                let zeros = vec![0; target.len()];
                messages(dialect, &zeros, target, request.starting_offset, request.max_results)
            })
        }
        "GetMetadataDelta" => {
            let request: csi::GetMetadataDeltaRequest = decoded(request);
            state.secrets.push(request.secrets.clone().into_iter().collect());
            check(dialect, &request.secrets).and_then(|()| {
                let base = &state.base(dialect, &request.base_snapshot_id)?.image;
                let target = &state.target(&request.target_snapshot_id)?.image;
                messages(dialect, base, target, request.starting_offset, request.max_results)
            })
        }
        "ListSnapshots" | "ListVolumes" if !dialect.lists => {
            Err((Code::Unimplemented, method.to_owned()))
        }
        "ListSnapshots" => ok(listed(dialect, state)),
        "ListVolumes" => {
            let ids = state.copies.keys().cloned().chain([VOLUME.to_owned()]);
            let volume = |volume_id| csi::Volume {
                volume_id,
                capacity_bytes: (SIZE + dialect.growth) as i64,
                ..Default::default()
            };
            let entry = |id| csi::list_volumes_response::Entry {
                volume: Some(volume(id)),
                ..Default::default()
            };
            let entries = ids.map(entry).collect();
            ok(csi::ListVolumesResponse { entries, ..Default::default() })
        }
        _ => return volumes(dialect, state, method, request),
    })
}

fn listed(dialect: Dialect, state: &State) -> csi::ListSnapshotsResponse {
    let existing = state.snapshots.iter().filter(|snapshot| !snapshot.is_deleted);
    let entry = |snapshot: &Snapshot| csi::list_snapshots_response::Entry {
        snapshot: Some(csi::Snapshot {
            size_bytes: if dialect.has_sizes { snapshot.image.len() as i64 } else { 0 },
            snapshot_id: snapshot.id.clone(),
            source_volume_id: VOLUME.to_owned(),
            ready_to_use: true,
            ..Default::default()
        }),
    };
    csi::ListSnapshotsResponse { entries: existing.map(entry).collect(), ..Default::default() }
}

/// Calls for volumes from snapshots, which are files.
fn volumes(dialect: Dialect, state: &mut State, method: &str, request: Bytes) -> Option<Answer> {
    use csi::volume_content_source::Type;
    Some(match method {
        "CreateVolume" => {
            let request: csi::CreateVolumeRequest = decoded(request);
            let source = request.volume_content_source.and_then(|source| source.r#type);
            let refused = match (&source, request.parameters.keys().next()) {
                (_, Some(parameter)) => Some(format!("parameter {parameter:?} is unknown")),
                (Some(Type::Snapshot(_)), None) => None,
                _ => Some("volume_content_source".to_owned()),
            };
            check(dialect, &request.secrets).and_then(|()| {
                if let Some(why) = refused {
                    return Err((Code::InvalidArgument, why));
                }
                let Some(Type::Snapshot(source)) = source else { unreachable!() };
                state.target(&source.snapshot_id)?;
                let volume_id = format!("copy-{}", request.name);
                state.copies.insert(volume_id.clone(), source.snapshot_id);
                let volume = csi::Volume { volume_id, ..Default::default() };
                ok(csi::CreateVolumeResponse { volume: Some(volume) })
            })
        }
        "DeleteVolume" => {
            let request: csi::DeleteVolumeRequest = decoded(request);
            check(dialect, &request.secrets).and_then(|()| {
                state.copies.remove(&request.volume_id);
                ok(csi::DeleteVolumeResponse {})
            })
        }
        "NodeStageVolume" => ok(csi::NodeStageVolumeResponse {}),
        "NodeUnstageVolume" => ok(csi::NodeUnstageVolumeResponse {}),
        "NodePublishVolume" => {
            let request: csi::NodePublishVolumeRequest = decoded(request);
            let id = &state.copies[&request.volume_id];
            fs::write(&request.target_path, &state.existing(id).unwrap().image).unwrap();
            ok(csi::NodePublishVolumeResponse {})
        }
        "NodeUnpublishVolume" => {
            let request: csi::NodeUnpublishVolumeRequest = decoded(request);
            let _ = fs::remove_file(PathBuf::from(&request.target_path));
            ok(csi::NodeUnpublishVolumeResponse {})
        }
        _ => return None,
    })
}

/// The messages of a listing; none if nothing differs, as host-path and ceph-csi do.
pub(super) fn messages(
    dialect: Dialect,
    base: &[u8],
    target: &[u8],
    starting_offset: i64,
    max_results: i32,
) -> Answer {
    let capacity = target.len() + dialect.growth;
    if max_results < 0 {
        return Err((Code::InvalidArgument, "max_results".to_owned()));
    }
    let from = usize::try_from(starting_offset).ok().filter(|from| *from <= capacity);
    let Some(from) = from else { return Err((Code::OutOfRange, "starting_offset".to_owned())) };
    let is_fixed = dialect.kind == csi::BlockMetadataType::FixedLength;
    let mut tuples: Vec<csi::BlockMetadata> = Vec::new();
    let pairs = base.chunks(dialect.unit).zip(target.chunks(dialect.unit));
    for (number, (old, new)) in pairs.enumerate() {
        let begin = number * dialect.unit;
        if old == new || begin + dialect.unit <= from {
            continue;
        }
        // The last block of a fixed length exceeds the volume.
        let size = if is_fixed { dialect.unit } else { new.len() } as i64;
        let begin = begin as i64;
        match tuples.last_mut() {
            Some(last) if !is_fixed && last.byte_offset + last.size_bytes == begin => {
                last.size_bytes += size;
            }
            _ => tuples.push(csi::BlockMetadata { byte_offset: begin, size_bytes: size }),
        }
    }
    let limit = usize::try_from(max_results).unwrap().max(1);
    let limit = if max_results == 0 { dialect.tuples } else { limit.min(dialect.tuples) };
    let message = |tuples: &[csi::BlockMetadata]| csi::GetMetadataDeltaResponse {
        block_metadata_type: dialect.kind.into(),
        volume_capacity_bytes: capacity as i64,
        block_metadata: tuples.to_vec(),
    };
    Ok(tuples.chunks(limit).map(|part| message(part).encode_to_vec()).collect())
}
