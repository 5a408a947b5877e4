//! How VolumeSnapshotDeltas are served and how DriverDiscoveries get their conditions, with a real
//! API server and a fake endpoint. The aggregation layer is not part of these tests.

mod answers;
mod causes;
mod controller;
mod endpoint;
mod rig;
