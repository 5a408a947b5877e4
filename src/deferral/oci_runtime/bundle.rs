//! A container's config.json (OCI runtime specification), as far as it concerns volumes.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::MsFlags;
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

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
        let Strict(read) = serde_json::from_slice(&bytes)?;
        ensure!(read.is_object(), "is not a JSON object");
        check_keys("", &read, &["mounts", "linux", "annotations", "hooks", "root"])?;
        check_keys("hooks", &read["hooks"], &["createRuntime"])?;
        check_keys("linux", &read["linux"], &["namespaces", "rootfsPropagation", "mountLabel"])?;
        let spec = Self(read);
        match &spec.0["mounts"] {
            Value::Null => {}
            Value::Array(mounts) => {
                for mount in mounts {
                    ensure!(mount.is_object(), "mounts: contains something else than objects");
                    check_keys("mounts", mount, &["type", "source", "destination", "options"])?;
                    let text = |key: &str| mount[key].is_null() || mount[key].is_string();
                    let options = &mount["options"];
                    let are_texts = options.as_array().map(|all| all.iter().all(Value::is_string));
                    ensure!(
                        ["type", "source", "destination"].into_iter().all(text)
                            && (options.is_null() || are_texts == Some(true)),
                        "mounts: contains a value of the wrong type"
                    );
                }
            }
            _ => bail!("mounts: is not an array"),
        }
        Ok(Some(spec))
    }

    pub fn to_json(&self) -> Vec<u8> {
        // All keys are strings, so this cannot fail.
        serde_json::to_vec(&self.0).unwrap_or_default()
    }

    /// The bind mounts. Relative sources are below `bundle`.
    pub fn binds(&self, bundle: &Path) -> Vec<Bind> {
        let bind = |(index, mount): (usize, &Value)| {
            let is_bind = matches!(mount["type"].as_str(), Some("bind" | "rbind"))
                || options(mount).any(|option| matches!(option, "bind" | "rbind"));
            let source = bundle.join(mount["source"].as_str().filter(|source| !source.is_empty())?);
            is_bind.then_some(Bind { index, source })
        };
        self.mounts().iter().enumerate().filter_map(bind).collect()
    }

    pub fn set_source(&mut self, index: usize, source: &Path) {
        if let Some(mount) = self.0["mounts"].get_mut(index) {
            mount["source"] = source.to_string_lossy().into();
        }
    }

    /// The destination of a mount, normalized. `None`: it contains `..`.
    pub fn destination(&self, index: usize) -> Option<PathBuf> {
        let given = Path::new(self.mounts().get(index)?["destination"].as_str()?);
        let mut normal = PathBuf::from("/");
        for component in given.components() {
            match component {
                Component::Normal(name) => normal.push(name),
                Component::RootDir | Component::CurDir => {}
                Component::ParentDir | Component::Prefix(_) => return None,
            }
        }
        Some(normal)
    }

    /// The paths within a mount at which the container has other mounts.
    ///
    /// # Errors
    /// A destination contains `..`.
    pub fn mount_points_below(&self, index: usize) -> Result<Vec<PathBuf>> {
        let destination = |index| {
            self.destination(index)
                .with_context(|| format!("mounts[{index}]: has no plain destination"))
        };
        let own = destination(index)?;
        let mut below = Vec::new();
        for other in 0..self.mounts().len() {
            let other = destination(other)?;
            below.extend(other.strip_prefix(&own).ok().map(Path::to_owned));
        }
        below.retain(|path| !path.as_os_str().is_empty());
        Ok(below)
    }

    /// The flags of a bind mount, such as read-only.
    ///
    /// # Errors
    /// An option is not supported for a deferred volume.
    pub fn flags(&self, index: usize) -> Result<MsFlags> {
        let mut flags = MsFlags::empty();
        let Some(mount) = self.mounts().get(index) else { return Ok(flags) };
        for option in options(mount) {
            flags |= match option {
                "ro" | "rro" => MsFlags::MS_RDONLY,
                "nosuid" | "rnosuid" => MsFlags::MS_NOSUID,
                "nodev" | "rnodev" => MsFlags::MS_NODEV,
                "noexec" | "rnoexec" => MsFlags::MS_NOEXEC,
                "noatime" | "rnoatime" => MsFlags::MS_NOATIME,
                "nodiratime" | "rnodiratime" => MsFlags::MS_NODIRATIME,
                "bind" | "rbind" | "private" | "rprivate" | "slave" | "rslave" | "unbindable"
                | "runbindable" | "rw" | "suid" | "dev" | "exec" | "atime" | "diratime"
                | "relatime" | "norelatime" | "strictatime" | "nostrictatime" | "defaults" => {
                    MsFlags::empty()
                }
                other => bail!(
                    "the mount at {} has the option {other:?}, which is not supported for a deferred volume",
                    mount["destination"].as_str().unwrap_or_default()
                ),
            };
        }
        ensure!(
            mount["uidMappings"].is_null() && mount["gidMappings"].is_null(),
            "a deferred volume cannot be mounted with mapped ids"
        );
        Ok(flags)
    }

    /// Adds a hook that runs after the container's mounts were made, and before it gets its root.
    ///
    /// # Errors
    /// The hooks have an unknown form.
    pub fn add_hook(&mut self, program: &Path, arguments: &[String]) -> Result<()> {
        let program = program.to_str().context("the path of this program is not UTF-8")?;
        let hook = json!({
            "path": program, "args": arguments, "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
        });
        let hooks = &mut self.0["hooks"];
        if hooks.is_null() {
            *hooks = json!({});
        }
        let all = hooks.as_object_mut().context("hooks: is not an object")?;
        let all = all.entry("createRuntime").or_insert(Value::Null);
        if all.is_null() {
            *all = json!([]);
        }
        all.as_array_mut().context("hooks.createRuntime: is not an array")?.insert(0, hook);
        Ok(())
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

/// Refuses a key that some runtimes read as one of `known`, because they ignore case (Go's JSON
/// folds two characters outside ASCII, too).
fn check_keys(place: &str, object: &Value, known: &[&str]) -> Result<()> {
    let fold = |key: &str| key.to_lowercase().replace('\u{17f}', "s");
    for key in object.as_object().into_iter().flat_map(serde_json::Map::keys) {
        let other = known.iter().find(|known| **known != key && fold(known) == fold(key));
        if let Some(known) = other {
            bail!("{place}: the key {key:?} must be written {known:?}");
        }
    }
    Ok(())
}

/// JSON without duplicate keys, of which each runtime reads another one.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(StrictVisitor).map(Self)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(Strict(value)) = from.next_element()? {
            all.push(value);
        }
        Ok(Value::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut all = serde_json::Map::new();
        while let Some((key, Strict(value))) = from.next_entry::<String, _>()? {
            if all.contains_key(&key) {
                return Err(A::Error::custom(format!("the key {key:?} appears twice")));
            }
            all.insert(key, value);
        }
        Ok(Value::Object(all))
    }
}

