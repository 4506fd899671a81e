//! Guest memory: anonymous, private, 2 MiB aligned, with huge pages asked for.
//!
//! Firecracker measured 20–60 % of its boot time in faults that huge pages save; they need both ends of a
//! mapping to be aligned. Each mapping lies between inaccessible pages. Nothing is ever unmapped: guest memory
//! lives as long as the process.

use std::io;
use std::ptr::NonNull;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use crate::layout;

/// The guest's memory.
pub type Ram = GuestMemoryMmap<()>;

/// Alignment of a mapping: a huge page.
const ALIGNMENT: usize = 2 << 20;

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
    /// The regions do not fit together.
    #[error("memory: {0}")]
    Regions(String),
}

/// Maps `bytes` of guest memory.
pub fn guest_ram(bytes: u64) -> Result<Ram, MemoryError> {
    let mut regions = Vec::new();
    for (start, length) in layout::ram_ranges(bytes) {
        let size = usize::try_from(length).map_err(|_| MemoryError::TooLarge(length))?;
        let region = private_region(size, true)?;
        regions.push(
            GuestRegionMmap::new(region, GuestAddress(start))
                .ok_or_else(|| MemoryError::Regions(format!("the region at {start:#x} wraps around")))?,
        );
    }
    GuestMemoryMmap::from_regions(regions).map_err(|error| MemoryError::Regions(error.to_string()))
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
    fn more_than_the_address_space_is_refused() {
        assert!(matches!(guest_ram(1 << 60), Err(MemoryError::Map { .. })));
    }
}
