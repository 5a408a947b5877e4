//! The command line: modes and client commands as data.
//!
//! `--mode NAME [flags]`, `--mode=NAME [flags]` and `NAME [flags]` are equivalent: [`rewrite`]
//! turns the first two into the third, so that a mode is a subcommand with its own flags and help.
//! `rewrite` also selects a mode by the name of the program, for callers with a fixed command line,
//! and adapts such a command line to this program.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::telemetry::klog;
use crate::telemetry::on_demand::{self, OnDemand};
#[cfg(test)]
use crate::telemetry::role;
use crate::{
    admission, aggregated_api, backup, client, conformance, dev, driver, freeze_guard, node,
    node_proxy, oci_runtime, runtime_ops, session_manager, sidecar,
};

const USAGE: &str = "csi-loopback --mode <MODE> [FLAGS]
       csi-loopback <MODE | COMMAND> [FLAGS]";

const EXAMPLES: &str = "Examples:
  csi-loopback --mode driver
  csi-loopback volume create data --size 10Gi
  csi-loopback snapshot create monday --volume data
  csi-loopback snapshot delta monday tuesday
  csi-loopback completions bash >/etc/bash_completion.d/csi-loopback";

/// CSI driver with changed block tracking, Kubernetes components, and client commands
#[derive(Debug, Parser)]
#[command(
    name = "csi-loopback",
    version = env!("CSI_LOOPBACK_VERSION"),
    override_usage = USAGE,
    after_help = EXAMPLES,
    subcommand_required = true,
    arg_required_else_help = true,
    subcommand_value_name = "MODE | COMMAND",
    subcommand_help_heading = "Modes and commands"
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
    #[command(flatten)]
    Conformance(Box<conformance::Command>),
    /// Remove what is left of a node that is gone
    Node(OnDemand<node::NodeArgs>),
    #[command(flatten)]
    Tool(Tool),
}

/// The long-running modes.
#[derive(Debug, Subcommand)]
enum Mode {
    /// Mode: serve CSI on a unix socket
    Driver(OnDemand<driver::Args>),
    /// Mode: thaw filesystems if the driver is killed while it takes a snapshot
    FreezeGuard(OnDemand<freeze_guard::Args>),
    /// Mode: serve the Kubernetes SnapshotMetadata API over TLS, in front of a CSI driver
    Sidecar(OnDemand<sidecar::Args>),
    /// Mode: run the webhook and the controller of snapshot sessions
    SessionManager(OnDemand<session_manager::Args>),
    /// Mode: serve VolumeSnapshotDelta as an aggregated API server
    AggregatedApi(OnDemand<aggregated_api::Args>),
    /// Mode: run the webhooks for pods with inline volumes
    Admission(OnDemand<admission::Args>),
    /// Mode: serve crust_ops, for volumes that a container runtime mounts
    RuntimeOps(OnDemand<runtime_ops::Args>),
    /// Mode: forward CSI calls of kubelet and add the fields of runtime assisted mounting
    NodeProxy(OnDemand<node_proxy::Args>),
    /// Mode: serve a driver and its sidecar without a cluster, for tests of backup clients
    Dev(OnDemand<dev::Args>),
    /// Mode: mount deferred volumes as an OCI runtime, then call runc
    OciRuntime(OnDemand<oci_runtime::Args>),
}

/// Commands about this program.
#[derive(Debug, Subcommand)]
enum Tool {
    /// Print the version
    #[command(after_help = "Example:
  csi-loopback version")]
    Version,
    /// Print a completion script for a shell
    #[command(after_help = "Example:
  csi-loopback completions zsh >~/.zfunc/_csi-loopback")]
    Completions {
        /// Shell
        shell: Shell,
    },
    /// Write a man page for each command to a directory
    #[command(after_help = "Example:
  csi-loopback man /usr/local/share/man/man1")]
    Man {
        /// Directory; created if it is missing
        directory: PathBuf,
    },
}

impl Cli {
    /// Parses a whole command line. Prints and exits on an error, and for `--help` and `--version`.
    pub fn parse_or_exit(arguments: impl Iterator<Item = OsString>) -> Self {
        Self::parse_line(arguments).unwrap_or_else(|error| error.exit())
    }

