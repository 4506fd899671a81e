//! Loads a kernel and what it needs, and prepares the PVH entry state.
//!
//! PVH is the shortest way into an uncompressed kernel: 32-bit protected mode without paging, one pointer to a
//! `hvm_start_info` in `rbx`. See `xen/include/public/arch-x86/hvm/start_info.h` for the structures.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use kvm_bindings::{kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use linux_loader::loader::{KernelLoader, KernelLoaderResult};
use vm_memory::{Bytes, GuestAddress};

use crate::acpi;
use crate::layout;
use crate::memory::Ram;

/// What can go wrong before the first instruction.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The kernel file is not an ELF that can be loaded.
    #[error("kernel: not a loadable 64-bit ELF file: {0}; import a vmlinux, or the vmlinuz of a distribution")]
    NotElf(linux_loader::loader::Error),
    /// It has no PVH entry.
    #[error("kernel: it has no PVH entry point; it needs CONFIG_PVH=y, as distribution kernels have")]
    NoPvhEntry,
    /// Kernel and initramfs leave too little memory.
    #[error("memory: {memory} bytes are too few: kernel and initramfs need {needed}; ask for more with -m")]
    TooLittleMemory {
        /// Of the guest.
        memory: u64,
        /// For kernel and initramfs, with room to unpack it.
        needed: u64,
    },
    /// An initramfs archive could not be read.
    #[error("initramfs {index}: {error}")]
    Initramfs {
        /// Which of the archives.
        index: usize,
        /// Why not.
        error: io::Error,
    },
    /// Guest memory refused a write.
    #[error("guest memory: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// Loads everything and returns the entry point.
pub fn load(
    ram: &Ram,
    memory: u64,
    kernel: &mut File,
    initramfs: &mut [File],
    cmdline: &str,
    tables: acpi::Tables,
) -> Result<u32, BootError> {
    let kernel_size = kernel.metadata().map_or(0, |data| data.len());
    let loaded = match Elf::load(ram, None, kernel, Some(GuestAddress(layout::HIGH_MEMORY))) {
        Err(_) if is_elf(kernel) && kernel_size.saturating_add(16 << 20) > memory => {
            return Err(BootError::TooLittleMemory { memory, needed: kernel_size.saturating_add(32 << 20) });
        }
        other => other.map_err(BootError::NotElf)?,
    };
    let entry = match loaded.pvh_boot_cap {
        PvhBootCapability::PvhEntryPresent(address) => u32::try_from(address.0).map_err(|_| BootError::NoPvhEntry)?,
        _ => return Err(BootError::NoPvhEntry),
    };
    let modules = load_initramfs(ram, memory, &loaded, initramfs)?;
    ram.write_slice(cmdline.as_bytes(), GuestAddress(layout::CMDLINE))?;
    ram.write_slice(&tables.to_bytes(), GuestAddress(layout::RSDP))?;
    write_start_info(ram, memory, modules)?;
    write_gdt(ram)?;
    Ok(entry)
}

fn is_elf(file: &mut File) -> bool {
    let mut magic = [0; 4];
    file.seek(SeekFrom::Start(0)).is_ok() && file.read_exact(&mut magic).is_ok() && magic == *b"\x7fELF"
}

/// Puts the archives back to back at the end of low memory, each on a 4-byte border as the kernel's unpacker
/// wants them. Returns where and how long.
fn load_initramfs(
    ram: &Ram,
    memory: u64,
    kernel: &KernelLoaderResult,
    archives: &mut [File],
) -> Result<(u64, u64), BootError> {
    let mut lengths = Vec::new();
    let mut total = 0u64;
    for (index, archive) in archives.iter().enumerate() {
        let length = archive.metadata().map_err(|error| BootError::Initramfs { index, error })?.len();
        lengths.push((total, length));
        total = total.saturating_add(length).checked_next_multiple_of(4).unwrap_or(u64::MAX);
    }
    let end = memory.min(layout::HOLE_START);
    // The kernel unpacks a copy into the page cache, and only then frees the archive.
    let needed = kernel.kernel_end.saturating_add(total.saturating_mul(2)).saturating_add(16 << 20);
    let start = end.saturating_sub(total) & !0xfff;
    if needed > end {
        return Err(BootError::TooLittleMemory { memory, needed });
    }
    for (index, (archive, (offset, length))) in archives.iter_mut().zip(lengths).enumerate() {
        let error = |error| BootError::Initramfs { index, error };
        archive.seek(SeekFrom::Start(0)).map_err(error)?;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        ram.read_exact_volatile_from(GuestAddress(start.saturating_add(offset)), archive, length)?;
    }
    Ok((start, total))
}

