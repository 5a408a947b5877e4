//! The options of runc, crun and youki, and how each of them reads its command line. Taken from the
//! sources of runc 1.1 to 1.5 (main.go and a file per command), crun 1.8 to 1.27 (src/) and youki
//! 0.5 (crates/liboci-cli). No option differs between them in whether it has a value, so one table
//! serves all. An option that the table lacks may hide the command or the bundle, so it is an error.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// Global options: `long|short`, with `=` if the option has a value and `?` if it may have one that
/// is attached.
const GLOBAL: &str = "debug log|l= log-format= log-level= root|r= criu= rootless= systemd-cgroup|s \
    systemd-log cgroup-manager=";
/// Options of every command. They print a text, and nothing else happens.
const PRINTING: &str = "help|h usage| version|v";
/// The same, without a long form.
const PRINTING_SHORT: &[u8] = b"?V";

/// The closed list of commands, each with its options. crun's `mounts` is missing: it can mount a
/// target into a running container.
const COMMANDS: &[(&str, &str)] = &[
    (
        "create",
        "bundle|b= config|f= console-socket|c= pidfd-socket= pid-file|p= no-pivot no-subreaper \
         no-new-keyring preserve-fds=",
    ),
    (
        "run",
        "bundle|b= config|f= console-socket|c= pidfd-socket= pid-file|p= no-pivot no-subreaper \
         no-new-keyring preserve-fds= detach|d keep",
    ),
    (
        "restore",
        "bundle|b= console-socket= image-path= work-path= parent-path= tcp-established tcp-close \
         ext-unix-sk shell-job file-locks manage-cgroups-mode= detach|d pid-file= no-subreaper \
         no-pivot empty-ns= auto-dedup lazy-pages network-lock= lsm-profile= lsm-mount-context=",
    ),
    ("delete", "force|f regex|r"),
    ("start", ""),
    ("state", ""),
    ("kill", "all|a regex|r"),
    (
        "exec",
        "console-socket= pidfd-socket= cwd= env|e= tty|t? user|u= additional-gids|g= process|p= \
         detach|d pid-file= process-label= apparmor= no-new-privs cap|c= preserve-fds= cgroup= \
         ignore-paused",
    ),
    (
        "checkpoint",
        "image-path= work-path= parent-path= leave-running tcp-established tcp-skip-in-flight \
         link-remap ext-unix-sk shell-job lazy-pages status-fd= page-server= file-locks pre-dump \
         manage-cgroups-mode= empty-ns= auto-dedup network-lock=",
    ),
    // youki's name.
    (
        "checkpointt",
        "image-path= work-path= leave-running tcp-established tcp-skip-in-flight link-remap \
         ext-unix-sk shell-job file-locks manage-cgroups-mode=",
    ),
    ("events", "interval= stats"),
    ("list", "format|f= quiet|q"),
    ("ps", "format|f="),
    ("pause", ""),
    ("resume", ""),
    ("spec", "bundle|b= file|f= rootless"),
    (
        "update",
        "resources|r= blkio-weight= cpu-period= cpu-quota= cpu-burst= cpu-share= cpu-rt-period= \
         cpu-rt-runtime= cpu-idle= cpuset-cpus= cpuset-mems= kernel-memory= kernel-memory-tcp= \
         memory= memory-reservation= memory-swap= pids-limit= l3-cache-schema= mem-bw-schema=",
    ),
    ("features", ""),
    ("info", ""),
    ("completion", "shell|s="),
    ("help", ""),
    ("h", ""),
];

/// Commands whose words after the container are another program's.
const OPEN_ENDED: [&str; 3] = ["exec", "ps", "help"];

/// How a runtime reads its command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// runc: `-name` is `--name`.
    Go,
    /// crun and youki: `-abc` is `-a -b -c`, or `-a` with the value `bc`.
    Short,
    /// Another program, for which `-abc` is ambiguous.
    Unknown,
}

impl Dialect {
    /// The dialect of a program, by the name of its file.
    pub fn of(program: &Path) -> Self {
        let real = find_program(program).and_then(|path| path.canonicalize().ok());
        match real.as_deref().unwrap_or(program).file_name().and_then(OsStr::to_str) {
            Some("runc") => Self::Go,
            Some("crun" | "youki") => Self::Short,
            _ => Self::Unknown,
        }
    }
}

