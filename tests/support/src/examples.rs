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

/// The clients of the driver's socket and of the sidecar in each language, with its name. A
/// language that the machine lacks is reported as a skip.
pub fn clients() -> Vec<(&'static str, Client, Client)> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    static GO: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let mut clients = Vec::new();
    match PYTHON.get_or_init(|| tool("python_grpc")) {
        Ok(python) => {
            let script = |name: &str| Path::new(REPOSITORY).join("examples/python").join(name);
            let client = |name: &str| Client(vec![python.clone(), script(name)]);
            clients.push(("Python", client("driver.py"), client("sidecar.py")));
        }
        Err(why) => skip(why),
    }
    match GO.get_or_init(|| tool("example_clients")) {
        Ok(directory) => {
            let client = |name: &str| Client(vec![directory.join(name)]);
            clients.push(("Go", client("driver-blocks"), client("sidecar-blocks")));
        }
        Err(why) => skip(why),
    }
    clients
}
