//! Why a page cannot be served, and the only place that maps a reason to a kind of problem.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tonic::{Code, Status};

use crate::sidecar::refusal::{Reason, Refusal};
use crate::sidecar::relay;
use common::text::{MAX_MESSAGE, truncate};
use grpc::code_name;
use kubernetes::cbt_http::{Problem, ProblemKind};
use kubernetes::client;
use kubernetes::secret::Secrets;

/// Seconds until a retry may succeed: the interval at which the lease is polled.
const RETRY_AFTER: u16 = 2;

pub fn problem(kind: ProblemKind, message: impl Into<String>) -> Problem {
    Problem { kind, message: truncate(&message.into(), MAX_MESSAGE), code: None }
}

pub fn unavailable(message: impl Into<String>) -> Problem {
    problem(ProblemKind::Unavailable, message)
}

/// The problem that a driver reports for an offset past the end of the volume.
pub fn out_of_range(message: impl Into<String>) -> Problem {
    of_code(Code::OutOfRange, message)
}

fn of_code(code: Code, message: impl Into<String>) -> Problem {
    Problem { code: Some(code_name(code).into()), ..problem(ProblemKind::Driver, message) }
}

/// The driver's response breaks CSI's rules.
pub fn misbehaves(message: impl AsRef<str>) -> Problem {
    let message = format!("the CSI driver's response is invalid: {}", message.as_ref());
    of_code(Code::Internal, message)
}

/// The page cannot continue what the caller started.
pub fn stale(message: impl Into<String>) -> Problem {
    of_code(Code::Aborted, message)
}

/// Maps a driver's error for the caller, without the secrets that the driver received.
pub fn of_driver(status: &Status, secrets: &Secrets) -> Problem {
    of_refusal(&relay::of_driver(status, secrets))
}

/// Maps the refusal of a driver, or of the way to it.
pub fn of_refusal(refusal: &Refusal) -> Problem {
    let code = refusal.code();
    match refusal.reason {
        Reason::DriverDisconnected => {
            unavailable("the connection to the CSI driver failed; retry later")
        }
        Reason::Driver(Code::Unavailable) => unavailable(format!(
            "the CSI driver is not available: {}; retry later",
            refusal.message()
        )),
        Reason::Driver(Code::DeadlineExceeded) => too_long(),
        Reason::NodeAway | Reason::ApiServer => unavailable(refusal.message()),
        Reason::MessageTooLarge => Problem {
            code: Some(code_name(code).into()),
            ..problem(
                ProblemKind::Driver,
                "the CSI driver sent a message that is too large; use a smaller limit",
            )
        },
        _ => Problem {
            code: Some(code_name(code).into()),
            ..problem(ProblemKind::Driver, refusal.message())
        },
    }
}

pub fn too_long() -> Problem {
    problem(
        ProblemKind::TimedOut,
        "the page was not complete within --timeout; use a smaller limit, or retry later",
    )
}

/// A failed call to the API server; `doing` is its purpose.
pub fn of_api_server(doing: &str, error: &kube::Error) -> Problem {
    unavailable(client::failure("sidecar", doing, error).message)
}

/// The value of the metrics' label `outcome` and of the log.
pub const fn label(kind: ProblemKind) -> &'static str {
    match kind {
        ProblemKind::Invalid => "invalid",
        ProblemKind::Unauthenticated => "unauthenticated",
        ProblemKind::NotAllowed => "not_allowed",
        ProblemKind::OtherDriver => "other_driver",
        ProblemKind::Driver => "driver",
        ProblemKind::Unsupported => "unsupported",
        ProblemKind::Unavailable => "unavailable",
        ProblemKind::Busy => "busy",
        ProblemKind::TimedOut => "timed_out",
    }
}

pub fn response(problem: &Problem) -> Response {
    response_with(problem.kind.status(), problem)
}

/// Like [`response`], with another HTTP status.
pub fn response_with(status: StatusCode, problem: &Problem) -> Response {
    let mut response = (status, Json(problem)).into_response();
    let headers = response.headers_mut();
    if matches!(problem.kind, ProblemKind::Unavailable | ProblemKind::Busy) {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER));
    }
    if problem.kind == ProblemKind::Unavailable {
        // The next attempt must reach the current leader, not this replica over this connection.
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_errors_keep_their_code_unless_transient() {
        let secrets: Secrets = serde_json::from_str(r#"{"key":"hunter2"}"#).unwrap();
        let permanent = of_driver(&Status::not_found("no snapshot for hunter2"), &secrets);
        assert_eq!(
            (permanent.kind, permanent.code.as_deref()),
            (ProblemKind::Driver, Some("NOT_FOUND"))
        );
        assert_eq!(permanent.message, "no snapshot for [hidden]");
        let gone = Status::from_error(Box::new(std::io::Error::other("reset")));
        for transient in [gone, Status::unavailable("starting")] {
            assert_eq!(of_driver(&transient, &secrets).kind, ProblemKind::Unavailable);
        }
        let late = of_driver(&Status::deadline_exceeded("x"), &secrets);
        assert_eq!(late.kind, ProblemKind::TimedOut);
    }

    #[test]
    fn retryable_problems_have_a_retry_after_header() {
        for (kind, after, closes) in [
            (ProblemKind::Unavailable, true, true),
            (ProblemKind::Busy, true, false),
            (ProblemKind::Driver, false, false),
        ] {
            let response = response(&problem(kind, "x"));
            assert_eq!(response.headers().contains_key(header::RETRY_AFTER), after);
            assert_eq!(response.headers().contains_key(header::CONNECTION), closes);
            assert_eq!(response.status(), kind.status());
        }
    }
}
