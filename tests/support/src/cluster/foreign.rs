//! A CSI driver that makes volumes and snapshots in the dialect of another vendor, with each freedom
//! that the text of CSI leaves. Volumes are sparse files, so that it needs neither root nor devices.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use csi_loopback::proto::csi::v1 as csi;
use tokio::runtime::Runtime;
use tonic::Code;

use super::dialect::{Answer, Dialect, check, decoded, messages, ok};
use super::fake_driver::Fake;

/// Bytes that snapshots share.
const CHUNK: usize = 1 << 20;

/// What a driver does in its own way when it makes volumes and snapshots.
#[derive(Debug, Clone, Copy)]
pub struct Freedom {
    pub dialect: Dialect,
    pub expands: bool,
    pub clones: bool,
    pub stages: bool,
    /// A volume that has snapshots cannot be deleted.
    pub keeps_sources: bool,
    /// The number of snapshots of a volume.
    pub max_snapshots: usize,
    /// Sizes are rounded up to it.
    pub unit: u64,
    /// Snapshots are ready at the second call.
    pub is_slow: bool,
}

impl Freedom {
    pub const fn of(dialect: Dialect) -> Self {
        Self {
            dialect,
            expands: true,
            clones: true,
            stages: true,
            keeps_sources: false,
            max_snapshots: usize::MAX,
            unit: 1,
            is_slow: false,
        }
    }
}

/// The content of a snapshot. Chunks of zeros are missing.
#[derive(Clone)]
struct Snapshot {
    id: String,
    name: String,
    volume: String,
    size: u64,
    chunks: Vec<Option<Arc<Vec<u8>>>>,
    is_deleted: bool,
}

impl Snapshot {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.size as usize];
        for (chunk, place) in self.chunks.iter().zip(bytes.chunks_mut(CHUNK)) {
            if let Some(chunk) = chunk {
                place.copy_from_slice(chunk);
            }
        }
        bytes
    }
}

struct State {
    freedom: Freedom,
    directory: PathBuf,
    /// Sizes by id; the id is the name of the file.
    volumes: BTreeMap<String, u64>,
    snapshots: Vec<Snapshot>,
    /// Names of snapshots that were requested once.
    begun: BTreeSet<String>,
}

pub struct Foreign {
    csi: Fake,
    state: Arc<Mutex<State>>,
}

impl Foreign {
    /// Starts a driver with its files in an empty directory.
    pub fn start(runtime: &Runtime, directory: &Path, freedom: Freedom) -> Self {
        let name = format!("{}.foreign.example", freedom.dialect.name);
        let volumes = directory.join("volumes");
        fs::create_dir(&volumes).unwrap();
        let state = Arc::new(Mutex::new(State {
            freedom,
            directory: volumes,
            volumes: BTreeMap::new(),
            snapshots: Vec::new(),
            begun: BTreeSet::new(),
        }));
        let own = state.clone();
        let answers = move |method: &str, request: Bytes| {
            own.lock().unwrap_or_else(PoisonError::into_inner).answer(method, request)
        };
        let _context = runtime.enter();
        let csi = Fake::answering(directory, &name, true, Arc::new(answers));
        Self { csi, state }
    }

    pub fn endpoint(&self) -> &str {
        &self.csi.endpoint
    }

    /// The number of volumes and of snapshots that exist.
    pub fn count(&self) -> (usize, usize) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let existing = state.snapshots.iter().filter(|snapshot| !snapshot.is_deleted);
        (state.volumes.len(), existing.count())
    }
}

type Refused = (Code, String);

impl State {
    fn answer(&mut self, method: &str, request: Bytes) -> Option<Answer> {
        Some(match method {
            "ControllerGetCapabilities" => ok(self.controller_capabilities()),
            "NodeGetCapabilities" => ok(self.node_capabilities()),
            "CreateVolume" => self.create(decoded(request)),
            "DeleteVolume" => self.delete(decoded(request)),
            "ControllerExpandVolume" => self.expand(decoded(request)),
            "CreateSnapshot" => self.snapshot(decoded(request)),
            "DeleteSnapshot" => self.delete_snapshot(decoded(request)),
            "NodeStageVolume" => {
                let request: csi::NodeStageVolumeRequest = decoded(request);
                self.check(&request.secrets).and_then(|()| ok(csi::NodeStageVolumeResponse {}))
            }
            "NodeUnstageVolume" => ok(csi::NodeUnstageVolumeResponse {}),
            "NodePublishVolume" => {
                let request: csi::NodePublishVolumeRequest = decoded(request);
                let _ = fs::remove_file(&request.target_path);
                symlink(self.file(&request.volume_id), &request.target_path).unwrap();
                ok(csi::NodePublishVolumeResponse {})
            }
            "NodeUnpublishVolume" => {
                let request: csi::NodeUnpublishVolumeRequest = decoded(request);
                let _ = fs::remove_file(&request.target_path);
                ok(csi::NodeUnpublishVolumeResponse {})
            }
            "GetMetadataAllocated" => self.allocated(decoded(request)),
            "GetMetadataDelta" => self.delta(decoded(request)),
            _ => return None,
        })
    }

