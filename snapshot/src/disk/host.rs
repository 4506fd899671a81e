//! The edge towards the host: what the disk asks of a file, and where a request's bytes live.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::{Errno, retry_on_intr};

/// What a layer needs of a file on the host. [`File`] is the one that ships; tests put a simulated host here.
///
/// Nothing uses the file's cursor as state. Reads and writes may be short, as with `pread` and `pwrite`.
pub trait HostFile: Send + Sync {
    /// The file's length in bytes.
    fn size(&self) -> io::Result<u64>;
    /// Cuts or extends (with a hole) the file to `size` bytes.
    fn set_size(&self, size: u64) -> io::Result<()>;
    /// Reads into `bytes` from `offset`; 0 is the end of the file.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes `bytes` at `offset`.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;
    /// Returns once everything written or punched before is durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Frees a range, which then reads as zeros; the length stays.
    fn punch_hole(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Makes a range read as zeros and keeps it allocated.
    fn zero_range(&self, offset: u64, len: u64) -> io::Result<()>;
    /// The first offset at or after `offset` that may hold data; `None` if only a hole follows.
    fn next_data(&self, offset: u64) -> io::Result<Option<u64>>;
}

impl HostFile for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.set_len(size)
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, bytes, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| rustix::fs::fdatasync(self))?)
    }

    fn punch_hole(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(retry_on_intr(|| rustix::fs::fallocate(self, flags, offset, len))?)
    }

    fn zero_range(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        Ok(retry_on_intr(|| rustix::fs::fallocate(self, flags, offset, len))?)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        match rustix::fs::seek(self, SeekFrom::Data(offset)) {
            Ok(data) => Ok(Some(data)),
            Err(Errno::NXIO) => Ok(None),
            // A file system that does not know its holes: everything may be data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Some(offset)),
            Err(error) => Err(error.into()),
        }
    }
}

/// The bytes of one request, wherever they are: guest memory in the VMM, a vector in tests.
///
/// `at` counts bytes from the start of the request. A transfer may be short; the disk asks again for the rest.
pub trait Buffer<F = File> {
    /// The request's length in bytes.
    fn len(&self) -> usize;
    /// Whether the request has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Moves up to `len` bytes from `file` at `offset` into the buffer at `at`; 0 is the end of the file.
    fn read_from(&self, file: &F, offset: u64, at: usize, len: usize) -> io::Result<usize>;
    /// Moves up to `len` bytes from the buffer at `at` into `file` at `offset`.
    fn write_to(&self, file: &F, offset: u64, at: usize, len: usize) -> io::Result<usize>;
    /// Fills `len` bytes of the buffer at `at` with zeros.
    fn zero(&self, at: usize, len: usize) -> io::Result<()>;
}

/// A [`Buffer`] in memory of our own, for everything that is not a guest's request.
#[derive(Debug)]
pub struct Bytes(Mutex<Vec<u8>>);

impl Bytes {
    /// A buffer that holds `bytes`.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Mutex::new(bytes))
    }

    /// The bytes, out of the buffer again.
    pub fn into_inner(self) -> Vec<u8> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, at: usize, len: usize, f: impl FnOnce(&mut [u8]) -> io::Result<T>) -> io::Result<T> {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        f(bytes.get_mut(at..at.saturating_add(len)).ok_or(io::ErrorKind::InvalidInput)?)
    }
}

impl<F: HostFile> Buffer<F> for Bytes {
    fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn read_from(&self, file: &F, offset: u64, at: usize, len: usize) -> io::Result<usize> {
        self.with(at, len, |bytes| file.read_at(bytes, offset))
    }

    fn write_to(&self, file: &F, offset: u64, at: usize, len: usize) -> io::Result<usize> {
        self.with(at, len, |bytes| file.write_at(bytes, offset))
    }

    fn zero(&self, at: usize, len: usize) -> io::Result<()> {
        self.with(at, len, |bytes| {
            bytes.fill(0);
            Ok(())
        })
    }
}

/// `read_at` until `bytes` is full or the file ends; returns how many bytes were there.
pub(super) fn read_full<F: HostFile>(file: &F, mut bytes: &mut [u8], mut offset: u64) -> io::Result<usize> {
    let wanted = bytes.len();
    while !bytes.is_empty() {
        match file.read_at(bytes, offset) {
            Ok(0) => break,
            Ok(n) => {
                bytes = bytes.get_mut(n..).ok_or(io::ErrorKind::InvalidData)?;
                offset = offset.saturating_add(n as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(wanted.saturating_sub(bytes.len()))
}

/// `write_at` until all of `bytes` is written.
pub(super) fn write_full<F: HostFile>(file: &F, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write_at(bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                bytes = bytes.get(n..).ok_or(io::ErrorKind::InvalidData)?;
                offset = offset.saturating_add(n as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether the host has no room (or the user no quota) left, which ends when someone makes room.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
