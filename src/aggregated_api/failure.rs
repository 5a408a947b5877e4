//! Why a request got no VolumeSnapshotDelta, and how a Kubernetes client is told: the one place where causes become codes and reasons
//! (docs/reference/aggregated-api.md has the table). What the driver itself refuses is none of these: it is the answer, in its status.

use std::fmt;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::kubernetes::snapshot_delta::{GROUP, KIND, PLURAL};

/// What stands in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// No certificate of the front proxy, or no user in its headers.
    Unauthenticated,
    /// The user may not create VolumeSnapshotDeltas, or not get a VolumeSnapshot or the Secret.
    NotAllowed,
    /// Another verb than create.
    Verb,
    /// A path that there is not.
    Path,
    /// What was sent is no VolumeSnapshotDelta.
    Malformed,
    /// A field has a value that cannot be answered.
    Invalid,
    /// The body is in a format that is not read.
    MediaType,
    /// The answer is asked for in a format that is not written.
    NotAcceptable,
    TooLarge,
    /// Of one user, or in all.
    TooMany,
    SnapshotMissing,
    /// It may be ready later.
    SnapshotNotReady,
    SnapshotDeleting,
    ContentMissing,
    /// The two are of different drivers or volumes, or the base is the newer one.
    BaseUnfit,
    SecretMissing,
    /// No DriverDiscovery of the driver.
    DiscoveryMissing,
    /// A DriverDiscovery by which nothing can be reached.
    DiscoveryUnusable,
    /// The driver's endpoint does not answer, or not as it should.
    EndpointUnavailable,
    /// The driver cannot tell changed blocks.
    Unsupported,
    /// The API server refused this server something, or did not answer.
    ApiServer,
    TimedOut,
    /// This server ends.
    Exiting,
}

impl Cause {
    #[cfg(test)]
    pub const ALL: [Self; 23] = [
        Self::Unauthenticated,
        Self::NotAllowed,
        Self::Verb,
        Self::Path,
        Self::Malformed,
        Self::Invalid,
        Self::MediaType,
        Self::NotAcceptable,
        Self::TooLarge,
        Self::TooMany,
        Self::SnapshotMissing,
        Self::SnapshotNotReady,
        Self::SnapshotDeleting,
        Self::ContentMissing,
        Self::BaseUnfit,
        Self::SecretMissing,
        Self::DiscoveryMissing,
        Self::DiscoveryUnusable,
        Self::EndpointUnavailable,
        Self::Unsupported,
        Self::ApiServer,
        Self::TimedOut,
        Self::Exiting,
    ];

