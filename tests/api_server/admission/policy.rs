//! The rules in the policy of a namespace.

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::storage::v1::CSIDriver;
use serde_json::json;
use support::cluster::shared;

use super::rig::{Rig, With, assert_refused, namespace, pod};

const ENFORCE: &str = "pod-security.kubernetes.io/enforce";
const WARN: &str = "pod-security.kubernetes.io/warn";
const PROFILE: &str = "security.openshift.io/csi-ephemeral-volume-profile";

#[test]
fn the_policy_of_each_namespace_is_enforced() {
    let Some(cluster) = shared() else { return };
    let [open, closed, small] = [(); 3].map(|()| namespace(cluster, json!({})));
    let document = format!(
        "default: {{maxSize: 10Gi}}\nnamespaces:\n  {closed}: {{allowed: false}}\n  {small}: {{maxSize: 1Gi}}\n"
    );
    let rig = Rig::new(cluster, With { policy: Some(&document), ..With::default() });
    let sized = |size: &str| pod(&rig.volume(json!({ "size": size })));
    rig.make(&open, &sized("10Gi")).unwrap();
    rig.make(&open, &pod(&rig.volume(json!({})))).unwrap();
    rig.make(&open, &pod(&rig.with_secret())).unwrap();
    rig.make(&open, &pod(&rig.volume(json!({ "medium": "Memory", "size": "1Mi" })))).unwrap();
    let too_large = ["403", "spec.volumes[0].csi.volumeAttributes[size]", "11Gi", "10Gi", &open];
    assert_refused(rig.make(&open, &sized("11Gi")), &too_large);
    let not_here = ["403", "spec.volumes[0].csi.driver", &rig.driver, "not allowed", &closed];
    assert_refused(rig.make(&closed, &sized("1Mi")), &not_here);
    rig.make(&small, &sized("1Gi")).unwrap();
    assert_refused(rig.make(&small, &sized("1.5Gi")), &["403", "1.5Gi", "1Gi", &small]);
}

#[test]
fn invalid_attributes_are_refused_with_their_field() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With::default());
    for (attributes, key) in [
        (json!({ "sise": "1Gi" }), "sise"),
        (json!({ "fromSnapshot": "snap-1" }), "fromSnapshot"),
        (json!({ "size": "0" }), "size"),
        (json!({ "medium": "Disk" }), "medium"),
        (json!({ "readOnlyContent": "yes" }), "readOnlyContent"),
        (json!({ "content/../x": "y" }), "content/../x"),
        // Reserved for kubelet.
        (json!({ "csi.storage.k8s.io/ephemeral": "false" }), "csi.storage.k8s.io/ephemeral"),
    ] {
        let field = format!("spec.volumes[0].csi.volumeAttributes[{key}]");
        assert_refused(rig.make(&rig.apps, &pod(&rig.volume(attributes))), &["422", &field]);
    }
}

#[test]
fn all_errors_are_reported_at_once() {
    let Some(cluster) = shared() else { return };
    let flags = ["--max-size", "1Gi"];
    let rig = Rig::new(cluster, With { flags: &flags, ..With::default() });
    let volumes: Vec<_> = (0..30)
        .map(|number| {
            let mut volume = rig.volume(json!({ "size": "2Gi" }));
            volume["name"] = format!("v{number}").into();
            volume
        })
        .collect();
    let mut pod = pod(&volumes[0]);
    pod["spec"]["volumes"] = json!(volumes[..2]);
    let both = ["spec.volumes[0].csi", "spec.volumes[1].csi"];
    assert_refused(rig.make(&rig.apps, &pod), &both);
    pod["spec"]["volumes"] = json!(volumes);
    let refused = rig.make(&rig.apps, &pod).unwrap_err();
    assert!(refused.len() < 2048 && refused.contains("spec.volumes[3].csi"), "{refused}");
}

#[test]
fn a_valid_policy_change_applies_and_an_invalid_does_not() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With::default());
    let volume = rig.volume(json!({ "size": "2Gi" }));
    rig.allowed_once(&rig.apps, &volume);
    rig.policy("default: {maxSize: 1Gi}");
    rig.refused_once(&rig.apps, &volume, "1Gi");
    rig.policy("default: {maxSize: 1Gi, allowd: true}");
    let log = || rig.served.process.log();
    cluster.wait_for("the complaint", || {
        // The map is read on demand.
        rig.refused_once(&rig.apps, &volume, "1Gi");
        log().contains("allowd").then_some(())
    });
    assert!(rig.is_healthy());
    assert!(rig.page("/metrics").contains("\ncsi_loopback_admission_policy_taken 0\n"));
    rig.policy("default: {maxSize: 2Gi}");
    rig.allowed_once(&rig.apps, &volume);
    let maps = cluster.api_in::<k8s_openapi::api::core::v1::ConfigMap>(&rig.home);
    cluster.delete(&maps, support::cluster::admission::CONFIG_MAP);
    rig.allowed_once(&rig.apps, &rig.volume(json!({ "size": "3Gi" })));
    assert_eq!(log().matches("is invalid; keeping the current policy").count(), 1);
}

