//! Backup and restore in Kubernetes. A mover pod does the work: a Job ([`job`]) runs this program with a claim from the
//! VolumeSnapshot, or the claim to restore to, as a block device, and with the repository. This process only creates
//! objects, waits and prints the pod's output, so it needs neither the repository nor the driver's sidecar. When it is
//! killed, the Job completes and expires.

mod claim;
mod job;

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::{DeleteParams, ListParams, LogParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde::Deserialize;
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use super::args::{MoverArgs, RepositoryArgs, VolumeMode};
use super::create::BaseChoice;
use super::repository::Location;
use crate::client::cluster::{self, ALLOW_MODE_CHANGE, Failure, Retry, Snapshot, call};
use crate::client::stop::Stop;
use crate::client::{Options, Output, progress, timed_out};
use crate::kubernetes::snapshot::VolumeSnapshotContent;
use job::{Data, Work};

const POLL: Duration = Duration::from_secs(1);
/// Time that a cluster may take to create the pod of a Job.
const POD_DELAY: Duration = Duration::from_secs(5);
/// Time limit of removing the Job.
const CLEAN_UP: Duration = Duration::from_secs(60);
/// Bytes of the pod's output to read: far more than any result has.
const MAX_LOG: i64 = 4 << 20;
/// Lines of the output of a failed pod to show.
const LAST_LINES: usize = 20;

/// Runs commands of this program in pods.
pub struct Mover<'m> {
    client: Client,
    namespace: &'m str,
    flags: &'m MoverArgs,
    repository: &'m Location,
    options: &'m Options,
    stop: &'m Stop,
}

/// The facts of a backup that a restore needs, as `backup show --output json` prints them.
#[derive(Deserialize)]
struct Shown {
    id: String,
    capacity_bytes: u64,
}

/// What to restore to.
pub struct Target<'t> {
    pub claim: &'t str,
    pub mode: VolumeMode,
    pub resume: bool,
}

impl<'m> Mover<'m> {
    /// # Errors
    /// A flag has no meaning in a pod, or no cluster is configured.
    pub async fn new(
        options: &'m Options,
        stop: &'m Stop,
        args: &'m RepositoryArgs,
    ) -> Result<Self> {
        let RepositoryArgs { repository, key_file, s3_credentials, mover } = args;
        let namespace = mover.namespace.as_deref().context("--namespace is missing")?;
        ensure!(
            !matches!(repository, Location::Directory(_)),
            "--repository {repository}: a mover pod cannot reach a directory; name s3://BUCKET/PREFIX or claim:NAME"
        );
        for (flag, path, instead) in [
            ("--key-file", key_file, "--key-secret"),
            ("--s3-credentials", s3_credentials, "--s3-secret"),
        ] {
            ensure!(path.is_none(), "{flag}: a mover pod cannot read this file; set {instead}");
        }
        let client = stop.wait(cluster::connect(mover.kubeconfig.as_deref())).await?;
        Ok(Self { client, namespace, flags: mover, repository, options, stop })
    }

    /// Runs a command that needs the repository alone; returns what the pod printed.
    pub async fn manage(&self, args: Vec<String>) -> Result<String> {
        let output = self.options.print.output;
        self.run(Work { args, output, data: Data::None, audience: None }).await
    }

    /// Backs up a VolumeSnapshot; returns what the pod printed.
    pub async fn back_up(&self, snapshot: &str, base: &BaseChoice) -> Result<String> {
        let found = cluster::snapshot(&self.client, self.namespace, snapshot);
        let found = self.stop.wait(found).await?;
        let audience = cluster::audience(&self.client, self.namespace, &found.driver);
        let audience = self.stop.wait(audience).await?;
        let class = self.stop.wait(self.class_of(&found)).await?;
        if found.is_bound_to_filesystem {
            self.stop.wait(self.allow_block_mode(&found)).await?;
        }
        let mut args = ["backup", "create", snapshot].map(str::to_owned).to_vec();
        args.extend(job::listing_args(self.namespace));
        args.extend(match base {
            BaseChoice::None => None,
            BaseChoice::Auto => Some("--base=auto".to_owned()),
            BaseChoice::Backup(backup) => Some(format!("--base={backup}")),
        });
        let data =
            Data::Snapshot { name: &found.name, bytes: found.bytes, class: class.as_deref() };
        self.run(Work { args, output: self.options.print.output, data, audience: Some(&audience) })
            .await
    }

