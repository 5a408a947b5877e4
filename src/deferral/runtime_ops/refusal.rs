//! Reasons for a failed call, each with one gRPC code (table in
//! docs/reference/runtime-assisted-mount.md).

use std::path::PathBuf;
use std::time::Duration;

use tonic::{Code, Status};

use crate::crust::{Problem, Target};
use common::text::{MAX_MESSAGE, truncate};

#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("{field}: {reason}")]
    Invalid { field: &'static str, reason: String },

    #[error("volume_target_path: {0} has no entry; publish the volume again")]
    NoEntry(Target),

    #[error(
        "no container runtime has claimed the volume of {0}; wait for its container, or check that its RuntimeClass supports \
         deferred volumes"
    )]
    Unclaimed(Target),

    /// Others can change the runtime's program.
    #[error("the runtime's program is not trusted: {0}; correct its owner and mode")]
    Untrusted(String),

    #[error("starting {program}: {reason}; reinstall the container runtime")]
    NotStarted { program: PathBuf, reason: String },

    #[error(
        "{program} {action} exceeded its timeout of {limit:?} and was killed; check the container"
    )]
    TimedOut { program: PathBuf, action: &'static str, limit: Duration },

    #[error("{program} {action} wrote more than {limit} bytes and was killed")]
    OutputTooLong { program: PathBuf, action: &'static str, limit: usize },

    /// No container of the volume is running.
    #[error("no container with the volume is running: {0}")]
    NotRunning(String),

    #[error("{program} {action} failed ({status}): {stderr}")]
    Failed { program: PathBuf, action: &'static str, status: String, stderr: String },

    #[error("{program} {action} wrote invalid output: {reason}; check the version of the runtime")]
    InvalidOutput { program: PathBuf, action: &'static str, reason: String },

    /// Reading or writing the files of an entry failed.
    #[error("{0}")]
    EntryIo(String),

    #[error("another call for {0} is in progress; try again")]
    Busy(String),

    #[error("more than {0} concurrent calls; try again")]
    TooManyCalls(usize),
}

pub type Result<T, E = Refusal> = std::result::Result<T, E>;

impl Refusal {
    pub fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { field, reason: reason.into() }
    }

    /// A problem of a request field.
    pub fn of_request(problem: Problem) -> Self {
        match problem {
            Problem::Invalid { field, reason } => Self::Invalid { field, reason },
            other => Self::of_files(other),
        }
    }

    /// A problem of an entry's files.
    pub fn of_files(problem: Problem) -> Self {
        Self::EntryIo(problem.to_string())
    }

    fn code(&self) -> Code {
        match self {
            Self::Invalid { .. } => Code::InvalidArgument,
            Self::NoEntry(_) => Code::NotFound,
            Self::Unclaimed(_) => Code::FailedPrecondition,
            Self::Untrusted(_) => Code::PermissionDenied,
            Self::NotStarted { .. } => Code::Unimplemented,
            Self::TimedOut { .. } => Code::DeadlineExceeded,
            Self::OutputTooLong { .. } | Self::TooManyCalls(_) => Code::ResourceExhausted,
            Self::NotRunning(_) => Code::Unavailable,
            Self::Failed { .. } | Self::Busy(_) => Code::Aborted,
            Self::InvalidOutput { .. } => Code::DataLoss,
            Self::EntryIo(_) => Code::Internal,
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.code(), truncate(&refusal.to_string(), MAX_MESSAGE))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use common::documented::row;
    use grpc::code_name;

    #[test]
    fn each_refusal_has_a_documented_code_and_a_short_message() {
        let page = include_str!("../../../docs/reference/runtime-assisted-mount.md");
        let target = || Target::new("path", format!("/{}", "x".repeat(4000))).unwrap();
        let program = || PathBuf::from("/bin/runtime");
        let (action, words) = ("crust stats", || "words".to_owned());
        let limit = Duration::from_secs(1);
        let refusals = [
            Refusal::invalid("fs_type", "words"),
            Refusal::NoEntry(target()),
            Refusal::Unclaimed(target()),
            Refusal::Untrusted(words()),
            Refusal::NotStarted { program: program(), reason: words() },
            Refusal::TimedOut { program: program(), action, limit },
            Refusal::OutputTooLong { program: program(), action, limit: 1 },
            Refusal::NotRunning(words()),
            Refusal::Failed { program: program(), action, status: words(), stderr: words() },
            Refusal::InvalidOutput { program: program(), action, reason: words() },
            Refusal::EntryIo(words()),
        ];
        let mut codes = BTreeSet::new();
        for refusal in refusals {
            let status = Status::from(refusal);
            assert!(status.message().len() <= MAX_MESSAGE + '…'.len_utf8());
            let name = code_name(status.code());
            row(page, name);
            assert!(codes.insert(name), "{name} twice");
        }
        // These share a code with another reason that is solved by a retry.
        for (refusal, name) in
            [(Refusal::Busy(words()), "ABORTED"), (Refusal::TooManyCalls(64), "RESOURCE_EXHAUSTED")]
        {
            assert_eq!(code_name(Status::from(refusal).code()), name);
        }
    }
}
