//! The harness itself: a real API server with the released parts and our driver, without our
//! sidecar. The behavior of the released sidecar and clients defines what "existing clients work
//! unchanged" means.

use support::cluster::shared;

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use csi_loopback::kubernetes::snapshot::VolumeSnapshot;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::{Api, Client};
use nix::sys::signal::{Signal, kill};
use nix::unistd::getpid;
use serde_json::Value;
use support::cluster::access::{backup_rules, rule, sidecar_rules};
use support::cluster::programs::{Process, Served, json_extents, stdout_of, table_extents};
use support::cluster::proxy::Way;
use support::cluster::rig::Rig;
use support::cluster::tls::Authority;
use support::cluster::{Cluster, processes_of};
use support::driver::{Driver, PATIENCE, all_snapshots, block, wait_for};
use support::{BLOCK, MIB, pattern, test_name, write_direct};
use tempfile::TempDir;

const AUDIENCE: &str = "backup";

#[test]
fn a_snapshot_becomes_ready_with_the_drivers_handle() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.write(1, [0, 7]);
    let snapshot = rig.snapshot("first");
    let ids = |driver: &Driver| -> Vec<String> {
        all_snapshots(driver).into_iter().map(|snapshot| snapshot.snapshot_id).collect()
    };
    assert_eq!(ids(&rig.driver), [snapshot.handle.as_str()]);

    let adopted = cluster.adopt_snapshot(
        &rig.namespace,
        "adopted",
        &rig.driver_name,
        &snapshot.handle,
        Some(&rig.class),
    );
    assert_eq!(adopted.handle, snapshot.handle);

    cluster.delete_snapshot(&snapshot);
    assert_eq!(ids(&rig.driver), [""; 0]);
}

#[test]
fn a_class_with_a_secret_requires_it() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let namespace = rig.namespace.as_str();
    let class = cluster.snapshot_class_with_secret(&rig.driver_name, namespace, "credentials");
    cluster.request_snapshot(namespace, "secret", "data", &class);
    let snapshots = cluster.api_in::<VolumeSnapshot>(namespace);
    let error = cluster.wait_for("an error in the snapshot's status", || {
        cluster.get(&snapshots, "secret").unwrap().status?.error?.message
    });
    assert!(error.contains("credentials"), "{error}");
    assert_eq!(all_snapshots(&rig.driver).len(), 0);
    cluster.secret(namespace, "credentials", &[("key", "value")]);
    cluster.wait_until_ready(namespace, "secret");
}

#[test]
fn a_token_is_valid_for_its_audience_and_time_only() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("tokens");
    let account = cluster.account(&namespace, "backup");
    let token = cluster.token(&account, Some(AUDIENCE));
    let review = cluster.review(&token, AUDIENCE);
    assert_eq!(review.authenticated, Some(true), "{review:?}");
    assert_eq!(review.user.unwrap().username, Some(account.user()));
    assert_eq!(review.audiences, Some(vec![AUDIENCE.to_owned()]));

    let review = cluster.review(&token, "another");
    assert_ne!(review.authenticated, Some(true), "{review:?}");
    let review = cluster.review(&cluster.token(&account, None), AUDIENCE);
    assert_ne!(review.authenticated, Some(true), "{review:?}");

    // The time is the reason: signed again with only the time changed, the token is valid.
    let again = cluster.resigned(&token, |_| {});
    assert_eq!(cluster.review(&again, AUDIENCE).authenticated, Some(true));
    let review = cluster.review(&cluster.expired_token(&account, Some(AUDIENCE)), AUDIENCE);
    assert_ne!(review.authenticated, Some(true), "{review:?}");
    assert!(review.error.unwrap().contains("expired"));
    let forged = format!("{}AAAA", &token[..token.len() - 4]);
    assert_ne!(cluster.review(&forged, AUDIENCE).authenticated, Some(true));
}

#[test]
fn permissions_are_limited_to_their_namespace() {
    let Some(cluster) = shared() else { return };
    let (here, there) = (cluster.namespace("here"), cluster.namespace("there"));
    let account = cluster.account(&here, "reader");
    let client = cluster.client_as(&account);
    let list = |namespace: &str| {
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        code(cluster.block_on(api.list(&Default::default())))
    };
    assert_eq!((list(&here), list(&there)), (Err(403), Err(403)));
    cluster.grant_in(&here, &account, &[rule("", &["configmaps"], &["list"])]);
    assert_eq!((list(&here), list(&there)), (Ok(()), Err(403)));
    cluster.grant(&account, &[rule("", &["configmaps"], &["list"])]);
    assert_eq!((list(&here), list(&there)), (Ok(()), Ok(())));
    assert!(!cluster.allowed(&account, None, "delete", "", "configmaps"));
}

