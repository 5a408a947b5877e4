//! What the proposal has kubelet do before NodePublishVolume: whether the pod wants the volume left to its runtime, whether the
//! driver can do that, and what there is to say if not.

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::host::Passed;
use super::memory::{Left, PodRef};
use super::node::Proxy;
use super::place::{Place, PodInfo};
use super::refusal::{Refusal, Result};
use super::wish::{self, Form, Group, Wish};
use crate::backend::filesystem;
use crate::kubernetes::defer_annotation::{self, ANNOTATION};
use crate::proto::csi::v1 as csi;
use csi::node_service_capability::rpc::Type;
use csi::volume_capability::AccessType;

/// How long the kernel may take to say what is mounted.
const LOOK_TIMEOUT: Duration = Duration::from_secs(10);

/// What becomes of a publish.
#[derive(Debug)]
pub enum Decision {
    /// It is passed on as it is.
    Pass(Option<Passed>),
    Defer(Left),
}

impl Proxy {
    pub async fn decide(&self, asked: &csi::NodePublishVolumeRequest) -> Result<Decision> {
        let block = asked
            .volume_capability
            .as_ref()
            .is_some_and(|capability| matches!(capability.access_type, Some(AccessType::Block(_))));
        if let Some(left) = self.memory.at(&asked.volume_id, &asked.target_path).filter(|_| !block)
        {
            let checked = self.check_publish(left.group.as_ref()).await;
            return self.told(checked, &left.pod, asked).map(|()| Decision::Defer(left));
        }
        let Some(place) = Place::of(&asked.target_path, &asked.volume_context) else {
            return Ok(Decision::Pass(None));
        };
        let info = PodInfo::of(&asked.volume_context);
        let block = block || matches!(place, Place::Device { .. });
        let mut passed = Passed {
            volume: asked.volume_id.clone(),
            target: asked.target_path.clone(),
            place,
            form: Form { block, inline: info.inline },
            judged: None,
        };
        let uid = passed.place.pod_uid();
        let Some(pod) = self.pods.find(uid, info.named.as_ref()).await else {
            // It may have opted in. A driver that cannot defer has to mount in any case.
            return match self.driver.capabilities().await?.contains(&Type::DeferFsOps) {
                true => Err(Refusal::PodUnknown(uid.to_owned())),
                false => Ok(Decision::Pass(Some(passed))),
            };
        };
        let wanted = self.wanted(&pod, &passed).await;
        let pod_ref = PodRef::of(&pod);
        if !self.told(wanted, &pod_ref, asked)? {
            passed.judged = defer_annotation::value(&pod).map(str::to_owned);
            return Ok(Decision::Pass(Some(passed)));
        }
        let group = wish::group(&pod);
        let checked = self.check_new(&asked.target_path, group.as_ref()).await;
        self.told(checked, &pod_ref, asked)?;
        let claim = self.claim(&pod, &passed).await;
        let left = Left::new(&asked.volume_id, &asked.staging_target_path, group, pod_ref);
        Ok(Decision::Defer(left.with_claim(claim)))
    }

    /// The claim that the volume belongs to, for the metrics; None where it is unknown.
    async fn claim(&self, pod: &Pod, asked: &Passed) -> Option<String> {
        let mut claims = wish::claims_at(pod, &asked.place, asked.form)?;
        if claims.len() == 1 {
            return claims.pop_first().map(|(claim, _)| claim);
        }
        let found = self.pods.ask(pod, &claims, asked.place.name()?).await;
        found.ok().map(|(claim, _)| claim)
    }

    /// Whether the pod wants its runtime to have the volume.
    async fn wanted(&self, pod: &Pod, asked: &Passed) -> Result<bool> {
        let wanted = match wish::wish(pod, &asked.place, asked.form) {
            Wish::Host => false,
            Wish::Runtime => true,
            Wish::Depends(claims) => {
                let name = asked.place.name().unwrap_or_default();
                self.pods.ask(pod, &claims, name).await?.1
            }
            Wish::Unclear => return Err(Refusal::Ambiguous(asked.target.clone())),
        };
        match wanted && asked.form.block {
            true => Err(Refusal::RawBlock),
            false => Ok(wanted),
        }
    }

    /// What is left for the first time must not be on the host already.
    async fn check_new(&self, target: &str, group: Option<&Group>) -> Result<()> {
        if self.is_on_host(target).await? {
            return Err(Refusal::MountedOnHost(target.to_owned()));
        }
        self.check_publish(group).await
    }

    /// Whether something is mounted at the target on this node.
    pub async fn is_on_host(&self, target: &str) -> Result<bool> {
        let unknown = |why: String| {
            Refusal::NotRemembered(format!(
                "whether the host has {target} mounted is not known: {why}"
            ))
        };
        let path = PathBuf::from(target);
        let looked =
            timeout(LOOK_TIMEOUT, spawn_blocking(move || filesystem::mount_at(&path))).await;
        let looked = looked.map_err(|late| unknown(late.to_string()))?;
        let looked = looked.map_err(|ended| unknown(ended.to_string()))?;
        looked.map(|mount| mount.is_some()).map_err(|error| unknown(error.to_string()))
    }

    /// No call has a field that the driver has no capability for, and none goes without one that the pod wants.
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

    /// Tells the pod's readers of what somebody has to mend, as kubelet would.
    fn told<T>(
        &self,
        result: Result<T>,
        pod: &PodRef,
        asked: &csi::NodePublishVolumeRequest,
    ) -> Result<T> {
        result.inspect_err(|refusal| {
            if refusal.is_to_be_mended() {
                self.events.failed_mount(pod, &format!("volume {}: {refusal}", called(asked)));
            }
        })
    }
}

/// As kubelet's own events have it, where that is known, for few know the names that the driver has for volumes.
fn called(asked: &csi::NodePublishVolumeRequest) -> String {
    match Place::of_path(&asked.target_path).as_ref().and_then(Place::name) {
        Some(name) => format!("{name:?} ({:?})", asked.volume_id),
        None => format!("{:?}", asked.volume_id),
    }
}
