//! deploy/components/cert-manager: its effect on each role. cert-manager itself does not run.

use support::cluster::shared;

use super::{kustomized, overlay, pods};

#[test]
fn with_cert_manager_each_role_serves_its_certificate() {
    let Some(cluster) = shared() else { return };
    for (directory, component, container, trusting) in [
        ("base", "metadata", "metadata", &[][..]),
        (
            "session-manager",
            "session-manager",
            "session-manager",
            &["ValidatingWebhookConfiguration"],
        ),
        ("aggregated-api", "aggregated-api", "aggregated-api", &["APIService"]),
        (
            "admission",
            "admission",
            "admission",
            &["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"],
        ),
    ] {
        let with = overlay(cluster, directory, &format!("cert-manager/{component}"));
        let all = kustomized(cluster, &with);
        let certificate = pods::only(&all, "Certificate");
        let metadata = &certificate["metadata"];
        let mut found = all.iter().filter_map(|object| {
            let containers = object["spec"]["template"]["spec"]["containers"].as_array()?;
            let found = containers.iter().find(|one| one["name"] == container)?;
            Some((found, object["spec"]["template"]["spec"]["volumes"].as_array()?))
        });
        let (container, volumes) = found.next().unwrap_or_else(|| panic!("no {container}"));
        pods::are_known(component, container);
        let arguments = container["args"].to_string();
        for (flag, has) in [
            ("--tls-cert=/tls/tls.crt", true),
            ("--tls-key=/tls/tls.key", true),
            ("--self-signed", false),
        ] {
            assert_eq!(arguments.contains(flag), has, "{component}: {flag}");
        }
        let volume = volumes.iter().find(|volume| volume["name"] == "certificate").unwrap();
        assert_eq!(volume["secret"]["secretName"], certificate["spec"]["secretName"]);
        // The certificate names the host that clients call.
        let host = certificate["spec"]["dnsNames"][0].as_str().unwrap();
        let namespace = metadata["namespace"].as_str().unwrap();
        let called = arguments.replace("$(POD_NAMESPACE)", namespace);
        assert!(called.contains(&format!("--service-address={host}:")), "{component}: {host}");
        let source = format!("{namespace}/{}", metadata["name"].as_str().unwrap());
        for kind in trusting {
            let annotations = &pods::only(&all, kind)["metadata"]["annotations"];
            assert_eq!(annotations["cert-manager.io/inject-ca-from"], *source, "{component}");
        }
    }
}
