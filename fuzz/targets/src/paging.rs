//! Responses in any style, from any offset, in messages of any size: always equal to a plain set of
//! blocks, and a stream that is interrupted and resumed anywhere equals the whole.

use std::collections::BTreeSet;

use crate::fixture::{Run, blocks_of, capacity_of, file_of, record_of};
use arbitrary::Arbitrary;
use csi_loopback::backend::tracker::{Bitmap, Header, RecordReader, Style};
use csi_loopback::backend::{BLOCK_SIZE, BlockMap, Error, Extent};
use csi_loopback::fuzzing;

#[derive(Debug, Arbitrary)]
struct Input {
    capacity: u64,
    records: [Option<Vec<Run>>; 3],
    /// Block size of the fixed style, in bytes.
    fixed: Option<u64>,
    starting_offset: i64,
    max_results: i32,
    resume_at: u8,
}

pub fn paging(input: &[u8]) {
    crate::decoded(input, check);
}

fn check(input: Input) {
    let capacity = capacity_of(input.capacity);
    let sets: Vec<BTreeSet<u64>> =
        input.records.iter().flatten().map(|runs| blocks_of(runs, capacity / BLOCK_SIZE)).collect();
    let response = |style, offset| {
        let records = sets.iter().map(|set| {
            let header = Header::new("s", "v", None, 1, capacity);
            let bytes = record_of(&header, &BTreeSet::new(), set);
            RecordReader::open(file_of(&bytes)).unwrap().into()
        });
        let map = BlockMap::new(capacity, Bitmap::Changed, records.collect());
        let extents = map.extents(style, offset)?;
        extents.collect::<Result<Vec<Extent>, Error>>()
    };
    let style = input.fixed.map_or(Style::Variable, Style::Fixed);
    let (offset, per_message) = match fuzzing::part(input.starting_offset, input.max_results) {
        Ok(window) => window,
        Err(Error::OutOfRange(_)) => return assert!(input.starting_offset < 0),
        Err(error) => return assert!(input.max_results < 0, "{error:?}"),
    };
    assert!(input.starting_offset >= 0 && input.max_results >= 0);
    assert!((1..=128 << 10).contains(&per_message));
    let whole = match response(style, offset) {
        Ok(whole) => whole,
        Err(Error::OutOfRange(_)) => return assert!(offset > capacity),
        Err(other) => panic!("{other:?}"),
    };
    assert!(offset <= capacity);
    let union = sets.iter().flatten().copied().collect();
    assert_eq!(whole, expected(&union, style, offset, capacity));
    // The client resumes after the last extent that it has.
    if let Some(last) = whole.get(usize::from(input.resume_at)) {
        let rest = response(style, last.end()).unwrap();
        assert_eq!(rest, whole[usize::from(input.resume_at) + 1..]);
    }
}

/// The same result, computed from a plain set.
fn expected(blocks: &BTreeSet<u64>, style: Style, offset: u64, capacity: u64) -> Vec<Extent> {
    let unit = match style {
        Style::Variable => BLOCK_SIZE,
        Style::Fixed(size) => {
            let sizes = (12..=47).map(|bits| 1_u64 << bits);
            sizes
                .filter(|unit| *unit <= size && capacity.is_multiple_of(*unit))
                .max()
                .unwrap_or(BLOCK_SIZE)
        }
    };
    let units: BTreeSet<u64> = blocks
        .iter()
        .map(|block| block * BLOCK_SIZE / unit)
        .filter(|number| *number >= offset / unit)
        .collect();
    let mut extents: Vec<Extent> = Vec::new();
    for number in units {
        let extent = Extent { offset: number * unit, length: unit };
        match extents.last_mut() {
            Some(last) if style == Style::Variable && last.end() == extent.offset => {
                last.length += unit;
            }
            _ => extents.push(extent),
        }
    }
    extents
}
