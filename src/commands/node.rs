//! `node forget`: removes the objects of volumes and snapshots whose node, with its pool, is gone.
//! Where each node has its own controllers, those of that node alone remove the finalizers of these
//! objects, which otherwise stay forever.
//!
//! An object goes after what users made it for: the snapshot-controller would make the content of a
//! VolumeSnapshot that exists again, and a claim would be without its volume.

use std::collections::HashSet;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use clap::{Args, Subcommand};
use k8s_openapi::api::core::v1::{Node, ObjectReference, PersistentVolume, VolumeNodeAffinity};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde_json::json;

use crate::client::cluster::Failure;
use crate::client::cluster::removal::request_deletion;
use crate::client::{Print, format, on_runtime};
use kubernetes::cache::{Object, in_time, list};
use kubernetes::client::{Rate, User, connect_as_user};
use kubernetes::name;
use kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};

/// Finalizers of csi-provisioner, csi-snapshotter and, with the driver's name, csi-attacher. Those of
/// Kubernetes' own controllers are not among them.
const FINALIZERS: [&str; 3] = [
    "external-provisioner.volume.kubernetes.io/finalizer",
    "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection",
    "external-attacher/",
];

/// How often a change begins again because another client changed the object at the same time.
const ATTEMPTS: usize = 5;

/// For requests one after the other: the API server limits the rate.
const RATE: Rate = Rate { per_second: 1000.0, burst: 100 };

#[derive(Debug, Args)]
pub struct NodeArgs {
    #[command(subcommand)]
    command: NodeCommand,
    #[command(flatten)]
    print: Print,
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// Show, and with --confirm remove, what volumes and snapshots of a node that is gone leave
    #[command(after_help = "Examples:
  csi-loopback node forget node-3
  csi-loopback node forget node-3 --confirm")]
    Forget(ForgetArgs),
}

#[derive(Debug, Args)]
struct ForgetArgs {
    /// Name of the Node, which must not exist
    #[arg(value_parser = name::object)]
    node: String,
    /// CSI driver with node-local volumes
    #[arg(long, default_value = "loopback.csi.local", value_name = "NAME")]
    driver_name: String,
    /// Remove the objects; otherwise only show them
    #[arg(long)]
    confirm: bool,
    /// Configuration of the client [env: KUBECONFIG] [default: ~/.kube/config, else the pod's]
    #[arg(long, value_name = "PATH")]
    kubeconfig: Option<PathBuf>,
    /// Context of the configuration [default: the current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
}

/// Runs a command. The exit codes are those of docs/reference/commands.md.
///
/// # Errors
/// The API server refused; the text is for a user.
pub fn run(args: NodeArgs) -> Result<ExitCode> {
    let NodeCommand::Forget(forget) = args.command;
    on_runtime(async move {
        let user =
            User { kubeconfig: forget.kubeconfig.as_deref(), context: forget.context.as_deref() };
        let client = connect_as_user(user, RATE).await?;
        forget.run(&client, args.print).await
    })
}

/// An object, as the result shows it.
#[derive(Debug, Serialize)]
struct Row {
    kind: &'static str,
    name: String,
    /// NAMESPACE/NAME of the claim or VolumeSnapshot that has lost its data.
    used_by: Option<String>,
    state: State,
    changed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// A user must delete its claim or VolumeSnapshot first.
    InUse,
    /// It can be removed.
    Unused,
    Removed,
    /// Its deletion waits for another controller.
    Deleting,
}

