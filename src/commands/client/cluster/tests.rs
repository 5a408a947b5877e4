//! Listings through the released API end to end, against [`fake_sidecar`]: requests, resumption
//! after interruptions, and errors.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use tokio::time::Instant;
use tonic::Code;

use super::super::block_map::{BlockMap, Query, Source, Window};
use super::fake_sidecar::{
    CAPACITY, Cluster, DRIVER, End, REVIEW_PATH, Script, SidecarRequest, content_path,
    content_spec, service, service_path, snapshot_path,
};
use super::find::Finder;
use super::metadata::Metadata;
use super::resume::Resuming;
use super::token::Tokens;
use super::{Limits, token_expiry};
use grpc::proto::snapshotmetadata::BlockMetadataType;
use storage::Extent;

pub const K: i64 = 4096;
pub const MINUTE: Duration = Duration::from_secs(60);

pub fn allocated() -> Query {
    Query::Allocated { snapshot: "b".to_owned() }
}

pub fn delta(base: &str) -> Query {
    Query::Delta { base: base.to_owned(), target: "b".to_owned() }
}

pub fn limits(timeout: Duration) -> Limits {
    Limits { deadline: Instant::now() + timeout, timeout }
}

/// `address` replaces that of the service.
fn metadata(cluster: &Cluster, query: Query, offset: i64, address: Option<String>) -> Metadata {
    let account = Some(("shop".to_owned(), "backup".to_owned()));
    let tokens = Tokens::requested(cluster.client(), account, Duration::from_secs(600));
    let finder = Finder::new(cluster.client(), "shop", address);
    let window = Window { starting_offset: offset, max_results: 0 };
    Metadata::new(finder, tokens, query, window, limits(MINUTE).deadline)
}

fn source(metadata: Metadata) -> Resuming<Metadata> {
    Resuming::new(metadata, limits(MINUTE))
}

async fn list(cluster: &Cluster, query: Query) -> Result<Vec<(i64, i64)>> {
    read(source(metadata(cluster, query, 0, None))).await
}

async fn refused(cluster: &Cluster, query: Query) -> String {
    error_text(list(cluster, query).await)
}

/// The error of a listing with little time.
async fn refused_soon(cluster: &Cluster) -> String {
    let metadata = metadata(cluster, allocated(), 0, None);
    error_text(read(Resuming::new(metadata, limits(Duration::from_secs(1)))).await)
}

/// The extents of a complete listing, in units of 4 KiB.
pub async fn read(source: impl Source) -> Result<Vec<(i64, i64)>> {
    let mut map = BlockMap::new(source);
    let mut all = Vec::new();
    while let Some(extents) = map.next().await? {
        let units = |extent: Extent| (extent.offset as i64 / K, extent.length as i64 / K);
        all.extend(extents.into_iter().map(units));
    }
    Ok(all)
}

/// The listing that these scripts yield, and the requested offsets, in units of 4 KiB.
async fn played(scripts: Vec<Script>) -> (Result<Vec<(i64, i64)>>, Vec<i64>) {
    let cluster = Cluster::new(scripts).await;
    let extents = list(&cluster, allocated()).await;
    (extents, cluster.sidecar_requests().iter().map(|request| request.offset / K).collect())
}

/// Messages of extents in units of 4 KiB.
pub fn script(messages: &[&[(i64, i64)]], end: End) -> Script {
    let bytes = |message: &&[(i64, i64)]| message.iter().map(|(o, l)| (o * K, l * K)).collect();
    let messages = messages.iter().map(bytes).collect();
    Script { capacity: CAPACITY, style: BlockMetadataType::VariableLength, messages, end }
}

pub fn error_text(outcome: Result<Vec<(i64, i64)>>) -> String {
    format!("{:#}", outcome.expect_err("an error"))
}

const UNAVAILABLE: End = End::Code(Code::Unavailable);

