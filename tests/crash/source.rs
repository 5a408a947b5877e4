//! What the source says of its fail points.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Calls that change what a crash leaves behind.
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
    " mount(none,",
    "renameat(",
    "symlinkat(",
    "sys::add_extended_flags(",
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

/// Functions that need no point, and why.
const EXCEPT: [(&str, &str); 18] = [
    ("append", "into a buffer; the point comes when that is written"),
    ("clone", "the point is the caller's, who knows what is cloned"),
    ("copy_of", "in memory"),
    ("ensure_node", "a node in /dev that belongs to nobody"),
    ("fill_with_zeros", "the point comes when the file has its size"),
    ("flush", "what is in the kernel's hands a dead process loses no more"),
    ("largest_file", "a file that the next start makes again"),
    ("meet", "the points themselves"),
    ("overwrite", "once more what is overwritten by a repeat from its beginning"),
    ("probe", "files that the next start makes again"),
    ("probe_files", "files that the next start makes again"),
    ("open_with", "what an earlier process wrote, once more"),
    ("read_verified", "in memory"),
    ("release", "room and no content, taken again when there is plenty"),
    ("reserve", "room and no content, taken again at the next start"),
    ("resize", "the point is the caller's"),
    ("sync_data", "the point is the caller's"),
    ("write_pages", "the point is the caller's"),
];

fn sources(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else {
            files.push(path);
        }
    }
    files
}

/// Whose points the driver does not meet.
const OTHER_ROLES: [&str; 4] =
    ["src/crust", "src/runtime_ops", "src/oci_runtime", "src/node_proxy"];

/// The names of all points of the driver.
pub fn points() -> BTreeSet<String> {
    let mut points = BTreeSet::new();
    let all = sources(Path::new("src")).into_iter();
    for path in all.filter(|path| OTHER_ROLES.iter().all(|role| !path.starts_with(role))) {
        let source = fs::read_to_string(path).unwrap();
        for call in ["reach(\"", "meet(\""] {
            let parts = source.split(call).skip(1);
            points.extend(parts.map(|rest| rest.split('"').next().unwrap().to_owned()));
        }
    }
    // What is handed over to runtimes is another process's (runtime_ops.rs).
    points.retain(|point| !point.starts_with(super::runtime_ops::POINTS));
    points
}

/// Functions of the backend that take a step and meet no point.
pub fn functions_without_points() -> Vec<String> {
    let mut found = Vec::new();
    for path in sources(Path::new("src/backend")) {
        let shown = path.display().to_string();
        // System calls are wrapped in the one, and are a step where they are called.
        if shown.ends_with("/sys.rs") || shown.contains("/tests") {
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
                code.iter().any(|line| line.contains("reach(\"") || line.contains("meet(\""));
            if takes_step && !has_point && EXCEPT.iter().all(|(except, _)| *except != name) {
                found.push(format!("{shown}: {name}"));
            }
        }
    }
    found
}
