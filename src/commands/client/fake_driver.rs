//! A driver for tests of the client: snapshots in memory, volumes as plain files, and injected
//! failures. It needs neither root nor loop devices.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, iter};
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

use csi::controller_server::{Controller, ControllerServer};
use csi::node_server::{Node, NodeServer};
use csi::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use grpc::proto::csi::v1 as csi;
use grpc::{Endpoint, RawMessage};

type Answer<T> = Result<Response<T>, Status>;
type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The nonce of all ids.
const NONCE: &str = "0123456789abcdef";

#[derive(Clone)]
pub struct Fake(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Bytes by snapshot id.
    snapshots: BTreeMap<String, Vec<u8>>,
    delta: Vec<csi::BlockMetadata>,
    capacity: Option<i64>,
    /// Snapshot id by volume id.
    volumes: BTreeMap<String, String>,
    staged: BTreeSet<(String, PathBuf)>,
    published: BTreeSet<(String, PathBuf)>,
    /// Every path in a request.
    paths: BTreeSet<PathBuf>,
    calls: BTreeMap<&'static str, u32>,
    failure: Option<(&'static str, u32, Code)>,
    signal: Option<(&'static str, u32, watch::Sender<bool>)>,
}

/// Serves until it is dropped.
pub struct Served {
    pub endpoint: Endpoint,
    task: tokio::task::JoinHandle<()>,
    _directory: tempfile::TempDir,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fake {
    /// Snapshots with their names, all of one volume, and the listing of GetMetadataDelta.
    pub fn new<const N: usize>(snapshots: [(&str, Vec<u8>); N], delta: &[(i64, i64)]) -> Self {
        let snapshots = snapshots
            .into_iter()
            .map(|(name, image)| (format!("snap-{name}-{NONCE}"), image))
            .collect();
        let delta = delta
            .iter()
            .map(|&(byte_offset, size_bytes)| csi::BlockMetadata { byte_offset, size_bytes })
            .collect();
        Self(Arc::new(Mutex::new(State { snapshots, delta, ..State::default() })))
    }

    pub fn serve(&self) -> Served {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("csi.sock");
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let server = Server::builder()
            .add_service(ControllerServer::new(self.clone()))
            .add_service(NodeServer::new(self.clone()))
            .add_service(SnapshotMetadataServer::new(self.clone()));
        let task = tokio::spawn(async move {
            server.serve_with_incoming(incoming).await.unwrap();
        });
        let endpoint = socket.to_str().unwrap().parse().unwrap();
        Served { endpoint, task, _directory: directory }
    }

    /// The nth call with this name fails: before its work with FAILED_PRECONDITION, after it with
    /// other codes. `stream` is the end of a delta.
    pub fn fail(&self, call: &'static str, nth: u32, code: Code) {
        self.state().failure = Some((call, nth, code));
    }

    /// The nth call with this name sends a signal to the client.
    pub fn signal_at(&self, call: &'static str, nth: u32, signal: watch::Sender<bool>) {
        self.state().signal = Some((call, nth, signal));
    }

    /// Reports a wrong capacity.
    pub fn claim_capacity(&self, bytes: i64) {
        self.state().capacity = Some(bytes);
    }

    pub fn assert_nothing_left(&self) {
        let state = self.state();
        assert!(state.volumes.is_empty(), "volumes: {:?}", state.volumes);
        assert!(state.staged.is_empty(), "staged: {:?}", state.staged);
        assert!(state.published.is_empty(), "published: {:?}", state.published);
        for path in &state.paths {
            // The staging path is root/volume/staging, the target root/volume/device.
            let root = path.ancestors().nth(2).unwrap();
            assert!(!root.exists(), "{} remains", root.display());
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Does the work of a call, or fails as the test requires.
    fn call<T>(&self, name: &'static str, work: impl FnOnce(&mut State) -> T) -> Answer<T> {
        let mut state = self.state();
        let count = state.calls.entry(name).or_default();
        *count += 1;
        let now = (name, *count);
        if let Some((call, nth, signal)) = &state.signal
            && (*call, *nth) == now
        {
            signal.send_replace(true);
        }
        let failure = state
            .failure
            .filter(|(call, nth, _)| (*call, *nth) == now)
            .map(|(_, _, code)| Status::new(code, "injected"));
        match failure {
            Some(status) if status.code() == Code::FailedPrecondition => Err(status),
            Some(status) => {
                work(&mut state);
                Err(status)
            }
            None => Ok(Response::new(work(&mut state))),
        }
    }
}

/// A service without the calls in brackets.
macro_rules! service {
    ($service:ident, [$($call:ident $request:ident $response:ident),*], $($faked:tt)*) => {
        #[tonic::async_trait]
        impl $service for Fake {
            $($faked)*
            $(async fn $call(&self, _: Request<csi::$request>) -> Answer<csi::$response> {
                Err(Status::unimplemented(stringify!($call)))
            })*
        }
    };
}

service! { Controller, [
    controller_publish_volume ControllerPublishVolumeRequest ControllerPublishVolumeResponse,
    controller_unpublish_volume ControllerUnpublishVolumeRequest ControllerUnpublishVolumeResponse,
    validate_volume_capabilities ValidateVolumeCapabilitiesRequest ValidateVolumeCapabilitiesResponse,
    controller_list_volume_health ControllerListVolumeHealthRequest ControllerListVolumeHealthResponse,
    controller_get_volume_health ControllerGetVolumeHealthRequest ControllerGetVolumeHealthResponse,
    get_capacity GetCapacityRequest GetCapacityResponse,
    controller_get_capabilities ControllerGetCapabilitiesRequest ControllerGetCapabilitiesResponse,
    create_snapshot CreateSnapshotRequest CreateSnapshotResponse,
    delete_snapshot DeleteSnapshotRequest DeleteSnapshotResponse,
    get_snapshot GetSnapshotRequest GetSnapshotResponse,
    controller_expand_volume ControllerExpandVolumeRequest ControllerExpandVolumeResponse,
    controller_get_volume ControllerGetVolumeRequest ControllerGetVolumeResponse,
    controller_modify_volume ControllerModifyVolumeRequest ControllerModifyVolumeResponse,
    list_snapshot_deltas ListSnapshotDeltasRequest ListSnapshotDeltasResponse
],
    async fn create_volume(
        &self,
        request: Request<csi::CreateVolumeRequest>,
    ) -> Answer<csi::CreateVolumeResponse> {
        use csi::volume_content_source::Type;
        let request = request.into_inner();
        let source = request.volume_content_source.and_then(|source| source.r#type);
        let Some(Type::Snapshot(source)) = source else {
            return Err(Status::invalid_argument("volume_content_source"));
        };
        self.call("create_volume", |state| {
            let volume_id = format!("vol-{}-{NONCE}", request.name);
            state.volumes.insert(volume_id.clone(), source.snapshot_id);
            csi::CreateVolumeResponse { volume: Some(csi::Volume { volume_id, ..Default::default() }) }
        })
    }

    async fn delete_volume(
        &self,
        request: Request<csi::DeleteVolumeRequest>,
    ) -> Answer<csi::DeleteVolumeResponse> {
        let id = request.into_inner().volume_id;
        self.call("delete_volume", |state| {
            assert!(!state.staged.iter().any(|(volume, _)| *volume == id), "{id} is staged");
            state.volumes.remove(&id);
            csi::DeleteVolumeResponse {}
        })
    }

    /// Pages of one volume each.
    async fn list_volumes(
        &self,
        request: Request<csi::ListVolumesRequest>,
    ) -> Answer<csi::ListVolumesResponse> {
        let after = request.into_inner().starting_token;
        self.call("list_volumes", |state| {
            let mut rest = state.volumes.keys().filter(|id| **id > after);
            let entries: Vec<_> = rest
                .next()
                .map(|id| csi::list_volumes_response::Entry {
                    volume: Some(csi::Volume { volume_id: id.clone(), ..Default::default() }),
                    status: None,
                })
                .into_iter()
                .collect();
            let last = entries.first().and_then(|entry| entry.volume.clone());
            let next_token = match rest.next() {
                Some(_) => last.unwrap_or_default().volume_id,
                None => String::new(),
            };
            csi::ListVolumesResponse { entries, next_token }
        })
    }

    async fn list_snapshots(
        &self,
        _: Request<csi::ListSnapshotsRequest>,
    ) -> Answer<csi::ListSnapshotsResponse> {
        self.call("list_snapshots", |state| csi::ListSnapshotsResponse {
            entries: state
                .snapshots
                .iter()
                .map(|(id, image)| csi::list_snapshots_response::Entry {
                    snapshot: Some(csi::Snapshot {
                        size_bytes: image.len() as i64,
                        snapshot_id: id.clone(),
                        ready_to_use: true,
                        ..Default::default()
                    }),
                })
                .collect(),
            next_token: String::new(),
        })
    }
}

service! { Node, [
    node_get_volume_stats NodeGetVolumeStatsRequest NodeGetVolumeStatsResponse,
    node_get_volume_health NodeGetVolumeHealthRequest NodeGetVolumeHealthResponse,
    node_get_storage_health NodeGetStorageHealthRequest NodeGetStorageHealthResponse,
    node_expand_volume NodeExpandVolumeRequest NodeExpandVolumeResponse,
    node_get_capabilities NodeGetCapabilitiesRequest NodeGetCapabilitiesResponse,
    node_get_info NodeGetInfoRequest NodeGetInfoResponse
],
    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> Answer<csi::NodeStageVolumeResponse> {
        let request = request.into_inner();
        let path = PathBuf::from(request.staging_target_path);
        self.call("node_stage_volume", |state| {
            assert!(path.is_dir(), "the caller creates the staging path");
            state.paths.insert(path.clone());
            state.staged.insert((request.volume_id, path));
            csi::NodeStageVolumeResponse {}
        })
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Answer<csi::NodeUnstageVolumeResponse> {
        let request = request.into_inner();
        self.call("node_unstage_volume", |state| {
            let id = request.volume_id;
            assert!(!state.published.iter().any(|(volume, _)| *volume == id), "{id} is published");
            state.staged.remove(&(id, PathBuf::from(request.staging_target_path)));
            csi::NodeUnstageVolumeResponse {}
        })
    }

    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Answer<csi::NodePublishVolumeResponse> {
        let request = request.into_inner();
        let target = PathBuf::from(request.target_path);
        self.call("node_publish_volume", |state| {
            assert!(request.readonly && !target.exists(), "{}", target.display());
            let image = &state.snapshots[&state.volumes[&request.volume_id]];
            fs::write(&target, image).unwrap();
            state.paths.insert(target.clone());
            state.published.insert((request.volume_id, target));
            csi::NodePublishVolumeResponse {}
        })
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Answer<csi::NodeUnpublishVolumeResponse> {
        let request = request.into_inner();
        self.call("node_unpublish_volume", |state| {
            let target = Path::new(&request.target_path);
            if state.published.remove(&(request.volume_id, target.to_owned())) {
                fs::remove_file(target).unwrap();
            }
            csi::NodeUnpublishVolumeResponse {}
        })
    }
}

#[tonic::async_trait]
impl SnapshotMetadata for Fake {
    type GetMetadataAllocatedStream = Messages<RawMessage>;
    type GetMetadataDeltaStream = Messages<RawMessage>;

    async fn get_metadata_allocated(
        &self,
        _: Request<csi::GetMetadataAllocatedRequest>,
    ) -> Answer<Self::GetMetadataAllocatedStream> {
        Err(Status::unimplemented("get_metadata_allocated"))
    }

    /// A message for each extent.
    async fn get_metadata_delta(
        &self,
        request: Request<csi::GetMetadataDeltaRequest>,
    ) -> Answer<Self::GetMetadataDeltaStream> {
        let target = request.into_inner().target_snapshot_id;
        let mut messages: Vec<_> = {
            let state = self.state();
            let image = state.snapshots.get(&target).ok_or_else(|| Status::not_found(target))?;
            let capacity = state.capacity.unwrap_or(image.len() as i64);
            let message = |block: &csi::BlockMetadata| csi::GetMetadataDeltaResponse {
                block_metadata_type: csi::BlockMetadataType::VariableLength.into(),
                volume_capacity_bytes: capacity,
                block_metadata: vec![*block],
            };
            state.delta.iter().map(|block| Ok(RawMessage::of(&message(block)))).collect()
        };
        if let Err(status) = self.call("stream", |_| ()) {
            messages.push(Err(status));
        }
        Ok(Response::new(Box::pin(iter(messages))))
    }
}