    /// Restores a backup to a claim; returns what the pod printed.
    pub async fn restore(&self, backup: &str, target: &Target<'_>) -> Result<String> {
        let Target { claim, mode, resume } = *target;
        let existing = self.stop.wait(self.claim(claim)).await?;
        if let Some(existing) = &existing {
            claim::check(claim, existing, mode)?;
        }
        let args = ["backup", "show", backup].map(str::to_owned).to_vec();
        let show = Work { args, output: Output::Json, data: Data::None, audience: None };
        let shown = self.run(show).await?;
        let Shown { id, capacity_bytes } =
            serde_json::from_str(&shown).context("the mover pod printed no backup")?;
        let name = match mode {
            VolumeMode::Block => claim.to_owned(),
            VolumeMode::Filesystem => new_name()?,
        };
        let is_new = existing.is_none();
        if is_new {
            self.create_claim(&name, capacity_bytes).await?;
        }
        let restored = match self.restore_to(&id, &name, resume && !is_new).await {
            Err(error) if is_new => {
                return match self.delete_claim(&name).await {
                    Ok(()) => Err(error),
                    Err(left) => Err(error.context(format!("claim {name} remains: {left:#}"))),
                };
            }
            restored => restored?,
        };
        if mode == VolumeMode::Filesystem {
            let rebound = self.stop.whole(claim::rebind(self, &name, claim)).await;
            rebound.with_context(|| {
                format!(
                    "restored to claim {name} in block mode, which claim {claim} did not replace"
                )
            })?;
        }
        Ok(restored)
    }

    async fn restore_to(&self, id: &str, claim: &str, resume: bool) -> Result<String> {
        let mut args = vec!["restore".to_owned(), id.to_owned(), format!("--to={}", job::DEVICE)];
        if resume {
            args.push("--resume".to_owned());
        }
        let data = Data::Claim(claim);
        self.run(Work { args, output: self.options.print.output, data, audience: None }).await
    }

    /// Runs one command in a pod, and removes the Job in any case.
    pub async fn run(&self, work: Work<'_>) -> Result<String> {
        let name = new_name()?;
        let job = job::job(&name, self.flags, self.repository, &work)?;
        let what = self.what(&name);
        let outcome = async {
            let created = call(&what, self.jobs().create(&PostParams::default(), &job)).await;
            created.map_err(|failure| failure.error)?;
            self.finished(&name).await
        };
        // A stop is noticed between calls, so that the creation is never cut off.
        let outcome = outcome.await;
        match (outcome, self.remove(&name).await) {
            (outcome, Ok(())) => outcome,
            (Ok(shown), Err(left)) => {
                progress::note(&format!("{what} remains, and expires by itself: {left:#}"));
                Ok(shown)
            }
            (Err(error), Err(left)) => Err(error.context(format!("{what} remains: {left:#}"))),
        }
    }

    /// The output of the Job's pod, when it has succeeded.
    async fn finished(&self, name: &str) -> Result<String> {
        let what = self.what(name);
        let begun = Instant::now();
        let start_by = begun + self.options.timeout;
        let mut noted = String::new();
        loop {
            let state = async {
                let job = call(&what, self.jobs().get(name)).await?;
                Ok((job::outcome(&job), self.pod(name).await?))
            };
            match state.await {
                Ok((Some(Ok(())), Some(pod))) => return self.log(&pod).await,
                Ok((Some(Ok(())), None)) => {
                    bail!("{what}: its pod is gone, and with it the result")
                }
                Ok((Some(Err(reason)), pod)) => return Err(self.failed(&reason, pod).await),
                Ok((None, pod)) => {
                    let waiting = match &pod {
                        Some(pod) => job::waiting(pod),
                        None if begun.elapsed() < POD_DELAY => None,
                        None => Some(format!("{what} has no pod yet; {}", self.account_step())),
                    };
                    if let Some(waiting) = waiting {
                        if Instant::now() >= start_by {
                            bail!("{}; {waiting}", timed_out(self.options.timeout));
                        }
                        if waiting != noted {
                            progress::note(&waiting);
                        }
                        noted = waiting;
                    }
                }
                Err(Failure { error, retry: Retry::Never, .. }) => return Err(error),
                Err(failure) => progress::note(&format!("{:#}; retrying", failure.error)),
            }
            let pause = async {
                sleep(POLL).await;
                Ok(())
            };
            self.stop.whole(pause).await?;
        }
    }

    fn account_step(&self) -> String {
        let account = job::account(self.flags);
        format!("it needs the ServiceAccount {}/{account} (deploy/examples/mover)", self.namespace)
    }

    async fn failed(&self, reason: &str, pod: Option<Pod>) -> anyhow::Error {
        let log = match pod {
            Some(pod) => self.log(&pod).await.unwrap_or_else(|error| format!("{error:#}")),
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
            anyhow!("mover pod: {text}")
        }
    }

