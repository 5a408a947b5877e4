//! The Job of a mover.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use k8s_openapi::api::batch::v1::Job;
use serde_json::{Value, json};

use super::super::args::{CopyTo, MoverArgs, NewKey};
use super::super::failure::FINAL;
use super::super::repository::Location;
use super::template::Template;
use crate::client::Output;
use crate::client::cluster::pods::outside_meshes;

/// Path of the block device in the pod.
pub const DEVICE: &str = "/dev/csi-loopback-data";
/// Name of its volume.
const DATA: &str = "data";
/// Paths of the repositories' claims and of the Secrets.
const REPOSITORY: &str = "/repository";
const TO: &str = "/to";
const KEY: &str = "/var/run/secrets/csi-loopback/key";
const TO_KEY: &str = "/var/run/secrets/csi-loopback/to-key";
const NEW_KEY: &str = "/var/run/secrets/csi-loopback/new-key";
const S3: &str = "/var/run/secrets/csi-loopback/s3";
const TOKEN: &str = "/var/run/secrets/csi-loopback/token";

pub const CONTAINER: &str = "mover";
const ACCOUNT: &str = "csi-loopback-mover";
/// Seconds that a finished Job remains whose command was killed.
const EXPIRY: i32 = 600;
/// Seconds that a Job may take longer than its command waits, so that the command reports the end.
const MARGIN: u64 = 60;
/// Lifetime of the token in seconds; kubelet replaces it in time.
const TOKEN_EXPIRY: i64 = 3600;

/// One command in a pod.
pub struct Work<'w> {
    pub args: Vec<String>,
    pub output: Output,
    pub data: Data<'w>,
    /// The VolumeSnapshotContent of a filesystem, which the pod has as a block device.
    pub content: Option<&'w str>,
    /// Of a token for the driver's sidecar.
    pub audience: Option<&'w str>,
    /// A second repository.
    pub copy_to: Option<&'w CopyTo>,
    /// A key to add.
    pub new_key: Option<&'w NewKey>,
}

/// The block device of the pod.
pub enum Data<'d> {
    None,
    /// A claim from a VolumeSnapshot, which exists as long as the pod.
    Snapshot {
        name: &'d str,
        bytes: u64,
        class: Option<&'d str>,
        /// The only node where such a claim can exist.
        node: Option<&'d str>,
    },
    /// An existing claim.
    Claim(&'d str),
}

/// The flags of `backup create` in the pod: the data is on the device, and the sidecar lists the
/// blocks.
pub fn listing_args(namespace: &str) -> [String; 3] {
    [
        format!("--namespace={namespace}"),
        format!("--source={DEVICE}"),
        format!("--token-file={TOKEN}/token"),
    ]
}

pub fn account(flags: &MoverArgs) -> &str {
    flags.service_account.as_deref().unwrap_or(ACCOUNT)
}

fn image(flags: &MoverArgs) -> String {
    let own = || format!("csi-loopback:{}", env!("CARGO_PKG_VERSION"));
    flags.image.clone().unwrap_or_else(own)
}

