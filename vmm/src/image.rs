//! Memory images: guest memory written to a sparse file.
//!
//! The image is flat: a page is at its place in guest memory, regions back to back. Pages that no one ever touched, and pages of
//! zeros, are holes.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use crate::layout;
use crate::memory::Memory;

const PAGE: usize = 4096;
/// Pages that are looked at together, and so the most that one write has: 1 MiB.
const WINDOW: usize = 256;
/// Bytes of an entry of a pagemap.
const ENTRY: usize = 8;
/// A page is in memory, or in swap (`Documentation/admin-guide/mm/pagemap.rst`).
const PRESENT_OR_SWAPPED: u64 = 0b11 << 62;

/// Why an image could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The image's file.
    #[error("memory file: {0}")]
    File(io::Error),
    /// What the supervisor gave as the pagemap.
    #[error("pagemap of this process: {0}")]
    Pagemap(io::Error),
    /// It says that a page does not exist that this process has written to.
    #[error("pagemap of this process: it is another's")]
    NotOurs,
    /// Guest memory.
    #[error("guest memory: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// What writes images. It has all the memory that it takes, so that [`Self::write`] allocates nothing and takes no lock: it also runs
/// in a copy of this process that has one thread, and in which locks may be held that nobody gives back.
#[derive(Debug)]
pub struct Writer {
    entries: Box<[u8]>,
    bytes: Box<[u8]>,
}

impl Default for Writer {
    fn default() -> Self {
        Self { entries: vec![0; WINDOW * ENTRY].into(), bytes: vec![0; WINDOW * PAGE].into() }
    }
}

impl Writer {
    /// Writes an image to an empty file. `pagemap` is this process's own, or that of the process which this one is a copy of: that
    /// one never gives up a page, so it has every page that there was. Nothing changes guest memory meanwhile. Returns the bytes
    /// that are not holes.
    pub fn write(&mut self, memory: &Memory, pagemap: &File, to: &File) -> Result<u64, ImageError> {
        let total = memory.ram.iter().fold(0u64, |sum, region| sum.saturating_add(region.len()));
        check_pagemap(memory, pagemap)?;
        to.set_len(total).map_err(ImageError::File)?;
        let (mut start, mut written) = (0u64, 0u64);
        for region in memory.ram.iter() {
            let pages = usize::try_from(region.len()).unwrap_or(usize::MAX) / PAGE;
            let first = region.as_ptr() as usize / PAGE;
            for begin in (0..pages).step_by(WINDOW) {
                let count = WINDOW.min(pages.saturating_sub(begin));
                let entries = self.entries.get_mut(..count.saturating_mul(ENTRY)).unwrap_or_default();
                let place = first.saturating_add(begin).saturating_mul(ENTRY) as u64;
                pagemap.read_exact_at(entries, place).map_err(ImageError::Pagemap)?;
                let within = (begin as u64).saturating_mul(PAGE as u64);
                let at = start.saturating_add(within);
                let exists = |page: usize, entry: &[u8]| {
                    let entry = entry.try_into().map_or(0, u64::from_le_bytes);
                    // What the process has not touched of a file that is mapped is there all the same.
                    entry & PRESENT_OR_SWAPPED != 0
                        || memory.is_from_file(at.saturating_add((page as u64).saturating_mul(PAGE as u64)))
                };
                let mut exist = [false; WINDOW];
                for (page, (entry, exist)) in entries.chunks_exact(ENTRY).zip(&mut exist).enumerate() {
                    *exist = exists(page, entry);
                }
                for run in runs(&exist) {
                    let offset = run.start.saturating_mul(PAGE);
                    let bytes = self.bytes.get_mut(..run.len().saturating_mul(PAGE)).unwrap_or_default();
                    region.read_slice(bytes, MemoryRegionAddress(within.saturating_add(offset as u64)))?;
                    written = written.saturating_add(write_run(bytes, to, at.saturating_add(offset as u64))?);
                }
            }
            start = start.saturating_add(region.len());
        }
        Ok(written)
    }
}

/// Of another process's pagemap an image would be made that lacks pages, and nobody would see it: so a page that every machine
/// has, since we write the generation id to it, has to be there.
pub(crate) fn check_pagemap(memory: &Memory, pagemap: &File) -> Result<(), ImageError> {
    let written = memory.ram.get_host_address(GuestAddress(layout::GENERATION_ID))? as usize;
    let mut entry = [0; ENTRY];
    pagemap.read_exact_at(&mut entry, (written / PAGE).saturating_mul(ENTRY) as u64).map_err(ImageError::Pagemap)?;
    if u64::from_le_bytes(entry) & PRESENT_OR_SWAPPED == 0 { Err(ImageError::NotOurs) } else { Ok(()) }
}

