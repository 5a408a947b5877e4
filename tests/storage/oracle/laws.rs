//! What has to hold of every answer, whoever gives it:
//!
//! - no block that differs is missing from a delta, none that holds something from `allocated`;
//! - a delta reports nothing but blocks that were written or erased in between, `allocated` nothing but
//!   blocks that were written, where the pool has blocks of that size;
//! - a delta from a snapshot to itself is empty, one from A to C lies within those from A to B and from B
//!   to C together, and one across a break in the chain is refused;
//! - an answer is the same set of blocks whatever the style, the size of messages and where it is begun,
//!   cut off and resumed, and it stays the same for as long as it is given.

use std::collections::BTreeMap;

use csi_loopback::backend::{PoolKind, Style};

use super::model::{Blocks, Cut, Volume};
use super::operation::Look;
use super::subject::{Answer, Question, Refused, Subject, Window};
use support::BLOCK;

/// An answer as a set of blocks.
pub struct Told {
    pub blocks: Blocks,
    /// They come in groups of so many bytes.
    unit: u64,
    /// Bytes of the (target) snapshot.
    capacity: u64,
}

impl Told {
    #[track_caller]
    fn covers(&self, really: &Blocks, question: &Question) {
        let missed: Vec<_> = really.difference(&self.blocks).collect();
        assert!(missed.is_empty(), "{question:?}: blocks {missed:?} are missed");
    }

    #[track_caller]
    fn lies_within(&self, limit: &Blocks, question: &Question) {
        let limit = rounded(limit, self.unit);
        let more: Vec<_> = self.blocks.difference(&limit).collect();
        assert!(more.is_empty(), "{question:?}: blocks {more:?} are reported without a reason");
    }
}

/// The size of extents in bytes: with `Fixed` the largest power of two up to that which divides the
/// capacity.
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

/// All blocks of the units that any of `blocks` is in.
fn rounded(blocks: &Blocks, unit: u64) -> Blocks {
    let size = unit / BLOCK;
    blocks.iter().flat_map(|block| block / size * size..(block / size + 1) * size).collect()
}

