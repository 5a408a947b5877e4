//! Drivers on several nodes behind one address.

use std::fs;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use csi_loopback::kubernetes::cbt_http::{Page, ProblemKind};
use csi_loopback::kubernetes::pod_certificate::{
    DENIED, ISSUED, PodCertificateRequest, PodCertificateRequestStatus,
};
use csi_loopback::proto::csi::v1 as csi;
use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Api;
use nix::sys::signal::Signal;
use rcgen::{CertificateParams, KeyPair};
use serde_json::json;
use support::BLOCK;
use support::cluster::cbt_http::{caller_rules, page_request};
use support::cluster::nodes::{Rig, certify};
use support::cluster::shared;
use support::cluster::sidecar::{AUDIENCE, channel_to, http};
use support::driver::assert_refused;
use tonic::metadata::MetadataValue;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status};

use csi::snapshot_metadata_client::SnapshotMetadataClient;

fn localhost() -> Endpoint {
    Endpoint::from_static("http://localhost")
}

fn extents(blocks: &[u64]) -> Vec<(u64, u64)> {
    blocks.iter().map(|block| (block * BLOCK, BLOCK)).collect()
}

#[test]
fn each_snapshot_is_answered_by_the_node_that_holds_it() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let blocks: [&[u64]; 2] = [&[1, 5, 9], &[2, 1000]];
    let histories = [0, 1].map(|node| rig.history(node, &format!("data-{node}"), blocks[node]));
    for (history, blocks) in histories.iter().zip(blocks) {
        assert_eq!(rig.ask(rig.delta(history)).unwrap().extents(), extents(blocks));
        assert_eq!(rig.ask(rig.allocated(&history[1])).unwrap().extents(), extents(blocks));
        assert_eq!(rig.ask(rig.allocated(&history[0])).unwrap().extents(), []);
    }
    // A base of another node's volume is the driver's to refuse.
    let [[other, _], [_, target]] = &histories;
    let mixed = rig.delta(&[other.clone(), target.clone()]);
    assert!(rig.ask(mixed).is_err());
}

#[test]
fn pages_come_from_the_node_that_holds_the_snapshot() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster, &[]);
    let caller = cluster.account(&rig.namespace, "aggregated-api");
    cluster.grant(&caller, &caller_rules());
    let driver = rig.shared.driver_name.clone();
    let blocks: [&[u64]; 2] = [&[1, 5, 9], &[2, 1000]];
    for node in [0, 1] {
        let [base, target] = rig.history(node, &format!("data-{node}"), blocks[node]);
        let page = |base: &str, offset, limit| {
            rig.page(&caller, &page_request(&driver, base, &target.handle, offset, limit)).page()
        };
        let numbers = |page: Page| page.changed_blocks.into_iter().map(|it| it.offset).collect();
        for base in [&base.handle[..], ""] {
            let found: Vec<u64> = numbers(page(base, 0, 100));
            assert_eq!(found, blocks[node], "{base}");
        }
        let first = page(&base.handle, 0, 1);
        assert_eq!(first.next, Some(blocks[node][1]));
        let rest: Vec<u64> = numbers(page(&base.handle, blocks[node][1], 100));
        assert_eq!(rest, blocks[node][1..]);
    }
    let unknown = rig.page(&caller, &page_request(&driver, "", "snap-x", 0, 1)).problem();
    assert_eq!(unknown.code.as_deref(), Some("NOT_FOUND"), "{unknown:?}");
    let [_, target] = rig.history(0, "more", &[3]);
    rig.nodes[0].sidecar.process.stop();
    let away = rig.page(&caller, &page_request(&driver, "", &target.handle, 0, 1)).problem();
    assert_eq!(away.kind, ProblemKind::Unavailable, "{away:?}");
    assert!(away.message.contains(&rig.nodes[0].name), "{away:?}");
}

