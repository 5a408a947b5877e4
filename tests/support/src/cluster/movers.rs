//! Mover pods without controllers and kubelet: runs the command of each Job on this machine, with
//! directories and files in the place of claims and devices, and serves its output as the log of
//! a pod.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec, Volume};
use kube::api::DeleteParams;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustls::ServerConfig;
use rustls_pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::Cluster;
use super::access::Account;
use super::sidecar::AUDIENCE;
use crate::driver::binary;
use crate::path;

const ACCOUNT: &str = "csi-loopback-mover";
/// Label of the pods of a Job.
const JOB: &str = "batch.kubernetes.io/job-name";

pub struct Movers<'a> {
    cluster: &'a Cluster,
    namespace: String,
    account: Account,
    node: String,
    directory: PathBuf,
    /// The data of VolumeSnapshots, by name.
    images: BTreeMap<String, PathBuf>,
    /// Of the next pod.
    fail_points: RefCell<Option<String>>,
    kubelet: JoinHandle<()>,
}

impl<'a> Movers<'a> {
    /// Creates the ServiceAccount with the rights of `deploy/examples/mover`, and a node.
    pub fn start(cluster: &'a Cluster, namespace: &str) -> Self {
        let account = cluster.account(namespace, ACCOUNT);
        cluster.grant_shipped(namespace, &account, "deploy/examples/mover/rbac.yaml");
        let directory = cluster.scratch().join(cluster.unique("movers"));
        for name in ["claims", "fail-points", "logs", "token"] {
            fs::create_dir_all(directory.join(name)).unwrap();
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let listener = cluster.block_on(listener).unwrap();
        let node = cluster.unique("mover-node");
        let port = listener.local_addr().unwrap().port();
        let status = json!({
            "addresses": [{ "type": "InternalIP", "address": "127.0.0.1" }],
            "daemonEndpoints": { "kubeletEndpoint": { "Port": port } },
        });
        let nodes = cluster.api::<Node>();
        cluster.create(&nodes, json!({ "metadata": { "name": node } }));
        cluster.merge_status(&nodes, &node, &status);
        let kubelet = cluster.spawn_task(serve_logs(listener, directory.join("logs")));
        let (namespace, images) = (namespace.to_owned(), BTreeMap::new());
        let fail_points = RefCell::default();
        Self { cluster, namespace, account, node, directory, images, fail_points, kubelet }
    }

    /// Sets the data of a VolumeSnapshot.
    pub fn hold(&mut self, snapshot: &str, image: PathBuf) {
        self.images.insert(snapshot.to_owned(), image);
    }

    /// Lets the next pod follow this plan of fail points.
    pub fn fail_next(&self, plan: &str) {
        self.fail_points.replace(Some(plan.to_owned()));
    }

    /// The directory or file in the place of a claim.
    pub fn claim(&self, name: &str) -> PathBuf {
        self.directory.join("claims").join(name)
    }

    pub fn jobs(&self) -> Vec<Job> {
        let jobs = self.cluster.api_in(&self.namespace);
        self.cluster.block_on(jobs.list(&Default::default())).unwrap().items
    }

    pub fn pods(&self) -> Vec<Pod> {
        let pods = self.cluster.api_in(&self.namespace);
        self.cluster.block_on(pods.list(&Default::default())).unwrap().items
    }

    /// Runs a command and its Jobs. Interrupts it at the Job after this many.
    pub fn run(&self, mut command: Command, jobs: usize) -> Output {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        let pid = Pid::from_raw(child.id().cast_signed());
        let ended = thread::spawn(move || child.wait_with_output().unwrap());
        let mut seen = BTreeSet::new();
        while !ended.is_finished() {
            for job in self.jobs() {
                let name = job.metadata.name.clone().unwrap();
                match seen.insert(name.clone()) {
                    false => {}
                    true if seen.len() > jobs => kill(pid, Signal::SIGINT).unwrap(),
                    true => self.complete(&name, &job.spec.unwrap()),
                }
            }
            self.collect_garbage();
            thread::sleep(Duration::from_millis(50));
        }
        ended.join().unwrap()
    }

    /// Runs the command of a Job, again after a failure that its policy does not call final, and
    /// reports its end as kubelet and controllers do.
    fn complete(&self, job: &str, spec: &JobSpec) {
        let pod = spec.template.spec.as_ref().unwrap();
        let mut code = self.run_pod(job, 0, pod);
        for number in 1.. {
            if code == 0 || is_final(spec, code) {
                break;
            }
            assert!(number < 6, "{job}: the limit of pods");
            code = self.run_pod(job, number, pod);
        }
        let now = k8s_openapi::jiff::Timestamp::now().to_string();
        let condition = |kind: &str| {
            json!({
                "type": kind, "status": "True", "reason": "Test", "message": "the pod has ended",
                "lastProbeTime": now, "lastTransitionTime": now,
            })
        };
        let status = match code {
            0 => json!({
                "startTime": now, "completionTime": now, "succeeded": 1,
                "conditions": [condition("SuccessCriteriaMet"), condition("Complete")],
            }),
            _ => json!({
                "startTime": now, "failed": 1,
                "conditions": [condition("FailureTarget"), condition("Failed")],
            }),
        };
        self.cluster.merge_status(&self.cluster.api_in::<Job>(&self.namespace), job, &status);
    }

    /// Runs the command of a pod; returns its exit code as kubelet reports it.
    fn run_pod(&self, job: &str, number: usize, spec: &PodSpec) -> i32 {
        let mut command = Command::new(binary());
        command.args(self.arguments(spec));
        if let Some(plan) = self.fail_points.take() {
            let directory = self.directory.join("fail-points");
            fs::write(directory.join("plan"), plan).unwrap();
            command.env("CSI_LOOPBACK_FAIL_POINTS", directory);
        }
        let output = command.output().unwrap();
        let status = output.status;
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap());
        let name = format!("{job}-{number}");
        let log = [output.stdout, output.stderr].concat();
        fs::write(self.directory.join("logs").join(&name), log).unwrap();
        let mut spec = serde_json::to_value(spec).unwrap();
        spec["nodeName"] = self.node.as_str().into();
        let metadata = json!({ "name": name, "labels": { JOB: job } });
        let pods = self.cluster.api_in::<Pod>(&self.namespace);
        self.cluster.create(&pods, json!({ "metadata": metadata, "spec": spec }));
        let container = json!({
            "name": spec["containers"][0]["name"], "image": "", "imageID": "", "ready": false,
            "restartCount": 0, "state": { "terminated": { "exitCode": code } },
        });
        let phase = if code == 0 { "Succeeded" } else { "Failed" };
        let status = json!({ "phase": phase, "containerStatuses": [container] });
        self.cluster.merge_status(&pods, &name, &status);
        code
    }

