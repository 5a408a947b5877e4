//! Runs one scenario against one driver: determines the fail points of its call, kills the driver
//! or injects an error at each of them, and checks the result.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use tonic::{Code, Status};

use support::driver::*;
use support::path;
use support::points::Points;

/// All fail points except those within a commit of the catalog, whose number depends on redb.
pub const STEPS: &str = "!page.";
pub const PAGES: &str = "page.";
/// Matches no name.
pub const ALL: &str = "!-";

/// The action at a fail point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Kill,
    Error,
    /// The driver blocks there until the plan changes.
    Hang,
}

/// A call of the driver, with its preconditions and postconditions.
pub trait Scenario {
    /// Creates the objects that the call needs, with names of this round. The first round also
    /// creates shared objects.
    fn prepare(&mut self, on: &mut Scene, round: usize);

    /// The call. It is repeated unchanged after the driver died.
    fn call(&mut self, on: &mut Scene) -> Result<(), Status>;

    /// Checks that the call took effect exactly once.
    fn check(&mut self, on: &Scene);

    /// If the call is a start of the driver: the last fail point before the tested work.
    fn begins_after(&self) -> Option<&'static str> {
        None
    }

    /// The volumes that are published all the time, and whether each is mounted.
    fn published(&self) -> Vec<(&str, bool)> {
        Vec::new()
    }

    /// Directories and devices of pods, which must work without the driver; frozen ones are thawed
    /// by the guard.
    fn in_use(&self, on: &Scene) -> Vec<PathBuf> {
        self.published().into_iter().map(|(id, _)| on.driver.target(id)).collect()
    }

    /// The volumes with a loop device after the call, and the mount paths.
    fn attached(&self, on: &Scene) -> Attached {
        let all = self.published().into_iter();
        all.fold(Attached::default(), |all, (id, is_mounted)| all.published(on, id, is_mounted))
    }

    /// Unpublishes and unstages everything.
    fn finish(&mut self, on: &Scene) {
        self.published().into_iter().for_each(|(id, _)| on.driver.take_down(id));
    }
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Attached {
    pub devices: BTreeSet<String>,
    pub mounts: BTreeSet<PathBuf>,
}

impl Attached {
    /// Adds a volume in the state after [`Driver::stage`].
    pub fn staged(mut self, on: &Scene, id: &str, is_mounted: bool) -> Self {
        self.devices.insert(id.to_owned());
        self.mounts.extend(is_mounted.then(|| on.driver.staging(id)));
        self
    }

    /// Adds a volume in the state after [`Driver::publish`].
    pub fn published(self, on: &Scene, id: &str, is_mounted: bool) -> Self {
        let mut all = self.staged(on, id, is_mounted);
        all.mounts.insert(on.driver.target(id));
        all
    }
}

/// A driver with fail points, and unique names on this machine.
pub struct Scene {
    pub driver: Driver,
    tag: String,
    points: Points,
}

impl Scene {
    /// SCENE in a flag is replaced by [`Scene::place`].
    pub fn start(kind: PoolKind, flags: &[&str]) -> Self {
        Self::start_by(&[], kind, flags)
    }

