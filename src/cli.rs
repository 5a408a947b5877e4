//! The command line: modes as data, and beside them the commands for people.
//!
//! `--mode NAME [flags]`, `--mode=NAME [flags]` and `NAME [flags]` mean the same. [`rewrite`] turns
//! the first two into the third, and from there on a mode is a subcommand like any other, with its
//! own flags and its own help. It is also where the name of the program selects a mode, for those whose callers
//! dictate the command line, and where such a line is brought into the form that this program has.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

use crate::telemetry::klog;
#[cfg(test)]
use crate::telemetry::role;
use crate::{
    admission, aggregated_api, backup, client, driver, freeze_guard, node_proxy, oci_runtime,
    runtime_ops, session_manager, sidecar,
};

const USAGE: &str = "csi-loopback --mode <MODE> [FLAGS]
       csi-loopback <MODE | COMMAND> [FLAGS]";

/// A CSI driver whose changed block tracking is real, and commands to look at it.
#[derive(Debug, Parser)]
#[command(
    name = "csi-loopback",
    version = env!("CSI_LOOPBACK_VERSION"),
    override_usage = USAGE,
    subcommand_required = true,
    arg_required_else_help = true,
    subcommand_value_name = "MODE | COMMAND",
    subcommand_help_heading = "Modes and commands",
    disable_help_subcommand = true
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Mode(Mode),
    #[command(flatten)]
    Client(Box<client::Command>),
    #[command(flatten)]
    Backup(Box<backup::Command>),
}

/// The long-running roles.
#[derive(Debug, Subcommand)]
enum Mode {
    /// Mode: the CSI driver on a unix socket.
    Driver(Box<driver::Args>),
    /// Mode: thaws filesystems that a driver froze for a snapshot if the driver is killed.
    FreezeGuard(Box<freeze_guard::Args>),
    /// Mode: the Kubernetes SnapshotMetadata API over TLS, in front of a CSI driver.
    Sidecar(Box<sidecar::Args>),
    /// Mode: the webhook and the controller of snapshot sessions, for all CSI drivers of a cluster.
    SessionManager(Box<session_manager::Args>),
    /// Mode: the aggregated API server of VolumeSnapshotDelta, for all CSI drivers of a cluster.
    AggregatedApi(Box<aggregated_api::Args>),
    /// Mode: the webhooks for pods with inline volumes of a driver.
    Admission(Box<admission::Args>),
    /// Mode: crust_ops, between a CSI driver and the container runtimes that mount in its place.
    RuntimeOps(Box<runtime_ops::Args>),
    /// Mode: between kubelet and a CSI driver, what runtime assisted mounting asks of kubelet.
    NodeProxy(Box<node_proxy::Args>),
    /// Mode: an OCI runtime in front of another, which mounts what was left to it.
    OciRuntime(Box<oci_runtime::Args>),
}

impl Cli {
    /// Parses a whole command line. On an error, and for `--help` and `--version`, prints what is to
    /// be said and exits.
    pub fn parse_or_exit(arguments: impl Iterator<Item = OsString>) -> Self {
        Self::parse_line(arguments).unwrap_or_else(|error| error.exit())
    }

    fn parse_line(arguments: impl Iterator<Item = OsString>) -> Result<Self, clap::Error> {
        Self::try_parse_from(rewrite(arguments.collect())?)
    }

    /// Runs to the end and returns the exit code of the process.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Mode(Mode::Driver(args)) => driver::run(*args),
            Command::Mode(Mode::FreezeGuard(args)) => freeze_guard::run(*args),
            Command::Mode(Mode::Sidecar(args)) => sidecar::run(*args),
            Command::Mode(Mode::SessionManager(args)) => session_manager::run(*args),
            Command::Mode(Mode::AggregatedApi(args)) => aggregated_api::run(*args),
            Command::Mode(Mode::Admission(args)) => admission::run(*args),
            Command::Mode(Mode::RuntimeOps(args)) => runtime_ops::run(*args),
            Command::Mode(Mode::NodeProxy(args)) => node_proxy::run(*args),
            Command::Mode(Mode::OciRuntime(args)) => oci_runtime::run(*args),
            Command::Client(command) => client::run(*command),
            Command::Backup(command) => backup::run(*command),
        }
    }
}

