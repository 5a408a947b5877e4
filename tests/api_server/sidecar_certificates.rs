//! The sidecar's certificates with a real API server: replicas that share an authority and replace
//! their certificates while clients connect, and the SnapshotMetadataService that publishes the
//! authority.

use support::cluster::shared;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use clap::Parser;
use csi_loopback::kubernetes::metadata_service::{DRIVER_LABEL, SnapshotMetadataService};
use csi_loopback::kubernetes::publish::maintain;
use csi_loopback::kubernetes::session::SnapshotServiceConfiguration;
use csi_loopback::kubernetes::tls;
use csi_loopback::kubernetes::tls::authority;
use csi_loopback::sidecar::publish::{self, Configuration, Service};
use csi_loopback::telemetry::shutdown::{Phase, Shutdown};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use rustls_pki_types::ServerName;
use serde_json::json;
use support::cluster::Cluster;
use support::cluster::access::{Account, rule};
use support::cluster::programs::stdout_of;
use support::cluster::proxy::Way;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsConnector;
use tokio_stream::StreamExt;

/// The driver's namespace in its SnapshotServiceConfiguration.
const NAMESPACE: &str = "drivers";
const SECRET: &str = "csi-loopback-sidecar-ca";

#[derive(Debug, Parser)]
struct Flags {
    #[command(flatten)]
    tls: tls::Args,
    #[command(flatten)]
    authority: authority::Args,
    #[command(flatten)]
    publish: publish::Args,
}

fn flags(line: &str) -> Flags {
    Flags::parse_from(format!("x --service-address localhost:1 {line}").split_whitespace())
}

fn self_signed(namespace: &str, validity: &str) -> Flags {
    flags(&format!(
        "--self-signed --self-signed-validity {validity} --namespace {namespace} --manage-service"
    ))
}

fn service(driver: &str, flags: &Flags) -> Service {
    let address = flags.publish.service_address.clone().unwrap();
    let requires_base = flags.publish.require_base_snapshot_for_delta;
    Service { driver: driver.to_owned(), address, audience: "backup".to_owned(), requires_base }
}

/// Additional permissions of the sidecar.
fn grant(cluster: &Cluster, namespace: &str, create: bool) -> Account {
    let account = cluster.account(namespace, "sidecar");
    let verbs: &[&str] = if create { &["get", "update", "create"] } else { &["get", "update"] };
    cluster.grant_in(namespace, &account, &[rule("", &["secrets"], verbs)]);
    let verbs = ["get", "list", "watch", "create", "patch"];
    let kinds = ["snapshotmetadataservices", "snapshotserviceconfigurations"];
    let rules = kinds.map(|kind| rule("cbt.storage.k8s.io", &[kind], &verbs));
    cluster.grant(&account, &rules);
    account
}

/// Echoes over TLS, with a certificate of the shared authority, until it is dropped.
struct Replica {
    port: u16,
    _phase: watch::Sender<Phase>,
}

async fn replica(client: Client, flags: Flags, driver: String) -> anyhow::Result<Replica> {
    let (phase, shutdown) = Shutdown::manual();
    let service = service(&driver, &flags);
    let address = service.address.clone();
    let names = vec![address.host().to_owned()];
    let configuration = Configuration { driver, address, namespace: NAMESPACE.to_owned() };
    let started =
        authority::start(client.clone(), &flags.authority, "sidecar", names, shutdown.clone());
    let (certificates, trusted) = started.await?;
    tokio::spawn(maintain(client.clone(), service, trusted.clone(), shutdown.clone()));
    tokio::spawn(maintain(client, configuration, trusted, shutdown.clone()));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let config = tls::server_config(&flags.tls, certificates, tls::GRPC)?;
    let mut connections = tls::incoming(listener, "test", config, shutdown);
    tokio::spawn(async move {
        while let Some(connection) = connections.next().await {
            let (mut reader, mut writer) = tokio::io::split(connection.unwrap());
            tokio::spawn(async move { tokio::io::copy(&mut reader, &mut writer).await });
        }
    });
    Ok(Replica { port, _phase: phase })
}

