//! Kata's direct volumes, as its Go runtime reads them (kata-containers,
//! src/runtime/pkg/direct-volume): a directory per target, named by the path in URL-safe base64
//! with padding. It contains `mountInfo.json` and, once a sandbox uses the volume, an empty file
//! named after the sandbox. Kata treats every other file as a sandbox, so crust_ops adds none.
//! kata-runtime has commands for stats and expansion.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE;

use super::{Layout, mount_info};
use crate::crust::{Directory, Entry, MountInfo, Problem, Target, check};
use crate::runtime_ops::output;
use crate::runtime_ops::program::Runner;
use crate::runtime_ops::refusal::{Refusal, Result};
use crate::runtime_ops::request::Range;
use grpc::proto::crust as api;

/// NAME_MAX: maximum bytes of a directory's name.
const MAX_NAME: usize = 255;
/// Maximum bytes of a path whose base64 fits in a name.
const MAX_TARGET: usize = MAX_NAME / 4 * 3;
const STATS: &str = "direct-volume stats";
const RESIZE: &str = "direct-volume resize";

#[derive(Debug)]
pub struct Kata {
    pub directory: Directory,
    pub runner: Runner,
    /// Path of kata-runtime.
    pub program: PathBuf,
    /// Directories with a subdirectory for each running sandbox.
    pub sandboxes: Vec<PathBuf>,
}

impl Kata {
    fn run(
        &self,
        (entry, target): (&Entry, &Target),
        action: &'static str,
        more: &[OsString],
    ) -> Result<Vec<u8>> {
        // kata-runtime reports this case with the exit code that it uses for every error.
        if entry.runtime_files().map_err(Refusal::of_files)?.is_empty() {
            return Err(Refusal::Unclaimed(target.clone()));
        }
        let mut arguments: Vec<OsString> = action.split(' ').map(OsString::from).collect();
        arguments.extend(["--volume-path".into(), target.as_path().into()]);
        arguments.extend_from_slice(more);
        self.runner.run(&self.program, action, &arguments)
    }

    fn is_running(&self, sandbox: &str) -> bool {
        self.sandboxes.iter().any(|directory| directory.join(sandbox).exists())
    }
}

/// The single size that Kata accepts: the required size, or else the device's size up to the limit.
fn size(info: &MountInfo, range: Range) -> Result<u64> {
    if range.required > 0 {
        return Ok(range.required);
    }
    let device = check::block_device("device", &info.device).map_err(Refusal::of_files)?;
    let end = File::open(&device).and_then(|mut device| device.seek(SeekFrom::End(0)));
    let bytes =
        end.map_err(|e| Refusal::EntryIo(format!("reading the size of {}: {e}", info.device)))?;
    Ok(if range.limit > 0 { bytes.min(range.limit) } else { bytes })
}

impl Layout for Kata {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn entry(&self, target: &Target) -> Result<Entry> {
        let name = URL_SAFE.encode(target.as_path().as_os_str().as_bytes());
        if name.len() > MAX_NAME {
            return Err(Refusal::invalid(
                "volume_target_path",
                format!(
                    "has more than {MAX_TARGET} bytes, Kata's maximum for a directory named by its base64"
                ),
            ));
        }
        Ok(Entry::at(self.directory.root().join(name)))
    }

    fn stage(&self, entry: &Entry, _: &Target, info: &MountInfo) -> Result<(), Problem> {
        entry.write_mount_info(info)
    }

    fn stats(&self, entry: &Entry, target: &Target) -> Result<api::RuntimeGetVolumeStatsResponse> {
        mount_info(entry, target)?;
        let stdout = self.run((entry, target), STATS, &[])?;
        let program = self.program.clone();
        output::stats(&stdout).map_err(|reason| Refusal::InvalidOutput {
            program,
            action: STATS,
            reason,
        })
    }

    fn expand(&self, entry: &Entry, target: &Target, range: Range) -> Result<i64> {
        let bytes = size(&mount_info(entry, target)?, range)?;
        let more = ["--size".into(), bytes.to_string().into()];
        self.run((entry, target), RESIZE, &more)?;
        // kata-runtime writes nothing on success.
        Ok(i64::try_from(bytes).unwrap_or(0))
    }

    fn entries(&self) -> Result<Vec<Entry>, Problem> {
        self.directory
            .entries_named(|name| URL_SAFE.decode(name).is_ok_and(|path| path.starts_with(b"/")))
    }

    fn target_of(&self, entry: &Entry) -> Result<Option<Target>, Problem> {
        let name = entry.path().file_name().unwrap_or_default();
        let Ok(path) = URL_SAFE.decode(name.as_bytes()) else { return Ok(None) };
        Target::new("target", PathBuf::from(OsString::from_vec(path))).map(Some)
    }

    fn is_in_use(&self, entry: &Entry, _: Option<&Target>) -> bool {
        match entry.runtime_files() {
            Ok(names) => names.iter().any(|name| self.is_running(name)),
            Err(_) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn kata() -> Kata {
        Kata {
            directory: Directory::new("/run/kata-containers/shared/direct-volumes"),
            runner: Runner { timeout: Duration::from_secs(1), environment: Vec::new() },
            program: "/usr/bin/kata-runtime".into(),
            sandboxes: Vec::new(),
        }
    }

    #[test]
    fn directories_are_named_as_in_kata() {
        let target = Target::new("path", "/a?>b").unwrap();
        let entry = kata().entry(&target).unwrap();
        // printf '/a?>b' | basenc --base64url
        assert_eq!(entry.path().file_name().unwrap(), "L2E_PmI=");
        assert_eq!(kata().target_of(&entry).unwrap(), Some(target));
    }

    #[test]
    fn too_long_a_path_is_refused_with_the_limit() {
        let path = |length: usize| Target::new("path", format!("/{}", "x".repeat(length - 1)));
        kata().entry(&path(MAX_TARGET).unwrap()).unwrap();
        let refused = kata().entry(&path(MAX_TARGET + 1).unwrap()).unwrap_err();
        assert!(refused.to_string().contains("189 bytes"), "{refused}");
    }
}
