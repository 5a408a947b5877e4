//! Structured logs on stderr, as text or JSON, with times in UTC. Panics are logged too, so that
//! JSON logs are complete.

use std::io::{IsTerminal, stderr};

use clap::ValueEnum;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::{FilterExt, LevelFilter, ParseError, filter_fn};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

/// `--log-format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One line of text per event
    Text,
    /// One JSON object per event
    Json,
}

/// The default of `--log-level`.
pub const DEFAULT_LEVEL: &str = "info";

/// The logging flags of a role.
#[derive(Debug, Clone, clap::Args)]
// The group would be named `Args`, like the group of the role that flattens it.
#[group(skip)]
pub struct Args {
    /// Format of the log on stderr
    #[arg(long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    pub log_format: Format,

    /// Log level: error, warn, info, debug, trace or off, or directives such as
    /// info,csi_loopback::driver=debug; libraries log info and above only
    #[arg(long, default_value = DEFAULT_LEVEL, value_parser = directives, value_name = "LEVEL")]
    pub log_level: String,
}

impl Args {
    /// The command line arguments for a child process of this program.
    pub fn line(&self) -> Vec<String> {
        let format = self.log_format.to_possible_value();
        let format = format.map(|format| format!("--log-format={}", format.get_name()));
        format.into_iter().chain([format!("--log-level={}", self.log_level)]).collect()
    }
}

/// The members of the workspace, the directories of src/.
pub const MEMBERS: [&str; 10] = [
    "admission",
    "cbt",
    "commands",
    "common",
    "deferral",
    "driver",
    "grpc",
    "kubernetes",
    "storage",
    "telemetry",
];

/// The name of the program, and of the crate of the binary.
const PROGRAM: &str = "csi_loopback";

/// Whether the code at this path is part of this program. The crate of a member is
/// `csi_loopback_MEMBER`.
pub fn is_own(path: &str) -> bool {
    let name = path.split("::").next().and_then(|name| name.strip_prefix(PROGRAM));
    name.is_some_and(|member| {
        member.is_empty()
            || member.strip_prefix('_').is_some_and(|member| MEMBERS.contains(&member))
    })
}

/// The directive for the crate that `csi_loopback::MEMBER` names.
fn for_crate(directive: &str) -> String {
    match directive.strip_prefix(PROGRAM).and_then(|rest| rest.strip_prefix("::")) {
        Some(member) => format!("{PROGRAM}_{member}"),
        None => directive.to_owned(),
    }
}

fn filter(text: &str) -> Result<EnvFilter, ParseError> {
    let directives: Vec<_> = text.split(',').map(|one| for_crate(one.trim())).collect();
    EnvFilter::try_new(directives.join(","))
}

