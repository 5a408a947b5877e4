//! Access to the Kubernetes API for the roles. It does not depend on any role, nor on gRPC or the
//! storage backend. Objects come from any client of the API server: what is read is bounded, and
//! what is kept of an object is only what a role uses.
//!
//! | module | owns |
//! |---|---|
//! | [`client`], [`proxy`] | a client with a rate limit and timeouts, directly or through a proxy |
//! | [`cache`], [`cached`], [`bounded`] | watches, what they keep of an object, JSON in bounded memory |
//! | [`review`], [`peer_limit`] | authentication and authorization by the API server, and turns for it |
//! | [`own_tokens`] | tokens of the program's own ServiceAccount |
//! | [`leader`] | leader election with a Lease |
//! | [`https`], [`tls`] | the TLS server of all roles; certificates and their rotation |
//! | [`admission`] | the server side of webhooks |
//! | [`publish`], [`api_service`], [`webhook_configuration`] | objects that publish an address and the certificates to trust |
//! | [`cbt_http`] | the protocol between the aggregated API server and a sidecar |
//! | [`snapshot`], [`bound_snapshot`], [`pod`], [`pod_certificate`], [`node_endpoints`], [`secret`], [`name`] | objects of Kubernetes and of the snapshot controller |
//! | [`metadata_service`], [`session`], [`snapshot_delta`], [`driver_discovery`], [`defer_annotation`], [`definition`] | objects of this project; `hack/crds.sh` generates deploy/crds from them |
//!
//! The feature `testing` adds `fake_api`, an API server for unit tests.

// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

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
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // For tests.
pub mod fake_api;
pub mod https;
pub mod leader;
pub mod metadata_service;
pub mod name;
pub mod node_endpoints;
pub mod own_tokens;
pub mod peer_limit;
pub mod pod;
pub mod pod_certificate;
pub mod proxy;
pub mod publish;
pub mod review;
pub mod secret;
pub mod session;
pub mod snapshot;
pub mod snapshot_delta;
pub mod tls;
pub mod webhook_configuration;
