//! Filesystem checkers, for unmounted devices.

use std::path::Path;
use std::process::Command;

use super::path;

/// Missed optimizations are not errors.
const E2FSCK: &[&str] = &["-f", "-n", "-E", "no_optimize_extents"];

/// Checks a copy of a frozen filesystem without a journal replay. The only accepted findings are
/// open files without a name, which the next mount frees.
#[track_caller]
pub fn check_frozen_copy(fs_type: &str, device: &Path) {
    match fs_type {
        "ext4" => {
            let (_, head) = output("dumpe2fs", &["-h"], device);
            assert!(!head.contains("needs_recovery"), "the journal was not empty:\n{head}");
            let (_, report) = output("e2fsck", E2FSCK, device);
            let orphans = head.contains("First orphan inode") || head.contains("orphan_present");
            check_lines(&report, EXT4_CLEAN, if orphans { EXT4_ORPHANS } else { &[] });
        }
        // A frozen XFS has a log record, so that a mount processes unlinked files. Its superblock
        // counters are not current.
        "xfs" => {
            let (_, report) = output("xfs_repair", &["-n"], device);
            check_lines(&report, XFS_CLEAN, XFS_ORPHANS);
        }
        "btrfs" => {
            let (_, head) = output("btrfs", &["inspect-internal", "dump-super"], device);
            let log = head.lines().find(|line| line.starts_with("log_root\t")).unwrap_or_default();
            assert!(log.ends_with("\t0"), "the log was not empty: {log:?}");
            check(fs_type, device);
        }
        other => unreachable!("{other}"),
    }
}

/// Checks an unmounted filesystem, which must be clean.
#[track_caller]
pub fn check(fs_type: &str, device: &Path) {
    let (status, report) = match fs_type {
        "ext4" => output("e2fsck", E2FSCK, device),
        "xfs" => output("xfs_repair", &["-n"], device),
        "btrfs" => output("btrfs", &["check", "--readonly"], device),
        other => unreachable!("{other}"),
    };
    assert_eq!(status, Some(0), "{fs_type}:\n{}", start_of(&report));
}

fn output(program: &str, arguments: &[&str], device: &Path) -> (Option<i32>, String) {
    let output = Command::new(program).args(arguments).arg(path(device)).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let report = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&report).into_owned())
}

/// Asserts that every line starts with one of `clean` or contains one of `orphans`.
#[track_caller]
fn check_lines(report: &str, clean: &[&str], orphans: &[&str]) {
    let accepted = |line: &str| {
        let is_clean = clean.iter().any(|start| line.trim_start().starts_with(start));
        line.trim().is_empty() || is_clean || orphans.iter().any(|part| line.contains(part))
    };
    let found: Vec<&str> = report.lines().filter(|line| !accepted(line)).collect();
    assert!(found.is_empty(), "{}\nin\n{}", start_of(&found.join("\n")), start_of(report));
}

/// Truncates a report, which can have very long lists of blocks.
fn start_of(report: &str) -> String {
    let line = |line: &str| line.chars().take(200).collect::<String>();
    report.lines().take(60).map(line).collect::<Vec<_>>().join("\n")
}

const EXT4_CLEAN: &[&str] = &["e2fsck ", "Pass ", "/"];
const EXT4_ORPHANS: &[&str] = &[
    "Inodes that were part of a corrupted orphan linked list found.",
    "was part of the orphaned inode list.",
    "has zero dtime.",
    "Inode bitmap differences:  -",
    "Block bitmap differences:  -",
    "Free inodes count wrong",
    "Free blocks count wrong",
    "Directories count wrong",
    "Fix? no",
];
const XFS_CLEAN: &[&str] = &[
    "Phase ",
    "- ",
    "No modify flag set",
    "ALERT: The filesystem has valuable metadata changes in a log",
    "ignored because the -n option was used",
    "which may be resolved by first mounting the filesystem",
    "sb_fdblocks ",
    "sb_icount ",
    "sb_ifree ",
];
const XFS_ORPHANS: &[&str] =
    &["agi unlinked bucket ", "disconnected inode ", " nlinks from 0 to 1"];
