//! The next runtime's command line, as far as this program must know it: which command, container
//! and bundle. It is passed on unchanged.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::options::{self, Dialect, Words};

const CONFIG: &str = "config.json";

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
    /// A command that neither creates nor deletes one container.
    Other,
    /// It may be any command. The text says why.
    Unknown(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Create {
    pub bundle: PathBuf,
    /// The option `--config` of crun.
    pub config: Option<PathBuf>,
    pub container: OsString,
    pub pid_file: Option<PathBuf>,
    /// `run` without `--detach`, which returns when the container ends.
    pub attached: bool,
}

impl Invocation {
    pub fn parse(arguments: &[OsString], dialect: Dialect) -> Self {
        let mut global = Words::default();
        let rest = options::global(arguments, dialect, &mut global);
        let log = global.value("log").and_then(log_file);
        let log_json = global.value("log-format").is_some_and(|format| format == "json");
        let root = global.value("root").map(OsStr::to_owned);
        let command = match rest {
            Err(why) => Command::Unknown(why),
            Ok(_) if global.prints => Command::Other,
            Ok(rest) => match rest.split_first() {
                None => Command::Other,
                Some((name, words)) if name == "crust" => Command::Crust(words.to_vec()),
                Some((name, words)) => {
                    command(name, words, dialect).unwrap_or_else(Command::Unknown)
                }
            },
        };
        Self { log, log_json, root, command }
    }
}

/// The file of `--log`. crun accepts other destinations, too.
fn log_file(value: &OsStr) -> Option<PathBuf> {
    let bytes = value.as_bytes();
    if bytes.starts_with(b"journald:") || bytes.starts_with(b"syslog:") {
        return None;
    }
    Some(OsStr::from_bytes(bytes.strip_prefix(b"file:").unwrap_or(bytes)).into())
}

fn command(name: &OsStr, words: &[OsString], dialect: Dialect) -> Result<Command, String> {
    let words = options::of_command(name, words, dialect)?;
    if words.prints {
        return Ok(Command::Other);
    }
    Ok(match name.to_str() {
        Some("create") => created(&words, false)?.map_or(Command::Other, Command::Create),
        Some("run") => created(&words, true)?.map_or(Command::Other, Command::Create),
        Some("restore") => created(&words, true)?.map_or(Command::Other, Command::Restore),
        // A regular expression names no container. The claims of the deleted containers are ignored
        // as soon as their processes have ended.
        Some("delete") if !words.is_on("regex") => match words.operands.as_slice() {
            [container] => Command::Delete { container: container.clone() },
            _ => Command::Other,
        },
        _ => Command::Other,
    })
}

/// The container that is created. `None`: it has no name, and every runtime rejects the command.
fn created(words: &Words, attached: bool) -> Result<Option<Create>, String> {
    let path = |name| words.value(name).map(PathBuf::from);
    match words.operands.as_slice() {
        [] => Ok(None),
        [container] => Ok(Some(Create {
            bundle: path("bundle").unwrap_or_else(|| ".".into()),
            config: path("config"),
            container: container.clone(),
            pid_file: path("pid-file"),
            attached: attached && !words.is_on("detach"),
        })),
        more => Err(format!("{} words name the container, expected one", more.len())),
    }
}

impl Create {
    /// The container's config.json. crun resolves a relative `--config` in the current directory,
    /// older versions in the bundle.
    ///
    /// # Errors
    /// Both files exist.
    pub fn config_file(&self) -> Result<PathBuf> {
        let own = self.bundle.join(CONFIG);
        let Some(config) = self.config.as_deref().filter(|config| *config != Path::new(CONFIG))
        else {
            return Ok(own);
        };
        let within = self.bundle.join(config);
        // An absolute path replaces the bundle's.
        if config.is_absolute() {
            return Ok(within);
        }
        let exists = |path: &Path| match path.symlink_metadata() {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e).with_context(|| format!("reading {}", path.display())),
        };
        match (exists(config)?, exists(&within)?) {
            (true, true) if config.canonicalize()? != within.canonicalize()? => bail!(
                "--config: {} exists in the current directory and in the bundle; use an absolute path",
                config.display()
            ),
            (true, _) => Ok(config.to_owned()),
            (false, _) => Ok(within),
        }
    }

    /// The directory that relative mount sources are in.
    pub fn bundle(&self) -> Result<PathBuf> {
        let bundle = std::path::absolute(&self.bundle).context("--bundle")?;
        ensure!(bundle.is_absolute(), "--bundle: has no absolute path");
        Ok(bundle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Invocation {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        Invocation::parse(&words, Dialect::Go)
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
        let file = create.config_file().unwrap();
        assert_eq!((file, create.attached), ("/b/config.json".into(), false));
    }

    #[test]
    fn create_is_recognized_after_options_of_each_runtime() {
        for line in [
            "--debug -root=/r create -b /b c1",
            "--root /r --systemd-cgroup create c1 --bundle=/b",
            "--criu run --root /r create --preserve-fds 3 --no-pivot --bundle /b -- c1",
            "--log-level debug --root /r create --pidfd-socket /s --bundle /b c1",
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
    fn only_known_commands_are_other_commands() {
        for line in
            ["", "--version", "--help", "create --help", "start c1", "exec c1 create", "delete"]
        {
            assert_eq!(parse(line).command, Command::Other, "{line}");
        }
        for line in [
            "--root",
            "--log-file x create c1",
            "--newer create c1",
            "--newer debug create c1",
            "create --newer x c1",
            "create c1 c2",
            "clone c1",
            "mounts add c1 {}",
        ] {
            assert!(matches!(parse(line).command, Command::Unknown(_)), "{line}");
        }
        for line in ["delete --force c1", "delete c1", "delete -f -- c1"] {
            assert_eq!(parse(line).command, Command::Delete { container: "c1".into() }, "{line}");
        }
        assert_eq!(parse("delete --regex .*").command, Command::Other);
    }

    #[test]
    fn a_relative_config_is_searched_where_each_crun_does() {
        let scratch = tempfile::tempdir().unwrap();
        let of = |config: &str| {
            let bundle = scratch.path().to_owned();
            Create { bundle, config: Some(config.into()), ..Create::default() }.config_file()
        };
        std::fs::write(scratch.path().join("Cargo.toml"), "").unwrap();
        std::fs::write(scratch.path().join("other.json"), "").unwrap();
        assert_eq!(of("config.json").unwrap(), scratch.path().join("config.json"));
        assert_eq!(of("other.json").unwrap(), scratch.path().join("other.json"));
        assert_eq!(of("/x.json").unwrap(), Path::new("/x.json"));
        // Tests run in the package's directory, which has this file as well, and others.
        assert!(of("Cargo.toml").unwrap_err().to_string().contains("absolute"));
        let names = std::fs::read_dir(".").unwrap().map(|one| one.unwrap().file_name());
        let mut names = names.map(|name| name.into_string().unwrap());
        let other = names.find(|name| name != "Cargo.toml" && Path::new(name).is_file()).unwrap();
        assert_eq!(of(&other).unwrap(), Path::new(&other));
    }

    #[test]
    fn other_log_destinations_are_no_files() {
        let log = |line| parse(line).log;
        assert_eq!(log("--log journald:c state c"), None);
        assert_eq!(log("--log file:/l state c"), Some("/l".into()));
        assert_eq!(log("--log /l --newer state c"), Some("/l".into()));
    }
}
