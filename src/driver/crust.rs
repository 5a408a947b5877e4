//! The way to container runtimes: a client of crust_ops (KEP-2857, "Runtime API"), as the backend asks for one.
//!
//! The backend calls from threads that may block, and each call has a connection of its own: there is none that could be
//! stale after a restart of crust_ops, and nothing that one call could wait for in another. Time and sizes are
//! bounded, for the volume's lock is held. No failure turns into a mount on this host or an answer that is made up: it is
//! an error with the name of the method, and [`refused`] says of which kind.

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
use crate::backend::{
    Condition, DeferredMount, Error, GroupPolicy, HealthProblem, Result, Runtime, RuntimeStats,
    Usage,
};
use crate::grpc::{MAX_MESSAGE, SocketPath, code_name, cut};
use crate::proto::crust;
use crust::runtime_client::RuntimeClient;
use crust::volume_group_change_policy::Policy;
use crust::volume_type::Type;
use crust::volume_usage::Unit;

type Client = RuntimeClient<Channel>;

/// Bytes of an answer, at most: more than any that means something.
const MAX_ANSWER: usize = 64 << 10;
/// How much longer crust_ops may take than is waited for: whose message it is that says so must not be left to chance.
const GRACE: Duration = Duration::from_secs(1);

const STAGE: &str = "RuntimeStageVolume";
const UNSTAGE: &str = "RuntimeUnstageVolume";
const STATS: &str = "RuntimeGetVolumeStats";
const EXPAND: &str = "RuntimeExpandVolume";

/// Where crust_ops is.
pub struct Crust {
    socket: PathBuf,
    timeout: Duration,
    threads: Handle,
}

impl fmt::Debug for Crust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crust").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl Crust {
    /// `timeout` is that of each call. To be called inside a runtime, whose threads do the work.
    pub fn new(endpoint: &SocketPath, timeout: Duration) -> Self {
        Self { socket: endpoint.as_ref().to_owned(), timeout, threads: Handle::current() }
    }

    /// Makes a call to its end. Blocks: not to be called on one of the runtime's own threads.
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
            let answer = send(&mut client, request).await;
            answer.map(Response::into_inner).map_err(Cause::of)
        };
        let ended = self.threads.block_on(async { timeout(self.timeout, called).await });
        let answer = ended.unwrap_or(Err(Cause::Silent(self.timeout)));
        answer.map_err(|cause| Failure { method, cause })
    }

    async fn connect(&self) -> Result<Client, Cause> {
        let path = self.socket.clone();
        // The host is never looked up; it becomes :authority, where h2 refuses a socket path.
        let connected = Endpoint::from_static("http://localhost")
            .connect_with_connector(tower::service_fn(move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            }))
            .await;
        let channel = connected
            .map_err(|error| Cause::Away { socket: self.socket.clone(), why: innermost(&error) })?;
        Ok(RuntimeClient::new(channel).max_decoding_message_size(MAX_ANSWER))
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
        let answer = self.call(STAGE, request, async |client, request| {
            client.runtime_stage_volume(request).await
        });
        answer.map(drop).map_err(refused)
    }

    fn unstage(&self, target: &Path) -> Result<()> {
        let request =
            crust::RuntimeUnstageVolumeRequest { volume_target_path: text("target_path", target)? };
        let answer = self.call(UNSTAGE, request, async |client, request| {
            client.runtime_unstage_volume(request).await
        });
        answer.map(drop).map_err(refused)
    }

    fn stats(&self, target: &Path) -> Result<RuntimeStats> {
        let request = crust::RuntimeGetVolumeStatsRequest {
            volume_target_path: text("volume_path", target)?,
        };
        let answer = self.call(STATS, request, async |client, request| {
            client.runtime_get_volume_stats(request).await
        });
        match answer {
            Ok(answer) => stats(answer),
            Err(failure) => failure.as_stats().map_or_else(|| Err(refused(failure)), Ok),
        }
    }

    fn expand(&self, target: &Path, bytes: u64) -> Result<()> {
        let range = crust::CapacityRange { required_bytes: response::bytes(bytes), limit_bytes: 0 };
        let request = crust::RuntimeExpandVolumeRequest {
            volume_target_path: text("volume_path", target)?,
            capacity_range: Some(range),
        };
        let answer = self.call(EXPAND, request, async |client, request| {
            client.runtime_expand_volume(request).await
        });
        // How large it says the volume is now may be the filesystem's size or the device's.
        answer.map(drop).map_err(refused)
    }
}

/// A path as the wire has it.
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

/// Why there is no answer.
#[derive(Debug)]
struct Failure {
    method: &'static str,
    cause: Cause,
}

#[derive(Debug)]
enum Cause {
    /// Nobody listens.
    Away {
        socket: PathBuf,
        why: String,
    },
    /// The connection broke: it may have been done or not.
    Broken(String),
    /// Within so much time.
    Silent(Duration),
    Refused(Code, String),
}

