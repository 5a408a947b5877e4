//! The directories of staged and published volumes, made by this process or by the commands of the
//! user.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::super::args::PathArgs;
use super::super::door::{Done, Refusal};
use super::local;

/// What a directory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The parent of a target.
    Mount,
    Staging,
}

impl Place {
    /// The commands that make and remove a directory.
    fn commands(self, paths: &PathArgs) -> [Option<&Path>; 2] {
        let commands = match self {
            Self::Mount => [&paths.create_mount, &paths.remove_mount],
            Self::Staging => [&paths.create_staging, &paths.remove_staging],
        };
        commands.map(Option::as_deref)
    }

    /// The path of a volume's directory, by the name of the volume.
    pub fn of(self, paths: &PathArgs, volume: &str) -> PathBuf {
        let (given, default) = match self {
            Self::Mount => (&paths.mount_dir, "csi-mount"),
            Self::Staging => (&paths.staging_dir, "csi-staging"),
        };
        let parent = given.clone().unwrap_or_else(|| std::env::temp_dir().join(default));
        parent.join(volume)
    }

    /// The parent of the directories, if this process will make it.
    pub fn missing_parent(self, paths: &PathArgs, volume: &str) -> Option<PathBuf> {
        let [create, _] = self.commands(paths);
        let parent = self.of(paths, volume).parent().map(Path::to_owned);
        parent.filter(|parent| create.is_none() && !parent.exists())
    }

    /// Makes the directory; returns its path.
    pub fn make(self, paths: &PathArgs, volume: &str) -> Done<PathBuf> {
        let path = self.of(paths, volume);
        let [create, _] = self.commands(paths);
        match create {
            Some(command) => {
                let made = run(command, &path, paths.create_timeout)?;
                Ok(if made.is_empty() { path } else { PathBuf::from(made) })
            }
            None => fs::create_dir_all(&path)
                .map(|()| path.clone())
                .map_err(|error| local(&format!("create {}", path.display()), error)),
        }
    }

    /// Removes the directory, which must be empty.
    pub fn remove(self, paths: &PathArgs, path: &Path) -> Done<()> {
        let [_, remove] = self.commands(paths);
        if let Some(command) = remove {
            return run(command, path, paths.remove_timeout).map(drop);
        }
        match fs::remove_dir(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(local(&format!("remove {}", path.display()), error));
            }
            _ => {}
        }
        Ok(())
    }
}

/// Runs a command with a path; returns what it prints.
fn run(command: &Path, path: &Path, timeout: Duration) -> Done<String> {
    let shown = command.display().to_string();
    let mut child = Command::new(command)
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| local(&format!("run {shown}"), error))?;
    let until = Instant::now() + timeout;
    let status = loop {
        match child.try_wait().map_err(|error| local(&format!("run {shown}"), error))? {
            Some(status) => break status,
            None if Instant::now() >= until => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(Refusal::Refused(format!("{shown} did not end in time")));
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let output = child.wait_with_output().map_err(|error| local(&format!("run {shown}"), error))?;
    if !status.success() {
        return Err(Refusal::Refused(format!("{shown} {}: {status}", path.display())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
