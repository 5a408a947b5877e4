//! The objects of snapshot sessions.

use support::cluster::shared;

use csi_loopback::kubernetes::session::{
    SessionState, SnapshotServiceConfiguration, SnapshotSessionData, SnapshotSessionRequest,
};
use kube::Api;
use kube::api::{ApiResource, DynamicObject, PostParams};
use serde_json::{Value, json};
use support::cluster::Cluster;
use support::cluster::programs::stdout_of;

use super::{SOON, explains, is_error, refused, table, verdict};

/// A text with the length of a token.
const TOKEN: &str = "abcdefghijklmnopqrstuvwxyz234567abcdefghijklmnopqrst";

fn spec(snapshots: &[&str]) -> Value {
    json!({ "spec": { "snapshots": snapshots } })
}

fn data_object(namespace: &str, token: &str) -> Value {
    json!({
        "metadata": { "name": token, "namespace": namespace },
        "spec": {
            "driver": "d.example",
            "request": { "namespace": "demo", "name": "backup", "uid": "u-1" },
            "snapshots": [{ "namespace": "demo", "name": "monday", "uid": "u-2", "handle": "h" }],
            "expirationTime": SOON,
        },
    })
}

fn configuration_object() -> Value {
    json!({
        "metadata": { "name": "d.example" },
        "spec": { "address": "metadata.csi.svc:6443", "caCert": "YQ==", "driverNamespace": "csi" },
    })
}

fn ready() -> Value {
    json!({
        "state": "Ready", "address": "a:1", "caCert": "YQ==", "driver": "d.example",
        "sessionToken": TOKEN, "expirationTime": SOON,
    })
}

/// The API of requests in a separate namespace.
fn requests(cluster: &Cluster) -> Api<SnapshotSessionRequest> {
    cluster.api_in(&cluster.namespace("definitions"))
}

fn make(
    cluster: &Cluster,
    requests: &Api<SnapshotSessionRequest>,
    name: &str,
) -> SnapshotSessionRequest {
    let object = json!({ "metadata": { "name": name }, "spec": { "snapshots": ["monday"] } });
    cluster.create(requests, object)
}

/// A status that must be refused; null removes a field.
#[track_caller]
fn refused_status(
    cluster: &Cluster,
    requests: &Api<SnapshotSessionRequest>,
    name: &str,
    status: &Value,
    words: &str,
) {
    let patch = json!({ "status": status });
    is_error(cluster.merge_at_status(requests, name, &patch), status, words);
}

#[test]
fn a_request_names_1_to_64_snapshots_each_once() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("definitions");
    let verdict = |object| verdict::<SnapshotSessionRequest>(cluster, Some(&namespace), object);
    let refused = |object, named: &str| {
        refused::<SnapshotSessionRequest>(cluster, Some(&namespace), object, named);
    };
    let many: Vec<String> = (0..65).map(|index| format!("s{index}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let long = "s".repeat(253);
    for good in [&["monday"][..], &["a.b-c.1", "0"], &[&long], &many[..64]] {
        assert_eq!(verdict(spec(good)), Ok(()), "{good:?}");
    }
    refused(spec(&[]), "spec.snapshots");
    refused(spec(&many), "must have at most 64 items");
    let twice = json!({ "snapshots": ["monday", "tuesday", "monday"] });
    let twice = SnapshotSessionRequest::new("x", serde_json::from_value(twice).unwrap());
    let requests: Api<SnapshotSessionRequest> = cluster.api_in(&namespace);
    let answer = cluster.block_on(requests.create(&PostParams::default(), &twice));
    is_error(answer, &json!("twice"), "spec.snapshots[2]: Duplicate value");
    let too_long = "s".repeat(254);
    for bad in ["", "Monday", "mon_day", "-monday", "monday-", "mon/day", "a..b", &too_long] {
        refused(spec(&[bad]), "spec.snapshots[0]");
    }
    refused(json!({}), "spec");
    refused(json!({ "spec": {} }), "snapshots");
    refused(json!({ "spec": { "snapshots": ["monday"], "snapshot": "x" } }), "snapshot");
}

#[test]
fn a_lifetime_is_from_one_second_to_ten_years() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("definitions");
    let asking = |lifetime: Value| {
        let mut object = spec(&["monday"]);
        object["spec"]["lifetimeSeconds"] = lifetime;
        object
    };
    for good in [json!(1), json!(3600), json!(315_360_000)] {
        let error = verdict::<SnapshotSessionRequest>(cluster, Some(&namespace), asking(good));
        assert_eq!(error, Ok(()));
    }
    for bad in [json!(0), json!(-1), json!(315_360_001), json!(1.5), json!("1h")] {
        let kind = refused::<SnapshotSessionRequest>;
        kind(cluster, Some(&namespace), asking(bad), "spec.lifetimeSeconds");
    }
    // Null means absent.
    let requests: Api<SnapshotSessionRequest> = cluster.api_in(&namespace);
    let kind = ApiResource::erase::<SnapshotSessionRequest>(&());
    let any: Api<DynamicObject> = Api::namespaced_with(cluster.client(), &namespace, &kind);
    let mut object = DynamicObject::new("null", &kind);
    object.data = asking(Value::Null);
    cluster.block_on(any.create(&PostParams::default(), &object)).unwrap();
    let made = cluster.get(&requests, "null").unwrap();
    assert_eq!(made.spec.lifetime_seconds, None);
}

