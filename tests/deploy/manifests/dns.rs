//! Which DNS servers the NetworkPolicies of deploy/ allow. The cluster has no network that enforces
//! them.

use support::cluster::shared;

use serde_json::{Value, json};

use super::{deploy, directories, kustomized};

/// A destination of a connection.
#[derive(Clone, Copy)]
enum To {
    Namespace(&'static str),
    Address(&'static str),
}

/// Whether a rule of the policy names the destination, and allows the port.
fn allows(policy: &Value, to: To, port: u16, protocol: &str) -> bool {
    let is_peer = |peer: &Value| match to {
        To::Namespace(name) => {
            let selector = json!({ "matchLabels": { "kubernetes.io/metadata.name": name } });
            *peer == json!({ "namespaceSelector": selector })
        }
        To::Address(address) => peer["ipBlock"]["cidr"] == format!("{address}/32"),
    };
    let any = |value: &Value, of: &dyn Fn(&Value) -> bool| {
        value.as_array().is_some_and(|all| all.iter().any(of))
    };
    any(&policy["spec"]["egress"], &|rule| {
        any(&rule["to"], &is_peer)
            && any(&rule["ports"], &|one| one["port"] == port && one["protocol"] == protocol)
    })
}

#[test]
fn policies_allow_dns_of_nodelocal_cache_and_openshift() {
    let Some(cluster) = shared() else { return };
    let mut seen = 0;
    for directory in directories() {
        for policy in kustomized(cluster, &deploy(&directory)) {
            let egress = policy["spec"]["egress"].as_array();
            if policy["kind"] != "NetworkPolicy" || egress.is_none_or(Vec::is_empty) {
                continue;
            }
            // It adds to the policy of the base, which has the same pods and more.
            if policy["metadata"]["name"] == "csi-loopback-front" {
                continue;
            }
            seen += 1;
            for protocol in ["UDP", "TCP"] {
                for (to, port) in [
                    (To::Namespace("kube-system"), 53),
                    (To::Address("169.254.20.10"), 53),
                    (To::Namespace("openshift-dns"), 5353),
                ] {
                    assert!(allows(&policy, to, port, protocol), "{directory} {port}: {policy}");
                }
            }
        }
    }
    // Base, alone and in overlays; node proxy; session manager; webhooks; aggregated API.
    assert!(seen >= 5, "{seen}");
}
