//! Moves a request from Pending to Ready or Failed, in the order intent, object, result. First the
//! request gets a finalizer, then its status gets the token, over the version that was read, so
//! that concurrent writers agree on one token. Then the data with that name is created, and the
//! status becomes Ready. After a crash between any two steps, the next reconciliation continues
//! from the request's state.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::controller::Action;
use kube::runtime::events::EventType;
use kube::{Api, ResourceExt};

use super::cause::{Cause, Obstacle, Verdict};
use super::context::{Context, Error};
use super::resolve::Resolved;
use super::status::{self, Draft, ESTABLISHED, REVOKED};
use super::{end, finalizer, token};
use kubernetes::cache::in_time;
use kubernetes::metadata_service::DRIVER_LABEL;
use kubernetes::session::{
    REQUEST_LABEL, SessionRequestReference, SnapshotSessionData, SnapshotSessionDataSpec,
    SnapshotSessionRequest,
};

/// Poll interval of a waiting request. While the watches run, a poll costs no call.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time for the data of a new session to arrive through the watch.
const WATCH_DELAY: SignedDuration = SignedDuration::from_secs(10);

/// Why a step was not completed.
enum Stop {
    Obstacle(Obstacle),
    Error(Error),
}

impl<E: Into<Error>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

/// Advances a pending request as far as possible.
pub async fn advance(
    context: &Context,
    request: &SnapshotSessionRequest,
    now: Timestamp,
) -> Result<Action, Error> {
    let expiration = expiration(context, request, now);
    match open(context, request, &expiration).await {
        Ok(()) => Ok(context.next_reconciliation(request, now)),
        Err(Stop::Error(error)) => Err(error),
        Err(Stop::Obstacle(obstacle)) if obstacle.cause.verdict() == Verdict::Fail => {
            fail(context, request, &expiration, &obstacle).await?;
            Ok(context.next_reconciliation(request, now))
        }
        Err(Stop::Obstacle(obstacle)) => wait(context, request, &expiration, now, obstacle).await,
    }
}

/// When the session ends: the time in the status, or else the granted lifetime from now.
fn expiration(context: &Context, request: &SnapshotSessionRequest, now: Timestamp) -> Time {
    request.expiration_time().cloned().unwrap_or_else(|| {
        let lifetime = context.lifetimes.current().grant(request.spec.lifetime_seconds);
        let seconds = i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX);
        // The API stores whole seconds.
        let second = now.as_second().saturating_add(seconds);
        Time(Timestamp::from_second(second).unwrap_or(Timestamp::MAX))
    })
}

async fn open(
    context: &Context,
    request: &SnapshotSessionRequest,
    expiration: &Time,
) -> Result<(), Stop> {
    let namespace = request.namespace().unwrap_or_default();
    let found = context.resolver.resolve(&namespace, &request.spec.snapshots).await;
    let found = found.map_err(|error| refused("read snapshots and configurations", error))?;
    let found = found.map_err(Stop::Obstacle)?;
    let requests = context.requests_in_namespace_of(request);
    let held = finalizer::hold(&requests, request).await?;
    let (held, token) = ensure_token(context, &requests, held, expiration, &found).await?;
    let data = data(&held, &found, &token, expiration);
    create(context, &found, &data).await?;
    write(&requests, &Draft::of(&held, expiration).ready(&found, &token)).await?;
    context.metrics.finished(ESTABLISHED);
    tracing::info!(
        namespace,
        name = request.name_any(),
        driver = found.driver,
        "a session is ready"
    );
    let note = format!("the session can be used until {}", expiration.0);
    context.record_event(request, EventType::Normal, ESTABLISHED, &note).await;
    Ok(())
}

/// Returns the request with its token. If it already has one, data that does not match is deleted.
async fn ensure_token(
    context: &Context,
    requests: &Api<SnapshotSessionRequest>,
    held: SnapshotSessionRequest,
    expiration: &Time,
    found: &Resolved,
) -> Result<(SnapshotSessionRequest, String), Stop> {
    if let Some(chosen) = held.session_token().map(str::to_owned) {
        if !token::is_valid(&chosen) {
            let message = "the status has a session token that this manager did not create; create another SnapshotSessionRequest";
            return Err(Stop::Obstacle(Obstacle::new(Cause::DataRefused, message)));
        }
        let expected = data(&held, found, &chosen, expiration);
        let fits = |one: &SnapshotSessionData| {
            one.namespace().as_ref() == Some(&found.configuration.spec.driver_namespace)
                && one.name_any() == chosen
                && one.spec == expected.spec
        };
        end::delete_data(context, &held, fits).await?;
        return Ok((held, chosen));
    }
    let chosen = token::new().map_err(Error::Other)?;
    let draft = Draft::of(&held, expiration).establishing(&found.driver, &chosen);
    Ok((write(requests, &draft).await?, chosen))
}