#[test]
fn an_invalid_initial_policy_refuses_and_fails_health() {
    let Some(cluster) = shared() else { return };
    let with = With { policy: Some("default: {maxSize: much}"), ..With::default() };
    let rig = Rig::started(cluster, &with);
    rig.configure(false);
    let volume = rig.volume(json!({}));
    cluster.wait_for("the complaint", || {
        rig.page("/health").contains("default.maxSize").then_some(())
    });
    assert!(!rig.is_healthy());
    rig.refused_once(&rig.apps, &volume, "default.maxSize");
    assert_refused(rig.dry(&rig.apps, &pod(&volume)), &["500", "ConfigMap"]);
    rig.policy("default: {}");
    rig.allowed_once(&rig.apps, &volume);
    assert!(rig.is_healthy());
}

#[test]
fn a_namespace_must_have_the_volume_profiles_level() {
    let Some(cluster) = shared() else { return };
    let of = |labels| namespace(cluster, labels);
    let baseline = of(json!({ ENFORCE: "baseline" }));
    let warned = of(json!({ ENFORCE: "privileged", WARN: "baseline" }));
    let named = of(json!({ ENFORCE: "baseline" }));
    let unlabelled = of(json!({}));
    let document = format!(
        "volumeProfile: privileged\ndefaultPodSecurity: privileged\nnamespaces: {{{named}: {{allowed: true}}}}\n"
    );
    let rig = Rig::new(cluster, With { policy: Some(&document), ..With::default() });
    let volume = rig.volume(json!({ "size": "1Mi" }));
    let words = ["403", "spec.volumes[0].csi.driver", "privileged", &baseline, "baseline", ENFORCE];
    assert_refused(rig.make(&baseline, &pod(&volume)), &words);
    for open in [&warned, &named, &unlabelled] {
        rig.make(open, &pod(&volume)).unwrap();
    }
    let mut pod = pod(&volume);
    pod["apiVersion"] = "v1".into();
    pod["kind"] = "Pod".into();
    pod["metadata"] = json!({ "name": "warned", "namespace": warned });
    let file = cluster.write("pod", &pod.to_string());
    let output = cluster.kubectl(&["create", "-f", support::path(&file)]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.success() && error.contains("Warning:") && error.contains(WARN),
        "{error}"
    );
    // Without a label the policy's level applies.
    rig.policy("volumeProfile: baseline\ndefaultPodSecurity: restricted\n");
    rig.refused_once(&unlabelled, &volume, "restricted");
    rig.allowed_once(&baseline, &volume);
    let labels = json!({ "metadata": { "labels": { ENFORCE: "baseline" } } });
    cluster.merge(&cluster.api::<Namespace>(), &unlabelled, &labels);
    rig.allowed_once(&unlabelled, &volume);
    rig.policy("volumeProfile: restricted\ndefaultPodSecurity: restricted\n");
    rig.allowed_once(&of(json!({})), &volume);
}

#[test]
fn the_csi_drivers_label_is_the_default_profile() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(
        cluster,
        With { flags: &["--default-pod-security", "privileged"], ..With::default() },
    );
    let baseline = namespace(cluster, json!({ ENFORCE: "baseline" }));
    let volume = rig.volume(json!({}));
    // Without a CSIDriver object, or its label, privileged applies.
    assert_refused(rig.make(&baseline, &pod(&volume)), &["403", "privileged"]);
    let drivers = cluster.api::<CSIDriver>();
    let labels = json!({ PROFILE: "baseline" });
    let object = json!({ "metadata": { "name": rig.driver, "labels": labels }, "spec": {} });
    cluster.create(&drivers, object);
    rig.allowed_once(&baseline, &volume);
    let label = |value: &str| json!({ "metadata": { "labels": { PROFILE: value } } });
    cluster.merge(&drivers, &rig.driver, &label("open"));
    rig.refused_once(&rig.apps, &volume, "is not a Pod Security level");
    cluster.merge(&drivers, &rig.driver, &label("privileged"));
    rig.allowed_once(&rig.apps, &volume);
    rig.refused_once(&baseline, &volume, "privileged");
    cluster.delete(&drivers, &rig.driver);
}
