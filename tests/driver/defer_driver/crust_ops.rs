//! A scripted crust_ops.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use csi_loopback::proto::crust::runtime_server::{Runtime, RuntimeServer};
use csi_loopback::proto::crust::{self as api, volume_usage::Unit};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

/// How it responds.
#[derive(Debug, Clone, Default)]
pub enum Mood {
    #[default]
    Well,
    /// With this code, to the named method or to all.
    Fails(Code, Option<&'static str>),
    /// Does not respond.
    Silent,
    /// With invalid stats.
    Lies,
}

#[derive(Debug, Default)]
struct State {
    mood: Mood,
    staged: BTreeMap<String, api::RuntimeStageVolumeRequest>,
    /// Names of the called methods, in order.
    calls: Vec<&'static str>,
    expanded: Vec<api::RuntimeExpandVolumeRequest>,
}

/// The service, and the directory of its socket. It survives a stop of the server.
pub struct CrustOps {
    directory: TempDir,
    state: Arc<Mutex<State>>,
    server: Option<tokio::runtime::Runtime>,
}

#[derive(Clone)]
struct Service(Arc<Mutex<State>>);

impl CrustOps {
    pub fn start() -> Self {
        let directory = TempDir::with_prefix("crust-").unwrap();
        let mut this = Self { directory, state: Arc::default(), server: None };
        this.serve();
        this
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("crust.sock")
    }

    pub fn serve(&mut self) {
        let threads = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let _ = std::fs::remove_file(self.socket());
        let listener = {
            let _inside = threads.enter();
            UnixListener::bind(self.socket()).unwrap()
        };
        let service = RuntimeServer::new(Service(self.state.clone()));
        threads.spawn(
            Server::builder()
                .add_service(service)
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        self.server = Some(threads);
    }

    /// Like a kill: connections break.
    pub fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown_background();
        }
    }

    pub fn is(&self, mood: Mood) {
        self.state().mood = mood;
    }

    pub fn staged(&self, target: &Path) -> Option<api::RuntimeStageVolumeRequest> {
        self.state().staged.get(target.to_str().unwrap()).cloned()
    }

    pub fn calls(&self) -> Vec<&'static str> {
        self.state().calls.clone()
    }

    pub fn expanded(&self) -> Vec<api::RuntimeExpandVolumeRequest> {
        self.state().expanded.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl Drop for CrustOps {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Service {
    async fn called(&self, method: &'static str) -> Result<(), Status> {
        let mood = {
            let mut state = self.0.lock().unwrap();
            state.calls.push(method);
            state.mood.clone()
        };
        match mood {
            Mood::Well | Mood::Lies => Ok(()),
            Mood::Fails(code, None) => Err(Status::new(code, "on purpose")),
            Mood::Fails(code, Some(only)) if only == method => Err(Status::new(code, "on purpose")),
            Mood::Fails(..) => Ok(()),
            Mood::Silent => std::future::pending().await,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

#[tonic::async_trait]
impl Runtime for Service {
    async fn runtime_stage_volume(
        &self,
        request: Request<api::RuntimeStageVolumeRequest>,
    ) -> Result<Response<api::RuntimeStageVolumeResponse>, Status> {
        self.called("stage").await?;
        let req = request.into_inner();
        self.state().staged.insert(req.volume_target_path.clone(), req);
        Ok(Response::new(Default::default()))
    }

    async fn runtime_unstage_volume(
        &self,
        request: Request<api::RuntimeUnstageVolumeRequest>,
    ) -> Result<Response<api::RuntimeUnstageVolumeResponse>, Status> {
        self.called("unstage").await?;
        self.state().staged.remove(&request.into_inner().volume_target_path);
        Ok(Response::new(Default::default()))
    }

    async fn runtime_get_volume_stats(
        &self,
        request: Request<api::RuntimeGetVolumeStatsRequest>,
    ) -> Result<Response<api::RuntimeGetVolumeStatsResponse>, Status> {
        self.called("stats").await?;
        let state = self.state();
        if !state.staged.contains_key(&request.into_inner().volume_target_path) {
            return Err(Status::not_found("no entry"));
        }
        let total = if matches!(state.mood, Mood::Lies) { -1 } else { 1000 };
        let usage =
            |unit: Unit| api::VolumeUsage { available: 600, total, used: 400, unit: unit.into() };
        let condition = api::VolumeCondition { abnormal: false, message: "in a container".into() };
        Ok(Response::new(api::RuntimeGetVolumeStatsResponse {
            usage: vec![usage(Unit::Bytes), usage(Unit::Inodes)],
            volume_condition: Some(condition),
        }))
    }

    async fn runtime_expand_volume(
        &self,
        request: Request<api::RuntimeExpandVolumeRequest>,
    ) -> Result<Response<api::RuntimeExpandVolumeResponse>, Status> {
        self.called("expand").await?;
        self.state().expanded.push(request.into_inner());
        Ok(Response::new(Default::default()))
    }
}
