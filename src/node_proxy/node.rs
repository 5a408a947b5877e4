//! The four calls that the proposal has kubelet add something to. Whatever cannot be read is passed on as it is: the driver says
//! better what is wrong with it.

use std::sync::Arc;

use http_body_util::{BodyExt as _, Limited};
use k8s_openapi::api::core::v1::Pod;
use prost::Message;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response, header};
use tonic::{Code, Status};

use super::forward::Driver;
use super::memory::{Left, Memory};
use super::opt_in::{self, Group, Place, Wish};
use super::pods::{Named, Pods};
use super::{append, reports};
use crate::crust::Problem;
use crate::kubernetes::defer_annotation::ANNOTATION;
use crate::proto::csi::v1 as csi;
use csi::node_service_capability::rpc::Type;

const PUBLISH: &str = "/csi.v1.Node/NodePublishVolume";
const UNPUBLISH: &str = "/csi.v1.Node/NodeUnpublishVolume";
const STATS: &str = "/csi.v1.Node/NodeGetVolumeStats";
const EXPAND: &str = "/csi.v1.Node/NodeExpandVolume";
/// Bytes of a message that is looked at, at most: what gRPC servers take by default.
const MAX_MESSAGE: usize = 4 << 20;
/// A message's prefix: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// Keys of pod info in the volume context.
const POD_NAME: &str = "csi.storage.k8s.io/pod.name";
const POD_NAMESPACE: &str = "csi.storage.k8s.io/pod.namespace";

/// Cheap to clone.
#[derive(Clone)]
pub struct Proxy {
    pub driver: Driver,
    pub memory: Memory,
    pub pods: Pods,
    pub reports: reports::Reports,
}

/// What is to be done once the driver has answered.
enum After {
    Published { target: String, left: Left },
    Unpublished { target: String },
    Measured { volume: String },
    Grown,
}

impl Proxy {
    pub async fn handle(self, request: Request<Body>) -> Response<Body> {
        let path = request.uri().path();
        if ![PUBLISH, UNPUBLISH, STATS, EXPAND].contains(&path) {
            return self.driver.forward(request).await;
        }
        let (parts, body) = request.into_parts();
        let Ok(collected) = Limited::new(body, MAX_MESSAGE + PREFIX).collect().await else {
            return Status::resource_exhausted(format!(
                "the request has more than {MAX_MESSAGE} bytes, or broke off"
            ))
            .into_http();
        };
        let bytes = collected.to_bytes();
        let plain = message(&bytes).map(<[u8]>::to_vec);
        let Some(mut message) = plain else {
            return self.driver.forward(Request::from_parts(parts, full(bytes))).await;
        };
        let prepared = match parts.uri.path() {
            PUBLISH => self.publish(&mut message).await,
            UNPUBLISH => self.unpublish(&mut message).await,
            STATS => self.stats(&mut message).await,
            _ => self.expand(&mut message).await,
        };
        let after = match prepared {
            Ok(after) => after,
            Err(status) => {
                self.reports.failed(&status);
                return status.into_http();
            }
        };
        let Some(after) = after else {
            return self.driver.forward(Request::from_parts(parts, full(bytes))).await;
        };
        let mut parts = parts;
        parts.headers.remove(header::CONTENT_LENGTH);
        let answer = self.driver.forward(Request::from_parts(parts, full(framed(&message)))).await;
        self.finish(after, answer).await
    }

    /// What the proposal has kubelet do before NodePublishVolume.
    async fn publish(&self, message: &mut Vec<u8>) -> Result<Option<After>, Status> {
        let Ok(asked) = csi::NodePublishVolumeRequest::decode(message.as_slice()) else {
            return Ok(None);
        };
        let target = &asked.target_path;
        let left = match self.memory.at(&asked.volume_id, target) {
            Some(left) => left,
            None => match self.wanted(&asked).await? {
                Some(left) => left,
                None => return Ok(None),
            },
        };
        if let Err(status) = self.check_capabilities(left.group.as_ref()).await {
            let place = Place { pod_uid: left.pod_uid.clone(), name: String::new() };
            let named = Named { namespace: left.namespace.clone(), name: left.pod.clone() };
            if let Some(pod) = self.pods.find(&place, Some(&named)).await {
                let why = format!("volume {:?}: {}", asked.volume_id, status.message());
                self.pods.failed_mount(&pod, &why);
            }
            return Err(status);
        }
        self.memory.remember(target, &left).map_err(unkept)?;
        append::to_publish(message, left.group.as_ref());
        Ok(Some(After::Published { target: target.clone(), left }))
    }

