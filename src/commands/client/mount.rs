//! `snapshot mount`: the files of a snapshot in a directory, read-only, until a signal. A temporary
//! volume has the data, and nothing of it is left at the end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use serde::Serialize;

use super::scratch::Scratch;
use super::stop::{Interrupted, Stop};
use super::{Options, format, names};

#[derive(Debug, Args)]
pub struct MountArgs {
    /// Name or id
    snapshot: String,
    /// Empty directory to mount at
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

#[derive(Debug, Serialize)]
struct Mounted {
    snapshot_id: String,
    directory: PathBuf,
}

/// Runs until a signal.
pub async fn run(options: &Options, args: MountArgs) -> Result<ExitCode> {
    let options = options.per_call();
    let stop = Stop::listen(&options)?;
    let directory = checked(&args.directory)?;
    let connection = options.connect(stop.deadline()).await?;
    let snapshot = stop.wait(names::existing_snapshot(&connection, &args.snapshot)).await?;
    let mut scratch = Scratch::start(&connection).await?;
    let outcome = async {
        scratch.mount(&connection, &stop, &snapshot, &directory).await?;
        let mounted =
            Mounted { snapshot_id: snapshot.snapshot_id.clone(), directory: directory.clone() };
        format::print_one(options.print.output, &mounted, |mounted| {
            let (id, directory) = (&mounted.snapshot_id, mounted.directory.display());
            format!("snapshot {id} is mounted at {directory}, read-only; Ctrl-C unmounts it")
        })?;
        stop.whole(std::future::pending::<Result<()>>()).await
    };
    let outcome = outcome.await;
    let cleaned = scratch.clean(&connection).await;
    // CSI NodeUnpublishVolume removes the directory.
    let restored = match directory.exists() {
        true => Ok(()),
        false => fs::create_dir(&directory).context("create the directory again"),
    };
    match (outcome, cleaned.and(restored)) {
        (Err(error), Ok(())) if error.is::<Interrupted>() => Ok(ExitCode::SUCCESS),
        (Err(error), Err(remaining)) => Err(anyhow!("{error:#}; {remaining:#}")),
        (outcome, cleaned) => outcome.and(cleaned).map(|()| ExitCode::SUCCESS),
    }
}

/// The full path of an empty directory.
fn checked(directory: &Path) -> Result<PathBuf> {
    let named = || format!("DIR {}: name an empty directory", directory.display());
    let mut entries = fs::read_dir(directory).with_context(named)?;
    ensure!(entries.next().is_none(), "{}", named());
    directory.canonicalize().with_context(named)
}