    /// As in the table of the documentation, and in the metrics.
    pub fn label(self) -> &'static str {
        self.told().0
    }

    pub fn code(self) -> StatusCode {
        self.told().1
    }

    /// As the API server names its own.
    pub fn reason(self) -> &'static str {
        self.told().2
    }

    fn told(self) -> (&'static str, StatusCode, &'static str) {
        use StatusCode as S;
        match self {
            Self::Unauthenticated => ("unauthenticated", S::UNAUTHORIZED, "Unauthorized"),
            Self::NotAllowed => ("not_allowed", S::FORBIDDEN, "Forbidden"),
            Self::Verb => ("verb", S::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
            Self::Path => ("path", S::NOT_FOUND, "NotFound"),
            Self::Malformed => ("malformed", S::BAD_REQUEST, "BadRequest"),
            Self::Invalid => ("invalid", S::UNPROCESSABLE_ENTITY, "Invalid"),
            Self::MediaType => ("media_type", S::UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType"),
            Self::NotAcceptable => ("not_acceptable", S::NOT_ACCEPTABLE, "NotAcceptable"),
            Self::TooLarge => ("too_large", S::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge"),
            Self::TooMany => ("too_many", S::TOO_MANY_REQUESTS, "TooManyRequests"),
            Self::SnapshotMissing => ("snapshot_missing", S::NOT_FOUND, "NotFound"),
            Self::SnapshotNotReady => ("snapshot_not_ready", S::CONFLICT, "Conflict"),
            Self::SnapshotDeleting => ("snapshot_deleting", S::CONFLICT, "Conflict"),
            Self::ContentMissing => ("content_missing", S::NOT_FOUND, "NotFound"),
            Self::BaseUnfit => ("base_unfit", S::UNPROCESSABLE_ENTITY, "Invalid"),
            Self::SecretMissing => ("secret_missing", S::NOT_FOUND, "NotFound"),
            Self::DiscoveryMissing => ("discovery_missing", S::NOT_FOUND, "NotFound"),
            Self::DiscoveryUnusable => {
                ("discovery_unusable", S::SERVICE_UNAVAILABLE, "ServiceUnavailable")
            }
            Self::EndpointUnavailable => {
                ("endpoint_unavailable", S::SERVICE_UNAVAILABLE, "ServiceUnavailable")
            }
            Self::Unsupported => ("unsupported", S::NOT_IMPLEMENTED, "NotImplemented"),
            Self::ApiServer => ("api_server", S::SERVICE_UNAVAILABLE, "ServiceUnavailable"),
            Self::TimedOut => ("timed_out", S::GATEWAY_TIMEOUT, "Timeout"),
            Self::Exiting => ("exiting", S::SERVICE_UNAVAILABLE, "ServiceUnavailable"),
        }
    }
}

/// One refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub cause: Cause,
    /// What is wrong, by the name of the field or object, and what to do about it. Of what is [`Cause::Invalid`] or
    /// [`Cause::BaseUnfit`]: `FIELD: WORDS`.
    pub message: String,
    /// The object that it is about.
    object: Option<Object>,
    retry_after: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Object {
    group: &'static str,
    kind: &'static str,
    name: String,
}

impl Failure {
    pub fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self { cause, message: message.into(), object: None, retry_after: None }
    }

    /// Names the object that it is about: its group, its resource in the plural as the API server does, its name.
    pub fn of(mut self, group: &'static str, kind: &'static str, name: &str) -> Self {
        self.object = Some(Object { group, kind, name: name.to_owned() });
        self
    }

    /// Says when to try again.
    pub fn after(mut self, pause: Duration) -> Self {
        self.retry_after = Some(pause);
        self
    }

    /// Seconds, at least one.
    fn retry_after_seconds(&self) -> Option<u64> {
        self.retry_after.map(|pause| pause.as_millis().div_ceil(1000).max(1) as u64)
    }

    /// Whether the message begins with a field's name.
    fn is_of_a_field(&self) -> bool {
        self.cause.code() == StatusCode::UNPROCESSABLE_ENTITY
    }

    /// As `metav1.Status`.
    pub fn status(&self) -> Value {
        let mut details = match &self.object {
            Some(Object { group, kind, name }) => {
                json!({ "group": group, "kind": kind, "name": name })
            }
            None if self.is_of_a_field() => json!({ "group": GROUP, "kind": KIND }),
            None => json!({ "group": GROUP, "kind": PLURAL }),
        };
        if self.is_of_a_field() {
            // kubectl shows these instead of the message.
            let (field, message) = self.message.split_once(": ").unwrap_or(("spec", &self.message));
            details["causes"] =
                json!([{ "reason": "FieldValueInvalid", "message": message, "field": field }]);
        }
        if let Some(seconds) = self.retry_after_seconds() {
            details["retryAfterSeconds"] = json!(seconds);
        }
        json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.cause.reason(),
            "details": details,
            "code": self.cause.code().as_u16(),
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.cause.code(), Json(self.status())).into_response();
        if let Some(seconds) = self.retry_after_seconds() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        // For the metrics.
        response.extensions_mut().insert(self.cause);
        response
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::documented::row;

    #[test]
    fn a_wrong_value_is_told_as_kubectl_shows_it_by_its_field() {
        for (message, field, words) in [
            ("spec.mode: must be x: y", "spec.mode", "must be x: y"),
            ("does not fit", "spec", "does not fit"),
        ] {
            let details = &Failure::new(Cause::Invalid, message).status()["details"];
            let cause = json!({ "reason": "FieldValueInvalid", "message": words, "field": field });
            assert_eq!((&details["causes"], &details["kind"]), (&json!([cause]), &json!(KIND)));
        }
    }

    #[test]
    fn the_table_of_the_documentation_has_each_cause_with_code_and_reason() {
        let page = include_str!("../../docs/reference/aggregated-api.md");
        for cause in Cause::ALL {
            let label = cause.label();
            let row = row(page, label);
            let told = (cause.code().as_u16().to_string(), cause.reason());
            assert_eq!((row[2].to_owned(), row[3]), told, "{label}");
        }
    }

    #[test]
    fn every_cause_has_a_name_of_its_own_and_a_code_of_an_error() {
        let labels: HashSet<_> = Cause::ALL.iter().map(|cause| cause.label()).collect();
        assert_eq!(labels.len(), Cause::ALL.len());
        assert!(Cause::ALL.iter().all(|cause| cause.code().as_u16() >= 400));
    }

    #[test]
    fn a_client_is_told_in_seconds_when_to_try_again() {
        let failure = |pause| Failure::new(Cause::TooMany, "x").after(pause).into_response();
        for (pause, seconds) in [(1, "1"), (1000, "1"), (1001, "2")] {
            let response = failure(Duration::from_millis(pause));
            assert_eq!(response.headers()[header::RETRY_AFTER], seconds);
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        }
    }
}
