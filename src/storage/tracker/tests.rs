//! Change records: round trips, and rejection of invalid files. The targets `record`,
//! `record_damage` and `paging` in fuzz/targets try any bytes, any damage and any style.

use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::error::{Error, Result};
use super::super::units::{BLOCK_SIZE, Block, BlockRange, MAX_VOLUME_BYTES};
use super::*;

const MAX_BLOCKS: u64 = MAX_VOLUME_BYTES / BLOCK_SIZE;
/// Blocks in a container of a roaring bitmap.
const CONTAINER: u64 = 1 << 16;

/// Half-open ranges of blocks: ascending, not empty, not adjacent.
type Set = Vec<Range<u64>>;

fn one(range: Range<u64>) -> Set {
    Set::from([range])
}

fn normalised(mut ranges: Set) -> Set {
    ranges.sort_by_key(|range| range.start);
    let mut out = Set::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

fn from_block(set: &Set, first: u64) -> Set {
    set.iter().map(|r| r.start.max(first)..r.end).filter(|r| !r.is_empty()).collect()
}

/// Capacities in blocks, more often near the borders of segments.
fn capacities() -> impl Strategy<Value = u64> {
    let segments = 1..=MAX_BLOCKS / SEGMENT_BLOCKS;
    prop_oneof![
        256..2 * CONTAINER,
        256..=MAX_BLOCKS,
        (segments, -3i64..=3).prop_map(|(segments, more)| {
            (segments * SEGMENT_BLOCKS).saturating_add_signed(more).min(MAX_BLOCKS)
        }),
        Just(MAX_BLOCKS),
    ]
}

/// Up to `count` ranges below `capacity`, of up to `longest` blocks, often at a border of a segment
/// or container, at the start or at the end. In the order that the writer requires: ascending, with
/// at most one shared block.
fn ranges(capacity: u64, count: usize, longest: u64) -> impl Strategy<Value = Set> {
    let near = |unit: u64| {
        (0..=capacity / unit, -3i64..=3)
            .prop_map(move |(number, more)| (number * unit).saturating_add_signed(more))
    };
    let starts = prop_oneof![
        0..capacity,
        0..capacity.min(64),
        near(CONTAINER),
        near(SEGMENT_BLOCKS),
        (1..64u64).prop_map(move |back| capacity.saturating_sub(back)),
    ];
    let lengths = prop_oneof![1..4u64, 1..=longest];
    prop::collection::vec((starts, lengths, any::<bool>()), 0..count).prop_map(move |mut pairs| {
        pairs.sort_unstable();
        let mut out = Set::new();
        for (start, length, share) in pairs {
            let past = out.last().map_or(0, |last: &Range<u64>| last.end);
            let start = if share { start.max(past.saturating_sub(1)) } else { start.max(past) };
            let end = (start + length).min(capacity);
            if start < end && end > past {
                out.push(start..end);
            }
        }
        out
    })
}

fn header(capacity_blocks: u64) -> Header {
    Header::new("snap-a", "vol-a", Some("snap-b"), 7, capacity_blocks * BLOCK_SIZE)
}

fn write(capacity: u64, allocated: &Set, changed: &Set) -> File {
    let file = tempfile::tempfile().unwrap();
    let mut writer = RecordWriter::new(file.try_clone().unwrap(), &header(capacity)).unwrap();
    for (bitmap, set) in [(Bitmap::Allocated, allocated), (Bitmap::Changed, changed)] {
        for range in set {
            writer.set(bitmap, BlockRange::new(Block(range.start), Block(range.end))).unwrap();
        }
    }
    let count = |set: &Set| -> u64 {
        normalised(set.clone()).iter().map(|range| range.end - range.start).sum()
    };
    writer.finish().unwrap();
    let record = read(&file);
    assert_eq!(record.blocks(Bitmap::Allocated), count(allocated));
    assert_eq!(record.blocks(Bitmap::Changed), count(changed));
    file
}

fn read(file: &File) -> Arc<RecordReader> {
    Arc::new(RecordReader::open(file.try_clone().unwrap()).unwrap())
}

fn variable(capacity: u64, bitmap: Bitmap, records: &[Arc<RecordReader>], from: u64) -> Set {
    let map = BlockMap::new(capacity * BLOCK_SIZE, bitmap, records.to_vec());
    let extents = map.extents(Style::Variable, from).unwrap();
    extents
        .map(|extent| {
            let extent = extent.unwrap();
            assert_eq!((extent.offset % BLOCK_SIZE, extent.length % BLOCK_SIZE), (0, 0));
            extent.offset / BLOCK_SIZE..extent.end() / BLOCK_SIZE
        })
        .collect()
}

/// Each non-empty segment and its blocks.
type Segments = Vec<(u64, Vec<u32>)>;

/// The contents of a record, with every checksum verified.
fn contents(file: &File) -> Result<(Header, [Segments; 2])> {
    let record = RecordReader::open(file.try_clone().unwrap())?;
    let all = |bitmap| -> Result<Segments> {
        record
            .segments(bitmap)
            .map(|segment| {
                let blocks = record.segment(bitmap, segment)?.unwrap_or_default();
                Ok((segment, blocks.into_iter().collect()))
            })
            .collect()
    };
    Ok((record.header().clone(), [all(Bitmap::Allocated)?, all(Bitmap::Changed)?]))
}

fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// A record with two segments in one bitmap and one in the other.
fn small_record() -> File {
    let border = SEGMENT_BLOCKS;
    write(2 * border, &vec![0..3, 9..10, border - 2..border + 2], &one(border + 1..border + 9))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) })]

    #[test]
    fn a_record_can_be_read_from_any_offset(
        (capacity, allocated, changed, from) in capacities().prop_flat_map(|capacity| (
            Just(capacity),
            ranges(capacity, 24, 2 * SEGMENT_BLOCKS + 5),
            ranges(capacity, 24, 3 * CONTAINER),
            0..=capacity * BLOCK_SIZE,
        )),
    ) {
        let record = read(&write(capacity, &allocated, &changed));
        prop_assert_eq!(record.header(), &header(capacity));
        for (bitmap, set) in [(Bitmap::Allocated, allocated), (Bitmap::Changed, changed)] {
            let set = normalised(set);
            prop_assert_eq!(record.blocks(bitmap), set.iter().map(|r| r.end - r.start).sum::<u64>());
            let records = [record.clone()];
            prop_assert_eq!(&variable(capacity, bitmap, &records, 0), &set);
            // Any offset, the first and the last byte of a run, and the end.
            let edges = set.iter().flat_map(|r| [r.start * BLOCK_SIZE, r.end * BLOCK_SIZE - 1]);
            for from in edges.take(16).chain([from, capacity * BLOCK_SIZE]) {
                let expected = from_block(&set, from / BLOCK_SIZE);
                prop_assert_eq!(variable(capacity, bitmap, &records, from), expected, "{}", from);
            }
        }
    }

    #[test]
    fn several_records_yield_their_union(
        (capacity, sets, from) in capacities().prop_flat_map(|capacity| (
            Just(capacity),
            prop::collection::vec(ranges(capacity, 16, SEGMENT_BLOCKS), 1..5),
            0..=capacity * BLOCK_SIZE,
        )),
    ) {
        let records: Vec<_> =
            sets.iter().map(|set| read(&write(capacity, &Set::new(), set))).collect();
        let union = normalised(sets.concat());
        prop_assert_eq!(&variable(capacity, Bitmap::Changed, &records, 0), &union);
        let expected = from_block(&union, from / BLOCK_SIZE);
        prop_assert_eq!(variable(capacity, Bitmap::Changed, &records, from), expected);
        prop_assert!(variable(capacity, Bitmap::Allocated, &records, 0).is_empty());
    }

    #[test]
    fn an_invalid_index_with_correct_checksums_is_an_error(
        entries in prop::collection::vec((0..4u32, any::<u32>(), any::<u64>(), any::<u32>(), any::<u64>()), 1..5),
        capacity in prop_oneof![0..4 * MAX_VOLUME_BYTES, any::<u64>()],
    ) {
        let payload = payload_of(&[1, 2, 3]);
        let entries: Vec<_> = entries
            .into_iter()
            .map(|(bitmap, segment, offset, length, blocks)| IndexEntry {
                bitmap, segment, offset, length, blocks, checksum: 0,
            })
            .collect();
        let json = serde_json::to_vec(&Header { capacity_bytes: capacity, ..header(1) }).unwrap();
        prop_assert!(matches!(contents(&forged(&json, &payload, &entries)), Err(Error::Damaged(_))));
    }
}

