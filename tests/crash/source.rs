//! Reads the fail points from the source.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Calls that change durable or kernel state.
const STEPS: [&str; 35] = [
    ".commit()",
    ".create(&",
    ".set_len(",
    ".sync_all(",
    ".sync_data(",
    ".write_all(",
    ".write_all_at(",
    " chown(",
    "create_dir_all(",
    "fallocate(",
    "fchownat(",
    "fs::remove_dir(",
    "fs::remove_file(",
    "fs::rename(",
    "fs::set_permissions(",
    "mkdirat(",
    " mknod(",
    " mount(Some(",
    "renameat(",
    "symlinkat(",
    "sys::add_extended_flags(",
    "sys::attach_mount(",
    "sys::clone_file(",
    "sys::clone_range(",
    "sys::detached_mount(",
    "sys::freeze(",
    "sys::loop_clear(",
    "sys::loop_configure(",
    "sys::loop_set_capacity(",
    "sys::loop_set_status(",
    "sys::set_block_read_only(",
    "sys::set_inode_flags(",
    "sys::thaw(",
    "umount2(",
    "unlinkat(",
];

/// Functions that need no fail point, with reasons.
const EXCEPT: [(&str, &str); 19] = [
    ("append", "writes to a buffer; the point is at the flush of the buffer"),
    ("clone", "the caller has the point"),
    ("copy_of", "in memory"),
    ("ensure_node", "a shared node in /dev"),
    ("fill_with_zeros", "the point is after the growth"),
    ("flush", "data in the kernel survives the process"),
    ("grow", "the caller has the point"),
    ("largest_file", "the next start creates the file again"),
    ("hit", "implements the points"),
    ("overwrite", "a repeated call overwrites everything again"),
    ("probe", "the next start creates the files again"),
    ("probe_files", "the next start creates the files again"),
    ("open_with", "flushes data of an earlier process"),
    ("read_verified", "in memory"),
    ("release", "frees space without content; reserved again when space is available"),
    ("reserve", "reserves space without content; reserved again at the next start"),
    ("shorten", "the caller has the point"),
    ("sync_data", "the caller has the point"),
    ("write_pages", "the caller has the point"),
];

fn sources(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// Files whose fail points the driver does not meet.
const OTHER_ROLES: [&str; 4] = [
    "src/deferral/crust",
    "src/deferral/runtime_ops",
    "src/deferral/oci_runtime",
    "src/deferral/node_proxy",
];

/// The names of all fail points of the driver.
pub fn points() -> BTreeSet<String> {
    let mut points = BTreeSet::new();
    let all = sources(Path::new("src")).into_iter();
    for path in all.filter(|path| OTHER_ROLES.iter().all(|role| !path.starts_with(role))) {
        let source = fs::read_to_string(path).unwrap();
        for call in ["reach(\"", "hit(\""] {
            let parts = source.split(call).skip(1);
            points.extend(parts.map(|rest| rest.split('"').next().unwrap().to_owned()));
        }
    }
    // crust_ops is another process (runtime_ops.rs).
    points.retain(|point| !point.starts_with(super::runtime_ops::POINTS));
    points
}

/// Functions of the backend that change state without a fail point.
pub fn functions_without_points() -> Vec<String> {
    let mut found = Vec::new();
    for path in sources(Path::new("src/storage")) {
        let shown = path.display().to_string();
        // The first file wraps system calls, which count as steps of their callers.
        if shown.contains("/sys/") || shown.contains("/tests") {
            continue;
        }
        let source = fs::read_to_string(path).unwrap();
        let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for function in source.split("fn ").skip(1) {
            let name = function.split(['(', '<']).next().unwrap();
            let lines = function.lines().filter(|line| !line.trim_start().starts_with("//"));
            let code: Vec<&str> = lines.collect();
            let takes_step = code.iter().any(|line| STEPS.iter().any(|step| line.contains(step)));
            let has_point =
                code.iter().any(|line| line.contains("reach(\"") || line.contains("hit(\""));
            if takes_step && !has_point && EXCEPT.iter().all(|(except, _)| *except != name) {
                found.push(format!("{shown}: {name}"));
            }
        }
    }
    found
}
