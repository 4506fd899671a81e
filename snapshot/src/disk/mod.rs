//! A disk made of layers: immutable ones below, and on top a live one that takes every change.
//!
//! Each layer is a *data* file, in which a block lies at its own virtual offset, and a *map* file, which says for
//! each block of 4 KiB whether the layer has it (*data*), masks it (*zero*) or leaves it to the layers below
//! (*absent*). The bottom layer may be a raw image, which has no map. `docs/formats/disk-layer.md` has the bytes.
//!
//! **A request moves its bytes once.** A read is one host read for each run of blocks from the same layer, a write is
//! one host write. An index in memory says where each block comes from, so the number of layers costs nothing.
//!
//! **Durability.** Memory runs ahead of the map file; only [`Disk::flush`] writes to it:
//!
//! 1. take the blocks whose state is newer than the map (P), with the states they have now;
//! 2. `fdatasync` the data file: what a map byte will claim is on the disk before the byte is written;
//! 3. write P's states, as taken in step 1, into the map. A block that changed meanwhile is new again, and in the
//!    next flush's P. To write its present state would claim data that step 2 may not have covered, and could show
//!    what an earlier crash left in the data file;
//! 4. `fdatasync` the map.
//!
//! With P empty, step 2 is all. After a crash each block has what it had at the last flush, or something that was
//! written or discarded after it. If `fdatasync` fails, the kernel may have dropped what it could not write and report
//! success the next time, so that failure is final. A full host is not: P is new again, and the caller asks later.
//!
//! **Several queues** use a disk at once and no lock is between them; only flushes meet, because they join. Between a
//! write and a discard of the *same* block that overlap in time, either may win, as on any disk. Their steps are
//!
//! | write | discard |
//! |---|---|
//! | the bytes, into the live layer's file | the block reads as zeros |
//! | the block is the live layer's data | if it was data: its place in the file is punched out |
//!
//! In every order of the four the block ends as the write's bytes or as zeros, a hole in the file where it is data
//! being zeros too; and it never falls back to a lower layer, because a block that was the live layer's or zero never
//! becomes absent over lower data. Because the hole is punched before the discard returns, it cannot hit a write that was asked for
//! after the discard was done. If the block ends as zeros, its data was there to be seen before the punch, so it was
//! freed. A lock would only choose the winner, and would be held across a call that blocks.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod error;
mod flatten;
mod flush;
mod host;
mod index;
mod layer;
mod merge;
#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]
mod tests;
mod top;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use error::{DiskError, LayerError};
pub use flatten::flatten;
pub use host::{Buffer, Bytes, HostFile};
pub use layer::create_layer;
pub use merge::merge;

use flush::{Joined, Outcome};
use host::is_full;
use index::{Found, Index, NOT_LIVE};

/// The size of a block, which is the unit of requests and of the map, in bytes.
pub const BLOCK: u64 = BLOCK_LEN as u64;
const BLOCK_LEN: usize = 4096;
/// How many layers a disk may have. `snapshot flatten` makes one of many; a cell of the index has room for no more
/// than 124.
pub const MAX_LAYERS: usize = 64;
/// The largest disk, in bytes: 16 TiB, the largest file of ext4. It bounds the index to 24 MiB and what is used.
pub const MAX_SIZE: u64 = 16 << 40;

/// The files of one layer.
#[derive(Debug)]
pub struct LayerFiles<F = File> {
    /// The data file, or the raw image.
    pub data: F,
    /// The map; none for a raw image.
    pub map: Option<F>,
}

#[derive(Debug)]
struct Layer<F> {
    data: F,
    map: Option<F>,
    /// The data file's length when it was opened.
    len: u64,
}

/// An open disk. Every call may be made from any thread, and from several at once.
///
/// ```
/// use snapshot::disk::{BLOCK, Bytes, Disk, LayerFiles, create_layer};
///
/// let (image, data, map) = (tempfile::tempfile()?, tempfile::tempfile()?, tempfile::tempfile()?);
/// image.set_len(16 * BLOCK)?;
/// create_layer(&data, &map, 64 * BLOCK)?; // larger than the image: zeros beyond it
/// let layers = vec![LayerFiles { data: image, map: None }, LayerFiles { data, map: Some(map) }];
/// let disk = Disk::open(layers, false)?;
///
/// disk.write(20 * BLOCK, &Bytes::new(vec![7; 4096]))?;
/// disk.flush()?;
/// let two_blocks = Bytes::new(vec![1; 8192]);
/// disk.read(19 * BLOCK, &two_blocks)?;
/// assert_eq!(two_blocks.into_inner(), [[0; 4096], [7; 4096]].concat());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Disk<F: HostFile = File> {
    /// Bottom first.
    layers: Vec<Arc<Layer<F>>>,
    index: Index,
    size: u64,
    read_only: bool,
    failed: AtomicBool,
    flushes: Joined,
}