fn json(capacity_blocks: u64) -> Vec<u8> {
    serde_json::to_vec(&header(capacity_blocks)).unwrap()
}

fn payload_of(blocks: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    blocks.iter().collect::<roaring::RoaringBitmap>().serialize_into(&mut bytes).unwrap();
    bytes
}

/// The entry of a payload directly after the header of [`json`].
fn entry_of(payload: &[u8]) -> IndexEntry {
    IndexEntry {
        bitmap: 0,
        segment: 0,
        offset: (20 + json(2 * SEGMENT_BLOCKS).len()) as u64,
        length: payload.len() as u32,
        checksum: crc32c::crc32c(payload),
        blocks: 0,
    }
}

/// A file with correct checksums of header, index and trailer, whatever their contents.
fn forged(json: &[u8], payload: &[u8], entries: &[IndexEntry]) -> File {
    forged_version(VERSION, json, payload, entries)
}

fn forged_version(version: u32, json: &[u8], payload: &[u8], entries: &[IndexEntry]) -> File {
    let mut bytes = Vec::new();
    bytes.extend(MAGIC);
    bytes.extend(version.to_le_bytes());
    bytes.extend((json.len() as u32).to_le_bytes());
    bytes.extend(json);
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes.extend(payload);
    let index_offset = bytes.len() as u64;
    let mut index = Vec::new();
    entries.iter().for_each(|entry| entry.encode(&mut index));
    bytes.extend(&index);
    bytes.extend(trailer(index_offset, entries.len() as u32, crc32c::crc32c(&index)));
    file_of(&bytes)
}

