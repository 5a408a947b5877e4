//! The program as a plugin of kubectl: `kubectl cbt` runs `kubectl-cbt`, a link to this program. It
//! has the commands of `snapshot`. Without `--namespace` they use the namespace of the context, as
//! kubectl does, and with `--endpoint` a driver.

use std::ffi::OsString;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{Args, FromArgMatches};

use super::Command;
use super::snapshot::SnapshotArgs;
use kubernetes::client::User;
use telemetry::on_demand::OnDemand;

/// Name of the program as a plugin.
pub const PROGRAM: &str = "kubectl-cbt";

/// The commands that can use Kubernetes.
const LISTINGS: [&str; 4] = ["allocated", "delta", "map", "verify"];
/// With one of these, the namespace of the context is not used.
const WITHOUT_CONTEXT: [&str; 5] = ["--namespace", "-n", "--endpoint", "--help", "-h"];

/// The command of a whole command line; `version` is what `--version` prints.
///
/// # Errors
/// The arguments are invalid, or no cluster is configured; the text of `--help` or `--version`.
pub fn parse(mut line: Vec<OsString>, version: &'static str) -> Result<Command, clap::Error> {
    let mut parser = parser(version);
    // As of the program under its own name.
    if let Some(word) = line.get_mut(1).filter(|word| *word == "version") {
        *word = "--version".into();
    }
    let listing = line.iter().position(|word| LISTINGS.iter().any(|name| word == name));
    let has_place = WITHOUT_CONTEXT.iter().any(|flag| value(&line, flag).is_some());
    if let Some(at) = listing.filter(|_| !has_place) {
        let user = User {
            kubeconfig: value(&line, "--kubeconfig").map(Path::new),
            context: value(&line, "--context"),
        };
        let namespace = user.namespace().map_err(|error| {
            parser.error(ErrorKind::MissingRequiredArgument, format!("{error:#}"))
        })?;
        line.insert(at + 1, format!("--namespace={namespace}").into());
    }
    let matches = parser.try_get_matches_from_mut(line)?;
    OnDemand::from_arg_matches(&matches).map(Command::Snapshot)
}

fn parser(version: &'static str) -> clap::Command {
    let parser = SnapshotArgs::augment_args(clap::Command::new(PROGRAM))
        .bin_name("kubectl cbt")
        .about("List, draw and verify the changed blocks of VolumeSnapshots")
        .version(version)
        .arg_required_else_help(true)
        .mut_subcommand("delta", |command| {
            command.override_usage("kubectl cbt delta [OPTIONS] <BASE> <TARGET>")
        })
        .mut_subcommand("verify", |command| {
            command.override_usage("kubectl cbt verify [OPTIONS] [BASE] <TARGET>")
        });
    // The examples have the other name.
    parser.mut_subcommands(|command| command.after_help(""))
}

/// The value of a flag, in either form; empty if it has none.
fn value<'a>(line: &'a [OsString], flag: &str) -> Option<&'a str> {
    let mut words = line.iter().map(|word| word.to_str().unwrap_or_default());
    let of = |word: &'a str| match word.strip_prefix(flag)? {
        "" => Some(None),
        rest if flag.starts_with("--") => rest.strip_prefix('=').map(Some),
        rest => Some(Some(rest)),
    };
    let own = words.find_map(of)?;
    Some(own.unwrap_or_else(|| words.next().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn line(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn the_value_of_a_flag_is_found_in_each_form() {
        let of = |text: &str, flag: &str| value(&line(text), flag).map(str::to_owned);
        assert_eq!(of("x map a --context b", "--context").as_deref(), Some("b"));
        assert_eq!(of("x map a --context=b", "--context").as_deref(), Some("b"));
        assert_eq!(of("x map a -nb", "-n").as_deref(), Some("b"));
        assert_eq!(of("x map a --contexts b", "--context"), None);
        assert_eq!(of("x map a --help", "--help").as_deref(), Some(""));
    }

    #[test]
    fn the_plugin_uses_the_namespace_of_the_context() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config");
        let text = "{apiVersion: v1, kind: Config, current-context: a, clusters: [], users: [], contexts: [\
                    {name: a, context: {cluster: c, user: u, namespace: shop}}, {name: b, context: {cluster: c, user: u}}]}";
        fs::write(&file, text).unwrap();
        let kubeconfig = file.display();
        for (flags, namespace) in [("", "shop"), (" --context b", "default"), (" -n bank", "bank")]
        {
            let text = format!("kubectl-cbt map s -o json --kubeconfig {kubeconfig}{flags}");
            let command = format!("{:?}", parse(line(&text), "").unwrap());
            assert!(command.contains(&format!("namespace: Some(\"{namespace}\")")), "{command}");
        }
        let text = format!("kubectl-cbt map s --kubeconfig {kubeconfig} --context c");
        let error = parse(line(&text), "").unwrap_err().to_string();
        assert!(error.contains("--context: the kubeconfig has no context"), "{error}");
    }

    #[test]
    fn the_plugin_shows_its_own_name() {
        let usage = |text: &str| parse(line(text), "1.2.3").unwrap_err().to_string();
        for version in ["version", "--version"] {
            assert_eq!(usage(&format!("kubectl-cbt {version}")).trim(), "kubectl-cbt 1.2.3");
        }
        assert!(usage("kubectl-cbt").contains("Usage: kubectl cbt"));
        for command in ["allocated", "delta", "map", "verify"] {
            let text = usage(&format!("kubectl-cbt {command} --help"));
            assert!(text.contains(&format!("Usage: kubectl cbt {command}")), "{text}");
            assert!(!text.contains("csi-loopback snapshot"), "{text}");
        }
    }
}
