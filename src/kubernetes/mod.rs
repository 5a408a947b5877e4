//! What the roles know of a Kubernetes API server: a client with limits, the types of objects that belong
//! to others (VolumeSnapshot) or to this project (SnapshotMetadataService, the objects of sessions), TLS. Knows no role.

pub mod admission;
pub mod cache;
pub mod client;
pub mod https;
pub mod leader;
pub mod metadata_service;
pub mod name;
pub mod publish;
pub mod review;
pub mod session;
pub mod snapshot;
pub mod tls;
pub mod webhook_configuration;
