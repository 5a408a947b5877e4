//! Rights of each account.

use std::collections::BTreeSet;
use support::cluster::shared;

use csi_loopback::kubernetes::metadata_service::SnapshotMetadataService;
use k8s_openapi::api::authorization::v1::{SelfSubjectRulesReview, SubjectAccessReview};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::sessions::{MANAGERS, apply_sessions, manager, session_backup};
use super::{
    DRIVER, NAMESPACE, account, apply, apply_base, apply_fresh_base, deploy, overlay, shown,
    sidecar,
};
use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::programs::stdout_of;

/// The account's rights in the namespace (SelfSubjectRulesReview): "GROUP/RESOURCE[NAME] VERB",
/// with an empty group for core resources.
fn rights(cluster: &Cluster, account: &Account, namespace: &str) -> BTreeSet<String> {
    let reviews: Api<SelfSubjectRulesReview> = Api::all(cluster.client_as(account));
    let review = serde_json::from_value(json!({ "spec": { "namespace": namespace } })).unwrap();
    let answer = cluster.block_on(reviews.create(&PostParams::default(), &review)).unwrap();
    let status = answer.status.unwrap();
    assert!(!status.incomplete, "{:?}", status.evaluation_error);
    let mut found = BTreeSet::new();
    for rule in status.resource_rules {
        let names = rule.resource_names.unwrap_or_default();
        let names = if names.is_empty() { String::new() } else { format!("[{}]", names.join(",")) };
        for group in rule.api_groups.unwrap() {
            for resource in rule.resources.as_ref().unwrap() {
                let words = rule.verbs.iter();
                found.extend(words.map(|verb| format!("{group}/{resource}{names} {verb}")));
            }
        }
    }
    found
}

/// "GROUP/RESOURCE VERB VERB …" as in [`rights`].
pub fn expand(lines: &[&str]) -> BTreeSet<String> {
    let each = lines.iter().flat_map(|line| {
        let mut words = line.split(' ');
        let what = words.next().unwrap();
        words.map(move |verb| format!("{what} {verb}"))
    });
    each.collect()
}

pub const SIDECAR: &[&str] = &[
    "authentication.k8s.io/tokenreviews create",
    "authorization.k8s.io/subjectaccessreviews create",
    "cbt.storage.k8s.io/snapshotmetadataservices get list watch",
    "cbt.storage.k8s.io/snapshotmetadataservices[loopback.csi.local] create patch",
    "cbt.storage.k8s.io/snapshotserviceconfigurations get list watch",
    "cbt.storage.k8s.io/snapshotserviceconfigurations[loopback.csi.local] create patch",
    "snapshot.storage.k8s.io/volumesnapshotclasses get list watch",
    "snapshot.storage.k8s.io/volumesnapshotcontents get list watch",
    "snapshot.storage.k8s.io/volumesnapshots get list watch",
];

pub const SIDECAR_AT_HOME: &[&str] = &[
    "/secrets[csi-loopback-metadata-tls] get update",
    "cbt.storage.k8s.io/snapshotsessiondata get list watch delete",
];

const MANAGER: &[&str] = &[
    "admissionregistration.k8s.io/validatingadmissionpolicies[csi-loopback-session-access] get",
    "admissionregistration.k8s.io/validatingadmissionpolicybindings[csi-loopback-session-access] get",
    "admissionregistration.k8s.io/validatingwebhookconfigurations[csi-loopback-session-manager] get list watch patch",
    "authorization.k8s.io/subjectaccessreviews create",
    "cbt.storage.k8s.io/snapshotserviceconfigurations get list watch",
    "cbt.storage.k8s.io/snapshotsessiondata get list watch create delete",
    "cbt.storage.k8s.io/snapshotsessionrequests get list watch patch delete",
    "cbt.storage.k8s.io/snapshotsessionrequests/status patch",
    "events.k8s.io/events create patch",
    "snapshot.storage.k8s.io/volumesnapshotcontents get list watch",
    "snapshot.storage.k8s.io/volumesnapshots get list watch",
];

const MANAGER_AT_HOME: &[&str] = &[
    "/configmaps[csi-loopback-session-manager] get list watch",
    "/secrets[csi-loopback-session-manager-tls] get update",
    "coordination.k8s.io/leases[csi-loopback-session-manager] get update",
];

