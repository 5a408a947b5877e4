//! The filesystems' own checks, on devices that nobody has mounted.

use std::path::Path;
use std::process::Command;

use super::path;

/// What could be stored with fewer blocks is no fault.
const E2FSCK: &[&str] = &["-f", "-n", "-E", "no_optimize_extents"];

/// Checks a filesystem that was cut while it was frozen, with nothing replayed before. What is still
/// open but has no name any more is all that there may be to do: the next mount frees it.
#[track_caller]
pub fn check_as_cut(fs_type: &str, device: &Path) {
    match fs_type {
        "ext4" => {
            let (_, head) = output("dumpe2fs", &["-h"], device);
            assert!(!head.contains("needs_recovery"), "the journal was not empty:\n{head}");
            let (_, said) = output("e2fsck", E2FSCK, device);
            let unnamed = head.contains("First orphan inode") || head.contains("orphan_present");
            check_lines(&said, EXT4_WELL, if unnamed { EXT4_UNNAMED } else { &[] });
        }
        // A frozen XFS has a log with something in it, so that a mount looks at its unlinked files; the
        // counters of its superblock are not kept up to date.
        "xfs" => {
            let (_, said) = output("xfs_repair", &["-n"], device);
            check_lines(&said, XFS_WELL, XFS_UNNAMED);
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

/// Checks a filesystem that was unmounted: nothing may be found.
#[track_caller]
pub fn check(fs_type: &str, device: &Path) {
    let (status, said) = match fs_type {
        "ext4" => output("e2fsck", E2FSCK, device),
        "xfs" => output("xfs_repair", &["-n"], device),
        "btrfs" => output("btrfs", &["check", "--readonly"], device),
        other => unreachable!("{other}"),
    };
    assert_eq!(status, Some(0), "{fs_type}:\n{}", start_of(&said));
}

fn output(program: &str, arguments: &[&str], device: &Path) -> (Option<i32>, String) {
    let output = Command::new(program).args(arguments).arg(path(device)).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

/// Every line begins as one of the first or has one of the others in it.
#[track_caller]
fn check_lines(said: &str, well: &[&str], unnamed: &[&str]) {
    let known = |line: &str| {
        let begins = well.iter().any(|start| line.trim_start().starts_with(start));
        line.trim().is_empty() || begins || unnamed.iter().any(|part| line.contains(part))
    };
    let found: Vec<&str> = said.lines().filter(|line| !known(line)).collect();
    assert!(found.is_empty(), "{}\nin\n{}", start_of(&found.join("\n")), start_of(said));
}

/// Lists of blocks can be endless.
fn start_of(said: &str) -> String {
    let line = |line: &str| line.chars().take(200).collect::<String>();
    said.lines().take(60).map(line).collect::<Vec<_>>().join("\n")
}

const EXT4_WELL: &[&str] = &["e2fsck ", "Pass ", "/"];
const EXT4_UNNAMED: &[&str] = &[
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
const XFS_WELL: &[&str] = &[
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
const XFS_UNNAMED: &[&str] =
    &["agi unlinked bucket ", "disconnected inode ", " nlinks from 0 to 1"];
