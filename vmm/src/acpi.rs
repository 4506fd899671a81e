//! The five ACPI tables that a stock kernel needs, written by hand: RSDP, XSDT, FADT, MADT, DSDT.
//!
//! Hardware-reduced ACPI: no timers, no fixed events, no legacy devices. The FADT says that there is no CMOS
//! clock, no VGA and no keyboard controller, so that the kernel does not look for them: each look is an exit.
//! Layouts: ACPI specification 6.5, chapters 5 (tables) and 20 (AML).
//!
//! Nothing here comes from a guest: the tables are made of two small numbers and a flag, so casts cannot truncate.
#![allow(clippy::cast_possible_truncation)]

use crate::layout;

const HEADER: usize = 36;
const OEM_ID: &[u8; 6] = b"BULKHD";
const OEM_TABLE_ID: &[u8; 8] = b"BULKHEAD";

/// What the tables describe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tables {
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Number of virtio-mmio devices.
    pub virtio_devices: usize,
    /// Whether there is a serial port.
    pub serial: bool,
}

impl Tables {
    /// The bytes of all tables as they stand at [`layout::RSDP`] and after.
    pub fn to_bytes(self) -> Vec<u8> {
        // RSDP, then the XSDT on the next 8-byte border, then the tables it names.
        let xsdt_at = layout::RSDP + 40;
        let fadt_at = xsdt_at + 56;
        let madt_at = fadt_at + 280;
        let madt = self.madt();
        let dsdt_at = (madt_at + madt.len() as u64).next_multiple_of(8);

        let mut bytes = rsdp(xsdt_at);
        let mut place = |at: u64, table: Vec<u8>| {
            bytes.resize(usize::try_from(at - layout::RSDP).unwrap_or(0), 0);
            bytes.extend(table);
        };
        place(xsdt_at, xsdt(&[fadt_at, madt_at]));
        place(fadt_at, fadt(dsdt_at));
        place(madt_at, madt);
        place(dsdt_at, self.dsdt());
        bytes
    }

    /// One local APIC for each vCPU and one I/O APIC, without overrides: hardware-reduced ACPI has no 8259.
    fn madt(self) -> Vec<u8> {
        let mut body = Vec::new();
        body.extend(layout::LAPIC.to_le_bytes());
        body.extend(0u32.to_le_bytes());
        body.extend([1, 12, 0, 0]);
        body.extend(layout::IOAPIC.to_le_bytes());
        body.extend(0u32.to_le_bytes());
        for cpu in 0..self.vcpus {
            body.extend([0, 8, cpu, cpu, 1, 0, 0, 0]);
        }
        table(b"APIC", 5, &body)
    }

    fn dsdt(self) -> Vec<u8> {
        let mut devices = Vec::new();
        for (n, gsi) in (0..self.virtio_devices as u64).zip(layout::VIRTIO_GSI..) {
            devices.extend(virtio_device(n, gsi));
        }
        if self.serial {
            devices.extend(serial_device());
        }
        devices.extend(generation_devices());
        let mut body = aml::scope(b"\\_SB_", &devices);
        // Sleep type 5 is the only one there is; four elements, because some kernels insist.
        body.extend(aml::name(b"_S5_", &aml::package(&[aml::byte(5), aml::byte(0), aml::byte(0), aml::byte(0)])));
        table(b"DSDT", 2, &body)
    }
}

fn virtio_device(n: u64, gsi: u32) -> Vec<u8> {
    let digits = b"0123456789ABCDEF";
    let name = [b'V', b'I', digits[(n >> 4) as usize & 15], digits[n as usize & 15]];
    let base = (layout::VIRTIO_BASE + n * layout::VIRTIO_WINDOW) as u32;
    let mut resources = vec![0x86, 9, 0, 1]; // Memory32Fixed, read-write
    resources.extend(base.to_le_bytes());
    resources.extend((layout::VIRTIO_WINDOW as u32).to_le_bytes());
    resources.extend(interrupt(gsi));
    let mut body = aml::name(b"_HID", &aml::string("LNRO0005"));
    body.extend(aml::name(b"_UID", &aml::byte(n as u8)));
    body.extend(aml::name(b"_CCA", &aml::one()));
    body.extend(aml::name(b"_CRS", &aml::resources(&resources)));
    aml::device(&name, &body)
}

