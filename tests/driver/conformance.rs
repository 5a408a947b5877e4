//! The command `conformance` finds no violation in this driver, and each violation that a fault
//! rule of the driver makes. The situations are prepared once; the driver restarts with each fault.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use csi_loopback::backend::PoolKind;
use csi_loopback::conformance;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use support::cluster::dialect;
use support::cluster::foreign::{Foreign, Freedom};
use support::driver::*;
use support::mutants::{assert_fails_only, is_due};
use support::{ALL_KINDS, have_root, path};
use tempfile::TempDir;

/// A faulty driver: the rule that must fail, the fault, and the other rules that then fail.
type Mutant = (&'static str, &'static str, &'static [&'static str]);

const ALLOCATED: &str = "method=GetMetadataAllocated";
const DELTA: &str = "method=GetMetadataDelta";

/// Rules that read the same snapshots.
const SPARSE: &[&str] = &["offset-complete", "resume"];
const MANY: &[&str] = &["offset-complete", "resume", "small-messages", "concurrent"];

const MUTANTS: &[Mutant] = &[
    ("both-calls", "unimplemented,DELTA", &[]),
    ("completes", "io-error,ALLOCATED,match=-chain-9", &[]),
    ("tuple-size", "empty-tuple", &[]),
    ("ascending", "repeated-tuple", &[]),
    ("type-specified", "unknown-type", &[]),
    ("type-constant", "changed-type", &[]),
    ("fixed-size", "uneven-blocks", &[]),
    ("capacity-specified", "no-capacity", &[]),
    ("capacity-constant", "changed-capacity", &[]),
    ("max-results", "crowded", &[]),
    ("allocated-sparse", "lost-tuple,ALLOCATED,match=-sparse", SPARSE),
    ("allocated-changed", "lost-tuple,ALLOCATED,match=-changed", &["while-used"]),
    ("allocated-many", "lost-tuple,ALLOCATED,match=-many", MANY),
    ("allocated-full", "lost-tuple,ALLOCATED,match=-full", &[]),
    ("allocated-chain", "lost-tuple,ALLOCATED,match=-chain-10", &[]),
    ("allocated-grown", "lost-tuple,ALLOCATED,match=-grown-2", &[]),
    ("allocated-restored", "lost-tuple,ALLOCATED,match=-restored-1", &[]),
    ("allocated-cloned", "lost-tuple,ALLOCATED,match=-cloned-1", &[]),
    ("allocated-orphan", "lost-tuple,ALLOCATED,match=-orphan-1", &[]),
    ("delta-sparse", "lost-tuple,at=1048576,DELTA,match=-sparse", SPARSE),
    ("delta-changed", "lost-tuple,at=2097152,DELTA,match=-changed", &[]),
    (
        "delta-many",
        "lost-tuple,at=8388608,DELTA,match=-many",
        &["delta-full", "offset-complete", "resume", "small-messages", "concurrent"],
    ),
    ("delta-full", "lost-tuple,DELTA,match=-full", &[]),
    ("delta-chain", "lost-tuple,DELTA,match=-chain-8", &[]),
    ("delta-grown", "lost-tuple,DELTA,match=-grown-2", &[]),
    ("delta-restored", "lost-tuple,DELTA,match=-restored-2", &[]),
    ("delta-cloned", "lost-tuple,DELTA,match=-cloned-2", &[]),
    ("delta-orphan", "lost-tuple,DELTA,match=-orphan-2", &[]),
    ("delta-other-base", "lost-tuple,DELTA,match=-chain-5", &[]),
    ("concurrent", "loss-if-busy,match=-many", &[]),
    ("while-used", "loss-if-repeated,ALLOCATED,match=-changed", &[]),
    ("first-tuple", "early-tuple", &[]),
    ("offset-complete", "late-start", &[]),
    ("resume", "loss-if-resumed", &["offset-complete"]),
    ("small-messages", "short-if-small", &[]),
    ("deadline", "ok-at-deadline", &[]),
    ("empty-message", "no-message", &[]),
    ("within-capacity", "past-end", &[]),
    ("snapshot-capacity", "doubled-capacity", &[]),
    ("written-zeros", "lost-tuple,at=7340032,ALLOCATED,match=-changed", &[]),
    ("deleted-base", "tracking-lost,match=-chain-5", &[]),
    ("orphan", "io-error,ALLOCATED,match=-orphan-1", &[]),
    ("offset-negative", "negative-offset-code", &[]),
    ("offset-beyond", "offset-beyond-ok", &[]),
    ("id-missing", "missing-id-code", &[]),
    ("snapshot-deleted", "not-found-code", &[]),
    ("snapshot-unknown", "not-found-ok", &["snapshot-deleted"]),
    ("status-message", "silent", &[]),
    ("status-details", "details", &[]),
    ("max-results-negative", "endless", &[]),
];