/// The blocks of extents, which have to be as the style wants them.
fn blocks_in(extents: &[(u64, u64)], capacity: u64, style: Style) -> Blocks {
    let unit = unit(style, capacity);
    let mut blocks = Blocks::new();
    let mut last: Option<u64> = None;
    for (offset, length) in extents {
        let end = offset + length;
        assert!(*length > 0 && end <= capacity, "{offset} {length}: empty, or past {capacity}");
        assert_eq!((offset % unit, length % unit), (0, 0), "{offset} {length}: units of {unit}");
        match style {
            // As long as they are: one that goes on is not two.
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

/// Asks, and holds every answer against what was answered before.
#[derive(Default)]
pub struct Answers {
    known: BTreeMap<Question, Blocks>,
}

impl Answers {
    /// The whole answer, in `wanted` style if the subject can choose.
    pub fn ask(
        &mut self,
        subject: &dyn Subject,
        question: &Question,
        wanted: Style,
    ) -> Result<Told, Refused> {
        let style = subject.style(wanted);
        let exact = subject.style(Style::Variable);
        if style != exact && exact == Style::Variable && !self.known.contains_key(question) {
            self.ask(subject, question, exact)?;
        }
        let answer = subject.ask(question, Window::WHOLE, wanted)?;
        let blocks = blocks_in(&answer.extents(), answer.capacity, style);
        let unit = unit(style, answer.capacity);
        match self.known.get(question) {
            Some(known) => {
                let known = rounded(known, unit);
                assert_eq!(blocks, known, "{question:?} in {style:?} is not what it was before");
            }
            None if style == Style::Variable => {
                self.known.insert(question.clone(), blocks.clone());
            }
            None => {}
        }
        Ok(Told { blocks, unit, capacity: answer.capacity })
    }

    /// Everything that is known of a snapshot alone.
    pub fn check_cut(&mut self, subject: &dyn Subject, cut: &Cut, style: Style) {
        let question = Question::Allocated(cut.id.clone());
        let answer = self.ask(subject, &question, style);
        let itself = Question::Delta(cut.id.clone(), cut.id.clone());
        if cut.deleted {
            assert_eq!(answer.err(), Some(Refused::Missing), "{question:?}");
            let answer = self.ask(subject, &itself, style);
            assert_eq!(answer.err(), Some(Refused::Missing), "{itself:?}");
            return;
        }
        let told = answer.unwrap();
        assert_eq!(told.capacity, cut.content.capacity(), "{question:?}");
        told.covers(&cut.content.non_zero(), &question);
        // A copy pool may lie on ext4, which fills small reserved ranges with zeros that are data.
        if let Some(data) = cut.content.data()
            && subject.kind() != PoolKind::Copy
            // A larger block stays allocated until all of it is erased in one piece.
            && subject.block_size() == BLOCK
        {
            told.lies_within(&data, &question);
        }
        assert!(self.ask(subject, &itself, style).unwrap().blocks.is_empty(), "{itself:?}");
    }

    /// A delta between two snapshots, given by index, the base first. `None` where it is rightly
    /// refused.
    pub fn check_delta(
        &mut self,
        subject: &dyn Subject,
        volume: &Volume,
        (base, target): (usize, usize),
        style: Style,
    ) -> Option<Told> {
        let (old, new) = (&volume.cuts[base], &volume.cuts[target]);
        let question = Question::Delta(old.id.clone(), new.id.clone());
        let answer = self.ask(subject, &question, style);
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
        let told = answer.unwrap_or_else(|refused| panic!("{question:?}: {refused:?}"));
        assert_eq!(told.capacity, new.content.capacity(), "{question:?}");
        told.covers(&new.content.differing_from(&old.content), &question);
        let between = volume.cuts[base + 1..=target].iter().map(|cut| cut.touched.as_ref());
        let touched: Option<Vec<&Blocks>> = between.collect();
        if let Some(touched) = touched {
            told.lies_within(&touched.into_iter().flatten().copied().collect(), &question);
        }
        Some(told)
    }

    /// Deltas among three snapshots, and from a middle one that may be deleted by now.
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
            // Units differ where the volume has grown.
            let both = rounded(&both, across.unit);
            let question = format!("{} to {}", volume.cuts[a].id, volume.cuts[c].id);
            assert!(across.blocks.is_subset(&both), "{question} is more than by way of {b}");
        }
    }

    /// An answer that is begun somewhere, sent in small messages, cut off and resumed.
    pub fn check_window(&mut self, subject: &dyn Subject, question: &Question, look: Look) {
        let Ok(whole) = self.ask(subject, question, look.style) else { return };
        let style = subject.style(look.style);
        let from = u64::from(look.from) % (whole.capacity + 1);
        let begin = from - from % whole.unit;
        let expected: Blocks = whole.blocks.range(begin / BLOCK..).copied().collect();
        let window = Window { from, page: look.page.into(), messages: None };
        let rest = subject.ask(question, window, look.style).unwrap();
        let blocks = blocks_in(&rest.extents(), whole.capacity, style);
        assert_eq!(blocks, expected, "{question:?} from {from}, {look:?}");
        check_pages(&rest, window.page);

        let cut = Window { messages: Some(look.messages.into()), ..window };
        let mut extents = subject.ask(question, cut, look.style).unwrap().extents();
        let resumed = extents.last().map_or(from, |(offset, length)| offset + length);
        let window = Window { from: resumed, ..window };
        extents.extend(subject.ask(question, window, look.style).unwrap().extents());
        let message = format!("{question:?} from {from}, resumed at {resumed}, {look:?}");
        assert_eq!(extents, rest.extents(), "{message}");
    }
}

/// Full messages but for the last.
fn check_pages(answer: &Answer, page: usize) {
    let sizes: Vec<usize> = answer.messages.iter().map(Vec::len).collect();
    if page == 0 {
        return;
    }
    if let Some((last, others)) = sizes.split_last() {
        assert!(*last <= page && others.iter().all(|size| *size == page), "{page}: {sizes:?}");
    }
}
