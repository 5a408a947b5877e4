//! A driver of another vendor that records each request and returns responses of the test. By
//! default it does not support runtime assisted mounting, and creates a directory where a driver
//! would mount a volume. It replaces csi-driver-host-path, whose module is not available
//! everywhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use csi::node_service_capability::rpc::Type;
use csi::node_service_capability::{self, Rpc as Capability};
use csi_loopback::proto::csi::v1 as csi;
use prost::Message;
use tempfile::TempDir;
use tonic::Code;

use super::Cluster;
use super::fake_driver::{Answers, Fake};

/// The capabilities of a driver without runtime assisted mounting.
pub const PLAIN: [Type; 3] = [Type::StageUnstageVolume, Type::GetVolumeStats, Type::ExpandVolume];

/// The same with runtime assisted mounting (KEP-2857).
pub const DEFERRING: [Type; 6] = [
    Type::StageUnstageVolume,
    Type::GetVolumeStats,
    Type::ExpandVolume,
    Type::DeferFsOps,
    Type::DeferFsOpsWithSupplementalGroup,
    Type::DeferFsOpsWithSupplementalGroupChangePolicy,
];

pub type Answer = Result<Vec<u8>, (Code, String)>;

#[derive(Default)]
struct State {
    /// None: NodeGetCapabilities returns UNIMPLEMENTED.
    capabilities: Option<Vec<i32>>,
    calls: Vec<(String, Bytes)>,
    answers: BTreeMap<String, Answer>,
    held: BTreeSet<String>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Recorder<'a> {
    pub name: String,
    cluster: &'a Cluster,
    shared: Arc<Shared>,
    // Dropped in this order.
    fake: Option<Fake>,
    directory: TempDir,
}

impl<'a> Recorder<'a> {
    /// Starts it with these capabilities of the Node service.
    pub fn start(cluster: &'a Cluster, capabilities: &[Type]) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let name = format!("{}.csi.example", cluster.unique("recorder"));
        let shared = Arc::<Shared>::default();
        let mut recorder = Self { name, cluster, shared, fake: None, directory };
        recorder.set_capabilities(Some(capabilities));
        recorder.start_again();
        recorder
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join(format!("{}.sock", self.name))
    }

    /// Stops it and closes all connections.
    pub fn stop(&mut self) {
        self.release_all();
        self.fake = None;
    }

    pub fn start_again(&mut self) {
        let shared = Arc::clone(&self.shared);
        let answers: Answers = Arc::new(move |method, request| answer(&shared, method, request));
        let start = async { Fake::answering(self.directory.path(), &self.name, false, answers) };
        self.fake = Some(self.cluster.block_on(start));
    }

    /// Sets the capabilities. None: NodeGetCapabilities returns UNIMPLEMENTED.
    pub fn set_capabilities(&self, capabilities: Option<&[Type]>) {
        let numbers = |types: &[Type]| types.iter().map(|one| i32::from(*one)).collect();
        self.shared.state().capabilities = capabilities.map(numbers);
    }

    /// Sets the response to calls of this method (`NodeGetVolumeStats`), instead of the default.
    pub fn answer(&self, method: &str, answer: Answer) {
        self.shared.state().answers.insert(method.to_owned(), answer);
    }

    pub fn refuse(&self, method: &str, code: Code, words: &str) {
        self.answer(method, Err((code, words.to_owned())));
    }

    /// Restores the default response.
    pub fn reset_answer(&self, method: &str) {
        self.shared.state().answers.remove(method);
    }

    /// Blocks calls of this method after they are recorded.
    pub fn hold(&self, method: &str) {
        self.shared.state().held.insert(method.to_owned());
    }

    /// Unblocks the calls.
    pub fn release(&self, method: &str) {
        self.shared.state().held.remove(method);
        self.shared.changed.notify_all();
    }

    fn release_all(&self) {
        self.shared.state().held.clear();
        self.shared.changed.notify_all();
    }

    /// The methods of the recorded calls, without NodeGetCapabilities.
    pub fn calls(&self) -> Vec<String> {
        let state = self.shared.state();
        let names = state.calls.iter().map(|(name, _)| name.clone());
        names.filter(|name| name != "NodeGetCapabilities").collect()
    }

    /// The recorded requests of a type, in order.
    pub fn seen<R: Message + Default>(&self) -> Vec<R> {
        let raw = self.seen_raw(method_of::<R>());
        raw.into_iter().map(|bytes| R::decode(bytes).unwrap()).collect()
    }

