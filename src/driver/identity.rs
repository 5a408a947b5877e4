//! The CSI Identity service: the plugin's name, capabilities and health.

use std::collections::HashMap;

use tonic::{Request, Response, Status};

use super::Plugin;
use crate::status::Answer;
use grpc::proto::csi::v1::identity_server::Identity;
use grpc::proto::csi::v1::plugin_capability::{
    Service, Type, VolumeExpansion, service, volume_expansion,
};
use grpc::proto::csi::v1::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
    GetPluginInfoResponse, PluginCapability, ProbeRequest, ProbeResponse,
};
use storage::Error;

const SERVICES: [service::Type; 5] = [
    service::Type::ControllerService,
    service::Type::VolumeAccessibilityConstraints,
    service::Type::GroupControllerService,
    service::Type::SnapshotMetadataService,
    service::Type::SnapshotAccessibilityConstraints,
];

#[tonic::async_trait]
impl Identity for Plugin {
    async fn get_plugin_info(
        &self,
        request: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        self.call("GetPluginInfo", request, plugin_info).await
    }

    async fn get_plugin_capabilities(
        &self,
        request: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        self.call("GetPluginCapabilities", request, plugin_capabilities).await
    }

    async fn probe(
        &self,
        request: Request<ProbeRequest>,
    ) -> Result<Response<ProbeResponse>, Status> {
        self.call("Probe", request, probe).await
    }
}

fn plugin_info(plugin: &Plugin, _: GetPluginInfoRequest) -> Answer<GetPluginInfoResponse> {
    Ok(GetPluginInfoResponse {
        name: plugin.driver_name.clone(),
        vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
        manifest: manifest(plugin),
    })
}

fn manifest(plugin: &Plugin) -> HashMap<String, String> {
    // Shows clients that faults may be injected.
    let faults = plugin.faults.kinds().map(|kinds| ("faults".to_owned(), kinds));
    faults.into_iter().collect()
}

fn plugin_capabilities(
    plugin: &Plugin,
    _: GetPluginCapabilitiesRequest,
) -> Answer<GetPluginCapabilitiesResponse> {
    // The controllers of many nodes cannot share a group.
    let is_served = |service: &service::Type| {
        !(plugin.node_local && *service == service::Type::GroupControllerService)
    };
    let services = SERVICES.into_iter().filter(is_served);
    let services = services.map(|service| Type::Service(Service { r#type: service.into() }));
    let online = VolumeExpansion { r#type: volume_expansion::Type::Online.into() };
    let capabilities = services
        .chain([Type::VolumeExpansion(online)])
        .map(|capability| PluginCapability { r#type: Some(capability) })
        .collect();
    Ok(GetPluginCapabilitiesResponse { capabilities })
}

/// CSI Probe: FAILED_PRECONDITION means that the plugin is not healthy, for any reason.
fn probe(plugin: &Plugin, _: ProbeRequest) -> Answer<ProbeResponse> {
    let health = plugin.backend.healthy();
    health.map_err(|error| Error::Precondition(format!("the driver is not healthy: {error}")))?;
    Ok(ProbeResponse { ready: Some(true) })
}