fn trailer(index_offset: u64, entries: u32, checksum: u32) -> Vec<u8> {
    let mut trailer = Vec::new();
    trailer.extend(index_offset.to_le_bytes());
    trailer.extend(entries.to_le_bytes());
    trailer.extend(checksum.to_le_bytes());
    trailer.extend([0; 4]);
    trailer.extend(crc32c::crc32c(&trailer).to_le_bytes());
    trailer.extend(END_MAGIC);
    trailer
}

#[test]
fn every_bit_of_a_record_is_covered_by_a_checksum() {
    let file = small_record();
    let bytes = bytes_of(&file);
    assert!(contents(&file).is_ok());
    for (at, byte) in bytes.iter().enumerate() {
        for bit in 0..8 {
            file.write_all_at(&[byte ^ (1 << bit)], at as u64).unwrap();
            let read = contents(&file);
            assert!(matches!(read, Err(Error::Damaged(_))), "bit {bit} of byte {at}: {read:?}");
        }
        file.write_all_at(&[*byte], at as u64).unwrap();
    }
    assert!(contents(&file).is_ok());
}

#[test]
fn a_record_truncated_anywhere_is_rejected() {
    let file = small_record();
    for length in (0..file.metadata().unwrap().len()).rev() {
        file.set_len(length).unwrap();
        let read = contents(&file);
        assert!(matches!(read, Err(Error::Damaged(_))), "{length}: {read:?}");
    }
}

#[test]
fn a_forged_record_with_correct_values_is_read() {
    let payload = payload_of(&[1, 2, 3]);
    let entry = IndexEntry { blocks: 3, ..entry_of(&payload) };
    let (_, [allocated, _]) =
        contents(&forged(&json(2 * SEGMENT_BLOCKS), &payload, &[entry])).unwrap();
    assert_eq!(allocated, [(0, vec![1, 2, 3])]);
}

