//! Guest memory: private, 2 MiB aligned, with huge pages asked for. A fresh machine's is anonymous; a saved machine's is its image
//! where that has data, mapped so that the image never changes, and anonymous where it has long holes.
//!
//! Firecracker measured 20–60 % of its boot time in faults that huge pages save; they need both ends of a
//! mapping to be aligned. Each mapping lies between inaccessible pages. Nothing is ever unmapped: guest memory
//! lives as long as the process.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use crate::layout;

/// The guest's memory.
pub type Ram = GuestMemoryMmap<()>;

/// Alignment of a mapping: a huge page. A hole of an image that is shorter is mapped as part of it.
const ALIGNMENT: usize = 2 << 20;
/// Most mappings of an image: the kernel allows a process 65,530 of any kind.
const MAX_MAPPINGS: usize = 4096;

/// What can go wrong while guest memory is made.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The host did not map it.
    #[error("memory: the host refused to map {bytes} bytes: {error}")]
    Map {
        /// Asked for.
        bytes: u64,
        /// Why not.
        error: io::Error,
    },
    /// The size does not fit this host.
    #[error("memory: {0} bytes are more than this host can address")]
    TooLarge(u64),
    /// There is not one image.
    #[error("memory: there are {0} images, and this version goes on from one, which is whole")]
    Images(usize),
    /// An image of another length.
    #[error("memory: the image has {found} bytes, and the machine {expected}")]
    ImageLength {
        /// Of the image.
        found: u64,
        /// Of the machine.
        expected: u64,
    },
    /// An image that cannot be used.
    #[error("memory: the image: {0}")]
    Image(io::Error),
    /// The regions do not fit together.
    #[error("memory: {0}")]
    Regions(String),
}

/// A machine's memory, and where it came from.
#[derive(Debug)]
pub struct Memory {
    /// The memory.
    pub ram: Ram,
    /// What is mapped from an image, as ranges of bytes with all regions back to back, in order.
    from_file: Vec<Range<u64>>,
}

impl Memory {
    /// Whether the byte at this place, all regions being back to back, is mapped from an image.
    pub fn is_from_file(&self, at: u64) -> bool {
        let after = self.from_file.partition_point(|range| range.end <= at);
        self.from_file.get(after).is_some_and(|range| range.contains(&at))
    }
}

/// Maps `bytes` of guest memory.
pub fn guest_ram(bytes: u64) -> Result<Ram, MemoryError> {
    Ok(fresh(bytes)?.ram)
}

/// Memory of `bytes` for a machine that starts.
pub fn fresh(bytes: u64) -> Result<Memory, MemoryError> {
    map_ranges(bytes, |_, _| Ok(Vec::new()))
}

/// Memory of `bytes` for a machine that goes on from its image. `images` are the oldest first; now there can be one. Its
/// length is looked at first: what is mapped beyond a file's end kills the process that touches it.
pub fn saved(bytes: u64, images: &[File]) -> Result<Memory, MemoryError> {
    let [image] = images else { return Err(MemoryError::Images(images.len())) };
    let found = image.metadata().map_err(MemoryError::Image)?.len();
    if found != bytes {
        return Err(MemoryError::ImageLength { found, expected: bytes });
    }
    map_ranges(bytes, |start, region| {
        let end = start.saturating_add(region.size() as u64);
        let extents = data_extents(image, start..end).map_err(MemoryError::Image)?;
        for extent in &extents {
            map_image(region, extent.start.saturating_sub(start), image, extent)
                .map_err(|error| MemoryError::Map { bytes: extent.end.saturating_sub(extent.start), error })?;
        }
        Ok(extents)
    })
}

