//! The gRPC service Runtime.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use super::layout::Layout;
use super::locks::{TargetLock, TargetLocks};
use super::refusal::{Refusal, Result};
use super::request;
use crate::crust::{Entry, Target};
use api::runtime_server::Runtime;
use grpc::call::{Calls, Describe};
use grpc::proto::crust as api;

/// Maximum concurrent calls. Each may wait for a program.
pub const MAX_CALLS: usize = 64;

/// Implements the Runtime API; clones share the locks and limits.
#[derive(Clone)]
pub struct Ops {
    layout: Arc<dyn Layout>,
    locks: TargetLocks,
    calls: Calls,
    slots: Arc<Semaphore>,
    lock_timeout: Duration,
}

impl Ops {
    /// `lock_timeout`: how long a call waits for another one for the same target.
    pub fn new(
        layout: Arc<dyn Layout>,
        locks: TargetLocks,
        calls: Calls,
        lock_timeout: Duration,
    ) -> Self {
        Self { layout, locks, calls, slots: Arc::new(Semaphore::new(MAX_CALLS)), lock_timeout }
    }

    async fn call<Q, R>(
        &self,
        method: &'static str,
        request: Request<Q>,
        run: fn(&Self, Q) -> Result<R>,
    ) -> Result<Response<R>, Status>
    where
        Q: Describe + Send + 'static,
        R: Describe + Send + 'static,
    {
        let ops = self.clone();
        let slot = self.slots.clone().try_acquire_owned();
        let work = move |request| {
            let _slot = slot.map_err(|_| Refusal::TooManyCalls(MAX_CALLS))?;
            Ok(run(&ops, request)?)
        };
        self.calls.unary(method, request, work).await
    }

    /// Validates the target and locks it.
    fn begin(&self, path: &str) -> Result<(Target, Entry, TargetLock)> {
        let target = request::target(path)?;
        let entry = self.layout.entry(&target)?;
        let lock = self.locks.lock(&entry.path().to_string_lossy(), self.lock_timeout)?;
        Ok((target, entry, lock))
    }
}

#[tonic::async_trait]
impl Runtime for Ops {
    async fn runtime_stage_volume(
        &self,
        request: Request<api::RuntimeStageVolumeRequest>,
    ) -> Result<Response<api::RuntimeStageVolumeResponse>, Status> {
        self.call("RuntimeStageVolume", request, stage).await
    }

    async fn runtime_unstage_volume(
        &self,
        request: Request<api::RuntimeUnstageVolumeRequest>,
    ) -> Result<Response<api::RuntimeUnstageVolumeResponse>, Status> {
        self.call("RuntimeUnstageVolume", request, unstage).await
    }

    async fn runtime_get_volume_stats(
        &self,
        request: Request<api::RuntimeGetVolumeStatsRequest>,
    ) -> Result<Response<api::RuntimeGetVolumeStatsResponse>, Status> {
        self.call("RuntimeGetVolumeStats", request, stats).await
    }

    async fn runtime_expand_volume(
        &self,
        request: Request<api::RuntimeExpandVolumeRequest>,
    ) -> Result<Response<api::RuntimeExpandVolumeResponse>, Status> {
        self.call("RuntimeExpandVolume", request, expand).await
    }
}

fn stage(
    ops: &Ops,
    request: api::RuntimeStageVolumeRequest,
) -> Result<api::RuntimeStageVolumeResponse> {
    let info = request::mount_info(&request)?;
    let (target, entry, _lock) = ops.begin(&request.volume_target_path)?;
    // An invisible target would be treated as gone, and its entry removed.
    if !fs::symlink_metadata(target.as_path()).is_ok_and(|found| found.is_dir()) {
        return Err(Refusal::invalid(
            "volume_target_path",
            "is not a directory; create it first, and check that crust_ops sees the host's directories",
        ));
    }
    ops.layout.stage(&entry, &target, &info).map_err(Refusal::of_files)?;
    Ok(api::RuntimeStageVolumeResponse {})
}

fn unstage(
    ops: &Ops,
    request: api::RuntimeUnstageVolumeRequest,
) -> Result<api::RuntimeUnstageVolumeResponse> {
    let (_, entry, _lock) = ops.begin(&request.volume_target_path)?;
    entry.unstage().map_err(Refusal::of_files)?;
    Ok(api::RuntimeUnstageVolumeResponse {})
}

fn stats(
    ops: &Ops,
    request: api::RuntimeGetVolumeStatsRequest,
) -> Result<api::RuntimeGetVolumeStatsResponse> {
    let (target, entry, _lock) = ops.begin(&request.volume_target_path)?;
    ops.layout.stats(&entry, &target)
}

fn expand(
    ops: &Ops,
    request: api::RuntimeExpandVolumeRequest,
) -> Result<api::RuntimeExpandVolumeResponse> {
    let range = request::range(request.capacity_range)?;
    let (target, entry, _lock) = ops.begin(&request.volume_target_path)?;
    let capacity_bytes = ops.layout.expand(&entry, &target, range)?;
    Ok(api::RuntimeExpandVolumeResponse { capacity_bytes })
}
