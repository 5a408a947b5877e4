//! Why there is no page, and the one place where a reason becomes a kind of problem.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tonic::{Code, Status};

use crate::grpc::{MAX_MESSAGE, code_name, cut};
use crate::kubernetes::cbt_http::{Problem, ProblemKind};
use crate::kubernetes::client;
use crate::kubernetes::secret::Secrets;
use crate::sidecar::refusal::Reason;
use crate::sidecar::relay;

/// Seconds after which another attempt may help: as long as two looks at the lease are apart.
const RETRY_AFTER: u16 = 2;

pub fn problem(kind: ProblemKind, message: impl Into<String>) -> Problem {
    Problem { kind, message: cut(&message.into(), MAX_MESSAGE), code: None }
}

pub fn unavailable(message: impl Into<String>) -> Problem {
    problem(ProblemKind::Unavailable, message)
}

/// As a driver says it that is asked for what lies behind the volume.
pub fn out_of_range(message: impl Into<String>) -> Problem {
    of_code(Code::OutOfRange, message)
}

fn of_code(code: Code, message: impl Into<String>) -> Problem {
    Problem { code: Some(code_name(code).into()), ..problem(ProblemKind::Driver, message) }
}

/// The driver answers what no driver may answer.
pub fn misbehaves(message: impl AsRef<str>) -> Problem {
    let message = format!("the CSI driver's answer cannot be used: {}", message.as_ref());
    of_code(Code::Internal, message)
}

/// What was begun cannot be gone on with.
pub fn stale(message: impl Into<String>) -> Problem {
    of_code(Code::Aborted, message)
}

/// What a driver's error is to the caller, without the secrets that the driver was given.
pub fn of_driver(status: &Status, secrets: &Secrets) -> Problem {
    let refusal = relay::of_driver(status, secrets);
    let code = refusal.code();
    match refusal.reason {
        Reason::DriverBrokeOff => unavailable("the CSI driver broke off or is away; try again"),
        Reason::Driver(Code::Unavailable) => unavailable(format!(
            "the CSI driver is not available: {}; try again",
            refusal.message()
        )),
        Reason::Driver(Code::DeadlineExceeded) => too_long(),
        Reason::MessageTooLarge => Problem {
            code: Some(code_name(code).into()),
            ..problem(
                ProblemKind::Driver,
                "the CSI driver sent a message that is too large; ask with a smaller limit",
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
        "the page was not there within --timeout; ask with a smaller limit, or try again",
    )
}

/// A call to the API server that failed; `doing` is what it was for.
pub fn of_api_server(doing: &str, error: &kube::Error) -> Problem {
    unavailable(client::failure("sidecar", doing, error).message)
}

/// As it stands in metrics and logs.
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

pub fn answer(problem: &Problem) -> Response {
    answer_with(problem.kind.status(), problem)
}

/// The same with a status that no kind has.
pub fn answer_with(status: StatusCode, problem: &Problem) -> Response {
    let mut response = (status, Json(problem)).into_response();
    let headers = response.headers_mut();
    if matches!(problem.kind, ProblemKind::Unavailable | ProblemKind::Busy) {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER));
    }
    if problem.kind == ProblemKind::Unavailable {
        // The next attempt is to go to the replica that leads by then, and not over this connection to this one.
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drivers_own_error_keeps_its_code_and_one_that_may_pass_is_unavailable() {
        let secrets: Secrets = serde_json::from_str(r#"{"key":"hunter2"}"#).unwrap();
        let told = of_driver(&Status::not_found("no snapshot for hunter2"), &secrets);
        assert_eq!((told.kind, told.code.as_deref()), (ProblemKind::Driver, Some("NOT_FOUND")));
        assert_eq!(told.message, "no snapshot for [hidden]");
        let gone = Status::from_error(Box::new(std::io::Error::other("reset")));
        for passing in [gone, Status::unavailable("starting")] {
            assert_eq!(of_driver(&passing, &secrets).kind, ProblemKind::Unavailable);
        }
        let late = of_driver(&Status::deadline_exceeded("x"), &secrets);
        assert_eq!(late.kind, ProblemKind::TimedOut);
    }

    #[test]
    fn whoever_may_try_again_is_told_when() {
        for (kind, after, closes) in [
            (ProblemKind::Unavailable, true, true),
            (ProblemKind::Busy, true, false),
            (ProblemKind::Driver, false, false),
        ] {
            let response = answer(&problem(kind, "x"));
            assert_eq!(response.headers().contains_key(header::RETRY_AFTER), after);
            assert_eq!(response.headers().contains_key(header::CONNECTION), closes);
            assert_eq!(response.status(), kind.status());
        }
    }
}
