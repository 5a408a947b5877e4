//! `--metadata-endpoint`: a second socket for the sidecar, which serves clients from the network. It
//! serves only what reads snapshot metadata. The CSI socket also serves calls that create, delete and
//! mount volumes, which is the power of root, and those that end deltas from deleted snapshots.

use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::Router;

use super::Plugin;
use grpc::proto::csi::v1::controller_server::ControllerServer;
use grpc::proto::csi::v1::identity_server::IdentityServer;
use grpc::proto::csi::v1::snapshot_metadata_server::SnapshotMetadataServer;
use grpc::proto::snapshotsession::snapshot_metadata_server::SnapshotMetadataServer as SessionServer;
use grpc::reflection;

/// The services of the socket, as reflection lists them.
const SERVICES: [&str; 4] = [
    "csi.v1.Identity",
    "csi.v1.Controller",
    "csi.v1.SnapshotMetadata",
    "snapshotsession.SnapshotMetadata",
];

/// The services of which all methods are served.
const WHOLE: [&str; 3] =
    ["/csi.v1.Identity/", "/csi.v1.SnapshotMetadata/", "/snapshotsession.SnapshotMetadata/"];
/// The other methods that are served.
const METHODS: [&str; 2] =
    ["/csi.v1.Controller/ControllerGetCapabilities", "/csi.v1.Controller/ListSnapshotDeltas"];

/// # Errors
/// The descriptors of this build cannot be read.
pub fn router(plugin: Plugin) -> anyhow::Result<Router> {
    let routes = Routes::default()
        .add_service(IdentityServer::new(plugin.clone()))
        .add_service(ControllerServer::new(plugin.clone()))
        .add_service(SnapshotMetadataServer::new(plugin.clone()))
        .add_service(SessionServer::new(plugin));
    let routes = routes.into_axum_router().layer(from_fn(refuse_other_methods));
    reflection::add(Server::builder().add_routes(routes.into()), &SERVICES)
}

async fn refuse_other_methods(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if METHODS.contains(&path) || WHOLE.iter().any(|service| path.starts_with(service)) {
        return next.run(request).await;
    }
    let message =
        format!("{path}: is not served on the socket of --metadata-endpoint; use --endpoint");
    Status::unimplemented(message).into_http()
}
