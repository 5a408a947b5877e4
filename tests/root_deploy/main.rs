//! deploy/ as the API server takes it: every manifest applies, twice with nothing changed; the definition of
//! SnapshotMetadataService takes what it should and nothing else (those of snapshot sessions: tests/root_session_definitions.rs);
//! and who runs there has the rights that its calls need and no more.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[allow(dead_code)] // What asks a sidecar.
#[path = "../root_sidecar/rig.rs"]
mod rig;
#[path = "../support/mod.rs"]
mod support;

mod admission;
mod aggregated;
mod inline;
mod node_proxy;
mod pods;
mod rights;
mod runtime;
mod sessions;
mod whole;

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Output};

use cluster::Cluster;
use cluster::access::Account;
use cluster::programs::said;
use csi_loopback::kubernetes::metadata_service::SnapshotMetadataService;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use support::path;

/// Where it is installed, and the name of the driver.
const NAMESPACE: &str = "csi-loopback";
const DRIVER: &str = "loopback.csi.local";

/// Directories for `kubectl apply -k`: all that are complete in themselves.
fn directories() -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![deploy("")];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.ends_with("kustomization.yaml")
                && std::fs::read_to_string(&path).unwrap().contains("\nkind: Kustomization\n")
            {
                let relative = directory.strip_prefix(deploy("")).unwrap();
                found.push(support::path(relative).to_owned());
            }
        }
    }
    found.sort();
    assert!(found.len() >= 8, "{found:?}");
    found
}

