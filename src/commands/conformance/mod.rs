//! The command `conformance`: judges a CSI driver's SnapshotMetadata service by the text of CSI
//! v1.13 and by bytes. [`rules`] are data and know neither the driver nor how it is reached;
//! [`situations`] are the volumes and snapshots that they share; a [`door`] reaches the driver.
//!
//! Promises: a rule is a MUST only with a line of the specification; before a driver is accused of
//! lost data, the snapshot is read; the run touches only what it made, and removes it after any
//! failure and after a signal.

mod args;
mod calls;
mod cluster;
mod content;
mod device;
mod door;
mod figures;
mod in_pod;
mod page;
mod reading;
mod report;
mod rules;
mod run;
mod situations;
mod socket;
mod world;

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use clap::Subcommand;
use tokio::sync::watch;

pub use page::rules as rules_page;

use args::{ConformanceArgs, Format};
use calls::Calls;
use cluster::ClusterDoor;
use content::Patterns;
use door::Door;
use in_pod::DeviceArgs;
use rules::{Rule, Severity};
use run::{Ended, Judged, Judgment, Run};
use socket::SocketDoor;
use world::{Settings, World};

use crate::client;
use telemetry::on_demand::OnDemand;

/// The conformance command, flattened into the binary's command line.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Judge the changed block tracking of any CSI driver
    #[command(after_help = "Example:
  csi-loopback conformance --endpoint unix:///run/driver/csi.sock --report junit >report.xml
  csi-loopback conformance --kubernetes --storage-class fast --snapshot-class fast")]
    Conformance(OnDemand<ConformanceArgs>),
    /// Change or read the block device of a pod, for conformance --kubernetes
    #[command(
        hide = true,
        after_help = "Example:
  csi-loopback conformance-device change --device /dev/data --result /dev/termination-log --seed 7 1:0:4096"
    )]
    ConformanceDevice(OnDemand<DeviceArgs>),
}

/// A violation of a MUST, or a backup that would be wrong.
const VIOLATED: u8 = 1;
/// The driver could not be judged, or not all objects of the run could be removed.
const NOT_JUDGED: u8 = 2;
const INTERRUPTED: u8 = 130;

/// Runs the command. The exit codes are those of docs/reference/conformance.md.
///
/// # Errors
/// The report cannot be printed.
pub fn run(command: Command) -> Result<ExitCode> {
    let args = match command {
        Command::Conformance(args) => args.0,
        Command::ConformanceDevice(args) => return in_pod::run(&args.0),
    };
    match judge(&args) {
        Ok(code) => Ok(code),
        Err(error) => {
            eprintln!("csi-loopback: {}", client::describe(&error));
            Ok(ExitCode::from(NOT_JUDGED))
        }
    }
}

/// What a rule found: its id, and what was seen if it failed.
pub type Found = (&'static str, Result<(), String>);

/// Prepares the situations once for `work`, which judges the driver as often as it likes. For tests
/// of the rules. Returns what could not be removed.
///
/// # Errors
/// The flags are invalid, or the driver cannot be reached.
pub fn repeatedly(
    flags: &[&str],
    work: impl FnOnce(&dyn Fn(&dyn Fn(&str) -> bool) -> Vec<Found>),
) -> Result<Vec<String>> {
    let args = ConformanceArgs::of(flags)?;
    let rules = selected(&args.rules.focus, &args.rules.skip)?;
    let (_sender, signalled) = watch::channel(false);
    let (door, settings) = open(&args, calls(&args, signalled)?)?;
    let world = World::new(&*door, settings);
    let once = |is_judged: &dyn Fn(&str) -> bool| -> Vec<Found> {
        world.forget_streams();
        let chosen: Vec<Rule> = rules.iter().filter(|rule| is_judged(rule.id)).copied().collect();
        let run = Run::of(&world, &chosen, &mut |_| {});
        let found = run.judged.iter().map(|judged| match &judged.result {
            Judgment::Failed(finding) => {
                (judged.rule.id, Err(format!("{}: {}", finding.call, finding.seen)))
            }
            Judgment::Skipped(reason) => (judged.rule.id, Err(format!("skipped: {reason}"))),
            Judgment::Passed => (judged.rule.id, Ok(())),
        });
        found.collect()
    };
    let clean = Cleaned(&*door);
    work(&once);
    Ok(clean.finish())
}

/// Removes what the run made also after a panic.
struct Cleaned<'d>(&'d dyn Door);

impl Cleaned<'_> {
    /// Removes what the run made. Returns what remains.
    fn finish(self) -> Vec<String> {
        let door = self.0;
        std::mem::forget(self);
        door.clean_up()
    }
}

