//! VolumeSnapshotDelta with all parts real: kubectl or an application, the API server, the
//! aggregated API server, cbt-http in the driver's sidecar, the driver. For single parts see
//! aggregated_surface, snapshot_delta_flow and cbt_http.

mod answers;
pub mod rig;
mod troubles;
