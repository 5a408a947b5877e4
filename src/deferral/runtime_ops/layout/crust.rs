//! The proposal's layout: a directory per target, named by a hash, that contains the path of a
//! program with the commands `crust stats` and `crust resize`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::{Layout, mount_info};
use crate::crust::{Directory, Entry, MountInfo, Problem, Target};
use crate::runtime_ops::output;
use crate::runtime_ops::program::Runner;
use crate::runtime_ops::refusal::{Refusal, Result};
use crate::runtime_ops::request::Range;
use grpc::proto::crust as api;

const STATS: &str = "crust stats";
const RESIZE: &str = "crust resize";

#[derive(Debug)]
pub struct Crust {
    pub directory: Directory,
    pub runner: Runner,
}

impl Crust {
    /// The program of the runtime that has claimed the volume.
    fn program(&self, entry: &Entry, target: &Target) -> Result<PathBuf> {
        let program = entry.runtime_cli().map_err(|problem| match problem {
            Problem::Unsafe(reason) => Refusal::Untrusted(reason),
            other => Refusal::of_files(other),
        })?;
        let program = program.ok_or_else(|| Refusal::Unclaimed(target.clone()))?;
        let bytes = program.as_os_str().as_bytes();
        if bytes.is_empty() || bytes.iter().any(u8::is_ascii_control) {
            return Err(Refusal::Untrusted(
                "runtime-cli does not contain the path of a program".into(),
            ));
        }
        Ok(program)
    }

    fn run<T>(
        &self,
        (entry, target): (&Entry, &Target),
        action: &'static str,
        more: &[String],
        parse: impl FnOnce(&[u8]) -> Result<T, String>,
    ) -> Result<T> {
        let program = self.program(entry, target)?;
        let mut arguments: Vec<OsString> = action.split(' ').map(OsString::from).collect();
        arguments.push(target.as_path().into());
        arguments.extend(more.iter().map(OsString::from));
        let stdout = self.runner.run(&program, action, &arguments)?;
        parse(&stdout).map_err(|reason| Refusal::InvalidOutput { program, action, reason })
    }
}

impl Layout for Crust {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn entry(&self, target: &Target) -> Result<Entry> {
        Ok(self.directory.entry(target))
    }

    fn stage(&self, entry: &Entry, target: &Target, info: &MountInfo) -> Result<(), Problem> {
        entry.stage(target, info)
    }

    fn stats(&self, entry: &Entry, target: &Target) -> Result<api::RuntimeGetVolumeStatsResponse> {
        mount_info(entry, target)?;
        self.run((entry, target), STATS, &[], output::stats)
    }

    fn expand(&self, entry: &Entry, target: &Target, range: Range) -> Result<i64> {
        mount_info(entry, target)?;
        let bounds = [range.required, range.limit].map(|bound| bound.to_string());
        self.run((entry, target), RESIZE, &bounds, output::resized)
    }

    fn entries(&self) -> Result<Vec<Entry>, Problem> {
        self.directory.entries()
    }

    fn target_of(&self, entry: &Entry) -> Result<Option<Target>, Problem> {
        entry.target()
    }

    fn is_in_use(&self, entry: &Entry, target: Option<&Target>) -> bool {
        match (entry.runtime_cli(), target) {
            (Ok(None), _) => false,
            (Ok(Some(_)), Some(target)) => {
                let stats = self.run((entry, target), STATS, &[], output::stats);
                !matches!(stats, Err(Refusal::NotRunning(_)))
            }
            // No program can report the state.
            (Ok(Some(_)) | Err(_), _) => true,
        }
    }
}
