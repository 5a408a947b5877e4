//! Whose snapshot an id stands for: a pod may begin with those of its own namespace, where the policy says so.

use std::sync::{Arc, OnceLock};

use kube::Client;
use kube::runtime::watcher;
use tokio::sync::Semaphore;

use super::ROLE;
use crate::kubernetes::bound_snapshot::{Part, Problem, Resolver};
use crate::kubernetes::cache::{self, Key};
use crate::kubernetes::client::failure;
use crate::kubernetes::snapshot::{VolumeSnapshotContent, handle};
use crate::telemetry::shutdown::Shutdown;

/// Look-ups at the API server at once for ids that no watch has told of; more wait.
const LOOK_UPS: usize = 2;

/// Why a snapshot is not one to begin with.
#[derive(Debug, PartialEq, Eq)]
pub enum Foreign {
    /// What is wrong.
    Refused(String),
    /// It could not be found out.
    Unknown(crate::kubernetes::client::Failure),
}

/// Cheap to clone.
#[derive(Clone)]
pub struct Snapshots {
    client: Client,
    driver: Arc<str>,
    shutdown: Shutdown,
    /// Watched from the first question on: most policies ask none.
    resolver: Arc<OnceLock<Resolver>>,
    turns: Arc<Semaphore>,
}

impl Snapshots {
    pub fn new(client: &Client, driver: &str, shutdown: Shutdown) -> Self {
        Self {
            client: client.clone(),
            driver: driver.into(),
            shutdown,
            resolver: Arc::default(),
            turns: Arc::new(Semaphore::new(LOOK_UPS)),
        }
    }

    fn resolver(&self) -> &Resolver {
        self.resolver.get_or_init(|| Resolver {
            snapshots: cache::of_all_namespaces(&self.client, |_| None, self.shutdown.clone()),
            contents: cache::of_cluster(
                &self.client,
                watcher::Config::default(),
                handle,
                self.shutdown.clone(),
            ),
        })
    }

    /// That the snapshot `id` is one of a VolumeSnapshot of the namespace, bound both ways, ready, and not on its way out.
    pub async fn check(&self, namespace: &str, id: &str) -> Result<(), Foreign> {
        let contents = &self.resolver().contents;
        let known = contents.with(id).await.map_err(unread)?;
        match self.any_of(namespace, id, &known).await {
            // What is newer than what the watches have told.
            Err(Foreign::Refused(_)) if contents.is_live() => {
                // Nobody closes it.
                let _turn = self.turns.acquire().await;
                let newest = contents.fetch_with(id).await.map_err(unread)?;
                self.any_of(namespace, id, &newest).await
            }
            judged => judged,
        }
    }

    async fn any_of(
        &self,
        namespace: &str,
        id: &str,
        contents: &[Arc<VolumeSnapshotContent>],
    ) -> Result<(), Foreign> {
        // Whether it is another namespace's is not told.
        let mut refused = Foreign::Refused(format!(
            "is not the handle of a VolumeSnapshot of the namespace {namespace}"
        ));
        let of_driver = contents.iter().filter(|content| content.spec.driver == *self.driver);
        for content in of_driver {
            let owner = &content.spec.volume_snapshot_ref;
            let (Some(name), Some(of)) = (&owner.name, &owner.namespace) else { continue };
            if of != namespace {
                continue;
            }
            let key = Key::new(of, name);
            match self.resolver().resolve(Some(&self.driver), &key, Part::Target).await {
                Ok(snapshot) if snapshot.handle == id => return Ok(()),
                Ok(_) => {}
                Err(Problem::Api { doing, error }) => {
                    return Err(Foreign::Unknown(failure(ROLE, doing, &error)));
                }
                Err(problem) => refused = Foreign::Refused(problem.to_string()),
            }
        }
        Err(refused)
    }
}

fn unread(error: kube::Error) -> Foreign {
    match error {
        kube::Error::Api(status) if status.code == 404 => Foreign::Refused(
            "the cluster has no VolumeSnapshots: nobody can tell whose the snapshot is".to_owned(),
        ),
        error => Foreign::Unknown(failure(ROLE, "read VolumeSnapshotContents", &error)),
    }
}
