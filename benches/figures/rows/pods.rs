//! How long a pod waits for its volumes. KEP-596 requires this measurement for five secrets
//! ("Scalability").

use std::time::Instant;

use anyhow::Result;
use csi_loopback::kubernetes::tls;
use serde_json::{Value, json};
use support::cluster::Cluster;
use support::cluster::kubelet::NodeRig;

use super::sidecar::started;
use crate::Options;
use crate::report::{Report, Row};
use crate::stats::{Samples, time};

/// Volumes of a pod.
const VOLUMES: usize = 5;

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    tls::install_provider();
    let what = "API server and node";
    let Some(cluster) = started("pods", what, Cluster::start(), report)? else { return Ok(()) };
    let Some(rig) = NodeRig::new(&cluster) else {
        report.row(Row::value("pods", what, "not measured"));
        return Ok(());
    };
    pods(options.pick(5, 1), report, &rig);
    Ok(())
}

fn pods(count: usize, report: &mut Report, rig: &NodeRig<'_>) {
    for number in 0..VOLUMES {
        rig.secret(&format!("s{number}"), &[("password", &format!("secret-{number}"))]);
    }
    let name = |number: usize| format!("v{number}");
    let empty = |number| json!({ "name": name(number), "emptyDir": {} });
    let secret = |number: usize| json!({ "name": name(number), "secret": { "secretName": format!("s{number}") } });
    let inline = |number: usize| {
        let secret = json!({ "name": format!("s{number}") });
        rig.inline(&name(number), json!({ "readOnly": true, "nodePublishSecretRef": secret }))
    };
    let kinds: [(&str, &dyn Fn(usize) -> Value); 3] = [
        ("emptyDirs", &empty),
        ("Secret volumes", &secret),
        ("inline volumes with a secret", &inline),
    ];
    for (kind, volume) in kinds {
        let volumes: Vec<Value> = (0..VOLUMES).map(volume).collect();
        let times: Samples = (0..count).map(|_| time_to_ready(rig, &volumes)).collect();
        let what = format!("a pod with five {kind} is ready");
        report.row(Row::samples("pods", what, &times, "seconds", time));
    }
}

/// Seconds from a pod's creation until kubelet reports it ready.
fn time_to_ready(rig: &NodeRig<'_>, volumes: &[Value]) -> f64 {
    let begun = Instant::now();
    let pod = rig.run("measured", volumes, &json!({}));
    let seconds = begun.elapsed().as_secs_f64();
    rig.delete(&pod);
    // The object may be gone before kubelet has unmounted the volumes.
    rig.wait_until_cleaned_up(&pod, &[]);
    seconds
}