/// The file of a program that is named as for execvp(3).
fn find_program(program: &Path) -> Option<std::path::PathBuf> {
    if program.components().count() > 1 || program.is_absolute() {
        return Some(program.to_owned());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    None,
    Attached,
    Required,
}

#[derive(Debug, Clone, Copy)]
struct Definition {
    long: &'static str,
    short: Option<u8>,
    value: Value,
}

fn definitions(text: &'static str) -> impl Iterator<Item = Definition> {
    text.split_whitespace().map(|word| {
        let (name, value) = match word.as_bytes().last() {
            Some(b'=') => (&word[..word.len() - 1], Value::Required),
            Some(b'?') => (&word[..word.len() - 1], Value::Attached),
            _ => (word, Value::None),
        };
        let (long, short) = name.split_once('|').unwrap_or((name, ""));
        Definition { long, short: short.bytes().next(), value }
    })
}

/// An option with its value, by its long name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub name: &'static str,
    /// Of an option that has a value. For a switch, `Some("false")` if it is switched off.
    pub value: Option<OsString>,
}

/// The words of a command line, or of its part before the command.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Words {
    pub options: Vec<Found>,
    /// Words that are no options.
    pub operands: Vec<OsString>,
    /// A text is printed, and nothing else happens.
    pub prints: bool,
}

impl Words {
    /// The value of an option; the last one counts.
    pub fn value(&self, name: &str) -> Option<&OsStr> {
        let mut found = self.options.iter().rev().filter(|option| option.name == name);
        found.next().and_then(|option| option.value.as_deref())
    }

    /// Whether a switch is on.
    pub fn is_on(&self, name: &str) -> bool {
        let last = self.options.iter().rev().find(|option| option.name == name);
        last.is_some_and(|option| option.value.is_none())
    }
}

/// Reads the global options. Returns them and the words from the command on. If a word is unknown,
/// the options before it remain in `read`.
pub fn global<'a>(
    words: &'a [OsString],
    dialect: Dialect,
    read: &mut Words,
) -> Result<&'a [OsString], String> {
    Reader { definitions: table(GLOBAL), dialect, read }.read(words, Some(0))
}

/// Reads the words after a command.
///
/// # Errors
/// The command or an option is unknown.
pub fn of_command(command: &OsStr, words: &[OsString], dialect: Dialect) -> Result<Words, String> {
    let found = COMMANDS.iter().find(|(name, _)| OsStr::new(name) == command);
    let Some((name, text)) = found else {
        return Err(format!("the command {:?} is unknown", command.to_string_lossy()));
    };
    let mut read = Words::default();
    let end = OPEN_ENDED.contains(name).then_some(1);
    Reader { definitions: table(text), dialect, read: &mut read }
        .read(words, end)
        .map_err(|why| format!("{name}: {why}"))?;
    Ok(read)
}

fn table(text: &'static str) -> Vec<Definition> {
    definitions(text).chain(definitions(PRINTING)).collect()
}

struct Reader<'r> {
    definitions: Vec<Definition>,
    dialect: Dialect,
    read: &'r mut Words,
}

