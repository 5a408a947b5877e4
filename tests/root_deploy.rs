//! deploy/ as the API server takes it: every manifest applies, twice with nothing changed; the definition of
//! SnapshotMetadataService takes what it should and nothing else; and who runs there has the rights that its
//! calls need and no more.

#[path = "support/cluster/mod.rs"]
mod cluster;
mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use cluster::Cluster;
use cluster::access::Account;
use cluster::programs::said;
use csi_loopback::kubernetes::metadata_service::SnapshotMetadataService;
use k8s_openapi::api::authorization::v1::{SelfSubjectRulesReview, SubjectAccessReview};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use support::path;

/// Where it is installed, and the name of the driver.
const NAMESPACE: &str = "csi-loopback";
const DRIVER: &str = "loopback.csi.local";

/// Directories for `kubectl apply -k`.
const DIRECTORIES: [&str; 4] = ["base", "overlays/kind", "examples/volume", "examples/backup-app"];

fn main() -> ExitCode {
    cluster::suite::run(&[
        ("every_manifest_applies_and_a_second_time_changes_nothing", every_manifest_applies),
        ("the_definition_takes_good_services_and_refuses_others", the_definition_decides),
        ("each_account_has_the_rights_of_this_list_and_no_more", exact_rights),
        ("what_would_give_the_sidecar_more_rights_is_refused_to_it", refused_to_the_sidecar),
        ("the_sidecar_writes_its_own_service_and_secret_and_an_apply_keeps_them", its_own_objects),
        ("a_snapshotter_secret_is_for_those_who_need_it", snapshotter_secret),
        ("all_but_the_driver_run_confined", confined),
        ("only_the_sidecar_of_the_drivers_pod_has_a_token", one_token),
        ("no_image_names_a_registry", plain_images),
        ("the_arguments_of_the_manifests_are_known_to_the_binary", known_arguments),
    ])
}

fn deploy(directory: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(directory)
}

fn apply(cluster: &Cluster, directory: &Path) -> Output {
    cluster.kubectl(&["apply", "--server-side", "--validate=strict", "-k", path(directory)])
}

fn apply_base(cluster: &Cluster) {
    said(apply(cluster, &deploy("base")));
}

/// The objects of a directory, as the API server has them.
fn objects(cluster: &Cluster, directory: &str) -> Vec<Value> {
    let list = said(cluster.kubectl(&["get", "-o", "json", "-k", path(&deploy(directory))]));
    let mut list: Value = serde_json::from_str(&list).unwrap();
    serde_json::from_value(list["items"].take()).unwrap()
}

fn every_manifest_applies(cluster: &Cluster) {
    for directory in DIRECTORIES {
        let applied = || {
            said(apply(cluster, &deploy(directory)));
            let mut found = objects(cluster, directory);
            for object in &mut found {
                // It counts writes, also those that change nothing but who owns a field.
                object["metadata"].as_object_mut().unwrap().remove("resourceVersion");
            }
            found
        };
        let first = applied();
        assert!(!first.is_empty(), "{directory}");
        assert_eq!(applied(), first, "{directory}");
    }
}

// --- The definition -------------------------------------------------------------------------------

fn service(name: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut object = json!({
        "apiVersion": "cbt.storage.k8s.io/v1beta1", "kind": "SnapshotMetadataService",
        "metadata": { "name": name },
        "spec": { "address": "metadata.csi.svc:6443", "audience": "backup", "caCert": "YQ==" },
    });
    change(&mut object["spec"]);
    object
}

/// What the API server says to a SnapshotMetadataService; nothing is kept.
fn verdict(cluster: &Cluster, change: impl FnOnce(&mut Value)) -> Result<(), String> {
    let object = service("d.example", change);
    let api: Api<kube::api::DynamicObject> = Api::all_with(
        cluster.client(),
        &kube::api::ApiResource::erase::<SnapshotMetadataService>(&()),
    );
    let params = PatchParams { dry_run: true, ..PatchParams::apply("test").validation_strict() };
    let answer = cluster.block_on(api.patch("d.example", &params, &Patch::Apply(&object)));
    answer.map(|_| ()).map_err(|error| error.to_string())
}

