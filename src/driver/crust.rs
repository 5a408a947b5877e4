//! Client of crust_ops (KEP-2857, "Runtime API"): the backend's interface to container runtimes.
//!
//! The backend calls from threads that may block. Each call has its own connection, so that none is
//! stale after a restart of crust_ops and no call waits for another. Time and sizes are bounded,
//! because the volume's lock is held. A failure never leads to a mount on this host or an invented
//! response: it is an error with the name of the method, classified by [`to_error`].

use std::error::Error as _;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Response, Status};

use super::response;
use common::text::{MAX_MESSAGE, truncate};
use crust::runtime_client::RuntimeClient;
use crust::volume_group_change_policy::Policy;
use crust::volume_type::Type;
use crust::volume_usage::Unit;
use grpc::proto::crust;
use grpc::{SocketPath, code_name};
use storage::{
    Condition, DeferredMount, Error, GroupPolicy, HealthProblem, Result, Runtime, RuntimeStats,
    Usage,
};

type Client = RuntimeClient<Channel>;

/// Maximum bytes of a response, more than any valid one has.
const MAX_RESPONSE: usize = 64 << 10;
/// The deadline sent to crust_ops is longer than the local timeout by this, so that the local
/// timeout always expires first and its message is returned.
const GRACE: Duration = Duration::from_secs(1);

const STAGE: &str = "RuntimeStageVolume";
const UNSTAGE: &str = "RuntimeUnstageVolume";
const STATS: &str = "RuntimeGetVolumeStats";
const EXPAND: &str = "RuntimeExpandVolume";

/// A client of the crust_ops at `socket`.
pub struct Crust {
    socket: PathBuf,
    timeout: Duration,
    runtime: Handle,
}

impl fmt::Debug for Crust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crust").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl Crust {
    /// `timeout` applies to each call. Must be called inside a tokio runtime, whose threads do the
    /// work.
    pub fn new(endpoint: &SocketPath, timeout: Duration) -> Self {
        Self { socket: endpoint.as_ref().to_owned(), timeout, runtime: Handle::current() }
    }

    /// Makes a call. Blocks: must not run on a thread of the tokio runtime.
    fn call<Q, R>(
        &self,
        method: &'static str,
        message: Q,
        send: impl AsyncFnOnce(&mut Client, Request<Q>) -> Result<Response<R>, Status>,
    ) -> Result<R, Failure> {
        let mut request = Request::new(message);
        request.set_timeout(self.timeout + GRACE);
        let called = async {
            let mut client = self.connect().await?;
            let response = send(&mut client, request).await;
            response.map(Response::into_inner).map_err(Cause::of)
        };
        let finished = self.runtime.block_on(async { timeout(self.timeout, called).await });
        let result = finished.unwrap_or(Err(Cause::TimedOut(self.timeout)));
        result.map_err(|cause| Failure { method, cause })
    }

    async fn connect(&self) -> Result<Client, Cause> {
        let path = self.socket.clone();
        // The host is not resolved. It becomes :authority, for which h2 rejects a socket path.
        let connected = Endpoint::from_static("http://localhost")
            .connect_with_connector(tower::service_fn(move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            }))
            .await;
        let channel = connected.map_err(|error| Cause::Unreachable {
            socket: self.socket.clone(),
            why: innermost(&error),
        })?;
        Ok(RuntimeClient::new(channel).max_decoding_message_size(MAX_RESPONSE))
    }
}

