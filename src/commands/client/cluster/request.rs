//! The SnapshotSessionRequest of a command: created, awaited, and deleted in any case. It is
//! recorded before it is created, and its creation is never cancelled, so that the deletion knows
//! the name.

use std::time::Duration;

use anyhow::{Result, anyhow};
use kube::api::{DeleteParams, PostParams, WatchParams};
use kube::core::WatchEvent;
use kube::{Api, Client, ResourceExt};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_stream::StreamExt;

use super::Limits;
use super::failure::{Failure, Retry};
use super::find::call;
use super::wire::Place;
use kubernetes::client::WATCH;
use kubernetes::session::{
    SessionState, SnapshotSessionRequest, SnapshotSessionRequestSpec, SnapshotSessionRequestStatus,
};
use telemetry::task;

/// Prefix of the names of requests.
pub const NAME_PREFIX: &str = "csi-loopback-";
/// How long a watch may be silent before the request is read again.
const SILENCE: Duration = Duration::from_secs(10);
/// Poll interval without a watch: a backup application may lack the right.
const POLL: Duration = Duration::from_millis(500);
/// How long before the end of `--timeout` waiting ends, so that the error can name its cause.
const MARGIN: Duration = Duration::from_millis(250);
/// Time limit of the deletion; half of it is for a creation without a response.
const END: Duration = Duration::from_secs(5);
/// Wait before the deletion is repeated.
const PAUSE: Duration = Duration::from_millis(250);

/// A ready session. It has no `Debug`, so that the token is not printed by mistake.
pub struct Granted {
    /// Name of the SnapshotSessionRequest.
    pub request: String,
    pub driver: String,
    pub place: Place,
    pub token: String,
}

/// Which session to use.
pub enum Which {
    /// A request that the command creates when needed, and deletes.
    Own(SnapshotSessionRequestSpec),
    /// An existing SnapshotSessionRequest, which its creator deletes.
    Existing(String),
}

/// The session of a command. [`Requests::end`] must follow.
pub struct Requests {
    api: Api<SnapshotSessionRequest>,
    namespace: String,
    which: Which,
    /// Replaces the address that the request names.
    address: Option<String>,
    limits: Limits,
    created: Option<Created>,
    may_watch: bool,
}

type Outcome = Result<SnapshotSessionRequest, Failure>;

/// A request of this command.
struct Created {
    name: String,
    /// Until the API server has responded.
    creation: Option<JoinHandle<Outcome>>,
}

