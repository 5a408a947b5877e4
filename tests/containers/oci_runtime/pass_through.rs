//! Without deferred volumes, this runtime behaves exactly as runc.

use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use support::runtime::{Node, bind, on_node};
use support::{path, run};

/// Runs this runtime and runc with the same arguments and compares their output, without times and
/// addresses.
fn both(node: &Node, arguments: &[&str], input: &str) -> Output {
    let outputs = [node.program.as_path(), Path::new("runc")].map(|program| {
        let mut command = node.command(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // The program may end without reading.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    });
    let [ours, theirs] = &outputs;
    let text = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes).into_owned();
        // Times and addresses in crash messages differ.
        let same = |line: &&str| !line.contains("time=") && !line.contains("0x");
        text.lines().filter(same).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(ours.status, theirs.status, "{arguments:?}");
    assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{arguments:?}");
    assert_eq!(text(&ours.stderr), text(&theirs.stderr), "{arguments:?}");
    outputs.into_iter().next().unwrap()
}

#[test]
fn calls_without_volumes_behave_as_runc() {
    on_node(|node| {
        // Without volumes, unknown words are runc's affair.
        for unknown in [&["no-such-command"][..], &["--no-such-flag"], &["create", "--new", "x"]] {
            both(node, unknown, "");
        }
        // The node has volumes of other containers.
        node.volume("other", &[]);
        let container = node.container(&[]);
        container.start();
        let id = container.id.as_str();
        for arguments in [
            &["--version"][..],
            &["-v"],
            &["--help"],
            &["help"],
            &[],
            &["create"],
            &["create", "--help"],
            &["create", "--bundle", "/not/there", "x"],
            &["delete"],
            &["delete", "no-such-container"],
            &["delete", "--force", "no-such-container"],
            &["start", "no-such-container"],
            &["state", id],
            &["list"],
            // By default it shows the share of the CPU, which changes.
            &["ps", id, "-o", "pid,ppid,user,args"],
            &["exec", id, "sh", "-c", "cat; echo err >&2; exit 42"],
            &["exec", id, "no-such-program"],
            &[
                "exec",
                "--env",
                "A=b",
                "--cwd",
                "/bin",
                id,
                "sh",
                "-c",
                "echo $A $PWD -- \"$@\"",
                "--",
                "-x",
            ],
            &["exec", id, "sh", "-c", "kill -9 $$"],
            &["delete", id],
            &["kill", id, "NO_SUCH_SIGNAL"],
            &["features"],
            &["spec", "--bundle", "/not/there"],
        ] {
            both(node, arguments, "to its input\n");
        }
        let output = both(node, &["exec", id, "sh", "-c", "cat; exit 42"], "through\n");
        assert_eq!((output.status.code(), output.stdout), (Some(42), b"through\n".to_vec()));
        node.ok(&["kill", id, "KILL"]);
        support::kernel::wait_for("it has ended", || node.ok(&["state", id]).contains("stopped"));
        container.delete();
        assert!(!container.exists());
    });
}

#[test]
fn an_invalid_config_without_volumes_is_passed_to_runc() {
    on_node(|node| {
        let container = node.container(&[]);
        let arguments = ["create", "--bundle", path(&container.bundle), &container.id];
        both(node, &arguments, "");
        for bad in
            ["", "{", "[]", "null", "{}", r#"{"mounts": 1}"#, r#"{"mounts": [1, {"source": 2}]}"#]
        {
            std::fs::write(container.bundle.join("config.json"), bad).unwrap();
            let output = both(node, &arguments, "");
            assert!(!output.status.success(), "{bad}");
        }
    });
}

#[test]
fn signals_reach_a_container_in_the_foreground() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        for mounts in [vec![], vec![bind(target.as_path(), "/v")]] {
            let container = node.container(&mounts);
            let script = "[ ! -d /v ] || echo x >/v/file; trap 'echo heard; exit 9' TERM; \
                          echo ready; while true; do sleep 0.05; done";
            let container = container.running(&["sh", "-c", script]);
            container.write();
            let mut command = node.command(&node.program);
            command.args(["run", "--bundle", path(&container.bundle), &container.id]);
            let out = node.path("out");
            command.stdout(std::fs::File::create(&out).unwrap());
            let mut child = command.spawn().unwrap();
            let output_so_far = || std::fs::read_to_string(&out).unwrap();
            support::kernel::wait_for("it runs", || output_so_far().contains("ready"));
            run("kill", &["-TERM", &child.id().to_string()]);
            assert_eq!(child.wait().unwrap().code(), Some(9), "{}", output_so_far());
            assert_eq!(output_so_far(), "ready\nheard\n");
        }
        node.assert_gone(&device, &target);
        let written = node.with_mount(&device, |at| std::fs::read_to_string(at.join("file")));
        assert_eq!(written.unwrap(), "x\n");
    });
}
