//! Moves bytes between files and guest memory, without a copy and without a reference to it.
//!
//! Guest memory changes under our hands, so there is never a `&[u8]` over it: the kernel gets addresses, and the
//! lengths were checked when the slices were made.
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use vm_memory::{Bytes, VolatileSlice};

/// Most parts of one request that the kernel takes in one call.
const IOV_MAX: usize = 1024;

/// A list of ranges of guest memory, as one sequence of bytes.
#[derive(Debug, Default)]
pub struct GuestBuffer<'a> {
    slices: Vec<VolatileSlice<'a>>,
    length: usize,
}

impl<'a> GuestBuffer<'a> {
    /// Adds a range at the end.
    pub fn push(&mut self, slice: VolatileSlice<'a>) {
        if !slice.is_empty() {
            self.length = self.length.saturating_add(slice.len());
            self.slices.push(slice);
        }
    }

    /// Cuts off the first `N` bytes and returns them, if there are so many.
    pub fn take_front<const N: usize>(&mut self) -> Option<[u8; N]> {
        let left = self.length.checked_sub(N)?;
        let mut bytes = [0; N];
        let mut rest = bytes.as_mut_slice();
        while !rest.is_empty() {
            let first = self.slices.first_mut()?;
            let (now, later) = rest.split_at_mut(first.len().min(rest.len()));
            first.read_slice(now, 0).ok()?;
            *first = first.offset(now.len()).ok()?;
            if first.is_empty() {
                self.slices.remove(0);
            }
            rest = later;
        }
        self.length = left;
        Some(bytes)
    }

    /// Cuts off the last byte and returns where it is.
    pub fn take_last_byte(&mut self) -> Option<VolatileSlice<'a>> {
        let last = self.slices.pop()?;
        let before = last.len().checked_sub(1)?;
        if before > 0 {
            self.slices.push(last.subslice(0, before).ok()?);
        }
        self.length = self.length.checked_sub(1)?;
        last.subslice(before, 1).ok()
    }

    /// Copies bytes in at `at`.
    pub fn write(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        for slice in self.part(at, bytes.len()).ok_or_else(out_of_range)? {
            let (now, later) = rest.split_at(slice.len().min(rest.len()));
            slice.write_slice(now, 0).map_err(io::Error::other)?;
            rest = later;
        }
        Ok(())
    }

    /// How many bytes there are.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Sends all bytes as one message, without waiting.
    pub fn send(&self, socket: impl AsFd) -> io::Result<usize> {
        let mut vectors = self.vectors(0, self.length)?;
        // SAFETY: all zeros is a message without address, parts and control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = vectors.as_mut_ptr();
        message.msg_iovlen = vectors.len();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: each vector is a range of mapped guest memory, which is never unmapped; the kernel only reads here.
        result(unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, flags) })
    }

    /// Copies all bytes out.
    pub fn read(&self, bytes: &mut [u8]) -> io::Result<()> {
        let mut rest = bytes;
        for slice in &self.slices {
            let (now, later) = rest.split_at_mut(slice.len().min(rest.len()));
            slice.read_slice(now, 0).map_err(io::Error::other)?;
            rest = later;
        }
        Ok(())
    }

    /// The ranges that hold bytes `at..at + length`.
    fn part(&self, at: usize, length: usize) -> Option<Vec<VolatileSlice<'a>>> {
        if at.checked_add(length)? > self.length {
            return None;
        }
        let (mut skip, mut left) = (at, length);
        let mut part = Vec::with_capacity(self.slices.len());
        for slice in &self.slices {
            if left == 0 {
                break;
            }
            if skip >= slice.len() {
                skip = skip.checked_sub(slice.len())?;
                continue;
            }
            let take = slice.len().checked_sub(skip)?.min(left);
            part.push(slice.subslice(skip, take).ok()?);
            skip = 0;
            left = left.checked_sub(take)?;
        }
        Some(part)
    }

    fn vectors(&self, at: usize, length: usize) -> io::Result<Vec<libc::iovec>> {
        let mut vectors = Vec::with_capacity(self.slices.len().min(IOV_MAX));
        let (mut skip, mut left) = (at, length);
        for slice in &self.slices {
            if left == 0 || vectors.len() == IOV_MAX {
                break;
            }
            let here = slice.len().saturating_sub(skip).min(left);
            if here > 0 {
                let part = slice.subslice(skip, here).map_err(io::Error::other)?;
                vectors.push(libc::iovec { iov_base: part.ptr_guard_mut().as_ptr().cast(), iov_len: here });
                left = left.saturating_sub(here);
            }
            skip = skip.saturating_sub(slice.len());
        }
        if left > 0 && vectors.len() < IOV_MAX { Err(out_of_range()) } else { Ok(vectors) }
    }
}

