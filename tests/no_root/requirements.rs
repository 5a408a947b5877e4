//! docs/design/requirements.md names a test for each requirement of the proposals. All of these
//! tests exist.

use std::collections::BTreeSet;
use std::fs;

use crate::tree::{files, root};

#[test]
fn each_test_that_the_requirements_name_exists() {
    let sources = files("tests", "rs").into_iter().chain(files("src", "rs"));
    let code: String = sources.map(|path| fs::read_to_string(path).unwrap()).collect();
    let page = fs::read_to_string(root().join("docs/design/requirements.md")).unwrap();
    // Every second part is code. Code with an underscore and without a path is the name of a test.
    let named = page.split('`').skip(1).step_by(2);
    let tests: Vec<&str> =
        named.filter(|name| name.contains('_') && !name.contains(['/', '.', ' '])).collect();
    assert!(tests.len() > 275, "{} tests named", tests.len());
    let known = names_of_tests(&code);
    for test in tests {
        assert!(known.contains(test), "{test} is no test");
    }
}

/// The names of tests: functions with an attribute just before them.
fn names_of_tests(code: &str) -> BTreeSet<&str> {
    let (mut is_test, mut names) = (false, BTreeSet::new());
    for line in code.lines().map(str::trim) {
        is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        if let Some((_, rest)) = line.split_once("fn ").filter(|_| is_test) {
            names.insert(rest.split(['(', '<']).next().unwrap());
            is_test = false;
        }
    }
    names
}
