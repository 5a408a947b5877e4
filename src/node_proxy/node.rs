//! The four calls that the proposal has kubelet add something to, from request to answer. Whatever cannot be read is passed on as it is: the
//! driver says better what is wrong with it.

use http_body_util::BodyExt as _;
use prost::Message as _;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response, header, request};
use tonic::{Code, Status};

use super::call::{Asked, Call};
use super::events::Events;
use super::forward::{self, Driver};
use super::host::{Host, Passed};
use super::memory::{Left, Memory, PodRef, Publishing};
use super::message::{self, Held, MAX_MESSAGE, Room, Unheld};
use super::pods::Pods;
use super::publish::Decision;
use super::refusal::{Refusal, Result};
use super::reports::Reports;
use crate::fail_point::meet;
use crate::grpc::call::{Calls, Describe, Subject};
use crate::kubernetes::defer_annotation::ANNOTATION;
use crate::proto::csi::v1 as csi;
use crate::telemetry::metrics::Metrics;
use csi::node_service_capability::rpc::Type;

/// Cheap to clone.
#[derive(Clone)]
pub struct Proxy {
    pub driver: Driver,
    pub memory: Memory,
    pub pods: Pods,
    pub host: Host,
    pub events: Events,
    pub reports: Reports,
    pub metrics: Metrics,
    pub calls: Calls,
    pub room: Room,
    /// For answers: a request that waits for its own has room already, and would wait for ever if all of them did.
    pub room_for_answers: Room,
}

/// What becomes of a call.
enum Next {
    Pass,
    /// As it is, for the host.
    PassFor(Passed),
    Add(After, Option<super::wish::Group>),
    /// As it is, for a volume that was left to a runtime by a driver that no longer knows of that.
    Keep(After),
}

/// What is to be done once the driver has answered.
enum After {
    Published { publishing: Publishing, volume: String, target: String, pod: PodRef },
    Unpublished { target: String },
    Measured { volume: String, target: String, has_health: bool },
    Grown,
}

/// In the log.
struct Deferred;

impl Describe for Deferred {
    fn describe(&self, subject: &mut Subject) {
        subject.deferred = true;
    }
}

impl Proxy {
    /// Answers a call, at its deadline at the latest.
    pub async fn handle(self, request: Request<Body>) -> Response<Body> {
        let Some(limit) = forward::deadline(request.headers()) else {
            return self.attend(request).await;
        };
        let late = |_| Status::deadline_exceeded("the CSI driver did not answer in time");
        let answered = timeout(limit, self.attend(request)).await.map_err(late);
        answered.unwrap_or_else(Status::into_http)
    }

    async fn attend(self, request: Request<Body>) -> Response<Body> {
        let Some(call) = Call::at(request.uri().path()) else {
            return self.driver.pass_on(request).await;
        };
        let (parts, body) = request.into_parts();
        let held = match self.room.gather(body).await {
            Ok(held) => held,
            Err(Unheld::TooLarge) => {
                let refusal = Refusal::TooLarge(MAX_MESSAGE);
                self.reports.failed(call, refusal.reason(call));
                return refusal.status(call).into_http();
            }
            Err(Unheld::BrokeOff) => return Status::cancelled("the request broke off").into_http(),
        };
        let read = message::unframed(&held.bytes).and_then(|message| Asked::read(call, message));
        match read {
            Some(asked) => self.answer(call, asked, parts, held).await,
            None => {
                let body = message::body(held.bytes.clone(), held.trailers.clone());
                self.driver.pass_on(Request::from_parts(parts, body)).await
            }
        }
    }

