//! Access to the Kubernetes API for the roles: a client with limits, watches, leader election, TLS,
//! the types of objects of other projects (VolumeSnapshot) and of this one
//! (SnapshotMetadataService, the objects of sessions, VolumeSnapshotDelta, DriverDiscovery), and
//! the protocol between roles over HTTPS ([`cbt_http`]). It does not depend on any role.

pub mod admission;
pub mod api_service;
pub mod bound_snapshot;
pub mod bounded;
pub mod cache;
pub mod cached;
pub mod cbt_http;
pub mod client;
pub mod defer_annotation;
pub mod definition;
pub mod driver_discovery;
#[cfg(test)]
pub mod fake_api;
pub mod https;
pub mod leader;
pub mod metadata_service;
pub mod name;
pub mod peer_limit;
pub mod pod;
pub mod proxy;
pub mod publish;
pub mod review;
pub mod secret;
pub mod session;
pub mod snapshot;
pub mod snapshot_delta;
pub mod tls;
pub mod webhook_configuration;
