//! deploy/runtime: driver, crust_ops and containerd's configuration fit together, and fit the
//! examples.

use std::path::Path;
use std::process::Command;
use support::cluster::shared;
use support::driver::binary;

use csi_loopback::crust;
use csi_loopback::kubernetes::defer_annotation::ANNOTATION;
use serde_json::{Value, json};

use super::pods::{are_known, only};
use super::{DRIVER, apply, deploy, objects, path};
use support::cluster::Cluster;
use support::cluster::programs::stdout_of;
use support::skip;

const FLAG: &str = "--enable-defer-fs-ops";

fn runtime(cluster: &Cluster) -> Vec<Value> {
    stdout_of(apply(cluster, &deploy("runtime")));
    objects(cluster, "runtime")
}

/// The only container of that name in the pods of an object.
pub fn container<'a>(object: &'a Value, name: &str) -> &'a Value {
    let mut all = object["spec"]["template"]["spec"]["containers"].as_array().unwrap().iter();
    all.find(|one| one["name"] == name).unwrap()
}

/// The value of an argument.
pub fn argument<'a>(container: &'a Value, flag: &str) -> &'a str {
    let mut all = container["args"].as_array().unwrap().iter();
    let found = all.find_map(|one| one.as_str().unwrap().strip_prefix(flag)?.strip_prefix('='));
    found.unwrap_or_else(|| panic!("no {flag} in {container}"))
}

/// The mount of a container that contains a path, and the path on the node.
pub fn on_node(object: &Value, container: &Value, inside: &str) -> (String, Value) {
    let mounts = container["volumeMounts"].as_array().unwrap().iter();
    let of = |mount: &&Value| Path::new(inside).starts_with(mount["mountPath"].as_str().unwrap());
    let mount = mounts.filter(of).max_by_key(|mount| mount["mountPath"].as_str().unwrap().len());
    let mount = mount.unwrap_or_else(|| panic!("{inside} is not mounted in {container}"));
    let mut volumes = object["spec"]["template"]["spec"]["volumes"].as_array().unwrap().iter();
    let volume = volumes.find(|volume| volume["name"] == mount["name"]).unwrap();
    let host = volume["hostPath"]["path"].as_str().unwrap_or_else(|| panic!("{volume}"));
    let rest = Path::new(inside).strip_prefix(mount["mountPath"].as_str().unwrap()).unwrap();
    (path(&Path::new(host).join(rest)).trim_end_matches('/').to_owned(), mount.clone())
}

pub fn socket(text: &str) -> &str {
    text.strip_prefix("unix://").unwrap()
}

#[test]
fn driver_and_crust_ops_share_a_socket_and_see_their_files() {
    let Some(cluster) = shared() else { return };
    let all = runtime(cluster);
    let is_driver =
        |one: &&Value| one["metadata"]["name"] == "csi-loopback" && one["kind"] == "StatefulSet";
    let (driver_of, ops_of) = (all.iter().find(is_driver).unwrap(), only(&all, "DaemonSet"));
    let (driver, ops) = (container(driver_of, "driver"), container(ops_of, "runtime-ops"));
    are_known("driver", driver);
    are_known("runtime-ops", ops);
    assert!(driver["args"].as_array().unwrap().contains(&json!(FLAG)));
    let met = [(driver_of, driver, "--crust-endpoint"), (ops_of, ops, "--endpoint")];
    let met = met.map(|(object, container, flag)| {
        on_node(object, container, socket(argument(container, flag))).0
    });
    assert_eq!(met[0], met[1], "one socket");

    let pods = |object: &'_ Value| object["spec"]["template"]["spec"].clone();
    for field in ["nodeSelector", "tolerations", "priorityClassName"] {
        assert_eq!(pods(driver_of)[field], pods(ops_of)[field], "{field}");
    }
    assert_eq!(pods(ops_of)["hostPID"], json!(true));
    assert_eq!(pods(driver_of)["hostPID"], Value::Null, "only crust_ops sees the node's processes");

    // The runtime's files at the runtime's path, and the driver's targets.
    let configured: Value = yaml("runtime/oci-runtime.yaml");
    let program = binary_name();
    for (inside, writable) in [
        (argument(ops, "--crust-dir"), true),
        (configured["crustDir"].as_str().unwrap(), true),
        (program.as_str(), false),
        ("/etc/csi-loopback/oci-runtime.yaml", false),
        (&format!("{}/pods", configured["kubeletDir"].as_str().unwrap()), false),
    ] {
        let (node, mount) = on_node(ops_of, ops, inside);
        assert_eq!(node, inside, "at the same path as on the node");
        assert_eq!(mount["readOnly"] == json!(true), !writable, "{inside}");
    }
    let work = configured["workDir"].as_str().unwrap();
    let mounts = ops["volumeMounts"].as_array().unwrap();
    assert!(mounts.iter().any(|mount| mount["mountPath"] == work && mount["readOnly"].is_null()));
    let targets = on_node(ops_of, ops, "/var/lib/kubelet/pods").1;
    assert_eq!(targets["mountPropagation"], json!("HostToContainer"));
    let (node, mount) = on_node(driver_of, driver, "/var/lib/kubelet/pods");
    assert_eq!(
        (node.as_str(), &mount["mountPropagation"]),
        ("/var/lib/kubelet/pods", &json!("Bidirectional"))
    );
}

