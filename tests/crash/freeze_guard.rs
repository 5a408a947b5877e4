//! The freeze guard: after a kill of the driver, its frozen filesystems are thawed without another
//! start of the driver. (Every scenario that freezes checks this for the driver's own guard.)

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use csi_loopback::backend::PoolKind;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Code;

use crate::harness::{Fault, PodWrite, Scene};
use crate::snapshots::Mounted;
use support::container::UNMOUNT_OTHERS;
use support::driver::*;
use support::{have_root, owned, path};

/// Runs a process as the first one of a pid namespace, as a container does. Killing it kills the
/// process.
const CONTAINER: [&str; 4] = ["unshare", "--pid", "--fork", "--kill-child"];

/// A listening guard. Ended when this is dropped.
struct Guard {
    child: Child,
    log: PathBuf,
}

impl Guard {
    fn start(program: &[String], socket: &Path) -> Self {
        let mut line =
            program.iter().map(String::as_str).chain([binary(), "--mode", "freeze-guard"]);
        let log = socket.with_extension("log");
        let child = Command::new(line.next().unwrap())
            .args(line)
            .arg("--endpoint")
            .arg(socket)
            .stdin(Stdio::null())
            .stderr(fs::File::options().create(true).append(true).open(&log).unwrap())
            .spawn()
            .unwrap();
        wait_for("the guard listens", || std::os::unix::net::UnixStream::connect(socket).is_ok());
        Self { child, log }
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A scene whose driver uses a guard in another process.
struct Guarded {
    guard: Option<Guard>,
    program: Vec<String>,
    scene: Scene,
}

impl Guarded {
    fn start(driver: &[&str], guard: &[&str]) -> Self {
        let flags = ["--freeze-guard", "SCENE/guard.sock"];
        let mut guarded = Self {
            guard: None,
            program: owned(guard),
            scene: Scene::start_by(driver, PoolKind::Image, &flags),
        };
        guarded.start_guard();
        guarded
    }

    fn start_guard(&mut self) {
        let socket = self.scene.place().join("guard.sock");
        self.guard = Some(Guard::start(&self.program, &socket));
    }
}

/// Starts a snapshot that blocks while the filesystem is frozen, runs `then`, and waits for the end
/// of the call.
fn while_frozen(scene: &mut Scene, volume: &Mounted, then: impl FnOnce(&mut Scene)) {
    scene.plan(Fault::Hang, 1, "freeze.frozen");
    let channel = scene.driver.channel();
    let request = create_snapshot("a", &volume.id);
    std::thread::scope(|scope| {
        let call = scope.spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            drop(runtime.unwrap().block_on(request.send(channel)));
        });
        wait_for("the filesystem is frozen", || !scene.met_so_far().is_empty());
        then(scene);
        call.join().unwrap();
    });
}

#[test]
fn a_separate_guard_thaws_after_a_kill_of_the_driver() {
    if !have_root() {
        return;
    }
    let mut guarded = Guarded::start(&[], &[]);
    for _ in 0..2 {
        let volume = Mounted::new(&guarded.scene, "v");
        guarded.scene.plan(Fault::Kill, 1, "freeze.frozen");
        assert!(guarded.scene.driver.call(create_snapshot("a", &volume.id)).is_err());
        guarded.scene.wait_for_death();
        PodWrite::begin(&volume.target).assert_ends();
        // The thaw does not depend on the next start.
        guarded.scene.met();
        guarded.scene.driver.start_again();
        guarded.scene.driver.snapshot("a", &volume.id);
        guarded.scene.driver.take_down(&volume.id);
        for snapshot in all_snapshots(&guarded.scene.driver) {
            guarded.scene.driver.ok(delete_snapshot(&snapshot.snapshot_id));
        }
        guarded.scene.driver.ok(delete_volume(&volume.id));
    }
    let log = guarded.guard.as_ref().unwrap().log();
    assert_eq!(log.matches("thawed a filesystem").count(), 2, "{log}");
    guarded.scene.end();
}

/// Two containers of a pod. Each ends with its first process.
#[test]
fn a_guard_thaws_after_a_kill_of_the_drivers_container() {
    if !have_root() {
        return;
    }
    const GUARD: [&str; 8] = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount",
        "--mount-proc",
        "--propagation",
        "private",
    ];
    let script = format!("{UNMOUNT_OTHERS}unmount_others; exec \"$@\"");
    let guard = [&GUARD[..], &["sh", "-c", &script, "sh"]].concat();
    let mut guarded = Guarded::start(&CONTAINER, &guard);
    // Mounted after the guard's namespace was created, so the guard does not see the mount.
    let volume = Mounted::new(&guarded.scene, "v");
    while_frozen(&mut guarded.scene, &volume, |scene| {
        let write = PodWrite::begin(&volume.target);
        scene.driver.signal(Signal::SIGKILL);
        scene.driver.wait();
        write.assert_ends();
    });
    // It logs after the thaw.
    wait_for("the thaw is logged", || {
        guarded.guard.as_ref().unwrap().log().contains("thawed a filesystem")
    });
    guarded.scene.met();
    guarded.scene.driver.start_again();
    guarded.scene.driver.snapshot("a", &volume.id);
    guarded.scene.driver.take_down(&volume.id);
    // Its parent ignores other signals.
    guarded.scene.driver.kill();
}

