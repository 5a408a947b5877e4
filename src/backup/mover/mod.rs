//! Backup and restore in Kubernetes. A mover pod does the work: a Job ([`job`]) runs this program
//! with a claim from the VolumeSnapshot, or the claim to restore to, as a block device, and with
//! the repository. Of a group, each member has a Job, one after another, since the volumes may be
//! on different nodes. This process only creates objects, waits and prints the pod's output, so it
//! needs neither the repository nor the driver's sidecar. When it is killed, the Job completes and
//! expires.

mod claim;
mod job;
mod restore;

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::{DeleteParams, ListParams, LogParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use super::args::{ForPod, MoverArgs, NewKey, RepositoryArgs};
use super::failure;
use super::manifest::Group;
use super::repository::Location;
use super::settings::KeySource;
use crate::client::cluster::{self, ALLOW_MODE_CHANGE, Failure, Retry, Snapshot, call};
use crate::client::stop::Stop;
use crate::client::{Options, progress, timed_out};
use crate::kubernetes::snapshot::VolumeSnapshotContent;
use job::{Data, Work};
pub use restore::Target;

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
    repository: Location,
    one_machine: bool,
    options: &'m Options,
    stop: &'m Stop,
}

impl<'m> Mover<'m> {
    /// # Errors
    /// A flag has no meaning in a pod, or no cluster is configured.
    pub async fn new(
        options: &'m Options,
        stop: &'m Stop,
        args: &'m RepositoryArgs,
    ) -> Result<Self> {
        let RepositoryArgs { s3_credentials, one_machine, mover, .. } = args;
        let namespace = mover.namespace.as_deref().context("--namespace is missing")?;
        let repository = args.location()?;
        check_reachable("--repository", &repository)?;
        // Of the environment, --key-secret takes the place.
        if mover.key_secret.is_none() {
            check_no_key(args.key()?, "--key-secret")?;
        }
        let is_set = s3_credentials.is_some();
        ensure!(!is_set, "--s3-credentials: a mover pod cannot read it; set --s3-secret");
        let client = stop.wait(cluster::connect(mover.kubeconfig.as_deref())).await?;
        let one_machine = *one_machine;
        Ok(Self { client, namespace, flags: mover, repository, one_machine, options, stop })
    }

    /// Runs a command that needs only repositories; returns what the pod printed.
    pub async fn manage(&self, command: &ForPod<'_>) -> Result<String> {
        let ForPod { args, copy_to, new_key, .. } = command;
        if let Some(copy_to) = copy_to {
            check_reachable("--to", &copy_to.to)?;
            check_no_key(copy_to.key(), "--to-key-secret")?;
        }
        check_no_key(new_key.and_then(NewKey::key), "--new-key-secret")?;
        let work = Work { copy_to: *copy_to, new_key: *new_key, ..self.work(args.clone()) };
        self.run(work).await
    }

