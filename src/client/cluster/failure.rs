//! Why an attempt came to nothing, told with the next step, and whether another one may help.

use std::time::Duration;

use anyhow::anyhow;
use tonic::{Code, Status};

use super::super::connection::refused;
use crate::grpc::code_named;
use crate::kubernetes::snapshot_delta::{GROUP, PLURAL, VERSION};

/// An attempt that failed.
#[derive(Debug)]
pub struct Failure {
    pub error: anyhow::Error,
    pub retry: Retry,
    /// How long to wait before another attempt, at least.
    pub after: Duration,
}

/// When another attempt may help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// It is a matter of time.
    Always,
    /// Where a first message has come, it has worked before and may again; else it is set up wrongly.
    OnceBegun,
    /// Once after extents have come: a token may have expired since, or the time be over that the sidecar
    /// allows one stream.
    AfterProgress,
    Never,
}

impl Failure {
    pub fn new(retry: Retry, error: anyhow::Error) -> Self {
        Self { error, retry, after: Duration::ZERO }
    }

    pub fn never(error: anyhow::Error) -> Self {
        Self::new(Retry::Never, error)
    }

    /// What the API server answered, or why it did not, when asked for `what`.
    pub fn api(what: &str, error: kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            let error = anyhow::Error::from(error).context(what.to_owned());
            return Self::new(Retry::OnceBegun, error);
        };
        let message = &status.message;
        match status.code {
            401 => Self::never(anyhow!(
                "{what}: the API server does not accept the kubeconfig's credentials: {message}"
            )),
            // A webhook says itself what has to be done.
            403 if message.contains("denied the request") => {
                Self::never(anyhow!("{what}: {message}"))
            }
            403 => Self::never(anyhow!("{what}: {message}; RBAC has to allow it")),
            404 => Self::never(anyhow!("{what}: {message}")),
            408 | 429 | 500.. => Self::new(Retry::OnceBegun, anyhow!("{what}: {message}")),
            _ => Self::never(anyhow!("{what}: {message}")),
        }
    }

    /// What was answered instead of a VolumeSnapshotDelta in `namespace`.
    pub fn delta(what: &str, namespace: &str, error: kube::Error) -> Self {
        let kube::Error::Api(status) = error else { return Self::api(what, error) };
        let details = status.details.as_ref();
        let after = details.map_or(0, |details| details.retry_after_seconds);
        // Who answers through the aggregation layer names what it is about; the layer itself does not.
        let object = details.map_or("", |details| details.kind.as_str());
        let aggregated = !object.is_empty();
        let message = status.message.trim();
        let (retry, step) = match status.code {
            429 => (Retry::Always, None),
            503 | 504 if aggregated => (Retry::Always, None),
            503 | 504 => (
                Retry::Always,
                Some(format!("`kubectl get apiservice {VERSION}.{GROUP}` shows whether it is served")),
            ),
            // A snapshot that will be ready.
            409 if after > 0 => (Retry::Always, None),
            403 => (
                Retry::Never,
                Some(format!(
                    "a Role in namespace {namespace:?} has to allow `create` on `{PLURAL}` of {GROUP}, and \
                     `get` on the `volumesnapshots` of snapshot.storage.k8s.io (and on the Secret, with --secret)"
                )),
            ),
            404 if !aggregated => (
                Retry::Never,
                Some(
                    "there is no aggregated API server for it (docs/reference/aggregated-api.md); --api metadata \
                     needs none"
                        .to_owned(),
                ),
            ),
            404 if object == "volumesnapshots" => (Retry::Never, Some(shows_snapshots(namespace))),
            501 => (
                Retry::Never,
                Some("no API will tell blocks of it: take full backups".to_owned()),
            ),
            _ => return Self::api(what, kube::Error::Api(status)),
        };
        let step = step.map(|step| format!("; {step}")).unwrap_or_default();
        let after = Duration::from_secs(after.into());
        Self { after, ..Self::new(retry, anyhow!("{what}: {message}{step}")) }
    }

    /// What a VolumeSnapshotDelta says of a driver that refused or failed: `CODE: message`.
    pub fn by_driver(what: &str, error: &str) -> Self {
        let code = error.split_once(':').and_then(|(code, _)| code_named(code));
        let step = code.and_then(|code| step_at_any(code, "of these snapshots"));
        let error = if error.is_empty() { "the driver gave no reason" } else { error };
        let step = step.map(|step| format!("; {step}")).unwrap_or_default();
        Self::never(anyhow!("{what} is Failed: {error}{step}"))
    }

    /// What ended a call to the sidecar of a driver.
    pub fn stream(status: Status, subject: &Subject<'_>) -> Self {
        // The sidecar's own statuses have no cause; this is one of the connection.
        if std::error::Error::source(&status).is_some() {
            let address = subject.address;
            let error = refused(status).context(format!("the connection to {address} broke"));
            return Self::new(Retry::Always, error);
        }
        let replaceable = !matches!(subject.entry, Entry::Session { ours: false, .. });
        let retry = match status.code() {
            Code::Unavailable => Retry::Always,
            Code::Unauthenticated if !replaceable => Retry::Never,
            Code::Unauthenticated | Code::DeadlineExceeded => Retry::AfterProgress,
            _ => Retry::Never,
        };
        let step = next_step(status.code(), subject);
        let error = refused(status);
        match step {
            Some(step) => Self::new(retry, anyhow!("{error:#}; {step}")),
            None => Self::new(retry, error),
        }
    }
}

