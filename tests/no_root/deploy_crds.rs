//! deploy/crds matches the Rust types of the custom resources.

#[allow(dead_code)] // for its main function
#[path = "../../examples/crds.rs"]
mod crds;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn shipped_crds_match_the_types() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/crds");
    let shipped: BTreeMap<String, String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let text = fs::read_to_string(entry.path()).unwrap();
            (entry.file_name().into_string().unwrap(), text)
        })
        .collect();
    assert_eq!(shipped, crds::files(), "run hack/crds.sh and commit the result");
}