/// The certificate's issuer and serial number, as seen by a client with this caCert.
async fn connect(port: u16, ca_cert: &str) -> Result<(Vec<u8>, Vec<u8>), String> {
    let config = tls::client_config(ca_cert.as_bytes()).map_err(|error| format!("{error:#}"))?;
    let stream = TcpStream::connect(("127.0.0.1", port)).await.map_err(|e| e.to_string())?;
    let name = ServerName::try_from("localhost").unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect(name, stream).await.map_err(|error| error.to_string())?;
    stream.write_all(b"x").await.map_err(|error| error.to_string())?;
    let mut answer = [0];
    stream.read_exact(&mut answer).await.map_err(|error| error.to_string())?;
    let leaf = &stream.get_ref().1.peer_certificates().unwrap()[0];
    let (_, leaf) = x509_parser::parse_x509_certificate(leaf).unwrap();
    Ok((leaf.issuer().as_raw().to_vec(), leaf.raw_serial().to_vec()))
}

fn services(cluster: &Cluster) -> Api<SnapshotMetadataService> {
    cluster.api()
}

fn ca_cert(cluster: &Cluster, driver: &str) -> Option<String> {
    let service = cluster.get(&services(cluster), driver)?;
    Some(String::from_utf8(service.spec.ca_cert.0).unwrap())
}

fn certificates_in(pem: &str) -> usize {
    pem.matches("BEGIN CERTIFICATE").count()
}

fn start(cluster: &Cluster, client: &Client, flags: Flags, driver: &str) -> Replica {
    cluster.block_on(replica(client.clone(), flags, driver.to_owned())).unwrap()
}

#[test]
fn replicas_that_start_together_share_one_authority() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("together");
    let client = cluster.client_as(&grant(cluster, &namespace, true));
    let starting = (0..5).map(|_| {
        let flags = self_signed(&namespace, "1h");
        tokio::spawn(replica(client.clone(), flags, "together.example".to_owned()))
    });
    let replicas: Vec<Replica> = cluster.block_on(async {
        let starting: Vec<_> = starting.collect();
        let mut replicas = Vec::new();
        for replica in starting {
            replicas.push(replica.await.unwrap().unwrap());
        }
        replicas
    });
    let pem = cluster.wait_for("the service", || ca_cert(cluster, "together.example"));
    assert_eq!(certificates_in(&pem), 1);
    let issuers: BTreeSet<_> = replicas
        .iter()
        .map(|replica| cluster.block_on(connect(replica.port, &pem)).unwrap().0)
        .collect();
    assert_eq!(issuers.len(), 1);
    let secret = cluster.get(&cluster.api_in::<Secret>(&namespace), SECRET).unwrap();
    assert_eq!(secret.data.unwrap()["ca.crt"], ByteString(pem.into_bytes()));
}

