//! The invariants of every result:
//!
//! - a delta contains every different block, and `allocated` contains every block with data;
//! - a delta contains only blocks that were written or erased in between, and `allocated` only
//!   written blocks, if the pool has blocks of that size;
//! - a delta from a snapshot to itself is empty, a delta from A to C is within the union of A to B
//!   and B to C, and a delta across a break in the chain is refused;
//! - a result is the same set of blocks for any style, message size, starting offset, interruption
//!   and resumption, and remains the same during the stream.

use std::collections::BTreeMap;

use csi_loopback::backend::{PoolKind, Style};

use super::model::{Blocks, SnapshotState, Volume};
use super::operation::QueryOptions;
use super::subject::{Answer, Question, Refused, Subject, Window};
use support::BLOCK;

/// A result as a set of blocks.
pub struct BlockSet {
    pub blocks: Blocks,
    /// The unit of the extents, in bytes.
    unit: u64,
    /// Capacity of the (target) snapshot, in bytes.
    capacity: u64,
}

impl BlockSet {
    #[track_caller]
    fn covers(&self, really: &Blocks, question: &Question) {
        let missed: Vec<_> = really.difference(&self.blocks).collect();
        assert!(missed.is_empty(), "{question:?}: blocks {missed:?} are missed");
    }

    #[track_caller]
    fn lies_within(&self, limit: &Blocks, question: &Question) {
        let limit = rounded(limit, self.unit);
        let more: Vec<_> = self.blocks.difference(&limit).collect();
        assert!(more.is_empty(), "{question:?}: blocks {more:?} are reported but did not change");
    }
}

/// The size of extents in bytes. For `Fixed`, the largest power of two up to the size that divides
/// the capacity.
fn unit(style: Style, capacity: u64) -> u64 {
    match style {
        Style::Variable => BLOCK,
        Style::Fixed(size) => {
            let mut unit = size;
            while !capacity.is_multiple_of(unit) {
                unit /= 2;
            }
            unit
        }
    }
}

/// All blocks of the units that contain any of `blocks`.
fn rounded(blocks: &Blocks, unit: u64) -> Blocks {
    let size = unit / BLOCK;
    blocks.iter().flat_map(|block| block / size * size..(block / size + 1) * size).collect()
}

/// The blocks of extents, after checking the style.
fn blocks_in(extents: &[(u64, u64)], capacity: u64, style: Style) -> Blocks {
    let unit = unit(style, capacity);
    let mut blocks = Blocks::new();
    let mut last: Option<u64> = None;
    for (offset, length) in extents {
        let end = offset + length;
        assert!(*length > 0 && end <= capacity, "{offset} {length}: empty, or past {capacity}");
        assert_eq!((offset % unit, length % unit), (0, 0), "{offset} {length}: units of {unit}");
        match style {
            // Maximal extents: adjacent ones must be merged.
            Style::Variable => assert!(last.is_none_or(|last| last < *offset), "{extents:?}"),
            Style::Fixed(_) => {
                assert!(*length == unit && last.is_none_or(|last| last <= *offset), "{extents:?}");
            }
        }
        last = Some(end);
        blocks.extend(offset / BLOCK..end / BLOCK);
    }
    blocks
}

/// Queries the subject and compares each result with earlier ones.
#[derive(Default)]
pub struct Answers {
    known: BTreeMap<Question, Blocks>,
}

impl Answers {
    /// The complete result, in style `wanted` if the subject supports it.
    pub fn query(
        &mut self,
        subject: &dyn Subject,
        question: &Question,
        wanted: Style,
    ) -> Result<BlockSet, Refused> {
        let style = subject.style(wanted);
        let exact = subject.style(Style::Variable);
        if style != exact && exact == Style::Variable && !self.known.contains_key(question) {
            self.query(subject, question, exact)?;
        }
        let answer = subject.query(question, Window::WHOLE, wanted)?;
        let blocks = blocks_in(&answer.extents(), answer.capacity, style);
        let unit = unit(style, answer.capacity);
        match self.known.get(question) {
            Some(known) => {
                let known = rounded(known, unit);
                assert_eq!(
                    blocks, known,
                    "{question:?} in {style:?} differs from the earlier result"
                );
            }
            None if style == Style::Variable => {
                self.known.insert(question.clone(), blocks.clone());
            }
            None => {}
        }
        Ok(BlockSet { blocks, unit, capacity: answer.capacity })
    }

