//! Checks a user's permissions by SubjectAccessReview. The API server has already checked the
//! permission to create a VolumeSnapshotDelta; it is checked again, because that check is only
//! claimed by the caller. Permissions to get objects are checked before any lookup, so that a
//! refusal does not reveal what exists.

use k8s_openapi::api::authentication::v1::UserInfo;

use super::api_failure;
use crate::aggregated_api::failure::{Cause, Failure};
use kubernetes::review::{Action, Denied, Reviewer};
use kubernetes::snapshot;
use kubernetes::snapshot_delta::{GROUP, PLURAL, VolumeSnapshotDeltaSpec};

pub(super) const SNAPSHOTS: &str = "volumesnapshots";
pub(super) const SECRETS: &str = "secrets";

/// Checks all permissions that the request needs.
pub async fn check(
    reviewer: &Reviewer,
    user: &UserInfo,
    namespace: &str,
    spec: &VolumeSnapshotDeltaSpec,
) -> Result<(), Failure> {
    let get = |group, resource, name| Action {
        verb: "get",
        group,
        resource,
        subresource: None,
        namespace,
        name: Some(name),
    };
    let create = Action {
        verb: "create",
        group: GROUP,
        resource: PLURAL,
        subresource: None,
        namespace,
        name: None,
    };
    let mut actions =
        vec![create, get(snapshot::GROUP, SNAPSHOTS, spec.target_volume_snapshot_name.as_str())];
    if !spec.base_volume_snapshot_name.is_empty() {
        actions.push(get(snapshot::GROUP, SNAPSHOTS, &spec.base_volume_snapshot_name));
    }
    if let Some(secret) = &spec.secret_ref {
        actions.push(get("", SECRETS, &secret.name));
    }
    for action in actions {
        let allowed = reviewer.authorize(user, action).await;
        allowed.map_err(|denied| refused(user, action, denied))?;
    }
    Ok(())
}

fn refused(user: &UserInfo, action: Action<'_>, denied: Denied) -> Failure {
    if let Denied::Unknown(error) = denied {
        return api_failure("create SubjectAccessReviews", &error);
    }
    let Action { verb, group, resource, namespace, name, .. } = action;
    let user = user.username.as_deref().unwrap_or_default();
    let resource = if group.is_empty() { resource.into() } else { format!("{resource}.{group}") };
    let object = name.map(|name| format!(" {name:?}")).unwrap_or_default();
    let message = format!(
        "user {user:?} may not {verb} {resource}{object} in the namespace {namespace:?}; grant the permission with a Role"
    );
    Failure::new(Cause::NotAllowed, message)
}