#[test]
fn the_spec_of_a_request_cannot_be_changed() {
    let Some(cluster) = shared() else { return };
    let requests = requests(cluster);
    make(cluster, &requests, "fixed");
    for change in [
        json!({ "snapshots": ["tuesday"] }),
        json!({ "snapshots": ["monday", "tuesday"] }),
        json!({ "lifetimeSeconds": 60 }),
    ] {
        let answer = cluster.try_merge(&requests, "fixed", &json!({ "spec": change }));
        is_error(answer, &change, "cannot be changed; create another");
    }
    let labels = json!({ "metadata": { "labels": { "any": "one" } } });
    cluster.merge(&requests, "fixed", &labels);
}

#[test]
fn a_creator_cannot_set_the_status_which_is_pending() {
    let Some(cluster) = shared() else { return };
    let requests = requests(cluster);
    let object = json!({
        "metadata": { "name": "forged" }, "spec": { "snapshots": ["monday"] }, "status": ready(),
    });
    let made = cluster.create(&requests, object);
    assert_eq!(made.status, None, "what the creator sends is dropped");
    assert_eq!(made.state(), SessionState::Pending);
    // Neither can a user who may update the request.
    let changed = cluster.merge(&requests, "forged", &json!({ "status": ready() }));
    assert_eq!((changed.status.as_ref(), changed.state()), (None, SessionState::Pending));

    // The manager can, through the subresource, which changes nothing else.
    let patch = json!({ "spec": { "snapshots": ["other"] }, "status": ready() });
    let written = cluster.merge_at_status(&requests, "forged", &patch).unwrap();
    assert_eq!(written.spec.snapshots, ["monday"]);
    assert_eq!(written.state(), SessionState::Ready);
    let error = cluster.merge(&requests, "forged", &json!({ "status": { "state": "Failed" } }));
    assert_eq!(error.state(), SessionState::Ready);
}

#[test]
fn ready_and_failed_are_final() {
    let Some(cluster) = shared() else { return };
    let requests = requests(cluster);
    let failed = json!({ "state": "Failed", "error": "no such snapshot" });
    for (name, last, others) in [
        ("ready", ready(), [json!("Pending"), json!("Failed"), Value::Null]),
        ("failed", failed, [json!("Pending"), json!("Ready"), Value::Null]),
    ] {
        make(cluster, &requests, name);
        cluster.merge_status(&requests, name, &json!({ "state": "Pending" }));
        cluster.merge_status(&requests, name, &last);
        for other in others {
            // With all fields that the other state requires, so that only the change is invalid.
            let status = match other.as_str() {
                Some("Ready") => {
                    let mut status = ready();
                    status["error"] = Value::Null;
                    status
                }
                Some("Failed") => {
                    json!({ "state": "Failed", "error": "x", "sessionToken": null })
                }
                _ => json!({ "state": other }),
            };
            refused_status(cluster, &requests, name, &status, "Ready and Failed are final");
        }
        // Nor by removing the whole status.
        refused_status(cluster, &requests, name, &Value::Null, "cannot be removed");
        let again = cluster.merge_status(&requests, name, &last);
        assert_ne!(again.state(), SessionState::Pending);
    }
    // Directly from no state to Failed.
    make(cluster, &requests, "at-once");
    let failed = json!({ "state": "Failed", "error": "no such snapshot" });
    cluster.merge_status(&requests, "at-once", &failed);
}

