//! What is kept of a machine beside its memory and its disks: `docs/formats/machine-state.md`.
//!
//! A state file is hostile when it is read. It is bounded before it is parsed; every count and every value is checked here, by the
//! transports or by KVM; and that it is the machine that the supervisor asks for is checked against the request.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod bytes;
pub mod host;
mod plain;
#[cfg(test)]
mod tests;
pub mod vcpu;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use kvm_bindings::kvm_irqchip;
use virtio_queue::QueueState;
use vmm_control::{Config, MAX_DISKS, MAX_VCPUS};

use crate::clock::Stopped;
use crate::layout::MAX_VIRTIO_DEVICES;
use crate::virtio::mmio::TransportState;
use crate::vsock::State as VsockState;
use bytes::{Reader, Writer};
use vcpu::VcpuState;

/// Most bytes of a state file. 32 vCPUs need a third of it.
pub const MAX_STATE: u64 = 1 << 20;
const MAGIC: [u8; 8] = *b"BHKSTATE";
const VERSION: u32 = 1;
/// Magic, version, length of the body.
const HEADER: usize = 16;
/// Most queues of a device.
const MAX_QUEUES: usize = 8;
/// The interrupt controllers of KVM: two 8259 and the I/O APIC.
pub const CHIPS: u32 = 3;

/// Why a state file is not one that can be gone on from.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
    /// It is longer than any state.
    #[error("it has {0} bytes, and the largest has {MAX_STATE}")]
    TooLarge(u64),
    /// It is something else.
    #[error("it is no machine state")]
    Magic,
    /// It is of another version.
    #[error("it has format version {0}, and this VMM reads version {VERSION}: use the version that saved it")]
    Version(u32),
    /// It is cut short, or something follows it.
    #[error("it has {found} bytes, and says that it has {expected}")]
    Length {
        /// How many there are.
        found: u64,
        /// How many there should be.
        expected: u64,
    },
    /// A section ends before its last field.
    #[error("its section {section} is too short")]
    Short {
        /// Which.
        section: String,
    },
    /// A section is longer than its fields.
    #[error("its section {section} has more than it should")]
    Trailing {
        /// Which.
        section: String,
    },
    /// A section is not where it belongs.
    #[error("it has section {found} where {expected} belongs")]
    Section {
        /// Which belongs there.
        expected: String,
        /// Which is there.
        found: String,
    },
    /// A value that no machine has.
    #[error("it says {what} {value}, which no machine has")]
    Value {
        /// Of what.
        what: &'static str,
        /// The value.
        value: u64,
    },
    /// The machine that was saved is not the one that was asked for.
    #[error("it was saved with {what} {saved}, and asked for is {asked}")]
    Differs {
        /// Of what.
        what: String,
        /// In the state.
        saved: String,
        /// In the request.
        asked: String,
    },
}

/// What a machine is, as far as it never changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Bytes of memory.
    pub memory: u64,
    /// Its disks.
    pub disks: Vec<DiskFacts>,
    /// Whether it has a serial console.
    pub console: bool,
    /// The address of its network interface.
    pub mac: Option<[u8; 6]>,
}

/// What a disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskFacts {
    /// Bytes.
    pub size: u64,
    /// Queues.
    pub queues: u8,
    /// Whether it takes no changes.
    pub read_only: bool,
}

impl Facts {
    /// Of the machine that is asked for, whose disks have these sizes.
    pub fn of(config: &Config, sizes: &[u64]) -> Self {
        let disk = |(disk, size): (&vmm_control::Disk, &u64)| DiskFacts {
            size: *size,
            queues: disk.queues,
            read_only: disk.read_only,
        };
        Self {
            vcpus: config.vcpus,
            memory: config.memory,
            disks: config.disks.iter().zip(sizes).map(disk).collect(),
            console: config.console,
            mac: config.net.map(|net| net.mac),
        }
    }

