//! Backup and restore in Kubernetes. A mover pod does the work: a Job ([`job`]) runs this program
//! with a claim from the VolumeSnapshot, or the claim to restore to, as a block device, and with
//! the repository. Of a group, each member has a Job, one after another, since the volumes may be
//! on different nodes. This process only creates objects, waits and prints the pod's output, so it
//! needs neither the repository nor the driver's sidecar. When it is killed, the Job completes and
//! expires.

mod claim;
mod grant;
mod job;
mod own;
mod rebind;
mod restore;
mod state;
mod template;
mod temporary;
mod watch;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::time::{sleep, timeout};

use super::args::{ForPod, MoverArgs, NewKey, RepositoryArgs};
use super::document::nonce;
use super::manifest::Group;
use super::repository::Location;
use super::settings::KeySource;
use crate::client::cluster::{self, Failure, Retry, Snapshot, call};
use crate::client::stop::Stop;
use crate::client::{Options, progress};
use job::{Data, Work};
use own::new_name;
pub use restore::Target;
use template::Template;
use watch::Watch;

const POLL: Duration = Duration::from_millis(200);
/// Time limit of removing an object.
const CLEAN_UP: Duration = Duration::from_secs(60);

/// Runs commands of this program in pods.
pub struct Mover<'m> {
    client: Client,
    namespace: &'m str,
    flags: &'m MoverArgs,
    template: Template,
    /// The mark of the objects that this command creates.
    mark: String,
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
        let template = mover.pod_template.as_deref().map(Template::read).transpose()?;
        let client = stop.wait(cluster::connect(mover.kubeconfig.as_deref())).await?;
        Ok(Self {
            client,
            namespace,
            flags: mover,
            template: template.unwrap_or_default(),
            mark: nonce()?,
            repository,
            one_machine: *one_machine,
            options,
            stop,
        })
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
        let (data, content) = (Data::None, None);
        Work { args, output, data, content, audience: None, copy_to: None, new_key: None }
    }

    /// Backs up a VolumeSnapshot; returns what the pod printed. `flags`: further ones of the command.
    pub async fn back_up(&self, snapshot: &str, flags: &[String]) -> Result<String> {
        let found = cluster::snapshot(&self.client, self.namespace, snapshot);
        let found = self.stop.wait(found).await?;
        found.volume()?;
        self.revoke_abandoned().await;
        self.back_up_member(&found, None, flags).await
    }

    /// Backs up the members of a VolumeGroupSnapshot; returns the set, as a pod printed it.
    pub async fn back_up_group(&self, group: &str, flags: &[String]) -> Result<String> {
        let found = cluster::group(&self.client, self.namespace, group);
        let found = self.stop.wait(found).await?;
        let members = u32::try_from(found.members.len())?;
        let [group_snapshot_id, group_snapshot] = [found.handle, found.name];
        let set = Group { group_snapshot_id, group_snapshot, members };
        found.members.iter().try_for_each(|member| member.volume().map(drop))?;
        self.revoke_abandoned().await;
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
        let mut args = ["backup", "create", found.name.as_str()].map(str::to_owned).to_vec();
        args.extend(job::listing_args(self.namespace));
        if let Some(set) = set {
            args.push(format!("--set={}", serde_json::to_string(set)?));
        }
        args.extend_from_slice(flags);
        let (name, node) = (&found.name, found.node.as_deref());
        let data = Data::Snapshot { name, bytes, class: Some(&class), node };
        let content = found.is_bound_to_filesystem.then_some(found.content.as_str());
        self.run(Work { data, content, audience: Some(&audience), ..self.work(args) }).await
    }

    /// Runs one command in a pod, and removes the Job in any case.
    pub async fn run(&self, work: Work<'_>) -> Result<String> {
        let name = new_name()?;
        let mut work = work;
        work.args.extend(self.one_machine.then(|| "--one-machine".to_owned()));
        work.args.extend(progress::is_shown().then(|| "--report-progress".to_owned()));
        let job = job::job(&name, self.flags, &self.template, &self.repository, &work)?;
        let what = self.what(&name);
        // A stop is noticed between calls, so that the creation is never cut off.
        self.stop.check()?;
        self.create(&self.jobs(), job).await?;
        let outcome = Watch::new(self, &name, &work).finished().await;
        if let Some(content) = work.content
            && let Err(failure) = self.revoke(content, &name).await
        {
            progress::note(&format!("{:#}; {}", failure.error, grant::by_hand(content)));
        }
        after(outcome, self.remove(&name).await, &what)
    }

    /// The newest pod of a Job.
    async fn pod(&self, job: &str) -> Result<Option<Pod>, Failure> {
        let of_job = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={job}"));
        let what = format!("pods of {}", self.what(job));
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), self.namespace);
        let found = call(&what, pods.list(&of_job)).await?;
        Ok(found.items.into_iter().max_by_key(|pod| pod.metadata.creation_timestamp.clone()))
    }

    /// Removes a Job, and returns when its pods are gone.
    async fn remove(&self, name: &str) -> Result<()> {
        self.discard(&self.jobs(), name, Duration::ZERO).await?;
        let gone = async {
            loop {
                match self.pod(name).await {
                    Ok(None) => return Ok(()),
                    Err(Failure { error, retry: Retry::Never, .. }) => return Err(error),
                    Ok(Some(_)) | Err(_) => sleep(POLL).await,
                }
            }
        };
        timeout(CLEAN_UP, gone).await.context("its pods were not removed in time")?
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

/// The outcome of work, and of the removal of what it needed, which happens later if it fails.
fn after(outcome: Result<String>, removed: Result<()>, what: &str) -> Result<String> {
    match (outcome, removed) {
        (outcome, Ok(())) => outcome,
        (Ok(shown), Err(left)) => {
            progress::note(&format!("{what} remains, and is removed later: {left:#}"));
            Ok(shown)
        }
        (Err(error), Err(left)) => Err(error.context(format!("{what} remains: {left:#}"))),
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
