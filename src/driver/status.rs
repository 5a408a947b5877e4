//! Maps backend errors to gRPC statuses. No other place does.

use tonic::{Code, Status};

use common::text::{MAX_MESSAGE, truncate};
pub use grpc::call::{exiting, panicked};
use storage::Error;

/// The error of an RPC: a status, also of an error of the backend.
#[derive(Debug)]
pub struct Failure(Status);

/// The result of an RPC.
pub type Answer<T> = Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self(Status::new(code(&error), truncate(&error.to_string(), MAX_MESSAGE)))
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self(status)
    }
}

/// The status of an error of the backend, or of a status.
pub fn of(error: impl Into<Failure>) -> Status {
    error.into().0
}

/// CSI defines the codes in the error tables of the RPCs ("gRPC error code").
fn code(error: &Error) -> Code {
    match error {
        Error::Invalid { .. } => Code::InvalidArgument,
        Error::NotFound { .. } | Error::Missing(_) => Code::NotFound,
        Error::AlreadyExists(_) => Code::AlreadyExists,
        Error::Busy(_) | Error::StaleToken(_) => Code::Aborted,
        Error::Unavailable(_) => Code::Unavailable,
        Error::Precondition(_) => Code::FailedPrecondition,
        Error::OutOfRange(_) => Code::OutOfRange,
        Error::Exhausted(_) => Code::ResourceExhausted,
        Error::Damaged(_) => Code::DataLoss,
        Error::Io { .. } | Error::Failed(_) => Code::Internal,
    }
}

pub fn deadline() -> Status {
    Status::deadline_exceeded(
        "the deadline passed before the stream was complete; the response is incomplete",
    )
}

pub fn not_attachable(method: &str) -> Failure {
    Failure(Status::unimplemented(format!(
        "{method}: the volumes of this driver need no attachment by a controller"
    )))
}

pub fn disabled(method: &str, flag: &str) -> Failure {
    Failure(Status::unimplemented(format!("{method} is disabled; start the driver with {flag}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use storage::Kind;

    #[test]
    fn each_error_keeps_its_code_and_message() {
        let text = || "text".to_owned();
        let io = Error::Io { doing: text(), source: std::io::Error::other("disk") };
        let cases = [
            (Error::invalid("name", "text"), Code::InvalidArgument),
            (Error::not_found(Kind::Volume, "text"), Code::NotFound),
            (Error::Missing(text()), Code::NotFound),
            (Error::AlreadyExists(text()), Code::AlreadyExists),
            (Error::Busy(text()), Code::Aborted),
            (Error::StaleToken(text()), Code::Aborted),
            (Error::Unavailable(text()), Code::Unavailable),
            (Error::Precondition(text()), Code::FailedPrecondition),
            (Error::OutOfRange(text()), Code::OutOfRange),
            (Error::Exhausted(text()), Code::ResourceExhausted),
            (Error::Damaged(text()), Code::DataLoss),
            (io, Code::Internal),
            (Error::Failed(text()), Code::Internal),
        ];
        for (error, code) in cases {
            let status = of(error);
            assert_eq!(status.code(), code);
            assert!(status.message().contains("text"));
        }
    }

    #[test]
    fn a_status_message_fits_a_header() {
        let status = of(Error::invalid("parameters", "é".repeat(1 << 20)));
        assert!(status.message().len() <= MAX_MESSAGE + '…'.len_utf8());
        assert!(status.message().starts_with("parameters: é"));
    }
}
