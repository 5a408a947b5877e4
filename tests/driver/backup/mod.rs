//! `backup` and `restore` through the real binary, against a real driver.

mod bad_days;
mod clock;
mod damage;
mod in_place;
mod killed;
mod mount;
mod s3;
mod stories;
mod usage;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use support::driver::*;
use support::random::Random;
use support::{BLOCK, MIB, files_below as files, path, pattern};

/// A repository of a driver's backups, and what the snapshots of one raw volume held.
struct Rig<'d> {
    driver: &'d Driver,
    volume: String,
    /// The place and what all commands get: `--repository` and perhaps a key.
    repository: Vec<String>,
    /// The bytes of each snapshot, by name.
    images: BTreeMap<String, Vec<u8>>,
    content: Vec<u8>,
    random: Random,
    /// Attributes of the process that a test sets: credentials.
    environment: Vec<(String, String)>,
}

impl<'d> Rig<'d> {
    /// A volume of this many bytes, and a repository in the driver's scratch directory that does
    /// not exist yet.
    fn new(driver: &'d Driver, name: &str, bytes: u64) -> Self {
        let repository = driver.scratch().join(format!("repository-{name}"));
        Self {
            driver,
            volume: driver.volume(name, bytes, block()),
            repository: vec!["--repository".to_owned(), path(&repository).to_owned()],
            images: BTreeMap::new(),
            content: vec![0; usize::try_from(bytes).unwrap()],
            random: Random::new(7),
            environment: Vec::new(),
        }
    }

    /// All commands get this key from now on.
    fn encrypt(&mut self, key: Option<[u8; 32]>) {
        if let Some(key) = key {
            let file = self.driver.scratch().join("key");
            fs::write(&file, key).unwrap();
            self.repository.extend(["--key-file".to_owned(), path(&file).to_owned()]);
        }
    }

    fn directory(&self) -> PathBuf {
        PathBuf::from(&self.repository[1])
    }

    /// Writes here and there, discards and zeroes, and takes a snapshot.
    fn snapshot(&mut self, name: &str, writes: u64) -> String {
        let device = self.driver.publish(&self.volume, &block());
        let file = File::options().write(true).open(&device).unwrap();
        let blocks = self.content.len() as u64 / BLOCK;
        for _ in 0..writes {
            let first = self.random.below(blocks);
            let length = (1 + self.random.below(32)).min(blocks - first) * BLOCK;
            let (offset, from) = (first * BLOCK, usize::try_from(first * BLOCK).unwrap());
            let until = from + usize::try_from(length).unwrap();
            match self.random.below(8) {
                0 => {
                    support::discard(&device, offset, length);
                    self.content[from..until].fill(0);
                }
                1 => {
                    file.write_all_at(&vec![0; until - from], offset).unwrap();
                    self.content[from..until].fill(0);
                }
                _ => {
                    let bytes = pattern(self.random.next_u64(), until - from);
                    file.write_all_at(&bytes, offset).unwrap();
                    self.content[from..until].copy_from_slice(&bytes);
                }
            }
        }
        file.sync_all().unwrap();
        drop(file);
        let id = self.driver.snapshot(name, &self.volume);
        self.driver.take_down(&self.volume);
        self.images.insert(name.to_owned(), self.content.clone());
        id
    }

    /// The files of the repository in directories with this name, `packs` or `intent`.
    fn files_in(&self, name: &str) -> Vec<PathBuf> {
        let mut found =
            if self.directory().is_dir() { files(&self.directory()) } else { Vec::new() };
        found.retain(|file| file.parent().is_some_and(|above| above.ends_with(name)));
        found
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command
            .args(arguments)
            .args(&self.repository)
            .env("CSI_ENDPOINT", self.driver.endpoint())
            .env("TMPDIR", self.driver.scratch())
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// What a command prints as JSON, which must succeed, with documented fields only.
    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--output", "json"]].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        let value = serde_json::from_slice(&output.stdout).unwrap();
        assert_documented(&value);
        value
    }

    /// The error of a command, which must fail.
    #[track_caller]
    fn refused(&self, arguments: &[&str], words: &str) {
        self.fails(1, arguments, words);
    }

    /// The same with another exit code.
    #[track_caller]
    fn fails(&self, code: i32, arguments: &[&str], words: &str) {
        let output = self.run(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(words), "{arguments:?}: {error}");
    }

    /// Backs up a snapshot; returns the backup.
    fn create(&self, snapshot: &str, flags: &[&str]) -> Value {
        self.json(&[&["backup", "create", snapshot], flags].concat())
    }

    fn list(&self) -> Vec<Value> {
        self.json(&["backup", "list"]).as_array().unwrap().clone()
    }

    #[track_caller]
    fn verify(&self) {
        let report = self.json(&["backup", "verify"]);
        assert_eq!(report["problems"], serde_json::json!([]));
    }

    /// Restores a snapshot to a new file, and that the file holds its bytes.
    #[track_caller]
    fn restores(&self, snapshot: &str) {
        let target = self.driver.scratch().join("restored");
        let _ = fs::remove_file(&target);
        self.json(&["restore", snapshot, "--to", path(&target)]);
        self.holds(&target, snapshot);
        fs::remove_file(&target).unwrap();
    }

    #[track_caller]
    fn holds(&self, target: &Path, snapshot: &str) {
        let image = &self.images[snapshot];
        let found = fs::read(target).unwrap();
        let first = image.iter().zip(&found).position(|(wanted, found)| wanted != found);
        assert_eq!((first, found.len()), (None, image.len()), "{snapshot}");
    }

    /// Starts a command without waiting for it.
    fn spawn(&self, arguments: &[&str]) -> Child {
        let mut command = self.command(arguments);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }
}

/// Whether the reference names each field of a result.
#[track_caller]
fn assert_documented(value: &Value) {
    let page = include_str!("../../../docs/reference/backup.md");
    for field in value.as_object().into_iter().flat_map(|object| object.keys()) {
        let is_named = page.contains(&format!("`{field}`"));
        assert!(is_named, "docs/reference/backup.md does not name the field {field}");
    }
    value.as_array().into_iter().flatten().for_each(assert_documented);
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// A repository with a full backup of `a` and an incremental one of `b`.
fn two_backups<'d>(driver: &'d Driver, name: &str) -> Rig<'d> {
    let mut rig = Rig::new(driver, name, 8 * MIB);
    rig.snapshot("a", 60);
    rig.create("a", &[]);
    rig.snapshot("b", 20);
    rig.create("b", &["--base", "a"]);
    rig
}