impl<F: HostFile> Disk<F> {
    /// Opens a disk of `layers`, bottom first. Unless it is read-only, the last one is live and must have a map.
    ///
    /// Every map is read once, and checked as hostile input. No layer but the live one is ever written to.
    ///
    /// # Errors
    /// Too few or too many layers, a layer that does not fit where it is, or files that are no layer's.
    pub fn open(layers: Vec<LayerFiles<F>>, read_only: bool) -> Result<Self, DiskError> {
        if layers.is_empty() || layers.len() > MAX_LAYERS {
            return Err(DiskError::LayerCount { count: layers.len() });
        }
        let mut open = Vec::with_capacity(layers.len());
        let mut size = 0;
        for (layer, LayerFiles { data, map }) in layers.into_iter().enumerate() {
            let (own, len) = match sizes(&data, map.as_ref()) {
                Ok(sizes) => sizes,
                Err(source) => return Err(DiskError::Layer { layer, source }),
            };
            if map.is_none() && layer > 0 {
                return Err(DiskError::NoMap { layer });
            }
            if own < size {
                return Err(DiskError::Shrinks { layer, size: own, below: size });
            }
            size = own;
            open.push(Arc::new(Layer { data, map, len }));
        }
        if !read_only && open.last().is_none_or(|top| top.map.is_none()) {
            return Err(DiskError::RawTop);
        }
        let live = if read_only { NOT_LIVE } else { u8::try_from(open.len()).unwrap_or(NOT_LIVE) };
        let mut index = Index::new(usize::try_from(size / BLOCK).unwrap_or(usize::MAX), live);
        for (number, (layer, files)) in (1..=u8::MAX).zip(open.iter().enumerate()) {
            let read = match &files.map {
                Some(map) => layer::read_map(map, files.len, number, &mut index),
                None => layer::read_raw(&files.data, files.len, number, &mut index),
            };
            read.map_err(|source| DiskError::Layer { layer, source })?;
        }
        Ok(Self { layers: open, index, size, read_only, failed: AtomicBool::new(false), flushes: Joined::default() })
    }

    /// The disk's size in bytes: the top layer's, a multiple of [`BLOCK`].
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether a flush has failed for good. Reads still work then.
    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Fills `buf` from the disk at byte `offset`.
    ///
    /// # Errors
    /// A request that is not in whole blocks of the disk, or what the host says.
    pub fn read(&self, offset: u64, buf: &dyn Buffer<F>) -> Result<(), DiskError> {
        let mut rest = self.blocks(offset, buf.len() as u64)?;
        let start = rest.start;
        while !rest.is_empty() {
            let (source, run) = self.index.run(rest.clone());
            let at = bytes(start..run.start);
            let layer = usize::from(source).checked_sub(1);
            match layer.and_then(|layer| Some((layer, self.layers.get(layer)?))) {
                Some((number, layer)) => read_run(number, layer, &run, buf, at)?,
                None => buf.zero(at, bytes(run.clone())).map_err(|source| DiskError::Buffer { source })?,
            }
            rest.start = run.end;
        }
        Ok(())
    }

    /// Writes `buf` to the disk at byte `offset`. It is durable after the next flush.
    ///
    /// # Errors
    /// As for [`Disk::read`]; [`DiskError::HostFull`], after which the request can be repeated; a read-only or
    /// failed disk. After an error each block has its old bytes, the new ones, or (if it was the live layer's) both.
    pub fn write(&self, offset: u64, buf: &dyn Buffer<F>) -> Result<(), DiskError> {
        let blocks = self.blocks(offset, buf.len() as u64)?;
        let (number, layer) = self.live()?;
        let (mut at, mut left) = (0usize, buf.len());
        while left > 0 {
            let position = offset.saturating_add(at as u64);
            match buf.write_to(&layer.data, position, at, left) {
                Ok(0) => return Err(request("write to", number, position)(io::ErrorKind::WriteZero.into())),
                Ok(n) => (at, left) = (at.saturating_add(n), left.saturating_sub(n)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(request("write to", number, position)(error)),
            }
        }
        self.index.set_data(blocks);
        Ok(())
    }

    /// Makes a range read as zeros and gives its room back to the host.
    ///
    /// # Errors
    /// As for [`Disk::write`].
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.write_zeroes(offset, len, true)
    }

    /// Makes a range read as zeros. What is allocated on the host stays so unless `may_unmap`.
    ///
    /// # Errors
    /// As for [`Disk::write`].
    pub fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Result<(), DiskError> {
        let mut rest = self.blocks(offset, len)?;
        let (number, layer) = self.live()?;
        while !rest.is_empty() {
            let (found, run) = self.index.clear(rest.clone(), !may_unmap);
            rest.start = run.end;
            if found != Found::Data {
                continue;
            }
            let (offset, len) = (bytes(0..run.start) as u64, bytes(run) as u64);
            let done = if may_unmap {
                ignore_unfreed(layer.data.punch_hole(offset, len))
            } else {
                match layer.data.zero_range(offset, len) {
                    // Better not allocated than not zero.
                    Err(error) if error.kind() == io::ErrorKind::Unsupported => layer.data.punch_hole(offset, len),
                    done => done,
                }
            };
            done.map_err(request("zero a range of", number, offset))?;
        }
        Ok(())
    }

