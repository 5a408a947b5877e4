//! The logging flags of Kubernetes' Go programs (klog), so that a command line for one of them
//! works here. `-v` sets the verbosity. The other flags concern files and headers that this program
//! does not have, and are ignored.

use super::logs;

#[derive(Debug, Clone, Default, clap::Args)]
#[group(skip)]
pub struct Args {
    /// Verbosity as in klog: 0 to 3 info, 4 to 7 debug, 8 and above trace of this program's events
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

        /// All flags of klog except `-v`.
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
    /// Applies `-v`, unless `--log-level` is set.
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

/// A boolean in the syntax of Go's flags.
pub fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("is neither true nor false".into()),
    }
}

/// Converts a command line in the style of Go's flags, where a long name may have one dash, to two
/// dashes. Arguments after `--` and single letters except `-v` remain unchanged.
pub fn double_dashes(arguments: impl Iterator<Item = String>) -> Vec<String> {
    let mut after_separator = false;
    let converted = arguments.map(|argument| {
        after_separator |= argument == "--";
        let name = argument.strip_prefix('-').filter(|rest| !rest.starts_with('-'));
        let name = name.map(|rest| rest.split_once('=').map_or(rest, |(name, _)| name));
        let is_flag = name.is_some_and(|name| {
            name == "v"
                || (name.len() > 1 && name.starts_with(|first: char| first.is_ascii_alphabetic()))
        });
        if is_flag && !after_separator { format!("-{argument}") } else { argument }
    });
    converted.collect()
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
        let converted = double_dashes(line.split_whitespace().map(str::to_owned));
        let Line { mut log, klog } = Line::try_parse_from(converted).expect(line);
        klog.apply(&mut log);
        log.log_level
    }

    #[test]
    fn every_klog_flag_is_accepted_with_one_or_two_dashes() {
        for (name, value) in IGNORED {
            for dashes in ["-", "--"] {
                assert_eq!(level(&format!("x {dashes}{name}{value}")), "info");
            }
        }
        assert_eq!(level("x -logtostderr=false -stderrthreshold INFO -v=2"), "info");
    }

    #[test]
    fn verbosity_sets_the_log_level() {
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
        let converted = double_dashes(line.map(str::to_owned).into_iter());
        assert_eq!(converted, ["--csi-address=/a", "--v", "5", "-h", "--port", "-1", "--", "-x-y"]);
    }
}