    /// Refuses a machine that is not this one, and says in what.
    pub fn check(&self, asked: &Self) -> Result<(), StateError> {
        fn same<T: PartialEq + std::fmt::Debug>(what: String, saved: &T, asked: &T) -> Result<(), StateError> {
            if saved == asked {
                return Ok(());
            }
            Err(StateError::Differs { what, saved: format!("{saved:?}"), asked: format!("{asked:?}") })
        }
        same("cpus".into(), &self.vcpus, &asked.vcpus)?;
        same("memory of".into(), &self.memory, &asked.memory)?;
        same("disks:".into(), &self.disks.len(), &asked.disks.len())?;
        for (index, (saved, asked)) in self.disks.iter().zip(&asked.disks).enumerate() {
            same(format!("disk {index} of bytes"), &saved.size, &asked.size)?;
            same(format!("queues of disk {index}:"), &saved.queues, &asked.queues)?;
            same(format!("disk {index} read-only:"), &saved.read_only, &asked.read_only)?;
        }
        same("console:".into(), &self.console, &asked.console)?;
        same("hardware address".into(), &self.mac, &asked.mac)
    }

    fn write(&self, to: &mut Writer) {
        to.u8(self.vcpus);
        to.u64(self.memory);
        to.u16(u16::try_from(self.disks.len()).unwrap_or(u16::MAX));
        for disk in &self.disks {
            to.u64(disk.size);
            to.u8(disk.queues);
            to.u8(disk.read_only.into());
        }
        to.u8(self.console.into());
        to.u8(self.mac.is_some().into());
        to.bytes(&self.mac.unwrap_or_default());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, StateError> {
        let vcpus = from.u8()?;
        if !(1..=MAX_VCPUS).contains(&vcpus) {
            return Err(StateError::Value { what: "cpus:", value: vcpus.into() });
        }
        let memory = from.u64()?;
        let disks = from.count("disks:", MAX_DISKS)?;
        let disk = |_| {
            Ok(DiskFacts { size: from.u64()?, queues: from.u8()?, read_only: from.flag("that a disk is read-only:")? })
        };
        let disks = (0..disks).map(disk).collect::<Result<_, StateError>>()?;
        let console = from.flag("that there is a console:")?;
        let has_net = from.flag("that there is a network interface:")?;
        let mac = from.bytes(6)?.try_into().ok().filter(|_| has_net);
        Ok(Self { vcpus, memory, disks, console, mac })
    }
}

/// A transport, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState {
    /// The virtio id of the device.
    pub id: u32,
    /// Its transport.
    pub transport: TransportState,
}

