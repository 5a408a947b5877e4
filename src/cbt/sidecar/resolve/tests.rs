//! Resolving base_snapshot_id, and its refusals, against an API server that allows no watch.

use std::time::Duration;

use k8s_openapi::api::authentication::v1::UserInfo;
use kube::Api;
use kube::runtime::watcher;
use serde_json::{Value, json};
use tokio::sync::watch;
use tonic::Code;

use super::*;
use kubernetes::cache::Cache;
use kubernetes::fake_api::{FakeApi, WATCHED};
use kubernetes::review::Reviewer;
use kubernetes::snapshot;
use telemetry::shutdown::{Phase, Shutdown};

const DRIVER: &str = "d.example";
const GROUP: &str = "/apis/snapshot.storage.k8s.io/v1";

/// An API server with the VolumeSnapshot `shop/target`, which has the handle `target-1`.
fn api() -> FakeApi {
    let api = FakeApi::default();
    put(&api, "shop", "target", "target-1");
    api
}

/// A VolumeSnapshot of the volume `volume-1` and its content.
fn put(api: &FakeApi, namespace: &str, name: &str, handle: &str) {
    put_from(api, namespace, name, handle, json!({ "volumeHandle": "volume-1" }), 1);
}

/// The same with this source and creation time.
fn put_from(api: &FakeApi, namespace: &str, name: &str, handle: &str, source: Value, time: i64) {
    let content = format!("content-{namespace}-{name}");
    let object = json!({
        "metadata": { "namespace": namespace, "name": name, "uid": content },
        "spec": { "source": {} },
        "status": { "readyToUse": true, "boundVolumeSnapshotContentName": content },
    });
    api.put(&format!("{GROUP}/namespaces/{namespace}/volumesnapshots/{name}"), object);
    let object = json!({
        "metadata": { "name": content },
        "spec": {
            "driver": DRIVER, "deletionPolicy": "Delete", "source": source,
            "volumeSnapshotRef": { "namespace": namespace, "name": name, "uid": content },
        },
        "status": { "readyToUse": true, "snapshotHandle": handle, "creationTime": time },
    });
    api.put(&format!("{GROUP}/volumesnapshotcontents/{content}"), object);
}

/// The sidecar's lookups. They run until the sender is dropped.
struct Fixture {
    resolver: Resolver,
    reviewer: Reviewer,
    _phase: watch::Sender<Phase>,
}

impl Fixture {
    fn new(api: &FakeApi, base_reference: BaseReference) -> Self {
        let (phase, shutdown) = Shutdown::manual();
        let client = api.client();
        let watched = || watcher::Config::default().labels(WATCHED);
        let snapshots = {
            let (all, client) = (Api::all(client.clone()), client.clone());
            let of = move |namespace: &str| Api::namespaced(client.clone(), namespace);
            Cache::start(all, of, watched(), |_| None, shutdown.clone())
        };
        let all: Api<VolumeSnapshotContent> = Api::all(client);
        let one = all.clone();
        let contents =
            Cache::start(all, move |_| one.clone(), watched(), snapshot::handle, shutdown);
        let bound = bound_snapshot::Resolver { snapshots, contents };
        let reviewer = Reviewer::new(api.client(), Duration::from_secs(60));
        Self { resolver: Resolver { bound, base_reference }, reviewer, _phase: phase }
    }

    /// The driver's handle of the base, for a delta to `shop/target`.
    async fn base(&self, reference: &str) -> Result<String, Refusal> {
        let target = self.resolver.target(DRIVER, "shop", "target").await?;
        let user = UserInfo { username: Some("backup".into()), ..UserInfo::default() };
        let caller = Caller::new(self.reviewer.clone(), user);
        self.resolver.base(DRIVER, reference, &target, &caller).await
    }
}

/// The same with a new sidecar.
async fn base(api: &FakeApi, kind: BaseReference, reference: &str) -> Result<String, Refusal> {
    Fixture::new(api, kind).base(reference).await
}

