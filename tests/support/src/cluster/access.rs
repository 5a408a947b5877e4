//! Access control: ServiceAccounts, rules, kubeconfigs, and valid and invalid tokens.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenReview, TokenReviewStatus};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding};
use kube::api::PostParams;
use serde_json::{Value, json};

use super::Cluster;
use crate::{REPOSITORY, owned, path};

/// The shortest token lifetime of the API server.
pub const SHORTEST: Duration = Duration::from_secs(600);

/// A ServiceAccount.
#[derive(Debug, Clone)]
pub struct Account {
    pub namespace: String,
    pub name: String,
}

impl Account {
    /// Its name as a user.
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.name)
    }
}

/// A rule for resources of an API group; `""` is the core group.
pub fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> PolicyRule {
    PolicyRule {
        api_groups: Some(owned(&[group])),
        resources: Some(owned(resources)),
        verbs: owned(verbs),
        ..PolicyRule::default()
    }
}

/// The rules of the only ClusterRole in a file of this repository.
pub fn shipped_rules(file: &str) -> Vec<PolicyRule> {
    let mut roles = shipped(file).into_iter().filter(|object| object["kind"] == "ClusterRole");
    let role = roles.next().expect(file);
    assert!(roles.next().is_none(), "{file}");
    serde_json::from_value(role["rules"].clone()).unwrap()
}

/// The objects of a file of this repository.
pub fn shipped(file: &str) -> Vec<Value> {
    let text = fs::read_to_string(Path::new(REPOSITORY).join(file)).unwrap();
    text.split("\n---\n").map(|one| serde_saphyr::from_str(one).unwrap()).collect()
}

/// The rights that the sidecar needs (KEP-3314).
pub fn sidecar_rules() -> Vec<PolicyRule> {
    vec![
        rule("authentication.k8s.io", &["tokenreviews"], &["create"]),
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
        rule(
            "snapshot.storage.k8s.io",
            &["volumesnapshots", "volumesnapshotcontents", "volumesnapshotclasses"],
            &["get", "list", "watch"],
        ),
        rule("cbt.storage.k8s.io", &["snapshotmetadataservices"], &["get", "list", "watch"]),
        rule("", &["secrets"], &["get"]),
    ]
}

/// The rights that a backup application needs: to get the service and its snapshots, and to request
/// its token.
pub fn backup_rules() -> Vec<PolicyRule> {
    vec![
        rule(
            "snapshot.storage.k8s.io",
            &["volumesnapshots", "volumesnapshotcontents"],
            &["get", "list", "watch"],
        ),
        rule("cbt.storage.k8s.io", &["snapshotmetadataservices"], &["get", "list"]),
        rule("", &["serviceaccounts/token"], &["create"]),
    ]
}