fn out_of_range() -> io::Error {
    io::Error::from(io::ErrorKind::InvalidInput)
}

fn offset(value: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(value).map_err(|_| out_of_range())
}

fn result(count: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

impl snapshot::disk::Buffer for GuestBuffer<'_> {
    fn len(&self) -> usize {
        self.length
    }

    fn read_from(&self, file: &File, from: u64, at: usize, length: usize) -> io::Result<usize> {
        let vectors = self.vectors(at, length)?;
        let count = libc::c_int::try_from(vectors.len()).map_err(|_| out_of_range())?;
        // SAFETY: each vector is a range of mapped guest memory, checked when its slice was made, and guest memory
        // is never unmapped; no Rust reference to it exists that the kernel's writes could contradict.
        result(unsafe { libc::preadv(file.as_raw_fd(), vectors.as_ptr(), count, offset(from)?) })
    }

    fn write_to(&self, file: &File, to: u64, at: usize, length: usize) -> io::Result<usize> {
        let vectors = self.vectors(at, length)?;
        let count = libc::c_int::try_from(vectors.len()).map_err(|_| out_of_range())?;
        // SAFETY: as for `read_from`; the kernel only reads here.
        result(unsafe { libc::pwritev(file.as_raw_fd(), vectors.as_ptr(), count, offset(to)?) })
    }

    fn zero(&self, at: usize, length: usize) -> io::Result<()> {
        const ZEROS: [u8; 4096] = [0; 4096];
        for slice in self.part(at, length).ok_or_else(out_of_range)? {
            let mut done = 0usize;
            while done < slice.len() {
                let n = slice.len().saturating_sub(done).min(ZEROS.len());
                slice.write_slice(ZEROS.get(..n).unwrap_or(&ZEROS), done).map_err(io::Error::other)?;
                done = done.saturating_add(n);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use snapshot::disk::Buffer;
    use vm_memory::{GuestAddress, GuestMemoryBackend};

    use super::*;
    use crate::memory::{Ram, guest_ram};

    fn buffer<'a>(ram: &'a Ram, ranges: &[(u64, usize)]) -> GuestBuffer<'a> {
        let mut buffer = GuestBuffer::default();
        for (at, length) in ranges {
            buffer.push(ram.get_slice(GuestAddress(*at), *length).unwrap());
        }
        buffer
    }

    fn content(ram: &Ram, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        ram.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    #[test]
    fn scattered_ranges_are_one_sequence() {
        let ram = guest_ram(2 << 20).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let buffer = buffer(&ram, &[(100, 3), (5, 2), (1000, 4)]);
        assert_eq!(buffer.read_from(&file, 1, 1, 6).unwrap(), 6);
        assert_eq!(content(&ram, 100, 3), b"\x0012");
        assert_eq!(content(&ram, 5, 2), b"34");
        assert_eq!(content(&ram, 1000, 4), b"56\0\0");
        assert_eq!(buffer.write_to(&file, 20, 2, 4).unwrap(), 4);
        assert_eq!(std::os::unix::fs::FileExt::read_at(&file, &mut [0; 8], 20).unwrap(), 4);
        buffer.zero(0, 9).unwrap();
        assert_eq!(content(&ram, 100, 3), [0; 3]);
        assert!(buffer.read_from(&file, 0, 4, 6).is_err(), "past the end");
    }

    #[test]
    fn header_and_status_may_be_split_in_any_way() {
        let ram = guest_ram(2 << 20).unwrap();
        ram.write_slice(b"abcdef", GuestAddress(0)).unwrap();
        let mut buffer = buffer(&ram, &[(0, 1), (1, 3), (4, 2)]);
        assert_eq!(&buffer.take_front::<2>().unwrap(), b"ab");
        assert_eq!(buffer.len(), 4);
        buffer.take_last_byte().unwrap().write_obj(7u8, 0).unwrap();
        assert_eq!(content(&ram, 0, 6), b"abcde\x07");
        assert_eq!(&buffer.take_front::<3>().unwrap(), b"cde");
        assert!(buffer.take_last_byte().is_none());
    }
}