#[test]
fn the_token_of_a_session_cannot_be_changed() {
    let Some(cluster) = shared() else { return };
    let requests = requests(cluster);
    let other = TOKEN.replace('a', "z");
    let why = "the token of a session cannot be changed";
    make(cluster, &requests, "session");
    let chosen = json!({ "state": "Pending", "sessionToken": TOKEN });
    cluster.merge_status(&requests, "session", &chosen);
    for state in ["Pending", "Ready"] {
        if state == "Ready" {
            cluster.merge_status(&requests, "session", &ready());
        }
        let exchange = json!({ "sessionToken": other });
        refused_status(cluster, &requests, "session", &exchange, why);
        let removal = json!({ "sessionToken": null });
        refused_status(cluster, &requests, "session", &removal, why);
    }
    // A session that fails loses its token.
    make(cluster, &requests, "fails");
    cluster.merge_status(&requests, "fails", &chosen);
    let failed = json!({ "state": "Failed", "error": "x", "sessionToken": null });
    cluster.merge_status(&requests, "fails", &failed);
}

#[test]
fn ready_requires_all_fields_of_a_client() {
    let Some(cluster) = shared() else { return };
    let requests = requests(cluster);
    make(cluster, &requests, "session");
    for field in ["address", "caCert", "sessionToken", "driver", "expirationTime"] {
        let mut status = ready();
        status[field] = Value::Null;
        refused_status(cluster, &requests, "session", &status, "Ready needs address, caCert");
    }
    cluster.merge_status(&requests, "session", &ready());
}

#[test]
fn failed_requires_an_error_and_no_token() {
    let Some(cluster) = shared() else { return };
    let requests = requests(cluster);
    make(cluster, &requests, "session");
    let why = "Failed needs an error and has no sessionToken";
    refused_status(cluster, &requests, "session", &json!({ "state": "Failed" }), why);
    let with_token = json!({ "state": "Failed", "error": "x", "sessionToken": TOKEN });
    refused_status(cluster, &requests, "session", &with_token, why);
    let good = json!({ "state": "Failed", "error": "x", "driver": "d.example" });
    cluster.merge_status(&requests, "session", &good);
}

#[test]
fn states_and_condition_types_are_restricted() {
    let Some(cluster) = shared() else { return };
    let requests = requests(cluster);
    make(cluster, &requests, "session");
    for (field, bad) in [
        ("state", json!("Done")),
        ("state", json!("")),
        ("expirationTime", json!("tomorrow")),
        ("caCert", json!("no base64!")),
        ("caCert", json!("")),
        ("address", json!("h".repeat(262))),
        ("driver", json!("d".repeat(254))),
        ("sessionToken", json!("t".repeat(254))),
        ("error", json!("e".repeat(32_769))),
        ("conditions", json!([{ "type": "Ready" }])),
    ] {
        let status = json!({ field: bad });
        refused_status(cluster, &requests, "session", &status, &format!("status.{field}"));
    }
    let condition = json!({
        "type": "Ready", "status": "False", "reason": "SnapshotNotReady", "message": "",
        "lastTransitionTime": SOON, "observedGeneration": 1,
    });
    let twice = json!({ "conditions": [condition, condition] });
    refused_status(cluster, &requests, "session", &twice, "Duplicate value");
    for (field, bad) in [("status", "Perhaps"), ("reason", "not a word"), ("reason", "")] {
        let mut wrong = condition.clone();
        wrong[field] = json!(bad);
        let status = json!({ "conditions": [wrong] });
        refused_status(cluster, &requests, "session", &status, &format!("conditions[0].{field}"));
    }
    cluster.merge_status(&requests, "session", &json!({ "conditions": [condition] }));
}