/// Maps every range of guest memory; `fill` puts what it has into a region that begins at this place, all being back to back.
fn map_ranges(
    bytes: u64,
    fill: impl Fn(u64, &MmapRegion<()>) -> Result<Vec<Range<u64>>, MemoryError>,
) -> Result<Memory, MemoryError> {
    let (mut regions, mut from_file, mut place) = (Vec::new(), Vec::new(), 0u64);
    for (start, length) in layout::ram_ranges(bytes) {
        let size = usize::try_from(length).map_err(|_| MemoryError::TooLarge(length))?;
        let region = private_region(size, true)?;
        from_file.extend(fill(place, &region)?);
        place = place.saturating_add(length);
        regions.push(
            GuestRegionMmap::new(region, GuestAddress(start))
                .ok_or_else(|| MemoryError::Regions(format!("the region at {start:#x} wraps around")))?,
        );
    }
    let ram = GuestMemoryMmap::from_regions(regions).map_err(|error| MemoryError::Regions(error.to_string()))?;
    Ok(Memory { ram, from_file })
}

/// Where an image has data within `range`, in whole pages, with short holes closed: as many extents as may be mapped. After each
/// the search goes on at a border of 2 MiB, so an image in small pieces takes no more than two calls for each 2 MiB.
fn data_extents(image: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    use rustix::fs::{SeekFrom, seek};
    const PAGE: u64 = 4096;
    let mut extents: Vec<Range<u64>> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let start = match seek(image, SeekFrom::Data(at)) {
            Ok(start) => start / PAGE * PAGE,
            Err(rustix::io::Errno::NXIO) => break,
            // A file system that does not know its holes.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => at,
            Err(error) => return Err(error.into()),
        };
        if start >= range.end {
            break;
        }
        let end = seek(image, SeekFrom::Hole(start.max(at))).unwrap_or(range.end);
        let end = end.next_multiple_of(ALIGNMENT as u64).min(range.end);
        match extents.last_mut() {
            Some(last) if start.saturating_sub(last.end) < ALIGNMENT as u64 => last.end = end,
            _ => extents.push(start..end),
        }
        at = end;
    }
    let mut closed = ALIGNMENT as u64;
    while extents.len() > MAX_MAPPINGS {
        closed = closed.saturating_mul(2);
        extents.dedup_by(|next, last| {
            let close = next.start.saturating_sub(last.end) < closed;
            if close {
                last.end = next.end;
            }
            close
        });
    }
    Ok(extents)
}

