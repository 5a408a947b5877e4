//! Dependencies between the modules of `src/` point one way (docs/design/architecture.md).

use std::collections::BTreeSet;
use std::fs;

use super::tree::{files, root};

/// What the lower modules may use.
const LOWER: [(&str, &[&str]); 5] = [
    ("backend", &["fail_point", "ids"]),
    ("telemetry", &["fail_point"]),
    ("grpc", &["fail_point", "proto", "telemetry"]),
    ("kubernetes", &["grpc", "ids", "quantity", "telemetry"]),
    ("crust", &["fail_point", "grpc"]),
];

/// Roles communicate only over sockets.
const ROLES: [&str; 9] = [
    "admission",
    "aggregated_api",
    "driver",
    "freeze_guard",
    "node_proxy",
    "oci_runtime",
    "runtime_ops",
    "session_manager",
    "sidecar",
];

/// The other modules that a module uses, each with a file that does.
fn used_by(module: &str) -> BTreeSet<(String, String)> {
    let mut used = BTreeSet::new();
    let mut paths = files("src", "rs");
    let (directory, file) = (root().join("src").join(module), format!("{module}.rs"));
    paths.retain(|path| path.starts_with(&directory) || path == &root().join("src").join(&file));
    assert!(!paths.is_empty(), "no module {module}");
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        for part in lines.flat_map(|line| line.split("crate::").skip(1)) {
            let end = part.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
            let name = &part[..end.unwrap_or(part.len())];
            let is_module = name.starts_with(|letter: char| letter.is_lowercase());
            if is_module && name != module {
                let shown = path.strip_prefix(root()).unwrap().display().to_string();
                used.insert((name.to_owned(), shown));
            }
        }
    }
    used
}

#[test]
fn lower_modules_use_no_higher_ones() {
    for (module, allowed) in LOWER {
        for (used, file) in used_by(module) {
            assert!(allowed.contains(&used.as_str()), "{file}: {module} uses {used}");
        }
    }
}

#[test]
fn no_role_uses_another() {
    for role in ROLES {
        for (used, file) in used_by(role) {
            assert!(!ROLES.contains(&used.as_str()), "{file}: {role} uses {used}");
        }
    }
}