    /// The last recorded request of a type.
    pub fn last<R: Message + Default>(&self) -> R {
        self.seen().pop().unwrap_or_else(|| panic!("no {} was recorded", method_of::<R>()))
    }

    /// The recorded requests of a method, encoded.
    pub fn seen_raw(&self, method: &str) -> Vec<Bytes> {
        let state = self.shared.state();
        let of_method = state.calls.iter().filter(|(name, _)| name == method);
        of_method.map(|(_, bytes)| bytes.clone()).collect()
    }

    /// Clears the recorded calls.
    pub fn forget(&self) {
        self.shared.state().calls.clear();
    }
}

impl Drop for Recorder<'_> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// `NodePublishVolume` of `…::NodePublishVolumeRequest`.
fn method_of<R>() -> &'static str {
    let name = std::any::type_name::<R>().rsplit("::").next().unwrap_or_default();
    name.strip_suffix("Request").unwrap_or(name)
}

type Messages = Result<Vec<Vec<u8>>, (Code, String)>;

/// Returns None for the Identity service, which the fake driver implements.
fn answer(shared: &Shared, method: &str, request: Bytes) -> Option<Messages> {
    let mut state = shared.state();
    state.calls.push((method.to_owned(), request.clone()));
    while state.held.contains(method) {
        state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    let configured = state.answers.get(method).cloned();
    let capabilities = state.capabilities.clone();
    drop(state);
    let answer = match configured {
        Some(answer) => answer,
        None if ["Probe", "GetPluginInfo", "GetPluginCapabilities"].contains(&method) => {
            return None;
        }
        None => default_answer(method, request, capabilities),
    };
    Some(answer.map(|message| vec![message]))
}

fn default_answer(method: &str, request: Bytes, capabilities: Option<Vec<i32>>) -> Answer {
    let unimplemented = || Err((Code::Unimplemented, format!("{method} is not implemented")));
    Ok(match method {
        "NodeGetCapabilities" => match capabilities {
            Some(capabilities) => capabilities_of(&capabilities).encode_to_vec(),
            None => return unimplemented(),
        },
        "NodeGetInfo" => csi::NodeGetInfoResponse { node_id: "node".into(), ..Default::default() }
            .encode_to_vec(),
        "NodePublishVolume" => {
            let target = csi::NodePublishVolumeRequest::decode(request).unwrap().target_path;
            // An earlier call whose client has disconnected can run concurrently.
            let result = match fs::create_dir(&target) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
                result => result,
            };
            result.map_err(|error| (Code::Internal, format!("{target}: {error}")))?;
            Vec::new()
        }
        "NodeUnpublishVolume" => {
            let target = csi::NodeUnpublishVolumeRequest::decode(request).unwrap().target_path;
            let _ = fs::remove_dir(&target);
            Vec::new()
        }
        "NodeStageVolume" | "NodeUnstageVolume" => Vec::new(),
        "NodeGetVolumeStats" => stats(None).encode_to_vec(),
        "NodeExpandVolume" => {
            let range = csi::NodeExpandVolumeRequest::decode(request).unwrap().capacity_range;
            let capacity_bytes = range.unwrap_or_default().required_bytes;
            csi::NodeExpandVolumeResponse { capacity_bytes }.encode_to_vec()
        }
        _ => return unimplemented(),
    })
}

fn capabilities_of(numbers: &[i32]) -> csi::NodeGetCapabilitiesResponse {
    let capability = |number: &i32| csi::NodeServiceCapability {
        r#type: Some(node_service_capability::Type::Rpc(Capability { r#type: *number })),
    };
    csi::NodeGetCapabilitiesResponse { capabilities: numbers.iter().map(capability).collect() }
}

/// Statistics of a small volume with this condition: whether it is abnormal, and the message.
pub fn stats(condition: Option<(bool, &str)>) -> csi::NodeGetVolumeStatsResponse {
    use csi::volume_usage::Unit;
    let usage = csi::VolumeUsage { available: 60, total: 100, used: 40, unit: Unit::Bytes.into() };
    csi::NodeGetVolumeStatsResponse {
        usage: vec![usage],
        volume_condition: condition
            .map(|(abnormal, message)| csi::VolumeCondition { abnormal, message: message.into() }),
    }
}
