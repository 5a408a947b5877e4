//! The validating webhook (KEP-3314, session design, "The Snapshot Session Manager"): the creator
//! of a request must be allowed to get each of its VolumeSnapshots, and the namespace must have room
//! for it ([`SessionLimit`]). A request that cannot be checked is refused. Without `--client-ca` any
//! pod may post reviews, so their senders take turns ([`PeerLimit`]), and access is reviewed only
//! while the API server does not verify it itself ([`AccessPolicy`]).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use k8s_openapi::api::authentication::v1::UserInfo;
use kube::Client;
use kube::core::admission::Operation;
use serde::Deserialize;
use tokio::task::JoinSet;

use super::ROLE;
use super::access_policy::AccessPolicy;
use super::session_limit::SessionLimit;
use kubernetes::admission::{Refusal, ReviewRequest, Verdict, Webhook as Route};
use kubernetes::bounded::List;
use kubernetes::client::failure;
use kubernetes::https::Limits;
use kubernetes::name;
use kubernetes::peer_limit::PeerLimit;
use kubernetes::review::Reviewer;
use kubernetes::session::{MAX_SNAPSHOTS, SnapshotSessionRequest};
use kubernetes::snapshot::GROUP;
use telemetry::peer::Peer;

/// HTTP path of the webhook.
pub const PATH: &str = "/validate-snapshotsessionrequest";
/// A review holds at most two objects, the old and the new one, which are smaller than this.
pub const LIMITS: Limits = Limits { body: 3 << 20, request: Duration::from_secs(9) };

/// Time limit of a decision: the API server waits 10 s.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(8);
/// Maximum number of names in a refusal.
const NAMED: usize = 3;

/// What the webhook reads of a SnapshotSessionRequest.
#[derive(Debug, Clone, Deserialize)]
struct Requested {
    spec: RequestedSpec,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RequestedSpec {
    snapshots: List<String>,
    #[serde(default)]
    lifetime_seconds: Option<i64>,
}

/// The routes of the webhook. `client` makes the reviews and should have its own rate limit, so
/// that many requests delay only each other. `policy` is absent if only the API server can connect.
pub fn routes(client: Client, limit: Option<SessionLimit>, policy: Option<AccessPolicy>) -> Router {
    let webhook = Webhook {
        // Not cached: a revoked permission must not be granted from a cache.
        reviewer: Reviewer::new(client, Duration::ZERO),
        turns: PeerLimit::default(),
        limit,
        policy,
    };
    let decide = move |request| webhook.clone().decide(request);
    let route = Route::of::<SnapshotSessionRequest>(REVIEW_TIMEOUT).route(decide);
    Router::new().route(PATH, route)
}

#[derive(Clone)]
struct Webhook {
    reviewer: Reviewer,
    turns: PeerLimit,
    limit: Option<SessionLimit>,
    policy: Option<AccessPolicy>,
}

impl Webhook {
    async fn decide(self, request: ReviewRequest<Requested>) -> Verdict {
        match request.operation {
            Operation::Create => self.creation(request).await,
            Operation::Update => update(&request),
            // These operations give no access.
            Operation::Delete | Operation::Connect => Ok(()),
        }
    }

    async fn creation(&self, request: ReviewRequest<Requested>) -> Verdict {
        let namespace = request.namespace.unwrap_or_default();
        if !name::is_namespace(&namespace) {
            return Err(Refusal::invalid("metadata.namespace: is missing or not a valid name"));
        }
        let Some(object) = request.object else {
            return Err(Refusal::invalid("the review has no object"));
        };
        let names = snapshots(object.spec.snapshots.into_inner())?;
        // First, so that a flood of requests over the limit causes no reviews.
        self.has_room(&namespace).await?;
        let (peer, user) = (request.peer, request.user_info);
        if self.is_verified(peer).await? {
            return Ok(());
        }
        let shown = user.username.clone();
        let denied = self.denied(peer, user.into(), &namespace, names).await?;
        if denied.is_empty() {
            // Again, because other requests were admitted during the reviews.
            return self.has_room(&namespace).await;
        }
        Err(Refusal::not_allowed(denial_message(shown.as_deref(), &namespace, &denied)))
    }

