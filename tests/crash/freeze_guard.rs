//! The freeze guard: what a killed driver had frozen runs again without another start of the driver. (That its own guard does
//! so is a law of every scenario that freezes.)

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use csi_loopback::backend::PoolKind;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Code;

use crate::harness::{Fault, PodWrite, Scene};
use crate::snapshots::Mounted;
use support::driver::*;
use support::{have_root, path};

/// What runs a process as the first one of a pid namespace, as a container does; killed, it takes that with it.
const CONTAINER: [&str; 4] = ["unshare", "--pid", "--fork", "--kill-child"];

/// A guard that listens, ended at the latest with this.
struct Guard {
    child: Child,
    log: PathBuf,
}

impl Guard {
    fn start(program: &[&str], socket: &Path) -> Self {
        let mut line = program.iter().copied().chain([binary(), "--mode", "freeze-guard"]);
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
    program: &'static [&'static str],
    scene: Scene,
}

impl Guarded {
    fn start(driver: &[&str], guard: &'static [&'static str]) -> Self {
        let flags = ["--freeze-guard", "SCENE/guard.sock"];
        let mut guarded = Self {
            guard: None,
            program: guard,
            scene: Scene::start_by(driver, PoolKind::Image, &flags),
        };
        guarded.start_guard();
        guarded
    }

    fn start_guard(&mut self) {
        let socket = self.scene.place().join("guard.sock");
        self.guard = Some(Guard::start(self.program, &socket));
    }
}

/// Begins a cut that stays where the filesystem is frozen, does `then`, and waits for the call to end in whatever way.
fn while_frozen(scene: &mut Scene, volume: &Mounted, then: impl FnOnce(&mut Scene)) {
    scene.plan(Fault::Hang, 1, "freeze.frozen");
    let channel = scene.driver.channel();
    let request = cut("a", &volume.id);
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
fn a_guard_in_another_process_thaws_what_a_killed_driver_had_frozen() {
    if !have_root() {
        return;
    }
    let mut guarded = Guarded::start(&[], &[]);
    for _ in 0..2 {
        let volume = Mounted::new(&guarded.scene, "v");
        guarded.scene.plan(Fault::Kill, 1, "freeze.frozen");
        assert!(guarded.scene.driver.call(cut("a", &volume.id)).is_err());
        guarded.scene.has_died();
        PodWrite::begin(&volume.target).has_to_end();
        // Also where the next start does not come to thaw anything: it is not needed.
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

/// Two containers of a pod: each has a first process, whose end is that of all in it.
#[test]
fn a_guard_in_a_container_of_its_own_thaws_when_the_drivers_container_is_killed() {
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
    let mut guarded = Guarded::start(&CONTAINER, &GUARD);
    // Mounted after the guard had its namespace: it never sees the mount.
    let volume = Mounted::new(&guarded.scene, "v");
    while_frozen(&mut guarded.scene, &volume, |scene| {
        let write = PodWrite::begin(&volume.target);
        scene.driver.signal(Signal::SIGKILL);
        scene.driver.wait();
        write.has_to_end();
    });
    let log = guarded.guard.as_ref().unwrap().log();
    assert!(log.contains("thawed a filesystem"), "{log}");
    guarded.scene.met();
    guarded.scene.driver.start_again();
    guarded.scene.driver.snapshot("a", &volume.id);
    guarded.scene.driver.take_down(&volume.id);
    // What runs it minds no other signal.
    guarded.scene.driver.kill();
}

#[test]
fn without_the_guard_that_a_flag_names_nothing_is_frozen_until_it_is_back() {
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
        guarded.scene.driver.refused(cut(&name, &volume.id), Code::Unavailable, "guard.sock");
        let met = guarded.scene.met();
        assert!(met.iter().all(|point| point == "freeze.synced"), "{met:?}");
        volume.change(round);
        // What needs no freeze needs no guard.
        let raw = guarded.scene.driver.volume(&format!("raw{round}"), 1 << 20, block());
        guarded.scene.driver.snapshot(&format!("raw{round}"), &raw);
        guarded.start_guard();
        guarded.scene.driver.snapshot(&name, &volume.id);
    }
    guarded.scene.driver.take_down(&volume.id);
    guarded.scene.end();
}

#[test]
fn a_guard_is_ended_by_a_signal_once_no_driver_is_connected() {
    if !have_root() {
        return;
    }
    let mut guarded = Guarded::start(&[], &[]);
    let volume = Mounted::new(&guarded.scene, "v");
    guarded.scene.driver.snapshot("a", &volume.id);
    let mut guard = guarded.guard.take().unwrap();
    kill(guard.pid(), Signal::SIGTERM).unwrap();
    wait_for("the signal is noticed", || guard.log().contains("SIGTERM"));
    // The pod is being ended: the driver still finishes what it has begun.
    guarded.scene.driver.snapshot("b", &volume.id);
    assert!(guard.child.try_wait().unwrap().is_none());
    guarded.scene.driver.take_down(&volume.id);
    assert!(guarded.scene.driver.stop().success());
    assert!(guard.child.wait().unwrap().success());
    assert!(!guarded.scene.place().join("guard.sock").exists());
}

/// Processes whose parent is this one.
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
fn a_drivers_own_guard_is_replaced_when_it_has_died_and_survives_what_ends_a_group() {
    if !have_root() {
        return;
    }
    let mut scene = Scene::start(PoolKind::Image, &[]);
    let volume = Mounted::new(&scene, "v");
    assert_eq!(children(scene.driver.pid()), [], "no guard before there is something to guard");
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
    // It holds nothing of a volume: a mount that it held could not go.
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
fn a_guard_that_does_not_answer_is_refused_and_leaves_no_mount_busy() {
    if !have_root() {
        return;
    }
    let scene = Scene::start(PoolKind::Image, &[]);
    let volume = Mounted::new(&scene, "v");
    scene.driver.snapshot("a", &volume.id);
    let [guard] = children(scene.driver.pid())[..] else { panic!("not one guard") };
    kill(guard, Signal::SIGSTOP).unwrap();
    // It is killed, and a new one takes its place.
    scene.driver.snapshot("b", &volume.id);
    scene.driver.take_down(&volume.id);
    drop(scene);

    let guarded = Guarded::start(&[], &[]);
    let volume = Mounted::new(&guarded.scene, "v");
    guarded.scene.driver.snapshot("a", &volume.id);
    let guard = guarded.guard.as_ref().unwrap().pid();
    kill(guard, Signal::SIGSTOP).unwrap();
    guarded.scene.driver.refused(cut("b", &volume.id), Code::Unavailable, "guard.sock");
    volume.change(1);
    kill(guard, Signal::SIGCONT).unwrap();
    guarded.scene.driver.snapshot("b", &volume.id);
    guarded.scene.driver.take_down(&volume.id);
}
