//! Any bytes as a change record: an error, or blocks within the capacity. In every other input the
//! checksums are corrected first, so that the code after them is reached too.

use crate::fixture::file_of;
use csi_loopback::backend::tracker::{Bitmap, RecordReader, Style};
use csi_loopback::backend::{BLOCK_SIZE, BlockMap, Error, Result};

pub fn record(input: &[u8]) {
    let Some((mode, bytes)) = input.split_first() else { return };
    let mut bytes = bytes.to_vec();
    if mode % 2 == 1 {
        seal(&mut bytes);
    }
    for bitmap in [Bitmap::Allocated, Bitmap::Changed] {
        match read(&bytes, bitmap) {
            Ok(()) | Err(Error::Damaged(_)) => {}
            Err(other) => panic!("{other:?}"),
        }
    }
}

fn read(bytes: &[u8], bitmap: Bitmap) -> Result<()> {
    let record = RecordReader::open(file_of(bytes))?;
    let capacity = record.header().capacity_bytes;
    let mut blocks = 0;
    for segment in record.segments(bitmap) {
        blocks += record.segment(bitmap, segment)?.map_or(0, |set| set.len());
    }
    assert_eq!(blocks, record.blocks(bitmap));
    let map = BlockMap::new(capacity, bitmap, vec![record.into()]);
    let (mut position, mut bytes) = (0, 0);
    for extent in map.extents(Style::Variable, 0)? {
        let extent = extent?;
        assert!(extent.length > 0 && extent.offset >= position && extent.end() <= capacity);
        position = extent.end();
        bytes += extent.length;
    }
    assert_eq!(bytes, blocks * BLOCK_SIZE);
    Ok(())
}

/// Writes magic numbers and checksums at the positions of the format
/// (docs/design/on-disk-format.md).
fn seal(bytes: &mut [u8]) {
    let length = bytes.len();
    if length < 48 {
        return;
    }
    let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let trailer = length - 32;
    bytes[..8].copy_from_slice(b"CBTRECRD");
    bytes[8..12].copy_from_slice(&1_u32.to_le_bytes());
    let header = 16 + word(bytes, 12) as usize;
    if header + 4 > trailer {
        return;
    }
    put(bytes, header, 0..header);
    let entries = word(bytes, trailer + 8) as usize;
    let Some(index) = entries.checked_mul(32).and_then(|size| trailer.checked_sub(size)) else {
        return;
    };
    for at in (index..trailer).step_by(32) {
        let from = word(bytes, at + 8) as usize;
        let until = from.saturating_add(word(bytes, at + 16) as usize);
        if until <= index {
            put(bytes, at + 20, from..until);
        }
    }
    bytes[trailer..trailer + 8].copy_from_slice(&(index as u64).to_le_bytes());
    put(bytes, trailer + 12, index..trailer);
    put(bytes, trailer + 20, trailer..trailer + 20);
    bytes[trailer + 24..].copy_from_slice(b"CBTREEND");
}

fn put(bytes: &mut [u8], at: usize, covered: std::ops::Range<usize>) {
    let checksum = crc32c::crc32c(&bytes[covered]);
    bytes[at..at + 4].copy_from_slice(&checksum.to_le_bytes());
}