/// Begins the rules of sidecars, whose mutants are in tests/api_server/conformance.
const SIDECAR: &str = "sidecar-";

/// Rules before and after that of a mutant.
const NEIGHBOURS: usize = 3;

/// Those of the default tier.
const CORE: [&str; 4] = ["ascending", "allocated-restored", "offset-complete", "deadline"];

/// The flag of a fault.
fn fault(text: &str) -> String {
    let text = text.replace("ALLOCATED", ALLOCATED).replace("DELTA", DELTA);
    let is_whole = ["io-error", "tracking-lost"].iter().any(|kind| text.starts_with(kind));
    if is_whole { text } else { format!("wrong-metadata,how={text}") }
}

/// Judges mutants by the rules for which `is_judged`, given the mutant and the id of a rule.
fn judge_mutants(is_selected: impl Fn(&str) -> bool, is_judged: impl Fn(&Mutant, &str) -> bool) {
    let Some(mut driver) = driver_with(PoolKind::Image, &[]) else { return };
    let (mounts, stagings) = (driver.scratch().join("mounts"), driver.scratch().join("stagings"));
    let endpoint = driver.endpoint();
    let flags = [
        ["--endpoint", &endpoint],
        ["--mountdir", path(&mounts)],
        ["--stagingdir", path(&stagings)],
        ["--seed", "7"],
        ["--call-timeout", "10s"],
        // Of all mutants together.
        ["--timeout", "1h"],
    ]
    .concat();
    let remaining = conformance::repeatedly(&flags, |judge| {
        let found = judge(&|_| true);
        let of_driver = found.iter().filter(|(rule, _)| !rule.starts_with(SIDECAR));
        let not_passed: Vec<_> = of_driver.filter(|(_, result)| result.is_err()).collect();
        assert!(not_passed.is_empty(), "this driver: {not_passed:#?}");
        for mutant in MUTANTS.iter().filter(|(rule, ..)| is_selected(rule)) {
            let (rule, text, others) = mutant;
            let start = Instant::now();
            driver.restart_with(&["--enable-faults", "--fault", &fault(text)]);
            let found = judge(&|id| is_judged(mutant, id));
            println!("{rule}: {:.1} s", start.elapsed().as_secs_f64());
            assert_fails_only(&found, rule, others);
        }
        driver.restart_with(&[]);
    });
    assert!(remaining.unwrap().is_empty());
    assert!(driver.cli_json(&["volume", "list"]).as_array().unwrap().is_empty());
    assert!(driver.cli_json(&["snapshot", "list"]).as_array().unwrap().is_empty());
}

#[test]
fn this_driver_conforms_and_core_mutants_do_not() {
    judge_mutants(|rule| CORE.contains(&rule), |_, _| true);
}