impl Requests {
    pub fn new(
        client: Client,
        namespace: &str,
        which: Which,
        address: Option<String>,
        limits: Limits,
    ) -> Self {
        let api = Api::namespaced(client, namespace);
        let namespace = namespace.to_owned();
        Self { api, namespace, which, address, limits, created: None, may_watch: true }
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether a new session can replace an expired one.
    pub fn is_own(&self) -> bool {
        matches!(self.which, Which::Own(_))
    }

    /// The session, after it is ready.
    pub async fn open(&mut self) -> Result<Granted, Failure> {
        let mut request = match &self.which {
            Which::Own(spec) => {
                let spec = spec.clone();
                self.create(spec).await?
            }
            Which::Existing(name) => call(&self.what(name), self.api.get(name)).await?,
        };
        let until = self.limits.deadline - MARGIN.min(self.limits.timeout / 4);
        loop {
            let what = self.what(&request.name_any());
            if request.metadata.deletion_timestamp.is_some() {
                return Err(Failure::never(anyhow!(
                    "{what} is being deleted: its session is over"
                )));
            }
            match request.state() {
                SessionState::Ready => return self.granted(&what, request),
                SessionState::Failed => return Err(failed(&what, request)),
                SessionState::Pending if Instant::now() >= until => {
                    let timed_out = super::super::timed_out(self.limits.timeout);
                    let pending = pending(&what, &request);
                    return Err(Failure::never(anyhow!("{timed_out}; {pending}")));
                }
                SessionState::Pending => {
                    if let Some(next) = self.next(&what, &request, until).await? {
                        request = next;
                    }
                }
            }
        }
    }

    async fn create(&mut self, spec: SnapshotSessionRequestSpec) -> Outcome {
        // A request whose creation got no response may exist: the next attempt uses the same name.
        let created = match &mut self.created {
            Some(created) => created,
            none => none.insert(Created { name: new_name()?, creation: None }),
        };
        let creation = created.creation.get_or_insert_with(|| {
            let request = SnapshotSessionRequest::new(&created.name, spec);
            task::spawn(create(self.api.clone(), self.namespace.clone(), request))
        });
        let outcome = creation.await;
        created.creation = None;
        let outcome = outcome.unwrap_or_else(|error| Err(Failure::never(error.into())));
        if refused(&outcome) {
            self.created = None;
        }
        outcome
    }

    /// The request after a change, or after the watch was silent for some time.
    async fn next(
        &mut self,
        what: &str,
        request: &SnapshotSessionRequest,
        until: Instant,
    ) -> Result<Option<SnapshotSessionRequest>, Failure> {
        let silence = until.min(Instant::now() + SILENCE);
        if self.may_watch {
            match timeout_at(silence, next_event(&self.api, request)).await {
                Ok(Some(next)) => return Ok(Some(next)),
                Ok(None) => self.may_watch = false,
                Err(_) => {}
            }
        }
        if !self.may_watch {
            tokio::time::sleep_until(until.min(Instant::now() + POLL)).await;
        }
        match call(what, self.api.get(&request.name_any())).await {
            Ok(next) => Ok(Some(next)),
            Err(failure) if failure.retry == Retry::Never => Err(failure),
            // A temporary error; waiting continues.
            Err(_) => Ok(None),
        }
    }

    fn granted(&self, what: &str, request: SnapshotSessionRequest) -> Result<Granted, Failure> {
        let name = request.name_any();
        let status = request.status.unwrap_or_default();
        let SnapshotSessionRequestStatus { address, ca_cert, session_token, driver, .. } = status;
        let missing = |field: &str| {
            Failure::never(anyhow!(
                "{what} is Ready, but has no status.{field}; check the session manager"
            ))
        };
        let address = address.ok_or_else(|| missing("address"))?;
        let ca = ca_cert.ok_or_else(|| missing("caCert"))?;
        let token = session_token.filter(|token| !token.is_empty());
        Ok(Granted {
            request: name,
            driver: driver.unwrap_or_default(),
            place: Place::new(what, address, self.address.as_deref(), ca.0)?,
            token: token.ok_or_else(|| missing("sessionToken"))?,
        })
    }

    /// Deletes the command's own request; returns soon in any case.
    ///
    /// # Errors
    /// The request may remain, and why.
    pub async fn end(&mut self) -> Result<()> {
        let Some(Created { name, creation }) = self.created.take() else { return Ok(()) };
        let deadline = Instant::now() + END;
        let is_known = match creation {
            None => true,
            Some(creation) => match timeout(END / 2, creation).await {
                Ok(Ok(outcome)) if refused(&outcome) => return Ok(()),
                outcome => outcome.is_ok(),
            },
        };
        match timeout_at(deadline, self.delete(&name, is_known)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(self.not_deleted(&name, &error.to_string())),
            Err(_) => Err(self.not_deleted(&name, "no response from the API server")),
        }
    }

    /// Retries until the request is gone or cannot be deleted. `is_known`: whether it is known to
    /// exist or not.
    async fn delete(&self, name: &str, is_known: bool) -> Result<(), kube::Error> {
        loop {
            match self.api.delete(name, &DeleteParams::default()).await {
                Ok(_) => return Ok(()),
                Err(kube::Error::Api(status)) if status.code == 404 && is_known => return Ok(()),
                Err(kube::Error::Api(status)) if matches!(status.code, 400 | 401 | 403) => {
                    return Err(kube::Error::Api(status));
                }
                Err(_) => sleep(PAUSE).await,
            }
        }
    }

    fn not_deleted(&self, name: &str, why: &str) -> anyhow::Error {
        anyhow!("{} could not be deleted; it expires by itself: {why}", self.what(name))
    }

    fn what(&self, name: &str) -> String {
        format!("SnapshotSessionRequest {}/{name}", self.namespace)
    }
}

/// Whether the API server has reported that it created nothing.
fn refused(outcome: &Outcome) -> bool {
    outcome.as_ref().is_err_and(|failure| failure.retry == Retry::Never)
}

/// Not `generateName`: a name that is known before the call can be deleted even if the response is
/// lost.
fn new_name() -> Result<String, Failure> {
    let random = getrandom::u64().map_err(|error| Failure::never(anyhow!("{error}")))?;
    Ok(format!("{NAME_PREFIX}{random:016x}"))
}

async fn create(
    api: Api<SnapshotSessionRequest>,
    namespace: String,
    request: SnapshotSessionRequest,
) -> Outcome {
    let name = request.name_any();
    let what = format!("SnapshotSessionRequest {namespace}/{name}");
    let work = async {
        match api.create(&PostParams::default(), &request).await {
            // The response to an earlier attempt was lost.
            Err(kube::Error::Api(status)) if status.code == 409 => api.get(&name).await,
            outcome => outcome,
        }
    };
    let outcome = call(&what, async {
        match work.await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(Err(status.message)),
            outcome => outcome.map(Ok),
        }
    });
    outcome.await?.map_err(|message| {
        Failure::never(anyhow!(
            "{what}: {message}; the namespace or the CRDs of snapshot sessions are missing \
             (docs/reference/session-manager.md); --api metadata needs no session"
        ))
    })
}

/// The next state of the request that a watch reports; `None` if the watch ends.
async fn next_event(
    api: &Api<SnapshotSessionRequest>,
    request: &SnapshotSessionRequest,
) -> Option<SnapshotSessionRequest> {
    let one = WatchParams::default().fields(&format!("metadata.name={}", request.name_any()));
    let one = one.timeout(WATCH);
    let version = request.resource_version()?;
    let mut events = std::pin::pin!(api.watch(&one, &version).await.ok()?);
    loop {
        match events.next().await? {
            Ok(WatchEvent::Added(next) | WatchEvent::Modified(next)) => return Some(next),
            Ok(WatchEvent::Bookmark(_)) => {}
            Ok(WatchEvent::Deleted(_) | WatchEvent::Error(_)) | Err(_) => return None,
        }
    }
}

fn failed(what: &str, request: SnapshotSessionRequest) -> Failure {
    let error = request.status.and_then(|status| status.error).unwrap_or_default();
    let error = if error.is_empty() { "the session manager gave no reason" } else { &error };
    Failure::never(anyhow!("{what} is Failed: {error}; --api metadata needs no session"))
}

/// Why a request is not ready.
fn pending(what: &str, request: &SnapshotSessionRequest) -> String {
    let conditions = request.status.as_ref().map(|status| status.conditions.as_slice());
    match conditions {
        None => format!("{what} has no state yet: check that a session manager runs"),
        Some([condition, ..]) => format!("{what} is Pending: {}", condition.message),
        Some([]) => format!("{what} is Pending"),
    }
}
