//! The clock of a process under test, set by libfaketime.

use std::fs;
use std::path::{Path, PathBuf};

use crate::path;

/// Debian's path of libfaketime.
pub fn faketime() -> Option<PathBuf> {
    let of_machines = fs::read_dir("/usr/lib").ok()?.flatten();
    let mut files = of_machines.map(|of| of.path().join("faketime/libfaketimeMT.so.1"));
    files.find(|file| file.exists())
}

/// A clock that can be set while processes run: the time of day, not the monotonic clock of timers.
pub struct Clock {
    library: PathBuf,
    file: PathBuf,
}

impl Clock {
    /// `None` without libfaketime. Its file is in `directory`.
    pub fn new(directory: &Path) -> Option<Self> {
        let clock = Self { library: faketime()?, file: directory.join("clock") };
        clock.set(0);
        Some(clock)
    }

    /// Sets it this many seconds ahead of the machine's clock.
    pub fn set(&self, seconds: i64) {
        let part = self.file.with_extension("part");
        fs::write(&part, format!("{seconds:+}")).unwrap();
        fs::rename(&part, &self.file).unwrap();
    }

    /// The environment of a process with this clock.
    pub fn environment(&self) -> Vec<(String, String)> {
        let pairs = [
            ("LD_PRELOAD", path(&self.library)),
            ("FAKETIME_TIMESTAMP_FILE", path(&self.file)),
            ("FAKETIME_NO_CACHE", "1"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            ("DONT_FAKE_MONOTONIC", "1"),
            ("NO_FAKE_STAT", "1"),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
    }
}