/// Connects to each replica with each caCert, until `done` accepts the certificates of the
/// replicas.
fn connect_until(
    cluster: &Cluster,
    replicas: &[Replica],
    with: &[&str],
    done: impl Fn(&[BTreeSet<(Vec<u8>, Vec<u8>)>]) -> bool,
) {
    let mut seen = vec![BTreeSet::new(); replicas.len()];
    let until = Instant::now() + Duration::from_secs(60);
    while !done(&seen) {
        for (replica, seen) in replicas.iter().zip(&mut seen) {
            for pem in with {
                seen.insert(cluster.block_on(connect(replica.port, pem)).unwrap());
            }
        }
        assert!(Instant::now() < until, "{seen:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Clients keep the caCert that they fetched first.
#[test]
#[ignore = "full tier"]
fn no_handshake_fails_while_certificates_are_replaced() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("leaves");
    let client = cluster.client_as(&grant(cluster, &namespace, true));
    let driver = "leaves.example";
    let replicas =
        [(); 2].map(|()| start(cluster, &client, self_signed(&namespace, "20s"), driver));
    let first = cluster.wait_for("the service", || ca_cert(cluster, driver));
    connect_until(cluster, &replicas, &[&first], |seen| seen.iter().all(|one| one.len() > 1));
    assert_eq!(ca_cert(cluster, driver).unwrap(), first, "the authority lasts");
}

/// The steps of docs/reference/sidecar.md.
#[test]
fn a_manual_ca_rotation_fails_no_handshake() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("by-hand");
    let client = cluster.client_as(&grant(cluster, &namespace, true));
    let driver = "by-hand.example";
    let replicas =
        [(); 2].map(|()| start(cluster, &client, self_signed(&namespace, "20s"), driver));
    let old = cluster.wait_for("the service", || ca_cert(cluster, driver));
    let (cert, key) = administrators_authority("Example's own");
    let secrets = cluster.api_in::<Secret>(&namespace);
    let put = |entries: &[(&str, &str)]| {
        let data = entries.iter().map(|(key, text)| ((*key).to_owned(), bytes(text)));
        let data: BTreeMap<String, ByteString> = data.collect();
        cluster.merge(&secrets, SECRET, &json!({ "data": data }));
    };
    let both = format!("{old}{cert}");
    put(&[("ca.crt", &both)]);
    cluster.wait_for("both", || (ca_cert(cluster, driver)? == both).then_some(()));
    // A replica may change before its first connection.
    let has_changed = |seen: &BTreeSet<(Vec<u8>, Vec<u8>)>| {
        seen.iter().any(|(issuer, _)| String::from_utf8_lossy(issuer).contains("Example's own"))
    };
    put(&[("signing.crt", &cert), ("signing.key", &key)]);
    connect_until(cluster, &replicas, &[&both], |seen| seen.iter().all(has_changed));
    put(&[("ca.crt", &cert)]);
    cluster.wait_for("the new one alone", || (ca_cert(cluster, driver)? == cert).then_some(()));
    connect_until(cluster, &replicas, &[&cert], |seen| seen.iter().all(|one| !one.is_empty()));
}

fn bytes(text: &str) -> ByteString {
    ByteString(text.as_bytes().to_vec())
}

/// Certificate and key of an authority of this name, as an administrator creates it.
fn administrators_authority(name: &str) -> (String, String) {
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
    params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign, rcgen::KeyUsagePurpose::CrlSign];
    params.not_after = (SystemTime::now() + Duration::from_secs(365 * 24 * 3600)).into();
    let key = rcgen::KeyPair::generate().unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

#[test]
#[ignore = "full tier"]
fn a_drifted_service_is_corrected() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("drift");
    let client = cluster.client_as(&grant(cluster, &namespace, true));
    let driver = "drift.example";
    let _replica = start(cluster, &client, self_signed(&namespace, "1h"), driver);
    let api = services(cluster);
    let good = cluster.wait_for("the service", || cluster.get(&api, driver));
    assert_eq!(good.spec.address, "localhost:1");
    assert_eq!(good.spec.audience, "backup");
    assert_eq!(good.metadata.labels.as_ref().unwrap()[DRIVER_LABEL], driver);
    assert_eq!(good.spec.require_base_snapshot_for_delta, None);
    let put_right = |what: &str| {
        cluster.wait_for(what, || {
            let now = cluster.get(&api, driver)?;
            (now.spec == good.spec && now.metadata.labels == good.metadata.labels).then_some(())
        });
    };
    let started = Instant::now();
    for patch in [
        json!({ "spec": { "address": "elsewhere:2" } }),
        json!({ "spec": { "caCert": ByteString(b"x".to_vec()) } }),
        json!({ "spec": { "audience": "other" } }),
        json!({ "metadata": { "labels": null } }),
    ] {
        cluster.merge(&api, driver, &patch);
        put_right(&patch.to_string());
    }
    // Fields of other managers are kept.
    cluster.merge(&api, driver, &json!({ "metadata": { "labels": { "team": "a" } } }));
    cluster.merge(&api, driver, &json!({ "spec": { "address": "elsewhere:2" } }));
    cluster.wait_for("the address", || {
        let now = cluster.get(&api, driver)?;
        let kept = now.metadata.labels.is_some_and(|labels| labels["team"] == "a");
        (now.spec == good.spec && kept).then_some(())
    });
    cluster.merge(&api, driver, &json!({ "metadata": { "labels": { "team": null } } }));
    cluster.delete(&api, driver);
    put_right("a new service");
    assert!(started.elapsed() < Duration::from_secs(25), "it was the resync that found it");
}