#[test]
fn without_the_configured_guard_nothing_is_frozen() {
    if !have_root() {
        return;
    }
    let mut guarded = Guarded::start(&[], &[]);
    let volume = Mounted::new(&guarded.scene, "v");
    guarded.scene.driver.snapshot("a", &volume.id);
    for round in 0..2 {
        guarded.guard = None;
        let name = format!("b{round}");
        guarded.scene.plan(Fault::Error, 0, "freeze.");
        guarded.scene.driver.refused(
            create_snapshot(&name, &volume.id),
            Code::Unavailable,
            "guard.sock",
        );
        let met = guarded.scene.met();
        assert!(met.iter().all(|point| point == "freeze.synced"), "{met:?}");
        volume.change(round);
        // An operation without a freeze needs no guard.
        let raw = guarded.scene.driver.volume(&format!("raw{round}"), 1 << 20, block());
        guarded.scene.driver.snapshot(&format!("raw{round}"), &raw);
        guarded.start_guard();
        guarded.scene.driver.snapshot(&name, &volume.id);
    }
    guarded.scene.driver.take_down(&volume.id);
    guarded.scene.end();
}

#[test]
fn a_guard_ends_by_a_signal_after_all_drivers_disconnect() {
    if !have_root() {
        return;
    }
    let mut guarded = Guarded::start(&[], &[]);
    let volume = Mounted::new(&guarded.scene, "v");
    guarded.scene.driver.snapshot("a", &volume.id);
    let mut guard = guarded.guard.take().unwrap();
    kill(guard.pid(), Signal::SIGTERM).unwrap();
    wait_for("the signal is noticed", || guard.log().contains("SIGTERM"));
    // The pod is being terminated: the driver still completes its calls.
    guarded.scene.driver.snapshot("b", &volume.id);
    assert!(guard.child.try_wait().unwrap().is_none());
    guarded.scene.driver.take_down(&volume.id);
    assert!(guarded.scene.driver.stop().success());
    assert!(guard.child.wait().unwrap().success());
    assert!(!guarded.scene.place().join("guard.sock").exists());
}

/// The children of a process.
fn children(of: Pid) -> Vec<Pid> {
    let stat = |pid: &str| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        (fields[0] != "Z" && fields[1] == of.to_string()).then(|| pid.parse().unwrap())
    };
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let found = processes.filter_map(|entry| stat(entry.file_name().to_str()?));
    found.map(Pid::from_raw).collect()
}

#[test]
fn a_child_guard_is_replaced_and_survives_group_signals() {
    if !have_root() {
        return;
    }
    let mut scene = Scene::start(PoolKind::Image, &[]);
    let volume = Mounted::new(&scene, "v");
    assert_eq!(children(scene.driver.pid()), [], "no guard without a freeze");
    scene.driver.snapshot("a", &volume.id);
    let [first] = children(scene.driver.pid())[..] else { panic!("not one guard") };
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        kill(first, signal).unwrap();
    }
    scene.driver.snapshot("b", &volume.id);
    assert_eq!(children(scene.driver.pid()), [first]);
    kill(first, Signal::SIGKILL).unwrap();
    scene.driver.snapshot("c", &volume.id);
    let [second] = children(scene.driver.pid())[..] else { panic!("not one guard") };
    assert_ne!(first, second);
    // It holds no descriptor of a volume: otherwise the unmount would fail.
    for entry in fs::read_dir(format!("/proc/{second}/fd")).unwrap().flatten() {
        let Ok(file) = fs::read_link(entry.path()) else { continue };
        assert!(!path(&file).starts_with(path(&scene.driver.staging(&volume.id))), "{file:?}");
    }
    scene.driver.take_down(&volume.id);
    assert!(scene.driver.stop().success());
    wait_for("the guard ends with its driver", || kill(second, None).is_err());
    scene.driver.start_again();
    scene.end();
}

#[test]
#[ignore = "full tier"]
fn a_hanging_guard_is_an_error_and_keeps_no_mount_busy() {
    if !have_root() {
        return;
    }
    let scene = Scene::start(PoolKind::Image, &[]);
    let volume = Mounted::new(&scene, "v");
    scene.driver.snapshot("a", &volume.id);
    let [guard] = children(scene.driver.pid())[..] else { panic!("not one guard") };
    kill(guard, Signal::SIGSTOP).unwrap();
    // It is killed and replaced.
    scene.driver.snapshot("b", &volume.id);
    scene.driver.take_down(&volume.id);
    drop(scene);

    let guarded = Guarded::start(&[], &[]);
    let volume = Mounted::new(&guarded.scene, "v");
    guarded.scene.driver.snapshot("a", &volume.id);
    let guard = guarded.guard.as_ref().unwrap().pid();
    kill(guard, Signal::SIGSTOP).unwrap();
    guarded.scene.driver.refused(create_snapshot("b", &volume.id), Code::Unavailable, "guard.sock");
    volume.change(1);
    kill(guard, Signal::SIGCONT).unwrap();
    guarded.scene.driver.snapshot("b", &volume.id);
    guarded.scene.driver.take_down(&volume.id);
}
