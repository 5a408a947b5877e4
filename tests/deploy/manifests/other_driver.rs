//! deploy/examples/other-driver: the sidecar for the driver of another provider.
//! hack/e2e/scenarios/27-other-driver.sh runs it.

use std::fs;

use support::cluster::programs::stdout_of;
use support::cluster::shared;
use support::path;

use super::deploy;

#[test]
fn the_parameters_reach_every_place_of_the_sidecar() {
    let Some(cluster) = shared() else { return };
    let directory = cluster.scratch().join(cluster.unique("other-driver"));
    fs::create_dir(&directory).unwrap();
    for entry in fs::read_dir(deploy("examples/other-driver")).unwrap() {
        let file = entry.unwrap().path();
        fs::copy(&file, directory.join(file.file_name().unwrap())).unwrap();
    }
    let parameters = directory.join("parameters.yaml");
    let mut text = fs::read_to_string(&parameters).unwrap();
    for key in ["driver", "serviceAccount", "image", "address"] {
        let start = text.find(&format!("\n  {key}: ")).unwrap() + key.len() + 5;
        let end = start + text[start..].find('\n').unwrap();
        text.replace_range(start..end, &format!("{}.example", key.to_lowercase()));
    }
    fs::write(&parameters, text).unwrap();
    let after = stdout_of(cluster.kubectl(&["kustomize", path(&directory)]));
    for (line, places) in [
        ("- driver.example\n", 1),
        ("name: serviceaccount.example\n", 2),
        ("image: image.example\n", 1),
        ("- --service-address=address.example\n", 1),
    ] {
        assert_eq!(after.matches(line).count(), places, "{line}{after}");
    }
    // What only marks a place is nowhere left.
    assert!(!after.contains("service-account") && !after.contains("- driver\n"));
}