impl Cluster {
    /// Creates a ServiceAccount without rights.
    pub fn account(&self, namespace: &str, name: &str) -> Account {
        let object = json!({ "metadata": { "name": name } });
        self.create(&self.api_in::<ServiceAccount>(namespace), object);
        Account { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    /// Grants these rules in the cluster (ClusterRole), and waits until they are in effect. Returns
    /// the name of the role and the binding.
    pub fn grant(&self, account: &Account, rules: &[PolicyRule]) -> String {
        let name = self.unique(&account.name);
        let metadata = json!({ "name": name });
        self.create(&self.api::<ClusterRole>(), json!({ "metadata": metadata, "rules": rules }));
        self.create(
            &self.api::<ClusterRoleBinding>(),
            binding(&metadata, "ClusterRole", &name, account),
        );
        self.wait_until_allowed(account, None, rules);
        name
    }

    /// Grants these rules in a namespace (Role), and waits until they are in effect. Returns the
    /// name of the role and the binding.
    pub fn grant_in(&self, namespace: &str, account: &Account, rules: &[PolicyRule]) -> String {
        let name = self.unique(&account.name);
        let metadata = json!({ "name": name });
        self.create(
            &self.api_in::<Role>(namespace),
            json!({ "metadata": metadata, "rules": rules }),
        );
        self.create(
            &self.api_in::<RoleBinding>(namespace),
            binding(&metadata, "Role", &name, account),
        );
        self.wait_until_allowed(account, Some(namespace), rules);
        name
    }

    /// Grants the rules of a file of this repository: those of Roles in this namespace.
    pub fn grant_shipped(&self, namespace: &str, account: &Account, file: &str) {
        for object in shipped(file) {
            let rules = || serde_json::from_value::<Vec<_>>(object["rules"].clone()).unwrap();
            match object["kind"].as_str() {
                Some("ClusterRole") => drop(self.grant(account, &rules())),
                Some("Role") => drop(self.grant_in(namespace, account, &rules())),
                _ => {}
            }
        }
    }

    /// The API server applies changes of RBAC objects after a moment.
    fn wait_until_allowed(&self, account: &Account, namespace: Option<&str>, rules: &[PolicyRule]) {
        for rule in rules {
            let word = |list: &Option<Vec<String>>| list.as_ref().unwrap()[0].clone();
            let (group, resource) = (word(&rule.api_groups), word(&rule.resources));
            let name = rule.resource_names.as_ref().map(|names| names[0].as_str());
            let verb = &rule.verbs[0];
            self.wait_for(&format!("the right to {verb} {resource}"), || {
                self.allowed_for(name, account, namespace, verb, &group, &resource).then_some(())
            });
        }
    }

    /// Whether it has this right in the namespace or the cluster (SubjectAccessReview). `resource`
    /// can be `resource/subresource`.
    pub fn allowed(
        &self,
        account: &Account,
        namespace: Option<&str>,
        verb: &str,
        group: &str,
        resource: &str,
    ) -> bool {
        self.allowed_for(None, account, namespace, verb, group, resource)
    }

    /// Whether it has this right for an object with this name.
    fn allowed_for(
        &self,
        name: Option<&str>,
        account: &Account,
        namespace: Option<&str>,
        verb: &str,
        group: &str,
        resource: &str,
    ) -> bool {
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let review = self.create(
            &self.api::<SubjectAccessReview>(),
            json!({ "metadata": {}, "spec": {
                "user": account.user(),
                "resourceAttributes": {
                    "namespace": namespace, "verb": verb, "group": group, "resource": resource,
                    "subresource": subresource, "name": name,
                },
            }}),
        );
        review.status.unwrap().allowed
    }

    /// A token of the account (TokenRequest) for this audience; None: the API server.
    pub fn token(&self, account: &Account, audience: Option<&str>) -> String {
        self.token_for(account, audience, SHORTEST)
    }

    /// A token with this lifetime, at least [`SHORTEST`].
    pub fn token_for(
        &self,
        account: &Account,
        audience: Option<&str>,
        validity: Duration,
    ) -> String {
        let audiences: Vec<&str> = audience.into_iter().collect();
        let request: TokenRequest = serde_json::from_value(json!({ "metadata": {}, "spec": {
            "audiences": audiences, "expirationSeconds": validity.as_secs(),
        }}))
        .unwrap();
        let accounts = self.api_in::<ServiceAccount>(&account.namespace);
        let post = PostParams::default();
        let response = accounts.create_token_request(&account.name, &post, &request);
        self.block_on(response).unwrap().status.unwrap().token
    }

    /// A token like [`Cluster::token`], but expired an hour ago.
    pub fn expired_token(&self, account: &Account, audience: Option<&str>) -> String {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        self.resigned(&self.token(account, audience), |claims| {
            claims["iat"] = (now - 7200).into();
            claims["nbf"] = (now - 7200).into();
            claims["exp"] = (now - 3600).into();
        })
    }

    /// The token with changed claims, signed with the API server's key.
    pub fn resigned(&self, token: &str, change: impl FnOnce(&mut Value)) -> String {
        let mut parts = token.split('.');
        let (header, claims) = (parts.next().unwrap(), parts.next().unwrap());
        let mut claims: Value =
            serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).unwrap()).unwrap();
        change(&mut claims);
        let signed = format!("{header}.{}", URL_SAFE_NO_PAD.encode(claims.to_string()));
        let (input, key) = (self.write("claims", &signed), self.directory().join("pki/sa.key"));
        let output = Command::new("openssl")
            .args(["dgst", "-sha256", "-sign", path(&key), path(&input)])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(&output.stdout))
    }

    /// The API server's TokenReview of a token.
    pub fn review(&self, token: &str, audience: &str) -> TokenReviewStatus {
        let spec = json!({ "token": token, "audiences": [audience] });
        let object = json!({ "metadata": {}, "spec": spec });
        self.create(&self.api::<TokenReview>(), object).status.unwrap()
    }

    /// A kubeconfig of this account, valid for an hour.
    pub fn kubeconfig_of(&self, account: &Account) -> PathBuf {
        self.kubeconfig_at(&self.server(), account)
    }

    /// A kubeconfig with another address of the API server: `https://127.0.0.1:PORT`.
    pub fn kubeconfig_at(&self, server: &str, account: &Account) -> PathBuf {
        let token = self.token_for(account, None, Duration::from_secs(3600));
        let authority = fs::read(self.directory().join("pki/ca.crt")).unwrap();
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "local", "cluster": {
                "server": server,
                "certificate-authority-data": k8s_openapi::ByteString(authority),
            }}],
            "users": [{ "name": "account", "user": { "token": token } }],
            "contexts": [{ "name": "local", "context": { "cluster": "local", "user": "account" } }],
            "current-context": "local",
        });
        // JSON is YAML.
        self.write("kubeconfig", &config.to_string())
    }

    /// A client of this account.
    pub fn client_as(&self, account: &Account) -> kube::Client {
        self.client_of(Path::new(&self.kubeconfig_of(account)))
    }
}

fn binding(metadata: &Value, kind: &str, role: &str, account: &Account) -> Value {
    json!({
        "metadata": metadata,
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role },
        "subjects": [{
            "kind": "ServiceAccount", "namespace": account.namespace, "name": account.name,
        }],
    })
}
