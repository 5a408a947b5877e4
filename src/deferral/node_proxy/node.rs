//! Handles the four calls to which the proposal's kubelet adds fields, from request to response.
//! Unreadable requests are forwarded unchanged: the driver must report what is wrong with them.

use http_body_util::BodyExt as _;
use prost::Message as _;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response, header, request};
use tonic::{Code, Status};

use super::call::{Call, DecodedRequest};
use super::deferral_request::Group;
use super::forward;
use super::host_mounts::HostPublish;
use super::message::{self, BufferError, BufferedBody, MAX_MESSAGE};
use super::proxy::Proxy;
use super::publish::Decision;
use super::refusal::{Refusal, Result};
use super::store::{DeferredVolume, PodRef, PublishGuard};
use common::fail_point::hit;
use csi::node_service_capability::rpc::Type;
use grpc::call::{Describe, Subject};
use grpc::proto::csi::v1 as csi;
use kubernetes::defer_annotation::ANNOTATION;

/// What the proxy does with a call.
enum Action {
    Forward,
    /// Forward unchanged; the host mounts the volume.
    ForwardForHost(HostPublish),
    /// Add the proposal's fields, and the group to a publish.
    AddFields(FollowUp, Option<Group>),
    /// Forward unchanged for a deferred volume, because the driver lacks the capability.
    ForwardDeferred(FollowUp),
}

/// What the proxy does after a successful response of the driver.
enum FollowUp {
    Publish { guard: PublishGuard, volume: String, target: String, pod: PodRef },
    Unpublish { target: String },
    Stats { volume: String, target: String, has_health: bool },
    Expand,
}

/// Marks the call as deferred in the log.
struct Deferred;

impl Describe for Deferred {
    fn describe(&self, subject: &mut Subject) {
        subject.deferred = true;
    }
}

impl Proxy {
    /// Handles a call, at most until its deadline.
    pub async fn handle(self, request: Request<Body>) -> Response<Body> {
        let Some(limit) = forward::deadline(request.headers()) else {
            return self.route(request).await;
        };
        let late =
            |_| Status::deadline_exceeded("the CSI driver did not respond before the deadline");
        let response = timeout(limit, self.route(request)).await.map_err(late);
        response.unwrap_or_else(Status::into_http)
    }

    async fn route(self, request: Request<Body>) -> Response<Body> {
        let Some(call) = Call::at(request.uri().path()) else {
            return self.driver.forward_unchanged(request).await;
        };
        let (parts, body) = request.into_parts();
        let buffered = match self.request_limit.buffer(body).await {
            Ok(buffered) => buffered,
            Err(BufferError::TooLarge) => {
                let refusal = Refusal::TooLarge(MAX_MESSAGE);
                self.reports.failed(call, refusal.reason(call));
                return refusal.status(call).into_http();
            }
            Err(BufferError::Incomplete) => {
                return Status::cancelled("the request is incomplete").into_http();
            }
        };
        let message = message::unframe(&buffered.bytes);
        match message.and_then(|message| DecodedRequest::decode(call, message)) {
            Some(decoded) => self.respond(call, decoded, parts, buffered).await,
            None => {
                let body = message::body(buffered.bytes.clone(), buffered.trailers.clone());
                self.driver.forward_unchanged(Request::from_parts(parts, body)).await
            }
        }
    }

    async fn respond(
        &self,
        call: Call,
        decoded: DecodedRequest,
        parts: request::Parts,
        buffered: BufferedBody,
    ) -> Response<Body> {
        // A shutdown waits for the call even if its client has disconnected.
        let mut line = self.calls.begin(call.method(), &decoded);
        let action = match self.plan(decoded).await {
            Ok(action) => action,
            Err(refusal) => {
                self.reports.failed(call, refusal.reason(call));
                let status = refusal.status(call);
                line.end(Some(&status));
                return status.into_http();
            }
        };
        let (response, failed) = match action {
            Action::Forward => (self.driver.forward(unchanged(parts, &buffered)).await, None),
            Action::ForwardForHost(publish) => {
                let response = self.driver.forward(unchanged(parts, &buffered)).await;
                (response.map(|response| self.record_host_publish(response, publish)), None)
            }
            Action::ForwardDeferred(follow_up) => {
                self.finish(call, follow_up, unchanged(parts, &buffered)).await
            }
            Action::AddFields(follow_up, group) => {
                line.note(&Deferred);
                let request = with_fields(call, parts, &buffered, group.as_ref());
                self.finish(call, follow_up, request).await
            }
        };
        let response = response.unwrap_or_else(|refusal| refusal.status(call).into_http());
        let code = failed
            .or_else(|| Status::from_header_map(response.headers()).map(|status| status.code()));
        // The driver's message may contain a secret.
        let status = code
            .filter(|code| *code != Code::Ok)
            .map(|code| Status::new(code, "returned by the CSI driver"));
        line.end(status.as_ref());
        response
    }