impl Runtime for Crust {
    fn stage(&self, mount: &DeferredMount<'_>) -> Result<()> {
        let group = mount.deferral.group.map(|group| group.to_string());
        let request = crust::RuntimeStageVolumeRequest {
            volume_type: Some(crust::VolumeType { r#type: Type::Block.into() }),
            volume_target_path: text("target_path", mount.target)?,
            volume_backing_path: text("volume_id", mount.device)?,
            fs_type: mount.fs_type.name().to_owned(),
            mount_flags: mount.flags.to_vec(),
            volume_supplemental_group: group.unwrap_or_default(),
            volume_supplemental_group_change_policy: mount.deferral.policy.map(wire_policy),
        };
        let response = self.call(STAGE, request, async |client, request| {
            client.runtime_stage_volume(request).await
        });
        response.map(drop).map_err(to_error)
    }

    fn unstage(&self, target: &Path) -> Result<()> {
        let request =
            crust::RuntimeUnstageVolumeRequest { volume_target_path: text("target_path", target)? };
        let response = self.call(UNSTAGE, request, async |client, request| {
            client.runtime_unstage_volume(request).await
        });
        response.map(drop).map_err(to_error)
    }

    fn stats(&self, target: &Path) -> Result<RuntimeStats> {
        let request = crust::RuntimeGetVolumeStatsRequest {
            volume_target_path: text("volume_path", target)?,
        };
        let response = self.call(STATS, request, async |client, request| {
            client.runtime_get_volume_stats(request).await
        });
        match response {
            Ok(response) => stats(response),
            Err(failure) => failure.as_stats().map_or_else(|| Err(to_error(failure)), Ok),
        }
    }

    fn expand(&self, target: &Path, bytes: u64) -> Result<()> {
        let range = crust::CapacityRange { required_bytes: response::bytes(bytes), limit_bytes: 0 };
        let request = crust::RuntimeExpandVolumeRequest {
            volume_target_path: text("volume_path", target)?,
            capacity_range: Some(range),
        };
        let response = self.call(EXPAND, request, async |client, request| {
            client.runtime_expand_volume(request).await
        });
        // The reported size may be the size of the filesystem or of the device, so it is ignored.
        response.map(drop).map_err(to_error)
    }
}

/// A path as UTF-8 text for the wire.
fn text(field: &'static str, path: &Path) -> Result<String> {
    let text = path.to_str().ok_or_else(|| Error::invalid(field, "is not UTF-8"))?;
    Ok(text.to_owned())
}

fn wire_policy(policy: GroupPolicy) -> crust::VolumeGroupChangePolicy {
    let policy = match policy {
        GroupPolicy::Always => Policy::Always,
        GroupPolicy::OnRootMismatch => Policy::OnRootMismatch,
    };
    crust::VolumeGroupChangePolicy { policy: policy.into() }
}

/// Why a call failed.
#[derive(Debug)]
struct Failure {
    method: &'static str,
    cause: Cause,
}

#[derive(Debug)]
enum Cause {
    /// No process listens on the socket.
    Unreachable { socket: PathBuf, why: String },
    /// The connection broke; the operation may or may not have been done.
    Disconnected(String),
    /// No response within this time.
    TimedOut(Duration),
    /// crust_ops returned an error.
    Status(Code, String),
}

impl Cause {
    fn of(status: Status) -> Self {
        match status.source() {
            // An error that crust_ops returned has no source. (Neither has a message that is too
            // large.)
            Some(source) => Self::Disconnected(innermost(source)),
            None => Self::Status(status.code(), truncate(status.message(), MAX_MESSAGE / 2)),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.method)?;
        match &self.cause {
            Cause::Unreachable { socket, why } => write!(
                f,
                "crust_ops is not reachable at {} ({why}); start csi-loopback --mode runtime-ops, or set --crust-endpoint to its socket",
                socket.display()
            ),
            Cause::Disconnected(why) => {
                write!(f, "the connection to crust_ops broke ({why}); try again")
            }
            Cause::TimedOut(timeout) => write!(
                f,
                "crust_ops did not respond within {} (--crust-timeout); try again",
                humantime::format_duration(*timeout)
            ),
            Cause::Status(code, message) => {
                write!(f, "crust_ops returned {}: {message}", code_name(*code))
            }
        }
    }
}

impl Failure {
    fn code(&self) -> Option<Code> {
        match self.cause {
            Cause::Status(code, _) => Some(code),
            _ => None,
        }
    }

    /// The errors of a stats call that are not failures: that no process can measure the volume now
    /// is reported as its condition.
    fn as_stats(&self) -> Option<RuntimeStats> {
        let Cause::Status(code, text) = &self.cause else { return None };
        let (abnormal, message) = match code {
            // A runtime without crust support lets a pod write into the empty directory.
            Code::FailedPrecondition => (
                true,
                format!(
                    "not claimed by a container runtime: unless the containers have not started yet, pods write to the host directory and not to the volume ({text})"
                ),
            ),
            Code::NotFound => (
                true,
                format!(
                    "no longer assigned to a container runtime: delete the pod, so that the volume is published again ({text})"
                ),
            ),
            Code::Unavailable => {
                (false, format!("not mounted by any container, so its usage is unknown ({text})"))
            }
            _ => return None,
        };
        Some(RuntimeStats { usage: None, condition: condition(abnormal, &message) })
    }
}

/// Maps a failure of crust_ops to an error of the backend. No other place does.
///
/// A failure that may be temporary, or after which the operation may have been done, is
/// `Unavailable`: kubelet then repeats the call, and undoes it when the pod is deleted. After any
/// other error kubelet assumes that nothing was done. Therefore a stage returns another error only
/// if crust_ops rejects the request.
fn to_error(failure: Failure) -> Error {
    let message = failure.to_string();
    let Some(code) = failure.code() else { return Error::Unavailable(message) };
    match (failure.method, code) {
        (STAGE, Code::InvalidArgument) => {
            Error::Invalid { field: "volume_capability", reason: message }
        }
        (STAGE, _) | (_, Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled) => {
            Error::Unavailable(message)
        }
        // crust_ops handles one call per target at a time.
        (UNSTAGE, Code::Aborted | Code::ResourceExhausted) => Error::Unavailable(message),
        // Its container has not started yet.
        (EXPAND, Code::FailedPrecondition) => Error::Unavailable(format!(
            "{message}; the volume can grow after a container runtime has claimed it; try again"
        )),
        (EXPAND, Code::NotFound) => Error::Precondition(format!(
            "{message}; delete the pod, so that the volume is published again"
        )),
        _ => Error::Failed(message),
    }
}

/// The root cause of an error.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    loop {
        if let Some(io) = cause.downcast_ref::<io::Error>() {
            return io.to_string();
        }
        match cause.source() {
            Some(next) => cause = next,
            None => return truncate(&cause.to_string(), MAX_MESSAGE / 2),
        }
    }
}

