//! A cluster with the definition of SnapshotMetadataService of external-snapshot-metadata v0.2,
//! which has another version.

use std::process::Command;

use csi_loopback::kubernetes::definition::next_step;
use csi_loopback::kubernetes::metadata_service::SnapshotMetadataService;
use support::cluster::access::backup_rules;
use support::cluster::programs::{finish, stdout_of};
use support::cluster::shared;
use support::driver::binary;
use support::path;

use crate::session::rig::Rig;
use crate::sidecar_certificates::{CRD, install, without_crd};

/// While it runs, no SnapshotMetadataService of the current version exists.
#[test]
fn the_former_definition_is_reported_with_the_next_step() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    let backup = cluster.account(&rig.apps, "backup");
    cluster.grant(&backup, &backup_rules());
    let kubeconfig = cluster.kubeconfig_of(&backup);
    let list = || {
        let mut command = Command::new(binary());
        command.args(["snapshot", "allocated", "monday", "--namespace", &rig.apps]);
        command.args(["--timeout", "20s", "--kubeconfig", path(&kubeconfig)]);
        let output = finish(command);
        assert!(!output.status.success());
        let message = String::from_utf8(output.stderr).unwrap();
        println!("{message}");
        message
    };
    let (definition, _, client) = without_crd(cluster);
    let crd = &definition.crd;
    let step = || cluster.block_on(next_step::<SnapshotMetadataService>(&client));
    cluster.wait_for("the end of the definition", || {
        list().contains("install the CustomResourceDefinition").then_some(())
    });
    assert!(step().contains("install the CustomResourceDefinition"));

    let mut former = crd.clone();
    former["spec"]["versions"][0]["name"] = "v1alpha1".into();
    install(cluster, &former);
    let what = "has only version v1alpha1, of external-snapshot-metadata v0.2 or earlier";
    cluster.wait_for("the former definition", || step().contains(what).then_some(()));
    let message = list();
    for part in [what, "replace it by v1beta1", "docs/guide/upgrade.md"] {
        assert!(message.contains(part), "{part} is not in: {message}");
    }

    // The steps of the page.
    let current = cluster.write("crd", &crd.to_string());
    let applied = cluster.kubectl(&["apply", "-f", path(&current)]);
    let refused = String::from_utf8(applied.stderr).unwrap();
    assert!(refused.contains("storedVersions"), "{refused}");
    stdout_of(cluster.kubectl(&["delete", "crd", CRD]));
    install(cluster, crd);
    cluster.wait_for("the definition", || {
        list().contains("no SnapshotMetadataService is named").then_some(())
    });
}