#[test]
fn require_base_keeps_the_administrators_value() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("base");
    let client = cluster.client_as(&grant(cluster, &namespace, true));
    let driver = "base.example";
    let replica = start(cluster, &client, self_signed(&namespace, "1h"), driver);
    let api = services(cluster);
    let put_right = |said: Option<bool>| {
        cluster.merge(&api, driver, &json!({ "spec": { "address": "elsewhere:2" } }));
        cluster.wait_for("the address", || {
            let spec = cluster.get(&api, driver)?.spec;
            let is_right = spec.address == "localhost:1";
            (is_right && spec.require_base_snapshot_for_delta == said).then_some(())
        });
    };
    cluster.wait_for("the service", || ca_cert(cluster, driver));
    put_right(None);
    cluster.merge(&api, driver, &json!({ "spec": { "requireBaseSnapshotForDelta": true } }));
    put_right(Some(true));
    drop(replica);
    let mut flags = self_signed(&namespace, "1h");
    flags.publish.require_base_snapshot_for_delta = Some(false);
    let _replica = start(cluster, &client, flags, driver);
    put_right(Some(false));
}

/// `--session-api`: the object for the session manager.
#[test]
#[ignore = "full tier"]
fn a_service_configuration_is_published_and_maintained() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("configuration");
    let client = cluster.client_as(&grant(cluster, &namespace, true));
    let driver = "configuration.example";
    let _replica = start(cluster, &client, self_signed(&namespace, "1h"), driver);
    let api: Api<SnapshotServiceConfiguration> = cluster.api();
    let good = cluster.wait_for("the configuration", || cluster.get(&api, driver));
    assert_eq!(good.spec.address, "localhost:1");
    assert_eq!(good.spec.driver_namespace, NAMESPACE);
    assert_eq!(good.metadata.labels.as_ref().unwrap()[DRIVER_LABEL], driver);
    let pem = cluster.wait_for("the service", || ca_cert(cluster, driver));
    assert_eq!(good.spec.ca_cert.0, pem.as_bytes());
    let started = Instant::now();
    for patch in [
        json!({ "spec": { "address": "elsewhere:2" } }),
        json!({ "spec": { "caCert": ByteString(b"x".to_vec()) } }),
        json!({ "spec": { "driverNamespace": "other" } }),
        json!({ "metadata": { "labels": null } }),
    ] {
        cluster.merge(&api, driver, &patch);
        cluster.wait_for(&patch.to_string(), || {
            let now = cluster.get(&api, driver)?;
            (now.spec == good.spec && now.metadata.labels == good.metadata.labels).then_some(())
        });
    }
    cluster.delete(&api, driver);
    cluster.wait_for("a new configuration", || cluster.get(&api, driver));
    assert!(started.elapsed() < Duration::from_secs(25), "it was the resync that found it");
}

#[test]
fn a_deleted_or_damaged_secret_is_recreated() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("recreated");
    let client = cluster.client_as(&grant(cluster, &namespace, true));
    let driver = "recreated.example";
    let replicas =
        [(); 2].map(|()| start(cluster, &client, self_signed(&namespace, "60s"), driver));
    let secrets = cluster.api_in::<Secret>(&namespace);
    let mut before = cluster.wait_for("the service", || ca_cert(cluster, driver));
    let damage = json!({ "data": { "signing.key": ByteString(b"nonsense".to_vec()) } });
    for how in ["delete", "damage"] {
        match how {
            "delete" => cluster.delete(&secrets, SECRET),
            _ => drop(cluster.merge(&secrets, SECRET, &damage)),
        }
        let after = cluster.wait_for("another authority", || {
            ca_cert(cluster, driver).filter(|pem| !pem.contains(before.trim()))
        });
        for replica in &replicas {
            cluster.wait_for("a certificate of it", || {
                cluster.block_on(connect(replica.port, &after)).ok()
            });
        }
        before = after;
    }
}