fn condition(abnormal: bool, message: &str) -> Condition {
    let problem = abnormal.then_some(HealthProblem::Runtime);
    Condition { problem, message: truncate(message, MAX_MESSAGE) }
}

/// The stats that crust_ops reports, validated.
fn stats(response: crust::RuntimeGetVolumeStatsResponse) -> Result<RuntimeStats> {
    let invalid = |what: &str| {
        Error::Failed(format!("{STATS}: crust_ops returned an invalid response: {what}"))
    };
    let condition = match response.volume_condition {
        Some(reported) => condition(reported.abnormal, &reported.message),
        None => Condition::healthy("the container runtime reports no condition"),
    };
    if response.usage.is_empty() {
        return Ok(RuntimeStats { usage: None, condition });
    }
    let of = |unit: Unit| {
        let mut found = response.usage.iter().filter(|usage| usage.unit == i32::from(unit));
        match (found.next(), found.next()) {
            (found, None) => Ok(found),
            _ => Err(invalid("a unit appears twice")),
        }
    };
    if response.usage.iter().any(|usage| !matches!(usage.unit(), Unit::Bytes | Unit::Inodes)) {
        return Err(invalid("unknown unit"));
    }
    let amount = |value: i64| u64::try_from(value).map_err(|_| invalid("negative amount"));
    let bytes = of(Unit::Bytes)?.ok_or_else(|| invalid("no usage in bytes"))?;
    // A filesystem may not count inodes.
    let inodes = of(Unit::Inodes)?.copied().unwrap_or_default();
    let usage = Usage::Mount {
        total_bytes: amount(bytes.total)?,
        used_bytes: amount(bytes.used)?,
        available_bytes: amount(bytes.available)?,
        total_inodes: amount(inodes.total)?,
        used_inodes: amount(inodes.used)?,
        free_inodes: amount(inodes.available)?,
    };
    Ok(RuntimeStats { usage: Some(usage), condition })
}

#[cfg(test)]
#[path = "crust_tests.rs"]
mod tests;
