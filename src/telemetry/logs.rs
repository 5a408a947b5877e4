//! Structured logs on stderr, as text for people or JSON for machines, times in UTC. Panics become
//! log lines too, so that a reader of JSON misses none.

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
    /// One line of text for each event.
    Text,
    /// One JSON object for each event.
    Json,
}

/// What is logged when nothing else is asked for.
pub const DEFAULT_LEVEL: &str = "info";

/// The flags of a role that logs.
#[derive(Debug, Clone, clap::Args)]
// Its group would have the name `Args`, as that of the role that flattens it.
#[group(skip)]
pub struct Args {
    /// How log lines are written to stderr.
    #[arg(long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    pub log_format: Format,

    /// What is logged: error, warn, info, debug, trace, or directives such as
    /// info,csi_loopback::driver=debug. Of libraries nothing below info.
    #[arg(long, default_value = DEFAULT_LEVEL, value_parser = directives, value_name = "LEVEL")]
    pub log_level: String,
}

impl Args {
    /// The same flags, for another process of this program.
    pub fn line(&self) -> Vec<String> {
        let format = self.log_format.to_possible_value();
        let format = format.map(|format| format!("--log-format={}", format.get_name()));
        format.into_iter().chain([format!("--log-level={}", self.log_level)]).collect()
    }
}

/// Checked here so that a wrong directive is an error of the command line; kept as text because the
/// filter itself cannot be cloned.
fn directives(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("no level given; use error, warn, info, debug or trace".into());
    }
    if let Some(word) = text.split(',').map(str::trim).find(|one| is_mistyped(one)) {
        return Err(format!(
            "{word:?} is not a level; use error, warn, info, debug, trace or off, or directives such as \
             info,csi_loopback::driver=debug"
        ));
    }
    EnvFilter::try_new(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// Whether the directive is a bare word that is neither a level nor a module of this program. The filter
/// takes any word for the name of a library, of which it then shows everything, and nothing else.
fn is_mistyped(directive: &str) -> bool {
    let is_bare = !directive.is_empty() && !directive.contains(['=', '[', ']']);
    let of_ours = directive.split("::").next() == Some(env!("CARGO_CRATE_NAME"));
    is_bare && !of_ours && directive.parse::<LevelFilter>().is_err()
}

/// What libraries say below info may hold anything that passes through them: addresses with the names of objects in
/// them, one of which may be a token. So that is shown at no level; and nothing at all of the API server's client: what
/// fails there is told by who has asked.
fn may_be_shown(event: &Metadata<'_>) -> bool {
    let of = |name: &str| event.target().split("::").next() == Some(name);
    of(env!("CARGO_CRATE_NAME")) || (*event.level() <= Level::INFO && !of("kube_client"))
}

/// Starts logging. To be called once, before any thread is started.
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
    started.map_err(|error| anyhow::anyhow!("starting the log: {error}"))?;
    // By which whoever looks for what must not be in a log knows that it holds all there is.
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
    fn log_levels_and_directives_are_checked_when_parsed() {
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