    async fn answer(
        &self,
        call: Call,
        asked: Asked,
        parts: request::Parts,
        held: Held,
    ) -> Response<Body> {
        // It is waited for at the end of the process, also when its client has gone.
        let mut line = self.calls.begin(call.method(), &asked);
        let next = match self.next(asked).await {
            Ok(next) => next,
            Err(refusal) => {
                self.reports.failed(call, refusal.reason(call));
                let status = refusal.status(call);
                line.end(Some(&status));
                return status.into_http();
            }
        };
        let (answer, failed) = match next {
            Next::Pass => (self.driver.forward(whole(parts, &held)).await, None),
            Next::PassFor(passed) => {
                let answer = self.driver.forward(whole(parts, &held)).await;
                (answer.map(|answer| self.watched(answer, passed)), None)
            }
            Next::Keep(after) => self.finish(call, after, whole(parts, &held)).await,
            Next::Add(after, group) => {
                line.note(&Deferred);
                let request = added(call, parts, &held, group.as_ref());
                self.finish(call, after, request).await
            }
        };
        let answer = answer.unwrap_or_else(|refusal| refusal.status(call).into_http());
        let said = failed
            .or_else(|| Status::from_header_map(answer.headers()).map(|status| status.code()));
        // What the driver says may be a secret.
        let status = said
            .filter(|code| *code != Code::Ok)
            .map(|code| Status::new(code, "the driver's answer"));
        line.end(status.as_ref());
        answer
    }

    async fn next(&self, asked: Asked) -> Result<Next> {
        Ok(match asked {
            Asked::Publish(asked) => match self.decide(&asked).await? {
                Decision::Pass(None) => Next::Pass,
                Decision::Pass(Some(passed)) => Next::PassFor(passed),
                Decision::Defer(left) => self.defer(*asked, left).await?,
            },
            Asked::Unpublish(asked) => {
                self.host.unpublished(&asked.target_path);
                if self.memory.at(&asked.volume_id, &asked.target_path).is_none() {
                    return Ok(Next::Pass);
                }
                let after = After::Unpublished { target: asked.target_path };
                // It goes through in any case: a pod must be able to end (story 5). A driver that cannot be asked and does not
                // know the field passes it over.
                match self.driver.capabilities().await {
                    Ok(has) if !has.contains(&Type::DeferFsOps) => Next::Keep(after),
                    _ => Next::Add(after, None),
                }
            }
            Asked::Stats(asked) => {
                if self.memory.of(&asked.volume_id, &asked.volume_path).is_none() {
                    return Ok(Next::Pass);
                }
                let has_health = self.check_defers().await?.contains(&Type::GetVolumeHealth);
                let (volume, target) = (asked.volume_id, asked.volume_path);
                Next::Add(After::Measured { volume, target, has_health }, None)
            }
            Asked::Expand(asked) => {
                if self.memory.of(&asked.volume_id, &asked.volume_path).is_none() {
                    return Ok(Next::Pass);
                }
                self.check_defers().await?;
                Next::Add(After::Grown, None)
            }
        })
    }

    async fn defer(&self, asked: csi::NodePublishVolumeRequest, left: Left) -> Result<Next> {
        let (volume, target) = (asked.volume_id, asked.target_path);
        let publishing = self.memory.publishing(&target, &left).await?;
        let after = After::Published { publishing, volume, target, pod: left.pod };
        Ok(Next::Add(after, left.group))
    }