    async fn plan(&self, decoded: DecodedRequest) -> Result<Action> {
        Ok(match decoded {
            DecodedRequest::Publish(request) => match self.decide(&request).await? {
                Decision::Forward(None) => Action::Forward,
                Decision::Forward(Some(publish)) => Action::ForwardForHost(publish),
                Decision::Defer(volume) => self.defer(*request, volume).await?,
            },
            DecodedRequest::Unpublish(request) => {
                self.host_mounts.unpublished(&request.target_path);
                if self.store.at_target(&request.volume_id, &request.target_path).is_none() {
                    return Ok(Action::Forward);
                }
                let follow_up = FollowUp::Unpublish { target: request.target_path };
                // Unpublish is never refused: a pod must be able to end (story 5). If the
                // capabilities are unknown, a driver that does not know the field ignores it.
                match self.driver.capabilities().await {
                    Ok(has) if !has.contains(&Type::DeferFsOps) => {
                        Action::ForwardDeferred(follow_up)
                    }
                    _ => Action::AddFields(follow_up, None),
                }
            }
            DecodedRequest::Stats(request) => {
                if self.store.at_path(&request.volume_id, &request.volume_path).is_none() {
                    return Ok(Action::Forward);
                }
                let has_health =
                    self.deferring_capabilities().await?.contains(&Type::GetVolumeHealth);
                let (volume, target) = (request.volume_id, request.volume_path);
                Action::AddFields(FollowUp::Stats { volume, target, has_health }, None)
            }
            DecodedRequest::Expand(request) => {
                if self.store.at_path(&request.volume_id, &request.volume_path).is_none() {
                    return Ok(Action::Forward);
                }
                self.deferring_capabilities().await?;
                Action::AddFields(FollowUp::Expand, None)
            }
        })
    }

    async fn defer(
        &self,
        request: csi::NodePublishVolumeRequest,
        deferred: DeferredVolume,
    ) -> Result<Action> {
        let (volume, target) = (request.volume_id, request.target_path);
        let guard = self.store.begin_publish(&target, &deferred).await?;
        let follow_up = FollowUp::Publish { guard, volume, target, pod: deferred.pod };
        Ok(Action::AddFields(follow_up, deferred.group))
    }

    /// The capabilities of the driver, which must include DEFER_FS_OPS.
    async fn deferring_capabilities(&self) -> Result<Vec<Type>> {
        let capability = Type::DeferFsOps;
        let has = self.driver.capabilities().await?;
        match has.contains(&capability) {
            true => Ok(has),
            false => Err(Refusal::MissingCapability {
                capability: capability.as_str_name(),
                because: ANNOTATION,
            }),
        }
    }

    /// Forwards a call for a deferred volume and completes it. Returns the response and its code.
    async fn finish(
        &self,
        call: Call,
        follow_up: FollowUp,
        request: Request<Body>,
    ) -> (Result<Response<Body>>, Option<Code>) {
        let finished = self.forward_and_complete(follow_up, request).await;
        match &finished {
            Ok((_, Code::Ok)) => {}
            Ok(_) => {
                let failed = Refusal::DriverFailed(String::new());
                self.reports.failed(call, failed.reason(call));
            }
            Err(refusal) => self.reports.failed(call, refusal.reason(call)),
        }
        match finished {
            Ok((response, code)) => (Ok(response), Some(code)),
            Err(refusal) => (Err(refusal), None),
        }
    }