/// The generation id, and the device whose interrupt tells of a new one (ACPI 6.5, section 5.6.9). Linux before 6.10 knows the
/// first by exactly these names.
fn generation_devices() -> Vec<u8> {
    let gsi = layout::GENERATION_GSI as u8;
    let address = [layout::GENERATION_ID as u32, (layout::GENERATION_ID >> 32) as u32];
    let mut body = aml::name(b"_HID", &aml::string("VMGENCTR"));
    body.extend(aml::name(b"_CID", &aml::string("VM_Gen_Counter")));
    body.extend(aml::name(b"_DDN", &aml::string("VM_Gen_Counter")));
    body.extend(aml::name(b"ADDR", &aml::package(&address.map(aml::dword))));
    let mut devices = aml::device(b"VGEN", &body);
    let mut body = aml::name(b"_HID", &aml::string("ACPI0013"));
    body.extend(aml::name(b"_UID", &aml::byte(0)));
    body.extend(aml::name(b"_CRS", &aml::resources(&interrupt(gsi.into()))));
    body.extend(aml::method_of_one(b"_EVT", &aml::if_argument_is(gsi, &aml::notify(b"VGEN", 0x80))));
    devices.extend(aml::device(b"GED_", &body));
    devices
}

fn serial_device() -> Vec<u8> {
    let port = layout::SERIAL_PORT.to_le_bytes();
    let mut resources = vec![0x47, 1, port[0], port[1], port[0], port[1], 1, 8]; // IO, 16-bit decode
    resources.extend(interrupt(layout::SERIAL_GSI));
    let mut body = aml::name(b"_HID", &aml::dword(0x0105_d041)); // EisaId("PNP0501")
    body.extend(aml::name(b"_UID", &aml::byte(0)));
    body.extend(aml::name(b"_CRS", &aml::resources(&resources)));
    aml::device(b"COM1", &body)
}

/// Extended interrupt descriptor: consumer, edge-triggered, active-high, exclusive.
fn interrupt(gsi: u32) -> Vec<u8> {
    let mut bytes = vec![0x89, 6, 0, 0b0011, 1];
    bytes.extend(gsi.to_le_bytes());
    bytes
}

fn rsdp(xsdt: u64) -> Vec<u8> {
    let mut bytes = b"RSD PTR \0".to_vec();
    bytes.extend(OEM_ID);
    bytes.push(2);
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(36u32.to_le_bytes());
    bytes.extend(xsdt.to_le_bytes());
    bytes.extend([0; 4]);
    bytes[8] = checksum(&bytes[..20]);
    bytes[32] = checksum(&bytes);
    bytes
}

fn xsdt(tables: &[u64]) -> Vec<u8> {
    table(b"XSDT", 1, &tables.iter().flat_map(|at| at.to_le_bytes()).collect::<Vec<_>>())
}

fn fadt(dsdt: u64) -> Vec<u8> {
    /// An 8-bit register in I/O space (generic address structure).
    fn register(port: u16) -> [u8; 12] {
        let [low, high] = port.to_le_bytes();
        [1, 8, 0, 1, low, high, 0, 0, 0, 0, 0, 0]
    }
    let mut body = vec![0; 276 - HEADER];
    let mut put = |offset: usize, bytes: &[u8]| body[offset - HEADER..][..bytes.len()].copy_from_slice(bytes);
    put(109, &(1u16 << 2 | 1 << 5).to_le_bytes()); // no VGA, no CMOS clock
    put(112, &(1u32 << 20 | 1 << 10).to_le_bytes()); // hardware-reduced, reset register supported
    put(116, &register(layout::RESET_PORT));
    put(128, &[layout::RESET_VALUE]);
    put(131, &[5]); // minor version: with the header's revision 6 this is ACPI 6.5
    put(140, &dsdt.to_le_bytes());
    put(244, &register(layout::SLEEP_CONTROL_PORT));
    put(256, &register(layout::SLEEP_STATUS_PORT));
    put(268, b"BULKHEAD");
    table(b"FACP", 6, &body)
}

