//! Command lines of a program with many modes: only the flags of the selected one are defined. The
//! definitions of all touch code and data that a role would keep in memory.

use std::cell::Cell;

use clap::builder::Resettable;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches};

/// The arguments of a mode or command, defined when the command line names it.
#[derive(Debug)]
pub struct OnDemand<A>(pub Box<A>);

thread_local! {
    static ALL: Cell<bool> = const { Cell::new(false) };
}

/// A command line with the definitions of all commands, for texts about them.
pub fn all(make: impl FnOnce() -> Command) -> Command {
    ALL.set(true);
    let whole = make();
    ALL.set(false);
    whole
}

impl<A: FromArgMatches> FromArgMatches for OnDemand<A> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        A::from_arg_matches(matches).map(|arguments| Self(Box::new(arguments)))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches(matches)
    }
}

impl<A: Args> Args for OnDemand<A> {
    fn augment_args(command: Command) -> Command {
        match ALL.get() {
            true => A::augment_args(command),
            false => command.defer(|command| with_its_about(command, A::augment_args)),
        }
    }

    fn augment_args_for_update(command: Command) -> Command {
        A::augment_args_for_update(command)
    }
}

/// Definitions set the description of their types. That of the command is set before.
fn with_its_about(command: Command, define: impl FnOnce(Command) -> Command) -> Command {
    let [about, long_about] =
        [command.get_about(), command.get_long_about()].map(|text| Resettable::from(text.cloned()));
    define(command).about(about).long_about(long_about)
}