    async fn forward_and_complete(
        &self,
        follow_up: FollowUp,
        request: Request<Body>,
    ) -> Result<(Response<Body>, Code)> {
        let (parts, body) = self.driver.forward(request).await?.into_parts();
        let buffered = match self.response_limit.buffer(body).await {
            Ok(buffered) => buffered,
            Err(BufferError::Incomplete) => {
                return Err(Refusal::DriverUnavailable("its response is incomplete".into()));
            }
            Err(BufferError::TooLarge) => {
                let why = format!("its response has more than {MAX_MESSAGE} bytes");
                return Err(Refusal::DriverFailed(why));
            }
        };
        let code = grpc_code(&parts.headers, buffered.trailers.as_ref());
        if code == Code::Ok {
            self.complete(follow_up, &buffered).await?;
        }
        let body = message::body(buffered.bytes, buffered.trailers);
        Ok((Response::from_parts(parts, body), code))
    }

    async fn complete(&self, follow_up: FollowUp, response: &BufferedBody) -> Result<()> {
        let point = |name| hit(name).map_err(|error| Refusal::StateUnavailable(error.to_string()));
        match follow_up {
            FollowUp::Publish { guard, volume, target, pod } => {
                point("node_proxy.published")?;
                if self.is_mounted_on_host(&target).await? {
                    drop(guard);
                    return self.undo(&volume, &target, &pod).await;
                }
                self.metrics.record_deferred_publish();
            }
            FollowUp::Unpublish { target } => {
                point("node_proxy.unpublished")?;
                self.store.remove(&target).await?;
            }
            FollowUp::Stats { volume, target, has_health } => {
                let condition = message::unframe(&response.bytes).and_then(|message| {
                    csi::NodeGetVolumeStatsResponse::decode(message).ok()?.volume_condition
                });
                let abnormal = match condition {
                    // CSI v1.13 has no volume condition.
                    None if has_health => self.driver.reports_problem(&volume, &target).await,
                    condition => Ok(condition.is_some_and(|condition| condition.abnormal)),
                };
                match abnormal {
                    Ok(abnormal) => self.store.set_condition(&target, abnormal),
                    // The statistics are valid all the same, and the last condition remains.
                    Err(why) => {
                        tracing::warn!(volume, %why, "failed to get the health of a volume")
                    }
                }
            }
            FollowUp::Expand => {}
        }
        Ok(())
    }

    /// Unpublishes a volume that the driver has mounted on the host although it was deferred.
    ///
    /// # Errors
    /// Always, because the publish has failed.
    async fn undo(&self, volume: &str, target: &str, pod: &PodRef) -> Result<()> {
        let refusal = match self.driver.unpublish(volume, target).await {
            Ok(()) => {
                self.store.remove(target).await?;
                Refusal::DriverMounted(target.to_owned())
            }
            // kubelet repeats the publish, which is undone then.
            Err(refusal) => refusal,
        };
        tracing::error!(volume, target, %refusal, "the driver mounted a deferred volume on the host");
        if refusal.needs_user_action() {
            self.events.failed_mount(pod, &format!("volume {volume:?}: {refusal}"));
        }
        Err(refusal)
    }

    /// Records that the host has mounted the volume when the driver's response is successful.
    fn record_host_publish(
        &self,
        response: Response<Body>,
        publish: HostPublish,
    ) -> Response<Body> {
        let (host_mounts, mut publish) = (self.host_mounts.clone(), Some(publish));
        response.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let is_ok = |trailers| grpc_code(&HeaderMap::new(), Some(trailers)) == Code::Ok;
                if frame.trailers_ref().is_some_and(is_ok)
                    && let Some(publish) = publish.take()
                {
                    host_mounts.published(publish);
                }
                frame
            }))
        })
    }
}

fn unchanged(parts: request::Parts, buffered: &BufferedBody) -> Request<Body> {
    Request::from_parts(parts, message::body(buffered.bytes.clone(), buffered.trailers.clone()))
}

/// The request with the proposal's fields.
fn with_fields(
    call: Call,
    mut parts: request::Parts,
    buffered: &BufferedBody,
    group: Option<&Group>,
) -> Request<Body> {
    parts.headers.remove(header::CONTENT_LENGTH);
    // The frame is valid: the request was decoded.
    let message = message::unframe(&buffered.bytes).unwrap_or_default();
    let bytes = message::with_defer_fs_ops(call, message, group);
    Request::from_parts(parts, message::body(bytes, buffered.trailers.clone()))
}

fn grpc_code(headers: &HeaderMap, trailers: Option<&HeaderMap>) -> Code {
    let status = trailers.and_then(|trailers| trailers.get("grpc-status"));
    let status = status.or_else(|| headers.get("grpc-status"));
    status.map_or(Code::Unknown, |code| Code::from_bytes(code.as_bytes()))
}
