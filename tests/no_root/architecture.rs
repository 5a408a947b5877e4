//! Dependencies between the parts of `src/` point one way (docs/design/architecture.md). Between
//! the members of the workspace the compiler checks it, from their manifests; these tests check the
//! manifests. Within a member, the text is searched.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;
use std::sync::LazyLock;

use csi_loopback::telemetry::logs;
use serde_json::Value;

use super::tree::{files, read, root};

/// Members with roles or commands, which communicate only over sockets.
const ROLES: [&str; 5] = ["admission", "cbt", "commands", "deferral", "driver"];

/// Modules of members, and the other modules of the same member that each may use.
const WITHIN: [(&str, &str, &[&str]); 11] = [
    ("cbt", "sidecar", &[]),
    ("cbt", "session_manager", &[]),
    ("cbt", "aggregated_api", &[]),
    ("commands", "client", &[]),
    ("commands", "backup", &["client"]),
    ("commands", "conformance", &["client"]),
    ("deferral", "crust", &[]),
    ("deferral", "runtime_ops", &["crust"]),
    ("deferral", "oci_runtime", &["crust"]),
    ("deferral", "node_proxy", &["crust"]),
    ("driver", "freeze_guard", &[]),
];

/// What `cargo metadata` prints.
static METADATA: LazyLock<Value> = LazyLock::new(|| {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut command = Command::new(cargo);
    command.args(["metadata", "--format-version=1", "--offline", "--locked", "--filter-platform"]);
    command.arg(format!("{}-unknown-linux-gnu", std::env::consts::ARCH));
    let output = command.current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
});

fn list<'v>(value: &'v Value, key: &str) -> &'v [Value] {
    value[key].as_array().unwrap()
}

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().unwrap()
}

/// The member in a directory of `src/`.
fn member(package: &Value) -> Option<&str> {
    let path = text(package, "manifest_path").strip_suffix("/Cargo.toml")?;
    path.strip_prefix(&format!("{}/src/", root().display()))
}

/// The packages that a package is built from, without those of its tests.
fn built_from(name: &str) -> BTreeSet<&str> {
    let names: BTreeMap<&str, &str> = list(&METADATA, "packages")
        .iter()
        .map(|one| (text(one, "id"), text(one, "name")))
        .collect();
    let nodes: BTreeMap<&str, &Value> =
        list(&METADATA["resolve"], "nodes").iter().map(|one| (text(one, "id"), one)).collect();
    let start = names.iter().find(|(_, of)| **of == name).unwrap().0;
    let (mut found, mut next) = (BTreeSet::new(), vec![*start]);
    while let Some(id) = next.pop() {
        for used in list(nodes[id], "deps") {
            let is_built = list(used, "dep_kinds").iter().any(|kind| kind["kind"] != "dev");
            if is_built && found.insert(text(used, "pkg")) {
                next.push(text(used, "pkg"));
            }
        }
    }
    found.into_iter().map(|id| names[id]).collect()
}

/// The other members that each member's manifest names, also for its tests.
fn arrows() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    let packages = list(&METADATA, "packages").iter();
    let members = packages.filter_map(|package| Some((member(package)?, package)));
    let used = |package: &'static Value| {
        let used = list(package, "dependencies").iter().map(|used| text(used, "name"));
        used.filter_map(|name| name.strip_prefix("csi-loopback-")).collect()
    };
    members.map(|(name, package)| (name, used(package))).collect()
}

#[test]
fn the_page_shows_which_member_uses_which() {
    let page = read("docs/design/architecture.md");
    let rows = page.lines().skip_while(|line| *line != "| member | uses | owns |").skip(2);
    let shown: BTreeMap<&str, BTreeSet<&str>> = rows
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<_> = line.split('|').collect();
            (cells[1].trim_matches([' ', '`']), cells[2].split('`').skip(1).step_by(2).collect())
        })
        .collect();
    assert_eq!(shown, arrows());
}