#[test]
fn the_name_of_session_data_is_a_token() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("definitions");
    let with = |name: &str| {
        verdict::<SnapshotSessionData>(cluster, Some(&namespace), data_object(&namespace, name))
    };
    assert_eq!(with(TOKEN), Ok(()));
    assert_eq!(with(&"a".repeat(253)), Ok(()));
    for bad in ["session", &TOKEN[..51], &TOKEN.replace('f', "-"), &TOKEN.replace('f', ".")] {
        let error = with(bad).expect_err(bad);
        assert!(error.contains("the name is a token"), "{bad}: {error}");
    }
}

#[test]
fn session_data_has_all_fields_within_their_limits() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("definitions");
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut object = data_object(&namespace, TOKEN);
        change(&mut object["spec"]);
        object
    };
    let refused = |object, named: &str| {
        refused::<SnapshotSessionData>(cluster, Some(&namespace), object, named);
    };
    for field in ["driver", "request", "snapshots", "expirationTime"] {
        refused(changed(&|spec| drop(spec.as_object_mut().unwrap().remove(field))), field);
    }
    for field in ["namespace", "name", "uid", "handle"] {
        let without = changed(&|spec| {
            drop(spec["snapshots"][0].as_object_mut().unwrap().remove(field));
        });
        refused(without, &format!("spec.snapshots[0].{field}"));
        let empty = changed(&|spec| spec["snapshots"][0][field] = json!(""));
        refused(empty, &format!("spec.snapshots[0].{field}"));
    }
    for field in ["namespace", "name", "uid"] {
        let without = changed(&|spec| {
            drop(spec["request"].as_object_mut().unwrap().remove(field));
        });
        refused(without, &format!("spec.request.{field}"));
    }
    for (pointer, bad, named) in [
        ("/driver", json!(""), "spec.driver"),
        ("/driver", json!("d".repeat(254)), "spec.driver"),
        ("/expirationTime", json!("tomorrow"), "spec.expirationTime"),
        ("/snapshots", json!([]), "spec.snapshots"),
        ("/snapshots/0/namespace", json!("Demo"), "spec.snapshots[0].namespace"),
        ("/snapshots/0/namespace", json!("n".repeat(64)), "spec.snapshots[0].namespace"),
        ("/snapshots/0/name", json!("n".repeat(254)), "spec.snapshots[0].name"),
        ("/snapshots/0/handle", json!("h".repeat(1025)), "spec.snapshots[0].handle"),
        ("/request/namespace", json!("demo.x"), "spec.request.namespace"),
    ] {
        refused(changed(&|spec| *spec.pointer_mut(pointer).unwrap() = bad.clone()), named);
    }
    let snapshots = |count: usize| {
        changed(&|spec| {
            let one = spec["snapshots"][0].clone();
            spec["snapshots"] = vec![one; count].into();
            spec["snapshots"][0]["handle"] = json!("h".repeat(1024));
        })
    };
    refused(snapshots(65), "must have at most 64 items");
    let most = verdict::<SnapshotSessionData>(cluster, Some(&namespace), snapshots(64));
    assert_eq!(most, Ok(()));
}

#[test]
fn session_data_cannot_be_changed() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("definitions");
    let all: Api<SnapshotSessionData> = cluster.api_in(&namespace);
    cluster.create(&all, data_object(&namespace, TOKEN));
    let snapshot = json!({ "namespace": "demo", "name": "other", "uid": "u-3", "handle": "i" });
    for change in [
        json!({ "expirationTime": "2031-01-01T00:00:00Z" }),
        json!({ "driver": "other.example" }),
        json!({ "snapshots": [snapshot] }),
        json!({ "request": { "uid": "u-9" } }),
    ] {
        let answer = cluster.try_merge(&all, TOKEN, &json!({ "spec": change }));
        is_error(answer, &change, "cannot be changed");
    }
    cluster.delete(&all, TOKEN);
    cluster.wait_until_gone(&all, TOKEN);
}