#[test]
#[ignore = "full tier"]
fn each_rule_fails_for_its_mutant_and_no_other() {
    let mutants = MUTANTS.iter().map(|(rule, ..)| *rule);
    let listed = Command::new(binary()).args(["conformance", "--list"]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let rules = listed.lines().filter_map(|line| line.split(' ').next());
    let rules: Vec<&str> = rules.filter(|rule| !rule.starts_with(SIDECAR)).collect();
    let mut mutants: Vec<&str> = mutants.collect();
    let mut sorted = rules.clone();
    mutants.sort_unstable();
    sorted.sort_unstable();
    assert_eq!(mutants, sorted, "each rule has a mutant");
    // By its rule and the neighbours of this; by all rules one in four, and the others on the next
    // days.
    let place = |rule: &str| rules.iter().position(|one| *one == rule);
    let is_judged = |(rule, _, others): &Mutant, id: &str| {
        let own = place(rule).unwrap();
        // A slow driver is interrupted before the loss, a fast one is not.
        if id == "deadline" && rule.ends_with("-many") {
            return false;
        }
        is_due(own, 4)
            // Reads the snapshot that while-used reads again.
            || (*rule == "while-used" && id == "allocated-changed")
            || others.contains(&id)
            || place(id).is_some_and(|other| other.abs_diff(own) <= NEIGHBOURS)
    };
    judge_mutants(|_| true, is_judged);
}

/// Drivers that use each freedom of the text. None is accused. A change id as a base, instead of the
/// id of a snapshot, is no freedom.
fn freedoms() -> Vec<Freedom> {
    let conforming = dialect::ALL.iter().filter(|dialect| dialect.name != "change-ids");
    let unlimited = conforming.map(|dialect| Freedom::of(*dialect));
    let plain = Freedom::of(dialect::PLAIN);
    let limited = [
        Freedom { max_snapshots: 4, keeps_sources: true, is_slow: true, ..plain },
        Freedom { expands: false, clones: false, stages: false, unit: 1 << 22, ..plain },
    ];
    unlimited.chain(limited).collect()
}

fn judge_freedoms(freedoms: &[Freedom]) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    for freedom in freedoms {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let driver = Foreign::start(&runtime, directory.path(), *freedom);
        let secrets = directory.path().join("secrets.yaml");
        let keys = ["CreateVolume", "DeleteVolume", "NodeStageVolume", "CreateSnapshot"];
        let keys = keys.into_iter().chain(["DeleteSnapshot", "SnapshotMetadata"]);
        let text: String = freedom.dialect.secret.map_or_else(String::new, |(key, value)| {
            keys.map(|call| format!("{call}Secret:\n  {key}: {value}\n")).collect()
        });
        fs::write(&secrets, if text.is_empty() { "{}\n".to_owned() } else { text }).unwrap();
        let mut command = Command::new(binary());
        command.args(["conformance", "--endpoint", driver.endpoint(), "--report", "json"]);
        command.args(["--testvolumesize", "32Mi", "--mountdir"]).arg(directory.path().join("m"));
        command.arg("--stagingdir").arg(directory.path().join("s"));
        let output = command.arg("--secrets").arg(&secrets).output().unwrap();
        let shown = String::from_utf8_lossy(&output.stdout).into_owned();
        let name = freedom.dialect.name;
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{name}: {shown}{err}");
        let report: serde_json::Value = serde_json::from_str(&shown).unwrap();
        println!(
            "{name}: {} passed, {} advice, {} skipped, {} s",
            report["passed"], report["advice"], report["skipped"], report["seconds"]
        );
        assert!(report["passed"].as_u64().unwrap() > 15, "{name}: {shown}");
        assert_eq!(driver.count(), (0, 0), "{name}");
    }
}

#[test]
fn a_driver_with_the_freedoms_of_the_text_is_not_accused() {
    judge_freedoms(&[Freedom { max_snapshots: 6, ..Freedom::of(dialect::ALL[1]) }]);
}

#[test]
#[ignore = "full tier"]
fn no_freedom_of_the_text_is_a_violation() {
    judge_freedoms(&freedoms());
}

