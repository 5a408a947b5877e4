//! The status of a request, and how it is written: completely, and only over the version that was
//! read.

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::cause::Obstacle;
use super::resolve::Resolved;
use common::text::truncate;
use kubernetes::session::{SessionState, SnapshotSessionRequest, SnapshotSessionRequestStatus};

/// The only type of condition.
const READY: &str = "Ready";
/// Reasons of the condition without an obstacle.
pub const ESTABLISHED: &str = "SessionReady";
const ESTABLISHING: &str = "Establishing";
pub const REVOKED: &str = "SessionRevoked";
/// Maximum bytes of a message.
const MAX_MESSAGE: usize = 16 << 10;

/// A new status of a request.
pub struct Draft<'a> {
    request: &'a SnapshotSessionRequest,
    pub status: SnapshotSessionRequestStatus,
}

impl<'a> Draft<'a> {
    /// Starts from the current status, and sets the expiration time.
    pub fn of(request: &'a SnapshotSessionRequest, expiration: &Time) -> Self {
        let mut status = request.status.clone().unwrap_or_default();
        status.state.get_or_insert(SessionState::Pending);
        status.expiration_time.get_or_insert_with(|| expiration.clone());
        Self { request, status }
    }

    /// Everything is resolved; the token is chosen, but not valid yet.
    pub fn establishing(mut self, driver: &str, token: &str) -> Self {
        self.status.driver = Some(driver.to_owned());
        self.status.session_token = Some(token.to_owned());
        self.condition("False", ESTABLISHING, "the session is being established");
        self
    }

    pub fn waiting(mut self, obstacle: &Obstacle) -> Self {
        self.condition("False", obstacle.cause.reason(), &obstacle.message);
        self
    }

    pub fn ready(mut self, found: &Resolved, token: &str) -> Self {
        let configuration = &found.configuration.spec;
        self.status.state = Some(SessionState::Ready);
        self.status.address = Some(configuration.address.clone());
        self.status.ca_cert = Some(ByteString(configuration.ca_cert.0.clone()));
        self.status.driver = Some(found.driver.clone());
        self.status.session_token = Some(token.to_owned());
        self.condition("True", ESTABLISHED, "the session can be used");
        self
    }

    pub fn failed(mut self, obstacle: &Obstacle) -> Self {
        self.status.state = Some(SessionState::Failed);
        self.status.session_token = None;
        self.status.error = Some(truncate(&obstacle.message, MAX_MESSAGE));
        self.condition("False", obstacle.cause.reason(), &obstacle.message);
        self
    }

    /// The data was deleted. The state is final, so only the condition changes.
    pub fn revoked(mut self) -> Self {
        let message = "the session's data was deleted, so its token is refused; create another SnapshotSessionRequest";
        self.condition("False", REVOKED, message);
        self
    }

    fn condition(&mut self, status: &str, reason: &str, message: &str) {
        let before = self.status.conditions.iter().find(|condition| condition.type_ == READY);
        let since = before.filter(|before| before.status == status);
        let condition = Condition {
            type_: READY.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: truncate(message, MAX_MESSAGE),
            last_transition_time: since.map_or_else(
                || Time(Timestamp::now()),
                |before| before.last_transition_time.clone(),
            ),
            observed_generation: self.request.metadata.generation,
        };
        self.status.conditions.retain(|condition| condition.type_ != READY);
        self.status.conditions.push(condition);
    }

    /// Name of the request.
    pub fn name(&self) -> String {
        self.request.name_any()
    }

    /// Whether it differs from the current status.
    pub fn differs(&self) -> bool {
        self.request.status.as_ref() != Some(&self.status)
    }

    /// A merge patch (RFC 7386) that applies only to this version of the request. Missing fields
    /// are removed.
    pub fn patch(&self) -> serde_json::Result<Value> {
        let fields =
            ["state", "address", "caCert", "sessionToken", "driver", "expirationTime", "error"];
        let mut status: Value = fields.iter().map(|field| (*field, Value::Null)).collect();
        if let (Some(all), Value::Object(set)) =
            (status.as_object_mut(), serde_json::to_value(&self.status)?)
        {
            all.extend(set);
        }
        let version = self.request.resource_version();
        Ok(json!({ "metadata": { "resourceVersion": version }, "status": status }))
    }
}

/// The reason of the condition, and the time of its last transition.
pub fn condition(request: &SnapshotSessionRequest) -> Option<(&str, &Time)> {
    let conditions = &request.status.as_ref()?.conditions;
    let ready = conditions.iter().find(|condition| condition.type_ == READY)?;
    Some((&ready.reason, &ready.last_transition_time))
}

#[cfg(test)]
mod tests {
    use super::super::cause::Cause;
    use super::*;

    fn request() -> SnapshotSessionRequest {
        let mut request = SnapshotSessionRequest::new("backup", Default::default());
        request.metadata.resource_version = Some("7".into());
        request
    }

    fn end() -> Time {
        Time(Timestamp::from_second(1_800_000_000).unwrap())
    }

    #[test]
    fn an_unchanged_status_is_not_written() {
        let mut request = request();
        let obstacle = Obstacle::new(Cause::SnapshotNotReady, "wait");
        let first = Draft::of(&request, &end()).waiting(&obstacle);
        assert!(first.differs());
        let patch = first.patch().unwrap();
        assert_eq!(patch["metadata"]["resourceVersion"], "7", "it replaces this version only");
        request.status = Some(first.status);
        assert!(!Draft::of(&request, &end()).waiting(&obstacle).differs());
        let other = Obstacle::new(Cause::SnapshotNotReady, "wait longer");
        assert!(Draft::of(&request, &end()).waiting(&other).differs());
    }

    #[test]
    fn a_condition_keeps_its_transition_time() {
        let mut request = request();
        let long_ago = Time(Timestamp::from_second(1).unwrap());
        let obstacle = Obstacle::new(Cause::SnapshotNotReady, "wait");
        let mut status = Draft::of(&request, &end()).waiting(&obstacle).status;
        status.conditions[0].last_transition_time = long_ago.clone();
        request.status = Some(status);
        let still = Draft::of(&request, &end()).establishing("d", "t").status;
        assert_eq!(still.conditions[0].last_transition_time, long_ago);
        assert_eq!(condition(&request), Some(("SnapshotNotReady", &long_ago)));
    }
}