#[test]
fn a_configuration_requires_address_and_ca() {
    let Some(cluster) = shared() else { return };
    let with = |field: &str, value: Value| {
        let mut object = configuration_object();
        object["spec"][field] = value;
        object
    };
    for (field, good, bad) in [
        ("address", json!("[fd00::1]:6443"), json!("https://metadata.csi.svc:6443")),
        ("address", json!("h:65535"), json!("h:65536")),
        ("address", json!("h:1"), json!("h")),
        ("caCert", json!("A".repeat(400_000)), json!("")),
        ("caCert", json!("YQ=="), json!("no base64!")),
        ("caCert", json!("YQ=="), json!("A".repeat(524_292))),
        ("driverNamespace", json!("csi-loopback"), json!("Csi")),
        ("driverNamespace", json!("n".repeat(63)), json!("n".repeat(64))),
        ("driverNamespace", json!("0"), json!("")),
        ("driverNamespace", json!("a-b"), json!("a.b")),
    ] {
        let error = verdict::<SnapshotServiceConfiguration>(cluster, None, with(field, good));
        assert_eq!(error, Ok(()), "{field}");
        let named = format!("spec.{field}");
        refused::<SnapshotServiceConfiguration>(cluster, None, with(field, bad), &named);
    }
    for field in ["address", "caCert", "driverNamespace"] {
        let mut without = configuration_object();
        without["spec"].as_object_mut().unwrap().remove(field);
        refused::<SnapshotServiceConfiguration>(cluster, None, without, field);
    }
}

#[test]
fn kubectl_shows_short_names_columns_and_fields() {
    let Some(cluster) = shared() else { return };
    let namespace = cluster.namespace("definitions");
    let requests: Api<SnapshotSessionRequest> = cluster.api_in(&namespace);
    make(cluster, &requests, "new");
    make(cluster, &requests, "session");
    cluster.merge_status(&requests, "session", &ready());
    make(cluster, &requests, "failed");
    let failed = json!({ "state": "Failed", "error": "no such snapshot" });
    cluster.merge_status(&requests, "failed", &failed);
    cluster
        .create(&cluster.api_in::<SnapshotSessionData>(&namespace), data_object(&namespace, TOKEN));
    // In a separate namespace, because other tests' dry runs see stored objects.
    let mut configuration = configuration_object();
    configuration["metadata"]["name"] = json!("shown.example");
    cluster.create(&cluster.api::<SnapshotServiceConfiguration>(), configuration);

    let rows = table(cluster, &["-n", &namespace, "ssr"]);
    assert_eq!(rows[0], ["NAME", "STATE", "DRIVER", "EXPIRES", "AGE"]);
    let row = |name: &str| rows.iter().find(|row| row[0] == name).unwrap();
    assert_eq!(row("session")[1..4], ["Ready", "d.example", SOON]);
    assert_eq!(row("failed")[1], "Failed");
    assert_eq!(row("new").len(), 2, "{:?}", row("new"));
    let wide =
        stdout_of(cluster.kubectl(&["get", "-n", &namespace, "ssr", "failed", "-o", "wide"]));
    assert!(wide.contains("ERROR") && wide.contains("no such snapshot"), "{wide}");
    assert!(!wide.contains(TOKEN), "{wide}");

    let rows = table(cluster, &["ssc", "shown.example"]);
    assert_eq!(rows[0], ["NAME", "ADDRESS", "NAMESPACE", "AGE"]);
    assert_eq!(rows[1][..3], ["shown.example", "metadata.csi.svc:6443", "csi"]);
    let rows = table(cluster, &["-n", &namespace, "ssd"]);
    assert_eq!(rows[0], ["NAME", "DRIVER", "REQUEST", "OF", "EXPIRES"]);
    assert_eq!(rows[1], [TOKEN, "d.example", "backup", "demo", SOON]);

    let fields = [
        ("ssr.spec.snapshots", "Names of 1 to 64 VolumeSnapshots in this namespace"),
        ("ssr.status.state", "Absent means Pending"),
        ("ssr.status.sessionToken", "Its holder has access to the session"),
        ("ssc.spec.driverNamespace", "Namespace of the driver"),
        ("ssd.spec.snapshots.handle", "CSI handle of the snapshot"),
    ];
    explains(cluster, &fields);
}