impl ForgetArgs {
    async fn run(&self, client: &Client, print: Print) -> Result<ExitCode> {
        let (contents, volumes) = (Api::all(client.clone()), Api::all(client.clone()));
        let lost = self.volumes(&volumes).await?;
        let snapshots = self.contents(&contents, &lost).await?;
        // As late as possible: a node that comes back has its data.
        self.check_node(client).await?;
        let (mut rows, mut kept) = (Vec::new(), HashSet::new());
        for content in &snapshots {
            let user = &content.spec.volume_snapshot_ref;
            let is_used = !is_deleted(content) && snapshot_exists(client, user).await?;
            if is_used {
                kept.extend(content.spec.source.volume_handle.as_deref());
            }
            let kind = "VolumeSnapshotContent";
            rows.push(self.forget(&contents, content, kind, named(Some(user)), is_used).await?);
        }
        for volume in &lost {
            let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
            // The handle is what an unlabelled content of it is found by.
            let is_used = is_bound(volume) || handle(volume).is_some_and(|it| kept.contains(it));
            let kind = "PersistentVolume";
            rows.push(self.forget(&volumes, volume, kind, named(claim), is_used).await?);
        }
        format::print_rows(print.output, &rows, table)?;
        let used = rows.iter().filter(|row| row.state == State::InUse).count();
        if let (Some(note), false) = (self.next_step(rows.len(), used), print.quiet) {
            eprintln!("csi-loopback: {note}");
        }
        Ok(ExitCode::from(u8::from(self.confirm && used > 0)))
    }

    fn next_step(&self, all: usize, used: usize) -> Option<String> {
        match (used, self.confirm) {
            (0, false) if all > 0 => Some(
                "nothing was changed; --confirm removes these objects, with no way back".to_owned(),
            ),
            (0, _) => None,
            (used, _) => Some(format!(
                "{used} objects are in use: delete their claims and VolumeSnapshots (kubectl delete --wait=false), then \
                 run this command again"
            )),
        }
    }

    /// # Errors
    /// The node exists.
    async fn check_node(&self, client: &Client) -> Result<()> {
        let node = &self.node;
        let what = format!("Node {node}");
        let api: Api<Node> = Api::all(client.clone());
        ensure!(
            ask(&what, in_time(api.get_opt(node))).await?.is_none(),
            "{what} exists, so its volumes and snapshots may too: if the machine will never come back, first \
             `kubectl delete node {node}`"
        );
        Ok(())
    }

    /// With the node's label, or without one because the node was gone already.
    async fn contents(
        &self,
        api: &Api<VolumeSnapshotContent>,
        lost: &[PersistentVolume],
    ) -> Result<Vec<VolumeSnapshotContent>> {
        let lost: HashSet<&str> = lost.iter().filter_map(handle).collect();
        let is_lost = |content: &VolumeSnapshotContent| {
            let source = content.spec.source.volume_handle.as_deref();
            content.spec.driver == self.driver_name
                && match content.node() {
                    Some(node) => node == self.node,
                    None => source.is_some_and(|source| lost.contains(source)),
                }
        };
        ask("VolumeSnapshotContents", list(api, ListParams::default(), is_lost)).await
    }

    async fn volumes(&self, api: &Api<PersistentVolume>) -> Result<Vec<PersistentVolume>> {
        let is_lost = |volume: &PersistentVolume| {
            volume.spec.as_ref().is_some_and(|spec| {
                spec.csi.as_ref().is_some_and(|csi| csi.driver == self.driver_name)
                    && spec.node_affinity.as_ref().is_some_and(|it| is_only_at(it, &self.node))
            })
        };
        ask("PersistentVolumes", list(api, ListParams::default(), is_lost)).await
    }

    async fn forget<K>(
        &self,
        api: &Api<K>,
        object: &K,
        kind: &'static str,
        used_by: Option<String>,
        is_used: bool,
    ) -> Result<Row>
    where
        K: Object,
    {
        let name = object.name_any();
        let state = match (is_used, self.confirm) {
            (true, _) => State::InUse,
            (false, false) => State::Unused,
            (false, true) => remove(api, object, &format!("{kind} {name}")).await?,
        };
        let changed = matches!(state, State::Removed | State::Deleting);
        Ok(Row { kind, name, used_by, state, changed })
    }
}