#[test]
fn a_foreign_secret_is_not_changed() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("other");
    let client = cluster.client_as(&grant(cluster, &namespace, true));
    cluster.secret(&namespace, SECRET, &[("password", "x")]);
    let starting = replica(client, self_signed(&namespace, "1h"), "other.example".to_owned());
    let Err(error) = cluster.block_on(starting) else { panic!("it was taken") };
    let error = format!("{error:#}");
    assert!(error.contains("--self-signed-secret") && error.contains("password"), "{error}");
    let secret = cluster.get(&cluster.api_in::<Secret>(&namespace), SECRET).unwrap();
    assert_eq!(secret.data.unwrap().len(), 1);
}

#[test]
fn a_precreated_secret_needs_no_create_permission() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("beforehand");
    cluster.secret(&namespace, SECRET, &[]);
    let client = cluster.client_as(&grant(cluster, &namespace, false));
    let driver = "beforehand.example";
    let replica = start(cluster, &client, self_signed(&namespace, "1h"), driver);
    let pem = cluster.wait_for("the service", || ca_cert(cluster, driver));
    cluster.block_on(connect(replica.port, &pem)).unwrap();
}

#[test]
#[ignore = "full tier"]
fn an_unavailable_api_server_is_waited_for() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("away");
    let account = grant(cluster, &namespace, true);
    let proxy = cluster.proxy();
    let client = cluster.client_of(&cluster.kubeconfig_at(&proxy.server(), &account));
    cluster.turn(&proxy, Way::Refused);
    let driver = "away.example";
    let flags = self_signed(&namespace, "1h");
    let mut starting = Box::pin(replica(client, flags, driver.to_owned()));
    let early = async { tokio::time::timeout(Duration::from_secs(3), &mut starting).await };
    assert!(cluster.block_on(early).is_err(), "it started without an API server");
    cluster.turn(&proxy, Way::Open);
    let replica = cluster.block_on(starting).unwrap();
    let pem = cluster.wait_for("the service", || ca_cert(cluster, driver));
    cluster.turn(&proxy, Way::Refused);
    cluster.merge(&services(cluster), driver, &json!({ "spec": { "audience": "other" } }));
    std::thread::sleep(Duration::from_secs(2));
    cluster.block_on(connect(replica.port, &pem)).unwrap();
    cluster.turn(&proxy, Way::Open);
    cluster.wait_for("the audience", || {
        let service = cluster.get(&services(cluster), driver)?;
        (service.spec.audience == "backup").then_some(())
    });
}

#[test]
#[ignore = "full tier"]
fn published_authorities_follow_their_file() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("file");
    let client = cluster.client_as(&grant(cluster, &namespace, false));
    let (one, two) = (
        support::cluster::tls::Authority::new("one"),
        support::cluster::tls::Authority::new("two"),
    );
    let directory = cluster.scratch().join(cluster.unique("files"));
    std::fs::create_dir(&directory).unwrap();
    let files = one.certify(&directory, "tls");
    let ca = directory.join("ca.crt");
    std::fs::write(&ca, one.pem()).unwrap();
    let line = format!(
        "--tls-cert {} --tls-key {} --manage-service",
        files.file.display(),
        files.key.display()
    );
    let flags = flags(&line);
    let driver = "file.example";
    let (_phase, shutdown) = Shutdown::manual();
    let service = service(driver, &flags);
    cluster.block_on(async {
        let trusted = publish::authorities(&flags.publish, &flags.tls, shutdown.clone()).unwrap();
        tokio::spawn(maintain(client, service, trusted, shutdown));
    });
    let becomes = |pem: &str| {
        cluster.wait_for("the authorities", || {
            ca_cert(cluster, driver).filter(|now| now == pem).map(drop)
        });
    };
    becomes(&one.pem());
    let both = format!("{}{}", one.pem(), two.pem());
    std::fs::write(&ca, &both).unwrap();
    becomes(&both);
    // Content that is not a certificate is rejected.
    std::fs::write(&ca, "nonsense").unwrap();
    std::thread::sleep(Duration::from_secs(3));
    becomes(&both);
    std::fs::write(&ca, two.pem()).unwrap();
    becomes(&two.pem());
}