    /// Whether the API server has verified the access of the creator before it called the webhook.
    async fn is_verified(&self, peer: Peer) -> Result<bool, Refusal> {
        let Some(policy) = &self.policy else { return Ok(false) };
        let _turn = self.turns.turn(peer).await.map_err(|error| unknown(&error))?;
        Ok(policy.is_in_force().await)
    }

    async fn has_room(&self, namespace: &str) -> Verdict {
        match &self.limit {
            Some(limit) => limit.check(namespace).await,
            None => Ok(()),
        }
    }

    /// The VolumeSnapshots that the user must not get. Usually one review answers for all: whether
    /// the user may get all of the namespace.
    async fn denied(
        &self,
        peer: Peer,
        user: UserInfo,
        namespace: &str,
        names: BTreeSet<String>,
    ) -> Result<BTreeSet<String>, Refusal> {
        if names.len() > 1 && self.may_get(peer, &user, namespace, None).await? {
            return Ok(BTreeSet::new());
        }
        let user = Arc::new(user);
        // Running reviews end when the set is dropped.
        let mut reviews = JoinSet::new();
        for name in names {
            let (webhook, user, namespace) = (self.clone(), user.clone(), namespace.to_owned());
            reviews.spawn(async move {
                let allowed = webhook.may_get(peer, &user, &namespace, Some(&name)).await;
                (name, allowed)
            });
        }
        let mut denied = BTreeSet::new();
        while let Some(review) = reviews.join_next().await {
            let ended = |_| Refusal::failed("a permission review ended unexpectedly");
            let (name, allowed) = review.map_err(ended)?;
            if !allowed? {
                denied.insert(name);
            }
        }
        Ok(denied)
    }

    /// Whether the user may get this VolumeSnapshot, or, without a name, all of the namespace.
    async fn may_get(
        &self,
        peer: Peer,
        user: &UserInfo,
        namespace: &str,
        name: Option<&str>,
    ) -> Result<bool, Refusal> {
        let _turn = self.turns.turn(peer).await.map_err(|error| unknown(&error))?;
        let reviewed = self.reviewer.may_get_snapshots(user, namespace, name).await;
        reviewed.map_err(|error| unknown(&error))
    }
}

/// The distinct names. The CRD has the same limits, but they are not taken on trust.
fn snapshots(names: Vec<String>) -> Result<BTreeSet<String>, Refusal> {
    if names.is_empty() || names.len() > MAX_SNAPSHOTS {
        let message =
            format!("spec.snapshots: has {} names, not 1 to {MAX_SNAPSHOTS}", names.len());
        return Err(Refusal::invalid(message));
    }
    if let Some(bad) = names.iter().find(|name| !name::is_object(name)) {
        let message = format!("spec.snapshots: {bad:?} is not a valid VolumeSnapshot name");
        return Err(Refusal::invalid(message));
    }
    Ok(names.into_iter().collect())
}

/// The spec is immutable, because the session gives access to what its creator was allowed to get.
fn update(request: &ReviewRequest<Requested>) -> Verdict {
    let (Some(new), Some(old)) = (&request.object, &request.old_object) else {
        return Err(Refusal::invalid("the review lacks the old or the new object"));
    };
    if new.spec != old.spec {
        return Err(Refusal::invalid(
            "spec: cannot be changed; create another SnapshotSessionRequest",
        ));
    }
    Ok(())
}

fn unknown(error: &kube::Error) -> Refusal {
    let failure = failure(ROLE, "create SubjectAccessReviews", error);
    Refusal::unknown("whether you may get the VolumeSnapshots", &failure)
}

fn denial_message(user: Option<&str>, namespace: &str, denied: &BTreeSet<String>) -> String {
    let names: Vec<_> = denied.iter().take(NAMED).map(|name| format!("{name:?}")).collect();
    let more = match denied.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(
        "spec.snapshots: {} may not get the volumesnapshots.{GROUP} {}{more} in the namespace {namespace}; grant the verb \
         get with a Role there or a ClusterRole",
        user.unwrap_or("the user"),
        names.join(", "),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;
    use crate::session_manager::session_limit::tests::{limit, put};
    use kubernetes::fake_api::FakeApi;
    use kubernetes::peer_limit::RUNNING;

    /// An API server that records the reviews and their concurrency, which a real one does not
    /// show. It allows every name but `secret`, and all of the namespace `all`.
    #[derive(Default)]
    struct FakeReviews {
        specs: Mutex<Vec<Value>>,
        running: AtomicUsize,
        max_running: AtomicUsize,
    }

    fn webhook(reviews: Arc<FakeReviews>) -> Webhook {
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let reviews = reviews.clone();
            async move {
                let now = reviews.running.fetch_add(1, Ordering::SeqCst) + 1;
                reviews.max_running.fetch_max(now, Ordering::SeqCst);
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut review: Value = serde_json::from_slice(&body).unwrap();
                let attributes = &review["spec"]["resourceAttributes"];
                let allowed = match attributes["name"].as_str() {
                    Some(name) => name != "secret",
                    None => attributes["namespace"] == "all",
                };
                reviews.specs.lock().unwrap().push(review["spec"].clone());
                tokio::time::sleep(Duration::from_millis(5)).await;
                review["status"] = json!({ "allowed": allowed });
                reviews.running.fetch_sub(1, Ordering::SeqCst);
                let answer = http::Response::new(Body::from(review.to_string().into_bytes()));
                Ok::<_, std::convert::Infallible>(answer)
            }
        });
        let client = Client::new(service, "default");
        Webhook {
            reviewer: Reviewer::new(client, Duration::ZERO),
            turns: PeerLimit::default(),
            limit: None,
            policy: None,
        }
    }

