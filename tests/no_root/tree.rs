//! The files of this repository.

use std::fs;
use std::path::{Path, PathBuf};

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The text of a file of the repository.
pub fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap()
}

/// The names of the tests in a source, with their lines: functions with an attribute just before
/// them.
pub fn tests_in(code: &str) -> Vec<(usize, &str)> {
    let (mut is_test, mut found) = (false, Vec::new());
    for (line, number) in code.lines().map(str::trim).zip(1..) {
        is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        if let Some((_, rest)) = line.split_once("fn ") {
            found.extend(is_test.then(|| (number, rest.split(['(', '<']).next().unwrap())));
            is_test = false;
        }
    }
    found
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
