//! deploy/chart and the kustomizations of deploy/ are both kept by hand: a chart made from
//! kustomizations has no values, and kustomizations made from a chart have no comments. These tests
//! keep them equal. hack/e2e/scenarios/97-chart.sh installs, upgrades and uninstalls the chart.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use support::cluster::Cluster;
use support::cluster::programs::{finish, stdout_of};
use support::cluster::shared;
use support::{go_tool, path};

use super::{deploy, overlay_of};

/// Runs helm with the chart and values, of which those with the prefix `json:` are JSON.
fn run(helm: &Path, command: &[&str], values: &[&str]) -> Output {
    let mut line = Command::new(helm);
    line.args(command).arg(deploy("chart"));
    for value in values {
        match value.strip_prefix("json:") {
            Some(value) => line.args(["--set-json", value]),
            None => line.args(["--set", value]),
        };
    }
    finish(line)
}

/// Objects by kind, namespace and name.
type Objects = BTreeMap<String, Value>;

fn parse(text: &str) -> Objects {
    // Not known to kustomize as kinds of the cluster, so it gives them a namespace.
    const OF_CLUSTER: [&str; 3] =
        ["VolumeSnapshotClass", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"];
    let documents = format!("\n{text}");
    let documents = documents.split("\n---").filter(|one| one.contains("\nkind:"));
    let objects = documents.map(|one| serde_saphyr::from_str::<Value>(one).unwrap());
    objects
        .map(|mut object| {
            let kind = object["kind"].as_str().unwrap().to_owned();
            let metadata = object["metadata"].as_object_mut().unwrap();
            if OF_CLUSTER.contains(&kind.as_str()) {
                metadata.remove("namespace");
            }
            let namespace = metadata.get("namespace").and_then(Value::as_str).unwrap_or("-");
            (format!("{kind} {namespace} {}", metadata["name"].as_str().unwrap()), object)
        })
        .collect()
}

/// The chart's objects, without those of `helm test`.
fn rendered(helm: &Path, values: &[&str]) -> Objects {
    let text = stdout_of(run(helm, &["template", "csi-loopback"], values));
    let mut objects = parse(&text);
    objects.retain(|_, object| object["metadata"]["annotations"].get("helm.sh/hook").is_none());
    assert!(objects.len() > 10, "{text}");
    objects
}

fn kustomized(cluster: &Cluster, directories: &[(&str, &[&str])]) -> Objects {
    let mut all = Objects::new();
    for (directory, components) in directories {
        let overlay = overlay_of(cluster, "chart", directory, components);
        all.extend(parse(&stdout_of(cluster.kubectl(&["kustomize", path(&overlay)]))));
    }
    all
}

/// Every optional component.
const ALL: [&str; 11] = [
    "runtime.enabled=true",
    "nodeProxy.enabled=true",
    "nodeProxy.claims=true",
    "sessionManager.enabled=true",
    "aggregatedApi.enabled=true",
    "aggregatedApi.secrets=true",
    "admission.enabled=true",
    "inline.enabled=true",
    "snapshotterSecret.enabled=true",
    "certManager.enabled=true",
    "image.tag=0.1.0",
];

/// Values of the chart, and directories with their components that have the same objects.
type Case = (&'static [&'static str], &'static [(&'static str, &'static [&'static str])]);

#[test]
fn the_chart_has_the_objects_of_the_kustomizations() {
    let Some(cluster) = shared() else { return };
    let Some(helm) = &go_tool("helm") else { return };
    let cases: [Case; 12] = [
        (&[], &[("base", &[])]),
        (&["distributed.enabled=true"], &[("overlays/distributed", &[])]),
        (
            &["distributed.enabled=true", "aggregatedApi.enabled=true"],
            &[("overlays/distributed", &["cbt-http-nodes"]), ("aggregated-api", &[])],
        ),
        (&["runtime.enabled=true"], &[("runtime", &[])]),
        (&["nodeProxy.enabled=true"], &[("node-proxy", &[])]),
        (&["sessionManager.enabled=true"], &[("base", &[]), ("session-manager", &[])]),
        (&["aggregatedApi.enabled=true"], &[("base", &["cbt-http"]), ("aggregated-api", &[])]),
        (&["admission.enabled=true"], &[("base", &[]), ("admission", &[])]),
        (&["inline.enabled=true"], &[("base", &[]), ("inline", &[])]),
        (&["snapshotterSecret.enabled=true"], &[("base", &["snapshotter-secret"])]),
        (&["certManager.enabled=true"], &[("base", &["cert-manager/metadata"])]),
        (
            &ALL,
            &[
                (
                    "node-proxy",
                    &[
                        "node-proxy-claims",
                        "cbt-http",
                        "snapshotter-secret",
                        "cert-manager/metadata",
                    ],
                ),
                ("session-manager", &["cert-manager/session-manager"]),
                ("aggregated-api", &["aggregated-api-secrets", "cert-manager/aggregated-api"]),
                ("admission", &["cert-manager/admission"]),
                ("inline", &[]),
            ],
        ),
    ];
    for (values, directories) in cases {
        let (chart, kustomizations) = (rendered(helm, values), kustomized(cluster, directories));
        let names = |objects: &Objects| objects.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&chart), names(&kustomizations), "{values:?}");
        for (name, object) in &chart {
            let other = &kustomizations[name];
            assert_eq!(object, other, "{values:?}: {name}\n{object:#}\n{other:#}");
        }
    }
}