    fn parse_line(arguments: impl Iterator<Item = OsString>) -> Result<Self, clap::Error> {
        let line: Vec<OsString> = arguments.collect();
        if program(&line) == Some(OsStr::new(client::plugin::PROGRAM)) {
            let command = client::plugin::parse(line, env!("CSI_LOOPBACK_VERSION"))?;
            return Ok(Self { command: Command::Client(Box::new(command)) });
        }
        Self::try_parse_from(rewrite(line)?)
    }

    /// Runs the mode or command and returns the exit code of the process.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Mode(Mode::Driver(args)) => driver::run(*args.0),
            Command::Mode(Mode::FreezeGuard(args)) => freeze_guard::run(*args.0),
            Command::Mode(Mode::Sidecar(args)) => sidecar::run(*args.0),
            Command::Mode(Mode::SessionManager(args)) => session_manager::run(*args.0),
            Command::Mode(Mode::AggregatedApi(args)) => aggregated_api::run(*args.0),
            Command::Mode(Mode::Admission(args)) => admission::run(*args.0),
            Command::Mode(Mode::RuntimeOps(args)) => runtime_ops::run(*args.0),
            Command::Mode(Mode::NodeProxy(args)) => node_proxy::run(*args.0),
            Command::Mode(Mode::Dev(args)) => dev::run(*args.0),
            Command::Mode(Mode::OciRuntime(args)) => oci_runtime::run(*args.0),
            Command::Client(command) => client::run(*command),
            Command::Backup(command) => backup::run(*command),
            Command::Tool(Tool::Version) => {
                let text = format!("csi-loopback {}\n", env!("CSI_LOOPBACK_VERSION"));
                client::print_text(text.as_bytes())
            }
            Command::Node(args) => node::run(*args.0),
            Command::Conformance(command) => conformance::run(*command),
            Command::Tool(Tool::Completions { shell }) => completions(shell),
            Command::Tool(Tool::Man { directory }) => man(&directory),
        }
    }
}

/// With the flags of all modes and commands.
pub fn whole_command_line() -> clap::Command {
    on_demand::all(Cli::command)
}

/// Writes the script to memory first: a reader that is gone is no panic then.
fn completions(shell: Shell) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut whole_command_line(), "csi-loopback", &mut script);
    client::print_text(&script)
}

fn man(directory: &Path) -> anyhow::Result<ExitCode> {
    let named = || format!("write man pages to {}", directory.display());
    std::fs::create_dir_all(directory).with_context(named)?;
    clap_mangen::generate_to(whole_command_line(), directory).with_context(named)?;
    Ok(ExitCode::SUCCESS)
}

/// Programs that this one can replace, and their modes.
const NAMES: [(&str, &str); 2] =
    [("csi-snapshot-metadata", SIDECAR), (oci_runtime::PROGRAM, OCI_RUNTIME)];
/// All its arguments belong to another program.
const OCI_RUNTIME: &str = "oci-runtime";
/// It accepts flags in the style of Go programs, because it replaces one.
const SIDECAR: &str = "sidecar";