    /// A command that needs only the repository.
    fn work(&self, args: Vec<String>) -> Work<'_> {
        let output = self.options.print.output;
        Work { args, output, data: Data::None, audience: None, copy_to: None, new_key: None }
    }

    /// Backs up a VolumeSnapshot; returns what the pod printed. `flags`: further ones of the command.
    pub async fn back_up(&self, snapshot: &str, flags: &[String]) -> Result<String> {
        let found = cluster::snapshot(&self.client, self.namespace, snapshot);
        let found = self.stop.wait(found).await?;
        self.back_up_member(&found, None, flags).await
    }

    /// Backs up the members of a VolumeGroupSnapshot; returns the set, as a pod printed it.
    pub async fn back_up_group(&self, group: &str, flags: &[String]) -> Result<String> {
        let found = cluster::group(&self.client, self.namespace, group);
        let found = self.stop.wait(found).await?;
        let members = u32::try_from(found.members.len())?;
        let [group_snapshot_id, group_snapshot] = [found.handle, found.name];
        let set = Group { group_snapshot_id, group_snapshot, members };
        for (number, member) in found.members.iter().enumerate() {
            progress::note(&format!("backing up {}, {} of {members}", member.what, number + 1));
            let created = self.back_up_member(member, Some(&set), flags).await;
            created.with_context(|| {
                format!(
                    "{number} of {members} members of {group} are backed up, repeat the command \
                     to continue"
                )
            })?;
        }
        let args = ["backup", "show", set.group_snapshot_id.as_str(), "--group"].map(str::to_owned);
        self.run(self.work(args.to_vec())).await
    }

    /// Backs up a VolumeSnapshot, perhaps as a member of a set.
    async fn back_up_member(
        &self,
        found: &Snapshot,
        set: Option<&Group>,
        flags: &[String],
    ) -> Result<String> {
        let audience = cluster::audience(&self.client, self.namespace, &found.driver);
        let audience = self.stop.wait(audience).await?;
        // The claim is read only if it is needed: the user may lack the right.
        let is_needed = self.flags.storage_class.is_none() || found.bytes.is_none();
        let claim = match found.claim.as_ref().filter(|_| is_needed) {
            Some(claim) => self.stop.wait(self.claim(claim)).await?,
            None => None,
        };
        let class = self.class_of(found, claim.as_ref())?;
        let bytes = found.bytes.or_else(|| claim.as_ref().and_then(cluster::capacity));
        let bytes = bytes.with_context(|| {
            format!(
                "{}: its size is unknown, because its driver reports none and its claim is gone; create a claim from \
                 it, and back it up in a pod of your own (--source)",
                found.what
            )
        })?;
        if found.is_bound_to_filesystem {
            self.stop.wait(self.allow_block_mode(found)).await?;
        }
        let mut args = ["backup", "create", found.name.as_str()].map(str::to_owned).to_vec();
        args.extend(job::listing_args(self.namespace));
        if let Some(set) = set {
            args.push(format!("--set={}", serde_json::to_string(set)?));
        }
        args.extend_from_slice(flags);
        let data = Data::Snapshot { name: &found.name, bytes, class: Some(&class) };
        self.run(Work { data, audience: Some(&audience), ..self.work(args) }).await
    }

    /// Runs one command in a pod, and removes the Job in any case.
    pub async fn run(&self, work: Work<'_>) -> Result<String> {
        let name = new_name()?;
        let mut work = work;
        work.args.extend(self.one_machine.then(|| "--one-machine".to_owned()));
        let job = job::job(&name, self.flags, &self.repository, &work)?;
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
        let (mut noted, mut seen) = (String::new(), None);
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
                    let current = pod.as_ref().and_then(|pod| pod.metadata.name.clone());
                    if let (Some(before), Some(now)) = (&seen, &current)
                        && before != now
                    {
                        progress::note(&format!("mover pod {before} ended, {now} replaces it"));
                    }
                    seen = current.or(seen);
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
        let code = pod.as_ref().and_then(job::exit_code).unwrap_or_default();
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
            failure::Failure::of_code(code, format!("mover pod: {text}"))
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
    fn class_of(
        &self,
        snapshot: &Snapshot,
        claim: Option<&PersistentVolumeClaim>,
    ) -> Result<String> {
        if let Some(class) = &self.flags.storage_class {
            return Ok(class.clone());
        }
        let class = claim.and_then(|claim| claim.spec.as_ref()?.storage_class_name.clone());
        class.with_context(|| format!("{}: its claim is gone; set --storage-class", snapshot.what))
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
}

fn check_reachable(flag: &str, repository: &Location) -> Result<()> {
    ensure!(
        !matches!(repository, Location::Directory(_)),
        "{flag} {repository}: a mover pod cannot reach a directory; name s3://BUCKET/PREFIX or claim:NAME"
    );
    Ok(())
}

fn check_no_key(key: Option<KeySource>, instead: &str) -> Result<()> {
    match key {
        Some(key) => bail!("{}: a mover pod cannot read this key; set {instead}", key.name()),
        None => Ok(()),
    }
}

/// A name that is known before the call can be deleted even if the response is lost.
fn new_name() -> Result<String> {
    let random = getrandom::u64().map_err(|error| anyhow!("{error}"))?;
    Ok(format!("csi-loopback-mover-{random:016x}"))
}
