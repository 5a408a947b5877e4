//! Writes and reads the device of a raw block volume.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use super::content::{Image, Patterns, Ranges, SECTOR};
use super::door::{Change, Edit};

const BUFFER: usize = 1 << 20;

/// Changes the device and flushes it. Returns its size in bytes.
pub fn change(mut file: &File, patterns: Patterns, edits: &[Edit]) -> io::Result<u64> {
    for edit in edits {
        match edit.change {
            Change::Write(pattern) => write(file, patterns, *edit, pattern)?,
            Change::Discard => empty(file, patterns, *edit, FallocateFlags::FALLOC_FL_PUNCH_HOLE)?,
            Change::ZeroOut => empty(file, patterns, *edit, FallocateFlags::FALLOC_FL_ZERO_RANGE)?,
        }
    }
    file.sync_all()?;
    file.seek(SeekFrom::End(0))
}

fn write(file: &File, patterns: Patterns, edit: Edit, pattern: u8) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    let mut offset = edit.offset;
    let end = edit.offset + edit.length;
    while offset < end {
        let length = usize::try_from(end - offset).unwrap_or(BUFFER).min(BUFFER);
        patterns.fill(pattern, offset, &mut buffer[..length]);
        file.write_all_at(&buffer[..length], offset)?;
        offset += length as u64;
    }
    Ok(())
}

/// Discards or zeroes a range. Writes zeros if the device cannot do that.
fn empty(file: &File, patterns: Patterns, edit: Edit, how: FallocateFlags) -> io::Result<()> {
    let (offset, length) = match (i64::try_from(edit.offset), i64::try_from(edit.length)) {
        (Ok(offset), Ok(length)) => (offset, length),
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    match fallocate(file, how | FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, length) {
        Ok(()) => Ok(()),
        Err(Errno::EOPNOTSUPP | Errno::EINVAL | Errno::ENODEV) => write(file, patterns, edit, 0),
        Err(error) => Err(error.into()),
    }
}

/// The sectors, as ranges of bytes, whose content differs from the image.
pub fn compare(file: &File, patterns: Patterns, image: &Image) -> io::Result<Ranges> {
    let mut different = Ranges::default();
    let mut buffer = vec![0; BUFFER];
    let mut expected = vec![0; SECTOR as usize];
    let mut offset = 0;
    while offset < image.size() {
        let length = usize::try_from(image.size() - offset).unwrap_or(BUFFER).min(BUFFER);
        file.read_exact_at(&mut buffer[..length], offset)?;
        for (sector, start) in
            buffer[..length].chunks(SECTOR as usize).zip((offset..).step_by(SECTOR as usize))
        {
            let expected = &mut expected[..sector.len()];
            patterns.fill(image.pattern(start / SECTOR), start, expected);
            if expected != sector {
                different.add(start..start + sector.len() as u64);
            }
        }
        offset += length as u64;
    }
    Ok(different)
}
