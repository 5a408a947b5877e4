//! The SnapshotSessionRequest of a command: made, waited for, and deleted, whatever happens in between. It is noted down
//! before it is made, and its making is never cut off, so that the end knows what there is to delete.

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
use crate::kubernetes::session::{
    SessionState, SnapshotSessionRequest, SnapshotSessionRequestSpec, SnapshotSessionRequestStatus,
};

/// What names of requests begin with.
pub const NAME_PREFIX: &str = "csi-loopback-";
/// How long a watch may say nothing before the request is looked at all the same.
const SILENCE: Duration = Duration::from_secs(10);
/// Between two looks where there is no watch: a backup application may lack the right.
const POLL: Duration = Duration::from_millis(500);
/// How long before the end of `--timeout` waiting ends, so that there is time to say for what.
const MARGIN: Duration = Duration::from_millis(250);
/// How long the end may take, of which half is for a making that was not answered yet.
const END: Duration = Duration::from_secs(5);
/// Before a request is deleted anew.
const PAUSE: Duration = Duration::from_millis(250);

/// What a session that is ready gives. It has no `Debug`, so that the token is not printed by mistake.
pub struct Granted {
    /// Name of the SnapshotSessionRequest.
    pub request: String,
    pub driver: String,
    pub place: Place,
    pub token: String,
}

/// Which session to use.
pub enum Which {
    /// One of our own, made when it is needed.
    Ours(SnapshotSessionRequestSpec),
    /// That of a SnapshotSessionRequest that another has made, and will end.
    Given(String),
}

/// The session of a command. [`Requests::end`] must follow.
pub struct Requests {
    api: Api<SnapshotSessionRequest>,
    namespace: String,
    which: Which,
    /// Connected to instead of the one that the request names.
    address: Option<String>,
    limits: Limits,
    made: Option<Made>,
    may_watch: bool,
}

type Outcome = Result<SnapshotSessionRequest, Failure>;

/// A request that is ours.
struct Made {
    name: String,
    /// Until the API server has answered.
    making: Option<JoinHandle<Outcome>>,
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
        Self { api, namespace, which, address, limits, made: None, may_watch: true }
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether another session can take the place of one that is over.
    pub fn ours(&self) -> bool {
        matches!(self.which, Which::Ours(_))
    }

    /// The session, once it is ready.
    pub async fn open(&mut self) -> Result<Granted, Failure> {
        let mut request = match &self.which {
            Which::Ours(spec) => {
                let spec = spec.clone();
                self.make(spec).await?
            }
            Which::Given(name) => call(&self.what(name), self.api.get(name)).await?,
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

    async fn make(&mut self, spec: SnapshotSessionRequestSpec) -> Outcome {
        // One that was not answered for may be there: it is asked for under the same name.
        let made = match &mut self.made {
            Some(made) => made,
            none => none.insert(Made { name: new_name()?, making: None }),
        };
        let making = made.making.get_or_insert_with(|| {
            let request = SnapshotSessionRequest::new(&made.name, spec);
            tokio::spawn(create(self.api.clone(), self.namespace.clone(), request))
        });
        let outcome = making.await;
        made.making = None;
        let outcome = outcome.unwrap_or_else(|error| Err(Failure::never(error.into())));
        if refused(&outcome) {
            self.made = None;
        }
        outcome
    }

    /// The request as it is when something has happened, or it was silent for long.
    async fn next(
        &mut self,
        what: &str,
        request: &SnapshotSessionRequest,
        until: Instant,
    ) -> Result<Option<SnapshotSessionRequest>, Failure> {
        let silence = until.min(Instant::now() + SILENCE);
        if self.may_watch {
            match timeout_at(silence, told(&self.api, request)).await {
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
            // It is a matter of time, and that is what is waited for.
            Err(_) => Ok(None),
        }
    }

    fn granted(&self, what: &str, request: SnapshotSessionRequest) -> Result<Granted, Failure> {
        let name = request.name_any();
        let status = request.status.unwrap_or_default();
        let SnapshotSessionRequestStatus { address, ca_cert, session_token, driver, .. } = status;
        let missing = |field: &str| {
            Failure::never(anyhow!(
                "{what} is Ready and has no status.{field}: see the session manager"
            ))
        };
        let address = address.ok_or_else(|| missing("address"))?;
        let ca = ca_cert.ok_or_else(|| missing("caCert"))?;
        let token = session_token.filter(|token| !token.is_empty());
        Ok(Granted {
            request: name,
            driver: driver.unwrap_or_default(),
            place: Place::told(what, address, self.address.as_deref(), ca.0)?,
            token: token.ok_or_else(|| missing("sessionToken"))?,
        })
    }

    /// Deletes the request if it is ours; returns soon in any case.
    ///
    /// # Errors
    /// What may be left, and why.
    pub async fn end(&mut self) -> Result<()> {
        let Some(Made { name, making }) = self.made.take() else { return Ok(()) };
        let deadline = Instant::now() + END;
        let answered = match making {
            None => true,
            Some(making) => match timeout(END / 2, making).await {
                Ok(Ok(outcome)) if refused(&outcome) => return Ok(()),
                outcome => outcome.is_ok(),
            },
        };
        match timeout_at(deadline, self.delete(&name, answered)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(self.left(&name, &error.to_string())),
            Err(_) => Err(self.left(&name, "no answer from the API server")),
        }
    }

    /// Tries until it is gone, or never will be. `answered`: whether it is known to have been made or not.
    async fn delete(&self, name: &str, answered: bool) -> Result<(), kube::Error> {
        loop {
            match self.api.delete(name, &DeleteParams::default()).await {
                Ok(_) => return Ok(()),
                Err(kube::Error::Api(status)) if status.code == 404 && answered => return Ok(()),
                Err(kube::Error::Api(status)) if matches!(status.code, 400 | 401 | 403) => {
                    return Err(kube::Error::Api(status));
                }
                Err(_) => sleep(PAUSE).await,
            }
        }
    }

    fn left(&self, name: &str, why: &str) -> anyhow::Error {
        anyhow!("{} could not be deleted and expires by itself: {why}", self.what(name))
    }

    fn what(&self, name: &str) -> String {
        format!("SnapshotSessionRequest {}/{name}", self.namespace)
    }
}

/// Whether the API server has said that nothing was made.
fn refused(outcome: &Outcome) -> bool {
    outcome.as_ref().is_err_and(|failure| failure.retry == Retry::Never)
}

/// Not `generateName`: a name that is known before the call can be deleted although its answer was lost.
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
            // The answer to an attempt before was lost.
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
            "{what}: {message}; the namespace or the definitions of snapshot sessions are missing \
             (docs/reference/session-manager.md); --api metadata needs none"
        ))
    })
}

/// What a watch tells of the request first. `None`: it tells nothing.
async fn told(
    api: &Api<SnapshotSessionRequest>,
    request: &SnapshotSessionRequest,
) -> Option<SnapshotSessionRequest> {
    let one = WatchParams::default().fields(&format!("metadata.name={}", request.name_any()));
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
    Failure::never(anyhow!("{what} is Failed: {error}; --api metadata asks without a session"))
}

/// What a request waits for.
fn pending(what: &str, request: &SnapshotSessionRequest) -> String {
    let conditions = request.status.as_ref().map(|status| status.conditions.as_slice());
    match conditions {
        None => format!("{what} has no state yet: is there a session manager?"),
        Some([condition, ..]) => format!("{what} is Pending: {}", condition.message),
        Some([]) => format!("{what} is Pending"),
    }
}