    /// The newest pod of a Job.
    async fn pod(&self, job: &str) -> Result<Option<Pod>, Failure> {
        let of_job = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={job}"));
        let what = format!("pods of {}", self.what(job));
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), self.namespace);
        let found = call(&what, pods.list(&of_job)).await?;
        Ok(found.items.into_iter().max_by_key(|pod| pod.metadata.creation_timestamp.clone()))
    }

    async fn log(&self, pod: &Pod) -> Result<String> {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let what = format!("output of pod {}/{name}", self.namespace);
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), self.namespace);
        let params = LogParams { limit_bytes: Some(MAX_LOG), ..LogParams::default() };
        let log = call(&what, pods.logs(name, &params)).await.map_err(|failure| failure.error)?;
        Ok(log.trim_end().to_owned())
    }

    /// Removes a Job, and returns when its pods are gone.
    async fn remove(&self, name: &str) -> Result<()> {
        let jobs = self.jobs();
        let removal = async {
            loop {
                match jobs.delete(name, &DeleteParams::background()).await {
                    Err(kube::Error::Api(status)) if status.code == 404 => break,
                    Err(kube::Error::Api(status)) if status.code == 403 => {
                        bail!("{}", status.message)
                    }
                    _ => sleep(POLL).await,
                }
            }
            while self.pod(name).await.map_err(|failure| failure.error)?.is_some() {
                sleep(POLL).await;
            }
            Ok(())
        };
        timeout(CLEAN_UP, removal).await.context("it was not removed in time")?
    }

    /// The StorageClass of claims from a snapshot.
    async fn class_of(&self, snapshot: &Snapshot) -> Result<Option<String>> {
        if self.flags.storage_class.is_some() {
            return Ok(self.flags.storage_class.clone());
        }
        let claim = match &snapshot.claim {
            Some(claim) => self.claim(claim).await?,
            None => None,
        };
        let class = claim.and_then(|claim| claim.spec).and_then(|spec| spec.storage_class_name);
        let Some(class) = class else {
            bail!("{}: its claim is gone; set --storage-class", snapshot.what)
        };
        Ok(Some(class))
    }

    /// Allows a claim in block mode from a snapshot of a filesystem (KEP-3141).
    async fn allow_block_mode(&self, snapshot: &Snapshot) -> Result<()> {
        let content = &snapshot.content;
        let contents: Api<VolumeSnapshotContent> = Api::all(self.client.clone());
        let patch = json!({"metadata": {"annotations": {ALLOW_MODE_CHANGE: "true"}}});
        let what = format!("annotate VolumeSnapshotContent {content} with {ALLOW_MODE_CHANGE}");
        let patch = Patch::Merge(patch);
        let params = PatchParams::default();
        let patched = contents.patch(content, &params, &patch);
        call(&what, patched).await.map_err(|failure| failure.error)?;
        progress::note(&format!(
            "VolumeSnapshotContent {content} was annotated: its data is read as a block device"
        ));
        Ok(())
    }

    fn jobs(&self) -> Api<Job> {
        Api::namespaced(self.client.clone(), self.namespace)
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), self.namespace)
    }

    fn what(&self, job: &str) -> String {
        format!("Job {}/{job}", self.namespace)
    }

    async fn claim(&self, name: &str) -> Result<Option<PersistentVolumeClaim>> {
        let what = format!("PersistentVolumeClaim {}/{name}", self.namespace);
        call(&what, self.claims().get_opt(name)).await.map_err(|failure| failure.error)
    }

    async fn create_claim(&self, name: &str, bytes: u64) -> Result<()> {
        let claim = claim::empty(name, bytes, self.flags.storage_class.as_deref())?;
        let what = format!("PersistentVolumeClaim {}/{name}", self.namespace);
        let created = call(&what, self.claims().create(&PostParams::default(), &claim)).await;
        created.map(drop).map_err(|failure| failure.error)
    }

    async fn delete_claim(&self, name: &str) -> Result<()> {
        let what = format!("PersistentVolumeClaim {}/{name}", self.namespace);
        match call(&what, self.claims().delete(name, &DeleteParams::default())).await {
            Ok(_) => Ok(()),
            Err(failure) => Err(failure.error),
        }
    }
}

/// A name that is known before the call can be deleted even if the response is lost.
fn new_name() -> Result<String> {
    let random = getrandom::u64().map_err(|error| anyhow!("{error}"))?;
    Ok(format!("csi-loopback-mover-{random:016x}"))
}
