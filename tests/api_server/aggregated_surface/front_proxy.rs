//! Authentication: only the API server is trusted, whatever headers another client sends.

use support::cluster::shared;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use support::abuse::{Protocol, while_abused};
use support::cluster::aggregated::{Aggregated, ClientCertificate, get, path_in};
use support::cluster::proxy::Way;

/// A path that every authenticated user may read.
const APIS: &str = "/apis/cbt.storage.k8s.io/v1alpha1";
const MASTER: &str = "X-Remote-User: mallory\r\nX-Remote-Group: system:masters\r\n";

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

#[test]
fn a_forged_header_is_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Aggregated::start(cluster, &[]);
    let ours = |name, use_| rig.issued_by_front_proxy_ca(name, use_);
    let other = authority();
    let forged = [
        ("no certificate", None),
        ("another authority", Some(ClientCertificate::issue(&other, "front-proxy", ClientAuth))),
        ("a name that is not allowed", Some(ours("mallory", ClientAuth))),
        ("a server's certificate", Some(ours("front-proxy", ServerAuth))),
    ];
    for (what, shown) in &forged {
        for path in ["/", "/version", "/metrics", APIS, "/apis", "/openapi/v2", &path_in("apps")] {
            assert_eq!(rig.status(shown.as_ref(), path, MASTER), 401, "{what}: {path}");
        }
        // A token does not help either.
        let token = cluster.token(&rig.account, None);
        let token = format!("Authorization: Bearer {token}\r\n");
        assert_eq!(rig.status(shown.as_ref(), APIS, &token), 401, "{what}");
    }
    assert_eq!(rig.status(None, "/healthz", ""), 200, "a probe has no certificate");
    let real = rig.front_proxy();
    assert_eq!(rig.status(Some(&real), APIS, MASTER), 200);
    assert_eq!(rig.status(Some(&ours("front-proxy", ClientAuth)), APIS, MASTER), 200);
    let version = rig.send_directly(Some(&real), &get("/version", MASTER));
    assert!(version.contains("\"gitVersion\":\"v"), "{version}");
    // The headers must name a user.
    assert_eq!(rig.status(Some(&real), APIS, ""), 401);
    assert_eq!(rig.status(Some(&real), APIS, "X-Remote-Group: system:masters\r\n"), 401);
    assert!(!rig.served.process.log().contains("panic"));
}

#[test]
fn the_front_proxys_authority_follows_the_config_map() {
    let Some(cluster) = shared() else { return };
    let rig = Aggregated::start(cluster, &[]);
    let maps: Api<ConfigMap> = cluster.api_in("kube-system");
    let name = "extension-apiserver-authentication";
    let before = cluster.get(&maps, name).unwrap().data.unwrap();
    let other = authority();
    let second = ClientCertificate::issue(&other, "second", ClientAuth);
    let named = ClientCertificate::issue(&other, "front-proxy", ClientAuth);
    let real = rig.front_proxy();
    for unknown in [&second, &named] {
        assert_eq!(rig.status(Some(unknown), APIS, MASTER), 401);
    }
    let ca = "requestheader-client-ca-file";
    let both = format!("{}{}", before[ca], other.pem());
    // The authority alone is not enough.
    cluster.merge(&maps, name, &json!({ "data": { ca: both } }));
    cluster.wait_for("the new authority", || {
        (rig.status(Some(&named), APIS, MASTER) == 200).then_some(())
    });
    assert_eq!(rig.status(Some(&second), APIS, MASTER), 401);
    let names = json!({ "requestheader-allowed-names": r#"["front-proxy","second"]"# });
    cluster.merge(&maps, name, &json!({ "data": names }));
    cluster.wait_for("the new name", || {
        (rig.status(Some(&second), APIS, MASTER) == 200).then_some(())
    });
    assert_eq!(rig.status(Some(&real), APIS, MASTER), 200);
    // An older connection is checked with the current configuration.
    let mut open = cluster.block_on(rig.connect(Some(&second)));
    cluster.merge(&maps, name, &json!({ "data": before }));
    cluster.wait_for("the end of both", || {
        let ended = |shown| rig.status(Some(shown), APIS, MASTER) == 401;
        (ended(&second) && ended(&named)).then_some(())
    });
    let answer = cluster.block_on(async {
        open.write_all(get(APIS, MASTER).as_bytes()).await.unwrap();
        let mut answer = String::new();
        open.read_to_string(&mut answer).await.ok();
        answer
    });
    assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
    assert_eq!(rig.status(Some(&real), APIS, MASTER), 200);
}

#[test]
fn the_last_config_map_applies_during_an_outage() {
    let Some(cluster) = shared() else { return };
    let proxy = cluster.proxy();
    let rig = Aggregated::start_at(cluster, &proxy.server(), &[]);
    let real = rig.front_proxy();
    cluster.turn(&proxy, Way::Refused);
    cluster.wait_for("the watch to break", || {
        let log = rig.served.process.log();
        log.contains("the watch broke").then_some(())
    });
    assert_eq!(rig.status(Some(&real), APIS, MASTER), 200);
    assert_eq!(rig.status(Some(&real), "/readyz", ""), 200);
    assert_eq!(rig.status(None, APIS, MASTER), 401);
    cluster.turn(&proxy, Way::Open);
}

#[test]
#[ignore = "full tier"]
fn garbage_is_refused_and_many_groups_are_not() {
    let Some(cluster) = shared() else { return };
    let mut rig = Aggregated::start(cluster, &[]);
    let real = rig.front_proxy();
    for (sent, code) in [
        ("nonsense\r\n\r\n".to_owned(), 400),
        (get("/apis", &format!("X: {}\r\n", "x".repeat(70 << 10))), 431),
    ] {
        let answer = rig.send_directly(Some(&real), &sent);
        assert!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{answer}");
    }
    // The API server may name a user in hundreds of groups.
    let groups: String = (0..600).map(|at| format!("X-Remote-Group: g{at:030}\r\n")).collect();
    let many = rig.status(Some(&real), APIS, &format!("X-Remote-User: a\r\n{groups}"));
    assert_eq!(many, 200);
    assert!(rig.served.process.ended().is_none());
    assert!(!rig.served.process.log().contains("panic"));
}

#[test]
#[ignore = "full tier"]
fn abuse_of_the_port_delays_no_request_of_the_api_server() {
    let Some(cluster) = shared() else { return };
    let rig = Aggregated::start(cluster, &[]);
    let protocol =
        Protocol::Https { path: path_in("apps"), headers: MASTER.into(), body: 64 << 10 };
    // Over a new connection for each call, as after the loss of a connection.
    let front_proxy = rig.issued_by_front_proxy_ca("front-proxy", ClientAuth);
    while_abused("aggregated API", rig.served.port, rig.served.process.pid(), protocol, || {
        assert_eq!(rig.status(Some(&front_proxy), APIS, MASTER), 200);
    });
}
