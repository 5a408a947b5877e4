//! The ValidatingAdmissionPolicy by which the API server itself verifies that the creator of a
//! request may get its VolumeSnapshots. While it is in force, the webhook does not review access, so
//! that its answers, which any pod can get without `--client-ca`, do not depend on permissions.
//! Reads are not cached: a policy that is deleted is replaced by reviews at once.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding, ValidatingAdmissionPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use serde_json::{Value, json};

use super::ROLE;
use kubernetes::cache::in_time;
use kubernetes::client::failure;
use telemetry::rate_limited_log::RateLimitedLog;

/// Name of the policy and of its binding.
pub const NAME: &str = "csi-loopback-session-access";
/// Time until all API servers apply a change of the policy: they poll their watch every second.
const SETTLED: Duration = Duration::from_secs(30);

/// Reads the policy. Clones share the log.
#[derive(Clone)]
pub struct AccessPolicy {
    policies: Api<ValidatingAdmissionPolicy>,
    bindings: Api<ValidatingAdmissionPolicyBinding>,
    log: Arc<Mutex<RateLimitedLog>>,
}

impl AccessPolicy {
    pub fn new(client: &Client) -> Self {
        let (policies, bindings) = (Api::all(client.clone()), Api::all(client.clone()));
        Self { policies, bindings, log: Arc::default() }
    }

    /// Whether the API server verifies the access of creators. If it does not, the log gives the
    /// reason.
    pub async fn is_in_force(&self) -> bool {
        let problem = self.problem(Timestamp::now()).await;
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        match &problem {
            Some(problem) if log.is_new(problem) => tracing::warn!(
                problem,
                "any client of the webhook can learn who may get a VolumeSnapshot; apply \
                 deploy/session-manager, or set --client-ca"
            ),
            None if log.clear() => tracing::info!("the API server verifies the access of creators"),
            _ => {}
        }
        problem.is_none()
    }

    async fn problem(&self, now: Timestamp) -> Option<String> {
        let read = tokio::try_join!(
            in_time(self.policies.get_opt(NAME)),
            in_time(self.bindings.get_opt(NAME)),
        );
        let (policy, binding) = match read {
            Ok(found) => found,
            Err(error) => {
                return Some(failure(ROLE, "get ValidatingAdmissionPolicies", &error).message);
            }
        };
        let (Some(policy), Some(binding)) = (policy, binding) else {
            return Some(format!("the ValidatingAdmissionPolicy {NAME} or its binding is missing"));
        };
        if policy.spec != Some(expected()) || !binds(&binding) {
            let problem = "or its binding differs from that of deploy/session-manager";
            return Some(format!("the ValidatingAdmissionPolicy {NAME} {problem}"));
        }
        let changed = changed(&policy.metadata).max(changed(&binding.metadata));
        let age = Duration::try_from(now.duration_since(changed)).unwrap_or_default();
        let problem = format!("the ValidatingAdmissionPolicy {NAME} has just been changed");
        (age < SETTLED).then_some(problem)
    }
}

/// The policy of deploy/session-manager, with the API server's defaults. A review of one object
/// costs 350,000 of the 1,000,000 units of an expression, hence the limit of two names.
fn spec() -> Value {
    let snapshots = "authorizer.group('snapshot.storage.k8s.io').resource('volumesnapshots')\
        .namespace(request.namespace)";
    let one = format!("{snapshots}.name(name).check('get').allowed()");
    json!({
        "failurePolicy": "Fail",
        "matchConstraints": {
            "matchPolicy": "Equivalent", "namespaceSelector": {}, "objectSelector": {},
            "resourceRules": [{
                "apiGroups": ["cbt.storage.k8s.io"], "apiVersions": ["v1alpha2"],
                "operations": ["CREATE"], "resources": ["snapshotsessionrequests"],
                "scope": "Namespaced",
            }],
        },
        "variables": [
            { "name": "all", "expression": format!("{snapshots}.check('get').allowed()") },
        ],
        "validations": [{
            "expression": format!(
                "variables.all || size(object.spec.snapshots) <= 2 && \
                 object.spec.snapshots.all(name, {one})"
            ),
            "messageExpression":
                "'spec.snapshots: ' + request.userInfo.username + ' may not get the \
                 volumesnapshots.snapshot.storage.k8s.io of the namespace ' + request.namespace + \
                 '; grant the verb get with a Role there or a ClusterRole (for single names, a \
                 request may have two)'",
            "reason": "Forbidden",
        }],
    })
}