fn options(mount: &Value) -> impl Iterator<Item = &str> {
    mount["options"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(mounts: Value) -> Spec {
        Spec(json!({"mounts": mounts, "linux": {"namespaces": [{"type": "mount"}]}}))
    }

    #[test]
    fn bind_mounts_are_recognized() {
        let mut spec = spec(json!([
            {"type": "proc", "source": "proc", "destination": "/proc"},
            {"type": "bind", "source": "/a", "destination": "/x"},
            {"source": "/b", "destination": "/y", "options": ["rbind", "ro"]},
            {"type": "bind", "source": "../relative", "destination": "/z"},
            {"type": "tmpfs", "source": "/c", "destination": "/w"},
        ]));
        let bind = |index, source: &str| Bind { index, source: source.into() };
        let mut expected = [bind(1, "/a"), bind(2, "/b"), bind(3, "/bundle/../relative")];
        assert_eq!(spec.binds(Path::new("/bundle")), expected);
        spec.set_source(2, Path::new("/n"));
        expected[1] = bind(2, "/n");
        assert_eq!(spec.binds(Path::new("/bundle")), expected);
    }

    #[test]
    fn a_config_that_runtimes_read_differently_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("config.json");
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            Spec::read(&file)
        };
        for text in [
            r#"{"Mounts": []}"#,
            r#"{"mount\u017f": []}"#,
            r#"{"mounts": [{"Type": "bind"}]}"#,
            r#"{"mounts": [{"source": "/a", "source": "/b"}]}"#,
            r#"{"mounts": [], "mounts": []}"#,
            r#"{"mounts": {}}"#,
            r#"{"mounts": [1]}"#,
            r#"{"mounts": [{"source": 1}]}"#,
            r#"{"mounts": [{"options": "bind"}]}"#,
            r#"{"mounts": [{"options": [1]}]}"#,
            r#"{"linux": {"MountLabel": "x"}}"#,
        ] {
            assert!(read(text).is_err(), "{text}");
        }
        for text in ["{}", r#"{"mounts": null, "process": {"Env": 1.5, "env": [null, -1]}}"#] {
            assert!(read(text).unwrap().is_some(), "{text}");
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
