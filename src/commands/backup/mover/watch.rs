//! Waiting for the mover of a Job. Every wait has an end: `--timeout` while the mover does not run,
//! or its state cannot be read, and `--mover-timeout` in all. The error says what the wait was for,
//! with the last warning of the cluster about it.

use std::time::Duration;

use anyhow::{Result, anyhow, bail, ensure};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::api::{ListParams, LogParams};
use tokio::time::{Instant, sleep};

use super::super::failure;
use super::job::{self, CONTAINER, Data, Work};
use super::state::{self, State};
use super::{Mover, POLL};
use crate::client::cluster::{Failure, Retry, call};
use crate::client::format::printable;
use crate::client::{progress, timed_out};

/// Longest pause between two looks at a Job that has run for some time.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Time that a cluster may take to create the pod of a Job.
const POD_DELAY: Duration = Duration::from_secs(5);
/// Time that the other containers of a pod get after the mover was killed.
const HELD: Duration = Duration::from_secs(10);
/// How often events are read while the mover waits.
const EVENTS: Duration = Duration::from_secs(5);
/// How often the progress of a mover is read.
const PROGRESS: Duration = Duration::from_secs(2);
/// Warnings of one object to read, and letters of one to show.
const MAX_EVENTS: u32 = 100;
const MAX_LETTERS: usize = 1000;
/// Bytes of the pod's output to read: far more than any result has.
const MAX_LOG: i64 = 4 << 20;
/// Lines of the output of a failed pod to show.
const LAST_LINES: usize = 20;

/// A wait of a command for one Job.
pub struct Watch<'w> {
    mover: &'w Mover<'w>,
    job: &'w str,
    what: String,
    work: &'w Work<'w>,
    begun: Instant,
    /// Since when the mover does not run.
    since: Option<Instant>,
    /// The pod that was seen last, and the one whose claim is bound.
    seen: Option<String>,
    bound: Option<String>,
    noted: String,
    warning: Option<(Instant, Option<String>)>,
    /// When the progress of the mover was read last.
    progress: Option<Instant>,
}

impl<'w> Watch<'w> {
    pub fn new(mover: &'w Mover<'w>, job: &'w str, work: &'w Work<'w>) -> Self {
        Self {
            mover,
            job,
            what: mover.what(job),
            work,
            begun: Instant::now(),
            since: None,
            seen: None,
            bound: None,
            noted: String::new(),
            warning: None,
            progress: None,
        }
    }

    /// The output of the Job's pod, when it has succeeded.
    pub async fn finished(&mut self) -> Result<String> {
        loop {
            match self.look().await {
                Ok((State::Succeeded, pod)) => {
                    ensure!(
                        pod.is_some(),
                        "{}: its pod is gone, and with it the result",
                        self.what
                    );
                    match self.log(pod.as_ref()).await {
                        Ok(log) => return Ok(log),
                        Err(failure) => self.unreadable(failure).await?,
                    }
                }
                Ok((State::Failed(reason), pod)) => return Err(self.failed(&reason, pod).await),
                Ok((State::Running, pod)) => {
                    self.since = None;
                    self.show_progress(pod.as_ref()).await;
                }
                Ok((State::Held(why), _)) => self.wait(&why, HELD, true).await?,
                Ok((State::Waiting(why), _)) => self.wait(&why, self.limit(), false).await?,
                Err(failure) => self.unreadable(failure).await?,
            }
            let limit = self.mover.flags.mover_timeout;
            if self.begun.elapsed() >= limit {
                let limit = humantime::format_duration(limit);
                bail!("{}: not done within {limit}; set a longer --mover-timeout", self.what);
            }
            let pause = (self.begun.elapsed() / 10).clamp(POLL, LONGEST_PAUSE);
            let pause = async {
                sleep(pause).await;
                Ok(())
            };
            self.mover.stop.whole(pause).await?;
        }
    }

    fn limit(&self) -> Duration {
        self.mover.options.timeout
    }

    /// The state of the Job, with its newest pod.
    async fn look(&mut self) -> Result<(State, Option<Pod>), Failure> {
        let job = call(&self.what, self.mover.jobs().get(self.job)).await?;
        let pod = self.mover.pod(self.job).await?;
        let state = State::of(&job, pod.as_ref());
        let current = pod.as_ref().and_then(|pod| pod.metadata.name.clone());
        if let (Some(before), Some(now)) = (&self.seen, &current)
            && before != now
        {
            progress::note(&format!("mover pod {before} ended, {now} replaces it"));
            self.since = None;
        }
        if let Some(content) = self.work.content
            && matches!(state, State::Waiting(_) | State::Running)
        {
            self.keep_granted(content, current.as_deref()).await?;
        }
        self.seen = current.or(self.seen.take());
        Ok((state, pod))
    }

    /// Each pod has a claim of its own, which the content must allow until it is bound.
    async fn keep_granted(&mut self, content: &str, pod: Option<&str>) -> Result<(), Failure> {
        if pod.is_some() && pod == self.bound.as_deref() {
            return Ok(());
        }
        let is_bound = match pod {
            Some(pod) => self.mover.is_bound(&job::claim_of(pod)).await?,
            None => false,
        };
        if is_bound {
            self.mover.revoke(content, self.job).await?;
            self.bound = pod.map(str::to_owned);
            return Ok(());
        }
        self.mover.grant(content, self.job).await
    }

