//! The one place where an error of the backend becomes a gRPC status.

use tonic::{Code, Status};

use crate::backend::Error;
pub use crate::grpc::call::{exiting, panicked};
use crate::grpc::{MAX_MESSAGE, cut};

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        Self::new(code(&error), cut(&error.to_string(), MAX_MESSAGE))
    }
}

/// CSI's meaning of each code is in the tables of errors of every RPC ("gRPC error code").
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
        "the deadline passed before the stream was complete; what was sent is not the whole answer",
    )
}

pub fn unserved(method: &str) -> Status {
    Status::unimplemented(format!(
        "{method}: this driver's volumes are not attached by a controller"
    ))
}

pub fn switched_off(method: &str, flag: &str) -> Status {
    Status::unimplemented(format!("{method} is switched off; start the driver with {flag}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Kind;

    #[test]
    fn each_error_has_its_code_and_keeps_its_words() {
        let words = || "words".to_owned();
        let io = Error::Io { doing: words(), source: std::io::Error::other("disk") };
        let cases = [
            (Error::invalid("name", "words"), Code::InvalidArgument),
            (Error::not_found(Kind::Volume, "words"), Code::NotFound),
            (Error::Missing(words()), Code::NotFound),
            (Error::AlreadyExists(words()), Code::AlreadyExists),
            (Error::Busy(words()), Code::Aborted),
            (Error::Unavailable(words()), Code::Unavailable),
            (Error::Precondition(words()), Code::FailedPrecondition),
            (Error::OutOfRange(words()), Code::OutOfRange),
            (Error::Exhausted(words()), Code::ResourceExhausted),
            (Error::Damaged(words()), Code::DataLoss),
            (io, Code::Internal),
            (Error::Failed(words()), Code::Internal),
        ];
        for (error, code) in cases {
            let status = Status::from(error);
            assert_eq!(status.code(), code);
            assert!(status.message().contains("words"));
        }
    }

    #[test]
    fn a_message_stays_small_enough_for_a_header() {
        let status = Status::from(Error::invalid("parameters", "é".repeat(1 << 20)));
        assert!(status.message().len() <= MAX_MESSAGE + '…'.len_utf8());
        assert!(status.message().starts_with("parameters: é"));
    }
}
