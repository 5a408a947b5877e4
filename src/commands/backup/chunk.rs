//! The bytes of a chunk between a volume and a pack: zeros left out, hashed, compressed, sealed;
//! and back.

use std::cell::RefCell;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use super::document::{self, Hash};
use super::failure::Failure;
use super::manifest::{BackupId, CHUNK_BYTES, Chunk};
use super::repository::seal::Keys;
use storage::{BLOCK_SIZE, Extent};

const ZEROS: [u8; BLOCK_SIZE as usize] = [0; BLOCK_SIZE as usize];

thread_local! {
    /// The bytes of a chunk. Kept, since to clear a new buffer takes longer than to compress it.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// How the chunks of one attempt are stored. Cheap to clone; used on any thread.
#[derive(Clone)]
pub struct Coder(Option<Arc<(String, Keys)>>);

/// A chunk and its stored form.
pub struct Coded {
    pub chunk: Chunk,
    pub stored: Vec<u8>,
}

impl Coder {
    /// `keys`: of an encrypted repository.
    pub fn new(id: &BackupId, keys: Option<Keys>) -> Self {
        // The page says which chunk is where, by its hash; so a chunk is bound to its attempt only.
        Self(keys.map(|keys| Arc::new((format!("{id}/chunk"), keys))))
    }

    /// The chunk of `bytes`, which are those of the extents in `data`.
    pub fn encode(
        &self,
        bytes: &[u8],
        data: Vec<(u64, u64)>,
        zeros: Vec<(u64, u64)>,
    ) -> Result<Coded> {
        let hash = Hash::of(bytes);
        let stored = match bytes {
            [] => Vec::new(),
            bytes => self.seal(document::compress(bytes)?)?,
        };
        let (length, stored_length) = (bytes.len() as u64, stored.len() as u64);
        let chunk = Chunk { at: 0, stored: stored_length, bytes: length, hash, data, zeros };
        Ok(Coded { chunk, stored })
    }

    /// The bytes of the extents of a chunk.
    ///
    /// # Errors
    /// They are not the bytes that were stored.
    pub fn decode(&self, chunk: &Chunk, stored: Vec<u8>) -> Result<Vec<u8>> {
        ensure!(
            stored.len() as u64 == chunk.stored,
            Failure::damaged("a chunk is damaged: it is too short")
        );
        if stored.is_empty() {
            return Ok(stored);
        }
        let limit = usize::try_from(CHUNK_BYTES)?;
        let opened = match &self.0 {
            Some(sealed) => sealed.1.open(&sealed.0, stored)?,
            None => stored,
        };
        let bytes =
            document::decompress(&opened, limit).context(Failure::damaged("a chunk is damaged"))?;
        ensure!(
            bytes.len() as u64 == chunk.bytes && Hash::of(&bytes) == chunk.hash,
            Failure::damaged("a chunk is damaged: its bytes do not have their hash")
        );
        Ok(bytes)
    }

    /// Like [`Self::decode`], for a chunk within the bytes of its pack.
    pub fn decode_within(&self, chunk: &Chunk, pack: &[u8]) -> Result<Vec<u8>> {
        let [at, length] = [chunk.at, chunk.stored].map(usize::try_from);
        let (at, length) = (at?, length?);
        let stored = pack.get(at..).and_then(|rest| rest.get(..length));
        let stored = stored.context(Failure::damaged("a chunk is outside of its pack"))?;
        self.decode(chunk, stored.to_vec())
    }

    fn seal(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        match &self.0 {
            Some(sealed) => sealed.1.seal(&sealed.0, bytes),
            None => Ok(bytes),
        }
    }
}

/// Reads extents of a device and makes their chunk. Blocks of zeros are left out; `keep_zeros`: the
/// chunk names them, as it must where an earlier backup may hold data there.
///
/// # Errors
/// The device cannot be read, or ends before an extent does.
pub fn read<D: FileExt>(
    device: &D,
    extents: &[Extent],
    keep_zeros: bool,
    coder: &Coder,
) -> Result<Coded> {
    let total: u64 = extents.iter().map(|extent| extent.length).sum();
    let total = usize::try_from(total)?;
    BUFFER.with_borrow_mut(|bytes| {
        if bytes.len() < total {
            bytes.resize(total, 0);
        }
        let (mut data, mut zeros) = (Vec::new(), Vec::new());
        let mut filled = 0;
        for extent in extents {
            let until = filled + usize::try_from(extent.length)?;
            let read = device.read_exact_at(&mut bytes[filled..until], extent.offset);
            read.with_context(|| format!("read {} bytes at {}", extent.length, extent.offset))?;
            filled = leave_zeros_out(bytes, filled, *extent, &mut data, &mut zeros)?;
        }
        if !keep_zeros {
            zeros.clear();
        }
        coder.encode(&bytes[..filled], data, zeros)
    })
}

/// Moves the data of an extent, which was read to `from`, together. Returns its end.
fn leave_zeros_out(
    bytes: &mut [u8],
    from: usize,
    extent: Extent,
    data: &mut Vec<(u64, u64)>,
    zeros: &mut Vec<(u64, u64)>,
) -> Result<usize> {
    // Blocks of the volume, of which an extent may hold parts.
    let (mut at, mut to) = (extent.offset, from);
    while at < extent.end() {
        let end = extent.end().min((at / BLOCK_SIZE + 1) * BLOCK_SIZE);
        let length = usize::try_from(end - at)?;
        let start = from + usize::try_from(at - extent.offset)?;
        if bytes[start..start + length] == ZEROS[..length] {
            append(zeros, at, end - at);
        } else {
            append(data, at, end - at);
            if to != start {
                bytes.copy_within(start..start + length, to);
            }
            to += length;
        }
        at = end;
    }
    Ok(to)
}

fn append(extents: &mut Vec<(u64, u64)>, offset: u64, length: u64) {
    match extents.last_mut() {
        Some(last) if last.0 + last.1 == offset => last.1 += length,
        _ => extents.push((offset, length)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::failure::Kind;
    use super::*;

    fn id() -> BackupId {
        BackupId::try_from("20260101T000000000Z-0000000000000000".to_owned()).unwrap()
    }

    fn coder() -> Coder {
        Coder::new(&id(), None)
    }

    fn device(blocks: &[u8]) -> std::fs::File {
        let mut file = tempfile::tempfile().unwrap();
        for value in blocks {
            file.write_all(&[*value; 4096]).unwrap();
        }
        file
    }

    #[test]
    fn blocks_of_zeros_are_left_out_and_named() {
        let device = device(&[1, 0, 0, 2, 3, 0]);
        let extents = [Extent { offset: 0, length: 16384 }, Extent { offset: 16384, length: 8192 }];
        let coded = read(&device, &extents, true, &coder()).unwrap();
        assert_eq!(coded.chunk.data, [(0, 4096), (12288, 8192)]);
        assert_eq!(coded.chunk.zeros, [(4096, 8192), (20480, 4096)]);
        let bytes = coder().decode(&coded.chunk, coded.stored).unwrap();
        assert_eq!(bytes, [[1; 4096], [2; 4096], [3; 4096]].concat());
        assert!(read(&device, &extents, false, &coder()).unwrap().chunk.zeros.is_empty());
    }

    #[test]
    fn an_extent_is_read_exactly_and_zeros_take_no_room() {
        let device = device(&[1, 0, 2]);
        let extents = [Extent { offset: 512, length: 4096 + 4096 }];
        let coded = read(&device, &extents, true, &coder()).unwrap();
        assert_eq!(coded.chunk.data, [(512, 3584), (8192, 512)]);
        assert_eq!(coded.chunk.zeros, [(4096, 4096)]);
        assert_eq!(coded.chunk.bytes, 4096);
        let zeros = [Extent { offset: 4096, length: 4096 }];
        let coded = read(&device, &zeros, true, &coder()).unwrap();
        assert_eq!((coded.chunk.stored, coded.chunk.bytes, coded.stored.len()), (0, 0, 0));
        assert!(coder().decode(&coded.chunk, Vec::new()).unwrap().is_empty());
        let too_far = [Extent { offset: 8192, length: 8192 }];
        assert!(read(&device, &too_far, true, &coder()).is_err());
    }

    #[test]
    fn other_bytes_than_those_stored_are_an_error() {
        let extents = [Extent { offset: 0, length: 4096 }];
        let coded = read(&device(&[1]), &extents, true, &coder()).unwrap();
        for at in 0..coded.stored.len() {
            let mut changed = coded.stored.clone();
            changed[at] ^= 0x40;
            // A changed header may still decompress to the same bytes; the hash of the pack finds
            // that.
            if let Ok(bytes) = coder().decode(&coded.chunk, changed) {
                assert_eq!(bytes, [1; 4096]);
            }
        }
        let mut longer = coded.stored.clone();
        longer.push(0);
        assert!(coder().decode(&coded.chunk, longer).is_err());
    }

    #[test]
    fn a_chunk_outside_of_its_pack_is_damage() {
        let extents = [Extent { offset: 0, length: 4096 }];
        let Coded { mut chunk, stored } = read(&device(&[1]), &extents, true, &coder()).unwrap();
        let pack = [vec![0; 7], stored].concat();
        for (at, is_within) in [(7, true), (8, false), (1 << 40, false), (u64::MAX, false)] {
            chunk.at = at;
            let outcome = coder().decode_within(&chunk, &pack);
            assert_eq!(outcome.is_ok(), is_within, "{at}");
            let kind = outcome.err().map(|error| Kind::of(&error));
            assert!(is_within || kind == Some(Some(Kind::Damaged)), "{at}");
        }
    }
}
