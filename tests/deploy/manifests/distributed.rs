//! deploy/overlays/distributed: a driver on each node, and one address for their snapshots.

use serde_json::Value;
use support::cluster::programs::stdout_of;
use support::cluster::shared;

use super::aggregated::{RIGHTS_OF_ENDPOINT, delete};
use super::pods::containers;
use super::rights::{CONTROLLER, SIDECAR, SIDECAR_AT_HOME, exactly, expand};
use super::runtime::argument;
use super::{NAMESPACE, account, apply, deploy, overlay};

const OVERLAY: &str = "overlays/distributed";

/// The rights of the front in addition to those of a sidecar for one node.
const FRONT: &[&str] = &[
    "/nodes get",
    "certificates.k8s.io/podcertificaterequests get list watch",
    "certificates.k8s.io/podcertificaterequests/status patch",
    "certificates.k8s.io/signers[loopback.csi.local/node] sign",
];
const FRONT_AT_HOME: &[&str] = &[
    "/secrets[csi-loopback-nodes-ca] get update",
    "/serviceaccounts/token[csi-loopback-front] create",
    "discovery.k8s.io/endpointslices get list watch",
];

#[test]
fn front_and_nodes_have_exactly_the_rights_of_the_list() {
    let Some(cluster) = shared() else { return };
    stdout_of(apply(cluster, &deploy(OVERLAY)));
    let everywhere = [SIDECAR, FRONT].concat();
    let at_home = [SIDECAR_AT_HOME, FRONT_AT_HOME].concat();
    let controller_at_home = [
        "/pods get",
        "coordination.k8s.io/leases get list watch create update patch",
        "storage.k8s.io/csistoragecapacities get list watch create update patch delete",
    ];
    let node_sidecar = ["authentication.k8s.io/tokenreviews create"];
    let front = account(NAMESPACE, "csi-loopback-front");
    let controller = account(NAMESPACE, "csi-loopback-node-controller");
    let node = account(NAMESPACE, "csi-loopback-node-metadata");
    exactly(
        cluster,
        &[
            (&front, NAMESPACE, &everywhere, &at_home),
            (&front, "default", &everywhere, &[]),
            (&controller, NAMESPACE, CONTROLLER, &controller_at_home),
            (&controller, "default", CONTROLLER, &[]),
            (&node, NAMESPACE, &node_sidecar, &[]),
            (&node, "default", &node_sidecar, &[]),
        ],
    );
    assert!(expand(&node_sidecar).len() == 1, "a node's token verifies tokens and nothing else");

    stdout_of(apply(cluster, &overlay(cluster, OVERLAY, "cbt-http-nodes")));
    let with_pages = [&everywhere[..], RIGHTS_OF_ENDPOINT].concat();
    exactly(
        cluster,
        &[(&front, NAMESPACE, &with_pages, &at_home), (&front, "default", &with_pages, &[])],
    );
    // Other tests expect the state without it.
    for kind in ["clusterrolebinding", "clusterrole"] {
        delete(cluster, kind, "csi-loopback-cbt-http");
    }
}

#[test]
fn the_sidecar_of_a_node_has_the_socket_of_its_driver() {
    let Some(cluster) = shared() else { return };
    let found = containers(cluster);
    let of = |name: &str, flag: &str| {
        let is_it = |(what, container, _): &&(String, Value, Value)| {
            let has_flag = |argument: &Value| argument.as_str().unwrap().starts_with(flag);
            what.starts_with(OVERLAY)
                && container["name"] == name
                && container["args"].as_array().unwrap().iter().any(has_flag)
        };
        found.iter().find(is_it).unwrap_or_else(|| panic!("{name} {flag}"))
    };
    let (_, driver, driver_pod) = of("driver", "--node-local");
    let (_, sidecar, sidecar_pod) = of("metadata", "--serve-node");
    let socket = argument(driver, "--metadata-endpoint").strip_prefix("unix://").unwrap();
    assert_eq!(argument(sidecar, "--csi-address"), socket);
    let host_path = |pod: &Value| {
        let mut volumes = pod["volumes"].as_array().unwrap().iter();
        volumes.find(|volume| volume["name"] == "metadata-socket").unwrap()["hostPath"].clone()
    };
    assert_eq!(host_path(driver_pod), host_path(sidecar_pod));
    assert!(host_path(driver_pod)["path"].is_string());
    assert_eq!(driver_pod["nodeSelector"], sidecar_pod["nodeSelector"]);
    // The front signs what the nodes request, and accepts and is accepted by the right accounts.
    let (_, front, front_pod) = of("metadata", "--node-service");
    let certificate = sidecar_pod["volumes"].to_string();
    let signer = argument(front, "--node-signer");
    assert!(certificate.contains(&format!("\"signerName\":\"{signer}\"")), "{certificate}");
    let accounts = [("--node-account", sidecar_pod), ("--front-account", front_pod)];
    for (flag, pod) in accounts {
        let name = pod["serviceAccountName"].as_str().unwrap();
        assert_eq!(argument(front, flag), format!("$(POD_NAMESPACE)/{name}"));
    }
    assert_eq!(argument(sidecar, "--front-account"), argument(front, "--front-account"));
}