#[test]
fn a_record_of_another_version_is_refused() {
    let payload = payload_of(&[1, 2, 3]);
    let entry = IndexEntry { blocks: 3, ..entry_of(&payload) };
    for version in [0, VERSION + 1, u32::MAX] {
        let record = forged_version(version, &json(2 * SEGMENT_BLOCKS), &payload, &[entry]);
        let refused = contents(&record).unwrap_err().to_string();
        let words = format!("version {version} is not supported (supported: {VERSION})");
        assert!(refused.contains(&words), "{refused}");
    }
}

#[test]
fn a_bitmap_past_the_capacity_is_rejected() {
    let payload = payload_of(&[1, 2, 3]);
    let entry = IndexEntry { blocks: 3, segment: 1, ..entry_of(&payload) };
    for (more, whole) in [(3, false), (4, true)] {
        let json = json(SEGMENT_BLOCKS + more);
        let offset = 20 + json.len() as u64;
        let read = contents(&forged(&json, &payload, &[IndexEntry { offset, ..entry }]));
        assert_eq!(read.is_ok(), whole, "{more} blocks past the border: {read:?}");
    }
}

/// The file is sparse and large enough for the claimed length, so only the reader's limits prevent
/// a large allocation.
#[test]
fn a_false_length_allocates_no_memory() {
    const HUGE: u64 = 32 << 30;
    let claims_header =
        [&MAGIC[..], &VERSION.to_le_bytes(), &0xffff_fff0u32.to_le_bytes()].concat();
    let good = bytes_of(&forged(&json(2 * SEGMENT_BLOCKS), &[], &[]));
    let good_header = &good[..20 + json(2 * SEGMENT_BLOCKS).len()];
    let entries = u32::MAX / 8;
    let index_offset = HUGE - (TRAILER_BYTES + entries as usize * INDEX_ENTRY_BYTES) as u64;
    let long = IndexEntry { length: 0xf000_0000, ..entry_of(&[]) };
    let mut index = Vec::new();
    long.encode(&mut index);
    let index_at = HUGE - (TRAILER_BYTES + INDEX_ENTRY_BYTES) as u64;
    let index_checksum = crc32c::crc32c(&index);
    let lies = [
        ("header", claims_header, (HUGE, Vec::new())),
        ("index", good_header.to_vec(), (HUGE - 32, trailer(index_offset, entries, 0))),
        (
            "segment",
            good_header.to_vec(),
            (index_at, [index, trailer(index_at, 1, index_checksum)].concat()),
        ),
    ];
    for (what, start, (at, end)) in lies {
        let file = file_of(&start);
        file.write_all_at(&end, at).unwrap();
        file.set_len(HUGE).unwrap();
        let before = peak_kib();
        assert!(matches!(contents(&file), Err(Error::Damaged(_))), "{what}");
        let more = peak_kib() - before;
        assert!(more < 1 << 20, "{what}: {more} KiB");
    }
}

/// Four million bytes of run containers encode more blocks than a segment can have.
#[test]
fn an_expanding_bitmap_needs_bounded_memory() {
    const CONTAINERS: u32 = 65536;
    let mut payload = Vec::new();
    payload.extend((0x303b | (CONTAINERS - 1) << 16).to_le_bytes());
    payload.extend(vec![0xff; CONTAINERS as usize / 8]);
    (0..CONTAINERS).for_each(|key| payload.extend((key | 0xffff << 16).to_le_bytes()));
    let runs_at = payload.len() as u32 + 4 * CONTAINERS;
    (0..CONTAINERS).for_each(|number| payload.extend((runs_at + 6 * number).to_le_bytes()));
    (0..CONTAINERS).for_each(|_| payload.extend([1, 0, 0, 0, 0xff, 0xff]));
    assert!(payload.len() <= MAX_SEGMENT_BYTES);
    let entry = IndexEntry { blocks: 1 << 32, ..entry_of(&payload) };
    let before = peak_kib();
    let read = contents(&forged(&json(2 * SEGMENT_BLOCKS), &payload, &[entry]));
    assert!(matches!(read, Err(Error::Damaged(_))));
    let more = peak_kib() - before;
    assert!(more < 256 << 10, "{more} KiB");
}