    /// Starts the driver by this program.
    pub fn start_by(program: &[&str], kind: PoolKind, flags: &[&str]) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let points = Points::new();
        let watched = path(points.path()).to_owned();
        let flags: Vec<String> = flags.iter().map(|flag| flag.replace("SCENE", &watched)).collect();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let flags = [flags.as_slice(), &["--fail-points", &watched]].concat();
        let driver = Driver::run_by(program, kind, &flags);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self { driver, tag: format!("crash{}x{number}", std::process::id()), points }
    }

    /// A private directory next to the driver's.
    pub fn place(&self) -> &Path {
        self.points.path()
    }

    /// The name of an object of this scene.
    pub fn name(&self, what: &str, round: usize) -> String {
        format!("{}-{what}-{round}", self.tag)
    }

    /// Counts the fail points with these names from now on. Number 0 is no point and only records
    /// them.
    pub fn plan(&mut self, fault: Fault, at: usize, names: &str) {
        if self.driver.is_running() {
            // The socket exists before the last fail point of a start; a response comes after it.
            self.driver.ok(csi::ProbeRequest {});
        }
        let what = match fault {
            Fault::Kill => "kill",
            Fault::Error => "error",
            Fault::Hang => "hang",
        };
        self.points.plan(what, at, names);
    }

    /// The fail points met since the plan was set.
    pub fn met_so_far(&self) -> Vec<String> {
        self.points.met()
    }

    /// The fail points met since the plan was set. Clears the plan.
    pub fn met(&self) -> Vec<String> {
        if self.driver.is_running() {
            // A start meets its last fail point before this is answered, or ends there.
            let _ = self.driver.call(csi::ProbeRequest {});
        }
        self.points.clear();
        self.points.met()
    }

    /// Kills the driver if it runs, runs `meanwhile`, and starts it. `UNAVAILABLE` if the start
    /// ends at a fail point.
    pub fn restart(&mut self, meanwhile: impl FnOnce()) -> Result<(), Status> {
        if self.driver.is_running() {
            self.driver.kill();
        }
        meanwhile();
        self.driver.try_start().map_err(|error| {
            assert!(error.contains("SIGKILL"), "{error}\n{}", self.driver.log());
            Status::unavailable(error)
        })
    }

    /// Waits until the driver has killed itself.
    pub fn wait_for_death(&mut self) {
        if self.driver.is_running() {
            let status = self.driver.wait();
            assert_eq!(status.signal(), Some(libc::SIGKILL), "the driver ended: {status}");
        }
        self.driver.wait_until_closed();
    }

    /// Stops the driver, checks the pool, and starts the driver again.
    pub fn check_pool(&mut self) {
        assert!(self.driver.stop().success());
        self.check_stopped_pool();
        self.driver.start_again();
    }

    fn check_stopped_pool(&self) {
        let data_dir = self.driver.data_dir();
        let checked =
            Command::new(binary()).args(["pool", "check", "--data-dir", path(&data_dir)]).output();
        let checked = checked.unwrap();
        let said = String::from_utf8_lossy(&checked.stdout);
        let why = String::from_utf8_lossy(&checked.stderr);
        assert!(checked.status.success(), "pool check:\n{said}{why}");
        let left: Vec<PathBuf> = fs::read_dir(&data_dir)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|end| end == "part"))
            .collect();
        assert!(left.is_empty(), "remaining: {left:?}");
    }

    /// The loop devices and mounts of this scene, from the kernel.
    fn attached_now(&self) -> Attached {
        let mut devices = backing_names();
        devices.retain(|name| name.contains(&format!("-{}-", self.tag)));
        let distinct: BTreeSet<String> = devices.iter().cloned().collect();
        assert_eq!(devices.len(), distinct.len(), "two devices of one volume: {devices:?}");
        let below = |mount: &Mount| {
            mount.target.starts_with(self.driver.scratch())
                && mount.target != self.driver.scratch().join("xfs")
        };
        let at: Vec<PathBuf> = mounts().into_iter().filter(below).map(|one| one.target).collect();
        let mounts: BTreeSet<PathBuf> = at.iter().cloned().collect();
        assert_eq!(at.len(), mounts.len(), "mounted twice: {at:?}");
        Attached { devices: distinct, mounts }
    }

    /// Checks that exactly these are attached and mounted.
    fn check_attached(&self, expected: &Attached) {
        let until = Instant::now() + PATIENCE;
        let mut found = self.attached_now();
        // The kernel detaches a device some time after its last user, which may have much to write.
        while found != *expected && Instant::now() < until {
            thread::sleep(Duration::from_millis(10));
            found = self.attached_now();
        }
        assert_eq!(found, *expected, "devices and mounts");
    }

    /// Starts with an empty data directory. Returns the fail points of the start up to the kill at
    /// point N (0: none).
    pub fn make_pool(&mut self, at: usize, names: &str) -> Vec<String> {
        if self.driver.is_running() {
            self.driver.kill();
        }
        let _ = Command::new("chattr").args(["-R", "-i"]).arg(self.driver.data_dir()).output();
        fs::remove_dir_all(self.driver.data_dir()).unwrap();
        self.plan(Fault::Kill, at, names);
        let started = self.restart(|| {});
        let met = self.met();
        if at > 0 {
            self.wait_for_death();
        } else {
            started.unwrap();
        }
        met
    }

    /// Ends the driver and checks that nothing remains.
    pub fn end(&mut self) {
        self.check_attached(&Attached::default());
        assert!(self.driver.stop().success());
        self.check_stopped_pool();
        let socket = self.driver.socket();
        let left: Vec<PathBuf> = fs::read_dir(self.driver.scratch())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                path != &socket && (name.starts_with('.') || name.starts_with("target-"))
            })
            .collect();
        assert!(left.is_empty(), "remaining: {left:?}");
    }
}

