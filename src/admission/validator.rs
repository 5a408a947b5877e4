//! Validates the inline volumes of a pod against the policy of its namespace. All problems of a pod
//! are reported at once, so that its author corrects them in one step.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::storage::v1::CSIDriver;
use kube::Client;
use kube::ResourceExt;
use kube::runtime::watcher;

use super::ROLE;
use super::args::Level;
use super::claims::Claims;
use super::policy::{Policies, Policy, PolicyError, Rules};
use super::volumes::{self, Volume};
use common::inline::{self, Attributes};
use common::quantity;
use common::text::truncate;
use kubernetes::admission::Refusal;
use kubernetes::cache::{self, Cache, Key};
use kubernetes::cached::{Cached, ENFORCE, PROFILE, WARN};
use kubernetes::client::failure;
use kubernetes::peer_limit::PeerLimit;
use kubernetes::pod::PodSpec;
use telemetry::peer::Peer;
use telemetry::shutdown::Shutdown;

/// Maximum number of reported problems; validation stops after that.
const MAX_PROBLEMS: usize = 8;
/// Maximum bytes of a label value in a message.
const MAX_LABEL: usize = 63;

/// A reason to reject a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The volume is invalid under every policy.
    is_malformed: bool,
    pub message: String,
}

/// Result of the validation of a pod.
#[derive(Debug, Default)]
pub struct Findings {
    pub problems: Vec<Problem>,
    pub warnings: Vec<String>,
}

/// Validates reviews; clones share caches and policy.
#[derive(Clone)]
pub struct Validator {
    pub driver: Arc<str>,
    pub claims: Claims,
    policies: Policies,
    namespaces: Cache<Namespace>,
    drivers: Cache<CSIDriver>,
    /// Of the clients whose reviews cause lookups.
    turns: PeerLimit,
}

impl Findings {
    pub fn malformed(&mut self, message: String) {
        self.problems.push(Problem { is_malformed: true, message });
    }

    pub fn forbidden(&mut self, message: String) {
        self.problems.push(Problem { is_malformed: false, message });
    }

    /// The rejection with all problems. `None`: the pod is allowed.
    pub fn refusal(&self) -> Option<Refusal> {
        let messages =
            self.problems.iter().take(MAX_PROBLEMS).map(|problem| problem.message.as_str());
        let mut message = messages.collect::<Vec<_>>().join("; ");
        if self.problems.len() > MAX_PROBLEMS {
            message.push_str("; and more");
        }
        let is_malformed = self.problems.iter().any(|problem| problem.is_malformed);
        match (self.problems.is_empty(), is_malformed) {
            (true, _) => None,
            (false, true) => Some(Refusal::invalid(message)),
            (false, false) => Some(Refusal::not_allowed(message)),
        }
    }
}

impl Validator {
    /// Starts to watch namespaces and the CSIDriver.
    pub fn start(client: &Client, driver: &str, policies: Policies, shutdown: &Shutdown) -> Self {
        let one = watcher::Config::default().fields(&format!("metadata.name={driver}"));
        let turns = PeerLimit::default();
        Self {
            driver: driver.into(),
            claims: Claims::new(client, turns.clone()),
            turns,
            policies,
            namespaces: cache::of_cluster(
                client,
                watcher::Config::default(),
                |_| None,
                shutdown.clone(),
            ),
            drivers: cache::of_cluster(client, one, |_| None, shutdown.clone()),
        }
    }

    /// Validates the inline volumes of a pod.
    ///
    /// # Errors
    /// The namespace, the CSIDriver or the policy is unknown.
    pub async fn volumes(
        &self,
        peer: Peer,
        namespace: &str,
        spec: &PodSpec,
    ) -> Result<Findings, Refusal> {
        let mut findings = Findings::default();
        let volumes = volumes::of(spec, &self.driver);
        let Some(first) = volumes.first() else { return Ok(findings) };
        let policy = self.policy()?;
        let (rules, uses_pod_security) = policy.of(namespace);
        if !rules.allowed {
            let driver = &self.driver;
            findings.forbidden(format!(
                "{}: inline volumes of {driver} are not allowed in the namespace {namespace}; use a PersistentVolumeClaim",
                first.field("driver")
            ));
            return Ok(findings);
        }
        if uses_pod_security {
            self.level(peer, namespace, &policy, first, &mut findings).await?;
        }
        for volume in &volumes {
            match &volume.attributes {
                Err(problem) => findings.malformed(format!(
                    "{}: {}",
                    volume.attribute(&problem.attribute),
                    problem.reason
                )),
                Ok(attributes) => {
                    check_size(namespace, rules, volume, attributes, &mut findings);
                }
            }
            if findings.problems.len() > MAX_PROBLEMS {
                break;
            }
        }
        Ok(findings)
    }