fn pods_of(objects: &Objects) -> impl Iterator<Item = (&String, &Value)> {
    let pods = objects.iter().map(|(name, object)| (name, &object["spec"]["template"]["spec"]));
    pods.filter(|(_, pod)| pod.is_object())
}

#[test]
fn each_value_of_the_chart_reaches_every_object_it_names() {
    let Some(helm) = &go_tool("helm") else { return };
    let with = |values: &[&str]| rendered(helm, &[&ALL, values].concat());
    let text = |objects: &Objects| objects.values().map(|one| one.to_string()).collect::<String>();

    let moved = text(&with(&["kubeletDir=/opt/kubelet"]));
    assert!(moved.contains("/opt/kubelet/plugins_registry") && !moved.contains("/var/lib/kubelet"));

    let moved = with(&["namespace.name=storage", "namespace.create=false"]);
    for (name, object) in &moved {
        assert!(!name.starts_with("Namespace "), "{name}");
        let text = object.to_string();
        assert!(!text.contains("\"namespace\":\"csi-loopback"), "{name}");
        for former in ["", "-sessions", "-aggregated", "-admission"] {
            assert!(!text.contains(&format!(".csi-loopback{former}.svc")), "{name}: {former}");
        }
    }

    let pulled =
        with(&[r#"json:imagePullSecrets=[{"name":"registry"}]"#, "image.pullPolicy=Always"]);
    for (name, pod) in pods_of(&pulled) {
        assert_eq!(pod["imagePullSecrets"], json!([{ "name": "registry" }]), "{name}");
    }
    assert_eq!(text(&pulled).matches("\"imagePullPolicy\":\"Always\"").count(), 9);

    let place = r#"{"nodeSelector":{"zone":"a"},"priorityClassName":"p","tolerations":[]}"#;
    let components =
        ["driver", "controller", "sessionManager", "aggregatedApi", "admission", "inline"];
    let places: Vec<_> = components.iter().map(|name| format!("json:{name}={place}")).collect();
    let places: Vec<&str> = places.iter().map(String::as_str).collect();
    for (name, pod) in pods_of(&with(&places)) {
        assert_eq!(pod["nodeSelector"]["zone"], "a", "{name}");
        assert_eq!(pod["priorityClassName"], "p", "{name}");
        assert_eq!(pod.get("tolerations"), None, "{name}");
    }

    let objects = with(&[
        "pool.kind=image",
        "pool.size=20Gi",
        "pool.sparse=true",
        "pool.dataDir=/srv/pool",
        "storageClass.name=fast",
        "storageClass.default=true",
        "storageClass.fsType=xfs",
        "storageClass.reclaimPolicy=Retain",
        r#"json:storageClass.parameters={"changePrecision":"block"}"#,
        "snapshotClass.deletionPolicy=Retain",
        r#"json:driver.extraArgs=["--overcommit=2"]"#,
        "sessionManager.replicas=1",
        r#"json:admission.policy="default: {allowed: false}""#,
    ]);
    let driver = &objects["StatefulSet csi-loopback csi-loopback"];
    for argument in [
        "--pool=image",
        "--pool-size=20Gi",
        "--pool-sparse",
        "--data-dir=/srv/pool",
        "--overcommit=2",
    ] {
        let arguments = driver["spec"]["template"]["spec"]["containers"][0]["args"].as_array();
        assert!(arguments.unwrap().contains(&json!(argument)), "{argument}");
    }
    let class = &objects["StorageClass - fast"];
    assert_eq!(class["parameters"]["csi.storage.k8s.io/fstype"], "xfs");
    assert_eq!(class["parameters"]["changePrecision"], "block");
    assert_eq!(class["reclaimPolicy"], "Retain");
    assert!(class["metadata"]["annotations"].to_string().contains("is-default-class"));
    assert_eq!(objects["VolumeSnapshotClass - csi-loopback"]["deletionPolicy"], "Retain");
    let manager = &objects["Deployment csi-loopback-sessions csi-loopback-session-manager"];
    assert_eq!(manager["spec"]["replicas"], 1);
    let policy = &objects["ConfigMap csi-loopback-admission csi-loopback-admission"];
    assert_eq!(policy["data"]["policy.yaml"].as_str().unwrap().trim(), "default: {allowed: false}");

    let none = rendered(helm, &["storageClass.create=false", "snapshotClass.create=false"]);
    assert!(!none.keys().any(|name| name.contains("Class ")), "{:?}", none.keys());

    let watched = with(&[
        "monitoring.podMonitor=true",
        "monitoring.namespace=prometheus",
        "monitoring.alerts=true",
        "monitoring.dashboards=true",
    ]);
    for kind in ["PodMonitor", "NetworkPolicy"] {
        let of = |name: &&String| name.starts_with(&format!("{kind} ")) && !name.contains("proxy");
        let count = watched.keys().filter(of).count();
        assert!(count >= 5, "{kind}: {count}");
    }
    let rule = &watched["PrometheusRule csi-loopback csi-loopback"];
    assert_eq!(rule["spec"]["groups"][0]["name"], "csi-loopback");
    let dashboard = &watched["ConfigMap csi-loopback csi-loopback-dashboard"];
    let dashboard = dashboard["data"]["csi-loopback.json"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(dashboard).unwrap()["panels"].is_array());
}

#[test]
fn the_chart_for_many_nodes_follows_its_values() {
    let Some(helm) = &go_tool("helm") else { return };
    const ENABLED: &str = "distributed.enabled=true";
    let objects = rendered(
        helm,
        &[
            ENABLED,
            "distributed.replicas=3",
            r#"json:distributed.nodeSelector={"zone":"a"}"#,
            r#"json:driver.nodeSelector={"zone":"b"}"#,
            "namespace.name=storage",
            "namespace.create=false",
            "kubeletDir=/opt/kubelet",
            "image.pullPolicy=Always",
        ],
    );
    for (name, object) in &objects {
        let text = object.to_string();
        assert!(!text.contains("\"namespace\":\"csi-loopback"), "{name}");
        assert!(!text.contains("/var/lib/kubelet"), "{name}");
        assert_eq!(text.matches("csi-loopback:").count(), text.matches("Always").count(), "{name}");
    }
    let front = &objects["Deployment storage csi-loopback-metadata"]["spec"];
    assert_eq!(front["replicas"], 3);
    for (name, pod) in pods_of(&objects) {
        let zone = if name.starts_with("Deployment") { "a" } else { "b" };
        assert_eq!(pod["nodeSelector"]["zone"], zone, "{name}");
    }
    for component in ["certManager", "nodeProxy", "runtime", "snapshotterSecret"] {
        let value = format!("{component}.enabled=true");
        let output = run(helm, &["template", "csi-loopback"], &[ENABLED, &value]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(component), "{value}: {error}");
    }
}

#[test]
fn the_chart_refuses_unknown_values_and_numbers_as_tags() {
    let Some(helm) = &go_tool("helm") else { return };
    for (value, named) in [
        ("json:image.tag=0.10", "/image/tag"),
        ("imge.tag=v1", "imge"),
        ("image.tga=v1", "tga"),
        ("image.digest=0123", "/image/digest"),
        ("pool.kind=zfs", "/pool/kind"),
        ("pool.size=ten", "/pool/size"),
        ("driver.nodeselector.zone=a", "nodeselector"),
        (r#"json:driver.resources={"limit":{"cpu":"1"}}"#, "limit"),
        ("sidecarDigests.csi-provisoner=x", "csi-provisoner"),
        ("sessionManager.enabled=yes", "/sessionManager/enabled"),
        ("kubeletDir=var/lib/kubelet", "/kubeletDir"),
        ("namespace.name=CSI", "/namespace/name"),
        (r#"json:imagePullSecrets=[{"nmae":"x"}]"#, "nmae"),
        ("monitoring.podMonitor.enabled=true", "/monitoring/podMonitor"),
    ] {
        let output = run(helm, &["template", "csi-loopback"], &[value]);
        let error = String::from_utf8_lossy(&output.stderr);
        let shown = error.replace('.', "/");
        assert!(!output.status.success(), "{value} was accepted");
        assert!(shown.contains(named.trim_start_matches('/')), "{value}: {error}");
    }
    for values in [&[][..], &ALL] {
        let lint = run(helm, &["lint", "--strict"], values);
        let text = String::from_utf8_lossy(&lint.stdout).into_owned();
        assert!(lint.status.success(), "{text}");
    }
}
