//! The next step on a cluster that does not know a kind of this project.

use kube::{Client, Resource};

use super::cache::in_time;

/// Version of the definition of SnapshotMetadataService of external-snapshot-metadata v0.2.
const FORMER: &str = "v1alpha1";

/// What an administrator must do, after the API server has returned 404 for a list of the kind.
pub async fn next_step<K: Resource<DynamicType = ()>>(client: &Client) -> String {
    let (plural, group, version) = (K::plural(&()), K::group(&()), K::version(&()));
    // All authenticated users may read this.
    let former = in_time(client.list_api_group_resources(&format!("{group}/{FORMER}"))).await;
    let is_former = former
        .is_ok_and(|found| found.resources.iter().any(|resource| resource.name == plural.as_ref()));
    match is_former {
        true => format!(
            "the CustomResourceDefinition {plural}.{group} in the cluster has only version {FORMER}, \
             of external-snapshot-metadata v0.2 or earlier; replace it by {version} as in \
             docs/guide/upgrade.md"
        ),
        false => format!("install the CustomResourceDefinition {plural}.{group} ({version})"),
    }
}