/// Writes pages but those of zeros; returns the bytes written.
fn write_run(bytes: &[u8], to: &File, at: u64) -> Result<u64, ImageError> {
    let mut matter = [false; WINDOW];
    for (page, matters) in bytes.chunks_exact(PAGE).zip(&mut matter) {
        *matters = page != [0; PAGE];
    }
    let mut written = 0u64;
    for run in runs(&matter) {
        let (first, end) = (run.start.saturating_mul(PAGE), run.end.saturating_mul(PAGE));
        let bytes = bytes.get(first..end).unwrap_or_default();
        to.write_all_at(bytes, at.saturating_add(first as u64)).map_err(ImageError::File)?;
        written = written.saturating_add(bytes.len() as u64);
    }
    Ok(written)
}

/// The runs of what is true.
fn runs(flags: &[bool]) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0usize;
    std::iter::from_fn(move || {
        let rest = flags.get(end..)?;
        let start = end.saturating_add(rest.iter().position(|flag| *flag)?);
        let run = flags.get(start..)?.iter().take_while(|flag| **flag).count();
        end = start.saturating_add(run);
        Some(start..end)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation;
    use crate::memory::{fresh, saved};

    fn image(memory: &Memory) -> (File, u64) {
        generation::renew(&memory.ram).unwrap();
        let file = tempfile::tempfile().unwrap();
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let written = Writer::default().write(memory, &pagemap, &file).unwrap();
        (file, written)
    }

    #[test]
    fn an_image_has_what_was_touched_and_holes() {
        use std::os::unix::fs::MetadataExt;
        // Beyond the hole below 4 GiB there is a second region, back to back with the first in the image.
        let memory = fresh((3 << 30) + (64 << 20)).unwrap();
        let write = |at: u64, value: u8| memory.ram.write_slice(&[value; 100], GuestAddress(at)).unwrap();
        write(0x5000, 1);
        write((3 << 30) - 4096, 2);
        write(4 << 30, 3);
        write((4 << 30) + (64 << 20) - 100, 4);
        // Touched, and zeros.
        write(0x40_0000, 0);
        let (file, written) = image(&memory);
        assert_eq!(written, 5 * 4096, "and the generation id");
        assert!(file.metadata().unwrap().blocks() * 512 < 1 << 20);
        let again = saved((3 << 30) + (64 << 20), &[file]).unwrap();
        let read = |at: u64| again.ram.read_obj::<u8>(GuestAddress(at)).unwrap();
        assert_eq!([read(0x5000), read((3 << 30) - 4096), read(4 << 30)], [1, 2, 3]);
        assert_eq!([read((4 << 30) + (64 << 20) - 1), read(0x40_0000), read(0x6000)], [4, 0, 0]);
    }

    #[test]
    fn a_saved_machines_own_image_is_whole() {
        let memory = fresh(64 << 20).unwrap();
        for at in (0..64 << 20).step_by(1 << 20) {
            memory.ram.write_obj(at, GuestAddress(at + 8)).unwrap();
        }
        let (first, written) = image(&memory);
        let again = saved(64 << 20, &[first]).unwrap();
        // Some pages change, some are read, most are not touched: the second image has them all.
        again.ram.write_obj(7u64, GuestAddress(0x30_0008)).unwrap();
        again.ram.write_obj(9u64, GuestAddress(0x38_0000)).unwrap();
        assert_eq!(again.ram.read_obj::<u64>(GuestAddress(0x10_0008)).unwrap(), 1 << 20);
        let (second, more) = image(&again);
        assert_eq!(more, written + 4096);
        let third = saved(64 << 20, &[second]).unwrap();
        for at in (0..64u64 << 20).step_by(1 << 20) {
            let expected = if at == 0x30_0000 { 7 } else { at };
            assert_eq!(third.ram.read_obj::<u64>(GuestAddress(at + 8)).unwrap(), expected);
        }
        assert_eq!(third.ram.read_obj::<u64>(GuestAddress(0x38_0000)).unwrap(), 9);
    }

    #[test]
    fn what_is_no_pagemap_is_refused() {
        let memory = fresh(64 << 20).unwrap();
        let (empty, file) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let write = || Writer::default().write(&memory, &empty, &file);
        assert!(matches!(write(), Err(ImageError::Pagemap(_))));
        // As one of a process that has nothing where our guest's memory is.
        empty.set_len(1 << 40).unwrap();
        let error = write().unwrap_err();
        assert!(matches!(error, ImageError::NotOurs), "{error}");
        assert_eq!(file.metadata().unwrap().len(), 0);
    }
}