/// Runs the command; returns its exit code and its output.
fn conformance(driver: &Driver, flags: &[&str]) -> (Option<i32>, String, String) {
    let endpoint = driver.endpoint();
    let mut command = Command::new(binary());
    command.args(["conformance", "--csi.endpoint", &endpoint, "--csi.mountdir"]);
    command.arg(driver.scratch().join("mounts")).arg("--csi.stagingdir");
    command.arg(driver.scratch().join("stagings")).args(flags);
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn assert_nothing_remains(driver: &Driver) {
    assert!(driver.cli_json(&["volume", "list"]).as_array().unwrap().is_empty());
    assert!(driver.cli_json(&["snapshot", "list"]).as_array().unwrap().is_empty());
    for directory in ["mounts", "stagings"] {
        assert!(!driver.scratch().join(directory).exists(), "{directory}");
    }
}

#[test]
#[ignore = "full tier"]
fn this_driver_conforms_with_each_kind_of_pool() {
    for (kind, style) in ALL_KINDS.into_iter().zip(["variable", "fixed"].into_iter().cycle()) {
        let Some(driver) = driver_with(kind, &["--block-metadata-type", style]) else { return };
        let (code, out, err) = conformance(&driver, &["--report", "json"]);
        assert_eq!(code, Some(0), "{kind} {style}: {out}{err}");
        let report: serde_json::Value = serde_json::from_str(&out).unwrap();
        println!("{kind} {style}: {} s", report["seconds"]);
        assert_nothing_remains(&driver);
    }
}

#[test]
fn a_violation_exits_with_1_and_shows_how_to_repeat_it() {
    let mutant = ["--enable-faults", "--fault", "wrong-metadata,how=offset-beyond-ok"];
    let Some(driver) = driver_with(PoolKind::Image, &mutant) else { return };
    let focus = ["--no-node", "--focus", "offset-beyond", "--focus", "id-missing", "--seed", "5"];
    let (code, out, err) = conformance(&driver, &focus);
    assert_eq!(code, Some(1), "{out}{err}");
    for expected in [
        "1 passed, 1 failed (MUST 1, data 0)",
        "FAIL offset-beyond (MUST)",
        "spec.md:",
        "expected  OUT_OF_RANGE",
        " --no-node ",
        "--seed 5 --focus offset-beyond",
    ] {
        assert!(out.contains(expected), "{expected}: {out}");
    }
    assert_nothing_remains(&driver);
    let advice = ["--enable-faults", "--fault", "wrong-metadata,how=no-message"];
    let driver = Driver::with(PoolKind::Image, &advice);
    let (code, out, err) = conformance(&driver, &["--focus", "empty-message"]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("ADVICE empty-message"), "{out}");
    assert_nothing_remains(&driver);
    let (code, _, err) = conformance(&driver, &["--focus", "nothing"]);
    assert_eq!(code, Some(2), "{err}");
}

/// csi-driver-host-path as a process.
struct HostPath {
    process: Child,
    directory: TempDir,
}

impl HostPath {
    fn start(program: &OsStr) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let endpoint = format!("unix://{}", directory.path().join("csi.sock").display());
        let mut command = Command::new(program);
        command.args(["--drivername", "hostpath.example", "--nodeid", "node"]);
        command.args(["--endpoint", &endpoint, "--enable-snapshot-metadata", "--statedir"]);
        command.arg(directory.path().join("state"));
        command.args(["--snapshot-metadata-block-type", "VARIABLE_LENGTH"]);
        let log = File::create(directory.path().join("log")).unwrap();
        let process = command.stderr(log).spawn().unwrap();
        let host_path = Self { process, directory };
        let until = Instant::now() + PATIENCE;
        while !host_path.socket().exists() {
            assert!(Instant::now() < until, "no socket");
            sleep(Duration::from_millis(20));
        }
        host_path
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("csi.sock")
    }
}

impl Drop for HostPath {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "full tier"]
fn host_path_has_its_three_violations_and_no_other() {
    let Some(program) = env::var_os("CSI_LOOPBACK_HOSTPATH").filter(|_| have_root()) else {
        println!("CSI_LOOPBACK_HOSTPATH names no binary");
        return;
    };
    let host_path = HostPath::start(&program);
    let mut command = Command::new(binary());
    command.arg("conformance").arg("--endpoint").arg(host_path.socket());
    command.arg("--mountdir").arg(host_path.directory.path().join("mounts"));
    command.arg("--stagingdir").arg(host_path.directory.path().join("stagings"));
    command.args(["--report", "json", "--call-timeout", "10s"]);
    let output = command.output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{shown}");
    let report: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let rules = report["rules"].as_array().unwrap().iter();
    let violated = rules
        .filter(|rule| rule["result"] == "failed" && rule["severity"] != "advice")
        .map(|rule| rule["id"].as_str().unwrap());
    let violated: Vec<&str> = violated.collect();
    assert_eq!(violated, ["offset-complete", "offset-beyond", "max-results-negative"], "{shown}");
    assert_eq!(report["notRemoved"], serde_json::json!([]));
}

#[test]
fn an_interrupted_run_removes_what_it_made() {
    let Some(driver) = driver_with(PoolKind::Image, &[]) else { return };
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let mut command = Command::new(binary());
        command.args(["conformance", "--endpoint", &driver.endpoint(), "--mountdir"]);
        command.arg(driver.scratch().join("mounts")).arg("--stagingdir");
        command.arg(driver.scratch().join("stagings"));
        let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
        let until = Instant::now() + PATIENCE;
        while driver.cli_json(&["snapshot", "list"]).as_array().unwrap().len() < 3 {
            assert!(Instant::now() < until, "no snapshots");
            sleep(Duration::from_millis(20));
        }
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        assert_nothing_remains(&driver);
    }
}
