//! Extent maps. Any output of the kernel leads to an error, or to findings that cover all reported
//! data. A possible map, divided into extents and batches in any way, leads to exactly the findings
//! of a byte-by-byte comparison.

use arbitrary::Arbitrary;
use csi_loopback::backend::Error;
use csi_loopback::backend::extents::Finding;
use csi_loopback::fuzzing::{FiemapExtent, compare_extents};

const LAST: u32 = 1;
const UNWRITTEN: u32 = 0x800;
/// Flags with which the address does not determine the content.
const OPAQUE: [u32; 8] = [2, 4, 8, 0x80, 0x100, 0x200, 0x400, 1 << 30];

#[derive(Debug, Arbitrary)]
enum Input {
    Impossible { old: Option<Vec<Vec<Raw>>>, old_size: u64, new: Vec<Vec<Raw>>, size: u64 },
    Possible { old: Option<Vec<Plain>>, old_size: u8, new: Vec<Plain>, size: u8, batch: u8 },
}

#[derive(Debug, Clone, Arbitrary)]
struct Raw {
    logical: u64,
    physical: u64,
    length: u64,
    flags: u32,
}

#[derive(Debug, Clone, Arbitrary)]
struct Plain {
    gap: u8,
    length: u8,
    physical: u8,
    kind: u8,
}

pub fn extents(input: &[u8]) {
    crate::decoded(input, |input: Input| match input {
        Input::Impossible { old, old_size, new, size } => impossible(old, old_size, &new, size),
        Input::Possible { old, old_size, new, size, batch } => {
            possible(old.as_deref(), old_size, &new, size, batch);
        }
    });
}

fn impossible(old: Option<Vec<Vec<Raw>>>, old_size: u64, new: &[Vec<Raw>], size: u64) {
    let mut reported = Vec::new();
    let mut batches = new.iter().map(|batch| batch.iter().map(extent).collect::<Vec<_>>());
    let fetch = |_| {
        let batch = batches.next().unwrap_or_default();
        reported.extend(batch.clone());
        Ok(batch)
    };
    let old = old.map(|old| {
        let mut batches = old.into_iter();
        let fetch = move |_| Ok(batches.next().unwrap_or_default().iter().map(extent).collect());
        (Box::new(fetch) as _, old_size)
    });
    let findings = match compare_extents(old, (Box::new(fetch), size)) {
        Ok(findings) => findings,
        Err(Error::Damaged(_)) => return,
        Err(other) => panic!("{other:?}"),
    };
    check_order(&findings, size);
    for extent in reported {
        let unwritten = extent.flags & UNWRITTEN != 0;
        let opaque = OPAQUE.iter().any(|flag| extent.flags & flag != 0);
        if !unwritten || opaque {
            let end = extent.logical.saturating_add(extent.length).min(size);
            assert_allocated(&findings, extent.logical, end);
        }
    }
}

fn extent(raw: &Raw) -> FiemapExtent {
    FiemapExtent::new(raw.logical, raw.physical, raw.length, raw.flags)
}

fn check_order(findings: &[Finding], size: u64) {
    let mut position = 0;
    for finding in findings {
        assert!(finding.start >= position && finding.end > finding.start && finding.end <= size);
        assert!(finding.allocated || finding.changed);
        position = finding.end;
    }
}

fn assert_allocated(findings: &[Finding], mut start: u64, end: u64) {
    for finding in findings.iter().filter(|finding| finding.allocated) {
        if finding.start <= start && start < finding.end {
            start = finding.end;
        }
    }
    assert!(start >= end, "nothing at {start} of {end}: {findings:?}");
}

/// The content of a byte of a file.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Byte {
    Zero,
    At(u64),
    Opaque,
}

fn possible(old: Option<&[Plain]>, old_size: u8, new: &[Plain], size: u8, batch: u8) {
    let size = usize::from(size);
    let old_size = usize::from(old_size);
    let (new_map, new_bytes) = file(new, size);
    let (old_map, old_bytes) = file(old.unwrap_or_default(), old_size);
    let at = |bytes: &[Byte], at: usize, end: usize| {
        bytes.get(at).copied().filter(|_| at < end).unwrap_or(Byte::Zero)
    };
    let old = old.map(|_| (Box::new(kernel(&old_map, batch)) as _, old_size as u64));
    let findings = compare_extents(old, (Box::new(kernel(&new_map, batch)), size as u64)).unwrap();
    check_order(&findings, size as u64);
    for byte in 0..size {
        let before = at(&old_bytes, byte, old_size);
        let now = at(&new_bytes, byte, size);
        let changed = before != now || now == Byte::Opaque;
        let found = findings.iter().find(|one| (one.start..one.end).contains(&(byte as u64)));
        let found = found.map_or((false, false), |one| (one.allocated, one.changed));
        assert_eq!(found, (now != Byte::Zero, changed), "at {byte}");
    }
}

/// An extent map, and the same file byte by byte.
fn file(plain: &[Plain], size: usize) -> (Vec<FiemapExtent>, Vec<Byte>) {
    let (mut map, mut bytes) = (Vec::new(), Vec::new());
    for Plain { gap, length, physical, kind } in plain {
        if *length == 0 || bytes.len() > size {
            continue;
        }
        bytes.extend(std::iter::repeat_n(Byte::Zero, usize::from(gap % 16)));
        let (flags, content): (u32, fn(u64) -> Byte) = match kind % 10 {
            0..7 => (0, Byte::At),
            7 | 8 => (UNWRITTEN, |_| Byte::Zero),
            _ => (OPAQUE[usize::from(kind / 10) % OPAQUE.len()], |_| Byte::Opaque),
        };
        let (physical, length) = (u64::from(*physical), u64::from(length % 32 + 1));
        map.push(FiemapExtent::new(bytes.len() as u64, physical, length, flags));
        bytes.extend((physical..physical + length).map(content));
    }
    (map, bytes)
}

/// Responds like the kernel: some extents at a time, from the one that contains the requested byte,
/// and with a flag on the last one of the file.
fn kernel(map: &[FiemapExtent], batch: u8) -> impl FnMut(u64) -> Result<Vec<FiemapExtent>, Error> {
    move |start| {
        let mut map = map.to_vec();
        if let Some(last) = map.last_mut() {
            last.flags |= LAST;
        }
        map.retain(|extent| extent.logical + extent.length > start);
        map.truncate(1 + usize::from(batch % 4));
        Ok(map)
    }
}
