//! The right to read a snapshot of a filesystem as a block device (KEP-3141): a claim in block mode
//! from it is refused unless its VolumeSnapshotContent has an annotation. With the annotation, all
//! who may create claims and pods in the namespace can read the raw data, also of deleted files. So
//! it exists only while the claim of a mover is not bound.
//!
//! A second annotation lists the Jobs that need the first, and the last one removes both. A Job
//! whose command was killed is removed from the list by a later command of the namespace, which
//! finds the contents by a label. A command whose Job another command took for finished, lists it
//! again. An annotation that no list accompanies is that of a user, and stays.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{Mover, POLL, job, state};
use crate::client::cluster::{ALLOW_MODE_CHANGE, Failure, Retry, call};
use crate::client::progress;
use kubernetes::snapshot::VolumeSnapshotContent;

/// Annotation with the names of the Jobs that need [`ALLOW_MODE_CHANGE`], separated by commas.
const JOBS: &str = "backup.loopback.csi.local/mode-change-jobs";
/// Label of the contents with this annotation.
const LABEL: &str = "backup.loopback.csi.local/mode-change";
/// Attempts to write a content that others write, too.
const ATTEMPTS: usize = 20;
/// Jobs of a list that are read: a list of this program has a few.
const MAX_JOBS: usize = 100;

type Annotations = BTreeMap<String, String>;

fn listed(found: &Annotations) -> Vec<String> {
    let jobs = found.get(JOBS).map_or("", String::as_str);
    jobs.split(',').filter(|job| !job.is_empty()).take(MAX_JOBS).map(str::to_owned).collect()
}

/// The metadata to write so that these Jobs, and only these, have the grant. `None`: nothing.
fn change(found: &Annotations, jobs: &[String]) -> Option<Value> {
    let is_allowed = found.get(ALLOW_MODE_CHANGE).is_some_and(|value| value == "true");
    let text = jobs.join(",");
    match found.get(JOBS) {
        None if is_allowed || jobs.is_empty() => None,
        Some(before) if is_allowed && *before == text => None,
        _ if jobs.is_empty() => Some(json!({
            "annotations": {ALLOW_MODE_CHANGE: null, JOBS: null}, "labels": {LABEL: null},
        })),
        _ => Some(json!({
            "annotations": {ALLOW_MODE_CHANGE: "true", JOBS: text}, "labels": {LABEL: "temporary"},
        })),
    }
}

