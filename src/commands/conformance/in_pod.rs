//! The command that a pod of `--kubernetes` runs: it changes or reads the pod's block device. It gets
//! all its work as arguments and returns the result as the container's termination message, so that
//! neither a shell nor the rights to execute commands or read logs are needed.

use std::fmt;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::content::{Image, Patterns, Ranges, SECTOR};
use super::device;
use super::door::{Change, Edit};

/// Ranges of a result: a termination message has at most 4 KiB.
const MAX_RANGES: usize = 64;

/// What the pod does with its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Work {
    /// Makes the changes and flushes them
    Change,
    /// Compares the device with an image of zeros that has the changes
    Compare,
    /// Keeps the device open until the pod is deleted
    Hold,
}

#[derive(Debug, Clone, Args)]
pub struct DeviceArgs {
    /// What to do with the device
    #[arg(value_enum)]
    pub work: Work,
    /// The block device
    #[arg(long, value_name = "PATH")]
    pub device: PathBuf,
    /// File that the result is written to
    #[arg(long, value_name = "PATH")]
    pub result: PathBuf,
    /// Selects the content
    #[arg(long, value_name = "NUMBER")]
    pub seed: u64,
    /// Bytes of the image
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub size: u64,
    /// Changes, as PATTERN|discard|zero:OFFSET:LENGTH
    #[arg(value_name = "CHANGE")]
    pub edits: Vec<Edit>,
}

/// What the pod found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Found {
    /// Of the device, in bytes.
    pub size: u64,
    /// Where it differs from the image: first bytes and lengths.
    pub different: Vec<(u64, u64)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl fmt::Display for Edit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.change {
            Change::Write(pattern) => write!(f, "{pattern}")?,
            Change::Discard => f.write_str("discard")?,
            Change::ZeroOut => f.write_str("zero")?,
        }
        write!(f, ":{}:{}", self.offset, self.length)
    }
}

impl FromStr for Edit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not PATTERN|discard|zero:OFFSET:LENGTH");
        let mut parts = text.split(':');
        let mut part = || parts.next().ok_or_else(wrong);
        let (change, offset, length) = (part()?, part()?, part()?);
        let number = |text: &str| text.parse::<u64>().map_err(|_| wrong());
        let (offset, length) = (number(offset)?, number(length)?);
        let change = match change {
            "discard" => Change::Discard,
            "zero" => Change::ZeroOut,
            pattern => Change::Write(pattern.parse().map_err(|_| wrong())?),
        };
        offset.checked_add(length).map(|_| Self { offset, length, change }).ok_or_else(wrong)
    }
}

/// Runs the command. The exit code is 0 also if the result is an error, which the result names.
///
/// # Errors
/// The result cannot be written.
pub fn run(args: &DeviceArgs) -> Result<ExitCode> {
    let found = work(args)
        .unwrap_or_else(|error| Found { error: Some(format!("{error:#}")), ..Found::default() });
    let text = serde_json::to_string(&found)?;
    fs::write(&args.result, text).with_context(|| args.result.display().to_string())?;
    Ok(ExitCode::SUCCESS)
}

fn work(args: &DeviceArgs) -> Result<Found> {
    let named = || args.device.display().to_string();
    let mut file = File::options().read(true).write(true).open(&args.device).with_context(named)?;
    let patterns = Patterns { seed: args.seed };
    let mut different = Ranges::default();
    match args.work {
        Work::Change => {
            device::change(&file, patterns, &args.edits).with_context(named)?;
        }
        Work::Compare => {
            let image = image(args.size, &args.edits);
            different = device::compare(&file, patterns, &image).with_context(named)?;
        }
        Work::Hold => loop {
            nix::unistd::pause();
        },
    }
    let size = file.seek(SeekFrom::End(0)).with_context(named)?;
    Ok(Found { size, different: shortened(different), error: None })
}

