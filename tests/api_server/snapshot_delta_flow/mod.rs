//! How a VolumeSnapshotDelta is answered and how DriverDiscoveries get their conditions, against a real API server and an endpoint that a
//! test can make say anything. The aggregation layer is not part of it.

mod answers;
mod causes;
mod controller;
mod endpoint;
mod rig;
