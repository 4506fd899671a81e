//! Tests of the disk. Blocks are filled with stamps, so that each sector says which write it comes from.

mod crash;
mod files;
mod flatten;
mod merge;
mod model;
mod requests;
mod sim;
mod stress;

use std::ops::Range;

use super::{BLOCK, Bytes, Disk, DiskError, HostFile, LayerFiles, create_layer};

const SECTORS: usize = 8;
/// Two chunks and a bit.
const BLOCKS: usize = 2 * super::index::CHUNK + 5;
/// Where requests go: the ends of the disk and of chunks, so that they meet.
const ZONES: [Range<usize>; 3] = [0..6, 4093..4100, 8190..BLOCKS];

/// What a block holds, by sector: the number of the write, 0 for zeros.
type Stamps = [u64; SECTORS];

/// The bytes of a write numbered `stamp`.
fn stamped(stamps: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for stamp in stamps {
        for sector in 0..SECTORS as u64 {
            let word = if stamp == 0 { 0 } else { stamp * SECTORS as u64 + sector };
            bytes.extend(word.to_le_bytes().repeat(64));
        }
    }
    bytes
}

/// Which writes these blocks come from; panics at a sector that is not of one piece or not in its place.
fn stamps(bytes: &[u8]) -> Vec<Stamps> {
    let sector = |(position, bytes): (usize, &[u8])| {
        let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert!(bytes[8..] == bytes[..504], "a sector of two pieces: {bytes:x?}");
        assert!(word == 0 || word % SECTORS as u64 == position as u64, "sector {position} holds {word:#x}");
        word / SECTORS as u64
    };
    let block = |block: &[u8]| {
        let sectors: Vec<u64> = block.chunks(512).enumerate().map(sector).collect();
        sectors.try_into().unwrap()
    };
    bytes.chunks(BLOCK as usize).map(block).collect()
}

fn read<F: HostFile>(disk: &Disk<F>, blocks: Range<usize>) -> Result<Vec<Stamps>, DiskError> {
    // Not zeros, so that what is not filled in is seen.
    let buffer = Bytes::new(vec![0xa5; blocks.len() * BLOCK as usize]);
    disk.read(blocks.start as u64 * BLOCK, &buffer)?;
    Ok(stamps(&buffer.into_inner()))
}

fn write<F: HostFile>(disk: &Disk<F>, first: usize, written: impl IntoIterator<Item = u64>) -> Result<(), DiskError> {
    disk.write(first as u64 * BLOCK, &Bytes::new(stamped(written)))
}

fn clear<F: HostFile>(disk: &Disk<F>, blocks: Range<usize>, may_unmap: bool) -> Result<(), DiskError> {
    disk.write_zeroes(blocks.start as u64 * BLOCK, blocks.len() as u64 * BLOCK, may_unmap)
}

fn new_layer<F: HostFile>(data: F, map: F, blocks: usize) -> LayerFiles<F> {
    create_layer(&data, &map, blocks as u64 * BLOCK).unwrap();
    LayerFiles { data, map: Some(map) }
}

/// SplitMix64: the same seed, the same test.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Some blocks of a zone.
    fn blocks(&mut self) -> Range<usize> {
        let zone = ZONES[self.below(ZONES.len())].clone();
        let first = zone.start + self.below(zone.len());
        first..first + 1 + self.below(zone.end - first)
    }
}

/// The seeds to try: a slice of them, all with `BULKHEAD_SOAK=1`, or the one that `SEED` names.
fn seeds(slice: u64, all: u64) -> Range<u64> {
    if let Some(seed) = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()) {
        return seed..seed + 1;
    }
    0..if soaking() { all } else { slice }
}

fn soaking() -> bool {
    std::env::var("BULKHEAD_SOAK").is_ok_and(|soak| soak == "1")
}
