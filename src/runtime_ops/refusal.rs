//! Why not: one reason, one code (docs/reference/runtime-assisted-mount.md has the table).

use std::path::PathBuf;
use std::time::Duration;

use tonic::{Code, Status};

use crate::crust::{Problem, Target};
use crate::grpc::{MAX_MESSAGE, cut};

#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("{field}: {reason}")]
    Invalid { field: &'static str, reason: String },

    #[error("volume_target_path: nothing is handed over for {0}; stage the volume first")]
    NoEntry(Target),

    #[error(
        "{0} is not claimed by a container runtime yet; either its container has not been made, or its runtime does not \
         know of volumes that are left to it"
    )]
    Unclaimed(Target),

    /// A program that somebody else may have put there.
    #[error("the runtime's program is not to be trusted: {0}")]
    Untrusted(String),

    #[error("{program}: cannot be started: {reason}")]
    Unstartable { program: PathBuf, reason: String },

    #[error(
        "{program} {action} took longer than {limit:?} and was ended; see whether its container hangs"
    )]
    Overdue { program: PathBuf, action: &'static str, limit: Duration },

    #[error("{program} {action} said more than {limit} bytes and was ended")]
    TooMuch { program: PathBuf, action: &'static str, limit: usize },

    /// No container of the volume runs.
    #[error("no container that has the volume runs now: {0}")]
    NotRunning(String),

    #[error("{program} {action} failed ({how}): {said}")]
    Failed { program: PathBuf, action: &'static str, how: String, said: String },

    #[error("{program} {action} said nothing that can be used: {reason}")]
    Nonsense { program: PathBuf, action: &'static str, reason: String },

    /// Files of an entry.
    #[error("{0}")]
    Disk(String),

    #[error("another call for {0} is still under way; try again when it has ended")]
    Busy(String),

    #[error("more than {0} calls at a time; try again")]
    Flooded(usize),
}

pub type Result<T, E = Refusal> = std::result::Result<T, E>;

impl Refusal {
    pub fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { field, reason: reason.into() }
    }

    /// What is wrong with what was asked.
    pub fn of_request(problem: Problem) -> Self {
        match problem {
            Problem::Invalid { field, reason } => Self::Invalid { field, reason },
            other => Self::of_files(other),
        }
    }

    /// What is wrong with the files of an entry.
    pub fn of_files(problem: Problem) -> Self {
        Self::Disk(problem.to_string())
    }

    fn code(&self) -> Code {
        match self {
            Self::Invalid { .. } => Code::InvalidArgument,
            Self::NoEntry(_) => Code::NotFound,
            Self::Unclaimed(_) => Code::FailedPrecondition,
            Self::Untrusted(_) => Code::PermissionDenied,
            Self::Unstartable { .. } => Code::Unimplemented,
            Self::Overdue { .. } => Code::DeadlineExceeded,
            Self::TooMuch { .. } | Self::Flooded(_) => Code::ResourceExhausted,
            Self::NotRunning(_) => Code::Unavailable,
            Self::Failed { .. } | Self::Busy(_) => Code::Aborted,
            Self::Nonsense { .. } => Code::DataLoss,
            Self::Disk(_) => Code::Internal,
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.code(), cut(&refusal.to_string(), MAX_MESSAGE))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::documented::row;
    use crate::grpc::code_name;

    #[test]
    fn each_refusal_has_a_code_that_the_documentation_explains_and_a_short_message() {
        let page = include_str!("../../docs/reference/runtime-assisted-mount.md");
        let target = || Target::new("path", format!("/{}", "x".repeat(4000))).unwrap();
        let program = || PathBuf::from("/bin/runtime");
        let (action, words) = ("crust stats", || "words".to_owned());
        let limit = Duration::from_secs(1);
        let refusals = [
            Refusal::invalid("fs_type", "words"),
            Refusal::NoEntry(target()),
            Refusal::Unclaimed(target()),
            Refusal::Untrusted(words()),
            Refusal::Unstartable { program: program(), reason: words() },
            Refusal::Overdue { program: program(), action, limit },
            Refusal::TooMuch { program: program(), action, limit: 1 },
            Refusal::NotRunning(words()),
            Refusal::Failed { program: program(), action, how: words(), said: words() },
            Refusal::Nonsense { program: program(), action, reason: words() },
            Refusal::Disk(words()),
        ];
        let mut codes = BTreeSet::new();
        for refusal in refusals {
            let status = Status::from(refusal);
            assert!(status.message().len() <= MAX_MESSAGE + '…'.len_utf8());
            let name = code_name(status.code());
            row(page, name);
            assert!(codes.insert(name), "{name} twice");
        }
        // These two share a code with something that is also a matter of trying again.
        for (refusal, name) in
            [(Refusal::Busy(words()), "ABORTED"), (Refusal::Flooded(64), "RESOURCE_EXHAUSTED")]
        {
            assert_eq!(code_name(Status::from(refusal).code()), name);
        }
    }
}