    /// Whether the pod wants this volume left to its runtime.
    async fn wanted(&self, asked: &csi::NodePublishVolumeRequest) -> Result<Option<Left>, Status> {
        let Some(place) = Place::of(&asked.target_path) else { return Ok(None) };
        let context = |key: &str| asked.volume_context.get(key).cloned();
        let named = context(POD_NAMESPACE).zip(context(POD_NAME));
        let named = named.map(|(namespace, name)| Named { namespace, name });
        let Some(pod) = self.pods.find(&place, named.as_ref()).await else {
            // It may be one that never opted in, as most, and is not to suffer.
            self.reports.unknown_pod(&place.pod_uid);
            return Ok(None);
        };
        let wants = match opt_in::wish(&pod, &place.name) {
            Wish::Host => false,
            Wish::Runtime => true,
            Wish::Depends(claims) => self.ask_claims(&pod, &claims, &place.name).await?,
        };
        Ok(wants.then(|| left(asked, &pod, &place)))
    }

    /// Which of the claims of a pod is bound to this volume, where the pod leaves some of them and some not.
    async fn ask_claims(
        &self,
        pod: &Arc<Pod>,
        claims: &[(String, bool)],
        volume: &str,
    ) -> Result<bool, Status> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        for (claim, opted) in claims {
            let bound = self.pods.volume_of(namespace, claim).await.map_err(|error| {
                Status::unavailable(format!(
                    "the annotation {} names some of the pod's claims and not others, and which one is bound to {volume:?} cannot be asked \
                     (persistentvolumeclaims, get): {error}; name all of them or none, or try again",
                    ANNOTATION
                ))
            })?;
            if bound.as_deref() == Some(volume) {
                return Ok(*opted);
            }
        }
        Err(Status::unavailable(format!(
            "no claim of the pod is known to be bound to {volume:?}; try again"
        )))
    }

    /// The proposal, "Enhancements to Kubelet": no call has a field that the driver has no capability for, and none goes without
    /// one that the pod wants.
    async fn check_capabilities(&self, group: Option<&Group>) -> Result<(), Status> {
        let has = self.driver.capabilities().await?;
        let mut needs = vec![(Type::DeferFsOps, ANNOTATION)];
        if let Some(group) = group {
            needs.push((Type::DeferFsOpsWithSupplementalGroup, "fsGroup"));
            if group.policy.is_some() {
                needs.push((
                    Type::DeferFsOpsWithSupplementalGroupChangePolicy,
                    "fsGroupChangePolicy",
                ));
            }
        }
        match needs.into_iter().find(|(capability, _)| !has.contains(capability)) {
            None => Ok(()),
            Some((capability, why)) => Err(Status::failed_precondition(format!(
                "the pod wants the volume left to its container runtime ({why}), and the CSI driver does not have the capability {}: \
                 upgrade the driver, or delete the pod and leave the annotation out",
                capability.as_str_name()
            ))),
        }
    }

    async fn can_defer(&self) -> Result<bool, Status> {
        Ok(self.driver.capabilities().await?.contains(&Type::DeferFsOps))
    }

    /// It goes through in any case: a pod must be able to end (story 5).
    async fn unpublish(&self, message: &mut Vec<u8>) -> Result<Option<After>, Status> {
        let Ok(asked) = csi::NodeUnpublishVolumeRequest::decode(message.as_slice()) else {
            return Ok(None);
        };
        if self.memory.at(&asked.volume_id, &asked.target_path).is_none() {
            return Ok(None);
        }
        if self.can_defer().await.unwrap_or(false) {
            append::to_unpublish(message);
        }
        Ok(Some(After::Unpublished { target: asked.target_path }))
    }

    async fn stats(&self, message: &mut Vec<u8>) -> Result<Option<After>, Status> {
        let Ok(asked) = csi::NodeGetVolumeStatsRequest::decode(message.as_slice()) else {
            return Ok(None);
        };
        if self.memory.of(&asked.volume_id, &asked.volume_path).is_none() {
            return Ok(None);
        }
        self.check_capabilities(None).await?;
        append::to_stats(message);
        Ok(Some(After::Measured { volume: asked.volume_id }))
    }

    async fn expand(&self, message: &mut Vec<u8>) -> Result<Option<After>, Status> {
        let Ok(asked) = csi::NodeExpandVolumeRequest::decode(message.as_slice()) else {
            return Ok(None);
        };
        if self.memory.of(&asked.volume_id, &asked.volume_path).is_none() {
            return Ok(None);
        }
        self.check_capabilities(None).await?;
        append::to_expand(message);
        Ok(Some(After::Grown))
    }

    /// Draws the consequences of the driver's answer, and passes that on.
    async fn finish(&self, after: After, answer: Response<Body>) -> Response<Body> {
        let (parts, body) = answer.into_parts();
        let Ok(collected) = Limited::new(body, MAX_MESSAGE + PREFIX).collect().await else {
            return Status::unavailable("the CSI driver's answer broke off; try again").into_http();
        };
        let trailers = collected.trailers().cloned();
        let bytes = collected.to_bytes();
        let code = code(&parts.headers, trailers.as_ref());
        match (after, code) {
            (After::Published { target, left }, Code::Ok) => {
                // The memory of a target that was not there yet may have been collected.
                if let Err(problem) = self.memory.remember(&target, &left) {
                    return unkept(problem).into_http();
                }
                self.reports.published(&target);
            }
            (After::Unpublished { target }, Code::Ok) => {
                if let Err(problem) = self.memory.forget(&target) {
                    return unkept(problem).into_http();
                }
                self.reports.forget(&target);
            }
            (After::Measured { volume }, Code::Ok) => {
                let said = message(&bytes).and_then(|bytes| {
                    csi::NodeGetVolumeStatsResponse::decode(bytes).ok()?.volume_condition
                });
                self.reports.measured(&volume, said.is_some_and(|said| said.abnormal));
            }
            (After::Grown, Code::Ok) => {}
            (_, code) => self.reports.refused(code),
        }
        Response::from_parts(parts, whole(bytes, trailers))
    }
}