#[test]
fn no_member_with_roles_uses_another() {
    for (member, used) in arrows() {
        for role in ROLES {
            assert!(!used.contains(role), "{member} uses {role}");
        }
    }
}

#[test]
fn storage_is_built_without_async_grpc_and_kubernetes() {
    let crates = built_from("csi-loopback-storage");
    assert!(crates.contains("redb") && crates.contains("csi-loopback-common"), "{crates:?}");
    for one in ["tokio", "futures-util", "hyper", "tonic", "kube", "kube-core", "k8s-openapi"] {
        assert!(!crates.contains(one), "{one}");
    }
    let crates = built_from("csi-loopback-kubernetes");
    assert!(crates.contains("kube") && !crates.contains("tonic"), "tonic");
}

/// Below info, libraries may log secrets (telemetry/logs.rs).
#[test]
fn only_packages_in_src_may_log_below_info() {
    let arrows = arrows();
    let members: BTreeSet<&str> = arrows.keys().copied().collect();
    assert_eq!(BTreeSet::from(logs::MEMBERS), members);
    for package in list(&METADATA, "packages") {
        let is_own = member(package).is_some() || text(package, "name") == "csi-loopback";
        for target in list(package, "targets") {
            let kinds = list(target, "kind");
            if kinds.iter().any(|kind| kind == "lib" || kind == "proc-macro") {
                let name = text(target, "name").replace('-', "_");
                assert_eq!(logs::is_own(&name), is_own, "{name}");
            }
        }
    }
}

/// The other modules of a member that the module uses, each with a file that does.
fn used_by(member: &str, module: &str) -> BTreeSet<(String, String)> {
    let mut used = BTreeSet::new();
    let mut paths = files("src", "rs");
    let directory = root().join("src").join(member);
    let (directory, file) = (directory.join(module), directory.join(format!("{module}.rs")));
    paths.retain(|path| path.starts_with(&directory) || path == &file);
    assert!(!paths.is_empty(), "no module {module}");
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        for part in lines.flat_map(|line| line.split("crate::").skip(1)) {
            let end = part.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
            let name = &part[..end.unwrap_or(part.len())];
            if name != module {
                let shown = path.strip_prefix(root()).unwrap().display().to_string();
                used.insert((name.to_owned(), shown));
            }
        }
    }
    used
}

#[test]
fn no_role_of_a_member_uses_another() {
    for (member, module, allowed) in WITHIN {
        for (used, file) in used_by(member, module) {
            assert!(allowed.contains(&used.as_str()), "{file}: {module} uses {used}");
        }
    }
}

/// Parts that use less than their member may: conformance judges any driver, and therefore knows
/// none; what two processes hand over as files must not depend on either.
const LESS: [(&str, &[&str]); 2] = [
    (
        "src/commands/conformance",
        &["common::quantity", "grpc", "kubernetes", "telemetry::on_demand"],
    ),
    ("src/deferral/crust", &["common::fail_point", "common::text"]),
];

#[test]
fn some_parts_use_less_than_their_member() {
    let arrows = arrows();
    for (part, allowed) in LESS {
        let paths = files(part, "rs");
        assert!(!paths.is_empty(), "no part {part}");
        for path in paths {
            let text = fs::read_to_string(&path).unwrap();
            let lines = text.lines().map(str::trim).filter(|line| !line.starts_with("//"));
            let is_path = |letter: char| letter.is_alphanumeric() || "_:".contains(letter);
            for used in lines.flat_map(|line| line.split(|letter| !is_path(letter))) {
                let is_of_member =
                    used.split_once("::").is_some_and(|(first, _)| arrows.contains_key(first));
                let is_allowed = allowed.iter().any(|one| used.starts_with(&format!("{one}::")));
                let is_allowed = is_allowed || allowed.contains(&used);
                assert!(!is_of_member || is_allowed, "{}: uses {used}", path.display());
            }
        }
    }
}