    /// Returns when every change that had returned before this call is durable.
    ///
    /// # Errors
    /// [`DiskError::HostFull`], after which it can be repeated and nothing is lost; anything else is final.
    pub fn flush(&self) -> Result<(), DiskError> {
        if self.read_only {
            return Ok(());
        }
        let (number, layer) = self.live()?;
        match self.flushes.run(|| self.flush_alone(number, layer)) {
            Outcome::Done => Ok(()),
            Outcome::Failed(error) => Err(error),
            Outcome::FailedElsewhere if self.failed() => Err(DiskError::Failed),
            Outcome::FailedElsewhere => Err(DiskError::HostFull { layer: number }),
        }
    }

    fn flush_alone(&self, number: usize, layer: &Layer<F>) -> Result<(), DiskError> {
        let fail = |action, source| {
            self.failed.store(true, Ordering::Release);
            Err(DiskError::FlushFailed { action, layer: number, source })
        };
        // It may have failed while this flush waited for its turn.
        let (false, Some(map)) = (self.failed(), &layer.map) else { return Err(DiskError::Failed) };
        let taken = self.index.take_new();
        if let Err(error) = layer.data.sync_data() {
            return fail("sync the data", error);
        }
        if taken.is_empty() {
            return Ok(());
        }
        match taken.iter().try_for_each(|taken| layer::write_states(map, taken, &self.index)) {
            Ok(()) => {}
            Err(error) if is_full(&error) => {
                self.index.put_back(&taken);
                return Err(DiskError::HostFull { layer: number });
            }
            Err(error) => return fail("write the map", error),
        }
        map.sync_data().or_else(|error| fail("sync the map", error))
    }

    /// The layer that takes changes, with its number, if changes are taken.
    fn live(&self) -> Result<(usize, &Layer<F>), DiskError> {
        if self.failed() {
            return Err(DiskError::Failed);
        }
        match self.layers.iter().enumerate().next_back() {
            Some((number, top)) if !self.read_only => Ok((number, top)),
            _ => Err(DiskError::ReadOnly),
        }
    }

    /// The blocks of a request, checked.
    fn blocks(&self, offset: u64, len: u64) -> Result<Range<usize>, DiskError> {
        if !offset.is_multiple_of(BLOCK) || !len.is_multiple_of(BLOCK) {
            return Err(DiskError::Misaligned { offset, len });
        }
        let out_of_range = DiskError::OutOfRange { offset, len, size: self.size };
        match offset.checked_add(len) {
            Some(end) if end <= self.size => match ((offset / BLOCK).try_into(), (end / BLOCK).try_into()) {
                (Ok(first), Ok(end)) => Ok(first..end),
                _ => Err(out_of_range),
            },
            _ => Err(out_of_range),
        }
    }
}

/// A layer's size as a disk, and the length of its data file.
fn sizes<F: HostFile>(data: &F, map: Option<&F>) -> Result<(u64, u64), LayerError> {
    let len = data.size().map_err(LayerError::io("see the length of the data file"))?;
    let size = match map {
        Some(map) => layer::read_header(map)?,
        // The last block of an image may be cut short. It is filled up with zeros.
        None if len == 0 || len > MAX_SIZE => return Err(LayerError::Size { size: len }),
        None => len.next_multiple_of(BLOCK),
    };
    Ok((size, len))
}

/// Reads a run of blocks of one layer into `buf` at byte `at`.
fn read_run<F: HostFile>(
    number: usize,
    layer: &Layer<F>,
    run: &Range<usize>,
    buf: &dyn Buffer<F>,
    mut at: usize,
) -> Result<(), DiskError> {
    let (mut offset, mut left) = (bytes(0..run.start) as u64, bytes(run.clone()));
    while left > 0 {
        match buf.read_from(&layer.data, offset, at, left) {
            // An image may end in the middle of its last block. That it ends earlier than when it was opened, or
            // that a layer ends before its data, is damage.
            Ok(0) if layer.map.is_none() && offset >= layer.len => {
                return buf.zero(at, left).map_err(|source| DiskError::Buffer { source });
            }
            Ok(0) => return Err(DiskError::Truncated { layer: number, offset }),
            Ok(n) => {
                offset = offset.saturating_add(n as u64);
                (at, left) = (at.saturating_add(n), left.saturating_sub(n));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(request("read from", number, offset)(error)),
        }
    }
    Ok(())
}

/// For `map_err`: what the host's refusal means for a request.
fn request(action: &'static str, layer: usize, offset: u64) -> impl FnOnce(io::Error) -> DiskError {
    move |source| match is_full(&source) {
        true => DiskError::HostFull { layer },
        false => DiskError::Io { action, layer, offset, source },
    }
}

/// A hole is only about room: the block reads as zeros already. So a host that has no holes, or that would need room
/// to make one, does not fail a discard.
fn ignore_unfreed(punched: io::Result<()>) -> io::Result<()> {
    match punched {
        Err(error) if error.kind() == io::ErrorKind::Unsupported || is_full(&error) => Ok(()),
        done => done,
    }
}

/// The bytes of so many blocks. No disk has so many that this overflows.
fn bytes(blocks: Range<usize>) -> usize {
    blocks.len().saturating_mul(BLOCK_LEN)
}
