//! Failed attempts: the error with its next step, and whether another attempt can succeed.

use std::time::Duration;

use anyhow::anyhow;
use tonic::{Code, Status};

use super::super::connection::refused;
use grpc::code_named;
use kubernetes::snapshot_delta::{GROUP, PLURAL, VERSION};

/// An attempt that failed.
#[derive(Debug)]
pub struct Failure {
    pub error: anyhow::Error,
    pub retry: Retry,
    /// Minimum wait before another attempt.
    pub after: Duration,
}

/// When another attempt can succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// The error is temporary.
    Always,
    /// After a first message the setup is known to work; before, it is probably wrong.
    OnceBegun,
    /// Once after new extents: a token may have expired, or the sidecar's time limit of a stream.
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

    /// A failed call of the API server for `what`.
    pub fn api(what: &str, error: kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            let error = anyhow::Error::from(error).context(what.to_owned());
            return Self::new(Retry::OnceBegun, error);
        };
        let message = &status.message;
        let denied = ["denied the request", "denied request"];
        match status.code {
            401 => Self::never(anyhow!(
                "{what}: the API server rejects the kubeconfig's credentials: {message}"
            )),
            // The message of a webhook or a ValidatingAdmissionPolicy has its own next step.
            403 if denied.iter().any(|denied| message.contains(denied)) => {
                Self::never(anyhow!("{what}: {message}"))
            }
            403 => Self::never(anyhow!("{what}: {message}; grant the right with RBAC")),
            404 => Self::never(anyhow!("{what}: {message}")),
            408 | 429 | 500.. => Self::new(Retry::OnceBegun, anyhow!("{what}: {message}")),
            _ => Self::never(anyhow!("{what}: {message}")),
        }
    }

    /// A failed creation of a VolumeSnapshotDelta in `namespace`.
    pub fn delta(what: &str, namespace: &str, error: kube::Error) -> Self {
        let kube::Error::Api(status) = error else { return Self::api(what, error) };
        let details = status.details.as_ref();
        let after = details.map_or(0, |details| details.retry_after_seconds);
        // A server behind the aggregation layer names the kind of the object; the layer itself does
        // not.
        let object = details.map_or("", |details| details.kind.as_str());
        let aggregated = !object.is_empty();
        let message = status.message.trim();
        let (retry, step) = match status.code {
            429 => (Retry::Always, None),
            503 | 504 if aggregated => (Retry::Always, None),
            503 | 504 => (
                Retry::Always,
                Some(format!("`kubectl get apiservice {VERSION}.{GROUP}` shows whether it is available")),
            ),
            // The snapshot is not ready yet.
            409 if after > 0 => (Retry::Always, None),
            403 => (
                Retry::Never,
                Some(format!(
                    "grant `create` on `{PLURAL}` of {GROUP} and `get` on `volumesnapshots` of \
                     snapshot.storage.k8s.io (and on the Secret, with --secret) by a Role in namespace {namespace:?}"
                )),
            ),
            404 if !aggregated => (
                Retry::Never,
                Some(
                    "no aggregated API server is installed (docs/reference/aggregated-api.md); --api metadata needs \
                     none"
                        .to_owned(),
                ),
            ),
            404 if object == "volumesnapshots" => (Retry::Never, Some(shows_snapshots(namespace))),
            501 => (
                Retry::Never,
                Some("no API lists blocks of it: take full backups".to_owned()),
            ),
            _ => return Self::api(what, kube::Error::Api(status)),
        };
        let step = step.map(|step| format!("; {step}")).unwrap_or_default();
        let after = Duration::from_secs(after.into());
        Self { after, ..Self::new(retry, anyhow!("{what}: {message}{step}")) }
    }

    /// The error of a driver in a VolumeSnapshotDelta: `CODE: message`.
    pub fn by_driver(what: &str, error: &str) -> Self {
        let code = error.split_once(':').and_then(|(code, _)| code_named(code));
        let step = code.and_then(|code| step_at_any(code, "of these snapshots"));
        let error = if error.is_empty() { "the driver gave no reason" } else { error };
        let step = step.map(|step| format!("; {step}")).unwrap_or_default();
        Self::never(anyhow!("{what} is Failed: {error}{step}"))
    }

    /// The status that ended a call of a driver's sidecar.
    pub fn stream(status: Status, subject: &Subject<'_>) -> Self {
        // The sidecar's own statuses have no cause; a status with a cause comes from the
        // connection.
        if std::error::Error::source(&status).is_some() {
            let address = subject.address;
            let error = refused(status).context(format!("the connection to {address} broke"));
            return Self::new(Retry::Always, error);
        }
        let replaceable = !matches!(subject.entry, Entry::Session { own: false, .. });
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

/// What a call concerns.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    pub namespace: &'a str,
    pub driver: &'a str,
    pub address: &'a str,
    pub entry: Entry<'a>,
}