/// Validated here, so that an invalid directive is an error of the command line. Kept as text,
/// because the filter cannot be cloned.
fn directives(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("the level is empty; use error, warn, info, debug or trace".into());
    }
    if let Some(word) = text.split(',').map(str::trim).find(|one| names_no_member(one)) {
        let members = MEMBERS.join(&format!(", {PROGRAM}::"));
        return Err(format!(
            "{word:?} names no part of this program; the parts are {PROGRAM}::{members}"
        ));
    }
    if let Some(word) = text.split(',').map(str::trim).find(|one| is_mistyped(one)) {
        return Err(format!(
            "{word:?} is not a level; use error, warn, info, debug, trace or off, or directives such as \
             info,csi_loopback::driver=debug"
        ));
    }
    filter(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// Whether the directive is a bare word that is neither a level nor a module of this program. The
/// filter would accept any word as the name of a library, log all events of it, and nothing else.
fn is_mistyped(directive: &str) -> bool {
    let is_bare = !directive.is_empty() && !directive.contains(['=', '[', ']']);
    is_bare && !is_own(&for_crate(directive)) && directive.parse::<LevelFilter>().is_err()
}

/// Whether the directive is for a module of this program that does not exist, and would log nothing.
fn names_no_member(directive: &str) -> bool {
    let target = for_crate(directive);
    let end = target.find(['=', '[']).unwrap_or(target.len());
    directive.starts_with(&format!("{PROGRAM}::")) && !is_own(&target[..end])
}

/// Below info, libraries may log anything that passes through them, such as object addresses, one
/// of which may be a token. So these events are never logged. Neither are any events of the API
/// server's client: its callers report its errors.
fn may_be_shown(event: &Metadata<'_>) -> bool {
    let of = |name: &str| event.target().split("::").next() == Some(name);
    is_own(event.target()) || (*event.level() <= Level::INFO && !of("kube_client"))
}

/// Starts logging. Must be called once, before any thread is started.
pub fn init(args: Args) -> anyhow::Result<()> {
    let Args { log_format, log_level } = args;
    let filter = filter(&log_level)?.and(filter_fn(may_be_shown));
    // https://no-color.org
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let color = stderr().is_terminal() && !no_color;
    let lines = fmt::layer().with_writer(stderr).with_ansi(color);
    let lines = match log_format {
        Format::Text => lines.with_filter(filter).boxed(),
        Format::Json => lines.json().flatten_event(true).with_filter(filter).boxed(),
    };
    let started = tracing_subscriber::registry().with(lines).try_init();
    started.map_err(|error| anyhow::anyhow!("failed to start logging: {error}"))?;
    // Marks a complete log for checks that a log contains no secret.
    tracing::trace!("logging everything");
    std::panic::set_hook(Box::new(|panic| {
        let location = panic.location().map(ToString::to_string).unwrap_or_default();
        let payload = panic.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let message = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let message = message.unwrap_or("no message");
        tracing::error!(location, "panic: {message}");
    }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};
    use std::sync::Arc;

    use tracing::subscriber::with_default;

    use super::*;

    #[test]
    fn log_levels_and_directives_are_validated() {
        for good in [
            "info",
            "DEBUG",
            "off",
            "2",
            "warn,csi_loopback::driver=trace",
            "csi_loopback::driver",
            "csi_loopback::storage::take_snapshot=debug,info",
            "csi_loopback_cbt::sidecar=debug",
            "info,h2=warn",
            "info,csi_loopback[call]=debug",
        ] {
            assert!(directives(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            " ",
            "info=loud",
            "a=b=c",
            "foo",
            "inf",
            "infos,csi_loopback=debug",
            "info,h2",
            "csi_loopback::nothing=debug",
            "csi_loopback_nothing",
        ] {
            assert!(directives(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn debug_events_of_all_members_and_no_library_are_admitted() {
        assert!(is_own("csi_loopback") && is_own("csi_loopback::cli"));
        for member in MEMBERS {
            assert!(is_own(&format!("csi_loopback_{member}::module")), "{member}");
        }
        for library in
            ["kube_client", "csi_loopback_x", "csi_loopbackdriver", "driver", "h2::storage", ""]
        {
            assert!(!is_own(library), "{library}");
        }
    }

    #[test]
    fn a_directive_is_for_the_program_or_one_member() {
        let shown = |directives: &str| {
            let file = Arc::new(tempfile::tempfile().unwrap());
            let filter = filter(directives).unwrap().and(filter_fn(may_be_shown));
            let layer = fmt::layer().with_writer(Arc::clone(&file)).with_filter(filter);
            with_default(tracing_subscriber::registry().with(layer), || {
                tracing::debug!(target: "csi_loopback_driver::server", "one");
                tracing::debug!(target: "csi_loopback_storage::pool", "two");
                tracing::debug!(target: "h2::client", "three");
            });
            let mut text = String::new();
            (&*file).rewind().unwrap();
            (&*file).read_to_string(&mut text).unwrap();
            ["one", "two", "three"].map(|word| text.contains(word))
        };
        assert_eq!(shown("info,csi_loopback=debug"), [true, true, false]);
        assert_eq!(shown("info,csi_loopback::driver=debug"), [true, false, false]);
        assert_eq!(shown("trace"), [true, true, false]);
        assert_eq!(shown("info"), [false; 3]);
    }
}
