//! The configuration file. There are no flags, because the command line is the next runtime's.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::crust;

const FILE: &str = "/etc/csi-loopback/oci-runtime.yaml";
/// Environment variable that names another file, which must exist.
const VARIABLE: &str = "CSI_LOOPBACK_RUNC_CONFIG";
/// Maximum bytes of the file.
const MAX_BYTES: u64 = 64 << 10;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Config {
    /// The next runtime: a path, or a name to search in PATH.
    pub runtime: PathBuf,
    /// The directory of crust_ops' entries.
    pub crust_dir: PathBuf,
    /// A directory for this program's mounts. It is empty on the host and in other containers.
    pub work_dir: PathBuf,
    /// kubelet's directory. A guarded target in it is a deferred volume, also without an entry.
    pub kubelet_dir: PathBuf,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            runtime: "runc".into(),
            crust_dir: crust::DEFAULT_DIRECTORY.into(),
            work_dir: "/run/csi-loopback-runc".into(),
            kubelet_dir: "/var/lib/kubelet".into(),
        }
    }
}

impl Config {
    pub fn read() -> Result<Self> {
        let named = std::env::var_os(VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from);
        let path = named.clone().unwrap_or_else(|| FILE.into());
        let file = match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && named.is_none() => {
                return Ok(Self::default());
            }
            opened => opened.with_context(|| format!("reading {}", path.display()))?,
        };
        let mut text = String::new();
        file.take(MAX_BYTES + 1)
            .read_to_string(&mut text)
            .with_context(|| format!("reading {}", path.display()))?;
        ensure!(
            text.len() as u64 <= MAX_BYTES,
            "{}: has more than {MAX_BYTES} bytes",
            path.display()
        );
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Self> {
        let options = serde_saphyr::options! {
            budget: serde_saphyr::budget! {
                max_events: 1000,
                max_nodes: 1000,
                max_depth: 4,
                max_aliases: 0,
                max_anchors: 0,
                max_documents: 1,
            },
            strict_booleans: true,
            with_snippet: false,
        };
        let read: Option<Self> = serde_saphyr::from_str_with_options(text, options)
            .map_err(|error| anyhow::anyhow!("{error}"))?;
        let config = read.unwrap_or_default();
        ensure!(!config.runtime.as_os_str().is_empty(), "runtime: is required");
        for (key, path) in [
            ("crustDir", &config.crust_dir),
            ("workDir", &config.work_dir),
            ("kubeletDir", &config.kubelet_dir),
        ] {
            ensure!(path.is_absolute(), "{key}: must be an absolute path");
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_settings_have_their_defaults() {
        assert_eq!(Config::parse("").unwrap(), Config::default());
        let config = Config::parse("runtime: /usr/bin/crun\nworkDir: /w\n").unwrap();
        assert_eq!(config.runtime, PathBuf::from("/usr/bin/crun"));
        assert_eq!(config.work_dir, PathBuf::from("/w"));
        assert_eq!(config.crust_dir, Config::default().crust_dir);
    }

    #[test]
    fn invalid_settings_are_errors() {
        for bad in [
            "rumtime: runc",
            "runtime: ''",
            "crustDir: here",
            "- runc",
            "runtime: {}",
            "a: &b [*b]",
        ] {
            assert!(Config::parse(bad).is_err(), "{bad}");
        }
    }
}