/// Whether a volume can be used on this node only, whatever its driver calls the topology.
fn is_only_at(affinity: &VolumeNodeAffinity, node: &str) -> bool {
    let terms = affinity.required.iter().flat_map(|required| &required.node_selector_terms);
    let mut terms = terms.peekable();
    terms.peek().is_some()
        && terms.all(|term| {
            term.match_expressions.iter().flatten().any(|one| {
                one.operator == "In" && one.values.as_deref() == Some(&[node.to_owned()])
            })
        })
}

fn handle(volume: &PersistentVolume) -> Option<&str> {
    Some(volume.spec.as_ref()?.csi.as_ref()?.volume_handle.as_str())
}

fn is_bound(volume: &PersistentVolume) -> bool {
    volume.status.as_ref().is_some_and(|status| status.phase.as_deref() == Some("Bound"))
}

fn is_deleted(object: &impl Resource) -> bool {
    object.meta().deletion_timestamp.is_some()
}

fn named(user: Option<&ObjectReference>) -> Option<String> {
    let user = user?;
    Some(format!("{}/{}", user.namespace.as_deref()?, user.name.as_deref()?))
}

/// Whether the VolumeSnapshot of a content exists and stays.
async fn snapshot_exists(client: &Client, user: &ObjectReference) -> Result<bool> {
    let (Some(namespace), Some(name)) = (&user.namespace, &user.name) else { return Ok(false) };
    let api: Api<VolumeSnapshot> = Api::namespaced(client.clone(), namespace);
    let what = format!("VolumeSnapshot {namespace}/{name}");
    Ok(ask(&what, in_time(api.get_opt(name))).await?.is_some_and(|it| {
        !is_deleted(&it) && user.uid.as_ref().is_none_or(|uid| it.uid().as_ref() == Some(uid))
    }))
}

/// A request to the API server, or several, each with its own time limit. Errors name its subject.
async fn ask<T>(what: &str, request: impl Future<Output = kube::Result<T>>) -> Result<T> {
    request.await.map_err(|error| Failure::api(what, error).error)
}

/// Requests the deletion of this very object, then removes the finalizers of the controllers that
/// are gone. In the other order, the snapshot-controller would add its own again.
async fn remove<K>(api: &Api<K>, object: &K, what: &str) -> Result<State>
where
    K: Object,
{
    let (name, uid) = (object.name_any(), object.uid());
    let preconditions = Some(Preconditions { uid: uid.clone(), resource_version: None });
    let params = DeleteParams { preconditions, ..DeleteParams::default() };
    ask(what, in_time(request_deletion(api, &name, &params))).await?;
    for _ in 0..ATTEMPTS {
        let found = ask(what, in_time(api.get_opt(&name))).await?;
        let Some(found) = found.filter(|found| found.uid() == uid) else {
            return Ok(State::Removed);
        };
        let stay: Vec<_> = found.finalizers().iter().filter(|one| !is_theirs(one)).collect();
        if stay.len() == found.finalizers().len() {
            return Ok(State::Deleting);
        }
        // Fails if the object has changed.
        let change = json!({"metadata": {
            "uid": uid, "resourceVersion": found.resource_version(), "finalizers": stay,
        }});
        let patch = Patch::Merge(&change);
        match in_time(api.patch(&name, &PatchParams::default(), &patch)).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            outcome => drop(ask(what, async { outcome }).await?),
        }
    }
    bail!("{what} is changed by other clients all the time: run the command again")
}

fn is_theirs(finalizer: &str) -> bool {
    FINALIZERS.iter().any(|own| match own.ends_with('/') {
        true => finalizer.starts_with(own),
        false => finalizer == *own,
    })
}

fn table(rows: &[Row]) -> String {
    let state = |row: &Row| match row.state {
        State::InUse => "in use",
        State::Unused => "unused",
        State::Removed => "removed",
        State::Deleting => "deleting",
    };
    let user = |row: &Row| row.used_by.clone().unwrap_or_else(|| "-".to_owned());
    let cells: Vec<_> = rows
        .iter()
        .map(|row| [row.kind.to_owned(), row.name.clone(), user(row), state(row).to_owned()])
        .collect();
    format::table(["KIND", "NAME", "USED BY", "STATE"], &[], &cells)
}
