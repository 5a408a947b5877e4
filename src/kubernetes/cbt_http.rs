//! What the aggregated API server and a driver's sidecar say to each other (KEP-3314, VolumeSnapshotDelta, "CBT Datapath
//! Workflow", step 4): JSON over HTTPS. One POST asks for a page, and a GET of the same path what the driver can do.
//!
//! The caller shows a bearer token of its ServiceAccount with the audience [`audience`]: an address in a DriverDiscovery is another's to
//! choose, and a token that was sent there is good for that driver alone. It has to be allowed to `create` the subresource
//! [`SUBRESOURCE`] of the driver's DriverDiscovery.

use axum::http::StatusCode;
use serde::{Deserialize, Serialize};

use super::secret::Secrets;
use super::snapshot_delta::ChangedBlock;

/// Where the sidecar serves it.
pub const PATH: &str = "/v1alpha1/snapshot-deltas";
/// Of driverdiscoveries.cbt.storage.k8s.io, for RBAC.
pub const SUBRESOURCE: &str = "deltas";
/// Entries that a page can have, at most.
pub const MAX_LIMIT: u32 = 4096;

/// The audience of a token for this driver's endpoint.
pub fn audience(driver: &str) -> String {
    format!("cbt-http.cbt.storage.k8s.io/{driver}")
}

/// Asks for a page.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PageRequest {
    /// Name of the CSI driver that is meant.
    pub driver: String,
    /// CSI handle; empty: all blocks of the target.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub base_snapshot_id: String,
    /// CSI handle.
    pub target_snapshot_id: String,
    /// Number of the block to begin with.
    #[serde(default)]
    pub offset: u64,
    /// Entries, at most: 1 to 4096.
    pub limit: u32,
    /// For the driver.
    #[serde(default, skip_serializing_if = "Secrets::is_empty")]
    pub secrets: Secrets,
}

/// A page.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Page {
    /// Bytes, where the driver says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_size_bytes: Option<u64>,
    /// In ascending order, all of one size.
    #[serde(default)]
    pub changed_blocks: Vec<ChangedBlock>,
    /// The offset of the next page, if there is one.
    #[serde(default, rename = "continue", skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

/// Answer to the GET.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Info {
    /// Name of the CSI driver.
    pub driver: String,
    pub capability: Capability,
}

/// By which call the driver tells changed blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Capability {
    ListSnapshotDeltas,
    /// CSI's SnapshotMetadata service, GetMetadataDelta and GetMetadataAllocated.
    SnapshotMetadata,
    None,
}

/// Why there is no page: the body of every answer that is not 200.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    pub kind: ProblemKind,
    /// What is wrong and what to do about it.
    pub message: String,
    /// Name of the driver's gRPC code, such as NOT_FOUND, if the driver refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
}

/// Kinds of problems. Each has a status of HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ProblemKind {
    /// The request is not one.
    Invalid,
    /// No token, or not one of this audience.
    Unauthenticated,
    /// The token's user may not call.
    NotAllowed,
    /// Another driver is here than the one that was asked for.
    OtherDriver,
    /// The driver refused or failed.
    Driver,
    /// The driver has no call by which it tells changed blocks.
    Unsupported,
    /// The driver, the leading replica or the API server is not there. Another attempt may help.
    Unavailable,
    /// Too much at once. Another attempt may help.
    Busy,
    /// It took too long.
    TimedOut,
}

impl ProblemKind {
    pub fn status(self) -> StatusCode {
        match self {
            Self::Invalid => StatusCode::BAD_REQUEST,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::NotAllowed => StatusCode::FORBIDDEN,
            Self::OtherDriver => StatusCode::MISDIRECTED_REQUEST,
            Self::Driver => StatusCode::BAD_GATEWAY,
            Self::Unsupported => StatusCode::NOT_IMPLEMENTED,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Busy => StatusCode::TOO_MANY_REQUESTS,
            Self::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        }
    }
}