#[test]
fn a_snapshot_without_a_reachable_node_is_refused_by_its_name() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster, &[]);
    let history = rig.history(0, "data", &[3]);
    let name = rig.nodes[0].name.clone();
    let refused = |rig: &Rig<'_>, code, words: &str| {
        assert_refused(rig.ask(rig.delta(&history)), code, words, "the front");
    };
    rig.ask(rig.delta(&history)).unwrap();
    rig.shared.label(&history[1], None);
    cluster.wait_for("the label is gone", || {
        rig.ask(rig.delta(&history)).err().filter(|it| it.code() == Code::FailedPrecondition)
    });
    refused(&rig, Code::FailedPrecondition, "--enable-distributed-snapshotting");
    rig.shared.label(&history[1], Some(&name));
    cluster.wait_for("the label is back", || rig.ask(rig.delta(&history)).ok());
    // Its sidecar has ended, and comes back at another port.
    rig.nodes[0].sidecar.process.stop();
    refused(&rig, Code::Unavailable, &name);
    rig.move_endpoint(0, None);
    cluster.wait_for("no endpoint", || {
        rig.ask(rig.delta(&history)).err().filter(|it| it.message().contains("no ready sidecar"))
    });
    let port = rig.restart_sidecar(0);
    rig.move_endpoint(0, Some(port));
    cluster.wait_for("the node is back", || rig.ask(rig.delta(&history)).ok());
    rig.move_endpoint(0, None);
    cluster.delete(&cluster.api::<NodeObject>(), &name);
    cluster.wait_for("the node is gone", || {
        rig.ask(rig.delta(&history)).err().filter(|it| it.code() == Code::NotFound)
    });
    refused(&rig, Code::NotFound, &name);
}

#[test]
fn a_node_answers_only_the_front_with_a_token_for_it() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let history = rig.history(0, "data", &[7]);
    let audience = |node: usize| format!("{}/{}", rig.shared.driver_name, rig.nodes[node].name);
    let call = |token: Option<String>| -> Result<(), Status> {
        let node = &rig.nodes[0];
        let mut request = Request::new(csi::GetMetadataAllocatedRequest {
            snapshot_id: history[1].handle.clone(),
            ..Default::default()
        });
        if let Some(token) = token {
            let header = MetadataValue::try_from(format!("Bearer {token}")).unwrap();
            request.metadata_mut().insert("authorization", header);
        }
        cluster.block_on(async {
            let channel =
                channel_to(localhost(), &node.name, node.sidecar.port, &rig.shared.authority.pem());
            let stream =
                SnapshotMetadataClient::new(channel).get_metadata_allocated(request).await?;
            stream.into_inner().message().await.map(drop)
        })
    };
    let token = |account, audience: &str| Some(cluster.token(account, Some(audience)));
    call(token(&rig.shared.front_account, &audience(0))).unwrap();
    let others = [
        (None, Code::Unauthenticated),
        (Some("forged".to_owned()), Code::Unauthenticated),
        // Of another node, of clients, and of the API server.
        (token(&rig.shared.front_account, &audience(1)), Code::Unauthenticated),
        (token(&rig.shared.front_account, AUDIENCE), Code::Unauthenticated),
        (Some(cluster.token(&rig.shared.front_account, None)), Code::Unauthenticated),
        // Of a user, also with the right audience.
        (token(&rig.backup, AUDIENCE), Code::Unauthenticated),
        (token(&rig.backup, &audience(0)), Code::PermissionDenied),
    ];
    for (number, (token, code)) in others.into_iter().enumerate() {
        assert_eq!(call(token).unwrap_err().code(), code, "{number}");
    }
}

#[test]
fn a_server_with_another_name_or_authority_receives_no_token() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster, &[]);
    let history = rig.history(0, "data", &[7]);
    let refused = |rig: &Rig<'_>| {
        cluster.wait_for("the endpoint is the other one", || {
            rig.ask(rig.delta(&history)).err().filter(|it| it.message().contains("certificate"))
        })
    };
    // The other node's sidecar diverts the traffic.
    rig.move_endpoint(0, Some(rig.nodes[1].sidecar.port));
    let status = refused(&rig);
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    // A certificate for the right name by an authority that signs no nodes.
    let name = rig.nodes[0].name.clone();
    let stranger = support::cluster::tls::Authority::new("stranger");
    rig.nodes[0].certificate = certify(&stranger, rig.nodes[0].driver.scratch(), &name);
    rig.nodes[0].sidecar.process.stop();
    let port = rig.restart_sidecar(0);
    rig.move_endpoint(0, Some(port));
    cluster.wait_for("the new endpoint", || {
        rig.ask(rig.delta(&history)).err().filter(|it| it.message().contains("UnknownIssuer"))
    });
    for node in &rig.nodes {
        let log = node.sidecar.process.log();
        assert!(!log.contains("GetMetadata"), "a call arrived at {}:\n{log}", node.name);
    }
}

