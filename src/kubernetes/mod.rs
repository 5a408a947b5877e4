//! What the roles know of a Kubernetes API server: a client with limits, the types of objects that belong
//! to others (VolumeSnapshot) or to this project (SnapshotMetadataService, the objects of sessions, VolumeSnapshotDelta and DriverDiscovery), what roles say to each other
//! over HTTPS ([`cbt_http`]), TLS. Knows no role.

pub mod admission;
pub mod api_service;
pub mod bound_snapshot;
pub mod cache;
pub mod cbt_http;
pub mod client;
pub mod defer_annotation;
pub mod driver_discovery;
#[cfg(test)]
pub mod fake_api;
pub mod https;
pub mod leader;
pub mod metadata_service;
pub mod name;
pub mod publish;
pub mod review;
pub mod secret;
pub mod session;
pub mod snapshot;
pub mod snapshot_delta;
pub mod tls;
pub mod webhook_configuration;