fn the_definition_decides(cluster: &Cluster) {
    let long_host = "h".repeat(253);
    for address in [
        // As in the examples of the released sidecar.
        "external-snapshot-metadata.csi-driver:6443",
        "csi-snapshot-metadata.default:6443",
        "host:1",
        "10.0.0.1:65535",
        "[fd00::1]:6443",
        &format!("{long_host}:60000"),
    ] {
        assert_eq!(verdict(cluster, |spec| spec["address"] = json!(address)), Ok(()), "{address}");
    }
    for address in [
        "",
        "host",
        "host:",
        ":6443",
        "host:0",
        "host:65536",
        "host:99999",
        "host:06443",
        "host:six",
        "https://host:6443",
        "host:6443/path",
        "ho st:6443",
        "fd00::1:6443",
        "[]:1",
        "host:6443\n",
        &format!("{long_host}hhhh:60000"),
    ] {
        let refused = verdict(cluster, |spec| spec["address"] = json!(address));
        assert!(refused.is_err_and(|why| why.contains("spec.address")), "{address:?}");
    }
    let told = verdict(cluster, |spec| spec["address"] = json!("https://host:6443")).unwrap_err();
    assert!(told.contains("must be host:port with no scheme"), "{told}");

    for (field, good, bad) in [
        ("audience", json!("x".repeat(1024)), json!("")),
        ("audience", json!("d1f84679-cf5b-42f0-bad7-5567e86e268b"), json!("x".repeat(1025))),
        ("caCert", json!("dGhpcyBpcyB0ZXh0IGNhIGNlcnQK"), json!("")),
        ("caCert", json!("A".repeat(400_000)), json!("A".repeat(524_292))),
        ("caCert", json!("YQ=="), json!("no base64!")),
        ("requireBaseSnapshotForDelta", json!(false), json!("no")),
    ] {
        assert_eq!(verdict(cluster, |spec| spec[field] = good.clone()), Ok(()), "{field}");
        let refused = verdict(cluster, |spec| spec[field] = bad.clone());
        assert!(refused.is_err_and(|why| why.contains(field)), "{field}: {bad}");
    }
    for field in ["address", "audience", "caCert"] {
        let refused = verdict(cluster, |spec| drop(spec.as_object_mut().unwrap().remove(field)));
        assert!(refused.is_err_and(|why| why.contains(field)), "{field}");
    }
    assert!(verdict(cluster, |spec| spec["adress"] = json!("a misspelt field")).is_err());

    let definition = said(cluster.kubectl(&["get", "crd", "snapshotmetadataservices.cbt.storage.k8s.io",
        "-o", "jsonpath={.spec.scope} {.spec.names.shortNames[*]} {.metadata.annotations.api-approved\\.kubernetes\\.io}"]));
    let approved = "https://github.com/kubernetes-csi/external-snapshot-metadata/pull/2";
    assert_eq!(definition, format!("Cluster sms {approved}"));
}

// --- Rights ---------------------------------------------------------------------------------------

fn account(namespace: &str, name: &str) -> Account {
    Account { namespace: namespace.to_owned(), name: name.to_owned() }
}

fn sidecar() -> Account {
    account(NAMESPACE, "csi-loopback-metadata")
}

/// What the account may do in the namespace (SelfSubjectRulesReview): "GROUP/RESOURCE[NAME] VERB", where the
/// group of Kubernetes itself is empty.
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
fn expand(lines: &[&str]) -> BTreeSet<String> {
    let each = lines.iter().flat_map(|line| {
        let mut words = line.split(' ');
        let what = words.next().unwrap();
        words.map(move |verb| format!("{what} {verb}"))
    });
    each.collect()
}

