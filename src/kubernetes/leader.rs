//! Who of several replicas leads: whoever holds a Lease (coordination.k8s.io/v1). A lease of another counts as
//! abandoned when this process has seen it unchanged for its whole duration by its own clock: two machines' clocks are never
//! compared. Each write names the version that it was decided on, so that of two who take it at once one fails. Who cannot
//! renew stops leading before anybody else may begin.

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use super::client::within;
use crate::quantity::duration;
use crate::telemetry::complaint::Complaint;
use crate::telemetry::shutdown::Shutdown;

/// Time between two looks, at most: a lease that is given back is not left lying.
const LONGEST_PERIOD: Duration = Duration::from_secs(2);
/// How long giving the lease back may take.
const RELEASE: Duration = Duration::from_secs(3);

/// Tells what is new, and whether it is: who hears of it begins or ends its work then.
fn tell(told: &watch::Sender<bool>, now: bool) -> bool {
    told.send_if_modified(|known| std::mem::replace(known, now) != now)
}

/// How long a lease lasts that nobody renews, for the command line.
pub fn lease_duration(text: &str) -> Result<Duration, String> {
    duration(text, Duration::from_secs(1)..=Duration::from_secs(3600), "from 1s to 1h")
}

/// A name for an election: `own`, such as that of the pod, which no other has, and what a restarted container does not have.
///
/// # Errors
/// The system has no random numbers.
pub fn own_name(own: &str) -> anyhow::Result<String> {
    let random = getrandom::u64().context("making a name for the election")?;
    Ok(format!("{own}_{random:016x}"))
}

/// What replicas of the same program agree on, and who this one is.
#[derive(Clone)]
pub struct Election {
    pub leases: Api<Lease>,
    /// Name of the Lease.
    pub name: String,
    /// Of this process, unlike that of any other.
    pub identity: String,
    /// How long a lease lasts that nobody renews; at least a second.
    pub duration: Duration,
}

impl Election {
    /// Takes part until draining begins, in a task of its own. Tells whether this process leads.
    pub fn start(self, shutdown: Shutdown) -> watch::Receiver<bool> {
        let (leads, told) = watch::channel(false);
        tokio::spawn(async move {
            let mut candidate = Candidate {
                election: self,
                leads,
                renewed: None,
                seen: None,
                complaint: Complaint::default(),
            };
            tokio::select! {
                () = candidate.run() => {}
                () = shutdown.draining() => {}
            }
            candidate.retire().await;
        });
        told
    }

    /// The leader renews and the others look as often.
    fn period(&self) -> Duration {
        LONGEST_PERIOD.min(self.duration / 6)
    }

    /// Who has not renewed for so long leads no more. What is left of the duration is for work that was under way.
    fn deadline(&self) -> Duration {
        self.duration * 2 / 3
    }
}

struct Candidate {
    election: Election,
    leads: watch::Sender<bool>,
    /// When the last successful renewal was begun, while leading.
    renewed: Option<Instant>,
    /// The lease's version that was seen last, and when it was seen first.
    seen: Option<(String, Instant)>,
    complaint: Complaint,
}

impl Candidate {
    async fn run(&mut self) {
        loop {
            let until = self.renewed.map_or_else(
                || Instant::now() + self.election.deadline(),
                |renewed| renewed + self.election.deadline(),
            );
            match timeout_at(until, self.round()).await {
                Ok(Ok(())) => {
                    if self.complaint.is_over() {
                        tracing::info!("Lease {} is in order again", self.election.name);
                    }
                }
                Ok(Err(error)) => self.complain(&error.to_string()),
                Err(_) => self.complain("the API server did not answer in time"),
            }
            let overdue = |renewed: Instant| renewed.elapsed() >= self.election.deadline();
            if self.renewed.is_some_and(overdue) {
                self.follow("the lease could not be renewed");
            }
            sleep(self.election.period()).await;
        }
    }

    /// Looks at the lease and renews or takes it where that is right.
    async fn round(&mut self) -> kube::Result<()> {
        let begun = Instant::now();
        let found = self.election.leases.get_opt(&self.election.name).await?;
        let Some(mut lease) = found else {
            let mut lease = Lease::default();
            lease.metadata.name = Some(self.election.name.clone());
            lease.spec = Some(self.claim(None));
            self.election.leases.create(&PostParams::default(), &lease).await?;
            self.lead(begun);
            return Ok(());
        };
        if !self.is_to_be_written(&lease, begun) {
            self.follow("another holds the lease");
            return Ok(());
        }
        lease.spec = Some(self.claim(lease.spec.as_ref()));
        let params = PostParams::default();
        match self.election.leases.replace(&self.election.name, &params, &lease).await {
            Ok(_) => self.lead(begun),
            // Another was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Whether it is this process's, nobody's, or abandoned.
    fn is_to_be_written(&mut self, lease: &Lease, now: Instant) -> bool {
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref());
        let holder = holder.unwrap_or_default();
        if holder.is_empty() || holder == self.election.identity {
            return true;
        }
        let version = lease.resource_version().unwrap_or_default();
        let since = match &self.seen {
            Some((seen, since)) if *seen == version => *since,
            _ => {
                self.seen = Some((version, now));
                now
            }
        };
        let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds);
        let theirs = seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let lasts = theirs.map_or(self.election.duration, Duration::from_secs);
        now - since >= lasts.max(self.election.duration)
    }