    fn check(&self, secrets: &HashMap<String, String>) -> Result<(), Refused> {
        check(self.freedom.dialect, secrets)
    }

    fn controller_capabilities(&self) -> csi::ControllerGetCapabilitiesResponse {
        use csi::controller_service_capability::{Rpc, Type, rpc};
        let Freedom { expands, clones, .. } = self.freedom;
        let all = [(rpc::Type::ExpandVolume, expands), (rpc::Type::CloneVolume, clones)];
        let has = all.into_iter().filter(|(_, has)| *has).map(|(rpc, _)| {
            csi::ControllerServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: rpc.into() })) }
        });
        csi::ControllerGetCapabilitiesResponse { capabilities: has.collect() }
    }

    fn node_capabilities(&self) -> csi::NodeGetCapabilitiesResponse {
        use csi::node_service_capability::{Rpc, Type, rpc};
        let stages = Rpc { r#type: rpc::Type::StageUnstageVolume.into() };
        let stages = csi::NodeServiceCapability { r#type: Some(Type::Rpc(stages)) };
        let capabilities = if self.freedom.stages { vec![stages] } else { Vec::new() };
        csi::NodeGetCapabilitiesResponse { capabilities }
    }

    fn existing(&self, id: &str) -> Result<&Snapshot, Refused> {
        let found = self.snapshots.iter().find(|one| one.id == id && !one.is_deleted);
        found.ok_or_else(|| (Code::NotFound, format!("snapshot {id:?} was not found")))
    }

    fn file(&self, volume: &str) -> PathBuf {
        self.directory.join(volume)
    }

    fn create(&mut self, request: csi::CreateVolumeRequest) -> Answer {
        use csi::volume_content_source::Type;
        self.check(&request.secrets)?;
        let bytes = request.capacity_range.map_or(1, |range| range.required_bytes) as u64;
        let source = request.volume_content_source.and_then(|source| source.r#type);
        let content = match source {
            None => None,
            Some(Type::Snapshot(source)) => Some(self.existing(&source.snapshot_id)?.clone()),
            Some(Type::Volume(source)) => {
                Some(read(&self.file(&source.volume_id), &source.volume_id, None))
            }
        };
        let size = content.as_ref().map_or(bytes, |content| content.size.max(bytes));
        let size = size.next_multiple_of(self.freedom.unit);
        let id = format!("of-{}", request.name);
        let file = File::create(self.file(&id)).unwrap();
        file.set_len(size).unwrap();
        for (number, chunk) in content.iter().flat_map(|content| content.chunks.iter().enumerate())
        {
            if let Some(chunk) = chunk {
                file.write_all_at(chunk, (number * CHUNK) as u64).unwrap();
            }
        }
        self.volumes.insert(id.clone(), size);
        let volume =
            csi::Volume { volume_id: id, capacity_bytes: size as i64, ..Default::default() };
        ok(csi::CreateVolumeResponse { volume: Some(volume) })
    }

    fn delete(&mut self, request: csi::DeleteVolumeRequest) -> Answer {
        self.check(&request.secrets)?;
        let id = &request.volume_id;
        let has_snapshots =
            self.snapshots.iter().any(|snapshot| snapshot.volume == *id && !snapshot.is_deleted);
        if self.freedom.keeps_sources && has_snapshots {
            return Err((Code::FailedPrecondition, "the volume has snapshots".to_owned()));
        }
        if self.volumes.remove(id).is_some() {
            fs::remove_file(self.file(id)).unwrap();
        }
        ok(csi::DeleteVolumeResponse {})
    }

    fn expand(&mut self, request: csi::ControllerExpandVolumeRequest) -> Answer {
        let bytes = request.capacity_range.unwrap().required_bytes as u64;
        let size = bytes.next_multiple_of(self.freedom.unit);
        let file = File::options().write(true).open(self.file(&request.volume_id)).unwrap();
        file.set_len(size).unwrap();
        self.volumes.insert(request.volume_id, size);
        let capacity_bytes = size as i64;
        ok(csi::ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required: false })
    }

    fn snapshot(&mut self, request: csi::CreateSnapshotRequest) -> Answer {
        self.check(&request.secrets)?;
        let id = &request.source_volume_id;
        let known = self.snapshots.iter().position(|one| one.name == request.name);
        let number = match known {
            Some(number) => number,
            None => {
                let own = self.snapshots.iter().filter(|one| one.volume == *id);
                if own.count() >= self.freedom.max_snapshots {
                    return Err((Code::ResourceExhausted, "too many snapshots".to_owned()));
                }
                let last = self.snapshots.iter().rfind(|one| one.volume == *id);
                let mut snapshot = read(&self.file(id), id, last);
                snapshot.id = format!("pool/snapshot@{:04}", self.snapshots.len());
                snapshot.name.clone_from(&request.name);
                self.snapshots.push(snapshot);
                self.snapshots.len() - 1
            }
        };
        let is_ready = !self.freedom.is_slow || !self.begun.insert(request.name);
        let has_sizes = self.freedom.dialect.has_sizes;
        let made = &self.snapshots[number];
        let snapshot = csi::Snapshot {
            size_bytes: if has_sizes { made.size as i64 } else { 0 },
            snapshot_id: made.id.clone(),
            source_volume_id: id.clone(),
            ready_to_use: is_ready,
            ..Default::default()
        };
        ok(csi::CreateSnapshotResponse { snapshot: Some(snapshot) })
    }

    fn delete_snapshot(&mut self, request: csi::DeleteSnapshotRequest) -> Answer {
        self.check(&request.secrets)?;
        for snapshot in &mut self.snapshots {
            snapshot.is_deleted |= snapshot.id == request.snapshot_id;
        }
        ok(csi::DeleteSnapshotResponse {})
    }

    fn allocated(&self, request: csi::GetMetadataAllocatedRequest) -> Answer {
        self.check(&request.secrets)?;
        if request.snapshot_id.is_empty() {
            return Err((Code::InvalidArgument, "snapshot_id is empty".to_owned()));
        }
        let target = self.existing(&request.snapshot_id)?.bytes();
        let zeros = vec![0; target.len()];
        let (offset, max_results) = (request.starting_offset, request.max_results);
        messages(self.freedom.dialect, &zeros, &target, offset, max_results)
    }

    fn delta(&self, request: csi::GetMetadataDeltaRequest) -> Answer {
        self.check(&request.secrets)?;
        let (base, target) = (&request.base_snapshot_id, &request.target_snapshot_id);
        if base.is_empty() || target.is_empty() {
            return Err((Code::InvalidArgument, "a snapshot id is empty".to_owned()));
        }
        if self.freedom.dialect.has_change_ids {
            return Err((Code::InvalidArgument, "the base is no change id".to_owned()));
        }
        let target = self.existing(target)?;
        let base = match self.freedom.dialect.base_must_exist {
            true => self.existing(base)?,
            false => {
                let found = self.snapshots.iter().find(|one| one.id == *base);
                found.ok_or_else(|| (Code::NotFound, "the base was not found".to_owned()))?
            }
        };
        if base.volume != target.volume {
            return Err((Code::InvalidArgument, "snapshots of two volumes".to_owned()));
        }
        let (mut base, target) = (base.bytes(), target.bytes());
        base.resize(target.len(), 0);
        let (offset, max_results) = (request.starting_offset, request.max_results);
        messages(self.freedom.dialect, &base, &target, offset, max_results)
    }
}

/// The content of a file. Equal chunks of the previous snapshot are shared.
fn read(path: &Path, volume: &str, last: Option<&Snapshot>) -> Snapshot {
    let mut file = File::open(path).unwrap();
    let size = file.metadata().unwrap().len();
    let mut chunks = Vec::new();
    let mut rest = size;
    while rest > 0 {
        let mut chunk = vec![0; CHUNK.min(rest as usize)];
        file.read_exact(&mut chunk).unwrap();
        rest -= chunk.len() as u64;
        let former = last.and_then(|last| last.chunks.get(chunks.len()).cloned().flatten());
        chunks.push(match former {
            _ if chunk.iter().all(|byte| *byte == 0) => None,
            Some(former) if *former == chunk => Some(former),
            _ => Some(Arc::new(chunk)),
        });
    }
    let (id, name, volume) = (String::new(), String::new(), volume.to_owned());
    Snapshot { id, name, volume, size, chunks, is_deleted: false }
}
