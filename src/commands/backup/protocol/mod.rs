//! The protocol by which any number of writers and prunes share a repository without locks, clocks
//! or conditional writes: state machines without I/O. The executor
//! ([`super::repository::Repository::run`]) performs each [`Operation`] on the store and returns
//! its answer; the test ([`search`]) does so in every order.
//!
//! Promises: what was acknowledged can be restored until a prune decides to remove it, also if any
//! process stops anywhere and continues a year later, or is copied; of a family (the backups of a
//! volume, the slots of a master key) prunes leave one; a lone prune can free what is not needed.
//!
//! The store must promise this: a list that starts after a put was answered returns the object. A
//! list is not atomic: each name is looked up at a time of its own.
//!
//! Why it holds:
//! - **Refer.** An attempt puts an intent that names its references, and then looks for marks on
//!   them. A prune puts its marks, and then looks for intents. Whichever comes second sees the other.
//! - **Marks are never taken back**, so a writer that met none can rely on the prune that put one
//!   later. They go after the intent of what they mark, which is removed last, and a look for marks
//!   is followed by a look for intents: a mark that has gone is noticed by the missing intent.
//! - **Publish.** An attempt that has put its manifest looks for marks on itself in the same way. A
//!   prune of an unfinished attempt spares it if it sees a manifest.
//! - **Keepers.** A prune relies on a keeper that has no mark of another prune and exists. Of two
//!   prunes that each keep what the other removes, the second sees the mark of the first.

mod attempt;
mod removal;
#[cfg(test)]
mod search;

use std::fmt::Debug;
use std::hash::Hash;

pub use attempt::{Attempt, Confirm};
pub use removal::{Family, Plan, Removal};

/// What identifies an attempt to write a backup, a slot of a key, or a prune. Unique and random.
pub trait Id: Clone + Ord + Hash + Debug {}

impl<T: Clone + Ord + Hash + Debug> Id for T {}

/// A part of an attempt, in the order of removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    Manifest,
    /// Pages and packs.
    Data,
    Intent,
}

/// The name of an object, as a list returns it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Name<I> {
    /// An attempt, and all that it refers to directly.
    Intent(I, Vec<I>),
    Manifest(I),
    /// The last of all pages and packs that a manifest counts.
    Data(I),
    /// On an attempt, by a prune.
    Mark(I, I),
}

/// What a machine wants to be done next.
///
/// Marks that are put or deleted one after the other, and deletions of the same part, do not depend
/// on each other: the executor performs them in any order, and together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Operation<I> {
    PutIntent(I),
    /// Check what the last list showed, and put pages and packs.
    Write,
    PutManifest(I),
    PutMark(I, I),
    /// List the marks on these.
    ListMarks(Vec<I>),
    /// List all objects of these; of all attempts without any.
    ListAttempts(Vec<I>),
    /// Go on with the list.
    More,
    Delete(Part, I),
    DeleteMark(I, I),
    End(Outcome<I>),
}

impl<I> Operation<I> {
    /// Whether `next` may be performed together with this operation, which came before it.
    pub fn goes_with(&self, next: &Self) -> bool {
        match (self, next) {
            (Self::PutMark(..), Self::PutMark(..))
            | (Self::DeleteMark(..), Self::DeleteMark(..)) => true,
            (Self::Delete(part, _), Self::Delete(other, _)) => part == other,
            _ => false,
        }
    }
}

/// The answer to an operation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Answer<I> {
    /// The operation is done and durable; the list has ended. Also the first call.
    Done,
    /// A name of the list.
    Listed(Name<I>),
}

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Outcome<I> {
    /// What was to be confirmed exists, and no prune had decided to remove it.
    Acknowledged,
    /// A prune wants this one gone.
    Marked(I),
    /// This one does not exist.
    Missing(I),
    /// What a prune removed.
    Removed(Vec<I>),
}

/// A state machine: the answer to the previous operation in, the next operation out.
pub trait Machine<I> {
    fn next(&mut self, answer: Answer<I>) -> Operation<I>;
}
