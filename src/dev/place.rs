//! The directory of a run, and the files in it that clients read.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::json;

use crate::client::private_dir::PrivateDir;
use crate::grpc::Endpoint;
use crate::sidecar::standalone::{Started, StaticToken};

const PREFIX: &str = "csi-loopback-dev-";
/// The first line of a file of variables.
const HEADER: &str = "# Variables of csi-loopback dev\n";

/// The directory of a run.
#[derive(Debug)]
pub struct Place(PrivateDir);

impl Place {
    pub fn new() -> Result<Self> {
        PrivateDir::create(&std::env::temp_dir(), PREFIX).map(Self)
    }

    /// The directories of killed processes.
    pub fn abandoned() -> Vec<Self> {
        PrivateDir::abandoned(&std::env::temp_dir(), PREFIX).into_iter().map(Self).collect()
    }

    pub fn path(&self) -> &Path {
        &self.0.root
    }

    pub fn socket(&self) -> PathBuf {
        self.path().join("csi.sock")
    }

    pub fn endpoint(&self) -> Result<Endpoint> {
        let socket = self.socket();
        let text = socket.to_str().with_context(|| format!("{} is not UTF-8", socket.display()))?;
        text.parse().map_err(|error: String| anyhow!("TMPDIR: {error}"))
    }

    pub fn remove(self) -> Result<()> {
        fs::remove_dir_all(self.path()).with_context(|| format!("remove {}", self.path().display()))
    }

    /// Writes the files for clients, and returns what the command prints.
    pub fn describe(
        &self,
        started: &Started,
        namespaces: &[String],
        tokens: &[StaticToken],
    ) -> Result<Description> {
        let address = started.address;
        let namespace = namespaces.first().map_or("", String::as_str);
        let token = tokens.first().map_or("", StaticToken::reveal);
        let object = serde_saphyr::to_string(&started.object)?;
        let endpoint = self.endpoint()?;
        let ca = self.write("ca.crt", &started.ca)?;
        let token_file = self.write("token", token)?;
        let service = self.write("service.yaml", &object)?;
        let variables = [
            ("CSI_ENDPOINT", endpoint.to_string()),
            ("SNAPSHOT_METADATA_ADDRESS", address.to_string()),
            ("SNAPSHOT_METADATA_CA_FILE", ca.clone()),
            ("SNAPSHOT_METADATA_TOKEN_FILE", token_file),
            ("SNAPSHOT_METADATA_NAMESPACE", namespace.to_owned()),
            ("SNAPSHOT_METADATA_SERVICE_FILE", service),
        ];
        let lines = variables.map(|(name, value)| format!("export {name}={}\n", quoted(&value)));
        let variables = format!("{HEADER}{}", lines.concat());
        let request = json!({
            "security_token": token, "namespace": namespace, "snapshot_name": "NAME",
        });
        let call = format!(
            "grpcurl -cacert {} -d {} {address} snapshotmetadata.SnapshotMetadata/GetMetadataAllocated",
            quoted(&ca),
            quoted(&request.to_string()),
        );
        let text = format!(
            "address    {address}\nCA         {ca}\ntoken      {token}\nnamespaces {}\n\n{variables}\n# With \
             NAME, after csi-loopback snapshot create NAME --volume VOLUME:\n{call}\n\n---\n{object}",
            namespaces.join(", ")
        );
        Ok(Description { text, variables })
    }

    fn write(&self, name: &str, text: &str) -> Result<String> {
        let path = self.path().join(name);
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        path.into_os_string().into_string().map_err(|_| anyhow!("TMPDIR is not UTF-8"))
    }
}

/// What clients need.
pub struct Description {
    /// For people.
    pub text: String,
    /// For a shell.
    pub variables: String,
}

/// The file of `--env-file`. It exists while the servers are ready.
#[derive(Debug)]
pub struct Variables(PathBuf);

impl Variables {
    /// Removes the file of a killed process.
    ///
    /// # Errors
    /// It is another file.
    pub fn new(path: &Path) -> Result<Self> {
        if let Ok(text) = fs::read_to_string(path) {
            ensure!(text.starts_with(HEADER), "--env-file {}: the file exists", path.display());
        }
        let variables = Self(path.to_owned());
        variables.remove()?;
        Ok(variables)
    }

    pub fn write(&self, text: &str) -> Result<()> {
        let mut new = self.0.clone().into_os_string();
        new.push(".new");
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, &self.0));
        written.with_context(|| format!("--env-file {}", self.0.display()))
    }

    pub fn remove(&self) -> Result<()> {
        match fs::remove_file(&self.0) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("--env-file {}", self.0.display()))
            }
            _ => Ok(()),
        }
    }
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_program_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("env");
        let own = Variables::new(&path).unwrap();
        own.write(HEADER).unwrap();
        assert!(Variables::new(&path).is_ok() && !path.exists());
        fs::write(&path, "PATH=/bin\n").unwrap();
        let error = Variables::new(&path).unwrap_err().to_string();
        assert!(error.contains("the file exists") && path.exists(), "{error}");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