    /// The arguments of a pod, with paths of this machine.
    fn arguments(&self, spec: &PodSpec) -> Vec<String> {
        let container = &spec.containers[0];
        let mounts = container.volume_mounts.iter().flatten();
        let mounts = mounts.map(|mount| (mount.name.clone(), mount.mount_path.clone()));
        let devices = container.volume_devices.iter().flatten();
        let devices = devices.map(|device| (device.name.clone(), device.device_path.clone()));
        let places: BTreeMap<String, String> = mounts.chain(devices).collect();
        let volumes = spec.volumes.iter().flatten();
        let places: Vec<(&String, PathBuf)> =
            volumes.map(|volume| (&places[&volume.name], self.place(volume))).collect();
        let mut arguments = Vec::new();
        for argument in container.args.iter().flatten() {
            let moved = argument.split_once('=').and_then(|(flag, value)| {
                places.iter().find_map(|(at, place)| {
                    let rest = Path::new(value).strip_prefix(at).ok()?;
                    let here = place.components().chain(rest.components()).collect::<PathBuf>();
                    Some(format!("{flag}={}", path(&here)))
                })
            });
            arguments.push(moved.unwrap_or_else(|| argument.clone()));
            if argument.starts_with("--namespace=") {
                let kubeconfig = self.cluster.kubeconfig_of(&self.account);
                arguments.push(format!("--kubeconfig={}", path(&kubeconfig)));
            }
        }
        arguments
    }

