//! Maps backend errors to gRPC statuses. No other place does.

use tonic::{Code, Status};

use crate::backend::Error;
pub use crate::grpc::call::{exiting, panicked};
use crate::grpc::{MAX_MESSAGE, truncate};

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        Self::new(code(&error), truncate(&error.to_string(), MAX_MESSAGE))
    }
}

/// CSI defines the codes in the error tables of the RPCs ("gRPC error code").
fn code(error: &Error) -> Code {
    match error {
        Error::Invalid { .. } => Code::InvalidArgument,
        Error::NotFound { .. } | Error::Missing(_) => Code::NotFound,
        Error::AlreadyExists(_) => Code::AlreadyExists,
        Error::Busy(_) => Code::Aborted,
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

pub fn not_attachable(method: &str) -> Status {
    Status::unimplemented(format!(
        "{method}: the volumes of this driver need no attachment by a controller"
    ))
}

pub fn disabled(method: &str, flag: &str) -> Status {
    Status::unimplemented(format!("{method} is disabled; start the driver with {flag}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Kind;

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
            (Error::Unavailable(text()), Code::Unavailable),
            (Error::Precondition(text()), Code::FailedPrecondition),
            (Error::OutOfRange(text()), Code::OutOfRange),
            (Error::Exhausted(text()), Code::ResourceExhausted),
            (Error::Damaged(text()), Code::DataLoss),
            (io, Code::Internal),
            (Error::Failed(text()), Code::Internal),
        ];
        for (error, code) in cases {
            let status = Status::from(error);
            assert_eq!(status.code(), code);
            assert!(status.message().contains("text"));
        }
    }

    #[test]
    fn a_status_message_fits_a_header() {
        let status = Status::from(Error::invalid("parameters", "é".repeat(1 << 20)));
        assert!(status.message().len() <= MAX_MESSAGE + '…'.len_utf8());
        assert!(status.message().starts_with("parameters: é"));
    }
}
