//! A container's config.json (OCI runtime specification), as far as volumes have to do with it.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

/// More than any config.json has.
const MAX_BYTES: u64 = 16 << 20;

/// By which annotations callers tell the pod that a container belongs to: containerd's, and CRI-O's.
const SANDBOX: [&str; 2] = ["io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"];

#[derive(Debug, Clone, PartialEq)]
pub struct Spec(Value);

/// A bind mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    /// Which of the mounts it is.
    pub index: usize,
    pub source: PathBuf,
}

impl Spec {
    /// None where there is no such file.
    ///
    /// # Errors
    /// It cannot be read, or is no config.json.
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
        // Keys are strings: nothing in it can fail to be written.
        serde_json::to_vec(&self.0).unwrap_or_default()
    }

    /// Its bind mounts with an absolute source. (Others are below the bundle, or none.)
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

    /// The pod, or the container itself where it is of none.
    pub fn sandbox(&self, container: &str) -> String {
        let annotations = &self.0["annotations"];
        let named = SANDBOX.iter().find_map(|name| annotations[*name].as_str());
        named.unwrap_or(container).to_owned()
    }

    /// The label that SELinux is to give to all of a mount. None: none.
    pub fn mount_label(&self) -> Option<&str> {
        self.0["linux"]["mountLabel"].as_str().filter(|label| !label.is_empty())
    }

    /// That a container may have a volume that nobody but it may see mounted.
    ///
    /// # Errors
    /// It may not, and why.
    pub fn check(&self) -> Result<()> {
        for mount in self.mounts() {
            let shared = options(mount).find(|option| matches!(*option, "shared" | "rshared"));
            if let Some(option) = shared {
                bail!(
                    "the mount at {} is {option} (mountPropagation: Bidirectional), which a container with a volume whose mount is deferred cannot have: nothing of its mounts may reach the host",
                    mount["destination"].as_str().unwrap_or_default()
                );
            }
        }
        let linux = &self.0["linux"];
        let propagation = linux["rootfsPropagation"].as_str().unwrap_or_default();
        ensure!(
            !matches!(propagation, "shared" | "rshared"),
            "linux.rootfsPropagation is {propagation}, which a container with a volume whose mount is deferred cannot have"
        );
        let namespaces = linux["namespaces"].as_array().map_or(&[][..], Vec::as_slice);
        let namespace = |kind: &str| namespaces.iter().find(|namespace| namespace["type"] == kind);
        ensure!(
            namespace("user").is_none(),
            "a container in a user namespace (hostUsers: false) cannot have a volume whose mount is deferred"
        );
        let Some(mount) = namespace("mount") else {
            bail!(
                "a container without a mount namespace of its own cannot have a volume whose mount is deferred"
            )
        };
        ensure!(
            mount["path"].as_str().is_none_or(str::is_empty),
            "a container that joins a mount namespace cannot have a volume whose mount is deferred"
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
    fn bind_mounts_are_told_from_others() {
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
    fn what_would_show_a_volume_to_others_is_refused() {
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
    fn containers_of_a_pod_are_told_by_their_annotations() {
        let of = |annotations: Value| Spec(json!({"annotations": annotations})).sandbox("own");
        assert_eq!(of(json!({"io.kubernetes.cri.sandbox-id": "pod"})), "pod");
        assert_eq!(of(json!({"io.kubernetes.cri-o.SandboxID": "pod"})), "pod");
        assert_eq!(of(json!({})), "own");
    }
}
