//! The files of one layer: reading, making and updating them. `docs/formats/disk-layer.md` describes the format.

use super::error::LayerError;
use super::host::{HostFile, read_full, write_full};
use super::index::{CHUNK, Index, Taken};
use super::{BLOCK, MAX_SIZE};

const MAGIC: [u8; 8] = *b"BHKLAYER";
pub(super) const VERSION: u32 = 1;
const BLOCK_SIZE: u32 = 4096;
const HEADER: usize = 4096;
const CHUNK_LEN: u64 = CHUNK as u64;
pub(super) const CHUNK_BYTES: u64 = BLOCK * CHUNK_LEN;
const CHECKED: usize = HEADER - size_of::<u64>();

/// What a layer says about a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// Nothing: look below.
    Absent = 0,
    /// The block is in this layer's data file, at its own offset.
    Data = 1,
    /// Zeros, whatever lies below.
    Zero = 2,
}

impl State {
    /// The state that a byte stands for, which was checked before.
    fn from_byte(byte: u8) -> Self {
        match byte {
            1 => Self::Data,
            2 => Self::Zero,
            _ => Self::Absent,
        }
    }
}

/// FNV-1a. It finds damage by accident; the store's BLAKE3 finds the rest.
pub(super) fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

fn map_size(disk_size: u64) -> u64 {
    (HEADER as u64).saturating_add(disk_size / BLOCK)
}

fn page_offset(chunk: usize) -> u64 {
    (HEADER as u64).saturating_add((chunk as u64).saturating_mul(CHUNK_LEN))
}

fn check_size(size: u64) -> Result<(), LayerError> {
    if size == 0 || size > MAX_SIZE || !size.is_multiple_of(BLOCK) {
        return Err(LayerError::Size { size });
    }
    Ok(())
}

/// Makes two empty files a new layer of `size` bytes in which every block is absent.
///
/// `size` is a multiple of [`BLOCK`] up to [`MAX_SIZE`]. Nothing is synced: whoever makes the layer part of something
/// that must survive syncs both files (with their lengths, so `fsync`) and their directory first.
///
/// # Errors
/// A bad size, or what the host says.
pub fn create_layer<F: HostFile>(data: &F, map: &F, size: u64) -> Result<(), LayerError> {
    check_size(size)?;
    let mut header = Vec::with_capacity(HEADER);
    header.extend_from_slice(&MAGIC);
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.extend_from_slice(&BLOCK_SIZE.to_le_bytes());
    header.extend_from_slice(&size.to_le_bytes());
    header.resize(CHECKED, 0);
    header.extend_from_slice(&checksum(&header).to_le_bytes());
    data.set_size(size).map_err(LayerError::io("set the length of the data file"))?;
    map.set_size(map_size(size)).map_err(LayerError::io("set the length of the map"))?;
    write_full(map, &header, 0).map_err(LayerError::io("write the map's header"))
}

/// Checks a map's header and length; returns the layer's size in bytes.
pub(super) fn read_header<F: HostFile>(map: &F) -> Result<u64, LayerError> {
    let mut header = [0; HEADER];
    let len = read_full(map, &mut header, 0).map_err(LayerError::io("read the map's header"))?;
    if len < HEADER {
        return Err(LayerError::NoHeader { len: len as u64 });
    }
    let mut rest = header.as_slice();
    let (magic, version, block): ([u8; 8], u32, u32) =
        (take(&mut rest), u32::from_le_bytes(take(&mut rest)), u32::from_le_bytes(take(&mut rest)));
    let size = u64::from_le_bytes(take(&mut rest));
    if magic != MAGIC {
        return Err(LayerError::Magic);
    }
    let (checked, mut sum) = header.split_at(CHECKED);
    let (found, expected) = (u64::from_le_bytes(take(&mut sum)), checksum(checked));
    if found != expected {
        return Err(LayerError::Checksum { found, expected });
    }
    if version != VERSION {
        return Err(LayerError::Version { version });
    }
    if block != BLOCK_SIZE {
        return Err(LayerError::BlockSize { size: block });
    }
    check_size(size)?;
    let (found, expected) = (map.size().map_err(LayerError::io("see the map's length"))?, map_size(size));
    if found != expected {
        return Err(LayerError::MapLength { found, expected, size });
    }
    Ok(size)
}

/// The first `N` bytes of `bytes`, which moves past them; zeros where it ends.
fn take<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
    match bytes.split_first_chunk() {
        Some((first, rest)) => {
            *bytes = rest;
            *first
        }
        None => [0; N],
    }
}