/// The peak memory of this process.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn ranges_out_of_order_are_rejected() {
    let file = tempfile::tempfile().unwrap();
    let mut writer = RecordWriter::new(file, &header(4 * SEGMENT_BLOCKS)).unwrap();
    let range = |start| BlockRange::new(Block(start), Block(start + 1));
    writer.set(Bitmap::Changed, range(2 * SEGMENT_BLOCKS)).unwrap();
    writer.set(Bitmap::Allocated, range(0)).unwrap();
    assert!(writer.set(Bitmap::Changed, range(0)).is_err());
}

#[test]
fn the_largest_volume_full_of_data_is_one_extent() {
    let file = write(MAX_BLOCKS, &one(0..MAX_BLOCKS), &Set::new());
    assert!(file.metadata().unwrap().len() < 4 << 20);
    let records = [read(&file)];
    assert_eq!(variable(MAX_BLOCKS, Bitmap::Allocated, &records, 0), one(0..MAX_BLOCKS));
    let last = MAX_VOLUME_BYTES - 1;
    let end = variable(MAX_BLOCKS, Bitmap::Allocated, &records, last);
    assert_eq!(end, one(MAX_BLOCKS - 1..MAX_BLOCKS));
    assert!(variable(MAX_BLOCKS, Bitmap::Allocated, &records, MAX_VOLUME_BYTES).is_empty());
    let map = BlockMap::new(MAX_VOLUME_BYTES, Bitmap::Allocated, records.to_vec());
    let units = map.extents(Style::Fixed(1 << 30), 0).unwrap();
    assert_eq!(units.map(|extent| extent.unwrap().length).sum::<u64>(), MAX_VOLUME_BYTES);
}

/// The cost of a page depends only on its contents.
#[test]
fn the_first_units_of_a_run_do_not_require_the_rest() {
    let blocks = 2 * SEGMENT_BLOCKS;
    let file = write(blocks, &one(0..blocks), &Set::new());
    let records = vec![read(&file)];
    // The second segment's payload, the last one, is damaged once the record is open.
    let end = bytes_of(&file).len() - TRAILER_BYTES - 2 * INDEX_ENTRY_BYTES;
    file.write_all_at(&[0xff; 8], end as u64 - 8).unwrap();
    let map = BlockMap::new(blocks * BLOCK_SIZE, Bitmap::Allocated, records);
    let mut units = map.extents(Style::Fixed(BLOCK_SIZE), 0).unwrap();
    let first = units.by_ref().take(1000).map(|unit| unit.unwrap().length).sum::<u64>();
    assert_eq!(first, 1000 * BLOCK_SIZE);
    let behind = units.skip(SEGMENT_BLOCKS as usize - 1000).collect::<Vec<_>>();
    assert!(matches!(behind[..], [Err(Error::Damaged(_))]), "{behind:?}");
}

#[test]
fn a_result_ends_after_the_first_error() {
    let file = small_record();
    let records = vec![read(&file)];
    // The second segment's payload is damaged once the record is open.
    let entry = records[0].segment(Bitmap::Changed, 1).unwrap();
    assert!(entry.is_some());
    let whole = bytes_of(&file);
    let payload_at = 20 + json(2 * SEGMENT_BLOCKS).len();
    let end = whole.len() - TRAILER_BYTES - 3 * INDEX_ENTRY_BYTES;
    file.write_all_at(&vec![0; end - payload_at], payload_at as u64).unwrap();
    let map = BlockMap::new(2 * SEGMENT_BLOCKS * BLOCK_SIZE, Bitmap::Allocated, records);
    let answers: Vec<_> = map.extents(Style::Variable, 0).unwrap().collect();
    assert!(matches!(answers[..], [Err(Error::Damaged(_))]), "{answers:?}");
}
