//! The validating webhook (KEP-3314, session design, "The Snapshot Session Manager"): whoever asks for a session has to be allowed to get
//! each of its VolumeSnapshots. What cannot be found out is refused.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use k8s_openapi::api::authentication::v1::UserInfo;
use kube::Client;
use kube::core::admission::{AdmissionRequest, Operation};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::kubernetes::admission::{Refusal, Verdict, validating};
use crate::kubernetes::client::failure;
use crate::kubernetes::https::Limits;
use crate::kubernetes::name;
use crate::kubernetes::review::{Action, Denied, Reviewer};
use crate::kubernetes::session::{MAX_SNAPSHOTS, SnapshotSessionRequest};
use crate::kubernetes::snapshot::GROUP;

/// Where the webhook is.
pub const PATH: &str = "/validate-snapshotsessionrequest";
/// Objects of Kubernetes are smaller, and at most two come at once, before and after.
pub const LIMITS: Limits = Limits { body: 3 << 20, request: Duration::from_secs(9) };

/// How long a judgement may take: the API server waits 10 s.
const JUDGEMENT: Duration = Duration::from_secs(8);
/// Reviews that are asked for at once; more wait.
const REVIEWS: usize = 16;
/// Names in a refusal.
const NAMED: usize = 3;
/// Who is told to have no right.
const ROLE: &str = "session manager";

/// What is served over HTTPS. Reviews are asked for through `client`, which is to have a rate of its own: a flood of
/// requests then starves nobody but itself.
pub fn routes(client: Client) -> Router {
    let webhook = Webhook {
        // A right that was taken away must not be found a moment later.
        reviewer: Reviewer::new(client, Duration::ZERO),
        turns: Arc::new(Semaphore::new(REVIEWS)),
    };
    let judge = move |request| webhook.clone().judge(request);
    Router::new().route(PATH, validating(JUDGEMENT, judge))
}

#[derive(Clone)]
struct Webhook {
    reviewer: Reviewer,
    turns: Arc<Semaphore>,
}

impl Webhook {
    async fn judge(self, request: AdmissionRequest<SnapshotSessionRequest>) -> Verdict {
        match request.operation {
            Operation::Create => self.creation(request).await,
            Operation::Update => update(&request),
            // They give nobody access to anything.
            Operation::Delete | Operation::Connect => Ok(()),
        }
    }

    async fn creation(&self, request: AdmissionRequest<SnapshotSessionRequest>) -> Verdict {
        let namespace = request.namespace.unwrap_or_default();
        if !name::is_namespace(&namespace) {
            return Err(Refusal::invalid("metadata.namespace: is missing or no name"));
        }
        let Some(object) = request.object else {
            return Err(Refusal::invalid("the review has no object to be judged"));
        };
        let names = snapshots(object.spec.snapshots)?;
        let denied = self.denied(request.user_info.clone(), &namespace, names).await?;
        if denied.is_empty() {
            return Ok(());
        }
        Err(Refusal::not_allowed(words(&request.user_info, &namespace, &denied)))
    }

    /// The VolumeSnapshots that the user may not get.
    async fn denied(
        &self,
        user: UserInfo,
        namespace: &str,
        names: BTreeSet<String>,
    ) -> Result<BTreeSet<String>, Refusal> {
        let user = Arc::new(user);
        // What still runs ends when this is dropped.
        let mut reviews = JoinSet::new();
        for name in names {
            let (webhook, user, namespace) = (self.clone(), user.clone(), namespace.to_owned());
            reviews.spawn(async move {
                // Nobody closes it.
                let _turn = webhook.turns.acquire().await;
                let action = Action {
                    verb: "get",
                    group: GROUP,
                    resource: "volumesnapshots",
                    subresource: None,
                    namespace: &namespace,
                    name: Some(&name),
                };
                let allowed = webhook.reviewer.authorize(&user, action).await;
                (name, allowed)
            });
        }
        let mut denied = BTreeSet::new();
        while let Some(review) = reviews.join_next().await {
            match review {
                Ok((_, Ok(()))) => {}
                Ok((name, Err(Denied::Refused(_)))) => {
                    denied.insert(name);
                }
                Ok((_, Err(Denied::Unknown(error)))) => return Err(unknown(&error)),
                Err(_) => return Err(Refusal::failed("a review of the rights ended early")),
            }
        }
        Ok(denied)
    }
}

/// Each name once. The definition of the kind has the same bounds; here nothing is taken on trust.
fn snapshots(names: Vec<String>) -> Result<BTreeSet<String>, Refusal> {
    if names.is_empty() || names.len() > MAX_SNAPSHOTS {
        let message =
            format!("spec.snapshots: has {} names, not 1 to {MAX_SNAPSHOTS}", names.len());
        return Err(Refusal::invalid(message));
    }
    if let Some(bad) = names.iter().find(|name| !name::is_object(name)) {
        let message = format!("spec.snapshots: {bad:?} is not the name of a VolumeSnapshot");
        return Err(Refusal::invalid(message));
    }
    Ok(names.into_iter().collect())
}

/// A session is for what its creator was allowed. Everything else of the object may change.
fn update(request: &AdmissionRequest<SnapshotSessionRequest>) -> Verdict {
    let (Some(new), Some(old)) = (&request.object, &request.old_object) else {
        return Err(Refusal::invalid(
            "the review has not both objects, the one before and the one after",
        ));
    };
    if new.spec != old.spec {
        return Err(Refusal::invalid(
            "spec: cannot be changed; make another SnapshotSessionRequest",
        ));
    }
    Ok(())
}

fn unknown(error: &kube::Error) -> Refusal {
    let failure = failure(ROLE, "create SubjectAccessReviews", error);
    Refusal::unknown("whether you may get the VolumeSnapshots", &failure)
}