impl Reader<'_> {
    /// Reads until this number of operands, if any. Returns the words that follow.
    fn read<'a>(
        &mut self,
        mut words: &'a [OsString],
        operands: Option<usize>,
    ) -> Result<&'a [OsString], String> {
        let mut options_end = false;
        while let Some((word, rest)) = words.split_first() {
            let bytes = word.as_bytes();
            if !options_end && bytes == b"--" {
                options_end = true;
            } else if options_end || bytes.len() < 2 || bytes[0] != b'-' {
                if operands == Some(0) {
                    return Ok(words);
                }
                self.read.operands.push(word.clone());
                if operands == Some(self.read.operands.len()) {
                    return Ok(rest);
                }
            } else {
                words = self.option(word, rest)?;
                continue;
            }
            words = rest;
        }
        Ok(words)
    }

    /// Reads an option, and its value from the next words.
    fn option<'a>(&mut self, word: &OsStr, rest: &'a [OsString]) -> Result<&'a [OsString], String> {
        let bytes = word.as_bytes();
        let unknown = || format!("the option {:?} is unknown", word.to_string_lossy());
        let single = bytes[1] != b'-';
        let name = if single { &bytes[1..] } else { &bytes[2..] };
        if single && name.len() > 1 && self.dialect != Dialect::Go {
            return match self.dialect {
                Dialect::Unknown => Err(format!(
                    "{:?} can be one option or several; write options in their long form",
                    word.to_string_lossy()
                )),
                _ => self.bundle(name, rest).ok_or_else(unknown),
            };
        }
        if single && PRINTING_SHORT.contains(&name[0]) && name.len() == 1 {
            self.read.prints = true;
            return Ok(rest);
        }
        let mut parts = name.splitn(2, |byte| *byte == b'=');
        let name = parts.next().unwrap_or_default();
        let value = parts.next();
        // A Go program treats -name and --name alike.
        let short = single || self.dialect == Dialect::Go;
        let long = !single || self.dialect == Dialect::Go;
        let found = self.definitions.iter().copied().find(|one| {
            long && one.long.as_bytes() == name
                || short && name.len() == 1 && one.short == Some(name[0])
        });
        self.add(found.ok_or_else(unknown)?, value, rest).ok_or_else(unknown)
    }

    /// Reads `-abc`.
    fn bundle<'a>(&mut self, names: &[u8], rest: &'a [OsString]) -> Option<&'a [OsString]> {
        for (index, name) in names.iter().enumerate() {
            if PRINTING_SHORT.contains(name) {
                self.read.prints = true;
                continue;
            }
            let found = self.definitions.iter().copied().find(|one| one.short == Some(*name))?;
            let attached = &names[index + 1..];
            if found.value != Value::None && !attached.is_empty() {
                // getopt(3) takes `=` as part of the value, youki does not.
                if attached[0] == b'=' {
                    return None;
                }
                return self.add(found, Some(attached), rest);
            }
            if found.value != Value::None {
                return self.add(found, None, rest);
            }
            self.add(found, None, rest)?;
        }
        Some(rest)
    }

    /// Adds an option. `None`: it has an invalid value.
    fn add<'a>(
        &mut self,
        one: Definition,
        attached: Option<&[u8]>,
        rest: &'a [OsString],
    ) -> Option<&'a [OsString]> {
        let is_printing = definitions(PRINTING).any(|printing| printing.long == one.long);
        let mut remaining = rest;
        let value = match (one.value, attached) {
            (Value::None, None) => None,
            (Value::None, Some(_)) if is_printing => return None,
            // A switch of a Go program may have a value.
            (Value::None, Some(b"true" | b"TRUE" | b"True" | b"t" | b"T" | b"1")) => None,
            (Value::None, Some(b"false" | b"FALSE" | b"False" | b"f" | b"F" | b"0")) => {
                Some("false".into())
            }
            (Value::None, Some(_)) => return None,
            (Value::Required, None) => {
                let (next, after) = rest.split_first()?;
                remaining = after;
                Some(next.clone())
            }
            (_, attached) => attached.map(|bytes| OsString::from_vec(bytes.to_vec())),
        };
        self.read.prints |= is_printing;
        self.read.options.push(Found { name: one.long, value });
        Some(remaining)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    fn read(dialect: Dialect, line: &str) -> Result<Words, String> {
        let words = words(line);
        let (command, rest) = words.split_first().unwrap();
        of_command(command, rest, dialect)
    }

    #[test]
    fn options_are_read_as_their_runtime_reads_them() {
        let bundle = |dialect, line: &str| {
            let read = read(dialect, line)?;
            Ok::<_, String>(read.value("bundle").map(|value| value.to_str().unwrap().to_owned()))
        };
        let b = Ok(Some("/b".to_owned()));
        for line in ["run --bundle /b c", "run --bundle=/b c", "run -b /b c", "run c --bundle /b"] {
            for dialect in [Dialect::Go, Dialect::Short, Dialect::Unknown] {
                assert_eq!(bundle(dialect, line), b, "{line}");
            }
        }
        for line in ["run -bundle /b c", "run -b=/b c", "run --b /b c", "run -bundle=/b c"] {
            assert_eq!(bundle(Dialect::Go, line), b, "{line}");
            assert!(bundle(Dialect::Unknown, line).is_err(), "{line}");
        }
        assert_eq!(bundle(Dialect::Short, "run -b/b c"), b);
        assert_eq!(bundle(Dialect::Short, "run -db /b c"), b);
        assert_eq!(bundle(Dialect::Short, "run -db/b c"), b);
        for line in ["run -b/b c", "run -db /b c"] {
            assert!(bundle(Dialect::Go, line).is_err(), "{line}");
            assert!(bundle(Dialect::Unknown, line).is_err(), "{line}");
        }
        // crun completes names, and no table can know what an abbreviation means.
        for line in ["run --bun /b c", "run --b /b c", "run -b=/b c", "run --detach=maybe c"] {
            assert!(bundle(Dialect::Short, line).is_err(), "{line}");
        }
        let on = |line| read(Dialect::Go, line).unwrap().is_on("detach");
        assert!(on("run -d c") && on("run --detach=true c") && !on("run -d=false c"));
        assert!(!on("run c") && !on("run -- -d"));
    }

    #[test]
    fn unknown_commands_and_options_are_errors() {
        for line in
            ["mounts add c m", "created c", "- c", "run --new c", "state --new c", "kill -9 c"]
        {
            assert!(read(Dialect::Go, line).is_err(), "{line}");
        }
        for line in ["exec c ps --anything", "ps c -ef", "exec -e A=b c sh -c x", "delete -f c"] {
            read(Dialect::Go, line).unwrap();
        }
        assert!(read(Dialect::Go, "run --bundle").is_err(), "a missing value");
        assert!(read(Dialect::Go, "run --help=false c").is_err());
        assert!(read(Dialect::Go, "run --help").unwrap().prints);
    }

    #[test]
    fn global_options_end_at_the_command() {
        let of = |line: &str| {
            let mut found = Words::default();
            let words = words(line);
            let rest = global(&words, Dialect::Unknown, &mut found);
            (rest.map(|rest| rest.join(OsStr::new(" "))), found)
        };
        for line in [
            "--root /r --log-level debug --log-format json create c",
            "--root=/r --systemd-cgroup -- create c",
            "--cgroup-manager cgroupfs -r /r --systemd-log create c",
        ] {
            let (rest, found) = of(line);
            assert_eq!(rest.as_deref(), Ok(OsStr::new("create c")), "{line}");
            assert_eq!(found.value("root"), Some(OsStr::new("/r")), "{line}");
        }
        let (rest, found) = of("--log /l --newer debug create c");
        assert!(rest.unwrap_err().contains("--newer"));
        assert_eq!(found.value("log"), Some(OsStr::new("/l")), "for the report");
    }

    /// Long options in a help text, and whether each has a value.
    fn documented(program: &str, command: &str) -> Vec<(String, bool)> {
        let mut help = Command::new(program);
        if !command.is_empty() {
            help.arg(command);
        }
        let Ok(output) = help.arg("--help").output() else { return Vec::new() };
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let of_line = |line: &str| {
            let line = line.trim_start();
            let at = line.find("--").filter(|_| line.starts_with('-'))?;
            let word = line[at + 2..].split([' ', ',']).next()?;
            let (name, attached) = match word.split_once(['=', '[']) {
                Some((name, _)) => (name, true),
                None => (word, false),
            };
            let follows = line[at + 2 + word.len()..].starts_with(" value")
                || line.contains(&format!("--{name} value"));
            Some((name.to_owned(), attached || follows))
        };
        text.lines().filter_map(of_line).collect()
    }

    #[test]
    fn options_of_installed_runtimes_are_known() {
        for program in ["runc", "crun", "youki"] {
            let all = COMMANDS.iter().chain(&[("", GLOBAL)]);
            for (command, text) in all.filter(|(name, _)| !matches!(*name, "help" | "h")) {
                for (option, has_value) in documented(program, command) {
                    let known = table(text).into_iter().find(|one| one.long == option);
                    let Some(known) = known else { panic!("{program} {command}: {option}") };
                    let agrees = match known.value {
                        Value::None => !has_value,
                        Value::Required => has_value,
                        // crun's may have one, runc's is a switch.
                        Value::Attached => true,
                    };
                    assert!(agrees, "{program} {command} {option}");
                }
            }
        }
    }
}
