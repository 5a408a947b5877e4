//! The clients of examples/, in their languages.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::cluster::programs::{finish, stdout_of};
use super::{REPOSITORY, skip, tool};

/// A client of examples/ for a socket or for a sidecar.
pub struct Client(Vec<PathBuf>);

impl Client {
    /// The offset and length of each line that it prints. Panics if it fails.
    #[track_caller]
    pub fn extents(&self, arguments: &[&str]) -> Vec<(u64, u64)> {
        let table = stdout_of(finish(self.command(arguments)));
        let number = |text: Option<&str>| text.unwrap().parse().unwrap();
        let line = |line: &str| {
            let mut words = line.split(' ');
            (number(words.next()), number(words.next()))
        };
        table.lines().map(line).collect()
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.0[0]);
        command.args(&self.0[1..]).args(arguments);
        command
    }
}

/// Python's interpreter with gRPC. If the machine lacks it, this is reported as a skip.
pub fn python() -> Option<&'static Path> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    found(PYTHON.get_or_init(|| tool("python_grpc")))
}

/// The directory of the programs of examples/go. If the machine has no Go, this is reported as a
/// skip.
pub fn go() -> Option<&'static Path> {
    static GO: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    found(GO.get_or_init(|| tool("example_clients")))
}

fn found(tool: &'static Result<PathBuf, String>) -> Option<&'static Path> {
    tool.as_deref().inspect_err(|why| skip(why)).ok()
}

/// The clients of the driver's socket and of the sidecar in each language that the machine has,
/// with its name.
pub fn clients() -> Vec<(&'static str, Client, Client)> {
    let in_python = python().map(|python| {
        let script = |name: &str| Path::new(REPOSITORY).join("examples/python").join(name);
        let client = |name: &str| Client(vec![python.to_owned(), script(name)]);
        ("Python", client("driver.py"), client("sidecar.py"))
    });
    let in_go = go().map(|directory| {
        let client = |name: &str| Client(vec![directory.join(name)]);
        ("Go", client("driver-blocks"), client("sidecar-blocks"))
    });
    [in_python, in_go].into_iter().flatten().collect()
}
