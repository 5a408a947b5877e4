//! From the name of a VolumeGroupSnapshot to the VolumeSnapshots of its members. Clusters serve
//! different versions of its API, whose fields here are the same.

use std::collections::BTreeSet;

use anyhow::anyhow;
use kube::api::{Api, DynamicObject, ListParams};
use kube::discovery::{self, ApiGroup};
use serde_json::Value;

use super::failure::{Failure, Retry};
use super::find::{Finder, Snapshot, call};
use kubernetes::name;

const GROUP: &str = "groupsnapshot.storage.k8s.io";

/// A VolumeGroupSnapshot whose members are all ready to use.
#[derive(Debug)]
pub struct GroupSnapshot {
    pub name: String,
    /// CSI handle.
    pub handle: String,
    pub members: Vec<Snapshot>,
}

impl Finder {
    /// A VolumeGroupSnapshot that is ready to use.
    pub async fn group(&self, group: &str) -> Result<GroupSnapshot, Failure> {
        let what = format!("VolumeGroupSnapshot {}/{group}", self.namespace());
        if !name::is_object(group) {
            return Err(Failure::never(anyhow!(
                "{group:?} cannot be the name of a VolumeGroupSnapshot"
            )));
        }
        let api = call(&what, discovery::group(self.client(), GROUP)).await?;
        let kind = resource(&api, "VolumeGroupSnapshot")?;
        let groups: Api<DynamicObject> =
            Api::namespaced_with(self.client().clone(), self.namespace(), &kind);
        let found = call(&what, groups.get(group)).await?;
        let not_ready =
            || Failure::new(Retry::Always, anyhow!("{what} is not ready to use; repeat later"));
        if found.data.pointer("/status/readyToUse") != Some(&Value::Bool(true)) {
            return Err(not_ready());
        }
        let content = text(&found.data, "/status/boundVolumeGroupSnapshotContentName");
        let content = content.ok_or_else(not_ready)?;
        let kind = resource(&api, "VolumeGroupSnapshotContent")?;
        let contents: Api<DynamicObject> = Api::all_with(self.client().clone(), &kind);
        let content_what = format!("VolumeGroupSnapshotContent {content}");
        let content = call(&content_what, contents.get(content)).await?.data;
        let handle = text(&content, "/status/volumeGroupSnapshotHandle").ok_or_else(not_ready)?;
        let members = self.members(&what, found.metadata.uid.as_deref()).await?;
        let own: BTreeSet<&str> = members.iter().map(|member| member.handle.as_str()).collect();
        let all = snapshot_handles(&content);
        if own != all || own.is_empty() {
            return Err(Failure::never(anyhow!(
                "{what} has {} snapshots, of which {} have a VolumeSnapshot; repeat later, or take \
                 another one if a member was deleted",
                all.len(),
                own.intersection(&all).count()
            )));
        }
        Ok(GroupSnapshot { name: group.to_owned(), handle: handle.to_owned(), members })
    }

    /// The VolumeSnapshots that the VolumeGroupSnapshot with this uid owns.
    async fn members(&self, what: &str, uid: Option<&str>) -> Result<Vec<Snapshot>, Failure> {
        let what = format!("VolumeSnapshots of {what}");
        let mut members = Vec::new();
        for one in call(&what, self.snapshots().list(&ListParams::default())).await? {
            let mut owners = one.metadata.owner_references.iter().flatten();
            if let Some(name) = &one.metadata.name
                && owners.any(|owner| Some(owner.uid.as_str()) == uid)
            {
                members.push(self.snapshot(name).await?);
            }
        }
        Ok(members)
    }
}

fn resource(api: &ApiGroup, kind: &str) -> Result<kube::api::ApiResource, Failure> {
    let found = api.recommended_kind(kind);
    let missing = || Failure::never(anyhow!("the cluster serves no {kind} of {GROUP}"));
    found.map(|(resource, _)| resource).ok_or_else(missing)
}

fn text<'v>(value: &'v Value, at: &str) -> Option<&'v str> {
    value.pointer(at)?.as_str().filter(|text| !text.is_empty())
}

/// The CSI handles of the members of a VolumeGroupSnapshotContent.
fn snapshot_handles(content: &Value) -> BTreeSet<&str> {
    // The second name is that of v1beta1.
    let lists = ["/status/volumeSnapshotInfoList", "/status/volumeSnapshotHandlePairList"];
    let members = lists.iter().filter_map(|list| content.pointer(list)?.as_array()).flatten();
    members.filter_map(|member| text(member, "/snapshotHandle")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn members_are_read_in_each_version_of_the_api() {
        for list in ["volumeSnapshotInfoList", "volumeSnapshotHandlePairList"] {
            let members = json!([{"snapshotHandle": "b"}, {"snapshotHandle": "a"}]);
            let content = json!({"status": {list: members}});
            assert_eq!(snapshot_handles(&content), BTreeSet::from(["a", "b"]), "{list}");
        }
        assert!(snapshot_handles(&json!({})).is_empty());
    }
}