/// What authenticates a call.
#[derive(Debug, Clone, Copy)]
pub enum Entry<'a> {
    /// A token of this account, for this audience.
    Account { account: &'a str, audience: &'a str },
    /// The session of this SnapshotSessionRequest; the command can replace its `own`.
    Session { request: &'a str, own: bool },
}

fn shows_snapshots(namespace: &str) -> String {
    format!("`kubectl get volumesnapshots -n {namespace}` lists the snapshots")
}

/// The next step that the server's message cannot know.
fn next_step(code: Code, subject: &Subject<'_>) -> Option<String> {
    let Subject { namespace, driver, entry, .. } = subject;
    let listing = shows_snapshots(namespace);
    Some(match (code, entry) {
        (Code::PermissionDenied, Entry::Account { account, .. }) => format!(
            "{account} needs a Role in namespace {namespace:?} with the verb `get` on \
             `volumesnapshots` of snapshot.storage.k8s.io"
        ),
        (Code::Unauthenticated, Entry::Account { account, audience }) => {
            format!("the token of {account} must be valid and made for the audience {audience:?}")
        }
        (Code::Unauthenticated, Entry::Session { request, own: false }) => format!(
            "the session of SnapshotSessionRequest {namespace}/{request} has ended: create another \
             one, or omit --session"
        ),
        (Code::Unauthenticated, Entry::Session { .. }) => {
            "the session has ended: repeat the command, with a longer --lifetime".to_owned()
        }
        (Code::NotFound, Entry::Account { .. }) => listing,
        (Code::NotFound, Entry::Session { request, .. }) => format!(
            "{listing}; SnapshotSessionRequest {namespace}/{request} must name it; a snapshot that \
             was created later under the same name is not part of the session"
        ),
        (Code::InvalidArgument, Entry::Session { .. }) => {
            "base and target must be names of snapshots of one volume, the earlier one first"
                .to_owned()
        }
        (code, _) => return step_at_any(code, driver),
    })
}

/// The next step that does not depend on the authentication.
fn step_at_any(code: Code, driver: &str) -> Option<String> {
    Some(match code {
        Code::FailedPrecondition => "the changes are unknown: take a full backup \
            (snapshot allocated)"
            .to_owned(),
        Code::Unimplemented => format!("the driver {driver} does not list blocks"),
        Code::DeadlineExceeded => "the sidecar's time limit passed without one extent".to_owned(),
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

    const fn session(own: bool) -> Subject<'static> {
        Subject { entry: Entry::Session { request: "mine", own }, ..SUBJECT }
    }

    #[test]
    fn a_refusal_has_a_code_and_a_next_step() {
        let (own, given) = (session(true), session(false));
        for (subject, code, step) in [
            (SUBJECT, Code::FailedPrecondition, "full backup"),
            (SUBJECT, Code::PermissionDenied, "`get` on `volumesnapshots`"),
            (SUBJECT, Code::PermissionDenied, "ServiceAccount shop/backup needs"),
            (SUBJECT, Code::Unauthenticated, "audience \"aud\""),
            (SUBJECT, Code::NotFound, "-n shop"),
            (SUBJECT, Code::Unimplemented, "d.example"),
            (SUBJECT, Code::DeadlineExceeded, "without one extent"),
            (SUBJECT, Code::OutOfRange, "--starting-offset"),
            (SUBJECT, Code::InvalidArgument, ": why"),
            (own, Code::Unauthenticated, "--lifetime"),
            (given, Code::Unauthenticated, "shop/mine has ended"),
            (own, Code::NotFound, "shop/mine must name it"),
            (own, Code::InvalidArgument, "must be names"),
            (own, Code::OutOfRange, "--starting-offset"),
            (own, Code::FailedPrecondition, "full backup"),
        ] {
            let text = format!("{:#}", Failure::stream(Status::new(code, "why"), &subject).error);
            let begin = format!("{}: why", grpc::code_name(code));
            assert!(text.starts_with(&begin) && text.contains(step), "{text}");
        }
    }

    #[test]
    fn refusals_of_the_api_server_are_final_outages_are_not() {
        let failure = |code, message: &str| {
            let status = kube::core::Status { code, message: message.into(), ..Default::default() };
            Failure::api("reading", kube::Error::Api(Box::new(status)))
        };
        let api = |code| failure(code, "m");
        for code in [400, 401, 403, 404, 422] {
            assert_eq!(api(code).retry, Retry::Never, "{code}");
        }
        for code in [408, 429, 500, 503] {
            assert_eq!(api(code).retry, Retry::OnceBegun, "{code}");
        }
        assert!(api(403).error.to_string().contains("RBAC"));
        for denied in [
            "admission webhook \"w\" denied the request: grant it by a Role",
            "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: grant it by a Role",
        ] {
            let message = failure(403, denied).error.to_string();
            assert!(!message.contains("RBAC"), "{message} has its own next step");
        }
        let gone = kube::Error::Service("refused".into());
        assert_eq!(Failure::api("reading", gone).retry, Retry::OnceBegun);
    }
}