#[tokio::test]
async fn an_uninterrupted_listing_is_requested_once() {
    let cluster = Cluster::new(vec![script(&[&[(0, 1), (4, 2)], &[(9, 1)]], End::Whole)]).await;
    let listing = source(metadata(&cluster, delta("a"), 2 * K, None));
    let extents = read(listing).await.unwrap();
    assert_eq!(extents, [(0, 1), (4, 2), (9, 1)]);
    let request = SidecarRequest {
        token: "token-1".to_owned(),
        base: "handle-a".to_owned(),
        snapshot: "b".to_owned(),
        offset: 2 * K,
    };
    assert_eq!(cluster.sidecar_requests(), [request]);
    let token = "POST /api/v1/namespaces/shop/serviceaccounts/backup/token?";
    assert_eq!(cluster.calls().iter().filter(|call| *call == token).count(), 1);
}

#[tokio::test]
async fn an_interrupted_listing_resumes_where_it_broke() {
    for end in [UNAVAILABLE, End::Break] {
        let (extents, offsets) = played(vec![
            script(&[], end),
            script(&[&[]], end),
            script(&[&[(0, 1), (4, 2)]], end),
            script(&[], end),
            script(&[&[], &[(9, 1)]], end),
            script(&[&[(12, 1)]], end),
            // No more messages.
            script(&[], End::Whole),
        ])
        .await;
        assert_eq!(extents.unwrap(), [(0, 1), (4, 2), (9, 1), (12, 1)]);
        assert_eq!(offsets, [0, 0, 0, 6, 6, 10, 13]);
    }
}

#[tokio::test]
async fn extents_repeated_by_a_rounded_offset_are_dropped() {
    for style in [BlockMetadataType::FixedLength, BlockMetadataType::VariableLength] {
        let (extents, offsets) = played(vec![
            Script { style, ..script(&[&[(0, 1), (4, 1), (5, 1)]], UNAVAILABLE) },
            // A repetition from 0, then an extent that crosses the seam.
            Script { style, ..script(&[&[(0, 1), (4, 1)], &[(5, 1), (6, 1)]], UNAVAILABLE) },
            Script { style, ..script(&[&[(4, 6)], &[(20, 1)]], End::Whole) },
        ])
        .await;
        assert_eq!(extents.unwrap(), [(0, 1), (4, 1), (5, 1), (6, 1), (7, 3), (20, 1)]);
        assert_eq!(offsets, [0, 6, 7]);
    }
    // The order is checked within the new stream, too.
    let again = script(&[&[(4, 1)], &[(0, 1)]], End::Whole);
    let (extents, _) = played(vec![script(&[&[(5, 1)]], UNAVAILABLE), again]).await;
    assert!(error_text(extents).contains("out of order"));
}

#[tokio::test]
async fn a_listing_that_broke_after_the_last_byte_is_complete() {
    let last = CAPACITY / K - 1;
    let (extents, offsets) = played(vec![script(&[&[(last, 1)]], End::Break)]).await;
    assert_eq!(extents.unwrap(), [(last, 1)]);
    assert_eq!(offsets, [0]);
    let (extents, _) = played(vec![script(&[&[(last, 1)]], End::Code(Code::Internal))]).await;
    assert!(error_text(extents).starts_with("INTERNAL"));
}

#[tokio::test]
async fn a_stream_without_messages_is_an_empty_listing() {
    let (restored, claimed) = (json!(4096), json!("8Ki"));
    for (restore_size, claim, size) in [
        (restored.clone(), None, Some(4096)),
        (restored, Some(&claimed), Some(4096)),
        // CSI: 0 means that the driver does not report the size.
        (json!(0), Some(&claimed), Some(8192)),
        (Value::Null, Some(&claimed), Some(8192)),
        (json!(0), None, None),
    ] {
        let cluster = Cluster::new(vec![script(&[], End::Whole)]).await;
        let of = json!({ "persistentVolumeClaimName": "data" });
        let status = json!({ "boundVolumeSnapshotContentName": "content-b" });
        cluster.put(&snapshot_path("b"), json!({ "spec": { "source": of }, "status": status }));
        let status = json!({ "snapshotHandle": "handle-b", "restoreSize": restore_size });
        cluster.put(&content_path("b"), json!({ "spec": content_spec("b"), "status": status }));
        if let Some(bytes) = claim {
            let status = json!({ "capacity": { "storage": bytes } });
            let path = "/api/v1/namespaces/shop/persistentvolumeclaims/data";
            cluster.put(path, json!({ "status": status }));
        }
        let mut map = BlockMap::new(source(metadata(&cluster, allocated(), 0, None)));
        assert!(map.next().await.unwrap().is_none());
        let shape = map.shape().unwrap();
        assert_eq!(shape.capacity_bytes, size, "{status}");
        assert_eq!(shape.block_metadata_type.as_str_name(), "UNKNOWN");
    }
}