fn expected() -> ValidatingAdmissionPolicySpec {
    serde_json::from_value(spec()).unwrap_or_default()
}

/// Whether the binding applies the policy to all requests.
fn binds(binding: &ValidatingAdmissionPolicyBinding) -> bool {
    binding.spec.as_ref().is_some_and(|spec| {
        let actions = spec.validation_actions.as_deref().unwrap_or_default();
        spec.policy_name.as_deref() == Some(NAME)
            && actions.iter().any(|action| action == "Deny")
            && spec.match_resources.is_none()
            && spec.param_ref.is_none()
    })
}

/// When the object was changed last, as far as it records that.
fn changed(metadata: &ObjectMeta) -> Timestamp {
    let writes = metadata.managed_fields.iter().flatten().filter_map(|fields| fields.time.as_ref());
    let times = writes.chain(&metadata.creation_timestamp).map(|time| time.0);
    times.max().unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kubernetes::fake_api::FakeApi;

    const GROUP: &str = "/apis/admissionregistration.k8s.io/v1";

    /// Stores the policy and the binding, changed last at this time.
    fn put(api: &FakeApi, policy: &Value, binding: &Value, changed: Timestamp) {
        for (plural, spec) in [
            ("validatingadmissionpolicies", policy),
            ("validatingadmissionpolicybindings", binding),
        ] {
            let created = json!("2020-01-01T00:00:00Z");
            let fields = json!([{ "manager": "kubectl", "time": changed.to_string() }]);
            let metadata = json!({
                "name": NAME, "creationTimestamp": created, "managedFields": fields,
            });
            let object = json!({ "metadata": metadata, "spec": spec });
            api.put(&format!("{GROUP}/{plural}/{NAME}"), object);
        }
    }

    #[tokio::test]
    async fn only_the_shipped_policy_replaces_reviews() {
        let api = FakeApi::default();
        let policy = AccessPolicy::new(&api.client());
        assert!(!policy.is_in_force().await, "there is none");
        let binding = json!({ "policyName": NAME, "validationActions": ["Deny", "Audit"] });
        let settled = Timestamp::now() - SETTLED;
        put(&api, &spec(), &binding, settled);
        assert!(policy.is_in_force().await);
        let narrow = json!({ "matchLabels": { "a": "b" } });
        for (path, value) in [
            ("/failurePolicy", json!("Ignore")),
            ("/validations/0/expression", json!("true")),
            ("/matchConstraints/namespaceSelector", narrow.clone()),
            ("/matchConstraints/excludeResourceRules", json!([{ "resources": ["*"] }])),
            ("/matchConditions", json!([{ "name": "a", "expression": "false" }])),
            ("/variables/0/expression", json!("true")),
        ] {
            let mut other = spec();
            let (parent, field) = path.rsplit_once('/').unwrap();
            other.pointer_mut(parent).unwrap()[field] = value;
            put(&api, &other, &binding, settled);
            assert!(!policy.is_in_force().await, "{path}");
        }
        for other in [
            json!({ "policyName": NAME, "validationActions": ["Warn"] }),
            json!({ "policyName": "another", "validationActions": ["Deny"] }),
            json!({
                "policyName": NAME, "validationActions": ["Deny"],
                "matchResources": { "namespaceSelector": narrow },
            }),
        ] {
            put(&api, &spec(), &other, settled);
            assert!(!policy.is_in_force().await, "{other}");
        }
        put(&api, &spec(), &binding, settled);
        assert!(policy.is_in_force().await);
        api.fail();
        assert!(!policy.is_in_force().await, "it cannot be read");
    }

    #[tokio::test]
    async fn a_policy_that_servers_may_not_apply_yet_counts_not() {
        let api = FakeApi::default();
        let policy = AccessPolicy::new(&api.client());
        let binding = json!({ "policyName": NAME, "validationActions": ["Deny"] });
        for (age, in_force) in [(0, false), (20, false), (31, true)] {
            put(&api, &spec(), &binding, Timestamp::now() - Duration::from_secs(age));
            assert_eq!(policy.is_in_force().await, in_force, "{age} s");
        }
    }
}
