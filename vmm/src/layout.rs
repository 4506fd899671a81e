//! Where things are in the guest's physical address space.
//!
//! The layout is fixed: it is part of a snapshot's meaning, so a change here is a new snapshot format.

/// Boot GDT, four entries of 8 bytes.
pub const GDT: u64 = 0x500;
/// Boot IDT, 8 zero bytes.
pub const IDT: u64 = 0x520;
/// PVH `hvm_start_info`.
pub const START_INFO: u64 = 0x6000;
/// PVH module list: one entry, the initramfs.
pub const MODULE_LIST: u64 = 0x6040;
/// PVH memory map.
pub const MEMORY_MAP: u64 = 0x7000;
/// Kernel command line.
pub const CMDLINE: u64 = 0x2_0000;
/// End of conventional memory: from here to 1 MiB the map says "reserved".
pub const CONVENTIONAL_END: u64 = 0x9_fc00;
/// The generation id, 16 bytes: the first of what the map says is reserved.
pub const GENERATION_ID: u64 = CONVENTIONAL_END;
/// ACPI's RSDP, where firmware-less kernels scan for it; the other tables follow.
pub const RSDP: u64 = 0xe_0000;
/// The 1 MiB line, where high memory begins.
pub const HIGH_MEMORY: u64 = 0x10_0000;

/// Start of the hole below 4 GiB that holds every device. Memory beyond it resumes at [`HOLE_END`].
pub const HOLE_START: u64 = 0xc000_0000;
/// End of the hole.
pub const HOLE_END: u64 = 0x1_0000_0000;
/// First virtio-mmio window; window n is at `VIRTIO_BASE + n * VIRTIO_WINDOW`.
pub const VIRTIO_BASE: u64 = 0xc000_1000;
/// Size of a window: one page, so that it can be a read-only memory slot.
pub const VIRTIO_WINDOW: u64 = 0x1000;
/// The same as a length in our own memory.
pub const VIRTIO_PAGE: usize = 0x1000;
/// I/O APIC.
pub const IOAPIC: u32 = 0xfec0_0000;
/// Local APIC.
pub const LAPIC: u32 = 0xfee0_0000;
/// Three pages that Intel hosts need for real-mode emulation.
pub const TSS: usize = 0xfffb_d000;

/// First global system interrupt of virtio devices: device n has `VIRTIO_GSI + n`.
pub const VIRTIO_GSI: u32 = 5;
/// Most virtio devices: the I/O APIC has 24 pins, and pin 23 is kept for the VM generation id.
pub const MAX_VIRTIO_DEVICES: usize = 18;
/// Interrupt that tells of a new generation id.
pub const GENERATION_GSI: u32 = 23;
/// Interrupt of the first serial port.
pub const SERIAL_GSI: u32 = 4;

/// First port of the serial console.
pub const SERIAL_PORT: u16 = 0x3f8;
/// A byte written here is a mark: the exits until then are noted (see `vmm_control::Stats::marks`).
pub const MARK_PORT: u16 = 0x3f0;
/// ACPI sleep control: `SLEEP_S5` powers the machine off.
pub const SLEEP_CONTROL_PORT: u16 = 0x600;
/// ACPI sleep status.
pub const SLEEP_STATUS_PORT: u16 = 0x601;
/// Sleep type 5 with the enable bit.
pub const SLEEP_S5: u8 = 5 << 2 | 1 << 5;
/// ACPI reset register: [`RESET_VALUE`] resets the machine.
pub const RESET_PORT: u16 = 0x604;
/// Value of the reset register that resets.
pub const RESET_VALUE: u8 = 1;
/// Command port of the keyboard controller that does not exist: `reboot=k` writes here.
pub const KEYBOARD_PORT: u16 = 0x64;
/// Its command to pulse the reset line.
pub const KEYBOARD_RESET: u8 = 0xfe;
/// Index port of the CMOS clock that does not exist. Starting a vCPU writes a shutdown code there.
pub const CMOS_INDEX_PORT: u16 = 0x70;
/// Its data port.
pub const CMOS_DATA_PORT: u16 = 0x71;

/// Index port of the PCI configuration space that does not exist: a kernel looks whatever it is told.
pub const PCI_INDEX_PORT: u16 = 0xcf8;

/// Guest memory as ranges of (start, length), in order, without the hole.
pub fn ram_ranges(memory: u64) -> Vec<(u64, u64)> {
    if memory <= HOLE_START {
        vec![(0, memory)]
    } else {
        vec![(0, HOLE_START), (HOLE_END, memory.saturating_sub(HOLE_START))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_beyond_three_gib_resumes_above_the_hole() {
        assert_eq!(ram_ranges(128 << 20), [(0, 128 << 20)]);
        assert_eq!(ram_ranges(3 << 30), [(0, 3 << 30)]);
        assert_eq!(ram_ranges(4 << 30), [(0, 3 << 30), (4 << 30, 1 << 30)]);
    }
}
