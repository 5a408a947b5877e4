//! From Pending to Ready or Failed. Intent, object, result: first the request gets a finalizer, then its status the token, over the
//! version that was read, so that there is one token whoever else is at it; then the data of that name is made; then
//! the status says Ready. After a crash between any two of them the next look goes on from what the request says.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::controller::Action;
use kube::runtime::events::EventType;
use kube::{Api, ResourceExt};

use super::cause::{Cause, Obstacle, Verdict};
use super::controller::{Context, Error};
use super::resolve::Found;
use super::status::{self, Draft, ESTABLISHED, REVOKED};
use super::{end, finalizer, token};
use crate::kubernetes::cache::in_time;
use crate::kubernetes::metadata_service::DRIVER_LABEL;
use crate::kubernetes::session::{
    REQUEST_LABEL, SessionRequestReference, SnapshotSessionData, SnapshotSessionDataSpec,
    SnapshotSessionRequest,
};

/// Time between two looks at what may become ready. They cost the API server nothing while the watches run.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// A session that is younger may not have come through the watch yet.
const SETTLED: SignedDuration = SignedDuration::from_secs(10);

/// Why a step was not taken.
enum Stop {
    Obstacle(Obstacle),
    Error(Error),
}

impl<E: Into<Error>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

/// Does what can be done for a pending request.
pub async fn advance(
    context: &Context,
    request: &SnapshotSessionRequest,
    now: Timestamp,
) -> Result<Action, Error> {
    let expiration = expiration(context, request, now);
    match open(context, request, &expiration).await {
        Ok(()) => Ok(context.next_look(request, now)),
        Err(Stop::Error(error)) => Err(error),
        Err(Stop::Obstacle(obstacle)) if obstacle.cause.verdict() == Verdict::Fail => {
            fail(context, request, &expiration, &obstacle).await?;
            Ok(context.next_look(request, now))
        }
        Err(Stop::Obstacle(obstacle)) => wait(context, request, &expiration, now, obstacle).await,
    }
}

/// When the session ends: as it was said first, else a lifetime from now.
fn expiration(context: &Context, request: &SnapshotSessionRequest, now: Timestamp) -> Time {
    request.expiration_time().cloned().unwrap_or_else(|| {
        let lifetime = context.lifetimes.current().grant(request.spec.lifetime_seconds);
        let seconds = i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX);
        // Whole seconds: that is what the API keeps.
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
    let requests = context.requests_beside(request);
    let held = finalizer::hold(&requests, request).await?;
    let (held, token) = choose(context, &requests, held, expiration, &found).await?;
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
    context.tell(request, EventType::Normal, ESTABLISHED, &note).await;
    Ok(())
}

/// The request with its token. A token that it has already may have data: what does not fit is deleted.
async fn choose(
    context: &Context,
    requests: &Api<SnapshotSessionRequest>,
    held: SnapshotSessionRequest,
    expiration: &Time,
    found: &Found,
) -> Result<(SnapshotSessionRequest, String), Stop> {
    if let Some(chosen) = held.session_token().map(str::to_owned) {
        if !token::is_one(&chosen) {
            let message = "the status has a session token that the manager has not made; make another request";
            return Err(Stop::Obstacle(Obstacle::new(Cause::DataRefused, message)));
        }
        let wanted = data(&held, found, &chosen, expiration);
        let fits = |one: &SnapshotSessionData| {
            one.namespace().as_ref() == Some(&found.configuration.spec.driver_namespace)
                && one.name_any() == chosen
                && one.spec == wanted.spec
        };
        end::delete_data(context, &held, fits).await?;
        return Ok((held, chosen));
    }
    let chosen = token::new().map_err(Error::Other)?;
    let draft = Draft::of(&held, expiration).establishing(&found.driver, &chosen);
    Ok((write(requests, &draft).await?, chosen))
}

/// The data of a session.
fn data(
    request: &SnapshotSessionRequest,
    found: &Found,
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

async fn create(context: &Context, found: &Found, data: &SnapshotSessionData) -> Result<(), Stop> {
    let namespace = &found.configuration.spec.driver_namespace;
    let api: Api<SnapshotSessionData> = Api::namespaced(context.client.clone(), namespace);
    let error = match in_time(api.create(&PostParams::default(), data)).await {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    let kube::Error::Api(status) = &error else { return Err(error.into()) };
    match status.code {
        // Made before, and `choose` has seen that it fits.
        409 => Ok(()),
        404 => Err(Stop::Obstacle(Obstacle::new(
            Cause::NamespaceMissing,
            format!(
                "the namespace {namespace} of the CSI driver {}, which its SnapshotServiceConfiguration names, does not exist",
                found.driver
            ),
        ))),
        422 => Err(Stop::Obstacle(Obstacle::new(
            Cause::DataRefused,
            "the API server refuses what the session would be made of: a handle of a snapshot is too long, perhaps",
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

/// What an administrator has to mend is said on the request; anything else may be better next time.
fn refused(doing: &str, error: kube::Error) -> Stop {
    match &error {
        kube::Error::Api(status) if status.code == 403 => Stop::Obstacle(Obstacle::new(
            Cause::ManagerNotAllowed,
            format!("the session manager may not {doing}; its ClusterRole has to allow it"),
        )),
        _ => Stop::Error(error.into()),
    }
}

/// Says what is waited for; or that it took too long.
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
        let message = format!("after {limit} still: {}", obstacle.message);
        let obstacle = Obstacle::new(Cause::NotReadyInTime, message);
        fail(context, request, expiration, &obstacle).await?;
        return Ok(context.next_look(request, now));
    }
    let draft = Draft::of(request, expiration).waiting(&obstacle);
    if draft.differs() {
        write(&context.requests_beside(request), &draft).await?;
    }
    Ok(Action::requeue(LOOK_AGAIN.min(context.ready_timeout.saturating_sub(waited))))
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
    write(&context.requests_beside(request), &draft).await?;
    context.metrics.finished(obstacle.cause.reason());
    let namespace = request.namespace().unwrap_or_default();
    tracing::info!(namespace, name = request.name_any(), %obstacle, "a session has failed");
    context.tell(request, EventType::Warning, obstacle.cause.reason(), &obstacle.message).await;
    Ok(())
}

/// Says so where somebody has deleted the data of a session, which ends it.
pub async fn note_revocation(
    context: &Context,
    request: &SnapshotSessionRequest,
    now: Timestamp,
) -> Result<(), Error> {
    let settled = status::condition(request)
        .is_none_or(|(reason, since)| reason != REVOKED && now.duration_since(since.0) >= SETTLED);
    let uid = request.metadata.uid.as_deref().unwrap_or_default();
    if !settled || context.data.told_with(uid).is_some_and(|told| !told.is_empty()) {
        return Ok(());
    }
    // It may be newer than what the watch has told, or no watch runs.
    if !end::list_data(context, uid).await?.is_empty() {
        return Ok(());
    }
    let expiration = expiration(context, request, now);
    let draft = Draft::of(request, &expiration).revoked();
    write(&context.requests_beside(request), &draft).await?;
    let note = "the session's data was deleted: its token is refused";
    context.tell(request, EventType::Warning, REVOKED, note).await;
    Ok(())
}
