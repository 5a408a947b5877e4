//! `node forget`: removes the objects of volumes and snapshots whose node, with its pool, is gone.
//! Where each node has its own controllers, those of that node alone remove the finalizers of these
//! objects, which otherwise stay forever.

use std::fmt::Debug;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use k8s_openapi::api::core::v1::{Node, ObjectReference, PersistentVolume, VolumeNodeAffinity};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::client::cluster::{call, if_found};
use crate::client::{Print, format, on_runtime};
use kubernetes::client::{Rate, User, connect_as_user};
use kubernetes::name;
use kubernetes::snapshot::{MANAGED_BY, VolumeSnapshotContent};

/// Finalizers of csi-provisioner, csi-snapshotter and, with the driver's name, csi-attacher. The
/// protection of volumes that claims use is not among them: it ends with the claim.
const FINALIZERS: [&str; 3] = [
    "external-provisioner.volume.kubernetes.io/finalizer",
    "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection",
    "external-attacher/",
];

/// Objects of one page of a list.
const PAGE: u32 = 500;

/// How often a change begins again because another client changed the object at the same time.
const ATTEMPTS: usize = 5;

/// For a command that changes many objects one after the other.
const RATE: Rate = Rate { per_second: 100.0, burst: 100 };

#[derive(Debug, Args)]
pub struct NodeArgs {
    #[command(subcommand)]
    command: NodeCommand,
    #[command(flatten)]
    print: Print,
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// Show, and with --confirm remove, the volumes and snapshots of a node that is gone
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
        forget.run(&client, args.print).await?;
        Ok(ExitCode::SUCCESS)
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
    /// Nothing was changed.
    Found,
    Removed,
    /// Its deletion waits for that of its claim.
    Deleting,
}

impl ForgetArgs {
    async fn run(&self, client: &Client, print: Print) -> Result<()> {
        let (contents, volumes) = (Api::all(client.clone()), Api::all(client.clone()));
        let found = (self.contents(&contents).await?, self.volumes(&volumes).await?);
        // As late as possible: a node that comes back has its data.
        self.check_node(client).await?;
        let mut rows = Vec::new();
        for content in &found.0 {
            let used_by = used_by(Some(&content.spec.volume_snapshot_ref));
            rows.push(self.forget(&contents, content, "VolumeSnapshotContent", used_by).await?);
        }
        for volume in &found.1 {
            let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
            rows.push(self.forget(&volumes, volume, "PersistentVolume", used_by(claim)).await?);
        }
        format::print_rows(print.output, &rows, table)?;
        if !self.confirm && !print.quiet && !rows.is_empty() {
            eprintln!(
                "csi-loopback: nothing was changed; --confirm removes these objects, with no way back"
            );
        }
        Ok(())
    }

    /// # Errors
    /// The node exists.
    async fn check_node(&self, client: &Client) -> Result<()> {
        let node = &self.node;
        let what = format!("Node {node}");
        let api: Api<Node> = Api::all(client.clone());
        let found = call(&what, async { if_found(api.get(node).await) }).await;
        ensure!(
            found.map_err(|failure| failure.error)?.is_none(),
            "{what} exists, so its volumes and snapshots may too: if the machine will never come back, first \
             `kubectl delete node {node}`"
        );
        Ok(())
    }

    async fn contents(
        &self,
        api: &Api<VolumeSnapshotContent>,
    ) -> Result<Vec<VolumeSnapshotContent>> {
        let of_node = ListParams::default().labels(&format!("{MANAGED_BY}={}", self.node));
        all(api, "VolumeSnapshotContents", of_node, |one| one.spec.driver == self.driver_name).await
    }

    async fn volumes(&self, api: &Api<PersistentVolume>) -> Result<Vec<PersistentVolume>> {
        let is_lost = |volume: &PersistentVolume| {
            volume.spec.as_ref().is_some_and(|spec| {
                spec.csi.as_ref().is_some_and(|csi| csi.driver == self.driver_name)
                    && spec.node_affinity.as_ref().is_some_and(|it| is_only_at(it, &self.node))
            })
        };
        all(api, "PersistentVolumes", ListParams::default(), is_lost).await
    }

    async fn forget<K>(
        &self,
        api: &Api<K>,
        object: &K,
        kind: &'static str,
        used_by: Option<String>,
    ) -> Result<Row>
    where
        K: Resource + Clone + Debug + DeserializeOwned,
    {
        let name = object.name_any();
        let state = match self.confirm {
            true => remove(api, object, &format!("{kind} {name}")).await?,
            false => State::Found,
        };
        Ok(Row { kind, name, used_by, state, changed: state != State::Found })
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

fn used_by(user: Option<&ObjectReference>) -> Option<String> {
    let user = user?;
    Some(format!("{}/{}", user.namespace.as_deref()?, user.name.as_deref()?))
}

/// The objects of all pages that `wanted` selects.
async fn all<K: Clone + Debug + DeserializeOwned>(
    api: &Api<K>,
    what: &str,
    mut page: ListParams,
    wanted: impl Fn(&K) -> bool,
) -> Result<Vec<K>> {
    page.limit = Some(PAGE);
    let mut found = Vec::new();
    loop {
        let listed = call(what, api.list(&page)).await.map_err(|failure| failure.error)?;
        found.extend(listed.items.into_iter().filter(&wanted));
        match listed.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page.continue_token = Some(token),
            None => return Ok(found),
        }
    }
}

/// Requests the deletion of this very object, then removes the finalizers of the controllers that
/// are gone. In the other order, csi-snapshotter's common controller would add them again.
async fn remove<K>(api: &Api<K>, object: &K, what: &str) -> Result<State>
where
    K: Resource + Clone + Debug + DeserializeOwned,
{
    let (name, uid) = (object.name_any(), object.uid());
    let preconditions = Some(Preconditions { uid: uid.clone(), resource_version: None });
    let params = DeleteParams { preconditions, ..DeleteParams::default() };
    let deleted = call(what, async { if_found(api.delete(&name, &params).await) }).await;
    deleted.map_err(|failure| failure.error)?;
    for _ in 0..ATTEMPTS {
        let found = call(what, api.get_opt(&name)).await.map_err(|failure| failure.error)?;
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
        match api.patch(&name, &PatchParams::default(), &patch).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            outcome => drop(outcome.with_context(|| what.to_owned())?),
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
    let used = |row: &Row| row.used_by.clone().unwrap_or_else(|| "-".to_owned());
    let state = |row: &Row| match (row.state, &row.used_by) {
        (State::Found, _) => "found".to_owned(),
        (State::Removed, _) => "removed".to_owned(),
        (State::Deleting, Some(claim)) => format!("removed with {claim}: delete it"),
        (State::Deleting, None) => "deleting".to_owned(),
    };
    let cells: Vec<_> = rows
        .iter()
        .map(|row| [row.kind.to_owned(), row.name.clone(), used(row), state(row)])
        .collect();
    format::table(["KIND", "NAME", "USED BY", "STATE"], &[], &cells)
}
