//! Snapshot sessions as the session manager creates them, and a client with a token.

use std::time::{Duration, SystemTime};

use csi_loopback::kubernetes::session::SnapshotSessionData;
use csi_loopback::proto::snapshotsession as api;
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::ResourceExt;
use serde_json::{Value, json};
use tonic::Status;

use super::Cluster;
use super::access::rule;
use super::programs::Served;
use super::sidecar::channel;
use super::storage::Ready;
pub use crate::requests::call_through;
use crate::requests::{Metadata, Rpc, session_allocated, session_delta};

/// Longer than every test.
pub const HOUR: Duration = Duration::from_secs(3600);

/// The rights for sessions that the sidecar needs in its namespace.
pub fn session_rules(verbs: &[&str]) -> Vec<PolicyRule> {
    vec![rule("cbt.storage.k8s.io", &["snapshotsessiondata"], verbs)]
}

/// A random token.
pub fn random_token() -> String {
    let mut random = [0_u8; 52];
    getrandom::fill(&mut random).unwrap();
    let alphabet = b"abcdefghijklmnopqrstuvwxyz234567";
    random.iter().map(|byte| char::from(alphabet[usize::from(byte & 31)])).collect()
}

impl Cluster {
    /// Creates a session for these snapshots with its data in the namespace. Returns its token.
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

    /// The object that [`Cluster::session`] creates.
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

    /// Deletes the data of a session, which ends it.
    pub fn revoke(&self, namespace: &str, token: &str) {
        self.delete(&self.api_in::<SnapshotSessionData>(namespace), token);
    }

    /// Calls the session API of the sidecar.
    pub fn call_session(
        &self,
        sidecar: &Served,
        authority: &str,
        request: impl Rpc<Response = Metadata>,
    ) -> Result<Metadata, Status> {
        self.block_on(async { call_through(channel(sidecar.port, authority), request).await })
    }
}

pub fn allocated(token: &str, snapshot: &str) -> api::GetAllocatedRequest {
    api::GetAllocatedRequest { session_token: token.to_owned(), ..session_allocated(snapshot) }
}

pub fn delta(token: &str, base: &str, target: &str) -> api::GetDeltaRequest {
    api::GetDeltaRequest { session_token: token.to_owned(), ..session_delta(base, target) }
}
