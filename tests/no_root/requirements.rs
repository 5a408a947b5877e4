//! docs/design/requirements.md names a test for each requirement of the proposals. All of these
//! tests exist.

use std::collections::BTreeSet;
use std::fs;

use crate::tree::{files, read, tests_in};

#[test]
fn each_test_that_the_requirements_name_exists() {
    let sources = files("tests", "rs").into_iter().chain(files("src", "rs"));
    let code: String = sources.map(|path| fs::read_to_string(path).unwrap()).collect();
    let page = read("docs/design/requirements.md");
    // Every second part is code. Code with an underscore and without a path is the name of a test.
    let named = page.split('`').skip(1).step_by(2);
    let tests: Vec<&str> =
        named.filter(|name| name.contains('_') && !name.contains(['/', '.', ' '])).collect();
    assert!(tests.len() > 275, "{} tests named", tests.len());
    let known: BTreeSet<&str> = tests_in(&code).into_iter().map(|(_, name)| name).collect();
    for test in tests {
        assert!(known.contains(test), "{test} is no test");
    }
}