impl DeviceState {
    fn write(&self, to: &mut Writer) {
        let TransportState { status, device_features_sel, driver_features_sel, driver_features, queue_sel, .. } =
            self.transport;
        for word in [self.id, status, device_features_sel, driver_features_sel, queue_sel, self.transport.served] {
            to.u32(word);
        }
        to.u64(driver_features);
        to.u16(u16::try_from(self.transport.queues.len()).unwrap_or(u16::MAX));
        for queue in &self.transport.queues {
            for half in [queue.max_size, queue.size, queue.next_avail, queue.next_used] {
                to.u16(half);
            }
            to.u8(queue.ready.into());
            for word in [queue.desc_table, queue.avail_ring, queue.used_ring] {
                to.u64(word);
            }
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, StateError> {
        let id = from.u32()?;
        let (status, device_features_sel, driver_features_sel) = (from.u32()?, from.u32()?, from.u32()?);
        let (queue_sel, served, driver_features) = (from.u32()?, from.u32()?, from.u64()?);
        let count = from.count("queues:", MAX_QUEUES)?;
        let queue = |_| {
            Ok(QueueState {
                max_size: from.u16()?,
                size: from.u16()?,
                next_avail: from.u16()?,
                next_used: from.u16()?,
                ready: from.flag("that a queue is ready:")?,
                desc_table: from.u64()?,
                avail_ring: from.u64()?,
                used_ring: from.u64()?,
                event_idx_enabled: false,
            })
        };
        let queues = (0..count).map(queue).collect::<Result<_, StateError>>()?;
        let transport = TransportState {
            status,
            device_features_sel,
            driver_features_sel,
            driver_features,
            queue_sel,
            queues,
            served,
        };
        Ok(Self { id, transport })
    }
}

/// Everything.
#[derive(Debug)]
pub struct MachineState {
    /// What the machine is.
    pub facts: Facts,
    /// Its vCPUs.
    pub vcpus: Vec<VcpuState>,
    /// KVM's interrupt controllers, in the order of their ids.
    pub chips: Vec<kvm_irqchip>,
    /// Its clocks.
    pub clock: Stopped,
    /// Its devices, in the order of their windows.
    pub devices: Vec<DeviceState>,
    /// What the socket device keeps beside its queues.
    pub vsock: VsockState,
    /// The registers of the serial console, if there is one.
    pub serial: Option<[u8; 6]>,
}

impl MachineState {
    /// The whole file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut body = Writer::default();
        body.section(*b"MACH", |to| self.facts.write(to));
        for vcpu in &self.vcpus {
            body.section(*b"VCPU", |to| vcpu.write(to));
        }
        body.section(*b"CHIP", |to| self.chips.iter().for_each(|chip| to.plain(chip)));
        body.section(*b"CLCK", |to| {
            to.u64(self.clock.clock);
            to.u16(u16::try_from(self.clock.counters.len()).unwrap_or(u16::MAX));
            self.clock.counters.iter().for_each(|counter| to.u64(*counter));
        });
        body.section(*b"DEVS", |to| {
            to.u16(u16::try_from(self.devices.len()).unwrap_or(u16::MAX));
            self.devices.iter().for_each(|device| device.write(to));
        });
        body.section(*b"VSCK", |to| {
            to.u32(self.vsock.next_host_port);
            to.u8(self.vsock.reset_owed.into());
        });
        if let Some(registers) = &self.serial {
            body.section(*b"UART", |to| to.bytes(registers));
        }
        let body = body.into_bytes();
        let mut file = Writer::default();
        file.bytes(&MAGIC);
        file.u32(VERSION);
        file.u32(u32::try_from(body.len()).unwrap_or(u32::MAX));
        file.bytes(&body);
        file.into_bytes()
    }

    /// Reads a file, once, and parses what was read.
    pub fn read(file: &File) -> Result<Self, StateError> {
        let length = file.metadata()?.len();
        if length > MAX_STATE {
            return Err(StateError::TooLarge(length));
        }
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        file.read_exact_at(&mut bytes, 0)?;
        Self::from_bytes(&bytes)
    }

    /// Parses a file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, StateError> {
        let found = bytes.len() as u64;
        if found > MAX_STATE {
            return Err(StateError::TooLarge(found));
        }
        let mut file = Reader::new(*b"file", bytes);
        if file.bytes(MAGIC.len()).map_err(|_| StateError::Magic)? != MAGIC {
            return Err(StateError::Magic);
        }
        let version = file.u32()?;
        if version != VERSION {
            return Err(StateError::Version(version));
        }
        let expected = u64::from(file.u32()?).saturating_add(HEADER as u64);
        if found != expected {
            return Err(StateError::Length { found, expected });
        }
        let facts = file.section(*b"MACH", Facts::read)?;
        let vcpus = (0..facts.vcpus).map(|_| file.section(*b"VCPU", VcpuState::read)).collect::<Result<_, _>>()?;
        let chips = file.section(*b"CHIP", |from| (0..CHIPS).map(|id| chip(id, from)).collect::<Result<_, _>>())?;
        let clock = file.section(*b"CLCK", |from| {
            let clock = from.u64()?;
            let count = from.count("time stamp counters:", MAX_VCPUS.into())?;
            let counters = (0..count).map(|_| from.u64()).collect::<Result<_, _>>()?;
            Ok(Stopped { clock, counters })
        })?;
        let devices = file.section(*b"DEVS", |from| {
            let count = from.count("devices:", MAX_VIRTIO_DEVICES)?;
            (0..count).map(|_| DeviceState::read(from)).collect::<Result<_, _>>()
        })?;
        let vsock = file.section(*b"VSCK", |from| {
            Ok(VsockState { next_host_port: from.u32()?, reset_owed: from.flag("that a reset is owed:")? })
        })?;
        let serial = if facts.console {
            file.section(*b"UART", |from| from.bytes(6).map(|bytes| bytes.try_into().ok()))?
        } else {
            None
        };
        file.end()?;
        Ok(Self { facts, vcpus, chips, clock, devices, vsock, serial })
    }
}

fn chip(id: u32, from: &mut Reader<'_>) -> Result<kvm_irqchip, StateError> {
    let chip: kvm_irqchip = from.plain()?;
    if chip.chip_id == id {
        Ok(chip)
    } else {
        Err(StateError::Value { what: "interrupt controller", value: chip.chip_id.into() })
    }
}