/// Programs that this one can stand in for, and their modes.
const NAMES: [(&str, &str); 2] =
    [("csi-snapshot-metadata", SIDECAR), (oci_runtime::PROGRAM, OCI_RUNTIME)];
/// Whose arguments are another program's, all of them.
const OCI_RUNTIME: &str = "oci-runtime";
/// Whose flags are also taken as Go programs write them: its predecessor was one.
const SIDECAR: &str = "sidecar";

/// Puts the mode first, where a subcommand stands: the one that the program's name selects, or that `--mode`
/// names. A line that begins with a command is left as it is: what follows are that command's own flags.
pub(crate) fn rewrite(line: Vec<OsString>) -> Result<Vec<OsString>, clap::Error> {
    let mut line = by_name(line).or_else(mode_first)?;
    if line.get(1).is_some_and(|mode| mode == SIDECAR) {
        let flags = line.split_off(2);
        // What is no text is no flag, and is left to be refused.
        let texts: Option<Vec<String>> =
            flags.iter().map(|flag| flag.to_str().map(str::to_owned)).collect();
        match texts {
            Some(texts) => {
                line.extend(klog::double_dashes(texts.into_iter()).into_iter().map(OsString::from))
            }
            None => line.extend(flags),
        }
    }
    Ok(line)
}

/// The line with the mode that the program's name selects, or else the line as it is.
fn by_name(mut line: Vec<OsString>) -> Result<Vec<OsString>, Vec<OsString>> {
    let program = line.first().and_then(|path| Path::new(path).file_name());
    let mode = NAMES.iter().find(|(name, _)| program.is_some_and(|program| program == *name));
    match mode {
        Some((_, mode)) => {
            line.insert(1, (*mode).into());
            if *mode == OCI_RUNTIME {
                line.insert(2, "--".into());
            }
            Ok(line)
        }
        None => Err(line),
    }
}

fn mode_first(mut line: Vec<OsString>) -> Result<Vec<OsString>, clap::Error> {
    let begins_with_flag = line.get(1).is_some_and(|first| text(first).starts_with('-'));
    // The program's name is no flag, whatever it looks like.
    let arguments = line.iter().enumerate().skip(1);
    let mut flags = arguments.take_while(|(_, argument)| *argument != "--");
    let flag = flags.find(|(_, argument)| is_mode_flag(argument)).map(|(at, _)| at);
    let Some(at) = flag.filter(|_| begins_with_flag) else { return Ok(line) };
    let flag = line.remove(at);
    let mode = match text(&flag).split_once('=') {
        Some((_, mode)) => mode.into(),
        None if at < line.len() => line.remove(at),
        None => return Err(unknown_mode("--mode needs the name of a mode")),
    };
    if !mode_names().iter().any(|name| mode == name.as_str()) {
        return Err(unknown_mode(&format!("unknown mode {:?}", text(&mode))));
    }
    line.insert(1, mode);
    Ok(line)
}

fn is_mode_flag(argument: &OsString) -> bool {
    argument == "--mode" || text(argument).starts_with("--mode=")
}

fn text(argument: &OsString) -> &str {
    argument.to_str().unwrap_or_default()
}

pub(crate) fn mode_names() -> Vec<String> {
    let modes = Mode::augment_subcommands(clap::Command::new("modes"));
    modes.get_subcommands().map(|mode| mode.get_name().to_owned()).collect()
}

