//! A list of all objects in a cluster, to check that a component removes all of its objects.

use std::collections::BTreeSet;

use super::Cluster;
use super::programs::stdout_of;

/// All objects as KIND/NAMESPACE/NAME, without those that Kubernetes creates and deletes itself.
/// None if a kind was deleted during the call.
pub fn everything(cluster: &Cluster) -> Option<BTreeSet<String>> {
    let kinds = stdout_of(cluster.kubectl(&["api-resources", "--verbs=list", "-o", "name"]));
    let passing = ["events", "componentstatuses"];
    let kinds: Vec<_> =
        kinds.lines().filter(|kind| !passing.iter().any(|it| kind.starts_with(it))).collect();
    let columns = "-o=custom-columns=K:.kind,NS:.metadata.namespace,N:.metadata.name,D:.metadata.deletionTimestamp";
    let output = cluster.kubectl(&["get", &kinds.join(","), "-A", "--no-headers", columns]);
    if !output.status.success() {
        return None;
    }
    let table = String::from_utf8(output.stdout).unwrap();
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    // Deleted namespaces remain, because there is no namespace controller.
    let ending: BTreeSet<_> = rows
        .clone()
        .filter(|row| row[0] == "Namespace" && row[3] != "<none>")
        .map(|row| row[2])
        .collect();
    let passes = |row: &[&str]| match row[0] {
        "Namespace" => ending.contains(row[2]),
        // Leases of the API server.
        "Lease" => row[1] == "kube-system",
        _ => false,
    };
    let kept = rows.filter(|row| !passes(row));
    Some(kept.map(|row| row[..3].join("/")).collect())
}
