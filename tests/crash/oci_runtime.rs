//! Kills the OCI runtime or injects an error at each step. No mount remains on the host, and the
//! container can be deleted and created again.

use std::collections::BTreeSet;
use std::fs;
use std::process::Output;

use crate::source;
use support::runtime::{Container, Node, bind, is_live, on_node};
use support::{MIB, kernel};

/// Prefix of the fail points of this program. It also meets those of the backend.
pub const OWN: &str = "oci_runtime.";

/// Calls the runtime with a plan. Returns its output and the fail points met.
fn call(node: &Node, plan: &str, words: &[String]) -> (Output, Vec<String>) {
    let points = node.path("points");
    fs::create_dir_all(&points).unwrap();
    let _ = fs::remove_file(points.join("met"));
    fs::write(points.join("plan"), plan).unwrap();
    let mut command = node.command(&node.program);
    command.env("CSI_LOOPBACK_RUNC_FAIL_POINTS", &points).args(words);
    let (out, err) = (node.path("stdout"), node.path("stderr"));
    command.stdout(fs::File::create(&out).unwrap()).stderr(fs::File::create(&err).unwrap());
    let status = command.status().unwrap();
    let output = Output { status, stdout: fs::read(out).unwrap(), stderr: fs::read(err).unwrap() };
    let met = fs::read_to_string(points.join("met")).unwrap_or_default();
    (output, met.lines().map(str::to_owned).collect())
}

fn deletion(container: &Container<'_>) -> Vec<String> {
    ["delete", "--force", &container.id].map(str::to_owned).to_vec()
}

/// A volume, and a container that mounts a sub-path of it with a group.
fn with_scene(node: &Node, round: impl Fn(&Container<'_>, &dyn Fn())) {
    let device = node.device("v", "ext4", 32 * MIB);
    let info = support::runtime::info(&device, "ext4", &[]).with_group(4059, None);
    let target = node.stage("v", &info);
    let mounts = [bind(target.as_path(), "/v"), bind(&target.as_path().join("a/b"), "/s")];
    let container = node.container(&mounts).in_pod("pod");
    container.write();
    round(&container, &|| {
        assert_eq!(node.shown(&device), Vec::<String>::new(), "on the host");
        container.delete();
        // runc, killed while it writes the pid file, leaves a temporary file that it then refuses.
        let _ = fs::remove_file(container.bundle.join(".pid"));
        let replaced = fs::read_dir(&container.bundle).unwrap().any(|found| {
            found.unwrap().file_name().to_string_lossy().starts_with("config.json.csi-loopback-")
        });
        if replaced {
            // The next creation restores the config, which this asserts.
            assert!(container.create().status.success(), "{}", node.logged());
            container.delete();
        }
        kernel::wait_for("the device is not in use", || !is_live(&device));
        node.assert_gone(&device, &target);
        // The next container can use the volume.
        let next = node.container(&mounts).in_pod("another");
        next.start();
        assert_eq!(next.exec(&["stat", "-c", "%g", "/s"]), "4059");
        next.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
#[ignore = "full tier"]
fn an_interrupted_runtime_leaves_no_mount() {
    on_node(|node| {
        with_scene(node, |container, afterwards| {
            // Every round must start with the same tree, to meet the same points.
            assert!(call(node, "", &container.creation()).0.status.success());
            afterwards();
            let mut all = BTreeSet::new();
            let (output, created) = call(node, "kill 0 !page.", &container.creation());
            assert!(output.status.success(), "{output:?}");
            let (output, deleted) = call(node, "kill 0 !page.", &deletion(container));
            assert!(output.status.success(), "{output:?}");
            let mut rounds = 0;
            for what in ["kill", "error"] {
                for (number, point) in created.iter().enumerate() {
                    println!("create: {what} at {point}");
                    let plan = format!("{what} {} !page.", number + 1);
                    let (output, met) = call(node, &plan, &container.creation());
                    assert!(met.contains(point), "{point}: {met:?}: {output:?}");
                    // A created container exists, even if recording it failed.
                    assert!(what == "error" || !output.status.success(), "{point}: {output:?}");
                    afterwards();
                    rounds += 1;
                }
                for (number, point) in deleted.iter().enumerate() {
                    println!("delete: {what} at {point}");
                    assert!(call(node, "", &container.creation()).0.status.success());
                    let plan = format!("{what} {} !page.", number + 1);
                    let (output, _) = call(node, &plan, &deletion(container));
                    assert!(what == "error" || !output.status.success(), "{point}: {output:?}");
                    afterwards();
                    rounds += 1;
                }
            }
            all.extend(created.into_iter().chain(deleted));
            // Points that are met only after an interrupted call.
            all.insert(format!("{OWN}claim_collected"));
            all.insert(format!("{OWN}config_recovered"));
            let known = source::points().into_iter().filter(|point| point.starts_with(OWN));
            let unmet: Vec<_> = known.filter(|point| !all.contains(point)).collect();
            assert!(unmet.is_empty(), "never met: {unmet:?}");
            println!("report: oci-runtime: {rounds} rounds");
        });
    });
}

#[test]
fn a_killed_runtime_ends_its_runc() {
    on_node(|node| {
        with_scene(node, |container, afterwards| {
            // A runtime that blocks before and after it creates the container.
            for order in ["touch W; exec sleep 1000", "runc \"$@\"; touch W; exec sleep 1000"] {
                let waits = node.path("waits");
                let script = order.replace('W', waits.to_str().unwrap());
                let text = format!(
                    "#!/bin/sh\ncase \" $* \" in *' create '*) ;; *) exec runc \"$@\" ;; esac\n{script}\n"
                );
                let runtime = node.path("slow-runc");
                fs::write(&runtime, text).unwrap();
                support::run("chmod", &["755", runtime.to_str().unwrap()]);
                node.configure(runtime.to_str().unwrap());
                let mut command = node.command(&node.program);
                command.args(container.creation());
                command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
                let mut child = command.spawn().unwrap();
                kernel::wait_for("it has come so far", || waits.exists());
                fs::remove_file(&waits).unwrap();
                child.kill().unwrap();
                child.wait().unwrap();
                node.configure("runc");
                afterwards();
            }
        });
    });
}
