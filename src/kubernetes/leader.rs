//! Leader election with a Lease (coordination.k8s.io/v1). Another replica's lease is treated as
//! abandoned when this process has seen it unchanged for its whole duration by its own clock:
//! clocks of different machines are never compared. Each write names the version on which the
//! decision was based, so that of two replicas that take a lease at the same time one fails. A
//! leader that cannot renew stops leading before another replica can start.

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
use common::quantity::duration;
use telemetry::rate_limited_log::RateLimitedLog;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Maximum poll interval, so that a released lease is taken soon.
const LONGEST_PERIOD: Duration = Duration::from_secs(2);
/// Timeout of releasing the lease.
const RELEASE: Duration = Duration::from_secs(3);

/// Sets whether this process leads and returns whether that is a change. Receivers then start or
/// stop their work.
fn set_leading(leads: &watch::Sender<bool>, now: bool) -> bool {
    leads.send_if_modified(|known| std::mem::replace(known, now) != now)
}

/// Parses the duration of a lease on the command line.
pub fn lease_duration(text: &str) -> Result<Duration, String> {
    duration(text, Duration::from_secs(1)..=Duration::from_secs(3600), "from 1s to 1h")
}

/// A unique identity for an election: `own`, such as the mode, with a random suffix that a
/// restarted container does not share.
///
/// # Errors
/// The system has no random numbers.
pub fn candidate_name(own: &str) -> anyhow::Result<String> {
    let random = getrandom::u64().context("failed to create an identity for the election")?;
    Ok(format!("{own}_{random:016x}"))
}

/// The parameters that all replicas share, and the identity of this one.
#[derive(Clone)]
pub struct Election {
    pub leases: Api<Lease>,
    /// Name of the Lease.
    pub name: String,
    /// Identity of this process, different from all others.
    pub identity: String,
    /// Time after which an unrenewed lease expires; at least a second.
    pub duration: Duration,
}

impl Election {
    /// Takes part in a background task until draining begins. The receiver holds whether this
    /// process leads.
    pub fn start(self, shutdown: Shutdown) -> watch::Receiver<bool> {
        let (leads, receiver) = watch::channel(false);
        task::spawn(async move {
            let mut candidate = Candidate {
                election: self,
                leads,
                renewed: None,
                seen: None,
                error_log: RateLimitedLog::default(),
            };
            tokio::select! {
                () = candidate.run() => {}
                () = shutdown.draining() => {}
            }
            candidate.retire().await;
        });
        receiver
    }

    /// Interval at which the leader renews and standbys poll.
    fn period(&self) -> Duration {
        LONGEST_PERIOD.min(self.duration / 6)
    }

    /// Time after the last renewal when a leader stops leading. The rest of the duration is for
    /// running work.
    fn deadline(&self) -> Duration {
        self.duration * 2 / 3
    }
}

