//! Content volumes, mainly with secrets.

use serde_json::{Value, json};
use support::cluster::shared;

use support::cluster::admission::{Webhooks, With};
use support::cluster::kubelet::{CreatedPod, NodeRig};

/// Runs a pod with the secret `keys`, which has the key `password`, at `/content`.
fn reader(rig: &NodeRig<'_>, spec: &Value) -> CreatedPod {
    rig.secret("keys", &[("password", "first")]);
    let csi = json!({
        "readOnly": true,
        "nodePublishSecretRef": { "name": "keys" },
        "volumeAttributes": { "content/motd": "hello" },
    });
    rig.run("reader", &[rig.inline("content", csi)], spec)
}

fn end(rig: &NodeRig<'_>, pod: &CreatedPod) {
    rig.delete(pod);
    rig.wait_until_cleaned_up(pod, &["content"]);
    assert!(!rig.driver.log().contains("first"), "a secret is in the driver's log");
}

#[test]
#[ignore = "full tier"]
fn a_pod_reads_its_secret_and_cannot_write_to_it() {
    let Some(rig) = shared().and_then(NodeRig::new) else { return };
    let pod = reader(&rig, &json!({}));
    assert_eq!(rig.exec(&pod, "cd /content; cat motd password"), "hellofirst");
    let output = rig.exec(&pod, "echo mine >/content/password; echo mine >/content/another");
    assert_eq!(output.matches("Read-only file system").count(), 2, "{output}");
    end(&rig, &pod);
}

#[test]
#[ignore = "full tier"]
fn a_changed_secret_reaches_the_running_pod() {
    let Some(rig) = shared().and_then(NodeRig::new) else { return };
    let pod = reader(&rig, &json!({}));
    assert_eq!(rig.exec(&pod, "cat /content/password"), "first");
    rig.secret("keys", &[("password", "second"), ("token", "new")]);
    rig.cluster.wait_for("the secret's new value in the pod", || {
        (rig.exec(&pod, "cat /content/password") == "second").then_some(())
    });
    assert_eq!(rig.exec(&pod, "cat /content/token /content/motd"), "newhello");
    end(&rig, &pod);
}

#[test]
#[ignore = "full tier"]
fn content_belongs_to_the_group_of_the_pod() {
    let Some(rig) = shared().and_then(NodeRig::new) else { return };
    let context = json!({ "runAsUser": 1234, "runAsGroup": 1234, "fsGroup": 4321 });
    let pod = reader(&rig, &json!({ "securityContext": context }));
    assert_eq!(
        rig.exec(&pod, "cat /content/password; stat -L -c ' %g' /content/password"),
        "first 4321\n"
    );
    end(&rig, &pod);
}

/// A pod without readOnly passes the API server, webhooks, kubelet and driver, and its container
/// cannot write.
#[test]
#[ignore = "full tier"]
fn the_webhooks_make_a_pods_content_read_only() {
    let Some(rig) = shared().and_then(NodeRig::new) else { return };
    let webhooks = Webhooks::start(rig.cluster, rig.driver_name.clone(), &With::default());
    webhooks.configure(rig.cluster, false, &rig.namespace);
    let csi = json!({ "volumeAttributes": { "content/motd": "hello" } });
    let volume = rig.inline("content", csi);
    rig.cluster.wait_for("the webhooks", || {
        let pod = rig.dry_run("tried", std::slice::from_ref(&volume)).ok()?;
        (pod.spec?.volumes?[0].csi.as_ref()?.read_only == Some(true)).then_some(())
    });
    let pod = rig.run("reader", &[volume], &json!({}));
    let output = rig.exec(&pod, "cat /content/motd; echo mine >/content/motd");
    assert!(output.starts_with("hello") && output.contains("Read-only file system"), "{output}");
    let large = json!({ "volumeAttributes": { "size": "much" } });
    let refused = rig.dry_run("refused", &[rig.inline("content", large)]).unwrap_err();
    assert!(refused.to_string().contains("volumeAttributes[size]"), "{refused}");
    end(&rig, &pod);
}
