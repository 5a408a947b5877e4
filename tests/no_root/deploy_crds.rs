//! deploy/crds says what the Rust types say: people install the one, the binary reads and writes the other.

#[allow(dead_code)] // Its main.
#[path = "../../examples/crds.rs"]
mod crds;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn the_definitions_in_deploy_are_those_of_the_types() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/crds");
    let there: BTreeMap<String, String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let text = fs::read_to_string(entry.path()).unwrap();
            (entry.file_name().into_string().unwrap(), text)
        })
        .collect();
    assert_eq!(there, crds::files(), "run hack/crds.sh and commit what it writes");
}