    /// The lease as it is to be while this process leads.
    fn claim(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let identity = &self.election.identity;
        let held = before.filter(|spec| spec.holder_identity.as_ref() == Some(identity));
        let transitions = before.and_then(|spec| spec.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(identity.clone()),
            lease_duration_seconds: i32::try_from(self.election.duration.as_secs().max(1)).ok(),
            acquire_time: held
                .and_then(|spec| spec.acquire_time.clone())
                .or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(transitions + i32::from(held.is_none())),
            ..before.cloned().unwrap_or_default()
        }
    }

    fn lead(&mut self, since: Instant) {
        self.renewed = Some(since);
        self.seen = None;
        if tell(&self.leads, true) {
            tracing::info!(identity = self.election.identity, "leading");
        }
    }

    fn follow(&mut self, why: &str) {
        self.renewed = None;
        if tell(&self.leads, false) {
            tracing::warn!(identity = self.election.identity, why, "leading no more");
        }
    }

    fn complain(&mut self, error: &str) {
        if self.complaint.is_new(error) {
            tracing::warn!(error, "Lease {} cannot be read or written", self.election.name);
        }
    }

    /// Stops leading, and then gives the lease back so that another need not wait.
    async fn retire(&mut self) {
        let led = self.renewed.take().is_some();
        tell(&self.leads, false);
        if !led {
            return;
        }
        let released = within(RELEASE, async {
            let mut lease = self.election.leases.get(&self.election.name).await?;
            let Some(spec) = &mut lease.spec else { return Ok(()) };
            if spec.holder_identity.as_ref() == Some(&self.election.identity) {
                spec.holder_identity = None;
                let params = PostParams::default();
                self.election.leases.replace(&self.election.name, &params, &lease).await?;
            }
            Ok(())
        });
        if let Err(error) = released.await {
            tracing::debug!(%error, "the lease was not given back; it ends by itself");
        }
    }
}

/// Does `work` while this process leads, until draining begins and the lease is given back. `told` hears who leads.
///
/// What is under way when the lease is lost is dropped: work has to be such that the next leader can go on from there.
pub async fn while_leading<W: Future<Output = ()>>(
    mut leads: watch::Receiver<bool>,
    told: impl Fn(bool),
    work: impl Fn() -> W,
    shutdown: &Shutdown,
) {
    loop {
        let leading = *leads.borrow_and_update();
        told(leading);
        let work = async {
            match leading {
                true => work().await,
                false => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = leads.changed() => if changed.is_err() { return },
            () = work => tracing::error!("the leader's work has ended; beginning anew"),
            () = shutdown.draining() => break,
        }
    }
    // Until the lease is given back.
    while leads.changed().await.is_ok() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate() -> Candidate {
        // Never called.
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            Err::<http::Response<kube::client::Body>, _>(std::io::Error::other("not connected"))
        });
        let client = kube::Client::new(service, "x");
        let election = Election {
            leases: Api::namespaced(client, "x"),
            name: "lease".into(),
            identity: "me".into(),
            duration: Duration::from_secs(15),
        };
        Candidate {
            election,
            leads: watch::channel(false).0,
            renewed: None,
            seen: None,
            complaint: Complaint::default(),
        }
    }

    fn lease(holder: &str, version: &str) -> Lease {
        let mut lease = Lease::default();
        lease.metadata.resource_version = Some(version.into());
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_duration_seconds: Some(15),
            // Whatever the other's clock says.
            renew_time: Some(MicroTime(Timestamp::UNIX_EPOCH)),
            lease_transitions: Some(4),
            ..LeaseSpec::default()
        });
        lease
    }

    #[tokio::test]
    async fn anothers_lease_is_taken_only_when_it_was_seen_unchanged_for_its_duration() {
        let mut candidate = candidate();
        let begun = Instant::now();
        let mut at = |seconds, version| {
            let now = begun + Duration::from_secs(seconds);
            candidate.is_to_be_written(&lease("other", version), now)
        };
        assert!(!at(0, "1"), "it may be renewed any moment");
        assert!(!at(14, "1"));
        assert!(!at(15, "2"), "it was renewed");
        assert!(!at(29, "2"));
        assert!(at(30, "2"));
    }

    #[tokio::test]
    async fn a_leader_that_renews_is_told_once() {
        let mut candidate = candidate();
        let mut told = candidate.leads.subscribe();
        candidate.lead(Instant::now());
        assert!(told.has_changed().unwrap() && *told.borrow_and_update());
        candidate.lead(Instant::now());
        assert!(!told.has_changed().unwrap(), "its work would begin anew");
        candidate.follow("x");
        assert!(told.has_changed().unwrap() && !*told.borrow_and_update());
        candidate.follow("x");
        assert!(!told.has_changed().unwrap());
    }

    #[tokio::test]
    async fn a_lease_of_nobody_or_ones_own_is_taken_at_once() {
        let (mut candidate, now) = (candidate(), Instant::now());
        assert!(candidate.is_to_be_written(&lease("", "1"), now));
        assert!(candidate.is_to_be_written(&lease("me", "1"), now));
        assert!(candidate.is_to_be_written(&Lease::default(), now));
        let claim = candidate.claim(lease("other", "1").spec.as_ref());
        assert_eq!(
            (claim.holder_identity.as_deref(), claim.lease_transitions),
            (Some("me"), Some(5))
        );
        let renewed = candidate.claim(Some(&claim));
        assert_eq!(
            (renewed.acquire_time, renewed.lease_transitions),
            (claim.acquire_time, Some(5))
        );
    }
}