#[tokio::test]
async fn a_name_never_takes_precedence_over_a_handle() {
    let api = api();
    put(&api, "shop", "first", "handle-1");
    // An attacker who knows the base's handle creates this to remove blocks from the next delta.
    put(&api, "shop", "handle-1", "handle-2");
    assert_eq!(base(&api, BaseReference::Id, "handle-1").await.unwrap(), "handle-1");
    assert_eq!(base(&api, BaseReference::Name, "handle-1").await.unwrap(), "handle-2");
    let refusal = base(&api, BaseReference::Either, "handle-1").await.unwrap_err();
    assert_eq!((refusal.reason, refusal.code()), (Reason::AmbiguousBase, Code::InvalidArgument));
    let message = refusal.message();
    assert!(message.starts_with("base_snapshot_id: ") && message.contains("send its handle"));
    assert!(message.contains("--base-reference id"), "{message}");
}

#[tokio::test]
async fn a_name_equal_to_its_own_handle_is_not_ambiguous() {
    let api = api();
    put(&api, "shop", "handle-1", "handle-1");
    // The same snapshot, imported into another namespace.
    put(&api, "elsewhere", "first", "handle-1");
    for kind in [BaseReference::Id, BaseReference::Name, BaseReference::Either] {
        assert_eq!(base(&api, kind, "handle-1").await.unwrap(), "handle-1", "{kind:?}");
    }
}

#[tokio::test]
async fn base_reference_selects_what_a_base_refers_to() {
    let api = api();
    put(&api, "shop", "first", "handle-1");
    use BaseReference::{Either, Id, Name};
    for (kind, reference, found) in [
        // The driver decides about a handle without content.
        (Id, "first", Ok("first")),
        (Id, "handle-1", Ok("handle-1")),
        (Id, "gone", Ok("gone")),
        (Name, "first", Ok("handle-1")),
        (Name, "handle-1", Err(Reason::SnapshotMissing)),
        (Name, "Handle/7", Err(Reason::SnapshotMissing)),
        (Either, "first", Ok("handle-1")),
        (Either, "handle-1", Ok("handle-1")),
        (Either, "Handle/7", Ok("Handle/7")),
    ] {
        let base = base(&api, kind, reference).await.map_err(|refusal| refusal.reason);
        assert_eq!(base, found.map(str::to_owned), "{kind:?} {reference}");
    }
}

#[tokio::test]
async fn a_foreign_base_must_fit_the_target() {
    let api = api();
    let other = json!({ "volumeHandle": "volume-2" });
    put_from(&api, "elsewhere", "first", "handle-1", other, 1);
    let reason = async || base(&api, BaseReference::Id, "handle-1").await.unwrap_err().reason;
    // A caller without permission does not learn the base's volume.
    assert_eq!(reason().await, Reason::ForeignBase);
    api.allow_get("elsewhere", "first");
    assert_eq!(reason().await, Reason::OtherVolume);
}

#[tokio::test]
async fn a_base_of_the_same_namespace_needs_no_extra_review() {
    let api = api();
    put(&api, "elsewhere", "first", "handle-1");
    put(&api, "shop", "first", "handle-1");
    assert_eq!(base(&api, BaseReference::Id, "handle-1").await.unwrap(), "handle-1");
    assert_eq!(base(&api, BaseReference::Id, "gone").await.unwrap(), "gone");
    assert_eq!(api.calls("POST"), 0);
}

#[tokio::test]
async fn a_change_id_is_checked_like_an_id_of_the_request() {
    let api = api();
    put(&api, "shop", "first", "handle-1");
    let path = format!("{GROUP}/namespaces/shop/volumesnapshots/first");
    let annotated = |id: &str| {
        let note = json!({ "csi.vsphere.volume/change-id": id });
        let content = "content-shop-first";
        json!({
            "metadata": {
                "namespace": "shop", "name": "first", "uid": content, "annotations": note,
            },
            "spec": { "source": {} },
            "status": { "readyToUse": true, "boundVolumeSnapshotContentName": content },
        })
    };
    api.put(&path, annotated("52 21/7"));
    use BaseReference::{Either, Id, Name};
    for (kind, found) in [(Id, "first"), (Name, "52 21/7"), (Either, "52 21/7")] {
        assert_eq!(base(&api, kind, "first").await.unwrap(), found, "{kind:?}");
    }
    // The handle of a snapshot that the caller may not get.
    put(&api, "elsewhere", "other", "handle-2");
    api.put(&path, annotated("handle-2"));
    for kind in [Name, Either] {
        let refusal = base(&api, kind, "first").await.unwrap_err();
        assert_eq!(refusal.reason, Reason::ForeignBase, "{kind:?}");
    }
}