/// Puts an extent of an image into a region, in place of what was mapped there.
fn map_image(region: &MmapRegion<()>, at: u64, image: &File, extent: &Range<u64>) -> io::Result<()> {
    let length = extent.end.saturating_sub(extent.start);
    let out_of_range = || io::Error::from(io::ErrorKind::InvalidInput);
    if at.checked_add(length).is_none_or(|end| end > region.size() as u64) {
        return Err(out_of_range());
    }
    let (at, length) = (usize::try_from(at).unwrap_or(usize::MAX), usize::try_from(length).unwrap_or(usize::MAX));
    let offset = libc::off_t::try_from(extent.start).map_err(|_| out_of_range())?;
    let address = region.as_ptr().wrapping_add(at);
    // SAFETY: the range lies inside the region, whose mapping nobody uses yet, so the fixed mapping replaces nothing else.
    let mapped = unsafe {
        libc::mmap(
            address.cast(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED,
            image.as_raw_fd(),
            offset,
        )
    };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Maps `size` bytes that are not guest memory but that the guest sees, such as register pages.
pub fn device_pages(size: usize) -> Result<MmapRegion<()>, MemoryError> {
    private_region(size, false)
}

fn private_region(size: usize, huge: bool) -> Result<MmapRegion<()>, MemoryError> {
    let fail = |error| MemoryError::Map { bytes: size as u64, error };
    let pointer = map_aligned(size, huge).map_err(fail)?;
    let builder = MmapRegionBuilder::new(size)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: `map_aligned` returned a fresh mapping of `size` readable and writable bytes, which nobody else
    // knows and nobody unmaps.
    let builder = unsafe { builder.with_raw_mmap_pointer(pointer.as_ptr()) };
    builder.build().map_err(|error| MemoryError::Regions(error.to_string()))
}

/// A fresh anonymous mapping on a 2 MiB border, with at least one inaccessible page on either side.
fn map_aligned(size: usize, huge: bool) -> io::Result<NonNull<u8>> {
    let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
    let reserved = size.checked_add(2 * ALIGNMENT).ok_or_else(too_large)?;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let reservation = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            reserved,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if reservation == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // At least one page before the aligned start stays inaccessible.
    let start = (reservation as usize + 1).next_multiple_of(ALIGNMENT);
    // SAFETY: [start, start + size) lies inside the reservation that was just made, so the fixed mapping replaces
    // nothing else.
    let mapped = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if huge {
        // Advice: a host without huge pages is slower, not wrong.
        // SAFETY: the range was just mapped, and the advice changes no content.
        unsafe { libc::madvise(mapped, size, libc::MADV_HUGEPAGE) };
    }
    NonNull::new(mapped.cast()).ok_or_else(too_large)
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestMemoryBackend};

    use super::*;

    #[test]
    fn memory_is_aligned_and_reads_zero() {
        let ram = guest_ram(8 << 20).unwrap();
        assert_eq!(ram.get_host_address(GuestAddress(0)).unwrap() as usize % ALIGNMENT, 0);
        assert_eq!(ram.read_obj::<u64>(GuestAddress((8 << 20) - 8)).unwrap(), 0);
        assert!(ram.read_obj::<u64>(GuestAddress((8 << 20) - 7)).is_err());
    }

    #[test]
    fn an_image_is_mapped_where_it_has_data_and_never_changed() {
        use std::os::unix::fs::FileExt;
        let image = tempfile::tempfile().unwrap();
        image.set_len(64 << 20).unwrap();
        // Extents close to each other, one at the very end.
        for at in [3 << 20, (3 << 20) + (64 << 10), 5 << 20, (64 << 20) - 4096] {
            image.write_all_at(&[9; 4096], at).unwrap();
        }
        let memory = saved(64 << 20, &[image.try_clone().unwrap()]).unwrap();
        assert_eq!(memory.from_file.len(), 2, "{:?}", memory.from_file);
        assert!(memory.is_from_file(3 << 20) && memory.is_from_file((64 << 20) - 1));
        assert!(!memory.is_from_file(0) && !memory.is_from_file(32 << 20) && !memory.is_from_file(64 << 20));
        let read = |at| memory.ram.read_obj::<u8>(GuestAddress(at)).unwrap();
        assert_eq!([read(3 << 20), read((64 << 20) - 1), read(32 << 20), read(0)], [9, 9, 0, 0]);
        memory.ram.write_obj(1u8, GuestAddress(3 << 20)).unwrap();
        memory.ram.write_obj(1u8, GuestAddress(32 << 20)).unwrap();
        let mut byte = [0];
        image.read_exact_at(&mut byte, 3 << 20).unwrap();
        assert_eq!(byte, [9]);
    }

    #[test]
    fn an_image_that_is_not_this_machines_is_refused() {
        let image = tempfile::tempfile().unwrap();
        image.set_len((64 << 20) - 4096).unwrap();
        let copy = || image.try_clone().unwrap();
        assert!(matches!(saved(64 << 20, &[copy()]), Err(MemoryError::ImageLength { .. })));
        assert!(matches!(saved(64 << 20, &[]), Err(MemoryError::Images(0))));
        assert!(matches!(saved(64 << 20, &[copy(), copy()]), Err(MemoryError::Images(2))));
    }

    #[test]
    fn an_image_in_too_many_pieces_is_mapped_in_fewer() {
        use std::os::unix::fs::FileExt;
        let image = tempfile::tempfile().unwrap();
        let pieces = MAX_MAPPINGS as u64 + 100;
        let step = 3 * ALIGNMENT as u64;
        image.set_len(pieces * step).unwrap();
        for piece in 0..pieces {
            image.write_all_at(&[1], piece * step).unwrap();
        }
        let extents = data_extents(&image, 0..pieces * step).unwrap();
        assert!(extents.len() <= MAX_MAPPINGS, "{}", extents.len());
        assert!((0..pieces).all(|piece| extents.iter().any(|extent| extent.contains(&(piece * step)))));
    }

    #[test]
    fn more_than_the_address_space_is_refused() {
        assert!(matches!(guest_ram(1 << 60), Err(MemoryError::Map { .. })));
    }
}
