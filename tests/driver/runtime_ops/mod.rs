//! crust_ops from the perspective of CSI plugins and container runtimes: the real process on its
//! socket, its files, and correct and misbehaving programs of a runtime.

mod collect;
mod kata;
mod process;
mod programs;
mod requests;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use support::have_root;
use support::ops::Ops;

/// Runs a test against a fresh process.
fn with_ops(flags: &[&str], run: impl FnOnce(&mut Ops)) {
    if have_root() {
        run(&mut Ops::start(flags));
    }
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}
