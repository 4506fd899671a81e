//! The hash of a file that is mostly holes.
//!
//! It says what the file reads as, and does not depend on which of its zeros are holes. A file is cut into chunks of 4 MiB, a
//! chunk into blocks of 4 KiB. A chunk's hash is that of its blocks that are not all zeros, each after its number (u64,
//! little-endian); a chunk without any has none. The file's hash is that of its length (u64), then of each chunk that has a
//! hash: its number (u64) and the hash. The last block of a file may be shorter, and is taken as it is.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};

const BLOCK: usize = 4096;
/// Bytes of a chunk.
pub(super) const CHUNK: u64 = 4 << 20;

/// A chunk that is not all zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChunkHash {
    pub(super) number: u64,
    pub(super) hash: [u8; 32],
}

/// The hashes of a file's chunks, and its length. Holes are not read. `progress` hears of the bytes that were.
pub(super) fn chunks(file: &File, progress: &mut dyn FnMut(u64)) -> io::Result<(u64, Vec<ChunkHash>)> {
    let length = file.metadata()?.len();
    let mut all = Vec::new();
    let mut buffer = vec![0; usize::try_from(CHUNK).unwrap_or(BLOCK)];
    let mut at = 0;
    while let Some(data) = next_data(file, at, length)? {
        let number = data / CHUNK;
        let start = number.saturating_mul(CHUNK);
        let end = start.saturating_add(CHUNK).min(length);
        let bytes = buffer.get_mut(..usize::try_from(end.saturating_sub(start)).unwrap_or(0)).unwrap_or_default();
        file.read_exact_at(bytes, start)?;
        progress(end.saturating_sub(start));
        all.extend(chunk_hash(bytes, start).map(|hash| ChunkHash { number, hash }));
        at = end;
    }
    Ok((length, all))
}

fn chunk_hash(bytes: &[u8], start: u64) -> Option<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    let mut any = false;
    let first = start.checked_div(BLOCK as u64).unwrap_or(0);
    for (number, block) in (first..).zip(bytes.chunks(BLOCK)) {
        if block.iter().any(|byte| *byte != 0) {
            any = true;
            hasher.update(&number.to_le_bytes());
            hasher.update(block);
        }
    }
    any.then(|| *hasher.finalize().as_bytes())
}

/// The hash of a file of which these are the length and the chunks.
pub(super) fn whole(length: u64, chunks: &[ChunkHash]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&length.to_le_bytes());
    for chunk in chunks {
        hasher.update(&chunk.number.to_le_bytes());
        hasher.update(&chunk.hash);
    }
    hasher.finalize()
}

/// Where data begins at or after `at`, if any does before `length`.
pub(super) fn next_data(file: &File, at: u64, length: u64) -> io::Result<Option<u64>> {
    if at >= length {
        return Ok(None);
    }
    match seek(file, SeekFrom::Data(at)) {
        Ok(found) => Ok(Some(found).filter(|found| *found < length)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        // A file system that does not know holes: all of it is data.
        Err(rustix::io::Errno::INVAL) => Ok(Some(at)),
        Err(error) => Err(error.into()),
    }
}
