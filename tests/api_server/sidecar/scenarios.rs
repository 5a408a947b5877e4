//! Backup clients and the named faults of docs/reference/client-checklist.md: `backup` of this
//! project, and the released lister.

use std::fs;
use std::path::Path;
use std::process::Command;

use csi_loopback::driver::fault::SCENARIOS;
use serde_json::Value;
use support::cluster::programs::{json_extents, stdout_of};
use support::cluster::shared;
use support::cluster::sidecar_rig::{Rig, http};
use support::{BLOCK, path};

use super::backup::{Application, result};

/// What a client does in a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Incremental,
    Full,
    /// An error, and no backup.
    Fails,
    /// The lister prints all changes.
    Lists,
    /// The lister prints what violates CSI without an error.
    ListsWrong,
}

use Outcome::{Fails, Full, Incremental, Lists, ListsWrong};

/// The scenario, and what `backup` and the lister do.
const EXPECTED: [(&str, Outcome, Outcome); 8] = [
    ("tracking-lost", Full, Fails),
    ("deleted-base", Full, Fails),
    ("stream-aborted", Incremental, Fails),
    ("expired-token", Incremental, Fails),
    ("slow-answers", Incremental, Lists),
    ("failed-stream", Fails, Fails),
    ("unsorted", Fails, ListsWrong),
    ("duplicates", Fails, ListsWrong),
];

/// Restarts the driver with a scenario, and waits for the sidecar.
fn begin(rig: &mut Rig<'_>, scenario: &str) {
    let (name, fault) = (rig.driver_name.clone(), format!("scenario-{scenario}"));
    let flags = ["--driver-name", &name, "--enable-faults", "--fault", &fault];
    rig.driver.restart_with(&flags);
    rig.cluster.wait_for("the sidecar reaches the driver", || {
        http(&rig.sidecar, "/healthz").starts_with("HTTP/1.1 200").then_some(())
    });
}

fn copied(from: &str, to: &Path) -> String {
    let status = Command::new("cp").args(["-r", from, path(to)]).status().unwrap();
    assert!(status.success());
    path(to).to_owned()
}

/// Backs up the second snapshot, and restores what was backed up.
fn back_up(application: &Application<'_>, source: &Path) -> Outcome {
    let flags = ["--base", "auto", "--timeout", "30s"];
    let output = application.back_up("second", path(source), &flags);
    let list = ["backup", "list"];
    let list = application.command(&list, &application.repository).output().unwrap();
    let count = result(list).as_array().unwrap().len();
    if !output.status.success() {
        assert_eq!(count, 1, "a failed backup is not offered");
        println!("{}", String::from_utf8_lossy(&output.stderr));
        return Fails;
    }
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(count, 2, "{made}");
    let to = application.rig.driver.scratch().join("restored");
    let _ = fs::remove_file(&to);
    let restore = ["restore", "second", "--to", path(&to)];
    result(application.command(&restore, &application.repository).output().unwrap());
    assert!(fs::read(&to).unwrap() == fs::read(source).unwrap(), "the restore is exact: {made}");
    if made["kind"] == "full" { Full } else { Incremental }
}

/// Lists the changes with the released lister.
fn list(rig: &Rig<'_>, kubeconfig: &Path, changes: &[(u64, u64)]) -> Outcome {
    let request = ["-n", &rig.namespace, "-s", "second", "-p", "first", "-o", "json"];
    let output = rig.cluster.lister(kubeconfig, &request);
    if !output.status.success() {
        return Fails;
    }
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap();
    if json_extents(&listed) == changes { Lists } else { ListsWrong }
}

#[test]
#[ignore = "full tier"]
fn backup_clients_survive_the_named_scenarios() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.write(1, (0..10).map(|block| block * 2));
    let first = rig.snapshot("first");
    rig.write(2, (4..12).map(|block| block * 2));
    let second = rig.snapshot("second");
    let changes: Vec<_> = (4..12).map(|block| (block * 2 * BLOCK, BLOCK)).collect();
    let (repository, source) = {
        let application = Application::new(&rig);
        let source = application.image(&first.handle, "source-1");
        stdout_of(application.back_up("first", path(&source), &[]));
        (application.repository.clone(), application.image(&second.handle, "source-2"))
    };
    let kubeconfig = cluster.kubeconfig_of(&rig.backup);
    assert_eq!(SCENARIOS.each_ref().map(|one| one.name), EXPECTED.map(|(name, ..)| name));
    for (name, by_backup, by_lister) in EXPECTED {
        begin(&mut rig, name);
        let place = rig.driver.scratch().join(name);
        let application = Application { rig: &rig, repository: copied(&repository, &place) };
        assert_eq!(back_up(&application, &source), by_backup, "backup in {name}");
        begin(&mut rig, name);
        assert_eq!(list(&rig, &kubeconfig, &changes), by_lister, "lister in {name}");
        println!("{name}: backup {by_backup:?}, lister {by_lister:?}");
    }
}