fn left(asked: &csi::NodePublishVolumeRequest, pod: &Pod, place: &Place) -> Left {
    Left {
        volume_handle: asked.volume_id.clone(),
        group: opt_in::group(pod),
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        pod: pod.metadata.name.clone().unwrap_or_default(),
        pod_uid: place.pod_uid.clone(),
    }
}

fn unkept(problem: Problem) -> Status {
    Status::unavailable(format!(
        "that the volume is left to a container runtime cannot be written down (--state-dir): {problem}; try again"
    ))
}

/// The one message of a unary call, if it is not compressed.
fn message(bytes: &[u8]) -> Option<&[u8]> {
    let (prefix, message) = bytes.split_at_checked(PREFIX)?;
    let (compressed, length) = prefix.split_first()?;
    let length = u32::from_be_bytes(length.try_into().ok()?) as usize;
    (*compressed == 0 && length == message.len()).then_some(message)
}

fn framed(message: &[u8]) -> Vec<u8> {
    // What is added to a message that fits is some hundred bytes.
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    [&[0], length.to_be_bytes().as_slice(), message].concat()
}

fn full(bytes: impl Into<prost::bytes::Bytes>) -> Body {
    Body::new(http_body_util::Full::new(bytes.into()))
}

fn whole(bytes: prost::bytes::Bytes, trailers: Option<HeaderMap>) -> Body {
    let trailers = async move { trailers.map(Ok) };
    Body::new(http_body_util::Full::new(bytes).with_trailers(trailers))
}

fn code(headers: &HeaderMap, trailers: Option<&HeaderMap>) -> Code {
    let said = trailers.and_then(|trailers| trailers.get("grpc-status"));
    let said = said.or_else(|| headers.get("grpc-status"));
    said.map_or(Code::Unknown, |code| Code::from_bytes(code.as_bytes()))
}
