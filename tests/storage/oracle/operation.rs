//! The random operations. An operation names no objects: it selects them among the existing ones
//! when it runs. So every part of a sequence can run, and a failing sequence can be shrunk.

use std::ops::Range;

use csi_loopback::backend::Style;
use proptest::prelude::*;

use support::{BLOCK, MIB, pattern};

/// A choice among any number of items.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Pick(u8);

impl Pick {
    /// The first item.
    pub fn first() -> Self {
        Self(0)
    }

    /// An index below `count`, which is not 0.
    pub fn of(self, count: usize) -> usize {
        usize::from(self.0) % count
    }

    /// A choice of a non-empty subset.
    pub fn some_of(self, count: usize) -> Vec<usize> {
        let chosen: Vec<usize> =
            (0..count).filter(|index| self.0 >> (index % 8) & 1 == 1).collect();
        if chosen.is_empty() { vec![self.of(count)] } else { chosen }
    }
}

impl std::fmt::Debug for Pick {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// A range of a volume or file of unknown size, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub at: u32,
    pub length: u32,
}

impl Place {
    /// The range for an object of `size` bytes, in whole `unit`s. Empty if no unit fits.
    pub fn within(self, size: u64, unit: u64) -> Range<u64> {
        let units = size / unit;
        if units == 0 {
            return 0..0;
        }
        let start = u64::from(self.at) / unit % units;
        let length = (u64::from(self.length) / unit).clamp(1, units - start);
        start * unit..(start + length) * unit
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Direct I/O in whole blocks.
    Direct,
    /// Through the page cache, at any offset.
    Buffered,
    /// Through a mapping of the file; like `Buffered` on a raw volume.
    Mapped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// New data.
    Fresh,
    /// The existing data.
    Same,
    /// Zeros, which are data too.
    Zeros,
}

/// The content, range and method of a write.
#[derive(Debug, Clone, Copy)]
pub struct Write {
    pub place: Place,
    pub how: How,
    pub fill: Fill,
    /// Whether it is flushed at once.
    pub sync: bool,
}

impl Write {
    /// The range for an object of `size` bytes.
    pub fn within(self, size: u64) -> Range<u64> {
        self.place.within(size, if self.how == How::Direct { BLOCK } else { 1 })
    }

    /// The data to write over `there`; `number` makes it unique.
    pub fn bytes(self, there: &[u8], number: u64) -> Vec<u8> {
        match self.fill {
            Fill::Fresh => pattern(number, there.len()),
            Fill::Same => there.to_vec(),
            Fill::Zeros => vec![0; there.len()],
        }
    }
}

/// Ways to make a range read zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Erase {
    /// On a mounted volume: discards the unused blocks of its filesystem.
    Discard,
    /// Frees the blocks.
    Punch,
    /// Keeps them reserved.
    Zero,
}

/// Changes to a file as a whole. A raw volume has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Allocate,
    Truncate,
    Rename(Pick),
    Remove,
}

#[derive(Debug, Clone, Copy)]
pub enum Which {
    Oldest,
    Newest,
    Any(Pick),
}

impl Which {
    pub fn of(self, count: usize) -> usize {
        match self {
            Self::Oldest => 0,
            Self::Newest => count - 1,
            Self::Any(pick) => pick.of(count),
        }
    }
}

/// The source of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    Volume,
    Snapshot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Orderly,
    /// kill -9, if there is a process.
    Killed,
}

/// The parameters of a query.
#[derive(Debug, Clone, Copy)]
pub struct QueryOptions {
    pub style: Style,
    /// The starting offset in bytes.
    pub from: u32,
    /// Maximum extents in a message; 0 for the driver's default.
    pub page: u16,
    /// The number of messages after which the stream is interrupted.
    pub messages: u8,
}

/// `volume` selects a volume, `file` a file of a mounted volume.
#[derive(Debug, Clone, Copy)]
pub enum Operation {
    Write { volume: Pick, file: Pick, write: Write },
    Erase { volume: Pick, file: Pick, place: Place, how: Erase },
    Reshape { volume: Pick, file: Pick, place: Place, shape: Shape },
    Expand { volume: Pick, blocks: u16 },
    Snapshot { volume: Pick },
    Group { volumes: Pick },
    DeleteSnapshot { volume: Pick, which: Which },
    Query { volume: Pick, snapshots: [Pick; 3], options: QueryOptions },
    Derive { volume: Pick, from: From },
    DeleteVolume { volume: Pick, before_its_snapshots: bool },
    Track { volume: Pick, on: bool },
    Restart { ending: Ending, style: Style },
    ForgetExpired,
}

/// Weights of the operations, of about 1000 in total.
#[derive(Debug, Clone, Copy)]
pub struct Mix {
    pub reshape: u32,
    pub snapshot: u32,
    pub query: u32,
    pub derive: u32,
    pub restart: u32,
}