    /// The capabilities of the driver, where it defers.
    async fn check_defers(&self) -> Result<Vec<Type>> {
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

    /// Passes on a call for a volume that is left to a runtime, and draws the consequences of the answer, whose code is returned.
    async fn finish(
        &self,
        call: Call,
        after: After,
        request: Request<Body>,
    ) -> (Result<Response<Body>>, Option<Code>) {
        let finished = self.exchange(after, request).await;
        match &finished {
            Ok((_, Code::Ok)) => {}
            Ok(_) => {
                let refused = Refusal::DriverRefused(String::new());
                self.reports.failed(call, refused.reason(call));
            }
            Err(refusal) => self.reports.failed(call, refusal.reason(call)),
        }
        match finished {
            Ok((answer, code)) => (Ok(answer), Some(code)),
            Err(refusal) => (Err(refusal), None),
        }
    }

    async fn exchange(
        &self,
        after: After,
        request: Request<Body>,
    ) -> Result<(Response<Body>, Code)> {
        let (parts, body) = self.driver.forward(request).await?.into_parts();
        let held = match self.room_for_answers.gather(body).await {
            Ok(held) => held,
            Err(Unheld::BrokeOff) => {
                return Err(Refusal::DriverAway("its answer broke off".into()));
            }
            Err(Unheld::TooLarge) => {
                let why = format!("its answer has more than {MAX_MESSAGE} bytes");
                return Err(Refusal::DriverRefused(why));
            }
        };
        let code = code(&parts.headers, held.trailers.as_ref());
        if code == Code::Ok {
            self.done(after, &held).await?;
        }
        let body = message::body(held.bytes, held.trailers);
        Ok((Response::from_parts(parts, body), code))
    }

    async fn done(&self, after: After, held: &Held) -> Result<()> {
        let point = |name| meet(name).map_err(|error| Refusal::NotRemembered(error.to_string()));
        match after {
            After::Published { publishing, volume, target, pod } => {
                point("node_proxy.published")?;
                if self.is_on_host(&target).await? {
                    drop(publishing);
                    return self.undo(&volume, &target, &pod).await;
                }
                self.metrics.published_deferred();
            }
            After::Unpublished { target } => {
                point("node_proxy.unpublished")?;
                self.memory.forget(&target).await?;
            }
            After::Measured { volume, target, has_health } => {
                let said = message::unframed(&held.bytes).and_then(|message| {
                    csi::NodeGetVolumeStatsResponse::decode(message).ok()?.volume_condition
                });
                let abnormal = match said {
                    // CSI v1.13 has no condition.
                    None if has_health => self.driver.reports_problem(&volume, &target).await,
                    said => Ok(said.is_some_and(|said| said.abnormal)),
                };
                match abnormal {
                    Ok(abnormal) => self.memory.measured(&target, abnormal),
                    // The figures are there all the same, and what was known of it stays.
                    Err(why) => tracing::warn!(volume, %why, "the health of a volume is not known"),
                }
            }
            After::Grown => {}
        }
        Ok(())
    }

    /// Unpublishes a volume that the driver has mounted on the host although the runtime was to have it.
    ///
    /// # Errors
    /// Always: the publish has failed.
    async fn undo(&self, volume: &str, target: &str, pod: &PodRef) -> Result<()> {
        let refusal = match self.driver.unpublish(volume, target).await {
            Ok(()) => {
                self.memory.forget(target).await?;
                Refusal::DriverMounted(target.to_owned())
            }
            // Kubelet repeats the publish, and it is undone then.
            Err(away) => away,
        };
        tracing::error!(volume, target, %refusal, "the driver mounted a deferred volume on the host");
        if refusal.is_to_be_mended() {
            self.events.failed_mount(pod, &format!("volume {volume:?}: {refusal}"));
        }
        Err(refusal)
    }

    /// Notes that the host has the volume when the driver says that it is published.
    fn watched(&self, answer: Response<Body>, passed: Passed) -> Response<Body> {
        let (host, mut passed) = (self.host.clone(), Some(passed));
        answer.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let is_ok = |trailers| code(&HeaderMap::new(), Some(trailers)) == Code::Ok;
                if frame.trailers_ref().is_some_and(is_ok)
                    && let Some(passed) = passed.take()
                {
                    host.published(passed);
                }
                frame
            }))
        })
    }
}

/// The request, as it came.
fn whole(parts: request::Parts, held: &Held) -> Request<Body> {
    Request::from_parts(parts, message::body(held.bytes.clone(), held.trailers.clone()))
}

fn added(
    call: Call,
    mut parts: request::Parts,
    held: &Held,
    group: Option<&super::wish::Group>,
) -> Request<Body> {
    parts.headers.remove(header::CONTENT_LENGTH);
    // It was read.
    let message = message::unframed(&held.bytes).unwrap_or_default();
    let bytes = message::deferred(call, message, group);
    Request::from_parts(parts, message::body(bytes, held.trailers.clone()))
}

fn code(headers: &HeaderMap, trailers: Option<&HeaderMap>) -> Code {
    let said = trailers.and_then(|trailers| trailers.get("grpc-status"));
    let said = said.or_else(|| headers.get("grpc-status"));
    said.map_or(Code::Unknown, |code| Code::from_bytes(code.as_bytes()))
}