/// The Job that runs one command.
///
/// A pod that was killed, interrupted or evicted is replaced, and continues: its exit code is none
/// of [`FINAL`], or Kubernetes says that the pod was disrupted. A command that fails ends the Job.
pub fn job(
    name: &str,
    flags: &MoverArgs,
    template: &Template,
    repository: &Location,
    work: &Work<'_>,
) -> Result<Job> {
    let mut pod = Volumes::default();
    let mut args = work.args.clone();
    args.push(pod.repository("repository", REPOSITORY, repository));
    let copy_to = work.copy_to;
    args.extend(copy_to.map(|other| pod.repository("to", TO, &other.to)));
    let to_key = copy_to.and_then(|other| other.to_key_secret.as_ref());
    let new_key = work.new_key.and_then(|new| new.new_key_secret.as_ref());
    for (name, path, flag, secret) in [
        ("key", KEY, format!("--key-file={KEY}/key"), flags.key_secret.as_ref()),
        ("to-key", TO_KEY, format!("--to-key-file={TO_KEY}/key"), to_key),
        ("new-key", NEW_KEY, format!("--new-key-file={NEW_KEY}/key"), new_key),
        ("s3", S3, format!("--s3-credentials={S3}"), flags.s3_secret.as_ref()),
    ] {
        if let Some(secret) = secret {
            pod.mount(name, path, true, json!({"secret": {"secretName": secret}}));
            args.push(flag);
        }
    }
    if let Some(audience) = work.audience {
        let token =
            json!({"audience": audience, "expirationSeconds": TOKEN_EXPIRY, "path": "token"});
        let projected = json!({"projected": {"sources": [{"serviceAccountToken": token}]}});
        pod.mount("token", TOKEN, true, projected);
    }
    pod.device(&work.data);
    args.extend(["--quiet".to_owned(), format!("--output={}", work.output.name())]);
    let labels = labels();
    // The pod ends with the mover.
    let mut pod_metadata = json!({
        "labels": labels,
        "annotations": {"kubectl.kubernetes.io/default-container": CONTAINER},
    });
    outside_meshes(&mut pod_metadata);
    let container = json!({
        "name": CONTAINER,
        "image": image(flags),
        "args": args,
        "volumeMounts": pod.mounts,
        "volumeDevices": pod.devices,
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            // Device nodes belong to root.
            "runAsUser": 0,
            "capabilities": {"drop": ["ALL"]},
        },
    });
    let mut pod = json!({
        "metadata": pod_metadata,
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": account(flags),
            "automountServiceAccountToken": work.audience.is_some(),
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            // Those of the driver: a mover runs on the node of its volume.
            "tolerations": [{"operator": "Exists"}],
            "containers": [container],
            "volumes": pod.volumes,
        },
    });
    template.apply(&mut pod);
    if let Data::Snapshot { node: Some(node), .. } = work.data {
        require_node(&mut pod["spec"], node);
    }
    let job = json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "ttlSecondsAfterFinished": EXPIRY,
            // The end of a Job whose command was killed.
            "activeDeadlineSeconds": flags.mover_timeout.as_secs().saturating_add(MARGIN),
            "podFailurePolicy": {"rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": FINAL},
                },
            ]},
            "template": pod,
        },
    });
    serde_json::from_value(job).context("the Job of the mover")
}

/// Labels of all objects that a command creates.
pub fn labels() -> Value {
    json!({"app.kubernetes.io/name": ACCOUNT, "app.kubernetes.io/managed-by": "csi-loopback"})
}

/// The volumes of the pod, and where its container has them.
#[derive(Default)]
struct Volumes {
    volumes: Vec<Value>,
    mounts: Vec<Value>,
    devices: Vec<Value>,
    /// Where the claims of repositories are mounted.
    claims: BTreeMap<String, &'static str>,
}

impl Volumes {
    /// The flag for a repository, whose claim gets mounted. Two repositories in one claim share a
    /// volume: kubelet may not start a pod with two volumes of a claim.
    fn repository(&mut self, flag: &str, mount: &'static str, location: &Location) -> String {
        let Location::Claim { name, path } = location else {
            return format!("--{flag}={location}");
        };
        if !self.claims.contains_key(name) {
            let claim = json!({"persistentVolumeClaim": {"claimName": name}});
            self.mount(flag, mount, false, claim);
        }
        let mount = self.claims.entry(name.clone()).or_insert(mount);
        format!("--{flag}={mount}/{path}")
    }

    fn mount(&mut self, name: &str, path: &str, read_only: bool, source: Value) {
        self.add(name, source);
        self.mounts.push(json!({"name": name, "mountPath": path, "readOnly": read_only}));
    }

    fn device(&mut self, data: &Data<'_>) {
        let source = match data {
            Data::None => return,
            Data::Claim(claim) => json!({"persistentVolumeClaim": {"claimName": claim}}),
            Data::Snapshot { name, bytes, class, .. } => {
                let group = kubernetes::snapshot::GROUP;
                let spec = json!({
                    "accessModes": ["ReadWriteOnce"],
                    "volumeMode": "Block",
                    "storageClassName": class,
                    "resources": {"requests": {"storage": bytes.to_string()}},
                    "dataSource": {"apiGroup": group, "kind": "VolumeSnapshot", "name": name},
                });
                json!({"ephemeral": {"volumeClaimTemplate": {"spec": spec}}})
            }
        };
        self.add(DATA, source);
        self.devices.push(json!({"name": DATA, "devicePath": DEVICE}));
    }

