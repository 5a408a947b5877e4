//! The protocol between the aggregated API server and a driver's sidecar (KEP-3314,
//! VolumeSnapshotDelta, "CBT Datapath Workflow", step 4): JSON over HTTPS. A POST requests a page,
//! and a GET of the same path returns the driver's capability.
//!
//! The caller sends a bearer token of its ServiceAccount with the audience [`audience`]. A third
//! party chooses the address in a DriverDiscovery, so a token that is sent there must be valid for
//! that driver only. The caller must be allowed to `create` the subresource [`SUBRESOURCE`] of the
//! driver's DriverDiscovery.

use axum::http::StatusCode;
use serde::{Deserialize, Deserializer, Serialize};

use super::bounded::List;
use super::secret::Secrets;
use super::snapshot_delta::ChangedBlock;

/// HTTP path at the sidecar.
pub const PATH: &str = "/v1alpha1/snapshot-deltas";
/// Subresource of driverdiscoveries.cbt.storage.k8s.io, for RBAC.
pub const SUBRESOURCE: &str = "deltas";
/// Maximum entries of a page.
pub const MAX_LIMIT: u32 = 4096;
const _: () = assert!((MAX_LIMIT as usize) < super::bounded::MAX_ELEMENTS);

/// The audience of a token for this driver's endpoint.
pub fn audience(driver: &str) -> String {
    format!("cbt-http.cbt.storage.k8s.io/{driver}")
}

/// A request for a page.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PageRequest {
    /// Name of the requested CSI driver.
    pub driver: String,
    /// CSI handle of the base; empty for all blocks of the target.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub base_snapshot_id: String,
    /// CSI handle of the target.
    pub target_snapshot_id: String,
    /// Number of the first block to return.
    #[serde(default)]
    pub offset: u64,
    /// Maximum number of entries, 1 to 4096.
    pub limit: u32,
    /// Secrets for the driver.
    #[serde(default, skip_serializing_if = "Secrets::is_empty")]
    pub secrets: Secrets,
}

/// A page of changed blocks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Page {
    /// Size of the volume in bytes, if the driver reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_size_bytes: Option<u64>,
    /// Blocks in ascending order, all of one size.
    #[serde(default, deserialize_with = "bounded")]
    pub changed_blocks: Vec<ChangedBlock>,
    /// The offset of the next page, if more follows.
    #[serde(default, rename = "continue", skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

fn bounded<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ChangedBlock>, D::Error> {
    List::deserialize(deserializer).map(List::into_inner)
}

/// Response to the GET.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Info {
    /// Name of the CSI driver.
    pub driver: String,
    pub capability: Capability,
}

/// The call by which the driver reports changed blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Capability {
    ListSnapshotDeltas,
    /// CSI's SnapshotMetadata service, GetMetadataDelta and GetMetadataAllocated.
    SnapshotMetadata,
    None,
}

/// Why no page is returned: the body of every response with another status than 200.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    pub kind: ProblemKind,
    /// What is wrong and what to do.
    pub message: String,
    /// Name of the driver's gRPC code, such as NOT_FOUND, if the driver refused the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
}

/// Kinds of problems. Each has an HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ProblemKind {
    /// The request is malformed.
    Invalid,
    /// The token is missing or not valid for this audience.
    Unauthenticated,
    /// The token's user has no permission.
    NotAllowed,
    /// The endpoint belongs to another driver than the requested one.
    OtherDriver,
    /// The driver refused the request or failed.
    Driver,
    /// The driver has no call that reports changed blocks.
    Unsupported,
    /// The driver, the leader or the API server is unavailable. A retry may help.
    Unavailable,
    /// Too many concurrent requests. A retry may help.
    Busy,
    /// The request timed out.
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