    /// Notes why the mover does not run.
    ///
    /// # Errors
    /// It has not run for `limit`.
    async fn wait(&mut self, why: &str, limit: Duration, is_final: bool) -> Result<()> {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if is_final {
            ensure!(waited < limit, "{why}");
            return Ok(());
        }
        let is_over = waited >= limit;
        let why = match why {
            "" if waited < POD_DELAY && !is_over => return Ok(()),
            "" => format!("{} has no pod yet", self.what),
            why => why.to_owned(),
        };
        let is_due = self.warning.as_ref().is_none_or(|(at, _)| at.elapsed() >= EVENTS);
        if is_due || is_over {
            self.warning = Some((Instant::now(), self.last_warning().await));
        }
        let warning = self.warning.as_ref().and_then(|(_, warning)| warning.as_deref());
        let text = match warning {
            Some(warning) => format!("{why}; {warning}"),
            None if self.seen.is_none() => format!("{why}; {}", self.account_step()),
            None => why,
        };
        if is_over {
            bail!("{}; {text}", timed_out(limit));
        }
        self.note(text);
        Ok(())
    }

    /// The state could not be read.
    ///
    /// # Errors
    /// No repetition helps, or it could not be read for `--timeout`.
    async fn unreadable(&mut self, failure: Failure) -> Result<()> {
        let Failure { error, retry, .. } = failure;
        if retry == Retry::Never {
            return Err(error);
        }
        let limit = self.limit();
        if self.since.get_or_insert_with(Instant::now).elapsed() >= limit {
            return Err(error.context(timed_out(limit)));
        }
        self.note(format!("{error:#}; retrying"));
        Ok(())
    }

    fn note(&mut self, text: String) {
        if text != self.noted {
            progress::note(&printable(&text));
        }
        self.noted = text;
    }

    fn account_step(&self) -> String {
        let (namespace, account) = (self.mover.namespace, job::account(self.mover.flags));
        format!("it needs the ServiceAccount {namespace}/{account} (deploy/examples/mover)")
    }

    /// The newest warning about the Job, its pod or the claim of its data. The user may lack the
    /// right to read events.
    async fn last_warning(&self) -> Option<String> {
        let mut names = vec![("Job", self.job.to_owned())];
        names.extend(self.seen.as_ref().map(|pod| ("Pod", pod.clone())));
        let claim = match self.work.data {
            Data::None => None,
            Data::Claim(claim) => Some(claim.to_owned()),
            Data::Snapshot { .. } => self.seen.as_deref().map(job::claim_of),
        };
        names.extend(claim.map(|claim| ("PersistentVolumeClaim", claim)));
        let events: Api<Event> = Api::namespaced(self.mover.client.clone(), self.mover.namespace);
        let mut found = Vec::new();
        for (kind, name) in &names {
            let fields = format!("involvedObject.kind={kind},involvedObject.name={name}");
            let of_object =
                ListParams::default().fields(&format!("{fields},type=Warning")).limit(MAX_EVENTS);
            found.extend(call("events", events.list(&of_object)).await.ok()?.items);
        }
        let time = |event: &Event| {
            let last = event.last_timestamp.as_ref().map(|time| time.0);
            last.or_else(|| event.event_time.as_ref().map(|time| time.0))
        };
        let newest = found.into_iter().max_by_key(time)?;
        let message = newest.message.unwrap_or_default();
        let message: String = message.chars().take(MAX_LETTERS).collect();
        Some(format!("{}: {message}", newest.reason.unwrap_or_default()))
    }

    async fn failed(&self, reason: &str, pod: Option<Pod>) -> anyhow::Error {
        let code = pod.as_ref().and_then(state::exit_code).unwrap_or_default();
        let log = match &pod {
            Some(_) => self
                .log(pod.as_ref())
                .await
                .unwrap_or_else(|failure| format!("{:#}", failure.error)),
            None => String::new(),
        };
        let lines: Vec<&str> = log.lines().collect();
        let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
        // The program in the pod begins its error with its name, as this one will.
        let text = last.join("\n");
        let text = text.strip_prefix("csi-loopback: ").unwrap_or(&text);
        if text.is_empty() {
            anyhow!("the mover pod failed: {reason}")
        } else {
            failure::Failure::of_code(code, format!("mover pod: {text}"))
        }
    }

    /// Shows the progress of a mover that runs, if there is a line for it.
    async fn show_progress(&mut self, pod: Option<&Pod>) {
        let is_due = self.progress.is_none_or(|last| last.elapsed() >= PROGRESS);
        if is_due && progress::is_shown() {
            self.progress = Some(Instant::now());
            // What cannot be read now is read later.
            if let Ok(last) = self.output(pod, Some(1)).await {
                progress::show(&last);
            }
        }
    }

    async fn log(&self, pod: Option<&Pod>) -> Result<String, Failure> {
        let log = self.output(pod, None).await?;
        Ok(progress::without_reports(log.trim_end()))
    }

    /// What the mover has printed, or the last lines of it.
    async fn output(&self, pod: Option<&Pod>, last: Option<i64>) -> Result<String, Failure> {
        let name = pod.and_then(|pod| pod.metadata.name.as_deref()).unwrap_or_default();
        let what = format!("output of pod {}/{name}", self.mover.namespace);
        let pods: Api<Pod> = Api::namespaced(self.mover.client.clone(), self.mover.namespace);
        let params = LogParams {
            container: Some(CONTAINER.to_owned()),
            limit_bytes: Some(MAX_LOG),
            tail_lines: last,
            ..LogParams::default()
        };
        call(&what, pods.logs(name, &params)).await
    }
}