#[tokio::test]
async fn a_content_of_another_snapshot_is_refused() {
    let cluster = Cluster::new(vec![script(&[], End::Whole)]).await;
    let status = json!({ "boundVolumeSnapshotContentName": "content-a" });
    cluster.put(&snapshot_path("b"), json!({ "spec": { "source": {} }, "status": status }));
    let error_text = refused_soon(&cluster).await;
    assert!(error_text.contains("content-a is not bound to VolumeSnapshot shop/b"), "{error_text}");
}

#[tokio::test]
async fn a_base_with_a_change_id_is_sent_by_it() {
    let cluster = Cluster::new(vec![script(&[&[]], End::Whole)]).await;
    let annotations = json!({ "csi.vsphere.volume/change-id": "52 21/7" });
    let metadata = json!({ "name": "a", "namespace": "shop", "annotations": annotations });
    let status = json!({ "boundVolumeSnapshotContentName": "content-a" });
    let object = json!({ "metadata": metadata, "spec": { "source": {} }, "status": status });
    cluster.put(&snapshot_path("a"), object);
    list(&cluster, delta("a")).await.unwrap();
    assert_eq!(cluster.sidecar_requests()[0].base, "52 21/7");
}

#[tokio::test]
async fn a_shape_that_changes_between_attempts_is_an_error() {
    let first = script(&[&[(0, 1)]], UNAVAILABLE);
    let second = script(&[&[(4, 1)]], End::Whole);
    let fixed = Script { style: BlockMetadataType::FixedLength, ..second.clone() };
    let grown = Script { capacity: 2 * CAPACITY, ..second };
    for other in [fixed, grown] {
        let (extents, _) = played(vec![first.clone(), other]).await;
        assert!(error_text(extents).contains("changed the block metadata type or the capacity"));
    }
}

#[tokio::test]
async fn an_expired_token_is_renewed_and_a_refused_one_is_not() {
    let expired = End::Code(Code::Unauthenticated);
    let cluster = Cluster::new(vec![
        script(&[&[(0, 1)]], expired),
        script(&[&[(1, 1)]], UNAVAILABLE),
        script(&[], expired),
        script(&[&[(2, 1)]], End::Whole),
    ])
    .await;
    assert_eq!(list(&cluster, allocated()).await.unwrap(), [(0, 1), (1, 1), (2, 1)]);
    let tokens: Vec<_> =
        cluster.sidecar_requests().into_iter().map(|request| request.token).collect();
    assert_eq!(tokens, ["token-1", "token-2", "token-3", "token-4"]);

    let (extents, _) = played(vec![script(&[], expired)]).await;
    let error_text = error_text(extents);
    assert!(error_text.starts_with("UNAUTHENTICATED: scripted; the token of ServiceAccount"));
    assert!(!error_text.contains("token-1"), "{error_text}");
}

#[tokio::test]
async fn after_a_token_or_time_limit_only_progress_helps() {
    for code in [Code::Unauthenticated, Code::DeadlineExceeded] {
        let end = End::Code(code);
        let part = |offset| script(&[&[(offset, 1)]], end);
        let whole = script(&[&[(2, 1)]], End::Whole);
        let (extents, offsets) = played(vec![part(0), part(1), whole]).await;
        assert_eq!(extents.unwrap(), [(0, 1), (1, 1), (2, 1)]);
        assert_eq!(offsets, [0, 1, 2]);
        let none = script(&[], end);
        for scripts in [vec![none.clone()], vec![part(0), none]] {
            let count = scripts.len();
            let (extents, offsets) = played(scripts).await;
            assert!(error_text(extents).starts_with(grpc::code_name(code)));
            assert_eq!(offsets.len(), count);
        }
    }
}

