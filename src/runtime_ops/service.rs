//! The service Runtime.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use super::layout::Layout;
use super::refusal::{Refusal, Result};
use super::request;
use super::turns::{Turn, Turns};
use crate::crust::{Entry, Target};
use crate::grpc::call::{Calls, Describe, Subject, note};
use crate::proto::crust as api;
use api::runtime_server::Runtime;

/// Calls at a time. Each may wait for a program.
pub const MAX_CALLS: usize = 64;

/// Cheap to clone.
#[derive(Clone)]
pub struct Ops {
    layout: Arc<dyn Layout>,
    turns: Turns,
    calls: Calls,
    slots: Arc<Semaphore>,
    patience: Duration,
}

impl Ops {
    /// `patience`: how long a call waits for another one for the same target.
    pub fn new(layout: Arc<dyn Layout>, turns: Turns, calls: Calls, patience: Duration) -> Self {
        Self { layout, turns, calls, slots: Arc::new(Semaphore::new(MAX_CALLS)), patience }
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
            let _slot = slot.map_err(|_| Refusal::Flooded(MAX_CALLS))?;
            Ok(run(&ops, request)?)
        };
        self.calls.unary(method, request, work).await
    }

    /// The volume that is asked for, and the turn for it.
    fn begin(&self, path: &str) -> Result<(Target, Entry, Turn)> {
        let target = request::target(path)?;
        let entry = self.layout.entry(&target)?;
        let turn = self.turns.take(&entry.path().to_string_lossy(), self.patience)?;
        Ok((target, entry, turn))
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
    asked: api::RuntimeStageVolumeRequest,
) -> Result<api::RuntimeStageVolumeResponse> {
    let info = request::mount_info(&asked)?;
    let (target, entry, _turn) = ops.begin(&asked.volume_target_path)?;
    // What is not seen here would be taken for gone, and its entry collected.
    if !fs::symlink_metadata(target.as_path()).is_ok_and(|found| found.is_dir()) {
        return Err(Refusal::invalid(
            "volume_target_path",
            "is not a directory here; make it first, and let crust_ops see the host's directories",
        ));
    }
    ops.layout.stage(&entry, &target, &info).map_err(Refusal::of_files)?;
    Ok(api::RuntimeStageVolumeResponse {})
}

fn unstage(
    ops: &Ops,
    asked: api::RuntimeUnstageVolumeRequest,
) -> Result<api::RuntimeUnstageVolumeResponse> {
    let (_, entry, _turn) = ops.begin(&asked.volume_target_path)?;
    entry.unstage().map_err(Refusal::of_files)?;
    Ok(api::RuntimeUnstageVolumeResponse {})
}

fn stats(
    ops: &Ops,
    asked: api::RuntimeGetVolumeStatsRequest,
) -> Result<api::RuntimeGetVolumeStatsResponse> {
    let (target, entry, _turn) = ops.begin(&asked.volume_target_path)?;
    ops.layout.stats(&entry, &target)
}

fn expand(
    ops: &Ops,
    asked: api::RuntimeExpandVolumeRequest,
) -> Result<api::RuntimeExpandVolumeResponse> {
    let range = request::range(asked.capacity_range)?;
    let (target, entry, _turn) = ops.begin(&asked.volume_target_path)?;
    let capacity_bytes = ops.layout.expand(&entry, &target, range)?;
    Ok(api::RuntimeExpandVolumeResponse { capacity_bytes })
}

macro_rules! describe {
    ($($request:ident, $response:ident;)*) => {$(
        impl Describe for api::$request {
            // Nothing else: options have no place in a log.
            fn describe(&self, subject: &mut Subject) {
                subject.path = note(&self.volume_target_path);
            }
        }

        impl Describe for api::$response {
            fn describe(&self, _: &mut Subject) {}
        }
    )*};
}

describe! {
    RuntimeStageVolumeRequest, RuntimeStageVolumeResponse;
    RuntimeUnstageVolumeRequest, RuntimeUnstageVolumeResponse;
    RuntimeGetVolumeStatsRequest, RuntimeGetVolumeStatsResponse;
    RuntimeExpandVolumeRequest, RuntimeExpandVolumeResponse;
}