fn write_start_info(ram: &Ram, memory: u64, (initrd, initrd_size): (u64, u64)) -> Result<(), BootError> {
    const RAM: u32 = 1;
    const RESERVED: u32 = 2;
    let mut map = vec![
        (0, layout::CONVENTIONAL_END, RAM),
        (layout::CONVENTIONAL_END, layout::HIGH_MEMORY - layout::CONVENTIONAL_END, RESERVED),
    ];
    for (start, length) in layout::ram_ranges(memory) {
        let skipped = layout::HIGH_MEMORY.saturating_sub(start);
        map.push((start.max(layout::HIGH_MEMORY), length.saturating_sub(skipped), RAM));
    }
    let mut at = layout::MEMORY_MAP;
    for (start, length, kind) in &map {
        ram.write_obj(*start, GuestAddress(at))?;
        ram.write_obj(*length, GuestAddress(at + 8))?;
        ram.write_obj(u64::from(*kind), GuestAddress(at + 16))?;
        at += 24;
    }
    let modules = u32::from(initrd_size > 0);
    for (index, word) in [initrd, initrd_size, 0, 0].iter().enumerate() {
        ram.write_obj(*word, GuestAddress(layout::MODULE_LIST + 8 * index as u64))?;
    }
    let magic_version = 0x336e_c578 | 1 << 32;
    let flags_modules = u64::from(modules) << 32;
    let words: [u64; 7] = [
        magic_version,
        flags_modules,
        layout::MODULE_LIST,
        layout::CMDLINE,
        layout::RSDP,
        layout::MEMORY_MAP,
        map.len() as u64,
    ];
    for (index, word) in words.iter().enumerate() {
        ram.write_obj(*word, GuestAddress(layout::START_INFO + 8 * index as u64))?;
    }
    Ok(())
}

/// Flat 32-bit segments: code, data, task state.
fn write_gdt(ram: &Ram) -> Result<(), BootError> {
    for (index, entry) in [0u64, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x0000_8b00_0000_0067].iter().enumerate()
    {
        ram.write_obj(*entry, GuestAddress(layout::GDT + 8 * index as u64))?;
    }
    ram.write_obj(0u64, GuestAddress(layout::IDT))?;
    Ok(())
}

/// General registers at the PVH entry.
pub fn entry_registers(entry: u32) -> kvm_regs {
    kvm_regs { rip: u64::from(entry), rbx: layout::START_INFO, rflags: 2, ..Default::default() }
}

/// Turns the segment and control registers of a vCPU in reset into those of the PVH entry.
pub fn entry_system_registers(sregs: &mut kvm_sregs) {
    let flat = |selector: u16, type_: u8, s: u8| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        db: s,
        s,
        g: s,
        ..Default::default()
    };
    sregs.cs = flat(8, 0xb, 1);
    for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *segment = flat(16, 3, 1);
    }
    sregs.tr = kvm_segment { limit: 0x67, ..flat(24, 0xb, 0) };
    sregs.gdt.base = layout::GDT;
    sregs.gdt.limit = 31;
    sregs.idt.base = layout::IDT;
    sregs.idt.limit = 7;
    sregs.cr0 = 0x11; // protected mode, 387 present
    sregs.cr4 = 0;
    sregs.efer = 0;
}

