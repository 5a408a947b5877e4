//! Decides about a NodePublishVolume as the proposal's kubelet does: whether the pod defers the
//! volume, whether the driver supports that, and which failures are reported.

use std::path::PathBuf;
use std::time::Duration;

use tokio::time::timeout;

use super::deferral_request::{self, DeferralRequest, Group, VolumeKind};
use super::host_mounts::HostPublish;
use super::proxy::Proxy;
use super::publish_target::{PodInfo, PublishTarget};
use super::refusal::{Refusal, Result};
use super::store::{DeferredVolume, PodRef};
use csi::node_service_capability::rpc::Type;
use csi::volume_capability::AccessType;
use grpc::proto::csi::v1 as csi;
use kubernetes::defer_annotation::{self, ANNOTATION};
use kubernetes::pod::Pod;
use storage::filesystem;
use telemetry::task;

/// Timeout of reading the mount table.
const MOUNT_TABLE_TIMEOUT: Duration = Duration::from_secs(10);

/// What the proxy does with a publish.
#[derive(Debug)]
pub enum Decision {
    /// Forward it unchanged.
    Forward(Option<HostPublish>),
    Defer(DeferredVolume),
}

impl Proxy {
    pub async fn decide(&self, request: &csi::NodePublishVolumeRequest) -> Result<Decision> {
        let block = request
            .volume_capability
            .as_ref()
            .is_some_and(|capability| matches!(capability.access_type, Some(AccessType::Block(_))));
        let stored = self.store.at_target(&request.volume_id, &request.target_path);
        if let Some(volume) = stored.filter(|_| !block) {
            let checked = self.check_publish(volume.group.as_ref()).await;
            let reported = self.report_failure(checked, &volume.pod, request);
            return reported.map(|()| Decision::Defer(volume));
        }
        let Some(target) = PublishTarget::of(&request.target_path, &request.volume_context) else {
            return Ok(Decision::Forward(None));
        };
        let info = PodInfo::of(&request.volume_context);
        let block = block || matches!(target, PublishTarget::Device { .. });
        let mut publish = HostPublish {
            volume: request.volume_id.clone(),
            target: request.target_path.clone(),
            publish_target: target,
            kind: VolumeKind { block, inline: info.inline },
            checked_annotation: None,
        };
        let uid = publish.publish_target.pod_uid();
        let Some(pod) = self.pods.find(uid, info.named.as_ref()).await else {
            // The pod may have opted in. A driver that cannot defer must mount in any case.
            return match self.driver.capabilities().await?.contains(&Type::DeferFsOps) {
                true => Err(Refusal::PodUnknown(uid.to_owned())),
                false => Ok(Decision::Forward(Some(publish))),
            };
        };
        let is_deferred = self.is_deferred(&pod, &publish).await;
        let pod_ref = PodRef::of(&pod);
        if !self.report_failure(is_deferred, &pod_ref, request)? {
            publish.checked_annotation = defer_annotation::value(&pod).map(str::to_owned);
            return Ok(Decision::Forward(Some(publish)));
        }
        let group = deferral_request::group(&pod);
        let checked = self.check_new(&request.target_path, group.as_ref()).await;
        self.report_failure(checked, &pod_ref, request)?;
        let claim = self.claim(&pod, &publish).await;
        let staging = &request.staging_target_path;
        let volume = DeferredVolume::new(&request.volume_id, staging, group, pod_ref);
        Ok(Decision::Defer(volume.with_claim(claim)))
    }

    /// The claim of the volume, for the metrics; `None` if unknown.
    async fn claim(&self, pod: &Pod, publish: &HostPublish) -> Option<String> {
        let target = &publish.publish_target;
        let mut claims = deferral_request::candidate_claims(pod, target, publish.kind)?;
        if claims.len() == 1 {
            return claims.pop_first().map(|(claim, _)| claim);
        }
        let found = self.pods.find_claim(pod, &claims, target.name()?).await;
        found.ok().map(|(claim, _)| claim)
    }

    /// Whether the pod defers the volume to its runtime.
    async fn is_deferred(&self, pod: &Pod, publish: &HostPublish) -> Result<bool> {
        let target = &publish.publish_target;
        let is_deferred = match deferral_request::deferral_request(pod, target, publish.kind) {
            DeferralRequest::Host => false,
            DeferralRequest::Runtime => true,
            DeferralRequest::ByClaim(claims) => {
                self.pods.find_claim(pod, &claims, target.name().unwrap_or_default()).await?.1
            }
            DeferralRequest::Ambiguous => return Err(Refusal::Ambiguous(publish.target.clone())),
        };
        match is_deferred && publish.kind.block {
            true => Err(Refusal::RawBlock),
            false => Ok(is_deferred),
        }
    }

    /// Checks a volume that is deferred for the first time: the host must not have mounted it.
    async fn check_new(&self, target: &str, group: Option<&Group>) -> Result<()> {
        if self.is_mounted_on_host(target).await? {
            return Err(Refusal::MountedOnHost(target.to_owned()));
        }
        self.check_publish(group).await
    }

    /// Whether anything but the guard of a deferred volume is mounted at the target on this node.
    pub async fn is_mounted_on_host(&self, target: &str) -> Result<bool> {
        let unknown = |why: String| {
            Refusal::StateUnavailable(format!(
                "cannot determine whether the host has mounted {target}: {why}"
            ))
        };
        let path = PathBuf::from(target);
        let lookup = task::blocking(move || filesystem::mount_at(&path));
        let found = timeout(MOUNT_TABLE_TIMEOUT, lookup).await;
        let found = found.map_err(|late| unknown(late.to_string()))?;
        let found = found.map_err(|ended| unknown(ended.to_string()))?;
        let is_volume = |mount: &filesystem::Mount| !mount.is_guard();
        let found = found.map(|mount| mount.as_ref().is_some_and(is_volume));
        found.map_err(|error| unknown(error.to_string()))
    }

    /// Checks the driver's capabilities: no field is sent without its capability, and no publish is
    /// forwarded without a field that the pod needs.
    async fn check_publish(&self, group: Option<&Group>) -> Result<()> {
        let has = self.driver.capabilities().await?;
        let mut needs = vec![(Type::DeferFsOps, ANNOTATION)];
        if let Some(group) = group {
            needs.push((Type::DeferFsOpsWithSupplementalGroup, "fsGroup"));
            if group.policy.is_some() {
                let policy = Type::DeferFsOpsWithSupplementalGroupChangePolicy;
                needs.push((policy, "fsGroupChangePolicy"));
            }
        }
        match needs.into_iter().find(|(capability, _)| !has.contains(capability)) {
            None => Ok(()),
            Some((capability, because)) => {
                Err(Refusal::MissingCapability { capability: capability.as_str_name(), because })
            }
        }
    }

    /// Records a failure that needs action as an event of the pod, as kubelet does.
    fn report_failure<T>(
        &self,
        result: Result<T>,
        pod: &PodRef,
        request: &csi::NodePublishVolumeRequest,
    ) -> Result<T> {
        result.inspect_err(|refusal| {
            if refusal.needs_user_action() {
                let message = format!("volume {}: {refusal}", volume_names(request));
                self.events.failed_mount(pod, &message);
            }
        })
    }
}

/// kubelet's name of the volume, as in its own events, and the driver's handle.
fn volume_names(request: &csi::NodePublishVolumeRequest) -> String {
    match PublishTarget::of_path(&request.target_path).as_ref().and_then(PublishTarget::name) {
        Some(name) => format!("{name:?} ({:?})", request.volume_id),
        None => format!("{:?}", request.volume_id),
    }
}
