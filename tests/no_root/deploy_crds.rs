//! deploy/crds and deploy/crds-upstream match the Rust types of the custom resources.

#[allow(dead_code)] // for its main function
#[path = "../../examples/crds.rs"]
mod crds;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn shipped_crds_match_the_types() {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let mut shipped = BTreeMap::new();
    for directory in ["crds", "crds-upstream"] {
        for entry in fs::read_dir(deploy.join(directory)).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{directory}/{}", entry.file_name().into_string().unwrap());
            shipped.insert(name, fs::read_to_string(entry.path()).unwrap());
        }
    }
    assert_eq!(shipped, crds::files(), "run hack/crds.sh and commit the result");
}