fn yaml(file: &str) -> Value {
    serde_saphyr::from_str(&std::fs::read_to_string(deploy(file)).unwrap()).unwrap()
}

/// The program that containerd calls.
fn binary_name() -> String {
    let text = std::fs::read_to_string(deploy("runtime/containerd.toml")).unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix("BinaryName = "));
    line.unwrap().trim_matches('"').to_owned()
}

#[test]
fn the_policy_of_deploy_admission_covers_examples_runtime() {
    let Some(cluster) = shared() else { return };
    let all = runtime(cluster);
    let class = only(&all, "RuntimeClass")["metadata"]["name"].clone();
    let selector = &only(&all, "DaemonSet")["spec"]["template"]["spec"]["nodeSelector"];
    assert_eq!(&only(&all, "RuntimeClass")["scheduling"]["nodeSelector"], selector);
    let storage = only(&all, "StorageClass");
    assert_eq!(storage["provisioner"], DRIVER);
    assert_eq!(storage["parameters"]["deferFSMount"], Value::Null);

    let shown = std::fs::read_to_string(deploy("admission/objects.yaml")).unwrap();
    let entries = shown.lines().map(str::trim).skip_while(|line| *line != "deferral: []").skip(1);
    let entries: Vec<_> = entries.map_while(|line| line.strip_prefix("#  ")).collect();
    let entries: Value = serde_saphyr::from_str(&entries.join("\n")).unwrap();
    let pairs = entries.as_array().unwrap().iter();
    let pairs: Vec<_> = pairs.map(|one| (&one["storageClass"], &one["runtimeClass"])).collect();
    let (name, inline) = (&storage["metadata"]["name"], json!(""));
    assert_eq!(pairs, [(name, &class), (&inline, &class)]);

    stdout_of(apply(cluster, &deploy("examples/runtime")));
    let examples = objects(cluster, "examples/runtime");
    let claim = only(&examples, "PersistentVolumeClaim");
    assert_eq!(claim["spec"]["accessModes"], json!(["ReadWriteOncePod"]));
    assert_eq!(&claim["spec"]["storageClassName"], name);
    let pods: Vec<_> = examples.iter().filter(|one| one["kind"] == "Pod").collect();
    assert_eq!(pods.len(), 2);
    for pod in pods {
        assert_eq!(pod["spec"]["runtimeClassName"], class);
        assert_eq!(pod["metadata"]["annotations"][ANNOTATION], Value::Null, "the webhook sets it");
    }
}

#[test]
fn containerd_accepts_the_handler_of_deploy_runtime() {
    let Some(cluster) = shared() else { return };
    let file = deploy("runtime/containerd.toml");
    let mut command = Command::new("containerd");
    // Reads the configuration and starts nothing.
    let dumped = command.args(["--config", path(&file), "config", "dump"]).output();
    let Ok(dumped) = dumped else {
        return skip("there is no containerd");
    };
    let text = stdout_of(dumped);
    let handler = only(&runtime(cluster), "RuntimeClass")["handler"].as_str().unwrap().to_owned();
    let table = format!("runtimes.{handler}]");
    let (_, of_handler) = text.split_once(&table).unwrap_or_else(|| panic!("no {table} in {text}"));
    let (of_handler, _) = of_handler.split_once(".runtimes.runc]").unwrap_or((of_handler, ""));
    assert!(of_handler.contains(&format!("BinaryName = \"{}\"", binary_name())), "{of_handler}");
    assert!(text.contains("default_runtime_name = \"runc\""), "others are as ever");
}

#[test]
fn the_runtime_accepts_the_configuration_of_deploy_runtime() {
    let Some(cluster) = shared() else { return };
    let link = cluster.scratch().join(Path::new(&binary_name()).file_name().unwrap());
    std::os::unix::fs::symlink(binary(), &link).unwrap();
    let version = |file: &Path| {
        let mut command = Command::new(&link);
        command.arg("--version").env("CSI_LOOPBACK_RUNC_CONFIG", file).output().unwrap()
    };
    let text = std::fs::read_to_string(deploy("runtime/oci-runtime.yaml")).unwrap();
    let configured: Value = serde_saphyr::from_str(&text).unwrap();
    assert_eq!(configured["crustDir"], crust::DEFAULT_DIRECTORY);
    // With `true` in place of runc, which may be missing: the program reads the file first and
    // forwards other commands.
    let with = |text: String| cluster.write("oci-runtime.yaml", &text);
    stdout_of(version(&with(text.replace("runtime: runc", "runtime: true"))));
    let misspelt = version(&with(text.replace("crustDir", "crustDirectory")));
    let message = String::from_utf8_lossy(&misspelt.stderr).into_owned();
    assert!(!misspelt.status.success() && message.contains("crustDirectory"), "{message}");
}