impl Mover<'_> {
    /// Lets the claim of a Job be provisioned from a content.
    pub(super) async fn grant(&self, content: &str, job: &str) -> Result<(), Failure> {
        self.write(content, async |jobs| {
            let mut jobs = self.without_finished(jobs, job).await?;
            if !jobs.iter().any(|one| one == job) {
                jobs.push(job.to_owned());
            }
            Ok(jobs)
        })
        .await
    }

    /// Takes the grant of a Job back; of all Jobs that do not need it any more, too.
    pub(super) async fn revoke(&self, content: &str, job: &str) -> Result<(), Failure> {
        self.write(content, async |mut jobs| {
            jobs.retain(|one| one != job);
            self.without_finished(jobs, job).await
        })
        .await
    }

    /// Takes back what killed commands of this namespace have left.
    pub(super) async fn revoke_abandoned(&self) {
        let contents: Api<VolumeSnapshotContent> = Api::all(self.client.clone());
        let labelled = ListParams::default().labels(LABEL);
        let found = match call("VolumeSnapshotContents", contents.list(&labelled)).await {
            Ok(found) => found.items,
            // The user may lack the right to list contents.
            Err(Failure { retry: Retry::Never, .. }) => return,
            Err(failure) => return progress::note(&format!("{:#}", failure.error)),
        };
        let is_here = |one: &VolumeSnapshotContent| {
            one.spec.volume_snapshot_ref.namespace.as_deref() == Some(self.namespace)
        };
        for content in found.into_iter().filter(is_here) {
            let name = content.metadata.name.unwrap_or_default();
            if let Err(failure) = self.revoke(&name, "").await {
                progress::note(&format!("{:#}; {}", failure.error, by_hand(&name)));
            }
        }
    }

    /// Writes the Jobs of a content that `change` returns, unless another process has written the
    /// content meanwhile: then again.
    async fn write(
        &self,
        content: &str,
        mut jobs_of: impl AsyncFnMut(Vec<String>) -> Result<Vec<String>, Failure>,
    ) -> Result<(), Failure> {
        let contents: Api<VolumeSnapshotContent> = Api::all(self.client.clone());
        let what = format!("the annotation {ALLOW_MODE_CHANGE} of VolumeSnapshotContent {content}");
        for _ in 0..ATTEMPTS {
            let Some(found) = call(&what, contents.get_opt(content)).await? else { return Ok(()) };
            let annotations = found.metadata.annotations.unwrap_or_default();
            let jobs = jobs_of(listed(&annotations)).await?;
            let Some(mut metadata) = change(&annotations, &jobs) else { return Ok(()) };
            metadata["resourceVersion"] = json!(found.metadata.resource_version);
            let patch = Patch::Merge(json!({"metadata": metadata}));
            let params = PatchParams::default();
            let patched = async {
                match contents.patch(content, &params, &patch).await {
                    Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
                    outcome => outcome.map(|_| true),
                }
            };
            if call(&what, patched).await? {
                return Ok(());
            }
            sleep(POLL).await;
        }
        let error = anyhow!("{what}: other processes keep writing this object");
        Err(Failure::new(Retry::OnceBegun, error))
    }

    /// The Jobs that still wait for their claim; `own` always.
    async fn without_finished(&self, jobs: Vec<String>, own: &str) -> Result<Vec<String>, Failure> {
        let mut kept = Vec::with_capacity(jobs.len());
        for name in jobs {
            let is_needed = name == own || self.needs_grant(&name).await?;
            kept.extend(is_needed.then_some(name));
        }
        Ok(kept)
    }

    /// Whether a Job runs, and its pod has no bound claim yet.
    async fn needs_grant(&self, name: &str) -> Result<bool, Failure> {
        let found = call(&self.what(name), self.jobs().get_opt(name)).await?;
        let Some(found) = found.filter(|found| state::outcome(found).is_none()) else {
            return Ok(false);
        };
        let is_deleted = found.metadata.deletion_timestamp.is_some();
        let pod = self.pod(name).await?;
        let is_bound = match pod.as_ref().and_then(|pod| pod.metadata.name.as_deref()) {
            Some(pod) => self.is_bound(&job::claim_of(pod)).await?,
            None => false,
        };
        Ok(!is_deleted && !is_bound)
    }

    /// Whether a claim has its volume.
    pub(super) async fn is_bound(&self, name: &str) -> Result<bool, Failure> {
        let what = format!("PersistentVolumeClaim {}/{name}", self.namespace);
        let found = call(&what, self.claims().get_opt(name)).await?;
        let phase = found.and_then(|claim| claim.status).and_then(|status| status.phase);
        Ok(phase.as_deref() == Some("Bound"))
    }
}

/// The step after an annotation could not be removed.
pub fn by_hand(content: &str) -> String {
    format!(
        "a later `backup create` of the namespace takes the annotation back, as does `kubectl annotate \
         volumesnapshotcontent {content} {ALLOW_MODE_CHANGE}- {JOBS}-`"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(all: &[(&str, &str)]) -> Annotations {
        all.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_last_job_removes_the_grant_and_never_that_of_a_user() {
        let jobs = |names: &[&str]| names.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>();
        let (allow, both) = ((ALLOW_MODE_CHANGE, "true"), (JOBS, "a,b"));
        // Of a user.
        assert_eq!(change(&annotations(&[allow]), &jobs(&["a"])), None);
        assert_eq!(change(&annotations(&[allow]), &[]), None);
        let added = change(&annotations(&[]), &jobs(&["a"])).unwrap();
        assert_eq!(added["annotations"], json!({ALLOW_MODE_CHANGE: "true", JOBS: "a"}));
        let ours = annotations(&[allow, both]);
        assert_eq!(listed(&ours), ["a", "b"]);
        assert_eq!(change(&ours, &jobs(&["a", "b"])), None);
        assert_eq!(change(&ours, &jobs(&["b"])).unwrap()["annotations"][JOBS], "b");
        let removed = change(&ours, &[]).unwrap();
        assert_eq!(removed["annotations"], json!({ALLOW_MODE_CHANGE: null, JOBS: null}));
        // The annotation is gone, and Jobs need it.
        assert!(change(&annotations(&[both]), &jobs(&["a", "b"])).is_some());
        assert!(listed(&annotations(&[(JOBS, ",,")])).is_empty());
    }
}
