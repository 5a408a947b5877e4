//! A container's config.json (OCI runtime specification), as far as it concerns volumes.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

/// Maximum bytes of config.json.
const MAX_BYTES: u64 = 16 << 20;

/// Annotations that name the pod sandbox of a container: containerd's and CRI-O's.
const SANDBOX: [&str; 2] = ["io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"];

#[derive(Debug, Clone, PartialEq)]
pub struct Spec(Value);

/// A bind mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    /// Index in `mounts`.
    pub index: usize,
    pub source: PathBuf,
}

impl Spec {
    /// Reads config.json. `None`: the file does not exist.
    ///
    /// # Errors
    /// The file is unreadable or invalid.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
        ensure!(bytes.len() as u64 <= MAX_BYTES, "has more than {MAX_BYTES} bytes");
        let read: Value = serde_json::from_slice(&bytes)?;
        ensure!(read.is_object(), "is not a JSON object");
        Ok(Some(Self(read)))
    }

    pub fn to_json(&self) -> Vec<u8> {
        // All keys are strings, so this cannot fail.
        serde_json::to_vec(&self.0).unwrap_or_default()
    }

    /// The bind mounts with an absolute source. Other sources are below the bundle.
    pub fn binds(&self) -> Vec<Bind> {
        let bind = |(index, mount): (usize, &Value)| {
            let is_bind = mount["type"] == "bind"
                || options(mount).any(|option| matches!(option, "bind" | "rbind"));
            let source = PathBuf::from(mount["source"].as_str()?);
            (is_bind && source.is_absolute()).then_some(Bind { index, source })
        };
        self.mounts().iter().enumerate().filter_map(bind).collect()
    }

    pub fn set_source(&mut self, index: usize, source: &Path) {
        if let Some(mount) = self.0["mounts"].get_mut(index) {
            mount["source"] = source.to_string_lossy().into();
        }
    }

    /// The pod sandbox, or the container itself if it belongs to none.
    pub fn sandbox(&self, container: &str) -> String {
        let annotations = &self.0["annotations"];
        let named = SANDBOX.iter().find_map(|name| annotations[*name].as_str());
        named.unwrap_or(container).to_owned()
    }

    /// The SELinux label of the mounts, if any.
    pub fn mount_label(&self) -> Option<&str> {
        self.0["linux"]["mountLabel"].as_str().filter(|label| !label.is_empty())
    }

    /// Checks that a container may have a volume whose mount no other process may see.
    ///
    /// # Errors
    /// The container would share its mounts.
    pub fn check(&self) -> Result<()> {
        for mount in self.mounts() {
            let shared = options(mount).find(|option| matches!(*option, "shared" | "rshared"));
            if let Some(option) = shared {
                bail!(
                    "the mount at {} is {option} (mountPropagation: Bidirectional), which is not allowed for a container with a deferred volume: its mounts must not propagate to the host",
                    mount["destination"].as_str().unwrap_or_default()
                );
            }
        }
        let linux = &self.0["linux"];
        let propagation = linux["rootfsPropagation"].as_str().unwrap_or_default();
        ensure!(
            !matches!(propagation, "shared" | "rshared"),
            "linux.rootfsPropagation is {propagation}, which is not allowed for a container with a deferred volume"
        );
        let namespaces = linux["namespaces"].as_array().map_or(&[][..], Vec::as_slice);
        let namespace = |kind: &str| namespaces.iter().find(|namespace| namespace["type"] == kind);
        ensure!(
            namespace("user").is_none(),
            "a container in a user namespace (hostUsers: false) cannot have a deferred volume"
        );
        let Some(mount) = namespace("mount") else {
            bail!("a container without its own mount namespace cannot have a deferred volume")
        };
        ensure!(
            mount["path"].as_str().is_none_or(str::is_empty),
            "a container that joins a mount namespace cannot have a deferred volume"
        );
        Ok(())
    }

    fn mounts(&self) -> &[Value] {
        self.0["mounts"].as_array().map_or(&[], Vec::as_slice)
    }
}

fn options(mount: &Value) -> impl Iterator<Item = &str> {
    mount["options"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec(mounts: Value) -> Spec {
        Spec(json!({"mounts": mounts, "linux": {"namespaces": [{"type": "mount"}]}}))
    }

    #[test]
    fn bind_mounts_are_recognized() {
        let mut spec = spec(json!([
            {"type": "proc", "source": "proc", "destination": "/proc"},
            {"type": "bind", "source": "/a", "destination": "/x"},
            {"source": "/b", "destination": "/y", "options": ["rbind", "ro"]},
            {"type": "bind", "source": "relative", "destination": "/z"},
            {"type": "tmpfs", "source": "/c", "destination": "/w", "options": "bind"},
        ]));
        let bind = |index, source: &str| Bind { index, source: source.into() };
        assert_eq!(spec.binds(), [bind(1, "/a"), bind(2, "/b")]);
        spec.set_source(2, Path::new("/n"));
        assert_eq!(spec.binds(), [bind(1, "/a"), bind(2, "/n")]);
    }

    #[test]
    fn shared_mounts_are_refused() {
        let shared = json!([{"type": "bind", "source": "/a", "destination": "/x", "options": ["rbind", "rshared"]}]);
        assert!(spec(shared).check().unwrap_err().to_string().contains("/x"));
        assert!(spec(json!([])).check().is_ok());
        for linux in [
            json!({}),
            json!({"namespaces": []}),
            json!({"namespaces": [{"type": "mount", "path": "/proc/1/ns/mnt"}]}),
            json!({"namespaces": [{"type": "mount"}, {"type": "user"}]}),
            json!({"namespaces": [{"type": "mount"}], "rootfsPropagation": "rshared"}),
        ] {
            assert!(Spec(json!({"linux": linux})).check().is_err(), "{linux}");
        }
    }

    #[test]
    fn annotations_identify_the_pod_of_a_container() {
        let of = |annotations: Value| Spec(json!({"annotations": annotations})).sandbox("own");
        assert_eq!(of(json!({"io.kubernetes.cri.sandbox-id": "pod"})), "pod");
        assert_eq!(of(json!({"io.kubernetes.cri-o.SandboxID": "pod"})), "pod");
        assert_eq!(of(json!({})), "own");
    }
}