    fn creation(snapshots: &[String], namespace: Option<&str>) -> ReviewRequest<Requested> {
        let (kind, resource) = (
            json!({ "group": "", "version": "", "kind": "" }),
            json!({ "group": "", "version": "", "resource": "" }),
        );
        let user = json!({
            "username": "alice", "uid": "u-1", "groups": ["g-1", "g-2"], "extra": { "scope": ["s"] },
        });
        serde_json::from_value(json!({
            "uid": "u", "kind": kind, "resource": resource, "operation": "CREATE",
            "namespace": namespace, "userInfo": user, "oldObject": null,
            "object": { "metadata": { "name": "r" }, "spec": { "snapshots": snapshots } },
        }))
        .unwrap()
    }

    #[tokio::test]
    async fn a_review_holds_all_attributes_of_the_creator() {
        let reviews = Arc::new(FakeReviews::default());
        let decision = webhook(reviews.clone()).decide(creation(&["a".into()], Some("apps"))).await;
        assert_eq!(decision, Ok(()));
        let attributes = json!({
            "verb": "get", "group": "snapshot.storage.k8s.io", "resource": "volumesnapshots",
            "namespace": "apps", "name": "a",
        });
        let expected = json!({
            "user": "alice", "uid": "u-1", "groups": ["g-1", "g-2"], "extra": { "scope": ["s"] },
            "resourceAttributes": attributes,
        });
        assert_eq!(*reviews.specs.lock().unwrap(), [expected]);
    }

    #[tokio::test]
    async fn each_name_is_reviewed_once_with_limited_concurrency() {
        let reviews = Arc::new(FakeReviews::default());
        let webhook = webhook(reviews.clone());
        let names = |of: usize| -> Vec<_> {
            (0..60).map(|number| format!("s{of}-{}", number % 50)).collect()
        };
        let others =
            (0..4).map(|of| tokio::spawn(webhook.clone().decide(creation(&names(of), Some("n")))));
        for other in others.collect::<Vec<_>>() {
            assert_eq!(other.await.unwrap(), Ok(()));
        }
        // One more, which are equal and run at the same time, for all of the namespace.
        let counted = reviews.specs.lock().unwrap().len();
        assert!((4 * 50 + 1..=4 * 50 + 4).contains(&counted), "{counted}");
        assert_eq!(reviews.max_running.load(Ordering::SeqCst), RUNNING);
    }