pub const CONTROLLER: &[&str] = &[
    "/events create patch update",
    "/nodes get list watch",
    "/persistentvolumeclaims get list watch update",
    "/persistentvolumeclaims/status patch",
    "/persistentvolumes get list watch create patch delete",
    "groupsnapshot.storage.k8s.io/volumegroupsnapshotclasses get list watch",
    "groupsnapshot.storage.k8s.io/volumegroupsnapshotcontents get list watch update patch",
    "groupsnapshot.storage.k8s.io/volumegroupsnapshotcontents/status update patch",
    "snapshot.storage.k8s.io/volumesnapshotclasses get list watch",
    "snapshot.storage.k8s.io/volumesnapshotcontents get list watch update patch",
    "snapshot.storage.k8s.io/volumesnapshotcontents/status update patch",
    "snapshot.storage.k8s.io/volumesnapshots get list watch update",
    "storage.k8s.io/csinodes get list watch",
    "storage.k8s.io/storageclasses get list watch",
    "storage.k8s.io/volumeattributesclasses get list watch",
];

const BACKUP: &[&str] = &[
    "cbt.storage.k8s.io/snapshotmetadataservices get list",
    "snapshot.storage.k8s.io/volumesnapshotcontents get",
];

const BACKUP_OF_DEMO: &[&str] = &["snapshot.storage.k8s.io/volumesnapshots get"];

const SESSION_BACKUP: &[&str] = &["cbt.storage.k8s.io/snapshotserviceconfigurations get list"];

const SESSION_BACKUP_OF_DEMO: &[&str] = &[
    "cbt.storage.k8s.io/snapshotsessionrequests create get list watch delete",
    "snapshot.storage.k8s.io/volumesnapshots get",
];

#[test]
fn each_account_has_exactly_the_rights_of_the_list() {
    let Some(cluster) = shared() else { return };
    apply_base(cluster);
    apply_sessions(cluster);
    stdout_of(apply(cluster, &deploy("examples/backup-app")));
    let controller = account(NAMESPACE, "csi-loopback-controller");
    let backup = account("backup-app", "backup-app");
    let table: &[Rights] = &[
        (&sidecar(), NAMESPACE, SIDECAR, SIDECAR_AT_HOME),
        (&sidecar(), "default", SIDECAR, &[]),
        (&sidecar(), MANAGERS, SIDECAR, &[]),
        (&controller, NAMESPACE, CONTROLLER, &[]),
        (&controller, "default", CONTROLLER, &[]),
        (&backup, "backup-demo", BACKUP, BACKUP_OF_DEMO),
        (&backup, "backup-app", BACKUP, &[]),
        (&backup, NAMESPACE, BACKUP, &[]),
        (&manager(), MANAGERS, MANAGER, MANAGER_AT_HOME),
        (&manager(), NAMESPACE, MANAGER, &[]),
        (&manager(), "backup-demo", MANAGER, &[]),
        (&manager(), "kube-system", MANAGER, &[]),
        (&session_backup(), "backup-demo", SESSION_BACKUP, SESSION_BACKUP_OF_DEMO),
        (&session_backup(), "backup-app-session", SESSION_BACKUP, &[]),
    ];
    exactly(cluster, table);
}