const SIDECAR: &[&str] = &[
    "authentication.k8s.io/tokenreviews create",
    "authorization.k8s.io/subjectaccessreviews create",
    "cbt.storage.k8s.io/snapshotmetadataservices get list watch",
    "cbt.storage.k8s.io/snapshotmetadataservices[loopback.csi.local] create patch",
    "snapshot.storage.k8s.io/volumesnapshotclasses get list watch",
    "snapshot.storage.k8s.io/volumesnapshotcontents get list watch",
    "snapshot.storage.k8s.io/volumesnapshots get list watch",
];

const SIDECAR_AT_HOME: &[&str] = &["/secrets[csi-loopback-metadata-tls] get update patch"];

const CONTROLLER: &[&str] = &[
    "/events create patch update",
    "/nodes get list watch",
    "/persistentvolumeclaims get list watch update",
    "/persistentvolumeclaims/status patch",
    "/persistentvolumes get list watch create patch delete",
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

fn exact_rights(cluster: &Cluster) {
    apply_base(cluster);
    said(apply(cluster, &deploy("examples/backup-app")));
    // What everybody has.
    let anybody = cluster.account(&cluster.namespace("deploy"), "anybody");
    let common = rights(cluster, &anybody, "default");
    let controller = account(NAMESPACE, "csi-loopback-controller");
    let backup = account("backup-app", "backup-app");
    for (who, namespace, everywhere, there) in [
        (&sidecar(), NAMESPACE, SIDECAR, SIDECAR_AT_HOME),
        (&sidecar(), "default", SIDECAR, &[][..]),
        (&controller, NAMESPACE, CONTROLLER, &[][..]),
        (&controller, "default", CONTROLLER, &[][..]),
        (&backup, "backup-demo", BACKUP, BACKUP_OF_DEMO),
        (&backup, "backup-app", BACKUP, &[][..]),
        (&backup, NAMESPACE, BACKUP, &[][..]),
    ] {
        let expected = &expand(everywhere) | &expand(there);
        let what = format!("{} in {namespace}", who.user());
        cluster.wait_for(&format!("the rights of {what}"), || {
            (rights(cluster, who, namespace).len() >= common.len() + expected.len()).then_some(())
        });
        let found = rights(cluster, who, namespace);
        assert_eq!(&found - &common, expected, "{what}");
    }
}

/// Whether the account may do so (SubjectAccessReview); `resource` as in "secrets", "pods/exec".
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

fn refused_to_the_sidecar(cluster: &Cluster) {
    apply_base(cluster);
    let services = "cbt.storage.k8s.io";
    let own = "csi-loopback-metadata-tls";
    let table = [
        (true, NAMESPACE, "get", "", "secrets", own),
        (true, NAMESPACE, "update", "", "secrets", own),
        (false, NAMESPACE, "delete", "", "secrets", own),
        (false, NAMESPACE, "get", "", "secrets", "another"),
        (false, NAMESPACE, "list", "", "secrets", ""),
        (false, NAMESPACE, "watch", "", "secrets", ""),
        // With it goes a token of any account of the namespace.
        (false, NAMESPACE, "create", "", "secrets", ""),
        (false, NAMESPACE, "create", "", "secrets", own),
        (false, NAMESPACE, "create", "", "serviceaccounts/token", "csi-loopback-controller"),
        (false, NAMESPACE, "create", "", "pods", ""),
        (false, NAMESPACE, "create", "", "pods/exec", "csi-loopback-0"),
        (false, "default", "get", "", "secrets", own),
        (false, "default", "list", "", "secrets", ""),
        (true, "", "create", "authentication.k8s.io", "tokenreviews", ""),
        (true, "", "create", "authorization.k8s.io", "subjectaccessreviews", ""),
        (true, "default", "get", "snapshot.storage.k8s.io", "volumesnapshots", "any"),
        (false, "default", "delete", "snapshot.storage.k8s.io", "volumesnapshots", "any"),
        (false, "", "patch", "snapshot.storage.k8s.io", "volumesnapshotcontents", "any"),
        (true, "", "create", services, "snapshotmetadataservices", DRIVER),
        (true, "", "patch", services, "snapshotmetadataservices", DRIVER),
        (false, "", "create", services, "snapshotmetadataservices", ""),
        // Whose clients would then trust it.
        (false, "", "patch", services, "snapshotmetadataservices", "other.example"),
        (false, "", "delete", services, "snapshotmetadataservices", DRIVER),
        (false, "", "get", "", "persistentvolumes", "any"),
        (false, "", "impersonate", "", "users", "admin"),
        (false, "", "bind", "rbac.authorization.k8s.io", "clusterroles", "cluster-admin"),
    ];
    let who = sidecar();
    cluster.wait_for("the sidecar's rights", || {
        may(cluster, &who, NAMESPACE, "get", "", "secrets", own).then_some(())
    });
    for (allowed, namespace, verb, group, resource, name) in table {
        let found = may(cluster, &who, namespace, verb, group, resource, name);
        assert_eq!(found, allowed, "{verb} {group}/{resource} {name:?} in {namespace:?}");
    }
}

fn its_own_objects(cluster: &Cluster) {
    apply_base(cluster);
    let client = cluster.client_as(&sidecar());
    let write = |name: &str, client: &Client| {
        let api: Api<SnapshotMetadataService> = Api::all(client.clone());
        let object = service(name, |_| ());
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
    // The version that it was written over.
    assert!(cluster.block_on(secrets.replace(name, &PostParams::default(), &own)).is_err());
    apply_base(cluster);
    let data = cluster.block_on(secrets.get(name)).unwrap().data.unwrap();
    assert_eq!(data["tls.crt"].0, b"kept");
    cluster.delete(&cluster.api::<SnapshotMetadataService>(), DRIVER);
}

fn snapshotter_secret(cluster: &Cluster) {
    // An overlay with the component; kustomize wants relative paths.
    let overlay = cluster.scratch().join("with-secret").join("overlay");
    std::fs::create_dir_all(&overlay).unwrap();
    let overlay = overlay.canonicalize().unwrap();
    let up = "../".repeat(overlay.components().count() - 1);
    let at = |directory: &str| format!("{up}{}", path(&deploy(directory)).trim_start_matches('/'));
    let text = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": [at("base")], "components": [at("components/snapshotter-secret")],
    });
    std::fs::write(overlay.join("kustomization.yaml"), text.to_string()).unwrap();
    said(apply(cluster, &overlay));

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
    let class =
        said(cluster.kubectl(&["get", "volumesnapshotclass", "csi-loopback", "-o", "json"]));
    let class: Value = serde_json::from_str(&class).unwrap();
    let key =
        |name: &str| &class["parameters"][format!("csi.storage.k8s.io/snapshotter-secret-{name}")];
    assert_eq!((key("name"), key("namespace")), (&json!(secret), &json!(NAMESPACE)));
    // The other tests expect it without. (A namespace that is deleted never ends here: nothing of it may go.)
    for kind in ["rolebinding", "role"] {
        let arguments = ["delete", "-n", NAMESPACE, kind, "csi-loopback-snapshotter-secret"];
        said(cluster.kubectl(&arguments));
    }
    apply_base(cluster);
}