fn table(signature: &[u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = signature.to_vec();
    bytes.extend(((HEADER + body.len()) as u32).to_le_bytes());
    bytes.extend([revision, 0]);
    bytes.extend(OEM_ID);
    bytes.extend(OEM_TABLE_ID);
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(OEM_TABLE_ID.first_chunk::<4>().unwrap_or(&[0; 4]));
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(body);
    bytes[9] = checksum(&bytes);
    bytes
}

/// The byte that makes the sum of all bytes zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

/// The part of the ACPI machine language that the DSDT needs.
mod aml {
    pub(super) fn byte(value: u8) -> Vec<u8> {
        vec![0x0a, value]
    }

    pub(super) fn one() -> Vec<u8> {
        vec![0x01]
    }

    pub(super) fn dword(value: u32) -> Vec<u8> {
        let mut bytes = vec![0x0c];
        bytes.extend(value.to_le_bytes());
        bytes
    }

    pub(super) fn string(text: &str) -> Vec<u8> {
        let mut bytes = vec![0x0d];
        bytes.extend(text.as_bytes());
        bytes.push(0);
        bytes
    }

    pub(super) fn name(name: &[u8; 4], value: &[u8]) -> Vec<u8> {
        [&[0x08], name.as_slice(), value].concat()
    }

    pub(super) fn scope(path: &[u8], body: &[u8]) -> Vec<u8> {
        sized(&[0x10], &[path, body].concat())
    }

    pub(super) fn device(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
        sized(&[0x5b, 0x82], &[name.as_slice(), body].concat())
    }

    pub(super) fn package(elements: &[Vec<u8>]) -> Vec<u8> {
        sized(&[0x12], &[vec![elements.len() as u8], elements.concat()].concat())
    }

    /// A method of one argument that no two run at once.
    pub(super) fn method_of_one(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
        sized(&[0x14], &[name.as_slice(), &[1 | 1 << 3], body].concat())
    }

    /// `If (Arg0 == value) { body }`.
    pub(super) fn if_argument_is(value: u8, body: &[u8]) -> Vec<u8> {
        sized(&[0xa0], &[&[0x93, 0x68], byte(value).as_slice(), body].concat())
    }

    pub(super) fn notify(device: &[u8; 4], value: u8) -> Vec<u8> {
        [&[0x86], device.as_slice(), &byte(value)].concat()
    }

    /// A buffer of resource descriptors with its end tag (a checksum of 0 is "not checked").
    pub(super) fn resources(descriptors: &[u8]) -> Vec<u8> {
        let content = [descriptors, &[0x79, 0]].concat();
        sized(&[0x11], &[byte(content.len() as u8), content].concat())
    }

    /// Opcode, package length, body. The length counts its own bytes: one below 64, two below 4 KiB, else three.
    fn sized(opcode: &[u8], body: &[u8]) -> Vec<u8> {
        let mut bytes = opcode.to_vec();
        match body.len() {
            n if n + 1 < 1 << 6 => bytes.push(n as u8 + 1),
            n if n + 2 < 1 << 12 => bytes.extend([0x40 | (n + 2) as u8 & 15, ((n + 2) >> 4) as u8]),
            n => bytes.extend([0x80 | (n + 3) as u8 & 15, ((n + 3) >> 4) as u8, ((n + 3) >> 12) as u8]),
        }
        bytes.extend(body);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    /// Follows the pointers as a kernel does and returns each table by its signature.
    fn walk(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
        let at = |address: u64| (address - layout::RSDP) as usize;
        let read = |offset: usize| {
            let length = u32::from_le_bytes(bytes[offset + 4..offset + 8].try_into().unwrap()) as usize;
            let table = bytes[offset..offset + length].to_vec();
            assert_eq!(sum(&table), 0);
            (String::from_utf8(table[..4].to_vec()).unwrap(), table)
        };
        assert_eq!(&bytes[..8], b"RSD PTR ");
        assert_eq!(sum(&bytes[..20]), 0);
        assert_eq!(sum(&bytes[..36]), 0);
        let xsdt = read(at(u64::from_le_bytes(bytes[24..32].try_into().unwrap())));
        let mut found: Vec<_> =
            xsdt.1[36..].chunks(8).map(|pointer| read(at(u64::from_le_bytes(pointer.try_into().unwrap())))).collect();
        let fadt = found.iter().find(|(name, _)| name == "FACP").unwrap().1.clone();
        assert_eq!(fadt.len(), 276);
        found.push(read(at(u64::from_le_bytes(fadt[140..148].try_into().unwrap()))));
        found
    }

    #[test]
    fn every_table_is_reached_and_sums_to_zero() {
        for vcpus in [1, 32] {
            let tables = Tables { vcpus, virtio_devices: layout::MAX_VIRTIO_DEVICES, serial: true };
            let bytes = tables.to_bytes();
            assert!(layout::RSDP + (bytes.len() as u64) < layout::HIGH_MEMORY);
            let names: Vec<_> = walk(&bytes).into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, ["FACP", "APIC", "DSDT"]);
        }
    }

    #[test]
    fn a_disassembler_reads_the_dsdt() {
        let tables = Tables { vcpus: 2, virtio_devices: 3, serial: true };
        let (_, dsdt) = walk(&tables.to_bytes()).pop().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dsdt.aml");
        std::fs::write(&path, dsdt).unwrap();
        let output = std::process::Command::new("iasl")
            .arg("-d")
            .arg(&path)
            .output()
            .expect("iasl, of the package acpica-tools, disassembles the tables");
        let text = std::fs::read_to_string(path.with_extension("dsl"))
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        for expected in [
            "Device (VI02)",
            "\"LNRO0005\"",
            "0xC0003000,",
            "0x00000007,",
            "EisaId (\"PNP0501\")",
            "0x03F8,",
            "Name (_S5, Package (0x04)",
            "\"VM_Gen_Counter\"",
            "0x0009FC00,",
            "\"ACPI0013\"",
            "0x00000017,",
            "Method (_EVT, 1, Serialized)",
            "If ((Arg0 == 0x17))",
            "Notify (VGEN, 0x80)",
        ] {
            assert!(text.contains(expected), "no {expected} in:\n{text}");
        }
    }
}
