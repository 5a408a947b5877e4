//! hack/pin.sh: pins the images of deploy/ by digest. hack/e2e/scenarios/97-chart.sh has the same
//! test of the Helm chart.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use support::cluster::programs::{finish, stdout_of};
use support::cluster::shared;
use support::path;

use super::{directories, overlay};

const SIDECARS: [&str; 5] = [
    "csi-node-driver-registrar",
    "csi-provisioner",
    "csi-resizer",
    "csi-snapshotter",
    "livenessprobe",
];
/// Stands for an image of another provider, in an example.
const OTHER: &str = "block-csi:1.0.0";

fn digest(number: usize) -> String {
    format!("sha256:{number:064x}")
}

#[test]
#[ignore = "full tier"]
fn a_release_pins_every_image_by_digest() {
    let Some(cluster) = shared() else { return };
    let pinned = cluster.scratch().join("pinned");
    let own = format!("registry.example/csi-loopback:0.1.0@{}", digest(0));
    let sidecars = SIDECARS.iter().zip(1..).map(|(name, n)| format!("{name}@{}", digest(n)));
    let mut pin = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("hack/pin.sh"));
    pin.arg(&own).args(sidecars).env("PIN_DIR", &pinned);
    pin.env("SIDECAR_REGISTRY", "registry.example/mirror");
    stdout_of(finish(pin));

    let mut found = BTreeSet::new();
    for directory in directories() {
        let with = overlay(cluster, &directory, path(&pinned));
        let text = stdout_of(cluster.kubectl(&["kustomize", path(&with)]));
        let images = text.lines().filter_map(|line| {
            line.trim_start_matches([' ', '-']).strip_prefix("image: ").map(str::to_owned)
        });
        found.extend(images.filter(|image| image != OTHER));
    }
    let mut expected = BTreeSet::from([own]);
    for (name, number) in SIDECARS.iter().zip(1..) {
        let of_name = |image: &&String| image.contains(&format!("/mirror/{name}:"));
        let image = found.iter().find(of_name).unwrap_or_else(|| panic!("{name} in {found:#?}"));
        assert!(image.ends_with(&format!("@{}", digest(number))), "{image}");
        expected.insert(image.clone());
    }
    assert_eq!(found, expected, "no other image");
}
