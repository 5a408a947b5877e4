//! Writes the custom resource definitions to a directory like deploy, generated from the Rust
//! types. hack/crds.sh runs it, and tests/no_root/deploy_crds.rs checks that the files are up to
//! date.

use std::collections::BTreeMap;
use std::path::Path;
use std::{env, fs, io};

use csi_loopback::kubernetes::driver_discovery::DriverDiscovery;
use csi_loopback::kubernetes::metadata_service::SnapshotMetadataService;
use csi_loopback::kubernetes::session::{
    SnapshotServiceConfiguration, SnapshotSessionData, SnapshotSessionRequest,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::Value;

const HEAD: &str = "# Generated from src/kubernetes by hack/crds.sh; changes made here are lost.\n";

/// All definitions. Add new types here.
fn definitions() -> Vec<CustomResourceDefinition> {
    vec![
        DriverDiscovery::crd(),
        SnapshotMetadataService::crd(),
        SnapshotServiceConfiguration::crd(),
        SnapshotSessionData::crd(),
        SnapshotSessionRequest::crd(),
    ]
}

/// Removes `nullable`, which is generated for each `Option`: an optional field may be absent, and
/// the API server drops an explicit null.
fn without_nullable(definition: &CustomResourceDefinition) -> CustomResourceDefinition {
    fn visit(schema: &mut Value) {
        match schema {
            Value::Object(fields) => {
                if fields.get("nullable") == Some(&Value::Bool(true)) {
                    fields.remove("nullable");
                    if let Some(Value::Array(values)) = fields.get_mut("enum") {
                        values.retain(|value| !value.is_null());
                    }
                }
                fields.values_mut().for_each(visit);
            }
            Value::Array(items) => items.iter_mut().for_each(visit),
            _ => {}
        }
    }
    let mut definition = serde_json::to_value(definition).expect("a definition is plain data");
    visit(&mut definition);
    serde_json::from_value(definition).expect("it is still a definition")
}

/// Definitions of another project, which its users may have installed.
const UPSTREAM: [&str; 1] = ["snapshotmetadataservices"];

/// The files: their paths in deploy/, with names in the style of Kubernetes, and their content.
pub fn files() -> BTreeMap<String, String> {
    definitions()
        .into_iter()
        .map(|definition| {
            let plural = &definition.spec.names.plural;
            let is_upstream = UPSTREAM.contains(&plural.as_str());
            let directory = if is_upstream { "crds-upstream" } else { "crds" };
            let name = format!("{directory}/{}_{plural}.yaml", definition.spec.group);
            let yaml = serde_saphyr::to_string(&without_nullable(&definition))
                .expect("a definition is plain data");
            (name, format!("{HEAD}{yaml}"))
        })
        .collect()
}

fn main() -> io::Result<()> {
    let directory = env::args().nth(1).ok_or_else(|| io::Error::other("usage: crds DIRECTORY"))?;
    for (name, text) in files() {
        let file = Path::new(&directory).join(name);
        fs::create_dir_all(file.parent().expect("a file in a directory"))?;
        fs::write(file, text)?;
    }
    Ok(())
}