fn unknown_mode(problem: &str) -> clap::Error {
    let message = format!("{problem}; the modes are: {}", mode_names().join(", "));
    Cli::command().error(ErrorKind::InvalidValue, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::parse_line(line.split_whitespace().map(OsString::from))
    }

    fn error(line: &str) -> String {
        parse(line).expect_err(line).to_string()
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_mode_is_named_in_three_ways_that_mean_the_same() {
        let lines = [
            "csi-loopback driver --node-id n1 --endpoint /run/x.sock",
            "csi-loopback --mode driver --node-id n1 --endpoint /run/x.sock",
            "csi-loopback --mode=driver --node-id n1 --endpoint /run/x.sock",
            "csi-loopback --node-id n1 --mode driver --endpoint /run/x.sock",
            "csi-loopback --node-id n1 --endpoint /run/x.sock --mode=driver",
        ];
        for line in lines {
            let Command::Mode(Mode::Driver(args)) = parse(line).expect(line).command else {
                panic!("{line} is not the driver")
            };
            assert_eq!(args.node_id.as_str(), "n1", "{line}");
        }
    }

    #[test]
    fn what_is_another_runtimes_is_passed_on_as_it_is() {
        for rest in
            ["", "--version", "--help", "-- x", "exec id -- ls", "--mode driver", "--root=/a -h"]
        {
            let Command::Mode(Mode::OciRuntime(args)) =
                parse(&format!("/bin/csi-loopback-runc {rest}")).expect(rest).command
            else {
                panic!("{rest} is not the runtime")
            };
            let given: Vec<OsString> = rest.split_whitespace().map(OsString::from).collect();
            assert_eq!(args.arguments, given);
        }
    }

    /// Copies of their arguments.
    #[test]
    fn the_arguments_of_the_released_sidecars_manifests_start_this_one() {
        for rest in [
            "--csi-address=/csi/csi.sock --tls-cert=/tmp/certificates/tls.crt --tls-key=/tmp/certificates/tls.key",
            "--csi-address=/csi/csi.sock --tls-cert=/c --tls-key=/k --audience=test-backup-client",
            "-csi-address /csi/csi.sock -tls-cert /c -tls-key /k -v=5 --audience= --kubeconfig= --tls-min-version=",
            "-port 50052 -http-endpoint :9090 -metrics-path /m -timeout 30s -kube-api-qps 50 -kube-api-burst 100",
            "--max-streaming-duration-min=0 --disable-metrics --logtostderr --v=5 --v=4 --port=1 --port=2",
        ] {
            let line = format!("/csi-snapshot-metadata {rest}");
            let Ok(Cli { command: Command::Mode(Mode::Sidecar(_)) }) = parse(&line) else {
                panic!("{line}: {}", error(&line))
            };
        }
    }

    #[test]
    fn an_unknown_mode_is_an_error_that_lists_the_modes() {
        for line in ["c --mode drivel", "c --mode=volume", "c --mode", "c --mode="] {
            let message = error(line);
            assert!(message.contains("the modes are: driver"), "{line}: {message}");
        }
    }

    #[test]
    fn unknown_flags_are_an_error() {
        for line in
            ["c --mode driver --nonsense", "c driver --nonsense", "c --nonsense", "c driver extra"]
        {
            assert_ne!(parse(line).expect_err(line).exit_code(), 0, "{line}");
        }
        assert!(error("c --mode driver --mode driver").contains("--mode"));
    }

    #[test]
    fn the_help_of_a_mode_shows_its_own_flags() {
        for line in ["c --mode driver --help", "c driver --help", "c --help --mode driver"] {
            let help = error(line);
            assert!(help.contains("--data-dir") && !help.contains("Modes and commands"), "{help}");
        }
        let help = error("c --help");
        assert!(
            help.contains("--mode <MODE>")
                && help.contains("driver")
                && !help.contains("--data-dir")
        );
    }

    /// What the pages say of a mode's flags: its own, and those that it refers to.
    fn pages(mode: &str) -> Vec<&'static str> {
        let sidecar = include_str!("../docs/reference/sidecar.md");
        let aggregated = include_str!("../docs/reference/aggregated-api.md");
        match mode {
            "driver" | "freeze-guard" => vec![include_str!("../docs/reference/driver.md")],
            "sidecar" => vec![sidecar, aggregated],
            "session-manager" => {
                vec![include_str!("../docs/reference/session-manager.md"), sidecar]
            }
            "aggregated-api" => vec![aggregated, sidecar],
            "admission" => vec![include_str!("../docs/reference/inline-volumes.md"), sidecar],
            "runtime-ops" => vec![include_str!("../docs/reference/runtime-assisted-mount.md")],
            "node-proxy" => vec![include_str!("../docs/reference/node-proxy.md")],
            // It has the other runtime's.
            "oci-runtime" => vec![],
            _ => panic!("{mode} has no page"),
        }
    }

    #[test]
    fn each_flag_of_a_mode_is_in_the_documentation_with_its_default() {
        let modes = Mode::augment_subcommands(clap::Command::new("modes"));
        for mode in modes.get_subcommands() {
            let pages = pages(mode.get_name());
            let lines: Vec<&str> = pages.iter().flat_map(|page| page.lines()).collect();
            let shown = mode.get_arguments().filter(|argument| !argument.is_hide_set());
            for argument in shown.filter(|_| !pages.is_empty()) {
                // Fail points are in nothing that ships.
                let flag = argument.get_long().filter(|flag| *flag != "fail-points");
                let Some(flag) = flag.map(|flag| format!("--{flag}")) else { continue };
                let told: Vec<&&str> = lines.iter().filter(|line| line.contains(&flag)).collect();
                assert!(!told.is_empty(), "{}: {flag}", mode.get_name());
                // The node's name is the machine's, and what is off is off.
                let defaults = argument.get_default_values().iter();
                let defaults = defaults.map(|default| default.to_str().unwrap());
                let is_own = flag == "--node-id";
                for default in defaults.filter(|default| !is_own && *default != "false") {
                    let is_told = told.iter().any(|line| line.contains(default));
                    assert!(is_told, "{}: {flag} is {default}", mode.get_name());
                }
            }
        }
    }

    /// What stands under each heading of a mode's help.
    #[test]
    fn each_flag_is_under_its_own_heading() {
        let ids = |command: clap::Command| -> Vec<String> {
            command.get_arguments().map(|argument| argument.get_id().to_string()).collect()
        };
        fn of<A: clap::Args>() -> clap::Command {
            A::augment_args(clap::Command::new("x"))
        }
        let groups = [
            (role::HEADING, ids(of::<role::RoleArgs>())),
            ("Inline ephemeral volumes", ids(of::<driver::InlineArgs>())),
            ("Runtime assisted mounting", ids(of::<driver::DeferArgs>())),
            ("Fault injection", ids(of::<driver::FaultArgs>())),
        ];
        let modes = Mode::augment_subcommands(clap::Command::new("modes"));
        for mode in modes.get_subcommands() {
            // A group of another mode may have a flag of the same name.
            let of_role = |id: &str| groups[0].1.iter().any(|one| one == id);
            let has_role = mode.get_arguments().any(|one| one.get_id() == "drain_timeout");
            for argument in mode.get_arguments() {
                let (id, heading) = (argument.get_id().as_str(), argument.get_help_heading());
                let what = format!("{} --{id}: {heading:?}", mode.get_name());
                assert!(!has_role || of_role(id) == (heading == Some(role::HEADING)), "{what}");
                let group = groups.iter().find(|(name, _)| Some(*name) == heading);
                assert!(group.is_none_or(|(_, ids)| ids.iter().any(|one| one == id)), "{what}");
            }
        }
    }

    #[test]
    fn the_version_is_that_of_the_package() {
        assert!(error("csi-loopback --version").contains(env!("CARGO_PKG_VERSION")));
    }
}