    fn add(&mut self, name: &str, mut source: Value) {
        source["name"] = json!(name);
        self.volumes.push(source);
    }
}

/// Adds the node to each of the alternative terms of the pod's affinity, or as the only one. Not
/// `nodeName`: only the scheduler selects a node for claims.
fn require_node(spec: &mut Value, node: &str) {
    let required =
        &mut spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let terms = &mut required["nodeSelectorTerms"];
    if !terms.is_array() {
        *terms = json!([{}]);
    }
    let field = json!({"key": "metadata.name", "operator": "In", "values": [node]});
    for term in terms.as_array_mut().into_iter().flatten() {
        match term["matchFields"].as_array_mut() {
            Some(fields) => fields.push(field.clone()),
            None => term["matchFields"] = json!([field]),
        }
    }
}

/// The claim that a pod with [`Data::Snapshot`] has (the rule of ephemeral volumes).
pub fn claim_of(pod: &str) -> String {
    format!("{pod}-{DATA}")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::super::args::RepositoryArgs;
    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        repository: RepositoryArgs,
        #[command(flatten)]
        to: CopyTo,
    }

    fn line(flags: &[&str], repository: &str, to: &str) -> Line {
        let line = ["x", "--namespace", "shop", "--repository", repository, "--to", to];
        Line::try_parse_from(line.iter().chain(flags)).ok().unwrap()
    }

    fn made_by(args: &RepositoryArgs, work: &Work<'_>) -> Value {
        let (location, template) = (args.location().unwrap(), Template::default());
        let made = job("mover-1", &args.mover, &template, &location, work).unwrap();
        serde_json::to_value(made).unwrap()
    }

    fn made(flags: &[&str], repository: &str, work: &Work<'_>) -> Value {
        made_by(&line(flags, repository, "s3://not-used").repository, work)
    }

    fn work<'w>(data: Data<'w>, audience: Option<&'w str>) -> Work<'w> {
        let args = vec!["backup".to_owned()];
        let output = Output::Json;
        Work { args, output, data, content: None, audience, copy_to: None, new_key: None }
    }

    #[test]
    fn the_pod_has_the_snapshot_as_a_device_and_a_token() {
        let data = Data::Snapshot { name: "s", bytes: 4096, class: Some("fast"), node: None };
        let job = made(&[], "claim:backups/a", &work(data, Some("driver")));
        let pod = &job["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        let args = ["backup", "--repository=/repository/a", "--quiet", "--output=json"];
        assert_eq!(container["args"], json!(args));
        assert_eq!(container["volumeDevices"][0]["devicePath"], DEVICE);
        let source = &pod["volumes"][2]["ephemeral"]["volumeClaimTemplate"]["spec"];
        assert_eq!(source["dataSource"]["name"], "s");
        assert_eq!(source["volumeMode"], "Block");
        assert_eq!(source["storageClassName"], "fast");
        let token = &pod["volumes"][1]["projected"]["sources"][0]["serviceAccountToken"];
        assert_eq!(token["audience"], "driver");
    }

    #[test]
    fn the_pod_runs_on_the_node_of_the_snapshot() {
        let of = |node: Option<&'static str>| {
            let data = Data::Snapshot { name: "s", bytes: 4096, class: None, node };
            let mut job = made(&[], "claim:backups/a", &work(data, None));
            job["spec"]["template"]["spec"]["affinity"].take()
        };
        let field = json!({"key": "metadata.name", "operator": "In", "values": ["node-1"]});
        let required = |terms: Value| {
            let terms = json!({ "nodeSelectorTerms": terms });
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}})
        };
        assert_eq!(of(None), Value::Null);
        assert_eq!(of(Some("node-1")), required(json!([{"matchFields": [field]}])));
        // A template's terms are alternatives: each needs the node.
        let zone = json!({"matchExpressions": [{"key": "zone", "operator": "Exists"}]});
        let mut spec = json!({"affinity": required(json!([zone.clone(), zone]))});
        require_node(&mut spec, "node-1");
        let terms = &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            ["nodeSelectorTerms"];
        for term in terms.as_array().unwrap() {
            assert_eq!(term["matchFields"], json!([field]));
            assert!(term["matchExpressions"].is_array());
        }
    }

    #[test]
    fn secrets_are_mounted_and_never_arguments() {
        let flags = ["--s3-secret", "s3", "--key-secret", "key"];
        let job = made(&flags, "s3://bucket/p", &work(Data::Claim("c"), None));
        let pod = &job["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        let args = container["args"].as_array().unwrap();
        assert!(args.contains(&json!(format!("--key-file={KEY}/key"))), "{args:?}");
        assert!(args.contains(&json!(format!("--s3-credentials={S3}"))), "{args:?}");
        assert!(container.get("env").is_none() && pod["automountServiceAccountToken"] == false);
        let names: Vec<_> =
            pod["volumes"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
        assert_eq!(names, ["key", "s3", "data"]);
    }

    #[test]
    fn a_copy_mounts_both_repositories_and_a_claim_once() {
        for (repository, to, flags, volumes) in [
            ("claim:a", "claim:b/p", ["/repository/backups", "/to/p"], "repository to to-key"),
            ("claim:a", "claim:a/p", ["/repository/backups", "/repository/p"], "repository to-key"),
            ("s3://a", "claim:b", ["s3://a", "/to/backups"], "to to-key"),
            ("claim:a", "s3://b", ["/repository/backups", "s3://b"], "repository to-key"),
        ] {
            let line = line(&["--to-key-secret", "key"], repository, to);
            let work = Work { copy_to: Some(&line.to), ..work(Data::None, None) };
            let job = made_by(&line.repository, &work);
            let pod = &job["spec"]["template"]["spec"];
            let args = &pod["containers"][0]["args"];
            let [from, into] = flags;
            assert_eq!(args[1], format!("--repository={from}"));
            assert_eq!(args[2], format!("--to={into}"));
            assert_eq!(args[3], format!("--to-key-file={TO_KEY}/key"));
            let names = pod["volumes"].as_array().unwrap().iter();
            let names: Vec<_> = names.map(|one| one["name"].as_str().unwrap()).collect();
            assert_eq!(names.join(" "), volumes);
        }
    }

    #[test]
    fn a_killed_or_evicted_pod_is_replaced_and_an_error_is_not() {
        let job = made(&[], "claim:backups", &work(Data::None, None));
        let rules = job["spec"]["podFailurePolicy"]["rules"].as_array().unwrap();
        // The first rule that fits decides.
        assert_eq!(rules[0]["action"], "Ignore");
        let disruption = json!([{"type": "DisruptionTarget", "status": "True"}]);
        assert_eq!(rules[0]["onPodConditions"], disruption);
        assert_eq!(rules[1]["action"], "FailJob");
        let codes = rules[1]["onExitCodes"]["values"].as_array().unwrap();
        // An interruption, and SIGKILL and SIGTERM as shells report them.
        for replaced in [130, 137, 143] {
            assert!(!codes.contains(&json!(replaced)), "{codes:?}");
        }
        assert!(codes.contains(&json!(1)) && codes.contains(&json!(2)), "{codes:?}");
    }

    #[test]
    fn a_pod_tolerates_what_the_driver_does_and_joins_no_mesh() {
        let job = made(&["--mover-timeout", "1h"], "claim:backups", &work(Data::None, None));
        assert_eq!(job["spec"]["activeDeadlineSeconds"], 3660);
        let pod = &job["spec"]["template"];
        assert_eq!(pod["spec"]["tolerations"], json!([{"operator": "Exists"}]));
        assert_eq!(pod["metadata"]["labels"]["sidecar.istio.io/inject"], "false");
        assert_eq!(pod["metadata"]["annotations"]["linkerd.io/inject"], "disabled");
    }
}