/// What a call was about.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    pub namespace: &'a str,
    pub driver: &'a str,
    pub address: &'a str,
    pub entry: Entry<'a>,
}

/// What lets a call in.
#[derive(Debug, Clone, Copy)]
pub enum Entry<'a> {
    /// A token of this account, for this audience.
    Account { account: &'a str, audience: &'a str },
    /// The session of this SnapshotSessionRequest, which another may take the place of if it is `ours`.
    Session { request: &'a str, ours: bool },
}

fn shows_snapshots(namespace: &str) -> String {
    format!("`kubectl get volumesnapshots -n {namespace}` shows what there is")
}

/// What a person can do about it, where the message cannot know.
fn next_step(code: Code, subject: &Subject<'_>) -> Option<String> {
    let Subject { namespace, driver, entry, .. } = subject;
    let there_is = shows_snapshots(namespace);
    Some(match (code, entry) {
        (Code::PermissionDenied, Entry::Account { account, .. }) => format!(
            "{account} needs a Role in namespace {namespace:?} with the verb `get` on \
             `volumesnapshots` of snapshot.storage.k8s.io"
        ),
        (Code::Unauthenticated, Entry::Account { account, audience }) => {
            format!("the token of {account} must be valid and made for the audience {audience:?}")
        }
        (Code::Unauthenticated, Entry::Session { request, ours: false }) => format!(
            "the session of SnapshotSessionRequest {namespace}/{request} has ended: make another \
             one, or leave --session out"
        ),
        (Code::Unauthenticated, Entry::Session { .. }) => {
            "the session has ended: begin anew (--lifetime asks for a longer one)".to_owned()
        }
        (Code::NotFound, Entry::Account { .. }) => there_is,
        (Code::NotFound, Entry::Session { request, .. }) => format!(
            "{there_is}; SnapshotSessionRequest {namespace}/{request} must name it, and another one \
             made later under the same name is not part of the session"
        ),
        (Code::InvalidArgument, Entry::Session { .. }) => {
            "base and target go by name, are of one volume, and the base is the earlier one"
                .to_owned()
        }
        (code, _) => return step_at_any(code, driver),
    })
}

