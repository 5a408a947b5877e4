//! The repository and its keys, as flags name them, else the environment.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::args::{CopyTo, NewKey, RepositoryArgs};
use super::repository::Location;
use super::repository::seal::KeyFile;
use crate::client::stop::Stop;

const REPOSITORY: &str = "CSI_LOOPBACK_REPOSITORY";
const KEY_FILE: &str = "CSI_LOOPBACK_KEY_FILE";
const KEY_COMMAND: &str = "CSI_LOOPBACK_KEY_COMMAND";

const POLL: Duration = Duration::from_millis(5);

/// Where a key comes from. The name is that of the flag or variable.
#[derive(Debug, PartialEq)]
pub enum KeySource {
    File(&'static str, PathBuf),
    Command(&'static str, String),
}

impl RepositoryArgs {
    /// # Errors
    /// No repository is named, or the environment names none that can exist.
    pub fn location(&self) -> Result<Location> {
        if let Some(location) = &self.repository {
            return Ok(location.clone());
        }
        let text = variable(REPOSITORY)
            .with_context(|| format!("no repository is named; set --repository or {REPOSITORY}"))?;
        text.parse().map_err(|error: String| anyhow!("{REPOSITORY}={text} {error}"))
    }

    pub fn key(&self) -> Result<Option<KeySource>> {
        let flag = source(
            ("--key-file", self.key_file.as_deref()),
            ("--key-command", self.key_command.as_deref()),
        );
        if flag.is_some() {
            return Ok(flag);
        }
        let [file, command] = [KEY_FILE, KEY_COMMAND].map(variable);
        let is_one = file.is_none() || command.is_none();
        ensure!(is_one, "{KEY_FILE} and {KEY_COMMAND} are set; unset one");
        let file = file.map(PathBuf::from);
        Ok(source((KEY_FILE, file.as_deref()), (KEY_COMMAND, command.as_deref())))
    }
}

impl CopyTo {
    pub fn key(&self) -> Option<KeySource> {
        source(
            ("--to-key-file", self.to_key_file.as_deref()),
            ("--to-key-command", self.to_key_command.as_deref()),
        )
    }
}

impl NewKey {
    pub fn key(&self) -> Option<KeySource> {
        source(
            ("--new-key-file", self.new_key_file.as_deref()),
            ("--new-key-command", self.new_key_command.as_deref()),
        )
    }
}

impl KeySource {
    pub fn name(&self) -> &'static str {
        match self {
            Self::File(name, _) | Self::Command(name, _) => name,
        }
    }

    /// # Errors
    /// The file or the command cannot be read, or has no key.
    pub async fn read(&self, stop: &Stop) -> Result<KeyFile> {
        match self {
            Self::File(name, path) => KeyFile::read(path, name),
            Self::Command(name, command) => stop.wait(printed(name, command)).await,
        }
    }
}

/// The key that a source has; none without one.
pub async fn read(source: Option<KeySource>, stop: &Stop) -> Result<Option<KeyFile>> {
    match source {
        Some(source) => Ok(Some(source.read(stop).await?)),
        None => Ok(None),
    }
}

/// For an error of a bucket: which, and where its settings come from.
pub fn bucket(location: &Location, credentials: Option<&Path>) -> String {
    match credentials {
        Some(directory) => {
            format!("{location}, with the settings in --s3-credentials {}", directory.display())
        }
        None => {
            let unset = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"];
            let unset: Vec<_> = unset.into_iter().filter(|name| variable(name).is_none()).collect();
            match unset.is_empty() {
                true => format!("{location}, with AWS_* of the environment"),
                false => format!("{location}, without {} in the environment", unset.join(", ")),
            }
        }
    }
}

fn source(
    file: (&'static str, Option<&Path>),
    command: (&'static str, Option<&str>),
) -> Option<KeySource> {
    let of_file = file.1.map(|path| KeySource::File(file.0, path.to_owned()));
    of_file.or_else(|| Some(KeySource::Command(command.0, command.1?.to_owned())))
}

/// A variable that is set and not empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Ends the process if the caller does not wait for it any more.
struct Killed(Arc<Mutex<std::process::Child>>);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).kill();
    }
}

/// What a shell command prints. The command itself may contain secrets, so no error has it.
async fn printed(name: &'static str, command: &str) -> Result<KeyFile> {
    let mut child = Command::new("/bin/sh");
    child.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = child.spawn().with_context(|| format!("{name}: run /bin/sh"))?;
    let output = child.stdout.take().with_context(|| format!("{name}: read"))?;
    let child = Arc::new(Mutex::new(child));
    let _killed = Killed(Arc::clone(&child));
    let read = move || {
        let key = KeyFile::from_reader(output, format!("the output of {name}"));
        let status = loop {
            let ended = child.lock().unwrap_or_else(PoisonError::into_inner).try_wait();
            match ended.with_context(|| format!("{name}: wait"))? {
                Some(status) => break status,
                None => std::thread::sleep(POLL),
            }
        };
        // After too much output, a signal ended it.
        if status.code().is_some_and(|code| code != 0) || (key.is_ok() && !status.success()) {
            bail!("{name}: the command failed, {status}");
        }
        key
    };
    super::blocking(read).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_command_prints_the_key_and_no_error_has_its_text() {
        let stop = Stop::unsignalled(Duration::from_secs(60));
        let run = async |command: &str| {
            let source = KeySource::Command("--key-command", command.to_owned());
            source.read(&stop).await
        };
        let key = "0123456789abcdef0123456789abcdef";
        let read = KeyFile::from_reader(key.as_bytes(), String::new()).unwrap();
        assert_eq!(run(&format!("printf {key}")).await.unwrap().id().unwrap(), read.id().unwrap());
        for (command, words) in [
            ("printf short", "has 5 bytes"),
            ("printf 0123456789abcdef0123456789abcdef; exit 3", "exit status: 3"),
            ("exec cat /dev/zero", "more than 65536 bytes"),
        ] {
            let error = format!("{:#}", run(command).await.unwrap_err());
            assert!(error.contains(words) && error.contains("--key-command"), "{error}");
            assert!(!error.contains("printf") && !error.contains("0123"), "{error}");
        }
        let (_sender, soon) = Stop::by_hand(Duration::from_millis(50));
        let slow = KeySource::Command("--key-command", "exec sleep 600".to_owned());
        assert!(slow.read(&soon).await.is_err());
    }
}
