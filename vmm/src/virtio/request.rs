//! One request of a virtio disk: parsed from its descriptors, executed against a layered disk.
//!
//! The layout of a request's descriptors is the driver's choice (virtio 1.2, 2.7.4.1): the header is the first
//! bytes that the device may read, the status the last byte that it may write, and data is what lies between.
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use snapshot::disk::{BLOCK, Buffer, Disk, DiskError};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};
use vm_memory::{Bytes, GuestMemoryBackend, VolatileSlice};

use super::chain::Chain;
use super::iovec::GuestBuffer;
use crate::memory::Ram;

/// Units of addresses in requests, whatever the block size is.
pub const SECTOR: u64 = 512;
/// Length of the string that a request for the disk's id fills.
pub const ID_LENGTH: usize = 20;
/// Most ranges of one discard or write-zeroes request; the driver is told.
pub const MAX_RANGES: usize = 32;
/// Most sectors of such a range, 1 GiB; the driver is told.
pub const MAX_RANGE_SECTORS: u32 = 1 << 21;
/// Most bytes of data of one request. Drivers stay far below; a hostile one may name the same memory many times.
const MAX_DATA: usize = 64 << 20;

/// `VIRTIO_BLK_S_OK`
const OK: u8 = 0;
/// `VIRTIO_BLK_S_IOERR`
const IO_ERROR: u8 = 1;
/// `VIRTIO_BLK_S_UNSUPP`
const UNSUPPORTED: u8 = 2;

/// Most descriptors of one request: a queue has no more.
pub const MAX_DESCRIPTORS: u16 = 512;

const HEADER: usize = 16;
const RANGE: usize = 16;

/// A request that can be answered.
#[derive(Debug)]
pub struct Request<'a> {
    kind: u32,
    sector: u64,
    /// What the device reads, without the header.
    input: GuestBuffer<'a>,
    /// What the device writes, without the status.
    output: GuestBuffer<'a>,
    status: VolatileSlice<'a>,
}

/// What came of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The status byte.
    pub status: u8,
    /// Bytes that the guest got.
    pub read: u64,
    /// Bytes that the guest gave.
    pub written: u64,
}

impl<'a> Request<'a> {
    /// Parses a chain. `None`: it has no header or no status byte, so it cannot be answered.
    pub fn parse(chain: Chain<'a, Ram>, ram: &'a Ram) -> Option<Self> {
        let (mut input, mut output) = (GuestBuffer::default(), GuestBuffer::default());
        for descriptor in chain {
            let descriptor = descriptor.ok()?;
            let length = usize::try_from(descriptor.len()).ok()?;
            let slice = ram.get_slice(descriptor.addr(), length).ok()?;
            if descriptor.is_write_only() {
                output.push(slice);
            } else if output.len() > 0 {
                return None; // what is read comes before what is written
            } else {
                input.push(slice);
            }
        }
        let header = input.take_front::<HEADER>()?;
        let kind = u32::from_le_bytes(*header.first_chunk()?);
        let sector = u64::from_le_bytes(*header.last_chunk()?);
        let status = output.take_last_byte()?;
        Some(Self { kind, sector, input, output, status })
    }

    /// Whether it waits for the medium.
    pub fn flushes(&self) -> bool {
        self.kind == VIRTIO_BLK_T_FLUSH
    }

    /// Whether it asks for the disk to be changed.
    pub fn changes(&self) -> bool {
        matches!(self.kind, VIRTIO_BLK_T_OUT | VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES)
    }

    /// Does what is asked. `Err` is for what concerns more than this request: if the host has no room, nothing was
    /// lost, and the request can be tried again; if a flush failed, the disk is lost. All else is in the status.
    pub fn execute(&self, disk: &Disk, id: &[u8; ID_LENGTH]) -> Result<Outcome, DiskError> {
        let ok = Outcome { status: OK, ..Outcome::default() };
        let unsupported = Ok(Outcome { status: UNSUPPORTED, ..Outcome::default() });
        let Some(offset) = self.sector.checked_mul(SECTOR) else { return Ok(io_error()) };
        let result = match self.kind {
            _ if self.input.len().max(self.output.len()) > MAX_DATA => return Ok(io_error()),
            VIRTIO_BLK_T_IN => {
                disk.read(offset, &self.output).map(|()| Outcome { read: self.output.len() as u64, ..ok })
            }
            VIRTIO_BLK_T_OUT => {
                disk.write(offset, &self.input).map(|()| Outcome { written: self.input.len() as u64, ..ok })
            }
            VIRTIO_BLK_T_FLUSH => disk.flush().map(|()| ok),
            VIRTIO_BLK_T_GET_ID => {
                let length = id.len().min(self.output.len());
                let written = self.output.write(0, id.get(..length).unwrap_or_default());
                return Ok(if written.is_ok() { Outcome { read: length as u64, ..ok } } else { io_error() });
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => match self.ranges() {
                Some(ranges) => self.deallocate(disk, &ranges).map(|()| ok),
                None => return unsupported,
            },
            _ => return unsupported,
        };
        match result {
            Err(DiskError::HostFull { .. } | DiskError::FlushFailed { .. }) => result,
            Err(_) => Ok(io_error()),
            Ok(outcome) => Ok(outcome),
        }
    }

    /// Writes the status byte and returns how many bytes the device wrote in all.
    pub fn complete(&self, outcome: Outcome) -> u32 {
        // The byte lies in guest memory, as was checked when it was parsed.
        let _ = self.status.write_obj(outcome.status, 0);
        u32::try_from(outcome.read.saturating_add(1)).unwrap_or(u32::MAX)
    }

    fn deallocate(&self, disk: &Disk, ranges: &[Range]) -> Result<(), DiskError> {
        for range in ranges {
            if self.kind == VIRTIO_BLK_T_DISCARD {
                disk.discard(range.offset, range.length)?;
            } else {
                disk.write_zeroes(range.offset, range.length, range.unmap)?;
            }
        }
        Ok(())
    }

    /// The ranges of a discard or write-zeroes request. `None` if there is anything in them that we do not offer.
    fn ranges(&self) -> Option<Vec<Range>> {
        let length = self.input.len();
        if length == 0 || !length.is_multiple_of(RANGE) || length / RANGE > MAX_RANGES {
            return None;
        }
        let mut bytes = vec![0; length];
        self.input.read(&mut bytes).ok()?;
        bytes.chunks_exact(RANGE).map(|chunk| Range::parse(chunk, self.kind)).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    offset: u64,
    length: u64,
    unmap: bool,
}

impl Range {
    fn parse(bytes: &[u8], kind: u32) -> Option<Self> {
        let sector = u64::from_le_bytes(*bytes.first_chunk()?);
        let sectors = u32::from_le_bytes(*bytes.get(8..)?.first_chunk()?);
        let flags = u32::from_le_bytes(*bytes.get(12..)?.first_chunk()?);
        let unmap = flags & 1 != 0;
        if flags > 1 || sectors > MAX_RANGE_SECTORS || kind == VIRTIO_BLK_T_DISCARD && unmap {
            return None;
        }
        let length = u64::from(sectors).checked_mul(SECTOR)?;
        Some(Self { offset: sector.checked_mul(SECTOR)?, length, unmap })
    }
}

/// The outcome of a request that failed.
pub fn io_error() -> Outcome {
    Outcome { status: IO_ERROR, ..Outcome::default() }
}

// The driver is told that blocks are of this size, and may only name whole ones.
const _: () = assert!(BLOCK == 8 * SECTOR);