impl Cause {
    fn of(status: Status) -> Self {
        match status.source() {
            // Of crust_ops' own words there is no source here. (A message that is too large has none either.)
            Some(source) => Self::Broken(innermost(source)),
            None => Self::Refused(status.code(), cut(status.message(), MAX_MESSAGE / 2)),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.method)?;
        match &self.cause {
            Cause::Away { socket, why } => write!(
                f,
                "crust_ops does not answer at {} ({why}); start csi-loopback --mode runtime-ops, or say where it is with --crust-endpoint",
                socket.display()
            ),
            Cause::Broken(why) => write!(f, "the connection to crust_ops broke ({why}); try again"),
            Cause::Silent(timeout) => write!(
                f,
                "crust_ops has not answered within {} (--crust-timeout); try again",
                humantime::format_duration(*timeout)
            ),
            Cause::Refused(code, message) => {
                write!(f, "crust_ops answers {}: {message}", code_name(*code))
            }
        }
    }
}

impl Failure {
    fn code(&self) -> Option<Code> {
        match self.cause {
            Cause::Refused(code, _) => Some(code),
            _ => None,
        }
    }

    /// The answers to a question for stats that are no failure: that nobody can measure the volume now is something to tell
    /// of it.
    fn as_stats(&self) -> Option<RuntimeStats> {
        let Cause::Refused(code, said) = &self.cause else { return None };
        let (abnormal, message) = match code {
            // A runtime that knows nothing of crust lets a pod write into the empty directory.
            Code::FailedPrecondition => (
                true,
                format!(
                    "not claimed by a container runtime: what pods write at its path is not on the volume, unless their containers have yet to start ({said})"
                ),
            ),
            Code::NotFound => (
                true,
                format!(
                    "not handed to a container runtime any more: delete the pod, so that it is published anew ({said})"
                ),
            ),
            Code::Unavailable => (
                false,
                format!("no container has it mounted now, so that its usage is not known ({said})"),
            ),
            _ => return None,
        };
        Some(RuntimeStats { usage: None, condition: condition(abnormal, &message) })
    }
}

/// The one place where a failure of crust_ops becomes an error of the backend.
///
/// What may come right by itself, or may have been done though there was no answer, is `Unavailable`: kubelet then
/// repeats the call, and undoes it when the pod goes. After another error it takes it that nothing was done, so a
/// stage has one of those only where crust_ops says that the request is wrong.
fn refused(failure: Failure) -> Error {
    let message = failure.to_string();
    let Some(code) = failure.code() else { return Error::Unavailable(message) };
    match (failure.method, code) {
        (STAGE, Code::InvalidArgument) => {
            Error::Invalid { field: "volume_capability", reason: message }
        }
        (STAGE, _) | (_, Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled) => {
            Error::Unavailable(message)
        }
        // One call for a target at a time.
        (UNSTAGE, Code::Aborted | Code::ResourceExhausted) => Error::Unavailable(message),
        // Its container has yet to start.
        (EXPAND, Code::FailedPrecondition) => Error::Unavailable(format!(
            "{message}; the volume grows once a container runtime has claimed it: try again"
        )),
        (EXPAND, Code::NotFound) => Error::Precondition(format!(
            "{message}; delete the pod, so that the volume is published anew"
        )),
        _ => Error::Failed(message),
    }
}

/// The cause behind all others, in its words.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    loop {
        if let Some(io) = cause.downcast_ref::<io::Error>() {
            return io.to_string();
        }
        match cause.source() {
            Some(next) => cause = next,
            None => return cut(&cause.to_string(), MAX_MESSAGE / 2),
        }
    }
}

fn condition(abnormal: bool, message: &str) -> Condition {
    let problem = abnormal.then_some(HealthProblem::Runtime);
    Condition { problem, message: cut(message, MAX_MESSAGE) }
}

/// What crust_ops says of a volume, as far as it can be true.
fn stats(answer: crust::RuntimeGetVolumeStatsResponse) -> Result<RuntimeStats> {
    let wrong = |what: &str| Error::Failed(format!("{STATS}: crust_ops answers {what}"));
    let condition = match answer.volume_condition {
        Some(told) => condition(told.abnormal, &told.message),
        None => Condition::healthy("its container runtime says nothing of its condition"),
    };
    if answer.usage.is_empty() {
        return Ok(RuntimeStats { usage: None, condition });
    }
    let of = |unit: Unit| {
        let mut found = answer.usage.iter().filter(|usage| usage.unit == i32::from(unit));
        match (found.next(), found.next()) {
            (found, None) => Ok(found),
            _ => Err(wrong("with a unit twice")),
        }
    };
    if answer.usage.iter().any(|usage| !matches!(usage.unit(), Unit::Bytes | Unit::Inodes)) {
        return Err(wrong("in a unit that there is not"));
    }
    let amount = |value: i64| u64::try_from(value).map_err(|_| wrong("with a negative amount"));
    let bytes = of(Unit::Bytes)?.ok_or_else(|| wrong("without the bytes"))?;
    // A filesystem may count no inodes.
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
