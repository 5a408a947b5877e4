//! What a webhook reads of an AdmissionReview: who sent which kind of object, and of the object the
//! fields in a type of the webhook.

use std::collections::BTreeMap;

use k8s_openapi::api::authentication::v1::UserInfo;
use kube::core::admission::{META_API_VERSION_V1, META_KIND, Operation};
use kube::core::gvk::GroupVersionKind;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::error::Category;

use super::Refusal;
use crate::bounded::{self, List, Map, Parsed};
use crate::https::Memory;
use telemetry::peer::Peer;

/// Memory of an element of a request's lists, at most: a mount with its texts' headers.
const ELEMENT: usize = 160;

/// What a webhook reads of a request: of an object of any client only the fields in `K`, which uses
/// the lists of [`bounded`].
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReviewRequest<K> {
    pub kind: GroupVersionKind,
    #[serde(default)]
    pub sub_resource: Option<String>,
    #[serde(default)]
    pub namespace: Option<String>,
    pub operation: Operation,
    pub user_info: User,
    pub object: Option<K>,
    pub old_object: Option<K>,
    /// The client that sent the review.
    #[serde(skip, default = "Peer::unknown")]
    pub peer: Peer,
}

/// The user who sent the object.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct User {
    #[serde(default)]
    pub username: Option<String>,
    #[serde(default)]
    uid: Option<String>,
    #[serde(default)]
    groups: List<String>,
    #[serde(default)]
    extra: Map<List<String>>,
}

impl From<User> for UserInfo {
    fn from(user: User) -> Self {
        let extra = user.extra.into_inner().into_iter();
        let extra = extra.map(|(key, values)| (key, values.into_inner())).collect();
        Self {
            username: user.username,
            uid: user.uid,
            groups: Some(user.groups.into_inner()).filter(|groups| !groups.is_empty()),
            extra: Some(extra).filter(|extra: &BTreeMap<_, _>| !extra.is_empty()),
        }
    }
}

/// Who sent a review, and the memory that it holds.
pub struct Sender {
    pub peer: Peer,
    pub memory: Option<Memory>,
}

/// What identifies a review; the rest is skipped.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    #[serde(default)]
    api_version: Option<String>,
    #[serde(default)]
    kind: Option<String>,
    #[serde(default)]
    request: Option<Head>,
}

#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    uid: Option<String>,
    #[serde(default)]
    kind: Option<GroupVersionKind>,
}

/// Returns the request's uid, with which also a refusal is answered, and the kind of its object.
pub fn head(body: &[u8]) -> Result<(String, Option<GroupVersionKind>), String> {
    // The error reports the position, but no content.
    let envelope: Envelope = serde_json::from_slice(body).map_err(|error| {
        let what = match error.classify() {
            Category::Data => "apiVersion, kind, request.uid or request.kind has a wrong type",
            _ => "not JSON",
        };
        format!("{what} in line {}, column {}", error.line(), error.column())
    })?;
    let Envelope { api_version, kind, request } = envelope;
    for (field, found, expected) in
        [("apiVersion", api_version, META_API_VERSION_V1), ("kind", kind, META_KIND)]
    {
        if found.as_deref() != Some(expected) {
            return Err(format!("{field} is not {expected}"));
        }
    }
    let (uid, kind) = request.map_or((None, None), |head| (head.uid, head.kind));
    match uid.filter(|uid| !uid.is_empty()) {
        Some(uid) => Ok((uid, kind)),
        None => Err("request.uid is missing".into()),
    }
}

/// Decodes a request for objects of one of these kinds.
pub fn request_for<K: DeserializeOwned>(
    kinds: &[GroupVersionKind],
    kind: Option<GroupVersionKind>,
    body: &[u8],
    sender: Sender,
) -> Result<ReviewRequest<K>, Refusal> {
    #[derive(Deserialize)]
    struct Whole<K> {
        request: ReviewRequest<K>,
    }
    let Some(kind) = kind.filter(|kind| kinds.contains(kind)) else {
        let title = |kind: &GroupVersionKind| format!("{} of {}", kind.kind, kind.api_version());
        let titles: Vec<_> = kinds.iter().map(title).collect();
        return Err(Refusal::failed(format!(
            "this webhook reviews only {}; correct the rules of its webhook configuration",
            titles.join(", ")
        )));
    };
    let Parsed { value, elements } = bounded::parse::<Whole<K>>(body).map_err(|error| {
        Refusal::invalid(format!("invalid request for a {}: {error}", kind.kind))
    })?;
    if let Some(memory) = sender.memory {
        memory.add(elements * ELEMENT);
    }
    Ok(ReviewRequest { peer: sender.peer, ..value.request })
}