// --- Pods -----------------------------------------------------------------------------------------

/// (object, container, pod's spec) of everything that runs, as the API server has it, of all directories.
fn containers(cluster: &Cluster) -> Vec<(String, Value, Value)> {
    let mut found = Vec::new();
    for directory in DIRECTORIES {
        said(apply(cluster, &deploy(directory)));
        for object in objects(cluster, directory) {
            let spec = match object["kind"].as_str().unwrap() {
                "Pod" => &object["spec"],
                "StatefulSet" => &object["spec"]["template"]["spec"],
                _ => continue,
            };
            for container in spec["containers"].as_array().unwrap() {
                let what =
                    format!("{directory}: {} {}", object["metadata"]["name"], container["name"]);
                found.push((what, container.clone(), spec.clone()));
            }
        }
    }
    // Seven of the base, twice, and those of the examples.
    assert!(found.len() >= 17, "{}", found.len());
    found
}

fn confined(cluster: &Cluster) {
    let mut privileged = BTreeSet::new();
    for (what, container, pod) in containers(cluster) {
        let name = container["name"].as_str().unwrap();
        let own = &container["securityContext"];
        // What a container does not say its pod says.
        let either = |field: &str| match &own[field] {
            Value::Null => pod["securityContext"][field].clone(),
            said => said.clone(),
        };
        if name == "writer" {
            // An application like any other.
            continue;
        }
        assert_eq!(own["readOnlyRootFilesystem"], json!(true), "{what}");
        if own["privileged"] == json!(true) {
            privileged.insert(name.to_owned());
            continue;
        }
        assert_eq!(own["allowPrivilegeEscalation"], json!(false), "{what}");
        assert_eq!(own["capabilities"], json!({ "drop": ["ALL"] }), "{what}");
        assert_eq!(either("seccompProfile"), json!({ "type": "RuntimeDefault" }), "{what}");
        let is_root = either("runAsUser") == json!(0);
        assert_eq!(is_root, name == "node-driver-registrar", "{what}");
        if !is_root {
            assert_eq!(either("runAsNonRoot"), json!(true), "{what}");
            // With the group that the driver gives to its socket.
            assert_eq!(either("runAsGroup"), json!(65532), "{what}");
        }
        for mount in container["volumeMounts"].as_array().unwrap() {
            let read_only = mount["readOnly"] == json!(true) || mount["name"] == "registration";
            assert!(read_only, "{what}: {mount}");
        }
    }
    assert_eq!(privileged, ["driver".to_owned()].into());
}