#[tokio::test]
async fn other_codes_end_the_listing_at_once() {
    for code in (1..=16).map(Code::from) {
        if matches!(code, Code::Unavailable | Code::Unauthenticated | Code::DeadlineExceeded) {
            continue;
        }
        let (extents, offsets) = played(vec![script(&[&[(0, 1)]], End::Code(code))]).await;
        let error_text = error_text(extents);
        let expected = format!("{}: scripted", grpc::code_name(code));
        assert!(error_text.starts_with(&expected), "{error_text}");
        assert_eq!(offsets, [0], "{code:?}");
    }
}

#[tokio::test]
async fn attempts_end_with_the_time_and_name_the_last_error() {
    let cluster = Cluster::new(vec![script(&[], UNAVAILABLE); 9]).await;
    let error_text = refused_soon(&cluster).await;
    assert!(error_text.contains("set a longer --timeout; UNAVAILABLE: scripted"), "{error_text}");
    // The pauses grow.
    assert!(cluster.sidecar_requests().len() < 6, "{:?}", cluster.sidecar_requests());
}

#[tokio::test]
async fn a_sidecar_with_a_new_address_and_authority_is_found() {
    let cluster =
        Cluster::new(vec![script(&[&[(0, 1)]], UNAVAILABLE), script(&[&[(1, 1)]], End::Whole)])
            .await;
    let mut map = BlockMap::new(source(metadata(&cluster, allocated(), 0, None)));
    assert_eq!(map.next().await.unwrap().unwrap().len(), 1);
    let (address, ca) = cluster.start_sidecar().await;
    let old = service(&address, &Cluster::new(Vec::new()).await.start_sidecar().await.1);
    cluster.put(&service_path(DRIVER), old);
    let moved = cluster.clone();
    tokio::spawn(async move {
        // First the address, later the authority. The API server fails once, too.
        tokio::time::sleep(Duration::from_millis(250)).await;
        moved.fail(&service_path(DRIVER), 503);
        moved.put(&service_path(DRIVER), service(&address, &ca));
    });
    assert_eq!(map.next().await.unwrap().unwrap()[0].offset, 4096);
    assert!(map.next().await.unwrap().is_none());
}

#[tokio::test]
async fn only_the_authorities_of_the_service_are_trusted() {
    let cluster = Cluster::new(Vec::new()).await;
    let (address, ca) = cluster.start_sidecar().await;
    let (_, other) = cluster.start_sidecar().await;
    // Another authority; a name that the certificate lacks; no certificate.
    let port = address.rsplit(':').next().unwrap();
    for (address, ca, why) in [
        (&address, &*other, "TLS with"),
        (&format!("127.0.0.1:{port}"), &*ca, "TLS with"),
        (&address, "nothing", "caCert"),
    ] {
        cluster.put(&service_path(DRIVER), service(address, ca));
        let error_text = refused(&cluster, allocated()).await;
        assert!(error_text.contains(why), "{error_text}");
    }
}

#[tokio::test]
async fn another_address_must_have_the_services_certificate() {
    let cluster = Cluster::new(vec![script(&[&[(0, 1)]], End::Whole)]).await;
    let (address, ca) = cluster.start_sidecar().await;
    let port = address.rsplit(':').next().unwrap();
    cluster.put(&service_path(DRIVER), service("localhost:1", &ca));
    let there = Some(format!("127.0.0.1:{port}"));
    let listing = source(metadata(&cluster, allocated(), 0, there));
    assert_eq!(read(listing).await.unwrap(), [(0, 1)]);
}

#[tokio::test]
async fn a_base_without_a_name_is_not_sent() {
    let cluster = Cluster::new(Vec::new()).await;
    for none in ["gone", "Handle/7"] {
        let error_text = refused(&cluster, delta(none)).await;
        assert!(error_text.contains(none) && error_text.contains("--base-id"), "{error_text}");
    }
    assert!(cluster.sidecar_requests().is_empty());
}