/// The data object of a session.
fn data(
    request: &SnapshotSessionRequest,
    found: &Resolved,
    token: &str,
    expiration: &Time,
) -> SnapshotSessionData {
    let uid = request.metadata.uid.clone().unwrap_or_default();
    let spec = SnapshotSessionDataSpec {
        driver: found.driver.clone(),
        request: SessionRequestReference {
            namespace: request.namespace().unwrap_or_default(),
            name: request.name_any(),
            uid: uid.clone(),
        },
        snapshots: found.snapshots.clone(),
        expiration_time: expiration.clone(),
    };
    let mut data = SnapshotSessionData::new(token, spec);
    data.metadata.namespace = Some(found.configuration.spec.driver_namespace.clone());
    let labels = [(REQUEST_LABEL.to_owned(), uid), (DRIVER_LABEL.to_owned(), found.driver.clone())];
    data.metadata.labels = Some(labels.into());
    data
}

async fn create(
    context: &Context,
    found: &Resolved,
    data: &SnapshotSessionData,
) -> Result<(), Stop> {
    let namespace = &found.configuration.spec.driver_namespace;
    let api: Api<SnapshotSessionData> = Api::namespaced(context.client.clone(), namespace);
    let error = match in_time(api.create(&PostParams::default(), data)).await {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    let kube::Error::Api(status) = &error else { return Err(error.into()) };
    match status.code {
        // Created before, and `ensure_token` has checked that it matches.
        409 => Ok(()),
        404 => Err(Stop::Obstacle(Obstacle::new(
            Cause::NamespaceMissing,
            format!(
                "the namespace {namespace} in the SnapshotServiceConfiguration of the CSI driver {} does not exist; correct driverNamespace",
                found.driver
            ),
        ))),
        422 => Err(Stop::Obstacle(Obstacle::new(
            Cause::DataRefused,
            "the API server rejects the session's data; a snapshot's CSI handle may be too long",
        ))),
        _ => {
            Err(refused(&format!("create SnapshotSessionData in the namespace {namespace}"), error))
        }
    }
}

async fn write(
    requests: &Api<SnapshotSessionRequest>,
    draft: &Draft<'_>,
) -> Result<SnapshotSessionRequest, Error> {
    let patch = Patch::Merge(draft.patch()?);
    let (name, params) = (draft.name(), PatchParams::default());
    Ok(in_time(requests.patch_status(&name, &params, &patch)).await?)
}

/// A missing permission is reported on the request; other errors are retried.
fn refused(doing: &str, error: kube::Error) -> Stop {
    match &error {
        kube::Error::Api(status) if status.code == 403 => Stop::Obstacle(Obstacle::new(
            Cause::ManagerNotAllowed,
            format!("the session manager may not {doing}; grant the permission in its ClusterRole"),
        )),
        _ => Stop::Error(error.into()),
    }
}

/// Reports the obstacle on the request, or fails the request after the timeout.
async fn wait(
    context: &Context,
    request: &SnapshotSessionRequest,
    expiration: &Time,
    now: Timestamp,
    obstacle: Obstacle,
) -> Result<Action, Error> {
    let created = request.metadata.creation_timestamp.as_ref().map_or(now, |created| created.0);
    let waited = Duration::try_from(now.duration_since(created)).unwrap_or_default();
    if waited >= context.ready_timeout {
        let limit = humantime::format_duration(context.ready_timeout);
        let message = format!("not ready within {limit}: {}", obstacle.message);
        let obstacle = Obstacle::new(Cause::NotReadyInTime, message);
        fail(context, request, expiration, &obstacle).await?;
        return Ok(context.next_reconciliation(request, now));
    }
    let draft = Draft::of(request, expiration).waiting(&obstacle);
    if draft.differs() {
        write(&context.requests_in_namespace_of(request), &draft).await?;
    }
    Ok(Action::requeue(POLL_INTERVAL.min(context.ready_timeout.saturating_sub(waited))))
}

async fn fail(
    context: &Context,
    request: &SnapshotSessionRequest,
    expiration: &Time,
    obstacle: &Obstacle,
) -> Result<(), Error> {
    if request.session_token().is_some() {
        end::delete_data(context, request, |_| false).await?;
    }
    let draft = Draft::of(request, expiration).failed(obstacle);
    write(&context.requests_in_namespace_of(request), &draft).await?;
    context.metrics.finished(obstacle.cause.reason());
    let namespace = request.namespace().unwrap_or_default();
    tracing::info!(namespace, name = request.name_any(), %obstacle, "a session has failed");
    context
        .record_event(request, EventType::Warning, obstacle.cause.reason(), &obstacle.message)
        .await;
    Ok(())
}

/// Reports on the request that the data of its session was deleted, which ends the session.
pub async fn note_revocation(
    context: &Context,
    request: &SnapshotSessionRequest,
    now: Timestamp,
) -> Result<(), Error> {
    let settled = status::condition(request).is_none_or(|(reason, since)| {
        reason != REVOKED && now.duration_since(since.0) >= WATCH_DELAY
    });
    let uid = request.metadata.uid.as_deref().unwrap_or_default();
    if !settled || context.data.cached_with(uid).is_some_and(|cached| !cached.is_empty()) {
        return Ok(());
    }
    // The data may be newer than the watch's last report, or no watch is running.
    if !end::data_of(context, request).await?.is_empty() {
        return Ok(());
    }
    let expiration = expiration(context, request, now);
    let draft = Draft::of(request, &expiration).revoked();
    write(&context.requests_in_namespace_of(request), &draft).await?;
    let note = "the session's data was deleted, so its token is refused";
    context.record_event(request, EventType::Warning, REVOKED, note).await;
    Ok(())
}