    /// Checks the invariants of one snapshot.
    pub fn check_snapshot(
        &mut self,
        subject: &dyn Subject,
        snapshot: &SnapshotState,
        style: Style,
    ) {
        let question = Question::Allocated(snapshot.id.clone());
        let answer = self.query(subject, &question, style);
        let itself = Question::Delta(snapshot.id.clone(), snapshot.id.clone());
        if snapshot.deleted {
            assert_eq!(answer.err(), Some(Refused::Missing), "{question:?}");
            let answer = self.query(subject, &itself, style);
            assert_eq!(answer.err(), Some(Refused::Missing), "{itself:?}");
            return;
        }
        let found = answer.unwrap();
        assert_eq!(found.capacity, snapshot.content.capacity(), "{question:?}");
        found.covers(&snapshot.content.non_zero(), &question);
        // A copy pool may be on ext4, which fills small reserved ranges with zeros that are data.
        if let Some(data) = snapshot.content.data()
            && subject.kind() != PoolKind::Copy
            // A larger block remains allocated until it is erased completely by one operation.
            && subject.block_size() == BLOCK
        {
            found.lies_within(&data, &question);
        }
        assert!(self.query(subject, &itself, style).unwrap().blocks.is_empty(), "{itself:?}");
    }

    /// Checks a delta between two snapshots, given by index, the base first. `None` if it is
    /// correctly refused.
    pub fn check_delta(
        &mut self,
        subject: &dyn Subject,
        volume: &Volume,
        (base, target): (usize, usize),
        style: Style,
    ) -> Option<BlockSet> {
        let (old, new) = (&volume.snapshots[base], &volume.snapshots[target]);
        let question = Question::Delta(old.id.clone(), new.id.clone());
        let answer = self.query(subject, &question, style);
        if new.deleted {
            assert_eq!(answer.err(), Some(Refused::Missing), "{question:?}");
            return None;
        }
        let refused = answer.as_ref().err();
        if old.perhaps_dropped && refused == Some(&Refused::Missing) {
            return None;
        }
        let forgotten = old.perhaps_forgotten && refused == Some(&Refused::NotKnown);
        if old.chain != new.chain || forgotten {
            assert_eq!(answer.err(), Some(Refused::NotKnown), "{question:?}");
            return None;
        }
        let found = answer.unwrap_or_else(|refused| panic!("{question:?}: {refused:?}"));
        assert_eq!(found.capacity, new.content.capacity(), "{question:?}");
        found.covers(&new.content.differing_from(&old.content), &question);
        let between =
            volume.snapshots[base + 1..=target].iter().map(|snapshot| snapshot.touched.as_ref());
        let touched: Option<Vec<&Blocks>> = between.collect();
        if let Some(touched) = touched {
            found.lies_within(&touched.into_iter().flatten().copied().collect(), &question);
        }
        Some(found)
    }

    /// Checks the deltas of three snapshots. The middle one may be deleted.
    pub fn check_three(
        &mut self,
        subject: &dyn Subject,
        volume: &Volume,
        [a, b, c]: [usize; 3],
        style: Style,
    ) {
        let across = self.check_delta(subject, volume, (a, c), style);
        let second = self.check_delta(subject, volume, (b, c), style);
        let first = self.check_delta(subject, volume, (a, b), style);
        if let (Some(across), Some(first), Some(second)) = (across, first, second) {
            let both: Blocks = first.blocks.union(&second.blocks).copied().collect();
            // The unit may differ after the volume has grown.
            let both = rounded(&both, across.unit);
            let question = format!("{} to {}", volume.snapshots[a].id, volume.snapshots[c].id);
            assert!(
                across.blocks.is_subset(&both),
                "{question} is not within the union by way of {b}"
            );
        }
    }

    /// Checks a result from any offset, in small messages, interrupted and resumed.
    pub fn check_window(
        &mut self,
        subject: &dyn Subject,
        question: &Question,
        options: QueryOptions,
    ) {
        let Ok(whole) = self.query(subject, question, options.style) else { return };
        let style = subject.style(options.style);
        let from = u64::from(options.from) % (whole.capacity + 1);
        let begin = from - from % whole.unit;
        let expected: Blocks = whole.blocks.range(begin / BLOCK..).copied().collect();
        let window = Window { from, page: options.page.into(), messages: None };
        let rest = subject.query(question, window, options.style).unwrap();
        let blocks = blocks_in(&rest.extents(), whole.capacity, style);
        assert_eq!(blocks, expected, "{question:?} from {from}, {options:?}");
        check_pages(&rest, window.page);

        let interrupted = Window { messages: Some(options.messages.into()), ..window };
        let mut extents = subject.query(question, interrupted, options.style).unwrap().extents();
        let resumed = extents.last().map_or(from, |(offset, length)| offset + length);
        let window = Window { from: resumed, ..window };
        extents.extend(subject.query(question, window, options.style).unwrap().extents());
        let message = format!("{question:?} from {from}, resumed at {resumed}, {options:?}");
        assert_eq!(extents, rest.extents(), "{message}");
    }
}

/// All messages but the last must be full.
fn check_pages(answer: &Answer, page: usize) {
    let sizes: Vec<usize> = answer.messages.iter().map(Vec::len).collect();
    if page == 0 {
        return;
    }
    if let Some((last, others)) = sizes.split_last() {
        assert!(*last <= page && others.iter().all(|size| *size == page), "{page}: {sizes:?}");
    }
}
