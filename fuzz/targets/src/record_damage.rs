//! A damaged change record: an error, or the same result as before.

use crate::fixture::{Damage, Run, blocks_of, capacity_of, file_of, read_blocks, record_of};
use arbitrary::Arbitrary;
use csi_loopback::backend::Error;
use csi_loopback::backend::tracker::{Bitmap, Header, RecordReader};

#[derive(Debug, Arbitrary)]
struct Input {
    capacity: u64,
    chained: bool,
    allocated: Vec<Run>,
    changed: Vec<Run>,
    damage: Damage,
}

pub fn record_damage(input: &[u8]) {
    crate::decoded(input, check);
}

fn check(input: Input) {
    let capacity = capacity_of(input.capacity);
    let predecessor = input.chained.then_some("snap-before-0123456789abcdef");
    let header = Header::new("snap-s-0123456789abcdef", "vol-v", predecessor, 7, capacity);
    let allocated = blocks_of(&input.allocated, capacity / 4096);
    let changed = blocks_of(&input.changed, capacity / 4096);
    let mut bytes = record_of(&header, &allocated, &changed);
    input.damage.apply(&mut bytes);
    let read = RecordReader::open(file_of(&bytes)).and_then(|record| {
        Ok((
            record.header().clone(),
            read_blocks(&record, Bitmap::Allocated)?,
            read_blocks(&record, Bitmap::Changed)?,
        ))
    });
    match read {
        Ok(read) => assert_eq!(read, (header, allocated, changed)),
        Err(Error::Damaged(_)) => {}
        Err(other) => panic!("{other:?}"),
    }
}
