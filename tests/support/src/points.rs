//! The directory of `--fail-points`: what a process does at its fail points, and which it meets
//! (src/common/fail_point.rs).

use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Removed when it is dropped.
pub struct Points(PathBuf);

impl Points {
    pub fn new() -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self::at(std::env::temp_dir().join(format!("points-{}-{number}", process::id())))
    }

    pub fn at(directory: PathBuf) -> Self {
        fs::create_dir_all(&directory).unwrap();
        Self(directory)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Sets what happens at the N-th point with these names from now on: `kill`, `error` or `hang`.
    /// N = 0 is no point, and only records them.
    pub fn plan(&self, action: &str, at: usize, names: &str) {
        let _ = fs::remove_file(self.0.join("met"));
        let part = self.0.join("plan.part");
        fs::write(&part, format!("{action} {at} {names}")).unwrap();
        fs::rename(part, self.0.join("plan")).unwrap();
    }

    /// Ends the plan. A process that hangs continues.
    pub fn clear(&self) {
        let _ = fs::remove_file(self.0.join("plan"));
    }

    /// The points met since the plan was set.
    pub fn met(&self) -> Vec<String> {
        let met = fs::read_to_string(self.0.join("met")).unwrap_or_default();
        met.lines().map(str::to_owned).collect()
    }
}

impl Default for Points {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Points {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