/// An account, its rights in all namespaces, and its additional rights in one namespace.
pub type Rights<'a> = (&'a Account, &'a str, &'a [&'a str], &'a [&'a str]);

/// Asserts that each account has exactly these rights, and those of every account.
pub fn exactly(cluster: &Cluster, table: &[Rights]) {
    let unprivileged = cluster.account(&cluster.namespace("deploy"), "unprivileged");
    let common = rights(cluster, &unprivileged, "default");
    for (who, namespace, everywhere, there) in table {
        let expected = &expand(everywhere) | &expand(there);
        let what = format!("{} in {namespace}", who.user());
        cluster.wait_for(&format!("the rights of {what}"), || {
            (rights(cluster, who, namespace).len() == common.len() + expected.len()).then_some(())
        });
        let found = rights(cluster, who, namespace);
        assert_eq!(&found - &common, expected, "{what}");
    }
}

/// Whether the account has a right: namespace, verb, group, resource such as "secrets" or
/// "pods/exec", name.
pub type Right<'a> = (bool, &'a str, &'a str, &'a str, &'a str, &'a str);

/// Asserts that the account has the rights marked so and lacks the others. It has the first one.
pub fn holds(cluster: &Cluster, who: &Account, table: &[Right]) {
    let (_, namespace, verb, group, resource, name) = table[0];
    cluster.wait_for(&format!("the rights of {}", who.user()), || {
        may(cluster, who, namespace, verb, group, resource, name).then_some(())
    });
    for (allowed, namespace, verb, group, resource, name) in table {
        let found = may(cluster, who, namespace, verb, group, resource, name);
        let what = format!("{}: {verb} {group}/{resource} {name:?} in {namespace:?}", who.user());
        assert_eq!(found, *allowed, "{what}");
    }
}

/// Whether the account has the right (SubjectAccessReview).
fn may(
    cluster: &Cluster,
    who: &Account,
    namespace: &str,
    verb: &str,
    group: &str,
    resource: &str,
    name: &str,
) -> bool {
    let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
    let review = json!({ "metadata": {}, "spec": {
        "user": who.user(),
        "groups": ["system:serviceaccounts", format!("system:serviceaccounts:{}", who.namespace), "system:authenticated"],
        "resourceAttributes": {
            "namespace": namespace, "verb": verb, "group": group, "resource": resource,
            "subresource": subresource, "name": name,
        },
    }});
    cluster.create(&cluster.api::<SubjectAccessReview>(), review).status.unwrap().allowed
}

fn service(name: &str) -> Value {
    json!({
        "apiVersion": "cbt.storage.k8s.io/v1beta1", "kind": "SnapshotMetadataService",
        "metadata": { "name": name },
        "spec": { "address": "metadata.csi.svc:6443", "audience": "backup", "caCert": "YQ==" },
    })
}

#[test]
fn an_apply_keeps_what_the_sidecar_has_written() {
    let Some(cluster) = shared() else { return };
    apply_fresh_base(cluster);
    let client = cluster.client_as(&sidecar());
    let write = |name: &str, client: &Client| {
        let api: Api<SnapshotMetadataService> = Api::all(client.clone());
        let object = service(name);
        let params = PatchParams::apply("csi-loopback");
        cluster.block_on(api.patch(name, &params, &Patch::Apply(&object))).map(|_| ())
    };
    cluster.wait_for("the sidecar's rights", || write(DRIVER, &client).is_ok().then_some(()));
    let refused = write("other.example", &client).unwrap_err().to_string();
    assert!(refused.contains("forbidden"), "{refused}");

    let secrets: Api<Secret> = Api::namespaced(client, NAMESPACE);
    let name = "csi-loopback-metadata-tls";
    let mut own = cluster.block_on(secrets.get(name)).unwrap();
    own.string_data = Some([("tls.crt".to_owned(), "kept".to_owned())].into());
    cluster.block_on(secrets.replace(name, &PostParams::default(), &own)).unwrap();
    // The version that the write replaced.
    assert!(cluster.block_on(secrets.replace(name, &PostParams::default(), &own)).is_err());
    apply_base(cluster);
    let data = cluster.block_on(secrets.get(name)).unwrap().data.unwrap();
    assert_eq!(data["tls.crt"].0, b"kept");
}

#[test]
fn only_snapshotter_and_sidecar_get_a_snapshotter_secret() {
    let Some(cluster) = shared() else { return };
    stdout_of(apply(cluster, &overlay(cluster, "base", "snapshotter-secret")));

    let secret = "csi-loopback-snapshotter";
    for name in ["csi-loopback-metadata", "csi-loopback-controller"] {
        let who = account(NAMESPACE, name);
        cluster.wait_for("the right to the secret", || {
            may(cluster, &who, NAMESPACE, "get", "", "secrets", secret).then_some(())
        });
        assert!(!may(cluster, &who, NAMESPACE, "get", "", "secrets", "another"));
        assert!(!may(cluster, &who, NAMESPACE, "list", "", "secrets", ""));
        assert!(!may(cluster, &who, "default", "get", "", "secrets", secret));
    }
    let class = shown(cluster, &["volumesnapshotclass", "csi-loopback"]);
    let key =
        |name: &str| &class["parameters"][format!("csi.storage.k8s.io/snapshotter-secret-{name}")];
    assert_eq!((key("name"), key("namespace")), (&json!(secret), &json!(NAMESPACE)));
    // Other tests expect the base without it. (Deletion of a namespace never completes here, so its
    // objects are deleted singly.)
    for kind in ["rolebinding", "role"] {
        let arguments = ["delete", "-n", NAMESPACE, kind, "csi-loopback-snapshotter-secret"];
        stdout_of(cluster.kubectl(&arguments));
    }
    apply_base(cluster);
}
