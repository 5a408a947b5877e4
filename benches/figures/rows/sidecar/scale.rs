//! The sidecar that clients call with many snapshot objects in a real API server: how long it reads
//! them at its start, and what it keeps of them. The objects are written as the snapshot-controller
//! leaves them; it is stopped meanwhile, because it would change each of them.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use csi_loopback::kubernetes::client::{Rate, connect};
use csi_loopback::kubernetes::snapshot::{
    GROUP, MANAGED_BY, VolumeSnapshot, VolumeSnapshotContent,
};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::rig::Rig;
use crate::Options;
use crate::kernel::{CpuClock, memory};
use crate::report::{Report, Row};
use crate::stats::{bytes, grouped, time};

/// Requests at the same time.
const WRITERS: usize = 32;
/// Objects of one page, to measure the size of all.
const PAGE: u32 = 500;
/// A process that was not busy for this time is idle: it can wait for the API server's first answer
/// for seconds.
const PAUSE: Duration = Duration::from_secs(10);
/// How often to look, and the processor time since then of a busy process.
const LOOK: Duration = Duration::from_millis(100);
const BUSY: Duration = Duration::from_millis(5);

pub fn measure(options: Options, report: &mut Report, rig: &Rig<'_>) -> Result<()> {
    let _paused = rig.cluster.pause("snapshot-controller");
    let kubeconfig = rig.cluster.kubeconfig();
    let rate = Rate { per_second: 1e6, burst: 1_000_000 };
    let client = rig.cluster.block_on(connect(Some(&kubeconfig), rate))?;
    let mut made = 0;
    let mut before = None;
    for count in options.pick([0, 10_000, 100_000], [0, 100, 200]) {
        rig.cluster.block_on(write(&client, &rig.namespace, made..count))?;
        made = count;
        let listed = rig.cluster.block_on(size(&client))?;
        let begun = Instant::now();
        let front = rig.many_nodes()?;
        let pid = front.pid();
        let idle = wait_until_idle(options, pid)?;
        let took = idle.duration_since(begun);
        let (now, peak) = (memory(pid, "status", "VmRSS")?, memory(pid, "status", "VmHWM")?);
        let (empty, nothing) = *before.get_or_insert((now, listed));
        let each = |all: u64, none: u64| (all.saturating_sub(none)) / (count.max(1) as u64);
        let what = format!("the sidecar for clients with {} snapshots", grouped(count as i64));
        let measured = format!(
            "{}, {} per snapshot; peak {}; read in {}",
            bytes(now),
            bytes(each(now, empty)),
            bytes(peak),
            time(took.as_secs_f64())
        );
        let of_api = format!(
            "the API server's answers: {}, {} per snapshot",
            bytes(listed),
            bytes(each(listed, nothing))
        );
        report.row(Row::value("scale", what, measured).against(of_api, None));
    }
    Ok(())
}

/// Writes VolumeSnapshots and their contents with these numbers.
async fn write(client: &Client, namespace: &str, numbers: std::ops::Range<usize>) -> Result<()> {
    let mut writers = JoinSet::new();
    for first in 0..WRITERS {
        let (client, namespace) = (client.clone(), namespace.to_owned());
        let mine = numbers.clone().skip(first).step_by(WRITERS);
        writers.spawn(async move {
            for number in mine {
                write_one(&client, &namespace, number).await?;
            }
            anyhow::Ok(())
        });
    }
    writers.join_all().await.into_iter().collect()
}

async fn write_one(client: &Client, namespace: &str, number: usize) -> Result<()> {
    let contents: Api<VolumeSnapshotContent> = Api::all(client.clone());
    let snapshots: Api<VolumeSnapshot> = Api::namespaced(client.clone(), namespace);
    // Of usual lengths: what csi-snapshotter and backup products write.
    let (uid, name) =
        (format!("{number:08}-8c1f-4a0e-9d7b-3f2a6b1c5d4e"), format!("daily-{number:08}"));
    let content = format!("snapcontent-{uid}");
    let handle = format!("snap-{uid}-7bfec082e8ebabb4");
    let (time, size) = ("2026-11-27T00:00:00Z", 1u64 << 30);
    let labels = json!({
        "app.kubernetes.io/part-of": "backup", "velero.io/backup-name": "daily-20261127000000",
    });
    let of_content = json!({
        "apiVersion": format!("{GROUP}/v1"), "kind": "VolumeSnapshotContent",
        "metadata": {
            "name": content,
            "labels": { MANAGED_BY: format!("node-{}", number % 3) },
            "finalizers": ["snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"],
        },
        "spec": {
            "driver": "other.csi.local", "deletionPolicy": "Retain", "sourceVolumeMode": "Block",
            "source": { "volumeHandle": format!("vol-pvc-{uid}-9b1d0e5f7a3c2468") },
            "volumeSnapshotClassName": "csi-loopback",
            "volumeSnapshotRef": {
                "apiVersion": format!("{GROUP}/v1"), "kind": "VolumeSnapshot",
                "namespace": namespace, "name": name, "uid": uid,
            },
        },
    });
    let of_snapshot = json!({
        "apiVersion": format!("{GROUP}/v1"), "kind": "VolumeSnapshot",
        "metadata": {
            "name": name,
            "labels": labels,
            "finalizers": [
                "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection",
                "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection",
            ],
        },
        "spec": {
            "source": { "persistentVolumeClaimName": "data" },
            "volumeSnapshotClassName": "csi-loopback",
        },
    });
    let how = PostParams::default();
    contents.create(&how, &serde_json::from_value(of_content)?).await.context("a content")?;
    snapshots.create(&how, &serde_json::from_value(of_snapshot)?).await.context("a snapshot")?;
    let status = |value: Value| Patch::Merge(json!({ "status": value }));
    let of_content = json!({ "readyToUse": true, "snapshotHandle": handle, "restoreSize": size });
    let of_snapshot = json!({
        "readyToUse": true, "boundVolumeSnapshotContentName": content, "creationTime": time,
        "restoreSize": size.to_string(),
    });
    let how = PatchParams::default();
    contents.patch_status(&content, &how, &status(of_content)).await?;
    snapshots.patch_status(&name, &how, &status(of_snapshot)).await?;
    Ok(())
}

/// Bytes of all VolumeSnapshots and contents as the API server sends them.
async fn size(client: &Client) -> Result<u64> {
    let mut all = 0;
    for plural in ["volumesnapshots", "volumesnapshotcontents"] {
        let path = format!("/apis/{GROUP}/v1/{plural}");
        let mut page = ListParams::default().limit(PAGE);
        loop {
            let request = kube::core::Request::new(&path).list(&page)?;
            let text = client.request_text(request).await?;
            all += text.len() as u64;
            let list: Value = serde_json::from_str(&text)?;
            match list["metadata"]["continue"].as_str().filter(|token| !token.is_empty()) {
                Some(token) => page.continue_token = Some(token.to_owned()),
                None => break,
            }
        }
    }
    Ok(all)
}

/// When the process began to be idle.
fn wait_until_idle(options: Options, pid: u32) -> Result<Instant> {
    let clock = CpuClock::of(pid)?;
    let pause = options.pick(PAUSE, PAUSE / 10);
    let (mut last_busy, mut before) = (Instant::now(), Duration::ZERO);
    while last_busy.elapsed() < pause {
        thread::sleep(LOOK);
        let now = clock.spent();
        if now - before > BUSY {
            last_busy = Instant::now();
        }
        before = now;
    }
    Ok(last_busy)
}
