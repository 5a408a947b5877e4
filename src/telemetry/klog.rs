//! The logging flags of Kubernetes' Go programs (klog), so that a command line written for one of them works here.
//! `-v` chooses how much is logged; the others are about files and headers that this program does not
//! have, and do nothing.

use super::logs;

#[derive(Debug, Clone, Default, clap::Args)]
#[group(skip)]
pub struct Args {
    /// Verbosity as klog has it: 0 to 3 info, 4 to 7 debug, from 8 trace of this program's own events.
    #[arg(long, hide_short_help = true, allow_negative_numbers = true, value_name = "N")]
    v: Option<i32>,

    #[command(flatten)]
    ignored: Ignored,
}

macro_rules! ignored {
    (switches: $($switch:ident)*; values: $($value:ident)*) => {
        #[derive(Debug, Clone, Default, clap::Args)]
        #[group(skip)]
        struct Ignored {
            $(#[arg(long = stringify!($switch), hide = true, num_args = 0..=1, require_equals = true,
                default_missing_value = "true", value_parser = boolean)]
            $switch: Option<bool>,)*
            $(#[arg(long = stringify!($value), hide = true, allow_hyphen_values = true)]
            $value: Option<String>,)*
        }

        /// All that klog has beside `-v`.
        #[cfg(test)]
        const IGNORED: &[(&str, &str)] =
            &[$((stringify!($switch), ""),)* $((stringify!($value), "=x")),*];
    };
}

ignored! {
    switches: add_dir_header alsologtostderr legacy_stderr_threshold_behavior logtostderr one_output
        skip_headers skip_log_headers;
    values: alsologtostderrthreshold log_backtrace_at log_dir log_file log_file_max_size stderrthreshold vmodule
}

impl Args {
    /// What is logged: `-v` decides where `--log-level` was left as it is.
    pub fn apply(&self, log: &mut logs::Args) {
        let level = match self.v {
            Some(v) if v >= 8 => "info,csi_loopback=trace",
            Some(v) if v >= 4 => "info,csi_loopback=debug",
            _ => return,
        };
        if log.log_level == logs::DEFAULT_LEVEL {
            log.log_level = level.to_owned();
        }
    }
}

/// A boolean as Go's flags take it.
pub fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("is not true or false".into()),
    }
}

/// Turns a command line in the style of Go's flags, where one dash does for a long name, into one with two.
/// What follows `--` is left alone, and so are single letters but `-v`.
pub fn double_dashes(arguments: impl Iterator<Item = String>) -> Vec<String> {
    let mut through = false;
    let turned = arguments.map(|argument| {
        through |= argument == "--";
        let name = argument.strip_prefix('-').filter(|rest| !rest.starts_with('-'));
        let name = name.map(|rest| rest.split_once('=').map_or(rest, |(name, _)| name));
        let is_flag = name.is_some_and(|name| {
            name == "v"
                || (name.len() > 1 && name.starts_with(|first: char| first.is_ascii_alphabetic()))
        });
        if is_flag && !through { format!("-{argument}") } else { argument }
    });
    turned.collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        log: logs::Args,
        #[command(flatten)]
        klog: Args,
    }

    fn level(line: &str) -> String {
        let turned = double_dashes(line.split_whitespace().map(str::to_owned));
        let Line { mut log, klog } = Line::try_parse_from(turned).expect(line);
        klog.apply(&mut log);
        log.log_level
    }

    #[test]
    fn every_flag_of_klog_is_taken_with_one_dash_and_with_two() {
        for (name, value) in IGNORED {
            for dashes in ["-", "--"] {
                assert_eq!(level(&format!("x {dashes}{name}{value}")), "info");
            }
        }
        assert_eq!(level("x -logtostderr=false -stderrthreshold INFO -v=2"), "info");
    }

    #[test]
    fn verbosity_chooses_how_much_is_logged() {
        for (line, expected) in [
            ("x -v=3", "info"),
            ("x -v 5", "info,csi_loopback=debug"),
            ("x --v=10", "info,csi_loopback=trace"),
            ("x -v=10 --log-level warn", "warn"),
        ] {
            assert_eq!(level(line), expected, "{line}");
        }
    }

    #[test]
    fn only_long_flags_get_a_second_dash() {
        let line = ["-csi-address=/a", "-v", "5", "-h", "--port", "-1", "--", "-x-y"];
        let turned = double_dashes(line.map(str::to_owned).into_iter());
        assert_eq!(turned, ["--csi-address=/a", "--v", "5", "-h", "--port", "-1", "--", "-x-y"]);
    }
}
