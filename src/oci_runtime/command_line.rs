//! Parses the next runtime's command line as far as necessary. It is passed on unchanged.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Global flags of runc, crun and youki that take a value.
const GLOBAL_VALUES: [&str; 8] =
    ["log", "log-format", "root", "criu", "rootless", "cgroup-manager", "l", "r"];
/// Flags of create, run and restore that take a value.
const VALUES: [&str; 15] = [
    "bundle",
    "b",
    "console-socket",
    "pid-file",
    "preserve-fds",
    "config",
    "notify-socket",
    "image-path",
    "work-path",
    "parent-path",
    "manage-cgroups-mode",
    "empty-ns",
    "status-fd",
    "lsm-profile",
    "lsm-mount-context",
];

/// A parsed command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invocation {
    /// The file in which the caller expects errors, and whether as lines of JSON.
    pub log: Option<PathBuf>,
    pub log_json: bool,
    /// The state directory of the next runtime.
    pub root: Option<OsString>,
    pub command: Command,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    Create(Create),
    /// Restores a container from a checkpoint.
    Restore(Create),
    Delete {
        container: OsString,
    },
    /// Arguments for this program only.
    Crust(Vec<OsString>),
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Create {
    pub bundle: PathBuf,
    /// Path within the bundle.
    pub config: PathBuf,
    pub container: OsString,
    pub pid_file: Option<PathBuf>,
    /// `run` without `--detach`, which returns when the container ends.
    pub attached: bool,
}

impl Invocation {
    pub fn parse(arguments: &[OsString]) -> Self {
        let mut words = arguments.iter();
        let mut read = Self { log: None, log_json: false, root: None, command: Command::Other };
        while let Some(word) = words.next() {
            let Some((name, value)) = flag(word) else {
                read.command = command(word, words.as_slice());
                break;
            };
            let value = match value {
                None if GLOBAL_VALUES.contains(&name.as_str()) => words.next().cloned(),
                value => value,
            };
            match (name.as_str(), value) {
                ("log" | "l", Some(value)) => read.log = Some(value.into()),
                ("log-format", Some(value)) => read.log_json = value == "json",
                ("root" | "r", Some(value)) => read.root = Some(value),
                _ => {}
            }
        }
        read
    }
}

/// Parses `--name`, `-name` and `--name=value`, as Go programs do. `None`: not a flag.
fn flag(word: &OsStr) -> Option<(String, Option<OsString>)> {
    let bytes = word.as_bytes();
    let bytes = bytes.strip_prefix(b"--").or_else(|| bytes.strip_prefix(b"-"))?;
    if bytes.is_empty() {
        return None;
    }
    let mut parts = bytes.splitn(2, |byte| *byte == b'=');
    let name = String::from_utf8_lossy(parts.next()?).into_owned();
    Some((name, parts.next().map(|value| OsString::from_vec(value.to_vec()))))
}

fn command(name: &OsStr, words: &[OsString]) -> Command {
    match name.to_str() {
        Some("create") => Command::Create(create(words, false)),
        Some("run") => Command::Create(create(words, true)),
        Some("restore") => Command::Restore(create(words, true)),
        Some("delete") => {
            // The flags of `delete` have no values.
            let container = words.iter().find(|word| flag(word).is_none() && *word != "--");
            match container {
                Some(container) => Command::Delete { container: container.clone() },
                None => Command::Other,
            }
        }
        Some("crust") => Command::Crust(words.to_vec()),
        _ => Command::Other,
    }
}

fn create(words: &[OsString], attached: bool) -> Create {
    let mut read = Create { config: "config.json".into(), attached, ..Create::default() };
    let mut container = None;
    let mut words = words.iter();
    let mut flags = true;
    while let Some(word) = words.next() {
        let found = flag(word).filter(|_| flags);
        let Some((name, value)) = found else {
            match word == "--" && flags {
                true => flags = false,
                false => container = container.or_else(|| Some(word.clone())),
            }
            continue;
        };
        let value = match value {
            None if VALUES.contains(&name.as_str()) => words.next().cloned(),
            value => value,
        };
        match (name.as_str(), value) {
            ("bundle" | "b", Some(value)) => read.bundle = value.into(),
            ("config", Some(value)) => read.config = value.into(),
            ("pid-file", Some(value)) => read.pid_file = Some(value.into()),
            ("detach" | "d", value) => {
                read.attached = value.is_some_and(|value| value == "false") && attached;
            }
            _ => {}
        }
    }
    read.container = container.unwrap_or_default();
    read
}

impl Create {
    /// The container's config.json.
    pub fn config_file(&self) -> PathBuf {
        let bundle = if self.bundle.as_os_str().is_empty() { Path::new(".") } else { &self.bundle };
        bundle.join(&self.config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Invocation {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        Invocation::parse(&words)
    }

    #[test]
    fn a_command_line_of_containerd_is_parsed() {
        let read = parse(
            "--root /run/containerd/runc/k8s.io --log /b/log.json --log-format json create --bundle /b --pid-file /b/init.pid c1",
        );
        assert_eq!(read.root, Some("/run/containerd/runc/k8s.io".into()));
        assert_eq!((read.log, read.log_json), (Some("/b/log.json".into()), true));
        let Command::Create(create) = read.command else { panic!("create") };
        assert_eq!(
            (create.bundle.as_path(), create.container.as_os_str()),
            (Path::new("/b"), OsStr::new("c1"))
        );
        assert_eq!(create.pid_file, Some("/b/init.pid".into()));
        assert_eq!((create.config_file(), create.attached), ("/b/config.json".into(), false));
    }

    #[test]
    fn flags_are_parsed_in_each_form() {
        for line in [
            "--debug -root=/r create -b /b c1",
            "--root /r --systemd-cgroup create c1 --bundle=/b",
            "--criu run --root /r create --preserve-fds 3 --no-pivot --bundle /b -- c1",
        ] {
            let read = parse(line);
            assert_eq!(read.root, Some("/r".into()), "{line}");
            let Command::Create(create) = read.command else { panic!("{line}") };
            assert_eq!((create.bundle, create.container), ("/b".into(), "c1".into()), "{line}");
        }
        let attached = |line| match parse(line).command {
            Command::Create(create) => create.attached,
            _ => panic!("{line}"),
        };
        assert!(attached("run c1") && attached("run --detach=false c1"));
        assert!(!attached("run -d c1") && !attached("create c1"));
    }

    #[test]
    fn other_commands_are_not_parsed() {
        for line in
            ["", "--version", "--help", "start c1", "exec c1 create", "delete", "--root", "--log x"]
        {
            assert_eq!(parse(line).command, Command::Other, "{line}");
        }
        for line in ["delete --force c1", "delete c1", "delete -f -- c1"] {
            assert_eq!(parse(line).command, Command::Delete { container: "c1".into() }, "{line}");
        }
    }
}
