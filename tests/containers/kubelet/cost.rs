//! Measures how long a pod waits for its volumes; the proposal requires this measurement for five
//! secrets ("Scalability").

use std::time::{Duration, Instant};
use support::cluster::shared;

use serde_json::{Value, json};

use support::cluster::kubelet::NodeRig;

/// Volumes of a pod, and number of pods of each kind, started one after the other.
const VOLUMES: usize = 5;
const PODS: usize = 3;

/// Median time from a pod's creation until kubelet reports it ready.
fn time_to_ready(rig: &NodeRig<'_>, kind: &str, volume: impl Fn(usize) -> Value) -> Duration {
    let volumes: Vec<Value> = (0..VOLUMES).map(volume).collect();
    let mut times: Vec<Duration> = (0..PODS)
        .map(|number| {
            let started = Instant::now();
            let pod = rig.run(&format!("{kind}-{number}"), &volumes, &json!({}));
            let duration = started.elapsed();
            if kind != "none" {
                assert_eq!(rig.exec(&pod, "cat /v0/password /v4/password"), "secret-0secret-4");
            }
            rig.delete(&pod);
            // The object may be gone before kubelet has unmounted the volumes.
            rig.wait_until_cleaned_up(&pod, &[]);
            duration
        })
        .collect();
    times.sort_unstable();
    times[PODS / 2]
}

#[test]
#[ignore = "full tier"]
fn start_time_with_five_secrets_is_reported() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = NodeRig::new(cluster) else { return };
    for number in 0..VOLUMES {
        rig.secret(&format!("s{number}"), &[("password", &format!("secret-{number}"))]);
    }
    let empty = |number| json!({ "name": format!("v{number}"), "emptyDir": {} });
    let secret = |number| {
        let source = json!({ "secretName": format!("s{number}") });
        json!({ "name": format!("v{number}"), "secret": source })
    };
    let inline = |number| {
        let secret = json!({ "name": format!("s{number}") });
        rig.inline(
            &format!("v{number}"),
            json!({ "readOnly": true, "nodePublishSecretRef": secret }),
        )
    };
    let none = time_to_ready(&rig, "none", empty);
    let secrets = time_to_ready(&rig, "secret", secret);
    let inline = time_to_ready(&rig, "inline", inline);
    support::report(&format!(
        "a pod is ready after {:.1} s with five emptyDirs, {:.1} s with five Secret volumes, {:.1} s with \
         five inline volumes with a secret",
        none.as_secs_f64(),
        secrets.as_secs_f64(),
        inline.as_secs_f64()
    ));
}