/// Moves the mode to the front, where a subcommand belongs: the mode that the program's name or
/// `--mode` selects. A line that begins with a command is not changed.
pub(crate) fn rewrite(line: Vec<OsString>) -> Result<Vec<OsString>, clap::Error> {
    let mut line = by_name(line).or_else(mode_first).map(flags_last)?;
    if line.get(1).is_some_and(|mode| mode == SIDECAR) {
        let flags = line.split_off(2);
        // Arguments that are not UTF-8 cannot be flags; clap refuses them.
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

/// Flags of commands that may stand before the command, and whether a value follows.
const EARLY: [(&str, bool); 8] = [
    ("--endpoint", true),
    ("--metadata-endpoint", true),
    ("--secrets", true),
    ("--timeout", true),
    ("--output", true),
    ("-o", true),
    ("--quiet", false),
    ("-q", false),
];

/// Moves these flags from before a command to after it, where they belong.
fn flags_last(mut line: Vec<OsString>) -> Vec<OsString> {
    let mut end = 1;
    while let Some(word) = line.get(end).map(text) {
        let found = EARLY.iter().find(|(flag, _)| {
            word.strip_prefix(flag).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        });
        let Some((flag, has_value)) = found else { break };
        end += if *has_value && word == *flag { 2 } else { 1 };
    }
    let is_command = |word: &OsString| !text(word).starts_with('-');
    if line.get(end).is_some_and(is_command) {
        line[1..=end].rotate_right(1);
    }
    line
}

/// The name of the program.
fn program(line: &[OsString]) -> Option<&OsStr> {
    line.first().and_then(|path| Path::new(path).file_name())
}

/// The line with the mode that the program's name selects, or the unchanged line as an error.
fn by_name(mut line: Vec<OsString>) -> Result<Vec<OsString>, Vec<OsString>> {
    let program = program(&line);
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
    // The program's name may look like a flag.
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
        whole_command_line().debug_assert();
    }

    #[test]
    fn only_the_selected_mode_defines_its_flags() {
        let mut cli = Cli::command();
        let modes = mode_names();
        for mode in cli.get_subcommands().filter(|one| modes.iter().any(|m| m == one.get_name())) {
            assert_eq!(mode.get_arguments().count(), 0, "{}", mode.get_name());
        }
        let mut whole = whole_command_line();
        for command in [&mut cli, &mut whole] {
            command.build();
        }
        for (selected, one) in cli.get_subcommands_mut().zip(whole.get_subcommands_mut()) {
            let [selected, one] =
                [selected, one].map(|command| command.render_long_help().to_string());
            assert_eq!(selected, one);
        }
    }

    #[test]
    fn the_three_ways_to_select_a_mode_are_equivalent() {
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
            assert_eq!(args.0.node_id.as_str(), "n1", "{line}");
        }
    }

    #[test]
    fn arguments_of_the_other_runtime_pass_unchanged() {
        for rest in
            ["", "--version", "--help", "-- x", "exec id -- ls", "--mode driver", "--root=/a -h"]
        {
            let Command::Mode(Mode::OciRuntime(args)) =
                parse(&format!("/bin/csi-loopback-runc {rest}")).expect(rest).command
            else {
                panic!("{rest} is not the runtime")
            };
            let given: Vec<OsString> = rest.split_whitespace().map(OsString::from).collect();
            assert_eq!(args.0.arguments, given);
        }
    }

    #[test]
    fn a_restore_by_namespace_names_the_missing_claim() {
        let command = parse("c restore a --namespace n --repository claim:b").unwrap();
        let error = command.run().unwrap_err().to_string();
        assert!(error.contains("--to-claim NAME"), "{error}");
    }

    #[test]
    fn flags_of_a_command_may_stand_before_it() {
        for line in [
            "c --endpoint unix:///a snapshot list",
            "c --endpoint=unix:///a -o json -q volume list",
            "c --timeout 5s --output json base list --volume v",
        ] {
            parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
        for line in ["c --endpoint", "c --endpoint unix:///a", "c --endpoint unix:///a driver -o x"]
        {
            assert!(parse(line).is_err(), "{line}");
        }
        assert!(error("c help").contains("Modes and commands"));
        assert!(error("c help snapshot delta").contains("BASE"));
        assert!(parse("c version").is_ok() && parse("/usr/bin/kubectl-cbt list").is_ok());
    }

    /// Copies from the manifests of the released sidecar.
    #[test]
    fn arguments_of_the_released_sidecar_are_accepted() {
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
    fn an_unknown_mode_error_lists_the_modes() {
        for line in ["c --mode drivel", "c --mode=volume", "c --mode", "c --mode=", "c --mode man"]
        {
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

    /// The pages that document the flags of a mode, and those that they refer to.
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
            "dev" => vec![include_str!("../docs/guide/dev.md")],
            // Its arguments belong to the other runtime.
            "oci-runtime" => vec![],
            _ => panic!("{mode} has no page"),
        }
    }

    #[test]
    fn each_flag_of_a_mode_is_in_the_documentation_with_its_default() {
        let modes = on_demand::all(|| Mode::augment_subcommands(clap::Command::new("modes")));
        for mode in modes.get_subcommands() {
            let pages = pages(mode.get_name());
            let lines: Vec<&str> = pages.iter().flat_map(|page| page.lines()).collect();
            let shown = mode.get_arguments().filter(|argument| !argument.is_hide_set());
            for argument in shown.filter(|_| !pages.is_empty()) {
                // Release builds have no fail points.
                let flag = argument.get_long().filter(|flag| *flag != "fail-points");
                let Some(flag) = flag.map(|flag| format!("--{flag}")) else { continue };
                let documented: Vec<&&str> =
                    lines.iter().filter(|line| line.contains(&flag)).collect();
                assert!(!documented.is_empty(), "{}: {flag}", mode.get_name());
                // The node's name depends on the machine, and flags that are off need no default.
                let defaults = argument.get_default_values().iter();
                let defaults = defaults.map(|default| default.to_str().unwrap());
                let is_own = flag == "--node-id";
                for default in defaults.filter(|default| !is_own && *default != "false") {
                    let is_documented = documented.iter().any(|line| line.contains(default));
                    assert!(is_documented, "{}: {flag} is {default}", mode.get_name());
                }
            }
        }
    }

    /// The flags under each heading of the help of a mode.
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
        let modes = on_demand::all(|| Mode::augment_subcommands(clap::Command::new("modes")));
        for mode in modes.get_subcommands() {
            // Groups of different modes may have flags of the same name.
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
    fn the_version_is_the_version_of_the_package() {
        assert!(error("csi-loopback --version").contains(env!("CARGO_PKG_VERSION")));
    }

    /// The commands without the modes, each with its name, such as `volume create`.
    fn leaves() -> Vec<(String, clap::Command)> {
        fn descend(command: &clap::Command, path: &str, leaves: &mut Vec<(String, clap::Command)>) {
            let path = format!("{path} {}", command.get_name());
            match command.has_subcommands() {
                true => command.get_subcommands().for_each(|one| descend(one, &path, leaves)),
                false => leaves.push((path.trim().to_owned(), command.clone())),
            }
        }
        let modes = mode_names();
        let cli = whole_command_line();
        let mut leaves = Vec::new();
        let is_mode = |command: &clap::Command| modes.iter().any(|mode| mode == command.get_name());
        let commands = cli.get_subcommands().filter(|command| !is_mode(command));
        commands.for_each(|command| descend(command, "", &mut leaves));
        leaves
    }

    fn examples(command: &clap::Command) -> String {
        command.get_after_help().map(ToString::to_string).unwrap_or_default()
    }

    #[test]
    fn every_command_is_documented_and_has_an_example() {
        let page = include_str!("../docs/reference/commands.md");
        for (name, command) in leaves() {
            assert!(page.contains(&format!("`{name}`")), "{name} is not in commands.md");
            let (help, example) = (examples(&command), format!("  csi-loopback {name}"));
            assert!(help.starts_with("Example") && help.contains(&example), "{name}: {help}");
        }
    }

    #[test]
    fn every_example_in_the_help_is_a_valid_command_line() {
        for (_, command) in leaves() {
            for line in examples(&command).lines().filter_map(|line| line.strip_prefix("  ")) {
                let ends = [" >", " |"];
                let line =
                    ends.iter().fold(line, |line, end| line.split(end).next().unwrap_or(line));
                parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
            }
        }
    }

    #[test]
    fn every_help_text_is_one_line_without_a_full_stop() {
        for (name, command) in leaves() {
            let texts = command.get_arguments().map(|one| (one.get_id().as_str(), one.get_help()));
            let about = [("about", command.get_about())];
            for (id, text) in texts.chain(about) {
                let text = text.map(ToString::to_string).unwrap_or_default();
                let is_line = !text.is_empty() && !text.contains('\n') && !text.ends_with('.');
                assert!(is_line && text.chars().count() <= 90, "{name} {id}: {text}");
            }
        }
    }

    #[test]
    fn completions_and_man_pages_cover_the_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut whole_command_line(), "csi-loopback", &mut script);
            assert!(String::from_utf8(script).unwrap().contains("starting-offset"), "{shell}");
        }
        let directory = tempfile::tempdir().unwrap();
        man(&directory.path().join("man1")).unwrap();
        let page = directory.path().join("man1/csi-loopback-snapshot-delta.1");
        assert!(std::fs::read_to_string(page).unwrap().contains("limit\\-rows"));
    }
}
