//! Snapshot sessions as the session manager would make them, and a client that has a token.

use std::time::{Duration, SystemTime};

use csi_loopback::kubernetes::session::SnapshotSessionData;
use csi_loopback::proto::snapshotsession as api;
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::ResourceExt;
use serde_json::{Value, json};
use tonic::Status;
use tonic::transport::Channel;

use super::Cluster;
use super::access::rule;
use super::programs::Served;
use super::sidecar::channel;
use super::storage::Ready;
use crate::driver::PATIENCE;
use crate::requests::{Metadata, Rpc, session_allocated, session_delta};

/// Long enough for a test.
pub const HOUR: Duration = Duration::from_secs(3600);

/// What the sidecar needs for sessions, in its own namespace.
pub fn session_rules(verbs: &[&str]) -> Vec<PolicyRule> {
    vec![rule("cbt.storage.k8s.io", &["snapshotsessiondata"], verbs)]
}

/// A token, which no session has.
pub fn random_token() -> String {
    let mut random = [0_u8; 52];
    getrandom::fill(&mut random).unwrap();
    let alphabet = b"abcdefghijklmnopqrstuvwxyz234567";
    random.iter().map(|byte| char::from(alphabet[usize::from(byte & 31)])).collect()
}

impl Cluster {
    /// A session for these snapshots, whose data is in the namespace; returns its token.
    pub fn session(
        &self,
        namespace: &str,
        driver: &str,
        snapshots: &[&Ready],
        lifetime: Duration,
    ) -> String {
        let token = random_token();
        let object = self.session_data(&token, driver, snapshots, lifetime);
        self.create(&self.api_in::<SnapshotSessionData>(namespace), object);
        token
    }

    /// The object that [`Cluster::session`] makes.
    pub fn session_data(
        &self,
        token: &str,
        driver: &str,
        snapshots: &[&Ready],
        lifetime: Duration,
    ) -> Value {
        let objects = snapshots.iter().map(|ready| {
            let snapshots = self.api_in::<csi_loopback::kubernetes::snapshot::VolumeSnapshot>(&ready.namespace);
            let uid = self.get(&snapshots, &ready.name).unwrap().uid().unwrap();
            json!({
                "namespace": ready.namespace, "name": ready.name, "uid": uid, "handle": ready.handle,
            })
        });
        let end = k8s_openapi::jiff::Timestamp::try_from(SystemTime::now() + lifetime).unwrap();
        json!({
            "metadata": { "name": token },
            "spec": {
                "driver": driver,
                "request": { "namespace": snapshots[0].namespace, "name": "by-hand", "uid": "by-hand" },
                "snapshots": objects.collect::<Vec<_>>(),
                "expirationTime": end.to_string(),
            },
        })
    }

    /// Ends a session, as its request's deletion does.
    pub fn revoke(&self, namespace: &str, token: &str) {
        self.delete(&self.api_in::<SnapshotSessionData>(namespace), token);
    }

    /// What the sidecar answers to a request of the session API.
    pub fn ask_session(
        &self,
        sidecar: &Served,
        authority: &str,
        asked: impl Rpc<Answer = Metadata>,
    ) -> Result<Metadata, Status> {
        self.block_on(async { ask_through(channel(sidecar.port, authority), asked).await })
    }
}

pub async fn ask_through(
    channel: Channel,
    asked: impl Rpc<Answer = Metadata>,
) -> Result<Metadata, Status> {
    match tokio::time::timeout(PATIENCE, asked.send(channel)).await {
        Ok(answer) => answer,
        Err(_) => Err(Status::unknown("the test ran out of patience")),
    }
}

pub fn allocated(token: &str, snapshot: &str) -> api::GetAllocatedRequest {
    api::GetAllocatedRequest { session_token: token.to_owned(), ..session_allocated(snapshot) }
}

pub fn delta(token: &str, base: &str, target: &str) -> api::GetDeltaRequest {
    api::GetDeltaRequest { session_token: token.to_owned(), ..session_delta(base, target) }
}
