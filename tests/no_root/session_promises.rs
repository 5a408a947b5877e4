//! docs/session-manager.md, docs/aggregated-api.md, docs/inline-volumes.md, docs/runtime-assisted-mount.md and docs/node-proxy.md say
//! which test shows what of the proposals: each of them exists.

use std::fs;
use std::path::Path;

/// The Rust sources below a directory.
fn sources(directory: &Path, all: &mut String) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

/// That each test exists that a page names; so many at least.
fn each_test_exists(page: &str, at_least: usize) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut code = String::new();
    sources(&root.join("tests"), &mut code);
    sources(&root.join("src"), &mut code);
    let page = fs::read_to_string(root.join("docs").join(page)).unwrap();
    let (_, table) = page.split_once("## What is tested where").unwrap();
    // Every other part stands between backticks; names of tests are the ones with underscores.
    let named: Vec<&str> = table.split('`').skip(1).step_by(2).collect();
    let tests: Vec<&str> =
        named.into_iter().filter(|name| name.contains('_') && !name.contains('/')).collect();
    assert!(tests.len() > at_least, "{} tests named", tests.len());
    for test in tests {
        let forms = [format!("fn {test}("), format!("\"{test}\"")];
        assert!(forms.iter().any(|form| code.contains(form)), "{test} does not exist");
    }
}

#[test]
fn each_test_that_the_page_on_sessions_names_exists() {
    each_test_exists("session-manager.md", 70);
}

#[test]
fn each_test_that_the_page_on_the_aggregated_api_names_exists() {
    each_test_exists("aggregated-api.md", 20);
}

#[test]
fn each_test_that_the_page_on_inline_volumes_names_exists() {
    each_test_exists("inline-volumes.md", 60);
}

#[test]
fn each_test_that_the_page_on_runtime_assisted_mounting_names_exists() {
    each_test_exists("runtime-assisted-mount.md", 25);
}

#[test]
fn each_test_that_the_page_on_the_node_proxy_names_exists() {
    each_test_exists("node-proxy.md", 100);
}