fn one_token(cluster: &Cluster) {
    for (what, container, pod) in containers(cluster) {
        if pod["serviceAccountName"] != json!("csi-loopback-metadata") {
            continue;
        }
        assert_eq!(pod["automountServiceAccountToken"], json!(false), "{what}");
        let volumes = pod["volumes"].as_array().unwrap();
        let has_token = container["volumeMounts"].as_array().unwrap().iter().any(|mount| {
            let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
            volume["projected"]["sources"].to_string().contains("serviceAccountToken")
                || !volume["secret"].is_null()
        });
        assert_eq!(has_token, container["name"] == "metadata", "{what}");
    }
}

fn plain_images(cluster: &Cluster) {
    for (what, container, _) in containers(cluster) {
        let image = container["image"].as_str().unwrap();
        let (name, tag) = image.split_once(':').unwrap_or((image, ""));
        assert!(!image.contains('/') && !name.contains('.') && !tag.is_empty(), "{what}: {image}");
        if name == "csi-loopback" {
            assert_eq!(tag, env!("CARGO_PKG_VERSION"), "{what}");
        }
    }
}

/// Flags that the manifests give and the binary does not know yet. One that it has learnt has to go from here.
const AWAITED: [&str; 6] = [
    "--manage-service",
    "--namespace",
    "--self-signed",
    "--self-signed-secret",
    "--service-address",
    "--token-file",
];

/// `--help` behind them is reached only where all of them are known.
fn known_arguments(cluster: &Cluster) {
    let help = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_csi-loopback"));
        command.args(arguments).arg("--help").output().unwrap()
    };
    let mut seen = 0;
    for (what, container, _) in containers(cluster) {
        let arguments = container["args"].as_array().cloned().unwrap_or_default();
        if !container["image"].as_str().unwrap().starts_with("csi-loopback:")
            || arguments.is_empty()
        {
            continue;
        }
        let arguments = arguments.iter().map(|argument| argument.as_str().unwrap());
        let (awaited, known): (Vec<_>, Vec<_>) =
            arguments.partition(|flag| AWAITED.contains(&flag.split('=').next().unwrap()));
        let output = help(&known);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{what}: {text}");
        for flag in awaited {
            assert!(
                !help(&[&known[..], &[flag]].concat()).status.success(),
                "{what}: {flag} is there"
            );
        }
        seen += 1;
    }
    // Driver and sidecar, twice; a full and an incremental backup.
    assert_eq!(seen, 6);
}