    fn place(&self, volume: &Volume) -> PathBuf {
        if let Some(claim) = &volume.persistent_volume_claim {
            return self.claim(&claim.claim_name);
        }
        if volume.projected.is_some() {
            let token = self.directory.join("token");
            let content = self.cluster.token(&self.account, Some(AUDIENCE));
            fs::write(token.join("token"), content).unwrap();
            return token;
        }
        let template = volume.ephemeral.as_ref().unwrap().volume_claim_template.as_ref().unwrap();
        self.images[&template.spec.data_source.as_ref().unwrap().name].clone()
    }

    /// Creates a pod of a Job as the controllers do, and sets its status; `log` is its output.
    /// Returns its name.
    pub fn pod(&self, job: &Job, number: usize, log: &str) -> String {
        let name = format!("{}-{number}", job.metadata.name.as_deref().unwrap());
        self.set_log(&name, log);
        let pods = self.cluster.api_in::<Pod>(&self.namespace);
        self.cluster.create(&pods, self.pod_of(job, &name));
        name
    }

    /// Sets what a pod has printed.
    pub fn set_log(&self, pod: &str, log: &str) {
        fs::write(self.directory.join("logs").join(pod), log).unwrap();
    }

    /// The pod that the controllers make for a Job.
    pub fn pod_of(&self, job: &Job, name: &str) -> Value {
        let template = &job.spec.as_ref().unwrap().template;
        let mut pod = serde_json::to_value(template).unwrap();
        pod["metadata"]["name"] = name.into();
        pod["metadata"]["labels"][JOB] = job.metadata.name.as_deref().into();
        pod["spec"]["nodeName"] = self.node.as_str().into();
        pod
    }

    /// Deletes the pods of deleted Jobs.
    pub fn collect_garbage(&self) {
        let jobs: BTreeSet<_> = self.jobs().into_iter().map(|job| job.metadata.name).collect();
        let pods = self.cluster.api_in::<Pod>(&self.namespace);
        let now = DeleteParams::default().grace_period(0);
        for pod in self.pods() {
            let job = pod.metadata.labels.unwrap_or_default().remove(JOB);
            if !jobs.contains(&job) {
                let name = pod.metadata.name.unwrap();
                self.cluster.block_on(pods.delete(&name, &now)).unwrap();
            }
        }
    }
}

/// Whether the policy of a Job ends it after a pod with this exit code.
fn is_final(spec: &JobSpec, code: i32) -> bool {
    let rules = spec.pod_failure_policy.iter().flat_map(|policy| &policy.rules);
    let mut fatal = rules.filter(|rule| rule.action == "FailJob");
    fatal.any(|rule| {
        let codes = rule.on_exit_codes.as_ref();
        codes.is_some_and(|codes| codes.operator == "In" && codes.values.contains(&code))
    })
}

impl Drop for Movers<'_> {
    fn drop(&mut self) {
        self.kubelet.abort();
    }
}

/// TLS with a certificate of its own, which the API server does not verify.
fn acceptor() -> TlsAcceptor {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::Pkcs8(own.signing_key.serialize_der().into());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key)
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

/// Answers requests of the API server for `/containerLogs/NAMESPACE/POD/CONTAINER`.
async fn serve_logs(listener: TcpListener, logs: PathBuf) {
    let acceptor = acceptor();
    while let Ok((stream, _)) = listener.accept().await {
        let Ok(mut stream) = acceptor.accept(stream).await else { continue };
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => break,
            }
        }
        let head = String::from_utf8_lossy(&head);
        let pod = head.split('/').nth(3).unwrap_or_default();
        let log = fs::read(logs.join(pod)).unwrap_or_default();
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            log.len()
        );
        let _ = stream.write_all(&[answer.as_bytes(), &log].concat()).await;
        let _ = stream.shutdown().await;
    }
}