/// A write by a pod, which blocks on a frozen filesystem.
pub struct PodWrite {
    place: PathBuf,
    done: mpsc::Receiver<()>,
}

impl PodWrite {
    pub fn begin(place: &Path) -> Self {
        let (send, done) = mpsc::channel();
        let to = place.to_owned();
        thread::spawn(move || {
            let file = if to.is_dir() { to.join("pod") } else { to };
            let mut file =
                File::options().write(true).create(true).truncate(false).open(file).unwrap();
            // Every scenario writes the first block of a device before a snapshot.
            file.write_all(b"pod").and_then(|()| file.sync_all()).unwrap();
            let _ = send.send(());
        });
        Self { place: place.to_owned(), done }
    }

    #[track_caller]
    pub fn assert_ends(&self) {
        match self.done.recv_timeout(Duration::from_secs(20)) {
            Ok(()) => {}
            Err(RecvTimeoutError::Timeout) => {
                let _ = Command::new("fsfreeze").arg("-u").arg(&self.place).status();
                panic!("{} is still frozen", self.place.display());
            }
            Err(RecvTimeoutError::Disconnected) => {
                panic!("a pod could not write to {}", self.place.display())
            }
        }
    }
}

/// A running scenario.
pub struct Play<'a> {
    pub scene: Scene,
    pub scenario: &'a mut dyn Scenario,
    round: usize,
}

impl<'a> Play<'a> {
    pub fn new(scene: Scene, scenario: &'a mut dyn Scenario) -> Self {
        Self { scene, scenario, round: 0 }
    }

    fn prepare(&mut self) {
        self.round += 1;
        self.scenario.prepare(&mut self.scene, self.round);
    }

    fn check_recovered(&mut self) {
        self.scenario.check(&self.scene);
        let expected = self.scenario.attached(&self.scene);
        self.scene.check_attached(&expected);
    }

    /// Runs the call without failures. Returns its fail points.
    pub fn learn(&mut self, names: &str) -> Vec<String> {
        self.prepare();
        self.scene.plan(Fault::Kill, 0, names);
        self.scenario.call(&mut self.scene).unwrap();
        let met = self.scene.met();
        self.check_recovered();
        met
    }

    /// Kills the driver at the N-th fail point of the call, and does not restart it. Checks that
    /// pods continue. Returns false if the call has fewer points; it is checked then. `learned`: all
    /// of them, if the call meets the same ones each time.
    pub fn die_at(&mut self, at: usize, names: &str, learned: Option<&[String]>) -> bool {
        self.prepare();
        self.scene.plan(Fault::Kill, at, names);
        let answer = self.scenario.call(&mut self.scene);
        let met = self.scene.met();
        if met.len() < at {
            // Only if it met a varying one less often.
            if let Some(learned) = learned {
                assert_same_way(&learned[..at], &met);
            }
            answer.unwrap();
            // The next round starts from what this one made.
            self.check_recovered();
            return false;
        }
        // A start that dies there was already serving.
        let served = met.last().is_some_and(|point| point == "socket.named");
        assert!(answer.is_err() || served, "a driver that died at {met:?} has responded");
        self.scene.wait_for_death();
        if let Some(learned) = learned {
            assert_same_way(&met, learned);
        }
        self.pods_go_on();
        true
    }

