//! Kubelet's calls for the volumes of a pod, with its paths and in its order (pkg/volume/csi of
//! Kubernetes).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use csi::node_service_capability::{Type as Capability, rpc};
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use csi_loopback::proto::csi::v1 as csi;
use serde_json::json;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::Rig;
use super::driver::ProxiedDriver;
use super::pods::{BoundPod, Persistent, Volume};
use crate::cluster::Cluster;
use crate::driver::{Rpc, call_through, channel_of, stats, unpublishing, unstaging};
use crate::inline::digits;
use crate::path;

impl<B: ProxiedDriver> Rig<'_, B> {
    /// A new connection to the proxy, as kubelet makes one for each call.
    pub fn channel(&self) -> Channel {
        connect(self.cluster, self.socket())
    }

    /// Calls the proxy.
    pub fn call<R: Rpc>(&self, request: R) -> Result<R::Response, Status> {
        self.driver.note(&request);
        self.cluster.block_on(call_through(self.channel(), request))
    }

    /// Calls the driver directly.
    pub fn call_driver<R: Rpc>(&self, request: R) -> Result<R::Response, Status> {
        self.driver.note(&request);
        let channel = connect(self.cluster, self.driver.socket());
        self.cluster.block_on(call_through(channel, request))
    }

    /// Whether the proxy reports a capability of the node.
    pub fn has(&self, capability: rpc::Type) -> bool {
        let reported = self.call(csi::NodeGetCapabilitiesRequest {}).unwrap().capabilities;
        reported.iter().any(|one| {
            matches!(&one.r#type, Some(Capability::Rpc(rpc)) if rpc.r#type == i32::from(capability))
        })
    }

    /// The target path of the volume.
    pub fn target(&self, pod: &BoundPod, volume: &Volume) -> PathBuf {
        match &volume.persistent {
            Some(Persistent { name, fs_type: None, .. }) => {
                let devices = self.kubelet().join("plugins/kubernetes.io/csi/volumeDevices");
                devices.join("publish").join(name).join(&pod.uid)
            }
            persistent => {
                let name = persistent.as_ref().map_or(&volume.name, |volume| &volume.name);
                let volumes = self.kubelet().join("pods").join(&pod.uid).join("volumes");
                volumes.join("kubernetes.io~csi").join(name).join("mount")
            }
        }
    }

    /// The staging path of the volume; None for an inline volume.
    pub fn staging(&self, volume: &Volume) -> Option<PathBuf> {
        let plugin = self.kubelet().join("plugins/kubernetes.io/csi");
        let Persistent { name, handle, fs_type, .. } = volume.persistent.as_ref()?;
        Some(match fs_type {
            None => plugin.join("volumeDevices/staging").join(name),
            Some(_) => {
                let place = plugin.join(self.driver.driver_name()).join(digits(handle));
                place.join("globalmount")
            }
        })
    }

    pub fn publishing_request(
        &self,
        pod: &BoundPod,
        volume: &Volume,
    ) -> csi::NodePublishVolumeRequest {
        let attributes = match &volume.persistent {
            Some(persistent) => persistent.attributes.clone(),
            None => volume.source["csi"]["volumeAttributes"].clone(),
        };
        let mut volume_context: std::collections::HashMap<String, String> =
            serde_json::from_value(attributes).unwrap();
        if self.pod_info {
            volume_context.extend(self.pod_info_of(pod, volume));
        }
        let staging = self.staging(volume).filter(|_| self.has(rpc::Type::StageUnstageVolume));
        csi::NodePublishVolumeRequest {
            volume_id: volume.handle(pod),
            staging_target_path: staging.map(|path| path.display().to_string()).unwrap_or_default(),
            target_path: path(&self.target(pod, volume)).to_owned(),
            volume_capability: Some(self.capability(pod, volume)),
            volume_context,
            ..Default::default()
        }
    }

    /// The attributes that kubelet adds for podInfoOnMount.
    pub fn pod_info_of(&self, pod: &BoundPod, volume: &Volume) -> Vec<(String, String)> {
        let ephemeral = volume.persistent.is_none().to_string();
        [
            ("pod.name", pod.name.as_str()),
            ("pod.namespace", &self.namespace),
            ("pod.uid", &pod.uid),
            ("serviceAccount.name", "default"),
            ("ephemeral", &ephemeral),
        ]
        .map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value.to_owned()))
        .to_vec()
    }

    fn capability(&self, pod: &BoundPod, volume: &Volume) -> csi::VolumeCapability {
        let (fs_type, options, access) = match &volume.persistent {
            None => (Some(String::new()), Vec::new(), "ReadWriteOnce"),
            Some(volume) => {
                (volume.fs_type.clone(), volume.options.clone(), volume.access.as_str())
            }
        };
        let access_type = match fs_type {
            None => AccessType::Block(BlockVolume {}),
            Some(fs_type) => {
                let group = pod.fs_group.filter(|_| self.has(rpc::Type::VolumeMountGroup));
                AccessType::Mount(MountVolume {
                    fs_type,
                    mount_flags: options,
                    volume_mount_group: group.map(|id| id.to_string()).unwrap_or_default(),
                    ..MountVolume::default()
                })
            }
        };
        let has_single_node_modes = self.has(rpc::Type::SingleNodeMultiWriter);
        let mode = match (access, has_single_node_modes) {
            ("ReadWriteOnce", true) => Mode::SingleNodeMultiWriter,
            ("ReadWriteOncePod", true) => Mode::SingleNodeSingleWriter,
            ("ReadWriteOnce" | "ReadWriteOncePod", false) => Mode::SingleNodeWriter,
            (other, _) => panic!("{other}: access mode not simulated"),
        };
        csi::VolumeCapability {
            access_type: Some(access_type),
            access_mode: Some(AccessMode { mode: mode.into() }),
        }
    }

    /// Kubelet's MountDevice: NodeStageVolume, if the driver stages volumes.
    pub fn stage(&self, pod: &BoundPod, volume: &Volume) -> Result<(), Status> {
        let Some(persistent) = &volume.persistent else { return Ok(()) };
        let staging = self.staging(volume).unwrap();
        fs::create_dir_all(&staging).unwrap();
        if !self.has(rpc::Type::StageUnstageVolume) {
            return Ok(());
        }
        let request = csi::NodeStageVolumeRequest {
            volume_id: persistent.handle.clone(),
            staging_target_path: path(&staging).to_owned(),
            volume_capability: Some(self.capability(pod, volume)),
            volume_context: serde_json::from_value(persistent.attributes.clone()).unwrap(),
            ..Default::default()
        };
        self.call(request).map(drop)
    }

    /// Kubelet's SetUp: NodePublishVolume. Removes the directory after a final error.
    pub fn publish(&self, pod: &BoundPod, volume: &Volume) -> Result<(), Status> {
        self.set_up(&self.publishing_request(pod, volume))
    }

    /// SetUp with this request.
    pub fn set_up(&self, request: &csi::NodePublishVolumeRequest) -> Result<(), Status> {
        let target = Path::new(&request.target_path);
        let parent = target.parent().unwrap();
        fs::create_dir_all(parent).unwrap();
        let is_device = target.to_string_lossy().contains("/volumeDevices/");
        if !is_device {
            let data = json!({ "volumeHandle": request.volume_id, "nodeName": self.node });
            fs::write(parent.join("vol_data.json"), data.to_string()).unwrap();
        }
        let result = self.call(request.clone()).map(drop);
        if let Err(status) = &result
            && is_final(status.code())
            && !is_device
        {
            remove_mount_dir(target);
        }
        result
    }

    /// All calls before a container can use the volume. Returns the target path.
    pub fn mount(&self, pod: &BoundPod, volume: &Volume) -> Result<PathBuf, Status> {
        self.stage(pod, volume)?;
        self.publish(pod, volume)?;
        Ok(self.target(pod, volume))
    }

    /// Kubelet's GetMetrics.
    pub fn stats(
        &self,
        pod: &BoundPod,
        volume: &Volume,
    ) -> Result<csi::NodeGetVolumeStatsResponse, Status> {
        self.call(stats(&volume.handle(pod), path(&self.target(pod, volume))))
    }

    pub fn expansion_request(
        &self,
        pod: &BoundPod,
        volume: &Volume,
        bytes: u64,
    ) -> csi::NodeExpandVolumeRequest {
        let staging = self.staging(volume);
        csi::NodeExpandVolumeRequest {
            volume_id: volume.handle(pod),
            volume_path: path(&self.target(pod, volume)).to_owned(),
            staging_target_path: staging.map(|path| path.display().to_string()).unwrap_or_default(),
            volume_capability: Some(self.capability(pod, volume)),
            capacity_range: Some(csi::CapacityRange {
                required_bytes: bytes as i64,
                limit_bytes: 0,
            }),
            ..Default::default()
        }
    }

    /// Kubelet's NodeExpand of a published volume. Returns the new size.
    pub fn expand(&self, pod: &BoundPod, volume: &Volume, bytes: u64) -> Result<i64, Status> {
        let request = self.expansion_request(pod, volume, bytes);
        self.call(request).map(|response| response.capacity_bytes)
    }

    /// Kubelet's TearDown: NodeUnpublishVolume, and removal of the directory.
    pub fn unpublish(&self, pod: &BoundPod, volume: &Volume) -> Result<(), Status> {
        let target = self.target(pod, volume);
        self.call(unpublishing(&volume.handle(pod), path(&target)))?;
        remove_mount_dir(&target);
        Ok(())
    }

    /// Kubelet's UnmountDevice.
    pub fn unstage(&self, volume: &Volume) -> Result<(), Status> {
        let Some(persistent) = &volume.persistent else { return Ok(()) };
        let staging = self.staging(volume).unwrap();
        if self.has(rpc::Type::StageUnstageVolume) {
            self.call(unstaging(&persistent.handle, path(&staging)))?;
        }
        let _ = fs::remove_dir(&staging);
        let _ = fs::remove_dir(staging.parent().unwrap());
        Ok(())
    }

    /// All calls after the end of the pod.
    pub fn unmount(&self, pod: &BoundPod, volume: &Volume) {
        self.unpublish(pod, volume).unwrap();
        self.unstage(volume).unwrap();
        let directory = self.kubelet().join("pods").join(&pod.uid);
        // Fails while the pod has other volumes.
        let _ = fs::remove_dir(directory.join("volumes/kubernetes.io~csi"));
        let _ = fs::remove_dir(directory.join("volumes"));
        let _ = fs::remove_dir(directory);
    }
}

fn connect(cluster: &Cluster, socket: PathBuf) -> Channel {
    let endpoint = Endpoint::from_static("http://localhost");
    let endpoint = endpoint.connect_timeout(Duration::from_secs(20));
    cluster.block_on(async { channel_of(endpoint, socket) })
}

/// Whether kubelet treats the code as final (isFinalError).
fn is_final(code: Code) -> bool {
    use Code::*;
    !matches!(code, Cancelled | DeadlineExceeded | Unavailable | ResourceExhausted | Aborted)
}

/// Removes an unmounted target, as kubelet does.
fn remove_mount_dir(target: &Path) {
    let _ = fs::remove_dir(target);
    let parent = target.parent().unwrap();
    let _ = fs::remove_file(parent.join("vol_data.json"));
    let _ = fs::remove_dir(parent);
}