/// The result, by its code if the API server refused the call.
fn code<T>(answer: kube::Result<T>) -> Result<(), u16> {
    match answer {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) => Err(status.code),
        Err(error) => panic!("{error}"),
    }
}

/// Starts the released sidecar with only the permissions that it needs.
fn released(rig: &Rig<'_>) -> Served {
    let authority = Authority::new("backup authority");
    let certificate = authority.certify(rig.driver.scratch(), "sidecar");
    let (_, kubeconfig) = rig.account("sidecar", &sidecar_rules());
    let cluster = rig.cluster;
    let served = cluster.released_sidecar(&rig.driver.socket(), &kubeconfig, &certificate, &[]);
    cluster.metadata_service(&rig.driver_name, &served.address(), AUDIENCE, &authority.pem());
    served
}

#[test]
fn the_released_sidecar_serves_the_released_clients() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.write(1, [0, 7, 8]);
    let first = rig.snapshot("first");
    rig.write(2, [8, 100]);
    let second = rig.snapshot("second");
    let _served = released(&rig);
    let (backup, kubeconfig) = rig.account("backup", &backup_rules());
    let namespace = rig.namespace.as_str();

    let table = stdout_of(cluster.lister(&kubeconfig, &["-n", namespace, "-s", "first"]));
    assert_eq!(table_extents(&table), [(0, BLOCK), (7 * BLOCK, 2 * BLOCK)], "{table}");
    let changed = [(8 * BLOCK, BLOCK), (100 * BLOCK, BLOCK)];
    for base in [["-p", "first"], ["-P", &first.handle]] {
        let arguments = [&["-n", namespace, "-s", "second", "-o", "json"], &base[..]].concat();
        let json: Value =
            serde_json::from_str(&stdout_of(cluster.lister(&kubeconfig, &arguments))).unwrap();
        assert_eq!(json_extents(&json), changed, "{json}");
    }
    let limited =
        ["-n", namespace, "-s", "second", "-max-results", "1", "-starting-offset", "28672"];
    let table = stdout_of(cluster.lister(&kubeconfig, &limited));
    assert_eq!(table_extents(&table), [(7 * BLOCK, 2 * BLOCK), (100 * BLOCK, BLOCK)], "{table}");

    // A named account and the kubeconfig's account are equivalent.
    let named = ["-service-account", "backup", "-service-account-namespace", namespace];
    let named = [&["-n", namespace, "-s", "first"], &named[..]].concat();
    stdout_of(cluster.lister(&cluster.kubeconfig(), &named));
    let output = cluster.lister(&cluster.kubeconfig(), &["-n", namespace, "-s", "first"]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("ServiceAccount"), "{output:?}");

    verify(&rig, &kubeconfig, &[], &second.handle);
    verify(&rig, &kubeconfig, &["-p", "first"], &second.handle);
    let output = cluster.lister(&kubeconfig, &["-n", "default", "-s", "first"]);
    assert!(!output.status.success(), "{} reads another's", backup.user());
}

/// Lets the verifier rebuild the second snapshot, from nothing or from the first.
fn verify(rig: &Rig<'_>, kubeconfig: &Path, base: &[&str], handle: &str) {
    use support::requests::Source;
    let name = format!("verified-{}", base.len());
    let source = rig.driver.copy(&name, Source::Snapshot(handle), block());
    let target = rig.driver.volume(&format!("target-{}", base.len()), 16 * MIB, block());
    let (source, target) =
        (rig.driver.publish(&source, &block()), rig.driver.publish(&target, &block()));
    if !base.is_empty() {
        // The state of the first snapshot.
        for block in [0, 7, 8] {
            write_direct(&target, block * BLOCK, &pattern(1 + block, BLOCK as usize));
        }
    }
    let (source, target) = (support::path(&source), support::path(&target));
    let arguments = ["-n", &rig.namespace, "-s", "second", "-src", source, "-tgt", target];
    stdout_of(rig.cluster.verifier(kubeconfig, &[&arguments, base].concat()));
    // The verifier does compare: it finds an unreported difference.
    write_direct(Path::new(target), 50 * BLOCK, &pattern(3, BLOCK as usize));
    let output = rig.cluster.verifier(kubeconfig, &[&arguments, base].concat());
    assert!(String::from_utf8_lossy(&output.stderr).contains("do not match"), "{output:?}");
}