    fn pods_go_on(&self) {
        let places = self.scenario.in_use(&self.scene);
        let writes: Vec<PodWrite> = places.iter().map(|place| PodWrite::begin(place)).collect();
        writes.iter().for_each(PodWrite::assert_ends);
    }

    /// Starts a killed driver and checks that the repeated call succeeds. With a `check`, the start
    /// alone must recover everything.
    pub fn converge(&mut self, check: bool) {
        self.scene.driver.start_again();
        // If the call is a start, its work continues after it serves.
        if check && self.scenario.begins_after().is_none() {
            self.scene.driver.kill();
            self.scene.check_stopped_pool();
            self.scene.driver.start_again();
        }
        let repeated = self.scenario.call(&mut self.scene);
        repeated.unwrap_or_else(|status| panic!("repeated after the death: {}", short(&status)));
        self.check_recovered();
    }

    /// Injects an error at the N-th fail point. The call returns it or succeeds, and succeeds when
    /// repeated. Returns the code.
    pub fn fail_at(&mut self, at: usize, learned: Option<&[String]>) {
        self.prepare();
        self.scene.plan(Fault::Error, at, STEPS);
        let answer = self.scenario.call(&mut self.scene);
        let met = self.scene.met();
        if let Some(learned) = learned {
            assert_same_way(&met[..at.min(met.len())], learned);
        }
        self.pods_go_on();
        if let Err(status) = &answer {
            // A filesystem that could not grow is no reason to keep its pod from starting.
            let not_grown = status.code() == Code::FailedPrecondition
                && status.message().contains("could not grow");
            assert!(
                (status.code() == Code::Internal || not_grown)
                    && status.message().contains("os error 5"),
                "{status:?}"
            );
        }
        let repeated = self.scenario.call(&mut self.scene);
        let first = answer.map_err(|status| short(&status));
        repeated.unwrap_or_else(|status| panic!("{}, after {first:?}", short(&status)));
        self.check_recovered();
    }

    /// Starts a driver that died, returns the fail points of the start, and kills it again.
    pub fn watch_start(&mut self, names: &str) -> Vec<String> {
        self.scene.plan(Fault::Kill, 0, names);
        self.scene.driver.start_again();
        let met = self.scene.met();
        self.scene.driver.kill();
        met
    }

    /// Starts the driver repeatedly, and kills it each time after its first new step, or one step
    /// later if a start makes no progress. `at` is the first step. Returns the number of starts.
    pub fn die_while_starting(&mut self, mut at: usize) -> usize {
        let (mut deaths, mut before) = (0, Vec::new());
        loop {
            self.scene.plan(Fault::Kill, at, STEPS);
            let started = self.scene.restart(|| {});
            let met = self.scene.met();
            if met.len() < at {
                started.unwrap();
                self.scene.driver.kill();
                return deaths;
            }
            self.scene.wait_for_death();
            deaths += 1;
            if met == before {
                at += 1;
            }
            before = met;
            assert!(deaths < 500, "the start does not complete after {before:?}");
        }
    }

    /// Ends the scenario and checks that nothing remains.
    pub fn end(mut self) {
        self.scenario.finish(&self.scene);
        self.scene.end();
    }
}

fn short(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}

/// Checks that a call meets the same fail points each time: `met` is the beginning of `expected`.
/// The kernel decides how often some are met: a device whose last user has closed it needs no
/// detach, and one that a new mount namespace still holds needs several; the parts of a clone depend
/// on what was written back.
#[track_caller]
fn assert_same_way(met: &[String], expected: &[String]) {
    const VARYING: [&str; 2] = ["loop.let_go", "copy.part_shared"];
    let fixed = |points: &[String]| {
        let points = points.iter().filter(|point| !VARYING.contains(&point.as_str()));
        points.cloned().collect::<Vec<_>>()
    };
    let (met, expected) = (fixed(met), fixed(expected));
    assert!(
        expected.starts_with(&met),
        "the call met other points than before: {met:?}, expected {expected:?}"
    );
}
