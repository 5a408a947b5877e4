//! The progress of a mover, on the terminal of the command that waits for it.

use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use support::cluster::programs::stdout_of;
use support::cluster::shared;

use super::rig::{Stage, ended, running};

#[test]
fn the_progress_of_a_mover_is_shown_on_a_terminal() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    stage.snapshot("nightly");
    let inner = stage.command(&stage.kubeconfig(), &["backup", "create", "nightly"]);
    let words = [inner.get_program()].into_iter().chain(inner.get_args());
    let line: Vec<_> = words.map(|word| word.to_str().unwrap()).collect();
    let mut command = Command::new("script");
    command.args(["-qec", &line.join(" "), "/dev/null"]).env("TERM", "xterm");
    let run = stage.spawn(command);
    let job = stage.job(&[]);
    assert!(format!("{:?}", job.spec).contains("--report-progress"));
    let report = "csi-loopback-progress 3145728 524288 1048576\n";
    let pod = stage.movers.pod(&job, 0, report);
    stage.bind(&pod);
    stage.set(&pod, "Running", &[("mover", running())]);
    // The line appears after two seconds, and the log is read every two.
    cluster.wait_for("three reads of the log", || {
        let reads = cluster.count_requests(|request| {
            let object = &request["objectRef"];
            object["subresource"] == "log" && object["name"] == pod.as_str()
        });
        (reads >= 3).then_some(())
    });
    sleep(Duration::from_secs(1));
    stage.movers.set_log(&pod, &format!("{report}{{}}\n"));
    stage.set(&pod, "Succeeded", &[("mover", ended(0))]);
    let shown = stdout_of(run.wait());
    assert!(shown.contains("50 %, 3Mi of data"), "{shown}");
    assert!(shown.trim_end().ends_with("{}"), "{shown}");
}