pub fn pick() -> impl Strategy<Value = Pick> + Clone {
    any::<u8>().prop_map(Pick)
}

fn place() -> impl Strategy<Value = Place> {
    let far = 24 * MIB as u32;
    // Often in one area, where blocks are written, erased and written again.
    let at = prop_oneof![3 => 0..far, 1 => 0..64 * BLOCK as u32];
    let length = prop_oneof![6 => 1..20_000u32, 2 => 1..65_536u32, 1 => 1..262_144u32];
    (at, length).prop_map(|(at, length)| Place { at, length })
}

pub fn style() -> impl Strategy<Value = Style> {
    let size = prop_oneof![Just(4u64), Just(8), Just(64), Just(1024)];
    prop_oneof![
        1 => Just(Style::Variable),
        1 => size.prop_map(|size| Style::Fixed(size << 10)),
    ]
}

fn options() -> impl Strategy<Value = QueryOptions> {
    let page = prop_oneof![Just(0u16), Just(1), Just(2), Just(7), 1..300u16];
    (style(), 0..24 * MIB as u32, page, 0..5u8)
        .prop_map(|(style, from, page, messages)| QueryOptions { style, from, page, messages })
}

fn write() -> impl Strategy<Value = Operation> {
    let how = prop_oneof![
        5 => Just(How::Direct),
        2 => Just(How::Buffered),
        1 => Just(How::Mapped),
    ];
    let fill = prop_oneof![
        94 => Just(Fill::Fresh),
        3 => Just(Fill::Same),
        1 => Just(Fill::Zeros),
    ];
    let write = (place(), how, fill, any::<bool>()).prop_map(|(place, how, fill, sync)| Write {
        place,
        how,
        fill,
        sync,
    });
    (pick(), pick(), write).prop_map(|(volume, file, write)| Operation::Write {
        volume,
        file,
        write,
    })
}

fn erase() -> impl Strategy<Value = Operation> {
    let how = prop_oneof![
        1 => Just(Erase::Discard),
        2 => Just(Erase::Punch),
        2 => Just(Erase::Zero),
    ];
    (pick(), pick(), place(), how).prop_map(|(volume, file, place, how)| Operation::Erase {
        volume,
        file,
        place,
        how,
    })
}

fn reshape() -> impl Strategy<Value = Operation> {
    let shape = prop_oneof![
        Just(Shape::Allocate),
        Just(Shape::Truncate),
        pick().prop_map(Shape::Rename),
        Just(Shape::Remove),
    ];
    (pick(), pick(), place(), shape).prop_map(|(volume, file, place, shape)| Operation::Reshape {
        volume,
        file,
        place,
        shape,
    })
}

/// In blocks. Sometimes so that large units divide the capacity.
fn growth() -> impl Strategy<Value = u16> {
    prop_oneof![2 => 0..512u16, 1 => Just(256), 1 => Just(16)]
}

fn delete_snapshot() -> impl Strategy<Value = Operation> {
    // The newest is often chosen: its data must be kept.
    let which = prop_oneof![Just(Which::Newest), Just(Which::Oldest), pick().prop_map(Which::Any)];
    (pick(), which).prop_map(|(volume, which)| Operation::DeleteSnapshot { volume, which })
}

fn tracking() -> impl Strategy<Value = Operation> {
    let on = prop_oneof![3 => Just(true), 1 => Just(false)];
    (pick(), on).prop_map(|(volume, on)| Operation::Track { volume, on })
}

fn restart() -> impl Strategy<Value = Operation> {
    let ending = prop_oneof![Just(Ending::Orderly), Just(Ending::Killed)];
    (ending, style()).prop_map(|(ending, style)| Operation::Restart { ending, style })
}

/// A random operation.
pub fn operation(mix: Mix) -> BoxedStrategy<Operation> {
    prop_oneof![
        800 => write(),
        100 => erase(),
        mix.reshape => reshape(),
        4 => (pick(), growth())
            .prop_map(|(volume, blocks)| Operation::Expand { volume, blocks }),
        mix.snapshot => pick().prop_map(|volume| Operation::Snapshot { volume }),
        mix.snapshot / 5 => pick().prop_map(|volumes| Operation::Group { volumes }),
        mix.snapshot * 2 / 3 => delete_snapshot(),
        mix.query => (pick(), [pick(), pick(), pick()], options())
            .prop_map(|(volume, snapshots, options)| Operation::Query { volume, snapshots, options }),
        mix.derive => pick().prop_map(|volume| Operation::Derive { volume, from: From::Volume }),
        mix.derive * 2 => pick().prop_map(|volume| Operation::Derive { volume, from: From::Snapshot }),
        2 => (pick(), any::<bool>()).prop_map(|(volume, before_its_snapshots)| {
            Operation::DeleteVolume { volume, before_its_snapshots }
        }),
        2 => tracking(),
        mix.restart => restart(),
        2 => Just(Operation::ForgetExpired),
    ]
    .boxed()
}