    #[tokio::test]
    async fn a_user_of_all_snapshots_needs_one_review() {
        let reviews = Arc::new(FakeReviews::default());
        let names: Vec<_> = (0..64).map(|number| format!("s{number}")).collect();
        let request = creation(&names, Some("all"));
        assert_eq!(webhook(reviews.clone()).decide(request).await, Ok(()));
        assert_eq!(reviews.specs.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn one_denied_name_refuses_the_request() {
        let names = ["a".into(), "secret".into()];
        let webhook = webhook(Arc::default());
        let refused = webhook.clone().decide(creation(&names, Some("n"))).await.unwrap_err();
        assert_eq!(refused.code(), 403);
        assert!(refused.message().contains("\"secret\" in the namespace n"), "{refused:?}");
        for namespace in [None, Some(""), Some("A/b")] {
            let refused = webhook.clone().decide(creation(&names[..1], namespace)).await;
            assert_eq!(refused.unwrap_err().code(), 422, "{namespace:?}");
        }
    }

    #[tokio::test]
    async fn a_namespace_without_room_is_refused_without_reviews() {
        let api = FakeApi::default();
        let turns = PeerLimit::default();
        let (client, limit) = (api.client(), Some(limit(&api, 2)));
        let reviewer = Reviewer::new(client, Duration::ZERO);
        let webhook = Webhook { reviewer, turns: turns.clone(), limit, policy: None };
        let request = || creation(&["a".into()], Some("apps"));
        api.allow_get("apps", "a");
        put(&api, "first");
        let mut others = Vec::new();
        for _ in 0..RUNNING {
            others.push(turns.turn(Peer::unknown()).await.unwrap());
        }
        // Another request is created while the reviews of this one wait.
        let waiting = tokio::spawn(webhook.clone().decide(request()));
        while api.calls("GET") == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        put(&api, "second");
        drop(others);
        let refused = waiting.await.unwrap().unwrap_err();
        assert!(refused.code() == 403 && refused.message().contains("maximum is 2"), "{refused:?}");
        assert_eq!(api.calls("POST"), 1);
        assert_eq!(webhook.decide(request()).await, Err(refused));
        assert_eq!(api.calls("POST"), 1);
    }

    #[test]
    fn names_are_checked_regardless_of_the_crd() {
        let of = |names: &[&str]| snapshots(names.iter().map(|name| (*name).into()).collect());
        assert_eq!(of(&["b", "a", "b"]).unwrap().len(), 2);
        let many = vec!["a"; MAX_SNAPSHOTS + 1];
        for bad in [&[][..], &["A"], &[""], &["a/b"], &many] {
            assert_eq!(of(bad).unwrap_err().code(), 422, "{bad:?}");
        }
    }

    #[test]
    fn only_the_spec_is_immutable() {
        let object = |snapshot: &str, label: &str| -> Requested {
            serde_json::from_value(serde_json::json!({
                "metadata": { "name": "r", "labels": { "team": label } },
                "spec": { "snapshots": [snapshot] },
            }))
            .unwrap()
        };
        let request = |old, new| -> ReviewRequest<Requested> {
            let kind = serde_json::json!({ "group": "", "version": "", "kind": "" });
            let resource = serde_json::json!({ "group": "", "version": "", "resource": "" });
            let mut request: ReviewRequest<Requested> =
                serde_json::from_value(serde_json::json!({
                    "uid": "u", "kind": kind, "resource": resource, "operation": "UPDATE", "userInfo": {},
                    "object": null, "oldObject": null,
                }))
                .unwrap();
            (request.old_object, request.object) = (old, new);
            request
        };
        let (a, b) = (object("a", "x"), object("b", "x"));
        assert!(update(&request(Some(a.clone()), Some(object("a", "y")))).is_ok());
        for (old, new) in [(Some(a.clone()), Some(b)), (None, Some(a.clone())), (Some(a), None)] {
            assert_eq!(update(&request(old, new)).unwrap_err().code(), 422);
        }
    }
}
