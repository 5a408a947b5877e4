//! deploy/components/api-server-ip-block: which connections the policies allow. The cluster has no
//! network that enforces them.

use support::cluster::shared;

use serde_json::{Value, json};
use support::cluster::programs::stdout_of;
use support::path;

use super::{admission, aggregated, apply, deploy, dry_run, overlay, pods};

const COMPONENT: &str = "api-server-ip-block";

#[test]
fn the_ip_block_admits_only_the_given_addresses() {
    let Some(cluster) = shared() else { return };
    let blocks = json!([
        { "ipBlock": { "cidr": "10.1.2.3/32" } },
        { "ipBlock": { "cidr": "fd00:1::/64", "except": ["fd00:1::/80"] } },
    ]);
    for directory in ["session-manager", "admission", "aggregated-api"] {
        // Its namespace.
        stdout_of(apply(cluster, &deploy(directory)));
        admission::without_webhooks(cluster);
        let with = overlay(cluster, directory, COMPONENT);
        let built = cluster.kubectl(&["kustomize", path(&with)]);
        let error = String::from_utf8(built.stderr).unwrap();
        assert!(error.contains("nothing selected by NetworkPolicy"), "{directory}: {error}");
        let addresses = deploy("components").join(COMPONENT).join("api-server.yaml");
        let addresses = std::fs::read_to_string(addresses).unwrap();
        let mut addresses: Value = serde_saphyr::from_str(&addresses).unwrap();
        addresses["spec"]["ingress"][0]["from"] = blocks.clone();
        std::fs::write(with.join("api-server.yaml"), addresses.to_string()).unwrap();
        let file = with.join("kustomization.yaml");
        let mut text: Value =
            serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        text["resources"].as_array_mut().unwrap().push(json!("api-server.yaml"));
        std::fs::write(&file, text.to_string()).unwrap();
        let all = dry_run(cluster, &with);
        // The list of addresses is not an object of the cluster.
        let policy = pods::only(&all, "NetworkPolicy");
        let ingress = policy["spec"]["ingress"].as_array().unwrap();
        assert_eq!(ingress.len(), 1, "{directory}: {policy}");
        assert_eq!(ingress[0]["from"], blocks, "{directory}");
        assert!(["webhook", "api"].iter().any(|port| ingress[0]["ports"][0]["port"] == *port));
        aggregated::without_api_service(cluster);
    }
}
