//! A fake API server for tests: serves objects by path, and access reviews. It permits no watch,
//! like the role of the released sidecar, and needs neither processes nor files.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

/// Clones share the state.
#[derive(Clone, Default)]
pub struct FakeApi(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    /// Permitted actions: verb, namespace and name.
    rights: BTreeSet<[String; 3]>,
    /// Method and path of every call except watches.
    calls: Vec<String>,
    fails: bool,
}

impl FakeApi {
    pub fn put(&self, path: &str, object: Value) {
        self.state().objects.insert(path.to_owned(), object);
    }

    /// From now on, reviews allow all users to `get` this object.
    pub fn allow_get(&self, namespace: &str, name: &str) {
        self.state().rights.insert(["get", namespace, name].map(str::to_owned));
    }

    /// From now on, all reads fail.
    pub fn fail(&self) {
        self.state().fails = true;
    }

    /// The number of calls so far whose text starts with `begin`.
    pub fn calls(&self, begin: &str) -> usize {
        self.state().calls.iter().filter(|call| call.starts_with(begin)).count()
    }

    pub fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let api = api.clone();
            async move { Ok::<_, std::io::Error>(api.answer(request).await) }
        });
        Client::new(service, "default")
    }

    async fn answer(&self, request: http::Request<Body>) -> http::Response<Body> {
        let (uri, method) = (request.uri().clone(), request.method().clone());
        // A watch starts with a list, which its selector distinguishes.
        if uri.query().is_some_and(|query| query.contains(WATCHED) || query.contains("watch=")) {
            return failure(403);
        }
        self.state().calls.push(format!("{method} {}", uri.path()));
        if method == http::Method::POST {
            let body = request.into_body().collect_bytes().await.unwrap();
            return self.reviewed(serde_json::from_slice(&body).unwrap());
        }
        // Let concurrent callers send their requests first.
        tokio::task::yield_now().await;
        let state = self.state();
        if state.fails {
            return failure(503);
        }
        if let Some(object) = state.objects.get(uri.path()) {
            return respond(200, object);
        }
        let within = format!("{}/", uri.path());
        let items = state.objects.iter().filter(|(path, _)| path.starts_with(&within));
        let mut items: Vec<_> = items.map(|(_, object)| object).collect();
        let query = uri.query().unwrap_or_default().split('&');
        let Some(limit) = query.filter_map(|part| part.strip_prefix("limit=")).next() else {
            return failure(404);
        };
        let more = items.len().saturating_sub(limit.parse().unwrap());
        items.truncate(items.len() - more);
        respond(200, &json!({ "metadata": { "remainingItemCount": more }, "items": items }))
    }

    fn reviewed(&self, mut review: Value) -> http::Response<Body> {
        let attributes = review["spec"]["resourceAttributes"].clone();
        let word = |field: &str| attributes[field].as_str().unwrap_or_default().to_owned();
        let right = [word("verb"), word("namespace"), word("name")];
        review["status"] = json!({ "allowed": self.state().rights.contains(&right) });
        respond(201, &review)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

/// Selector of the caches' watches in tests, which distinguishes a watch's list from other lists.
pub const WATCHED: &str = "watched";

fn respond(code: u16, body: &Value) -> http::Response<Body> {
    let body = Body::from(serde_json::to_vec(body).unwrap());
    http::Response::builder().status(code).body(body).unwrap()
}

fn failure(code: u16) -> http::Response<Body> {
    let reason = match code {
        404 => "NotFound",
        503 => "ServiceUnavailable",
        _ => "Forbidden",
    };
    respond(code, &json!({ "status": "Failure", "code": code, "message": "", "reason": reason }))
}