#[tokio::test]
async fn a_deleted_base_is_sent_as_the_handle_of_base_id() {
    // `a` is also the name of a VolumeSnapshot, which is not looked up.
    for handle in ["gone", "Handle/7", "a"] {
        let cluster = Cluster::new(vec![script(&[&[]], End::Whole)]).await;
        let metadata = metadata(&cluster, delta(handle), 0, None).base_by_handle(true);
        read(source(metadata)).await.unwrap();
        assert_eq!(cluster.sidecar_requests()[0].base, handle);
    }
}

#[tokio::test]
async fn a_service_without_the_drivers_name_is_found_by_label() {
    let cluster = Cluster::new(vec![script(&[&[(0, 1)]], End::Whole)]).await;
    let (address, ca) = cluster.start_sidecar().await;
    cluster.remove(&service_path(DRIVER));
    let listed = |names: &[&str]| {
        let item = |name: &&str| json!({ "metadata": { "name": name }, "spec": service(&address, &ca)["spec"] });
        json!({ "metadata": {}, "items": names.iter().map(item).collect::<Vec<_>>() })
    };
    for (names, why) in [(&[][..], "no SnapshotMetadataService"), (&["one", "two"], "one, two")] {
        cluster.put(&service_path(""), listed(names));
        let error_text = refused(&cluster, allocated()).await;
        assert!(error_text.contains(why), "{error_text}");
    }
    cluster.put(&service_path(""), listed(&["other-name"]));
    assert_eq!(list(&cluster, allocated()).await.unwrap(), [(0, 1)]);
    let selector = "labelSelector=cbt.storage.k8s.io%2Fdriver%3Dd.example";
    assert!(cluster.calls().iter().any(|call| call.contains(selector)), "{:?}", cluster.calls());
}

#[tokio::test]
async fn a_refusal_of_the_api_server_ends_the_listing_at_once() {
    let cluster = Cluster::new(Vec::new()).await;
    let token = "/api/v1/namespaces/shop/serviceaccounts/backup/token";
    for (path, what) in [
        (&snapshot_path("b"), "VolumeSnapshot shop/b"),
        (&content_path("b"), "VolumeSnapshotContent content-b"),
        (&service_path(DRIVER), "SnapshotMetadataService of driver d.example"),
        (&token.to_owned(), "token of ServiceAccount shop/backup"),
    ] {
        for code in [403, 503] {
            cluster.fail(path, code);
            let error_text = refused(&cluster, allocated()).await;
            assert!(error_text.starts_with(what) && error_text.contains("fails"), "{error_text}");
            assert_eq!(error_text.contains("RBAC"), code == 403, "{error_text}");
        }
    }
    assert!(cluster.sidecar_requests().is_empty());
}

#[tokio::test]
async fn an_unbound_snapshot_is_awaited() {
    let cluster = Cluster::new(vec![script(&[&[(0, 1)]], End::Whole)]).await;
    let unbound = json!({ "spec": { "source": {} } });
    cluster.put(&snapshot_path("b"), unbound);
    let binding = cluster.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(150)).await;
        let status = json!({ "boundVolumeSnapshotContentName": "content-b" });
        binding.put(&snapshot_path("b"), json!({ "spec": { "source": {} }, "status": status }));
    });
    assert_eq!(list(&cluster, allocated()).await.unwrap(), [(0, 1)]);
}

#[tokio::test]
async fn without_an_account_the_callers_own_is_used() {
    let user = |name: &str| json!({ "status": { "userInfo": { "username": name } } });
    let cluster = Cluster::new(Vec::new()).await;
    let own = || Tokens::requested(cluster.client(), None, Duration::from_secs(600));
    cluster.put(REVIEW_PATH, user("system:serviceaccount:ops:velero"));
    let Ok(token) = own().take("aud").await else { panic!("no token") };
    assert_eq!((&*token.secret, &*token.account), ("token-1", "ServiceAccount ops/velero"));
    cluster.put(REVIEW_PATH, user("admin"));
    let Err(failure) = own().take("aud").await else { panic!("a token for admin") };
    assert!(failure.error.to_string().contains("--service-account"), "{:#}", failure.error);
}

#[test]
fn times_that_kubernetes_would_refuse_are_refused_here() {
    assert!(token_expiry("10min").is_ok());
    for time in ["9min", "1000years", "soon"] {
        assert!(token_expiry(time).is_err(), "{time}");
    }
}