/// The same, where it does not matter what lets a call in.
fn step_at_any(code: Code, driver: &str) -> Option<String> {
    Some(match code {
        Code::FailedPrecondition => "no delta can be told: take a full backup \
            (snapshot allocated)"
            .to_owned(),
        Code::Unimplemented => format!("the driver {driver} does not tell which blocks changed"),
        Code::DeadlineExceeded => {
            "in the time that the sidecar allows, not one extent came".to_owned()
        }
        Code::OutOfRange => "--starting-offset must lie within the volume".to_owned(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUBJECT: Subject<'_> = Subject {
        namespace: "shop",
        driver: "d.example",
        address: "sidecar:1",
        entry: Entry::Account { account: "ServiceAccount shop/backup", audience: "aud" },
    };

    const fn session(ours: bool) -> Subject<'static> {
        Subject { entry: Entry::Session { request: "mine", ours }, ..SUBJECT }
    }

    #[test]
    fn a_refusal_is_told_with_code_and_next_step() {
        let told =
            |code| format!("{:#}", Failure::stream(Status::new(code, "why"), &SUBJECT).error);
        let step = [
            (Code::FailedPrecondition, "FAILED_PRECONDITION: why", "full backup"),
            (Code::PermissionDenied, "PERMISSION_DENIED: why", "`get` on `volumesnapshots`"),
            (Code::PermissionDenied, "PERMISSION_DENIED: why", "ServiceAccount shop/backup needs"),
            (Code::Unauthenticated, "UNAUTHENTICATED: why", "audience \"aud\""),
            (Code::NotFound, "NOT_FOUND: why", "-n shop"),
            (Code::Unimplemented, "UNIMPLEMENTED: why", "d.example"),
            (Code::DeadlineExceeded, "DEADLINE_EXCEEDED: why", "not one extent"),
            (Code::OutOfRange, "OUT_OF_RANGE: why", "--starting-offset"),
        ];
        for (code, begin, step) in step {
            let told = told(code);
            assert!(told.starts_with(begin) && told.contains(step), "{told}");
        }
        assert_eq!(told(Code::InvalidArgument), "INVALID_ARGUMENT: why");
    }

    #[test]
    fn a_refusal_in_a_session_is_told_with_code_and_next_step() {
        let step = [
            (Code::Unauthenticated, true, "UNAUTHENTICATED: why", "--lifetime"),
            (Code::Unauthenticated, false, "UNAUTHENTICATED: why", "shop/mine has ended"),
            (Code::NotFound, true, "NOT_FOUND: why", "shop/mine must name it"),
            (Code::InvalidArgument, true, "INVALID_ARGUMENT: why", "go by name"),
            (Code::OutOfRange, true, "OUT_OF_RANGE: why", "--starting-offset"),
            (Code::FailedPrecondition, true, "FAILED_PRECONDITION: why", "full backup"),
        ];
        for (code, ours, begin, step) in step {
            let failure = Failure::stream(Status::new(code, "why"), &session(ours));
            let told = format!("{:#}", failure.error);
            assert!(told.starts_with(begin) && told.contains(step), "{told}");
            let again = code == Code::Unauthenticated && ours;
            let retry = if again { Retry::AfterProgress } else { Retry::Never };
            assert_eq!(failure.retry, retry, "{told}");
        }
    }

    #[test]
    fn only_what_time_or_a_new_token_can_mend_is_tried_again() {
        for code in (1..=16).map(Code::from) {
            let retry = Failure::stream(Status::new(code, "why"), &SUBJECT).retry;
            let expected = match code {
                Code::Unavailable => Retry::Always,
                Code::Unauthenticated | Code::DeadlineExceeded => Retry::AfterProgress,
                _ => Retry::Never,
            };
            assert_eq!(retry, expected, "{code:?}");
        }
    }

    #[test]
    fn the_api_servers_refusals_are_final_and_its_absence_is_not() {
        let said = |code, message: &str| {
            let status = kube::core::Status { code, message: message.into(), ..Default::default() };
            Failure::api("reading", kube::Error::Api(Box::new(status)))
        };
        let api = |code| said(code, "m");
        for code in [400, 401, 403, 404, 422] {
            assert_eq!(api(code).retry, Retry::Never, "{code}");
        }
        for code in [408, 429, 500, 503] {
            assert_eq!(api(code).retry, Retry::OnceBegun, "{code}");
        }
        assert!(api(403).error.to_string().contains("RBAC"));
        let by_webhook =
            said(403, "admission webhook \"w\" denied the request: a Role has to allow it");
        assert!(!by_webhook.error.to_string().contains("RBAC"), "it says itself what to do");
        let gone = kube::Error::Service("refused".into());
        assert_eq!(Failure::api("reading", gone).retry, Retry::OnceBegun);
    }
}
