//! Whether the inline volumes of a pod are what the policy of its namespace allows. Everything that is wrong is told at once, so
//! that nobody mends a pod piece by piece.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, PodSpec};
use k8s_openapi::api::storage::v1::CSIDriver;
use kube::Client;
use kube::ResourceExt;
use kube::runtime::watcher;

use super::ROLE;
use super::args::Level;
use super::claims::Claims;
use super::policy::{Policies, Policy, Rules, Unknown};
use super::volumes::{self, Volume};
use crate::grpc::cut;
use crate::inline::{self, Attributes};
use crate::kubernetes::admission::Refusal;
use crate::kubernetes::cache::{self, Cache, Key};
use crate::kubernetes::client::failure;
use crate::quantity;
use crate::telemetry::shutdown::Shutdown;

/// Of a namespace: the level that Pod Security holds its pods to, and the one that it warns of.
const ENFORCE: &str = "pod-security.kubernetes.io/enforce";
const WARN: &str = "pod-security.kubernetes.io/warn";
/// Of a CSIDriver object: the level that a namespace needs for inline volumes of the driver. OpenShift reads it too.
pub const PROFILE: &str = "security.openshift.io/csi-ephemeral-volume-profile";
/// Problems that are told; what else is wrong with a pod is not looked for.
const TOLD: usize = 8;
/// Bytes of a label that are repeated.
const SHOWN: usize = 63;

/// What is wrong with a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Nowhere would it be right.
    is_malformed: bool,
    pub message: String,
}

/// What was found of a pod.
#[derive(Debug, Default)]
pub struct Findings {
    pub problems: Vec<Problem>,
    pub warnings: Vec<String>,
}

/// Cheap to clone.
#[derive(Clone)]
pub struct Judge {
    pub driver: Arc<str>,
    pub claims: Claims,
    policies: Policies,
    namespaces: Cache<Namespace>,
    drivers: Cache<CSIDriver>,
}

impl Findings {
    pub fn malformed(&mut self, message: String) {
        self.problems.push(Problem { is_malformed: true, message });
    }

    pub fn forbidden(&mut self, message: String) {
        self.problems.push(Problem { is_malformed: false, message });
    }

    /// All of it for whoever sent the pod.
    pub fn refusal(&self) -> Option<Refusal> {
        let told = self.problems.iter().take(TOLD).map(|problem| problem.message.as_str());
        let mut message = told.collect::<Vec<_>>().join("; ");
        if self.problems.len() > TOLD {
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

impl Judge {
    /// Begins to watch what has to be known.
    pub fn start(client: &Client, driver: &str, policies: Policies, shutdown: &Shutdown) -> Self {
        let one = watcher::Config::default().fields(&format!("metadata.name={driver}"));
        Self {
            driver: driver.into(),
            claims: Claims::new(client),
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

    /// What is wrong with the volumes themselves.
    ///
    /// # Errors
    /// What has to be known for that is not.
    pub async fn volumes(&self, namespace: &str, spec: &PodSpec) -> Result<Findings, Refusal> {
        let mut findings = Findings::default();
        let volumes = volumes::of(spec, &self.driver);
        let Some(first) = volumes.first() else { return Ok(findings) };
        let policy = self.policy()?;
        let (rules, is_judged_by_level) = policy.of(namespace);
        if !rules.allowed {
            let driver = &self.driver;
            findings.forbidden(format!(
                "{}: inline volumes of {driver} are not allowed in the namespace {namespace}; use a PersistentVolumeClaim",
                first.field("driver")
            ));
            return Ok(findings);
        }
        if is_judged_by_level {
            self.level(namespace, &policy, first, &mut findings).await?;
        }
        for volume in &volumes {
            match &volume.attributes {
                Err(problem) => findings.malformed(format!(
                    "{}: {}",
                    volume.attribute(&problem.attribute),
                    problem.reason
                )),
                Ok(said) => check_size(namespace, rules, volume, said, &mut findings),
            }
            if findings.problems.len() > TOLD {
                break;
            }
        }
        Ok(findings)
    }

    /// What holds now.
    ///
    /// # Errors
    /// That is not known.
    pub fn policy(&self) -> Result<Arc<Policy>, Refusal> {
        self.policies.current().map_err(|unknown| match unknown {
            Unknown::Nonsense(message) => Refusal::failed(message),
            Unknown::Unheard(message) => Refusal::unavailable(message),
        })
    }

    /// Pod Security as a shorthand: the namespace has to allow at least what the driver's inline volumes need.
    async fn level(
        &self,
        namespace: &str,
        policy: &Policy,
        first: &Volume<'_>,
        findings: &mut Findings,
    ) -> Result<(), Refusal> {
        let needed = match policy.volume_profile {
            Some(profile) => profile,
            None => match self.labelled_profile().await? {
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
        let key = Key::cluster(namespace);
        let found = self.namespaces.get(&key).await.map_err(|error| {
            let failure = failure(ROLE, "read Namespaces", &error);
            Refusal::unknown(
                &format!("the Pod Security level of the namespace {namespace}"),
                &failure,
            )
        })?;
        let Some(found) = found else {
            return Err(Refusal::unavailable(format!(
                "there is no namespace {namespace}; try again"
            )));
        };
        let field = first.field("driver");
        let told = |label: &str, level: &str| {
            format!(
                "{field}: inline volumes of {} need a namespace of the Pod Security level {}, and {namespace} has {level} (label {label})",
                self.driver,
                needed.name(),
            )
        };
        match labelled(&*found, ENFORCE).transpose() {
            Err(shown) => findings.forbidden(told(ENFORCE, &shown)),
            Ok(level) => {
                let level = level.unwrap_or(policy.default_pod_security);
                if level < needed {
                    findings.forbidden(told(ENFORCE, level.name()));
                }
            }
        }
        if let Some(Ok(level)) = labelled(&*found, WARN)
            && level < needed
        {
            findings.warnings.push(told(WARN, level.name()));
        }
        Ok(())
    }

    /// What the CSIDriver object says that a namespace needs, or that what it says means nothing.
    async fn labelled_profile(&self) -> Result<Result<Level, String>, Refusal> {
        let found = self.drivers.get(&Key::cluster(&self.driver)).await.map_err(|error| {
            let failure = failure(ROLE, "read CSIDrivers", &error);
            Refusal::unknown("the level that inline volumes need", &failure)
        })?;
        Ok(match found.and_then(|found| labelled(&*found, PROFILE)) {
            None => Ok(Level::Privileged),
            Some(Ok(level)) => Ok(level),
            Some(Err(shown)) => Err(format!(
                "the label {PROFILE} of the CSIDriver {} is {shown}, which is no Pod Security level; an administrator has to mend it",
                self.driver
            )),
        })
    }
}

/// The level that a label says; else the label, for people.
fn labelled(object: &impl ResourceExt, label: &str) -> Option<Result<Level, String>> {
    let said = object.labels().get(label)?;
    Some(Level::named(said).ok_or_else(|| format!("{:?}", cut(said, SHOWN))))
}

fn check_size(
    namespace: &str,
    rules: Rules,
    volume: &Volume<'_>,
    said: &Attributes,
    findings: &mut Findings,
) {
    if let (Some(size), Some(largest)) = (said.size, rules.max_size)
        && size > largest
    {
        let (size, largest) = (quantity::format(size), quantity::format(largest));
        findings.forbidden(format!(
            "{}: {size} is more than the {largest} that are allowed in the namespace {namespace}",
            volume.attribute(inline::SIZE)
        ));
    }
}
