//! The CSI calls for volumes and snapshots.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tonic::Code;
use tonic::transport::Channel;

use super::super::door::{About, Done, Refusal, Snapshot, Source, Volume};
use super::super::world::lock;
use super::clean_up::Made;
use super::paths::Place;
use super::{PATIENCE, SocketDoor, capability, range, size};
use csi::controller_client::ControllerClient;
use csi::identity_client::IdentityClient;
use csi::node_client::NodeClient;
use grpc::proto::csi::v1 as csi;

/// The file below a directory of [`Place::Mount`].
const TARGET: &str = "target";

impl SocketDoor {
    fn identity(&self) -> IdentityClient<Channel> {
        IdentityClient::new(self.csi.clone())
    }

    fn controller(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.controller.clone())
    }

    fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.csi.clone())
    }

    /// Reads what the driver advertises.
    pub(super) fn discover(&mut self, with_node: bool) -> Done<()> {
        let info = self.call("GetPluginInfo", async || {
            self.identity().get_plugin_info(csi::GetPluginInfoRequest {}).await
        })?;
        self.about = About { name: info.name, version: info.vendor_version };
        let plugin = self.call("GetPluginCapabilities", async || {
            self.identity().get_plugin_capabilities(csi::GetPluginCapabilitiesRequest {}).await
        })?;
        use csi::plugin_capability::{self, service::Type as Service};
        let has = |service: Service| {
            let service = plugin_capability::Service { r#type: service.into() };
            let wanted = Some(plugin_capability::Type::Service(service));
            plugin.capabilities.iter().any(|one| one.r#type == wanted)
        };
        self.abilities.metadata = has(Service::SnapshotMetadataService);
        let is_placed = has(Service::VolumeAccessibilityConstraints);
        let controller = self.call("ControllerGetCapabilities", async || {
            self.controller()
                .controller_get_capabilities(csi::ControllerGetCapabilitiesRequest {})
                .await
        })?;
        use csi::controller_service_capability::{self, rpc::Type as Controller};
        let has = |rpc: Controller| {
            let rpc = controller_service_capability::Rpc { r#type: rpc.into() };
            let wanted = Some(controller_service_capability::Type::Rpc(rpc));
            controller.capabilities.iter().any(|one| one.r#type == wanted)
        };
        self.abilities.attaches = has(Controller::PublishUnpublishVolume);
        self.abilities.expands = has(Controller::ExpandVolume);
        self.abilities.clones = has(Controller::CloneVolume);
        if with_node {
            self.discover_node(is_placed)?;
        }
        Ok(())
    }

    fn discover_node(&mut self, is_placed: bool) -> Done<()> {
        let node = self.call("NodeGetCapabilities", async || {
            self.node().node_get_capabilities(csi::NodeGetCapabilitiesRequest {}).await
        })?;
        use csi::node_service_capability::{Rpc, Type, rpc};
        let stages = Some(Type::Rpc(Rpc { r#type: rpc::Type::StageUnstageVolume.into() }));
        self.abilities.stages = node.capabilities.iter().any(|one| one.r#type == stages);
        if self.abilities.attaches || is_placed {
            let info = self.call("NodeGetInfo", async || {
                self.node().node_get_info(csi::NodeGetInfoRequest {}).await
            })?;
            self.abilities.node_id = info.node_id;
            self.abilities.topology = info.accessible_topology.filter(|_| is_placed);
        }
        Ok(())
    }

    pub(super) fn create_request(
        &self,
        name: &str,
        bytes: u64,
        source: Option<Source<'_>>,
    ) -> csi::CreateVolumeRequest {
        use csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
        let content = source.map(|source| match source {
            Source::Snapshot(snapshot) => {
                Type::Snapshot(SnapshotSource { snapshot_id: snapshot.id.clone() })
            }
            Source::Volume(volume) => Type::Volume(VolumeSource { volume_id: volume.id.clone() }),
        });
        let topology = self.abilities.topology.clone().map(|here| csi::TopologyRequirement {
            requisite: vec![here.clone()],
            preferred: vec![here],
        });
        csi::CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: range(bytes),
            volume_capabilities: vec![capability()],
            parameters: self.parameters.volume.clone(),
            mutable_parameters: self.parameters.mutable.clone(),
            secrets: self.secrets.create_volume_secret.clone(),
            volume_content_source: content
                .map(|content| csi::VolumeContentSource { r#type: Some(content) }),
            accessibility_requirements: topology,
        }
    }

    pub(super) fn create_volume(&self, request: csi::CreateVolumeRequest) -> Done<csi::Volume> {
        let name = request.name.clone();
        self.note(Made::Volume { id: None, request: Box::new(request.clone()) });
        match self.request_volume(request) {
            Ok(volume) => {
                self.identify(&name, &volume.volume_id);
                Ok(volume)
            }
            Err(refusal) => {
                self.forget_if_final(&refusal);
                Err(refusal)
            }
        }
    }

    pub(super) fn request_volume(&self, request: csi::CreateVolumeRequest) -> Done<csi::Volume> {
        let response = self.call("CreateVolume", async || {
            self.controller().create_volume(request.clone()).await
        })?;
        let missing = || Refusal::Refused("CreateVolume returned no volume".to_owned());
        response.volume.ok_or_else(missing)
    }

    pub(super) fn remove_volume(&self, id: &str) -> Done<()> {
        let request = csi::DeleteVolumeRequest {
            volume_id: id.to_owned(),
            secrets: self.secrets.delete_volume_secret.clone(),
        };
        self.call("DeleteVolume", async || self.controller().delete_volume(request.clone()).await)
            .map(drop)
    }

    /// A snapshot that is ready: the call is repeated, as external-snapshotter does.
    pub(super) fn create_snapshot(&self, volume: &Volume, name: &str) -> Done<Snapshot> {
        let request = csi::CreateSnapshotRequest {
            source_volume_id: volume.id.clone(),
            name: name.to_owned(),
            secrets: self.secrets.create_snapshot_secret.clone(),
            parameters: self.parameters.snapshot.clone(),
            ..Default::default()
        };
        self.note(Made::Snapshot { id: None, request: Box::new(request.clone()) });
        let until = Instant::now() + PATIENCE;
        loop {
            let snapshot = self.request_snapshot(&request).inspect_err(|refusal| {
                self.forget_if_final(refusal);
            })?;
            let id = snapshot.snapshot_id;
            self.identify(name, &id);
            if snapshot.ready_to_use {
                let size = size(snapshot.size_bytes);
                return Ok(Snapshot { base: id.clone(), id, size });
            }
            if Instant::now() >= until {
                let seconds = PATIENCE.as_secs();
                let problem = format!("the snapshot is not ready to use after {seconds} s");
                return Err(Refusal::Refused(problem));
            }
            sleep(Duration::from_millis(200));
        }
    }

    pub(super) fn request_snapshot(
        &self,
        request: &csi::CreateSnapshotRequest,
    ) -> Done<csi::Snapshot> {
        let response = self.call("CreateSnapshot", async || {
            self.controller().create_snapshot(request.clone()).await
        })?;
        let missing = || Refusal::Refused("CreateSnapshot returned no snapshot".to_owned());
        response.snapshot.ok_or_else(missing)
    }

    pub(super) fn remove_snapshot(&self, id: &str) -> Done<()> {
        let request = csi::DeleteSnapshotRequest {
            snapshot_id: id.to_owned(),
            secrets: self.secrets.delete_snapshot_secret.clone(),
        };
        self.call("DeleteSnapshot", async || {
            self.controller().delete_snapshot(request.clone()).await
        })
        .map(drop)
    }

    /// Grows a volume that is not in use.
    pub(super) fn expand(&self, volume: &Volume, bytes: u64) -> Done<u64> {
        if !self.abilities.expands {
            return Err(Refusal::Refused("the driver does not expand volumes".to_owned()));
        }
        let request = csi::ControllerExpandVolumeRequest {
            volume_id: volume.id.clone(),
            capacity_range: range(bytes),
            secrets: self.secrets.controller_expand_volume_secret.clone(),
            volume_capability: Some(capability()),
        };
        let response = self.call("ControllerExpandVolume", async || {
            self.controller().controller_expand_volume(request.clone()).await
        })?;
        if response.node_expansion_required {
            lock(&self.to_expand).insert(volume.id.clone());
        }
        Ok(size(response.capacity_bytes).max(bytes))
    }

    fn context(&self, volume: &Volume) -> HashMap<String, String> {
        let volumes = lock(&self.volumes);
        volumes.get(&volume.id).map(|known| known.volume_context.clone()).unwrap_or_default()
    }

    /// Attaches, stages and publishes a volume; returns the path of its device.
    pub(super) fn publish(&self, volume: &Volume) -> Done<PathBuf> {
        let publish_context = self.attach(volume)?;
        let staging = self.stage(volume, &publish_context)?;
        let target = self.make_directory(Place::Mount, volume)?.join(TARGET);
        let request = csi::NodePublishVolumeRequest {
            volume_id: volume.id.clone(),
            publish_context,
            staging_target_path: staging.map(|path| text(&path)).unwrap_or_default(),
            target_path: text(&target),
            volume_capability: Some(capability()),
            readonly: false,
            secrets: self.secrets.node_publish_volume_secret.clone(),
            volume_context: self.context(volume),
            ..Default::default()
        };
        self.note(Made::Published(volume.clone(), target.clone()));
        self.call("NodePublishVolume", async || {
            self.node().node_publish_volume(request.clone()).await
        })?;
        if lock(&self.to_expand).remove(&volume.id) {
            self.expand_on_node(volume, &target)?;
        }
        Ok(target)
    }

    fn make_directory(&self, place: Place, volume: &Volume) -> Done<PathBuf> {
        if let Some(parent) = place.missing_parent(&self.paths, &volume.name) {
            self.note(Made::Parent(parent));
        }
        let planned = place.of(&self.paths, &volume.name);
        self.note(Made::Directory(place, volume.name.clone(), planned.clone()));
        let path = place.make(&self.paths, &volume.name)?;
        if path != planned {
            self.forget(&Made::Directory(place, volume.name.clone(), planned));
            self.note(Made::Directory(place, volume.name.clone(), path.clone()));
        }
        Ok(path)
    }

    fn attach(&self, volume: &Volume) -> Done<HashMap<String, String>> {
        if !self.abilities.attaches {
            return Ok(HashMap::new());
        }
        let request = csi::ControllerPublishVolumeRequest {
            volume_id: volume.id.clone(),
            node_id: self.abilities.node_id.clone(),
            volume_capability: Some(capability()),
            readonly: false,
            secrets: self.secrets.controller_publish_volume_secret.clone(),
            volume_context: self.context(volume),
        };
        self.note(Made::Attached(volume.clone()));
        let response = self.call("ControllerPublishVolume", async || {
            self.controller().controller_publish_volume(request.clone()).await
        })?;
        Ok(response.publish_context)
    }

    fn stage(
        &self,
        volume: &Volume,
        publish_context: &HashMap<String, String>,
    ) -> Done<Option<PathBuf>> {
        if !self.abilities.stages {
            return Ok(None);
        }
        let staging = self.make_directory(Place::Staging, volume)?;
        let request = csi::NodeStageVolumeRequest {
            volume_id: volume.id.clone(),
            publish_context: publish_context.clone(),
            staging_target_path: text(&staging),
            volume_capability: Some(capability()),
            secrets: self.secrets.node_stage_volume_secret.clone(),
            volume_context: self.context(volume),
        };
        self.note(Made::Staged(volume.clone(), staging.clone()));
        self.call("NodeStageVolume", async || {
            self.node().node_stage_volume(request.clone()).await
        })?;
        Ok(Some(staging))
    }

    fn expand_on_node(&self, volume: &Volume, target: &Path) -> Done<()> {
        let request = csi::NodeExpandVolumeRequest {
            volume_id: volume.id.clone(),
            volume_path: text(target),
            capacity_range: range(volume.size),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        self.call("NodeExpandVolume", async || {
            self.node().node_expand_volume(request.clone()).await
        })
        .map(drop)
    }

    pub(super) fn remove_target(&self, volume: &Volume, target: &Path) -> Done<()> {
        let request = csi::NodeUnpublishVolumeRequest {
            volume_id: volume.id.clone(),
            target_path: text(target),
            ..Default::default()
        };
        self.call("NodeUnpublishVolume", async || {
            self.node().node_unpublish_volume(request.clone()).await
        })
        .map(drop)
    }

    pub(super) fn unstage(&self, volume: &Volume, staging: &Path) -> Done<()> {
        let request = csi::NodeUnstageVolumeRequest {
            volume_id: volume.id.clone(),
            staging_target_path: text(staging),
        };
        self.call("NodeUnstageVolume", async || {
            self.node().node_unstage_volume(request.clone()).await
        })
        .map(drop)
    }

    pub(super) fn detach(&self, volume: &Volume) -> Done<()> {
        let request = csi::ControllerUnpublishVolumeRequest {
            volume_id: volume.id.clone(),
            node_id: self.abilities.node_id.clone(),
            secrets: self.secrets.controller_unpublish_volume_secret.clone(),
        };
        self.call("ControllerUnpublishVolume", async || {
            self.controller().controller_unpublish_volume(request.clone()).await
        })
        .map(drop)
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Whether a call that failed with this code has made nothing.
pub(super) fn makes_nothing(code: Code) -> bool {
    matches!(
        code,
        Code::InvalidArgument
            | Code::NotFound
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::FailedPrecondition
            | Code::ResourceExhausted
            | Code::PermissionDenied
            | Code::Unauthenticated
    )
}