impl Drop for Cleaned<'_> {
    fn drop(&mut self) {
        self.0.clean_up();
    }
}

fn calls(args: &ConformanceArgs, signalled: watch::Receiver<bool>) -> Result<Calls> {
    Calls::start(signalled, args.rules.call_timeout, args.rules.timeout)
}

/// A door and the settings of a run.
fn open(args: &ConformanceArgs, calls: Calls) -> Result<(Box<dyn Door>, Settings)> {
    let ConformanceArgs { driver, cluster, volumes, paths, rules } = args;
    let (size, grown_size) = volumes.sizes()?;
    let random = || getrandom::u64().map_err(|error| anyhow!("{error}"));
    let seed = rules.seed.map_or_else(random, Ok)?;
    let settings = Settings {
        size,
        grown_size,
        seed,
        prefix: format!("conformance-{:08x}", random()? >> 32),
        no_node: driver.no_node,
        patience: rules.call_timeout,
    };
    let patterns = Patterns { seed };
    let door: Box<dyn Door> = match cluster.kubernetes {
        true => Box::new(ClusterDoor::open(cluster, &settings.prefix, patterns, calls)?),
        false => Box::new(SocketDoor::open(driver, volumes, paths, patterns, calls)?),
    };
    Ok((door, settings))
}

fn judge(args: &ConformanceArgs) -> Result<ExitCode> {
    let selected = selected(&args.rules.focus, &args.rules.skip)?;
    if args.rules.list {
        return client::print_text(report::list(&selected).as_bytes());
    }
    let (sender, signalled) = watch::channel(false);
    let calls = calls(args, signalled)?;
    calls.listen(&sender)?;
    let (door, settings) = open(args, calls)?;
    let seed = settings.seed;
    let world = World::new(&*door, settings);
    let cleaned = Cleaned(&*door);
    let mut run = Run::of(&world, &selected, &mut |rule| note(args.rules.report, rule));
    run.remaining = cleaned.finish();
    let command = args.again(seed);
    let text = match args.rules.report {
        Format::Text => report::text(&run, &command),
        Format::Json => report::json(&run, &command)?,
        Format::Junit => report::junit(&run, &command),
    };
    client::print_text(text.as_bytes())?;
    for remaining in &run.remaining {
        eprintln!("csi-loopback: not removed: {remaining}");
    }
    Ok(ExitCode::from(code(&run)))
}

/// A line of progress on a terminal.
fn note(format: Format, rule: &Rule) {
    use std::io::IsTerminal as _;
    if format == Format::Text && std::io::stderr().is_terminal() {
        eprintln!("{}", rule.id);
    }
}

fn code(run: &Run<'_>) -> u8 {
    let is_violated =
        |judged: &Judged<'_>| judged.fails() && judged.rule.severity != Severity::Advice;
    match &run.ended {
        _ if run.judged.iter().any(is_violated) => VIOLATED,
        Ended::Stopped => INTERRUPTED,
        Ended::Done if run.skipped() == run.judged.len() => NOT_JUDGED,
        Ended::Done if !run.remaining.is_empty() => NOT_JUDGED,
        Ended::Done => 0,
    }
}

/// The rules that the command line selects. A whole id selects only this rule.
fn selected(focus: &[String], skip: &[String]) -> Result<Vec<Rule>> {
    let all = rules::all();
    let matches = |rule: &Rule, text: &String| match all.iter().any(|other| other.id == text) {
        true => rule.id == text,
        false => rule.id.contains(text.as_str()),
    };
    let is_selected: Vec<bool> = all
        .iter()
        .map(|rule| {
            (focus.is_empty() || focus.iter().any(|text| matches(rule, text)))
                && !skip.iter().any(|text| matches(rule, text))
        })
        .collect();
    let mut kept = is_selected.into_iter();
    let selected: Vec<Rule> = all.into_iter().filter(|_| kept.next().unwrap_or_default()).collect();
    match selected.is_empty() {
        true => Err(anyhow!("--focus and --skip select no rule; --list shows all ids")),
        false => Ok(selected),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(focus: &[&str], skip: &[&str]) -> Vec<&'static str> {
        let own = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let selected = selected(&own(focus), &own(skip)).unwrap();
        selected.iter().map(|rule| rule.id).collect()
    }

    #[test]
    fn a_whole_id_selects_one_rule_and_a_part_several() {
        assert_eq!(ids(&["orphan"], &[]), ["orphan"]);
        assert!(ids(&["delta-"], &[]).len() > 3);
        assert!(!ids(&[], &["delta-"]).contains(&"delta-chain"));
        assert!(selected(&["nothing".to_owned()], &[]).is_err());
    }
}