fn main() -> ExitCode {
    cluster::suite::run(&[
        ("every_manifest_applies_and_a_second_time_changes_nothing", every_manifest_applies),
        ("the_definition_takes_good_services_and_refuses_others", the_definition_decides),
        ("each_account_has_the_rights_of_this_list_and_no_more", rights::exact_rights),
        (
            "what_would_give_the_sidecar_more_rights_is_refused_to_it",
            rights::refused_to_the_sidecar,
        ),
        (
            "the_sidecar_writes_its_own_service_and_secret_and_an_apply_keeps_them",
            rights::its_own_objects,
        ),
        (
            "the_rights_of_deploy_suffice_for_snapshots_and_their_metadata",
            whole::the_rights_suffice,
        ),
        (
            "the_rights_of_deploy_suffice_for_snapshot_sessions",
            whole::the_rights_suffice_for_sessions,
        ),
        ("a_snapshotter_secret_is_for_those_who_need_it", rights::snapshotter_secret),
        (
            "what_would_give_manager_driver_or_application_more_of_sessions_is_refused_to_them",
            sessions::refused,
        ),
        ("the_api_server_answers_each_account_so_in_fact", sessions::refused_in_fact),
        ("the_built_in_roles_reach_no_session", sessions::built_in_roles),
        ("a_configuration_labelled_as_another_drivers_is_refused", sessions::mislabelled),
        (
            "without_a_manager_no_session_is_made_and_all_can_be_cleaned_up",
            sessions::without_a_manager,
        ),
        ("the_managers_pods_are_admitted_as_restricted", sessions::restricted),
        ("what_the_manager_has_written_survives_an_apply", sessions::applied_again),
        (
            "the_aggregated_server_and_its_users_have_the_rights_of_this_list_and_no_more",
            aggregated::exact_rights,
        ),
        (
            "what_would_give_server_user_or_driver_more_of_deltas_is_refused_to_them",
            aggregated::refused,
        ),
        (
            "the_aggregated_server_gets_secrets_only_with_the_component",
            aggregated::secrets_are_an_extra,
        ),
        ("a_driver_takes_part_in_deltas_with_the_component", aggregated::the_endpoint_is_an_extra),
        ("the_aggregated_servers_pods_are_admitted_as_restricted", aggregated::restricted),
        ("pages_have_the_priority_level_of_work_that_can_wait", aggregated::pages_can_wait),
        ("what_the_aggregated_server_has_written_survives_an_apply", aggregated::applied_again),
        (
            "a_command_without_an_aggregated_server_says_what_is_missing",
            aggregated::command_without_a_server,
        ),
        (
            "the_admission_webhooks_have_the_rights_of_this_list_and_no_more",
            admission::exact_rights,
        ),
        ("what_would_give_the_admission_webhooks_more_is_refused_to_them", admission::refused),
        ("the_admission_webhooks_pods_are_admitted_as_restricted", admission::restricted),
        ("webhooks_rights_and_arguments_are_for_the_same_driver", admission::one_driver),
        (
            "while_no_webhook_answers_only_pods_with_inline_volumes_of_the_driver_are_refused",
            admission::unanswered_pods,
        ),
        (
            "templates_of_every_kind_are_asked_about_and_never_held_up",
            admission::unanswered_workloads,
        ),
        ("what_the_admission_webhooks_have_written_survives_an_apply", admission::applied_again),
        ("an_inline_volume_has_the_proposals_fields_and_no_handle", inline::fields_of_a_volume),
        ("lifecycle_modes_of_a_driver_are_checked_and_cannot_be_changed", inline::lifecycle_modes),
        (
            "the_driver_and_crust_ops_of_deploy_runtime_meet_and_see_what_they_have_to",
            runtime::they_meet,
        ),
        ("pods_and_claims_of_deploy_runtime_ask_for_what_is_there", runtime::classes),
        ("containerd_takes_the_handler_of_deploy_runtime", runtime::containerd),
        ("the_runtime_takes_the_configuration_of_deploy_runtime", runtime::configuration),
        ("the_node_proxy_has_the_rights_of_this_list_and_no_more", node_proxy::exact_rights),
        ("what_would_give_the_node_proxy_more_is_refused_to_it", node_proxy::refused),
        ("the_node_proxy_reads_claims_only_with_the_component", node_proxy::claims_are_an_extra),
        (
            "kubelet_is_told_of_the_node_proxy_and_everybody_else_of_the_driver",
            node_proxy::in_front_of_the_driver,
        ),
        (
            "the_node_proxy_goes_in_front_of_another_providers_driver",
            node_proxy::in_front_of_anothers_driver,
        ),
        ("the_pod_of_examples_node_proxy_opts_in_by_its_annotation", node_proxy::opted_in),
        ("all_but_driver_and_crust_ops_run_confined", pods::confined),
        ("only_the_sidecar_of_the_drivers_pod_has_a_token", pods::one_token),
        ("no_image_names_a_registry", pods::plain_images),
        ("the_arguments_of_the_manifests_are_known_to_the_binary", pods::known_arguments),
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

/// The same, with nothing that a sidecar has written.
fn apply_base_anew(cluster: &Cluster) {
    let secret = "secret/csi-loopback-metadata-tls";
    said(cluster.kubectl(&["delete", "--ignore-not-found", "-n", NAMESPACE, secret]));
    said(cluster.kubectl(&["delete", "--ignore-not-found", "snapshotmetadataservice", DRIVER]));
    apply_base(cluster);
}

/// A directory with a component, as an overlay has it; kustomize wants relative paths.
fn overlay(cluster: &Cluster, directory: &str, component: &str) -> PathBuf {
    let overlay = cluster.scratch().join(format!("with-{component}")).join("overlay");
    std::fs::create_dir_all(&overlay).unwrap();
    let overlay = overlay.canonicalize().unwrap();
    let up = "../".repeat(overlay.components().count() - 1);
    let at = |directory: &str| format!("{up}{}", path(&deploy(directory)).trim_start_matches('/'));
    let text = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": [at(directory)], "components": [at(&format!("components/{component}"))],
    });
    std::fs::write(overlay.join("kustomization.yaml"), text.to_string()).unwrap();
    overlay
}

/// The objects of a directory, as the API server has them.
fn objects(cluster: &Cluster, directory: &str) -> Vec<Value> {
    let list = said(cluster.kubectl(&["get", "-o", "json", "-k", path(&deploy(directory))]));
    let mut list: Value = serde_json::from_str(&list).unwrap();
    serde_json::from_value(list["items"].take()).unwrap()
}

fn account(namespace: &str, name: &str) -> Account {
    Account { namespace: namespace.to_owned(), name: name.to_owned() }
}

fn sidecar() -> Account {
    account(NAMESPACE, "csi-loopback-metadata")
}

fn every_manifest_applies(cluster: &Cluster) {
    for directory in directories() {
        let applied = || {
            said(apply(cluster, &deploy(&directory)));
            let mut found = objects(cluster, &directory);
            for object in &mut found {
                // It counts writes, also those that change nothing but who owns a field.
                object["metadata"].as_object_mut().unwrap().remove("resourceVersion");
            }
            found
        };
        let first = applied();
        assert!(!first.is_empty(), "{directory}");
        // What has a status has it from somebody who looks at it when he likes.
        let spec = |objects: Vec<Value>| -> Vec<Value> {
            let without = |mut object: Value| {
                if object["kind"] == "APIService" {
                    object.as_object_mut().unwrap().remove("status");
                    object["metadata"].as_object_mut().unwrap().remove("managedFields");
                }
                object
            };
            objects.into_iter().map(without).collect()
        };
        assert_eq!(spec(applied()), spec(first), "{directory}");
        aggregated::without_api_service(cluster);
        admission::without_webhooks(cluster);
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