#[test]
fn a_blocked_proxy_forwards_nothing() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("cut");
    let account = cluster.account(&namespace, "caller");
    cluster.grant(&account, &[rule("", &["namespaces"], &["get"])]);
    let proxy = cluster.proxy();
    let kubeconfig = cluster.kubeconfig_through(&proxy, &account);
    let client = cluster.client_of(&kubeconfig);
    let ask = |client: &Client| {
        let api: Api<Namespace> = Api::all(client.clone());
        let answer =
            async { tokio::time::timeout(Duration::from_secs(2), api.get(&namespace)).await };
        cluster.block_on(answer)
    };
    assert!(ask(&client).unwrap().is_ok());
    let before = proxy.connections();
    assert!(before >= 1 && proxy.open_connections() >= 1);

    cluster.turn(&proxy, Way::Hanging);
    assert!(ask(&client).is_err(), "it answers while the way hangs");
    cluster.turn(&proxy, Way::Refused);
    assert_eq!(proxy.open_connections(), 0);
    assert!(ask(&client).unwrap().is_err(), "it answers while the proxy is blocked");

    cluster.turn(&proxy, Way::Open);
    let counted = proxy.connections();
    assert!(ask(&client).unwrap().is_ok());
    assert!(proxy.connections() > counted, "the connection before the cut still serves");
}

#[test]
#[ignore = "full tier"]
fn requests_are_counted_by_user() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("users");
    let account = cluster.account(&namespace, "caller");
    let client = cluster.client_as(&account);
    assert_eq!(cluster.requests_by(&account.user()), 0);
    let api: Api<ConfigMap> = Api::namespaced(client, &namespace);
    for _ in 0..3 {
        assert_eq!(code(cluster.block_on(api.get("none"))), Err(403));
    }
    wait_for("the requests in the log", || cluster.requests_by(&account.user()) == 3);
    let requests = cluster.requests();
    let last = requests.iter().rfind(|one| one["user"]["username"] == account.user()).unwrap();
    assert_eq!((&last["verb"], &last["responseStatus"]["code"]), (&"get".into(), &403.into()));
}

#[test]
#[ignore = "full tier"]
fn a_stopped_cluster_leaves_no_process_or_file() {
    let Some(_) = shared() else { return };
    let other = Cluster::start().unwrap_or_else(|why| panic!("{why:?}"));
    let directory = other.directory();
    let parts = command_lines(&directory);
    for part in ["etcd", "kube-apiserver", "snapshot-controller", "cluster.sh"] {
        assert!(parts.iter().any(|line| line.contains(part)), "no {part} in {parts:?}");
    }
    let started = Instant::now();
    drop(other);
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert!(!directory.exists());
    wait_for("the end of all parts", || command_lines(&directory).is_empty());
}

/// Command lines of processes that work in the directory or name it.
fn command_lines(directory: &Path) -> Vec<String> {
    processes_of(directory).into_iter().map(|(_, line)| line).collect()
}

/// Runs its own binary with only this test. That process kills itself when its cluster runs.
#[test]
#[ignore = "full tier"]
fn a_killed_test_process_leaves_no_cluster() {
    const IS_TO_DIE: &str = "CSI_LOOPBACK_TEST_IS_TO_DIE";
    if shared().is_none() {
        return;
    }
    if std::env::var_os(IS_TO_DIE).is_some() {
        kill(getpid(), Signal::SIGKILL).unwrap();
    }
    let directory = TempDir::with_prefix("csi-loopback-").unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--include-ignored", &test_name()])
        .env(IS_TO_DIE, "yes")
        .env("TMPDIR", directory.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(Signal::SIGKILL as i32), "{status}");
    wait_for("the cluster of the killed process ends", || {
        let is_empty = directory.path().read_dir().unwrap().next().is_none();
        is_empty && processes_of(directory.path()).is_empty()
    });
}

#[test]
fn a_missing_tool_is_named() {
    let Some(cluster) = shared() else { return };
    let directory = cluster.scratch().join("without");
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/hack/cluster.sh"));
    command
        .arg(&directory)
        .env_remove("CSI_LOOPBACK_KUBERNETES")
        .env("XDG_CACHE_HOME", cluster.scratch().join("empty"))
        .env("PATH", "/usr/bin:/bin")
        .env("GOPROXY", "off")
        .env("GOMODCACHE", cluster.scratch().join("no-modules"));
    let mut process = Process::spawn("without", command, cluster.scratch());
    let status = process.wait(PATIENCE).expect("it ends");
    assert_eq!(status.code(), Some(77), "{}", process.log());
    let log = process.log();
    let why = log.lines().last().unwrap();
    assert!(why.contains("Go is not installed") || why.contains("build failed"), "{log}");
}
