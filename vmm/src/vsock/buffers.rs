//! The guest's buffers in one descriptor chain, as a run of bytes.
//!
//! Lengths come from the descriptors, never from a packet header. A chain that is not whole is an
//! error, since what it would have meant is unknown.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::io;
use std::os::fd::BorrowedFd;

use virtio_queue::Queue;
use vm_memory::bitmap::BS;
use vm_memory::{
    GuestMemory, GuestMemoryError, Permissions, ReadVolatile, VolatileMemoryError, VolatileSlice, WriteVolatile,
};

use crate::virtio::chain::{BrokenChain, Chain};

/// Descriptors in a chain. Linux uses at most 19 for a packet: the header, and as many fragments as a
/// socket buffer has, and one.
const MAX_DESCRIPTORS: usize = 64;

/// Why a chain is not usable.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// It loops, leaves its table, or refers to another.
    #[error("descriptor chain {head} loops, leaves its table, or refers to another")]
    Broken {
        /// Index of its first descriptor.
        head: u16,
    },
    /// More descriptors than a packet can need.
    #[error("descriptor chain {head} has more than {MAX_DESCRIPTORS} descriptors")]
    TooLong {
        /// Index of its first descriptor.
        head: u16,
    },
    /// A buffer for the device's input is writable, or one for its output is not.
    #[error("descriptor chain {head} has a buffer for the other direction")]
    Direction {
        /// Index of its first descriptor.
        head: u16,
    },
    /// A buffer is not guest memory.
    #[error("descriptor chain {head} has a buffer at {address:#x} outside of guest memory: {reason}")]
    Memory {
        /// Index of its first descriptor.
        head: u16,
        /// Guest physical address of the buffer.
        address: u64,
        /// What the memory says.
        reason: GuestMemoryError,
    },
    /// Fewer bytes than are needed.
    #[error("descriptor chain {head} has {have} bytes where {need} are needed")]
    Short {
        /// Index of its first descriptor.
        head: u16,
        /// Bytes that there are.
        have: usize,
        /// Bytes that there should be.
        need: usize,
    },
}

/// A run of guest memory, consumed from its front.
#[derive(Debug)]
pub(super) struct Buffers<'m, M: GuestMemory> {
    head: u16,
    slices: Vec<VolatileSlice<'m, BS<'m, M::Bitmap>>>,
}

impl<'m, M: GuestMemory> Buffers<'m, M> {
    /// The buffers of the chain of `queue` that begins at `head`, all of which must be for `access`.
    pub(super) fn new(mem: &'m M, queue: &Queue, head: u16, access: Permissions) -> Result<Self, ChainError> {
        let mut slices = Vec::with_capacity(2);
        for (count, descriptor) in Chain::new(mem, queue, head).enumerate() {
            let descriptor = descriptor.map_err(|BrokenChain| ChainError::Broken { head })?;
            if count >= MAX_DESCRIPTORS {
                return Err(ChainError::TooLong { head });
            }
            if descriptor.is_write_only() != access.has_write() {
                return Err(ChainError::Direction { head });
            }
            let address = descriptor.addr().0;
            let memory = |reason| ChainError::Memory { head, address, reason };
            let length = usize::try_from(descriptor.len()).unwrap_or(usize::MAX);
            let parts = mem.get_slices(descriptor.addr(), length, access).map_err(memory)?;
            for part in parts {
                slices.push(part.map_err(memory)?);
            }
        }
        Ok(Self { head, slices })
    }

    /// Bytes that are left.
    pub(super) fn len(&self) -> usize {
        self.slices.iter().fold(0_usize, |sum, slice| sum.saturating_add(slice.len()))
    }

    /// Splits off everything after the first `at` bytes.
    pub(super) fn split_off(&mut self, at: usize) -> Result<Self, ChainError> {
        let short = ChainError::Short { head: self.head, have: self.len(), need: at };
        let mut rest = Vec::with_capacity(self.slices.len());
        let mut left = at;
        let mut front = Vec::with_capacity(1);
        for slice in self.slices.drain(..) {
            let take = left.min(slice.len());
            left = left.saturating_sub(take);
            let Ok((before, after)) = slice.split_at(take) else {
                return Err(short);
            };
            if !before.is_empty() {
                front.push(before);
            }
            if !after.is_empty() {
                rest.push(after);
            }
        }
        if left > 0 {
            return Err(short);
        }
        self.slices = front;
        Ok(Self { head: self.head, slices: rest })
    }

    /// Copies out as much as there is and fits; returns how much.
    pub(super) fn copy_to(&self, mut out: &mut [u8]) -> usize {
        let mut total = 0_usize;
        for slice in &self.slices {
            let copied = slice.copy_to(out);
            total = total.saturating_add(copied);
            out = out.get_mut(copied..).unwrap_or_default();
        }
        total
    }

    /// Copies `bytes` in, as far as they fit.
    pub(super) fn copy_from(&self, mut bytes: &[u8]) {
        for slice in &self.slices {
            let count = slice.len().min(bytes.len());
            let (now, later) = bytes.split_at_checked(count).unwrap_or_default();
            slice.copy_from(now);
            bytes = later;
        }
    }

    /// Hands every byte to `take`, in pieces that were copied out.
    pub(super) fn drain(&self, mut take: impl FnMut(&[u8])) {
        let mut piece = [0; 4096];
        for slice in &self.slices {
            let mut rest = slice.offset(0);
            while let Ok(slice) = rest {
                let copied = slice.copy_to(piece.as_mut_slice());
                if copied == 0 {
                    break;
                }
                take(piece.get(..copied).unwrap_or_default());
                rest = slice.offset(copied);
            }
        }
    }

    /// Writes to `fd` without a copy, until all is written or it takes less. Returns the bytes
    /// written, and the error that stopped it, if one did. A short write is no error.
    pub(super) fn write_to(&self, mut fd: BorrowedFd<'_>) -> (usize, Option<io::Error>) {
        let mut total = 0_usize;
        for slice in &self.slices {
            match fd.write_volatile(slice) {
                Ok(count) => {
                    total = total.saturating_add(count);
                    if count < slice.len() {
                        break;
                    }
                }
                Err(error) => return (total, Some(into_io(error))),
            }
        }
        (total, None)
    }

    /// Reads at most `limit` bytes from `fd` without a copy, until the buffers are full or it gives
    /// less. An error counts only if nothing was read before it.
    pub(super) fn read_from(&self, mut fd: BorrowedFd<'_>, limit: usize) -> io::Result<usize> {
        let mut total = 0_usize;
        for slice in &self.slices {
            let want = slice.len().min(limit.saturating_sub(total));
            if want == 0 {
                break;
            }
            let read = slice.subslice(0, want).and_then(|mut part| fd.read_volatile(&mut part));
            match read {
                Ok(count) => {
                    total = total.saturating_add(count);
                    if count < want {
                        break;
                    }
                }
                Err(_) if total > 0 => break,
                Err(error) => return Err(into_io(error)),
            }
        }
        Ok(total)
    }
}

fn into_io(error: VolatileMemoryError) -> io::Error {
    match error {
        VolatileMemoryError::IOError(error) => error,
        other => io::Error::other(other),
    }
}