/// Lays a layer's map over the index. `data_size` is the length of its data file.
pub(super) fn read_map<F: HostFile>(map: &F, data_size: u64, layer: u8, index: &mut Index) -> Result<(), LayerError> {
    let mut needed = 0;
    let mut at = HEADER as u64;
    while let Some(data) = map.next_data(at).map_err(LayerError::io("seek in the map"))? {
        // Whole pages: what lies in a hole is absent, and the file's end is the disk's end.
        let page = data.saturating_sub(HEADER as u64) / CHUNK_LEN;
        let Ok(chunk) = usize::try_from(page) else { break };
        let offset = page_offset(chunk);
        let Some(states) = read_page(map, offset)? else { break };
        if let Some(last) = states.iter().rposition(|state| *state == State::Data) {
            let first = page.saturating_mul(CHUNK_LEN);
            needed = first.saturating_add(last as u64).saturating_add(1).saturating_mul(BLOCK);
        }
        index.apply(chunk, layer, &states);
        at = offset.saturating_add(CHUNK_LEN);
    }
    if needed > data_size {
        return Err(LayerError::DataLength { found: data_size, needed });
    }
    Ok(())
}

/// The states of a chunk's blocks; absent, where the map ends.
pub(super) fn read_states<F: HostFile>(map: &F, chunk: u64) -> Result<[State; CHUNK], LayerError> {
    let offset = page_offset(usize::try_from(chunk).unwrap_or(usize::MAX));
    Ok(read_page(map, offset)?.unwrap_or([State::Absent; CHUNK]))
}

/// A chunk of blocks of which nothing is known yet: state, layer and number of each.
pub(super) fn no_states() -> [(State, usize, u64); CHUNK] {
    [(State::Absent, 0, 0); CHUNK]
}

/// Writes the states of a chunk into a new map, if there are any.
pub(super) fn put_states<F: HostFile>(map: &F, chunk: u64, size: u64, states: &[State; CHUNK]) -> std::io::Result<()> {
    let offset = page_offset(usize::try_from(chunk).unwrap_or(usize::MAX));
    let blocks = (size / BLOCK).saturating_sub(chunk.saturating_mul(CHUNK_LEN)).min(CHUNK_LEN);
    let bytes = states.map(|state| state as u8);
    match bytes.get(..usize::try_from(blocks).unwrap_or(CHUNK)) {
        Some(bytes) if bytes.iter().any(|state| *state != 0) => write_full(map, bytes, offset),
        _ => Ok(()),
    }
}

/// A page of the map; nothing beyond its end.
fn read_page<F: HostFile>(map: &F, offset: u64) -> Result<Option<[State; CHUNK]>, LayerError> {
    let mut bytes = [0; CHUNK];
    if read_full(map, &mut bytes, offset).map_err(LayerError::io("read the map"))? == 0 {
        return Ok(None);
    }
    // Without an early exit, the compiler makes wide comparisons of it.
    if bytes.iter().fold(0, |highest, byte| highest.max(*byte)) > State::Zero as u8 {
        let bad = (0..).zip(bytes).find(|(_, byte)| *byte > State::Zero as u8);
        let (position, state) = bad.unwrap_or_default();
        return Err(LayerError::State { state, offset: offset.saturating_add(position) });
    }
    Ok(Some(bytes.map(State::from_byte)))
}

/// Lays a raw image of `size` bytes over the index. What is finer than a chunk counts as data even where it is a
/// hole: it reads the same, and so the work and the memory are bounded whatever the file's holes look like.
pub(super) fn read_raw<F: HostFile>(image: &F, size: u64, layer: u8, index: &mut Index) -> Result<(), LayerError> {
    let mut at = 0;
    while let Some(data) = image.next_data(at).map_err(LayerError::io("seek in the image"))? {
        if data >= size {
            break;
        }
        let chunk = data / CHUNK_BYTES;
        let start = chunk.saturating_mul(CHUNK_BYTES);
        let blocks = size.saturating_sub(start).div_ceil(BLOCK);
        let states = std::array::from_fn(|block| if (block as u64) < blocks { State::Data } else { State::Absent });
        index.apply(usize::try_from(chunk).unwrap_or(usize::MAX), layer, &states);
        at = start.saturating_add(CHUNK_BYTES);
    }
    Ok(())
}

/// Writes the states of taken blocks into the map: one write, with a read before it only if there are gaps. The
/// blocks in the gaps are written as the file had them, and nobody else writes to it, so they cannot be torn.
pub(super) fn write_states<F: HostFile>(map: &F, taken: &Taken, index: &Index) -> std::io::Result<()> {
    let (Some((first, _)), Some((last, _))) = (taken.blocks().next(), taken.blocks().next_back()) else {
        return Ok(());
    };
    let mut page = [0; CHUNK];
    let Some(span) = page.get_mut(first..=last) else { return Ok(()) };
    let offset = page_offset(taken.chunk).saturating_add(first as u64);
    if taken.blocks().count() < span.len() {
        read_full(map, span, offset)?;
    }
    for (block, data) in taken.blocks() {
        let state = match (data, index.below(taken.chunk, block)) {
            (true, _) => State::Data,
            (false, true) => State::Zero,
            (false, false) => State::Absent,
        };
        if let Some(byte) = span.get_mut(block.saturating_sub(first)) {
            *byte = state as u8;
        }
    }
    write_full(map, span, offset)
}