struct Candidate {
    election: Election,
    leads: watch::Sender<bool>,
    /// Start of the last successful renewal, while leading.
    renewed: Option<Instant>,
    /// The last seen version of the lease, and when it was first seen.
    seen: Option<(String, Instant)>,
    error_log: RateLimitedLog,
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
                    if self.error_log.clear() {
                        tracing::info!(
                            "Lease {} can be read and written again",
                            self.election.name
                        );
                    }
                }
                Ok(Err(error)) => self.complain(&error.to_string()),
                Err(_) => self.complain("the API server did not respond in time"),
            }
            let overdue = |renewed: Instant| renewed.elapsed() >= self.election.deadline();
            if self.renewed.is_some_and(overdue) {
                self.follow("the lease was not renewed in time");
            }
            sleep(self.election.period()).await;
        }
    }

    /// Polls the lease, and renews or takes it if possible.
    async fn round(&mut self) -> kube::Result<()> {
        let started = Instant::now();
        let found = self.election.leases.get_opt(&self.election.name).await?;
        let Some(mut lease) = found else {
            let mut lease = Lease::default();
            lease.metadata.name = Some(self.election.name.clone());
            lease.spec = Some(self.claim(None));
            self.election.leases.create(&PostParams::default(), &lease).await?;
            self.lead(started);
            return Ok(());
        };
        if !self.may_write(&lease, started) {
            self.follow("another replica holds the lease");
            return Ok(());
        }
        lease.spec = Some(self.claim(lease.spec.as_ref()));
        let params = PostParams::default();
        match self.election.leases.replace(&self.election.name, &params, &lease).await {
            Ok(_) => self.lead(started),
            // Another replica was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Whether this process may write the lease: it holds it, or the lease is free or abandoned.
    fn may_write(&mut self, lease: &Lease, now: Instant) -> bool {
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

    /// The lease's spec with this process as leader.
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
        if set_leading(&self.leads, true) {
            tracing::info!(identity = self.election.identity, "became leader");
        }
    }

    fn follow(&mut self, why: &str) {
        self.renewed = None;
        if set_leading(&self.leads, false) {
            tracing::warn!(identity = self.election.identity, why, "lost leadership");
        }
    }

    fn complain(&mut self, error: &str) {
        if self.error_log.is_new(error) {
            tracing::warn!(error, "failed to read or write Lease {}", self.election.name);
        }
    }

    /// Stops leading, and then releases the lease so that another replica need not wait.
    async fn retire(&mut self) {
        let led = self.renewed.take().is_some();
        set_leading(&self.leads, false);
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
            tracing::debug!(%error, "failed to release the lease; it will expire");
        }
    }
}

/// Runs `work` while this process leads, until draining begins and the lease is released. Calls
/// `report` with every change of leadership.
///
/// When the lease is lost, `work` is dropped at any await: it must allow the next leader to
/// continue.
pub async fn while_leading<W: Future<Output = ()>>(
    mut leads: watch::Receiver<bool>,
    report: impl Fn(bool),
    work: impl Fn() -> W,
    shutdown: &Shutdown,
) {
    loop {
        let leading = *leads.borrow_and_update();
        report(leading);
        let work = async {
            match leading {
                true => work().await,
                false => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = leads.changed() => if changed.is_err() { return },
            () = work => tracing::error!("the leader's work ended unexpectedly; restarting it"),
            () = shutdown.draining() => break,
        }
    }
    // Wait until the lease is released.
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
            error_log: RateLimitedLog::default(),
        }
    }

    fn lease(holder: &str, version: &str) -> Lease {
        let mut lease = Lease::default();
        lease.metadata.resource_version = Some(version.into());
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_duration_seconds: Some(15),
            // The other replica's clock must not matter.
            renew_time: Some(MicroTime(Timestamp::UNIX_EPOCH)),
            lease_transitions: Some(4),
            ..LeaseSpec::default()
        });
        lease
    }

    #[tokio::test]
    async fn a_foreign_lease_is_taken_only_after_its_duration() {
        let mut candidate = candidate();
        let started = Instant::now();
        let mut at = |seconds, version| {
            let now = started + Duration::from_secs(seconds);
            candidate.may_write(&lease("other", version), now)
        };
        assert!(!at(0, "1"), "it may still be renewed");
        assert!(!at(14, "1"));
        assert!(!at(15, "2"), "it was renewed");
        assert!(!at(29, "2"));
        assert!(at(30, "2"));
    }

    #[tokio::test]
    async fn renewing_does_not_restart_the_leaders_work() {
        let mut candidate = candidate();
        let mut leads = candidate.leads.subscribe();
        candidate.lead(Instant::now());
        assert!(leads.has_changed().unwrap() && *leads.borrow_and_update());
        candidate.lead(Instant::now());
        assert!(!leads.has_changed().unwrap(), "the work would restart");
        candidate.follow("x");
        assert!(leads.has_changed().unwrap() && !*leads.borrow_and_update());
        candidate.follow("x");
        assert!(!leads.has_changed().unwrap());
    }

    #[tokio::test]
    async fn a_free_or_own_lease_is_taken_at_once() {
        let (mut candidate, now) = (candidate(), Instant::now());
        assert!(candidate.may_write(&lease("", "1"), now));
        assert!(candidate.may_write(&lease("me", "1"), now));
        assert!(candidate.may_write(&Lease::default(), now));
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
