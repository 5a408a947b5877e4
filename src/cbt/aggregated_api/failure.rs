//! Why a VolumeSnapshotDelta is refused, and the only place that maps causes to codes and reasons
//! (table in docs/reference/aggregated-api.md). An error of the driver is not one of these: it is
//! reported in the object's status.

use std::fmt;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use kubernetes::snapshot_delta::{GROUP, KIND, PLURAL};

/// The cause of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// No certificate of the front proxy, or no user in its headers.
    Unauthenticated,
    /// The user may not create VolumeSnapshotDeltas, or not get a VolumeSnapshot or the Secret.
    NotAllowed,
    /// Another verb than create.
    Verb,
    /// A path that does not exist.
    Path,
    /// The body is not a VolumeSnapshotDelta.
    Malformed,
    /// A field has an invalid value.
    Invalid,
    /// The format of the body is not supported.
    MediaType,
    /// The requested format of the response is not supported.
    NotAcceptable,
    TooLarge,
    /// Too many requests of one user, or of all users.
    TooMany,
    SnapshotMissing,
    /// Not ready yet; a retry may help.
    SnapshotNotReady,
    SnapshotDeleting,
    ContentMissing,
    /// The snapshots belong to different drivers or volumes, or the base is newer.
    BaseUnfit,
    SecretMissing,
    /// The driver has no DriverDiscovery.
    DiscoveryMissing,
    /// The DriverDiscovery has no usable endpoint.
    DiscoveryUnusable,
    /// The driver's endpoint did not respond, or not correctly.
    EndpointUnavailable,
    /// The driver cannot report changed blocks.
    Unsupported,
    /// The API server refused a call of this server, or did not respond.
    ApiServer,
    TimedOut,
    /// This server is exiting.
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

    /// The value in the table of the documentation and in the metrics.
    pub fn label(self) -> &'static str {
        self.row().0
    }

    pub fn code(self) -> StatusCode {
        self.row().1
    }

    /// The reason in the API server's own terms.
    pub fn reason(self) -> &'static str {
        self.row().2
    }

    fn row(self) -> (&'static str, StatusCode, &'static str) {
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

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub cause: Cause,
    /// What is wrong, with the name of the field or object, and what to do. For [`Cause::Invalid`]
    /// and [`Cause::BaseUnfit`] the format is `FIELD: MESSAGE`.
    pub message: String,
    /// The object that caused it.
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

    /// Sets the object: group, plural resource as in the API server's errors, and name.
    pub fn of(mut self, group: &'static str, kind: &'static str, name: &str) -> Self {
        self.object = Some(Object { group, kind, name: name.to_owned() });
        self
    }

    /// Sets the delay of a retry.
    pub fn after(mut self, pause: Duration) -> Self {
        self.retry_after = Some(pause);
        self
    }

    /// The delay in seconds, at least one.
    fn retry_after_seconds(&self) -> Option<u64> {
        self.retry_after.map(|pause| pause.as_millis().div_ceil(1000).max(1) as u64)
    }

    /// Whether the message starts with a field's name.
    fn is_of_a_field(&self) -> bool {
        self.cause.code() == StatusCode::UNPROCESSABLE_ENTITY
    }

    /// The failure as a `metav1.Status`.
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
    use common::documented::row;

    #[test]
    fn an_invalid_value_has_its_field_as_cause() {
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
    fn every_cause_is_documented_with_code_and_reason() {
        let page = include_str!("../../../docs/reference/aggregated-api.md");
        for cause in Cause::ALL {
            let label = cause.label();
            let row = row(page, label);
            let expected = (cause.code().as_u16().to_string(), cause.reason());
            assert_eq!((row[2].to_owned(), row[3]), expected, "{label}");
        }
    }

    #[test]
    fn every_cause_has_a_unique_label_and_an_error_code() {
        let labels: HashSet<_> = Cause::ALL.iter().map(|cause| cause.label()).collect();
        assert_eq!(labels.len(), Cause::ALL.len());
        assert!(Cause::ALL.iter().all(|cause| cause.code().as_u16() >= 400));
    }

    #[test]
    fn the_retry_delay_is_returned_in_seconds() {
        let failure = |pause| Failure::new(Cause::TooMany, "x").after(pause).into_response();
        for (pause, seconds) in [(1, "1"), (1000, "1"), (1001, "2")] {
            let response = failure(Duration::from_millis(pause));
            assert_eq!(response.headers()[header::RETRY_AFTER], seconds);
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        }
    }
}
