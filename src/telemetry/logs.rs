//! Structured logs on stderr, as text or JSON, with times in UTC. Panics are logged too, so that
//! JSON logs are complete.

use std::io::{IsTerminal, stderr};

use clap::ValueEnum;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::{FilterExt, LevelFilter, filter_fn};
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

/// Validated here, so that an invalid directive is an error of the command line. Kept as text,
/// because the filter cannot be cloned.
fn directives(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("the level is empty; use error, warn, info, debug or trace".into());
    }
    if let Some(word) = text.split(',').map(str::trim).find(|one| is_mistyped(one)) {
        return Err(format!(
            "{word:?} is not a level; use error, warn, info, debug, trace or off, or directives such as \
             info,csi_loopback::driver=debug"
        ));
    }
    EnvFilter::try_new(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// Whether the directive is a bare word that is neither a level nor a module of this program. The
/// filter would accept any word as the name of a library, log all events of it, and nothing else.
fn is_mistyped(directive: &str) -> bool {
    let is_bare = !directive.is_empty() && !directive.contains(['=', '[', ']']);
    let is_own_module = directive.split("::").next() == Some(env!("CARGO_CRATE_NAME"));
    is_bare && !is_own_module && directive.parse::<LevelFilter>().is_err()
}

/// Below info, libraries may log anything that passes through them, such as object addresses, one
/// of which may be a token. So these events are never logged. Neither are any events of the API
/// server's client: its callers report its errors.
fn may_be_shown(event: &Metadata<'_>) -> bool {
    let of = |name: &str| event.target().split("::").next() == Some(name);
    of(env!("CARGO_CRATE_NAME")) || (*event.level() <= Level::INFO && !of("kube_client"))
}

/// Starts logging. Must be called once, before any thread is started.
pub fn init(args: Args) -> anyhow::Result<()> {
    let Args { log_format, log_level } = args;
    let filter = EnvFilter::try_new(log_level)?.and(filter_fn(may_be_shown));
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
    use super::directives;

    #[test]
    fn log_levels_and_directives_are_validated() {
        for good in [
            "info",
            "DEBUG",
            "off",
            "2",
            "warn,csi_loopback::driver=trace",
            "csi_loopback::driver",
            "info,h2=warn",
            "info,csi_loopback[call]=debug",
        ] {
            assert!(directives(good).is_ok(), "{good}");
        }
        for bad in
            ["", " ", "info=loud", "a=b=c", "foo", "inf", "infos,csi_loopback=debug", "info,h2"]
        {
            assert!(directives(bad).is_err(), "{bad}");
        }
    }
}