/// Runs last: meanwhile no such object exists.
#[test]
#[ignore = "full tier"]
fn a_crd_that_comes_later_is_waited_for() {
    let Some(cluster) = shared() else { return };
    let (definition, namespace, client) = without_crd(cluster);
    let driver = "crd.example";
    let _replica = start(cluster, &client, self_signed(&namespace, "1h"), driver);
    std::thread::sleep(Duration::from_secs(3));
    install(cluster, &definition.crd);
    cluster.wait_for("the service", || ca_cert(cluster, driver));
}

/// The released CRD, without requireBaseSnapshotForDelta: server-side apply fails on an unknown
/// field.
#[test]
fn a_crd_without_the_newest_field_is_enough() {
    let Some(cluster) = shared() else { return };
    let (definition, namespace, client) = without_crd(cluster);
    let mut older = definition.crd.clone();
    let schema = &mut older["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let fields = schema["properties"]["spec"]["properties"].as_object_mut().unwrap();
    assert!(fields.remove("requireBaseSnapshotForDelta").is_some());
    install(cluster, &older);
    let driver = "older.example";
    {
        let mut flags = self_signed(&namespace, "1h");
        flags.publish.require_base_snapshot_for_delta = Some(false);
        let _replica = start(cluster, &client, flags, driver);
        cluster.wait_for("the service", || ca_cert(cluster, driver));
    }
    install(cluster, &definition.crd);
}

pub const CRD: &str = "snapshotmetadataservices.cbt.storage.k8s.io";

/// The shared definition, deleted. Other tests need it: a panic installs it again.
pub struct Deleted<'c> {
    cluster: &'c Cluster,
    pub crd: serde_json::Value,
}

impl Drop for Deleted<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let file = self.cluster.write("crd", &self.crd.to_string());
            let _ = self.cluster.kubectl(&["delete", "crd", CRD]);
            let _ = self.cluster.kubectl(&["create", "-f", support::path(&file)]);
        }
    }
}

/// Deletes the definition; returns it, and a namespace and client of a sidecar's account.
pub fn without_crd(cluster: &Cluster) -> (Deleted<'_>, String, kube::Client) {
    let crd = stdout_of(cluster.kubectl(&["get", "crd", CRD, "-o", "json"]));
    let mut crd: serde_json::Value = serde_json::from_str(&crd).unwrap();
    crd["metadata"] = json!({ "name": CRD, "annotations": crd["metadata"]["annotations"] });
    let deleted = Deleted { cluster, crd };
    stdout_of(cluster.kubectl(&["delete", "crd", CRD]));
    let namespace = cluster.namespace("crd");
    let account = cluster.account(&namespace, "sidecar");
    cluster.grant_in(&namespace, &account, &[rule("", &["secrets"], &["get", "update", "create"])]);
    let verbs = ["get", "list", "watch", "create", "patch"];
    let rules = [rule("cbt.storage.k8s.io", &["snapshotmetadataservices"], &verbs)];
    cluster.grant(&account, &rules);
    let client = cluster.client_as(&account);
    (deleted, namespace, client)
}

pub fn install(cluster: &Cluster, crd: &serde_json::Value) {
    let file = cluster.write("crd", &crd.to_string());
    stdout_of(cluster.kubectl(&["apply", "-f", support::path(&file)]));
    stdout_of(cluster.kubectl(&["wait", "--for=condition=Established", &format!("crd/{CRD}")]));
}