fn words(user: &UserInfo, namespace: &str, denied: &BTreeSet<String>) -> String {
    let names: Vec<_> = denied.iter().take(NAMED).map(|name| format!("{name:?}")).collect();
    let more = match denied.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(
        "spec.snapshots: {} may not get the volumesnapshots.{GROUP} {}{more} in the namespace {namespace}; a Role there or a \
         ClusterRole has to allow the verb get",
        user.username.as_deref().unwrap_or("the user"),
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

    /// An API server for what a real one cannot be asked: who was asked about, and how many at once. It allows whatever is
    /// not `secret`.
    #[derive(Default)]
    struct Asked {
        specs: Mutex<Vec<Value>>,
        running: AtomicUsize,
        most: AtomicUsize,
    }

    fn webhook(asked: Arc<Asked>) -> Webhook {
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let asked = asked.clone();
            async move {
                let now = asked.running.fetch_add(1, Ordering::SeqCst) + 1;
                asked.most.fetch_max(now, Ordering::SeqCst);
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut review: Value = serde_json::from_slice(&body).unwrap();
                let name = review["spec"]["resourceAttributes"]["name"].clone();
                asked.specs.lock().unwrap().push(review["spec"].clone());
                tokio::time::sleep(Duration::from_millis(5)).await;
                review["status"] = json!({ "allowed": name != "secret" });
                asked.running.fetch_sub(1, Ordering::SeqCst);
                let answer = http::Response::new(Body::from(review.to_string().into_bytes()));
                Ok::<_, std::convert::Infallible>(answer)
            }
        });
        let client = Client::new(service, "default");
        Webhook {
            reviewer: Reviewer::new(client, Duration::ZERO),
            turns: Arc::new(Semaphore::new(REVIEWS)),
        }
    }

    fn creation(
        snapshots: &[String],
        namespace: Option<&str>,
    ) -> AdmissionRequest<SnapshotSessionRequest> {
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
    async fn everything_that_is_known_of_the_creator_is_asked_about() {
        let asked = Arc::new(Asked::default());
        let judged = webhook(asked.clone()).judge(creation(&["a".into()], Some("apps"))).await;
        assert_eq!(judged, Ok(()));
        let attributes = json!({
            "verb": "get", "group": "snapshot.storage.k8s.io", "resource": "volumesnapshots",
            "namespace": "apps", "name": "a",
        });
        let expected = json!({
            "user": "alice", "uid": "u-1", "groups": ["g-1", "g-2"], "extra": { "scope": ["s"] },
            "resourceAttributes": attributes,
        });
        assert_eq!(*asked.specs.lock().unwrap(), [expected]);
    }

    #[tokio::test]
    async fn each_name_is_asked_for_once_and_a_few_at_a_time() {
        let asked = Arc::new(Asked::default());
        let webhook = webhook(asked.clone());
        let names: Vec<_> = (0..60).map(|number| format!("s{}", number % 50)).collect();
        let others =
            (0..4).map(|_| tokio::spawn(webhook.clone().judge(creation(&names, Some("n")))));
        for other in others.collect::<Vec<_>>() {
            assert_eq!(other.await.unwrap(), Ok(()));
        }
        assert_eq!(asked.specs.lock().unwrap().len(), 4 * 50);
        assert_eq!(asked.most.load(Ordering::SeqCst), REVIEWS);
    }

    #[tokio::test]
    async fn one_that_is_denied_is_enough() {
        let names = ["a".into(), "secret".into()];
        let webhook = webhook(Arc::default());
        let refused = webhook.clone().judge(creation(&names, Some("n"))).await.unwrap_err();
        assert_eq!(refused.code(), 403);
        assert!(refused.message().contains("\"secret\" in the namespace n"), "{refused:?}");
        for namespace in [None, Some(""), Some("A/b")] {
            let refused = webhook.clone().judge(creation(&names[..1], namespace)).await;
            assert_eq!(refused.unwrap_err().code(), 422, "{namespace:?}");
        }
    }

    #[test]
    fn a_refusal_names_who_what_where_and_the_next_step() {
        let user = UserInfo { username: Some("alice".into()), ..UserInfo::default() };
        let denied = |count| (1..=count).map(|number| format!("s{number}")).collect();
        let told = words(&user, "apps", &denied(5));
        for part in ["alice", r#""s1", "s2", "s3" and 2 more"#, "namespace apps", "the verb get"] {
            assert!(told.contains(part), "{told}");
        }
        assert!(!words(&user, "apps", &denied(3)).contains("more"));
    }

    #[test]
    fn names_are_checked_though_the_definition_does_so() {
        let of = |names: &[&str]| snapshots(names.iter().map(|name| (*name).into()).collect());
        assert_eq!(of(&["b", "a", "b"]).unwrap().len(), 2);
        let many = vec!["a"; MAX_SNAPSHOTS + 1];
        for bad in [&[][..], &["A"], &[""], &["a/b"], &many] {
            assert_eq!(of(bad).unwrap_err().code(), 422, "{bad:?}");
        }
    }

    #[test]
    fn only_the_spec_is_kept_from_change() {
        let object = |snapshot: &str, label: &str| -> SnapshotSessionRequest {
            serde_json::from_value(serde_json::json!({
                "metadata": { "name": "r", "labels": { "team": label } },
                "spec": { "snapshots": [snapshot] },
            }))
            .unwrap()
        };
        let request = |old, new| -> AdmissionRequest<SnapshotSessionRequest> {
            let kind = serde_json::json!({ "group": "", "version": "", "kind": "" });
            let resource = serde_json::json!({ "group": "", "version": "", "resource": "" });
            let mut request: AdmissionRequest<SnapshotSessionRequest> =
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