/// The ranges. Many become one from the first of the last ones to the end of all, which accuses the
/// driver of less.
fn shortened(Ranges(mut ranges): Ranges) -> Vec<(u64, u64)> {
    if let Some(end) = ranges.last().map(|last| last.end).filter(|_| ranges.len() > MAX_RANGES) {
        ranges.truncate(MAX_RANGES);
        if let Some(last) = ranges.last_mut() {
            last.end = end;
        }
    }
    ranges.into_iter().map(|range| (range.start, range.end - range.start)).collect()
}

fn image(size: u64, edits: &[Edit]) -> Image {
    let mut image = Image::new(size);
    for edit in edits {
        if let Change::Write(pattern) = edit.change {
            image.set(edit.offset..edit.offset + edit.length, pattern);
        }
    }
    image
}

/// The changes that make an image of zeros this one.
pub fn edits(image: &Image) -> Vec<Edit> {
    let mut edits: Vec<(Edit, u8)> = Vec::new();
    for range in image.data().0 {
        for sector in range.start / SECTOR..range.end / SECTOR {
            let pattern = image.pattern(sector);
            match edits.last_mut() {
                Some((edit, same))
                    if *same == pattern && edit.offset + edit.length == sector * SECTOR =>
                {
                    edit.length += SECTOR;
                }
                _ => {
                    let change = Change::Write(pattern);
                    edits.push((Edit { offset: sector * SECTOR, length: SECTOR, change }, pattern));
                }
            }
        }
    }
    edits.into_iter().map(|(edit, _)| edit).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn changes_and_images_survive_the_arguments_of_a_pod() {
        let mut made = Image::new(4 << 20);
        made.set(0..4096, 3);
        made.set(4096..4608, 4);
        made.set(1 << 20..(1 << 20) + 8192, 3);
        let texts: Vec<String> = edits(&made).iter().map(Edit::to_string).collect();
        assert_eq!(texts, ["3:0:4096", "4:4096:512", "3:1048576:8192"]);
        let again: Vec<Edit> = texts.iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(image(4 << 20, &again), made);
        for change in [Change::Discard, Change::ZeroOut] {
            let edit = Edit { offset: 512, length: 1024, change };
            assert_eq!(edit.to_string().parse(), Ok(edit));
        }
        for wrong in ["", "3:1", "x:0:1", "3:18446744073709551615:1"] {
            assert!(wrong.parse::<Edit>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_result_fits_into_a_termination_message() {
        let ranges = (0..5000).map(|at| at << 40..(at << 40) + 512).collect();
        let different = shortened(Ranges(ranges));
        let last = different.last().unwrap();
        assert_eq!(last.0 + last.1, (4999 << 40) + 512);
        let found = Found { size: u64::MAX, different, error: None };
        assert!(serde_json::to_string(&found).unwrap().len() < 4096);
    }

    #[test]
    fn a_device_is_changed_and_compared_by_command() {
        let directory = tempfile::tempdir().unwrap();
        let (device, result) = (directory.path().join("device"), directory.path().join("result"));
        let size = (3 << 20) + SECTOR;
        let file = File::create(&device).unwrap();
        file.set_len(size).unwrap();
        let run = |work, edits: &[&str]| -> Found {
            let edits = edits.iter().map(|edit| edit.parse().unwrap()).collect();
            let (device, result) = (device.clone(), result.clone());
            let args = DeviceArgs { work, device, result: result.clone(), seed: 7, size, edits };
            run(&args).unwrap();
            serde_json::from_str(&fs::read_to_string(result).unwrap()).unwrap()
        };
        let whole = format!("5:0:{size}");
        let whole = whole.as_str();
        let change = [whole, "discard:4096:8192", "zero:1048576:4096"];
        assert_eq!(run(Work::Change, &change).size, size);
        let different = [(4096, 8192), (1 << 20, 4096)];
        assert_eq!(run(Work::Compare, &[whole]).different, different);
        let expected = [whole, "0:4096:8192", "0:1048576:4096"];
        assert!(run(Work::Compare, &expected).different.is_empty());
        file.write_all_at(&[9], size - 1).unwrap();
        assert_eq!(run(Work::Compare, &expected).different, [(size - SECTOR, SECTOR)]);
        fs::remove_file(&device).unwrap();
        assert!(run(Work::Change, &[]).error.unwrap().contains("device"));
    }
}
