//! The files of this repository.

use std::fs;
use std::path::{Path, PathBuf};

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files with this extension below a directory of the repository.
pub fn files(directory: &str, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    add(&root().join(directory), extension, &mut found);
    found
}

fn add(directory: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add(&path, extension, found);
        } else if path.extension().is_some_and(|other| other == extension) {
            found.push(path);
        }
    }
}