    /// The current policy.
    ///
    /// # Errors
    /// The policy is not loaded or invalid.
    pub fn policy(&self) -> Result<Arc<Policy>, Refusal> {
        self.policies.current().map_err(|error| match error {
            PolicyError::Invalid(message) => Refusal::failed(message),
            PolicyError::NotLoaded(message) => Refusal::unavailable(message),
        })
    }

    /// Checks the namespace's Pod Security level against the level that inline volumes of the
    /// driver require.
    async fn level(
        &self,
        peer: Peer,
        namespace: &str,
        policy: &Policy,
        first: &Volume<'_>,
        findings: &mut Findings,
    ) -> Result<(), Refusal> {
        let needed = match policy.volume_profile {
            Some(profile) => profile,
            None => match self.labelled_profile(peer).await? {
                Ok(profile) => profile,
                Err(message) => {
                    findings.forbidden(message);
                    return Ok(());
                }
            },
        };
        if needed == Level::Restricted {
            return Ok(());
        }
        let found = self.look_up(&self.namespaces, namespace, peer).await.map_err(|error| {
            let failure = failure(ROLE, "read Namespaces", &error);
            Refusal::unknown(
                &format!("the Pod Security level of the namespace {namespace}"),
                &failure,
            )
        })?;
        let Some(found) = found else {
            return Err(Refusal::unavailable(format!(
                "the namespace {namespace} does not exist; try again"
            )));
        };
        let field = first.field("driver");
        let problem = |label: &str, level: &str| {
            format!(
                "{field}: inline volumes of {} require a namespace with Pod Security level {}, and {namespace} has {level} (label {label})",
                self.driver,
                needed.name(),
            )
        };
        match labelled(&*found, ENFORCE).transpose() {
            Err(shown) => findings.forbidden(problem(ENFORCE, &shown)),
            Ok(level) => {
                let level = level.unwrap_or(policy.default_pod_security);
                if level < needed {
                    findings.forbidden(problem(ENFORCE, level.name()));
                }
            }
        }
        if let Some(Ok(level)) = labelled(&*found, WARN)
            && level < needed
        {
            findings.warnings.push(problem(WARN, level.name()));
        }
        Ok(())
    }

    /// The object of a watch, or else from the API server, when it is the client's turn.
    async fn look_up<K: Cached>(
        &self,
        objects: &Cache<K>,
        name: &str,
        peer: Peer,
    ) -> kube::Result<Option<Arc<K>>> {
        let key = Key::cluster(name);
        if let Some(Some(found)) = objects.cached(&key) {
            return Ok(Some(found));
        }
        let _turn = self.turns.turn(peer).await?;
        objects.get(&key).await
    }

    /// The level that the CSIDriver's label requires, or a message if the label is invalid.
    async fn labelled_profile(&self, peer: Peer) -> Result<Result<Level, String>, Refusal> {
        let found = self.look_up(&self.drivers, &self.driver, peer).await.map_err(|error| {
            let failure = failure(ROLE, "read CSIDrivers", &error);
            Refusal::unknown("the level that inline volumes need", &failure)
        })?;
        Ok(match found.and_then(|found| labelled(&*found, PROFILE)) {
            None => Ok(Level::Privileged),
            Some(Ok(level)) => Ok(level),
            Some(Err(shown)) => Err(format!(
                "the label {PROFILE} of the CSIDriver {} is {shown}, which is not a Pod Security level; an administrator must correct it",
                self.driver
            )),
        })
    }
}

/// The level in a label; `Err` is the invalid value for a message.
fn labelled(object: &impl ResourceExt, label: &str) -> Option<Result<Level, String>> {
    let value = object.labels().get(label)?;
    Some(Level::named(value).ok_or_else(|| format!("{:?}", truncate(value, MAX_LABEL))))
}

fn check_size(
    namespace: &str,
    rules: Rules,
    volume: &Volume<'_>,
    attributes: &Attributes,
    findings: &mut Findings,
) {
    if let (Some(size), Some(largest)) = (attributes.size, rules.max_size)
        && size > largest
    {
        let (size, largest) = (quantity::format(size), quantity::format(largest));
        findings.forbidden(format!(
            "{}: {size} exceeds the maximum of {largest} in the namespace {namespace}",
            volume.attribute(inline::SIZE)
        ));
    }
}
