//! No token and no secret appears in a log, an error or a metric, at any log level.

use std::fmt::Write as _;
use support::cluster::shared;

use support::abuse::{JUNK_TOKENS, Protocol, assert_revoked, junk_tokens, while_abused};
use tonic::Code;

use support::cluster::sidecar_rig::{AUDIENCE, MetadataRequest, Options, Rig};
use support::driver::wait_for;

const SECRET: &str = "hunter2-hunter2-hunter2";

#[test]
fn tokens_and_secrets_are_never_logged() {
    let Some(cluster) = shared() else { return };
    let loud = ["--log-level", "trace"];
    let rig = Rig::with(cluster, Options { sidecar: &loud, ..Options::default() });
    let secrets = cluster.namespace("secrets");
    cluster.secret(&secrets, "snapshotter", &[("password", SECRET), ("user", "backup-user-name")]);
    let class = cluster.snapshot_class_with_secret(&rig.driver_name, &secrets, "snapshotter");
    for name in ["first", "second"] {
        rig.write(1, [1]);
        cluster.snapshot(&rig.namespace, name, "data", &class);
    }
    let stranger = cluster.account(&rig.namespace, "stranger");
    let mut tokens = vec![
        rig.token(),
        cluster.token(&stranger, Some(AUDIENCE)),
        cluster.token(&rig.backup, Some("another")),
        cluster.expired_token(&rig.backup, Some(AUDIENCE)),
        format!("{}{}", "eyJhbGciOiJub25lIn0.e30.", "forged-forged-forged"),
    ];
    let mut shown = String::new();
    let mut codes = Vec::new();
    for token in &tokens {
        let request = |request: &mut MetadataRequest| match request {
            MetadataRequest::Allocated(request) => request.security_token = token.clone(),
            MetadataRequest::Delta(request) => request.security_token = token.clone(),
        };
        let mut all: Vec<MetadataRequest> = vec![
            rig.allocated("first").into(),
            rig.allocated("none").into(),
            rig.delta("first", "second").into(),
            rig.delta("second", "first").into(),
            rig.delta("no-such-handle", "second").into(),
        ];
        let mut past = rig.allocated("first");
        past.starting_offset = 1 << 40;
        all.push(past.into());
        for mut one in all {
            request(&mut one);
            match rig.ask(one) {
                Ok(_) => codes.push(Code::Ok),
                Err(status) => {
                    codes.push(status.code());
                    writeln!(shown, "{status:?}").unwrap();
                }
            }
        }
    }
    for code in [
        Code::Ok,
        Code::NotFound,
        Code::InvalidArgument,
        Code::OutOfRange,
        Code::Unauthenticated,
        Code::PermissionDenied,
    ] {
        assert!(codes.contains(&code), "{code:?} was not provoked: {codes:?}");
    }
    shown.push_str(&rig.http("/metrics"));
    shown.push_str(&rig.http("/health"));
    wait_for("the log of the last call", || rig.sidecar.process.log().contains("OUT_OF_RANGE"));
    let log = rig.sidecar.process.log();
    assert!(log.contains("TRACE"), "the log is at its most verbose");
    shown.push_str(&log);
    shown.push_str(&rig.driver.log());
    // The sidecar's own token, too.
    let kubeconfig: serde_json::Value =
        serde_json::from_slice(&std::fs::read(cluster.kubeconfig_of(&rig.own)).unwrap()).unwrap();
    tokens.push(kubeconfig["users"][0]["user"]["token"].as_str().unwrap().to_owned());
    for token in tokens {
        // Header and signature identify a token, so a part of either must not appear.
        for part in token.split('.').filter(|part| part.len() > 16) {
            let position = shown.find(&part[..part.len().min(40)]);
            // The header is the same for all tokens of a key; the rest is not.
            let secret = position.filter(|_| !part.starts_with("eyJhbGciOi"));
            assert!(
                secret.is_none(),
                "a part of a token is shown: {:?}",
                secret.map(|at| &shown[at..at + 60])
            );
        }
    }
    assert!(!shown.contains(SECRET), "a secret is shown");
    assert!(!shown.contains("backup-user-name"), "a secret is shown");
    use base64::Engine;
    let encoded = base64::engine::general_purpose::STANDARD_NO_PAD.encode(SECRET);
    assert!(!shown.contains(&encoded[..24]), "a secret is shown in base64");
}

#[test]
#[ignore = "full tier"]
fn abuse_of_the_grpc_port_delays_no_other_client() {
    let Some(cluster) = shared() else { return };
    let flags = ["--kube-api-qps", "20", "--kube-api-burst", "20", "--review-cache-ttl", "0s"];
    let rig = Rig::with(cluster, Options { sidecar: &flags, ..Options::default() });
    rig.write(1, [1]);
    rig.snapshot("first");
    let process = rig.sidecar.process.pid();
    while_abused("sidecar", rig.sidecar.port, process, JUNK_TOKENS, || {
        rig.extents(rig.allocated("first"));
    });
    let lines = rig.sidecar.process.log();
    let refused = lines.lines().filter(|line| line.contains("UNAUTHENTICATED")).count();
    let omitted = lines.lines().filter(|line| line.contains("omitted=")).count();
    println!("report: sidecar: {refused} log lines of junk tokens, {omitted} with omitted ones");
    assert!(refused < 600, "{refused} lines");
}

#[test]
#[ignore = "full tier"]
fn junk_tokens_of_many_addresses_delay_no_other_client() {
    let Some(cluster) = shared() else { return };
    // The default rate.
    let flags = ["--kube-api-qps", "50", "--kube-api-burst", "100", "--review-cache-ttl", "0s"];
    let rig = Rig::with(cluster, Options { sidecar: &flags, ..Options::default() });
    rig.write(1, [1]);
    rig.snapshot("first");
    // The client is known: its valid tokens come first.
    rig.extents(rig.allocated("first"));
    let process = rig.sidecar.process.pid();
    while_abused("sidecar, 36 addresses", rig.sidecar.port, process, junk_tokens(36), || {
        rig.extents(rig.allocated("first"));
    });
}

#[test]
#[ignore = "full tier"]
fn abuse_of_the_metrics_port_delays_no_probe() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let process = rig.sidecar.process.pid();
    while_abused("metrics", rig.sidecar.http_port, process, Protocol::Http, || {
        assert!(rig.http("/health").starts_with("HTTP/1.1 200"));
    });
    assert_revoked(&rig.http("/metrics"), "health", "connection");
}