/// The two MSRs whose reset value does not do: fast string operations on, and memory write-back by default
/// (the reset value is "uncached", which costs every access).
pub fn entry_msrs() -> [kvm_msr_entry; 2] {
    const MISC_ENABLE: u32 = 0x1a0;
    const MTRR_DEF_TYPE: u32 = 0x2ff;
    [
        kvm_msr_entry { index: MISC_ENABLE, data: 1, ..Default::default() },
        kvm_msr_entry { index: MTRR_DEF_TYPE, data: 1 << 11 | 6, ..Default::default() },
    ]
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::memory::guest_ram;

    const TABLES: acpi::Tables = acpi::Tables { vcpus: 1, virtio_devices: 1, serial: false };

    fn file(content: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file
    }

    /// A 64-bit ELF with one segment of four bytes at 1 MiB, and with or without a PVH note.
    fn elf(with_note: bool) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(16, 0);
        bytes.extend(2u16.to_le_bytes());
        bytes.extend(62u16.to_le_bytes());
        bytes.extend(1u32.to_le_bytes());
        bytes.extend(0x10_0000u64.to_le_bytes());
        bytes.extend(64u64.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        for half in [64u16, 56, 1 + u16::from(with_note), 64, 0, 0] {
            bytes.extend(half.to_le_bytes());
        }
        let mut segment = |kind: u32, offset: u64, size: u64| {
            bytes.extend(kind.to_le_bytes());
            bytes.extend(5u32.to_le_bytes());
            for word in [offset, 0x10_0000, 0x10_0000, size, size, 4] {
                bytes.extend(word.to_le_bytes());
            }
        };
        segment(1, 256, 4);
        if with_note {
            segment(4, 272, 20);
        }
        bytes.resize(256, 0);
        bytes.extend(b"code");
        bytes.resize(272, 0);
        for word in [4u32, 4, 18] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(b"Xen\0");
        bytes.extend(0x10_0000u32.to_le_bytes());
        bytes
    }

    #[test]
    fn a_kernel_with_its_initramfs_lands_where_the_start_info_says() {
        let memory = 64 << 20;
        let ram = guest_ram(memory).unwrap();
        let mut archives = [file(b"first"), file(b"second!!")];
        let entry = load(&ram, memory, &mut file(&elf(true)), &mut archives, "quiet", TABLES).unwrap();
        assert_eq!(entry, 0x10_0000);
        let read = |at: u64| ram.read_obj::<u64>(GuestAddress(at)).unwrap();
        assert_eq!(read(layout::START_INFO) & 0xffff_ffff, 0x336e_c578);
        assert_eq!(read(layout::START_INFO + 8) >> 32, 1);
        let (start, length) = (read(layout::MODULE_LIST), read(layout::MODULE_LIST + 8));
        assert_eq!((start % 4096, length), (0, 16));
        let mut content = [0; 16];
        ram.read_slice(&mut content, GuestAddress(start)).unwrap();
        assert_eq!(&content, b"first\0\0\0second!!");
    }

    #[test]
    fn the_memory_map_covers_all_memory_and_leaves_the_hole() {
        let ram = guest_ram(4 << 30).unwrap();
        write_start_info(&ram, 4 << 30, (0, 0)).unwrap();
        let read = |at: u64| ram.read_obj::<u64>(GuestAddress(layout::MEMORY_MAP + at)).unwrap();
        assert_eq!(read(48) + read(56), layout::HOLE_START);
        assert_eq!((read(72), read(80)), (layout::HOLE_END, 1 << 30));
    }

    #[test]
    fn what_is_not_a_kernel_is_named() {
        let memory = 64 << 20;
        let ram = guest_ram(memory).unwrap();
        let try_load = |content: &[u8]| load(&ram, memory, &mut file(content), &mut [], "", TABLES).unwrap_err();
        assert!(matches!(try_load(b"MZ not a kernel"), BootError::NotElf(_)));
        assert!(matches!(try_load(b""), BootError::NotElf(_)));
        assert!(matches!(try_load(&elf(false)), BootError::NoPvhEntry));
    }

    #[test]
    fn an_initramfs_that_does_not_fit_is_refused() {
        let memory = 32 << 20;
        let ram = guest_ram(memory).unwrap();
        let large = tempfile::tempfile().unwrap();
        large.set_len(20 << 20).unwrap();
        let error = load(&ram, memory, &mut file(&elf(true)), &mut [large], "", TABLES).unwrap_err();
        assert!(matches!(error, BootError::TooLittleMemory { .. }), "{error}");
    }
}