/// A request as kubelet makes it for a pod of this account on this node.
fn request(rig: &Rig<'_>, signer: &str, account: &str, node: &str, key: &KeyPair) -> String {
    let empty = CertificateParams::default().serialize_request(key).unwrap();
    let name = rig.cluster.unique("request");
    let request = json!({
        "metadata": { "name": name },
        "spec": {
            "signerName": signer, "podName": "metadata", "podUID": "u", "serviceAccountName": account,
            "serviceAccountUID": "u", "nodeName": node, "nodeUID": "u", "maxExpirationSeconds": 3600,
            "stubPKCS10Request": BASE64_STANDARD.encode(empty.der()),
        },
    });
    rig.cluster.create(&requests(rig), request);
    name
}

fn requests(rig: &Rig<'_>) -> Api<PodCertificateRequest> {
    rig.cluster.api_in(&rig.namespace)
}

fn answer(rig: &Rig<'_>, name: &str) -> PodCertificateRequestStatus {
    rig.cluster.wait_for("an answer", || {
        let found = rig.cluster.get(&requests(rig), name).unwrap();
        found.status.filter(|status| !status.conditions.is_empty())
    })
}

#[test]
fn nodes_have_certificates_that_the_front_signed() {
    let Some(cluster) = shared() else { return };
    let signer = format!("{}.example.com/node", cluster.unique("signer"));
    let mut rig = Rig::signing(cluster, &signer);
    let history = rig.history(0, "data", &[3]);
    let refused = rig.ask(rig.delta(&history)).unwrap_err();
    assert!(refused.message().contains("UnknownIssuer"), "{refused:?}");
    let (node, key) = (rig.nodes[0].name.clone(), KeyPair::generate().unwrap());
    let status = answer(&rig, &request(&rig, &signer, "node", &node, &key));
    assert_eq!(status.conditions[0].type_, ISSUED, "{status:?}");
    let certificate = &rig.nodes[0].certificate;
    // One file, as kubelet writes it.
    let bundle = format!("{}{}", key.serialize_pem(), status.certificate_chain);
    for file in [&certificate.file, &certificate.key] {
        fs::write(file, &bundle).unwrap();
    }
    let port = rig.restart_sidecar(0);
    rig.move_endpoint(0, Some(port));
    let answered = cluster.wait_for("the node is trusted", || rig.ask(rig.delta(&history)).ok());
    assert_eq!(answered.extents(), extents(&[3]));
    assert!(http(&rig.front, "/metrics").contains("node_certificates_total{result=\"issued\"} 1"));
    // A certificate of one node is of no use at another's address.
    rig.move_endpoint(1, Some(port));
    let other = rig.history(1, "other", &[4]);
    cluster.wait_for("the endpoint has moved", || {
        rig.ask(rig.delta(&other)).err().filter(|it| it.message().contains("not valid for name"))
    });
}

#[test]
fn a_certificate_for_another_pod_is_denied_with_the_reason() {
    let Some(cluster) = shared() else { return };
    let signer = format!("{}.example.com/node", cluster.unique("signer"));
    let rig = Rig::signing(cluster, &signer);
    let key = KeyPair::generate().unwrap();
    let status = answer(&rig, &request(&rig, &signer, "default", &rig.nodes[0].name, &key));
    let Condition { type_, reason, message, .. } = &status.conditions[0];
    assert_eq!((&type_[..], &reason[..]), (DENIED, "OtherServiceAccount"));
    assert!(message.contains("/node") && status.certificate_chain.is_empty(), "{status:?}");
    // What another signer should answer stays open.
    let foreign = request(&rig, "example.com/other", "node", &rig.nodes[0].name, &key);
    answer(&rig, &request(&rig, &signer, "node", &rig.nodes[0].name, &key));
    assert!(rig.cluster.get(&requests(&rig), &foreign).unwrap().is_open());
}

#[test]
#[ignore = "full tier"]
fn a_node_lost_during_a_stream_is_never_a_clean_end() {
    let Some(cluster) = shared() else { return };
    let stall = ["--enable-faults", "--fault", "stream-stall,after=1,for=60s"];
    let rig = Rig::new(cluster, &stall);
    let history = rig.history(0, "data", &[1, 3, 5, 7]);
    let sidecar = &rig.nodes[0].sidecar.process;
    let frozen = std::thread::scope(|scope| {
        let call = scope.spawn(|| rig.ask(rig.delta(&history)));
        cluster.wait_for("the stream begins", || {
            http(&rig.front, "/metrics")
                .contains("csi_loopback_sidecar_streams_open 1")
                .then_some(())
        });
        sidecar.signal(Signal::SIGSTOP);
        call.join().unwrap()
    });
    sidecar.signal(Signal::SIGCONT);
    let status = frozen.expect_err("an incomplete stream is not complete");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(status.message().contains(&rig.nodes[0].name), "{status:?}");
}
