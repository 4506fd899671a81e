//! Builds a machine from what the supervisor sent.

use std::fs::File;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use kvm_bindings::{
    KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES, KVM_MEM_READONLY, kvm_cpuid_entry2, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use snapshot::disk::{DiskError, LayerFiles};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MmapRegion};
use vmm_control::{Config, MAX_CMDLINE, MAX_DISKS, MAX_INITRDS, MAX_LAYERS, MAX_VCPUS, MIN_MEMORY};
use vmm_sys_util::eventfd::EventFd;

use crate::mailbox::Mailbox;
use crate::memory::{self, Memory, MemoryError, Ram};
use crate::serial::Serial;
use crate::state::host::HostError;
use crate::state::vcpu::{CallError, msrs_to_save};
use crate::state::{Facts, StateError};
use crate::vcpu::{self, Shared};
use crate::virtio::device::Device;
use crate::virtio::mmio::{Transport, TransportError};
use crate::virtio::request::ID_LENGTH;
use crate::wiring::Wiring;
use crate::{acpi, boot, cpuid, generation, layout};

/// Most request queues of a disk.
const MAX_QUEUES: u8 = 8;

/// Why a machine could not be built.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The configuration asks for what there is not.
    #[error("{thing}: {value} is out of range: {limit}")]
    Config {
        /// Which part.
        thing: &'static str,
        /// Its value.
        value: String,
        /// What would do.
        limit: String,
    },
    /// Descriptors and configuration do not match.
    #[error("request: {0}")]
    Descriptors(&'static str),
    /// KVM cannot do what we need.
    #[error("KVM: this host's kernel lacks {0}; Linux 5.10 or later on hardware with virtualisation has it")]
    Capability(&'static str),
    /// A KVM call failed.
    #[error("KVM: {what}: {error}")]
    Kvm {
        /// The call.
        what: &'static str,
        /// Why.
        error: kvm_ioctls::Error,
    },
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Kernel and initramfs.
    #[error(transparent)]
    Boot(#[from] boot::BootError),
    /// A disk.
    #[error("disk {index}: {error}")]
    Disk {
        /// Which.
        index: usize,
        /// Why.
        error: DiskError,
    },
    /// The state file of a saved machine.
    #[error("state file: {0}")]
    State(#[from] StateError),
    /// This host cannot go on with a saved machine.
    #[error("the saved machine cannot go on here: {0}")]
    Host(#[from] HostError),
    /// KVM refused a saved vCPU.
    #[error("the saved machine cannot go on here: vCPU {vcpu}: {error}")]
    Vcpu {
        /// Which.
        vcpu: usize,
        /// What it refused.
        error: CallError,
    },
    /// A device cannot go on from what was saved.
    #[error("state file: device {index}: {error}")]
    Device {
        /// Which.
        index: usize,
        /// Why.
        error: TransportError,
    },
    /// A descriptor or a thread.
    #[error("{what}: {error}")]
    Io {
        /// What was being made.
        what: &'static str,
        /// Why.
        error: std::io::Error,
    },
}

pub(crate) fn kvm<T>(what: &'static str, result: Result<T, kvm_ioctls::Error>) -> Result<T, MachineError> {
    result.map_err(|error| MachineError::Kvm { what, error })
}

pub(crate) fn io<T>(what: &'static str, result: std::io::Result<T>) -> Result<T, MachineError> {
    result.map_err(|error| MachineError::Io { what, error })
}

/// Where the console's bytes come out, and where they go.
#[derive(Debug)]
pub struct Console {
    /// From the vCPUs.
    pub bytes: Receiver<u8>,
    /// The supervisor's file.
    pub file: File,
}

/// A machine whose vCPUs have not started.
#[derive(Debug)]
pub struct Machine {
    /// Keeps the VM, and with it every registration, alive.
    pub vm: Arc<VmFd>,
    /// One for each vCPU.
    pub vcpus: Vec<VcpuFd>,
    /// Shared by the vCPUs.
    pub shared: Arc<Shared>,
    /// The devices behind their transports: the socket device, the entropy device, the disks, the network interface.
    pub transports: Vec<Transport>,
    /// Kicks that the event loop serves, with the index of their device.
    pub kicks: Vec<(usize, EventFd)>,
    /// The serial console.
    pub console: Option<Console>,
    /// Eventfds that KVM writes and nobody reads.
    pub absorbed: Vec<EventFd>,
    /// The device index of the network interface.
    pub net: Option<usize>,
    /// What a save needs to know.
    pub made_of: MadeOf,
}

/// What a save needs to know of a machine, and what never changes while it runs.
#[derive(Debug)]
pub struct MadeOf {
    /// What it is.
    pub facts: Facts,
    /// Its memory.
    pub memory: Memory,
    /// What each vCPU was told of its processor.
    pub cpuid: Vec<Vec<kvm_cpuid_entry2>>,
    /// The model-specific registers that a save keeps.
    pub msrs: Vec<u32>,
    /// Whether the guest's time stamp counter does not run at the host's pace.
    pub scaled: bool,
}

/// The device index of the socket device.
pub const VSOCK: usize = 0;
/// The device index of the entropy device.
pub const RNG: usize = 1;
/// The device index of the first disk.
pub const FIRST_DISK: usize = 2;

/// Builds it. `descriptors` are in the order of [`vmm_control::Request::Start`].
pub fn build(config: &Config, descriptors: Vec<OwnedFd>, mailbox: &Mailbox) -> Result<Machine, MachineError> {
    let start = Instant::now();
    check(config)?;
    let mut descriptors = Descriptors(descriptors.into_iter());
    let kvm_fd = descriptors.next()?;
    let mut kernel = File::from(descriptors.next()?);
    let mut initrds = descriptors.files(config.initrds)?;
    let parts = Parts::take(config, descriptors)?;
    let (kvm_fd, vm) = create_vm(kvm_fd)?;
    let board = Board::assemble(config, Arc::new(vm), memory::fresh(config.memory)?, parts, mailbox)?;
    let tables = acpi::Tables { vcpus: config.vcpus, virtio_devices: board.transports.len(), serial: config.console };
    let entry = boot::load(&board.memory.ram, config.memory, &mut kernel, &mut initrds, &config.cmdline, tables)?;
    io("generation id", generation::renew(&board.memory.ram))?;

    let supported = kvm("KVM_GET_SUPPORTED_CPUID", kvm_fd.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES))?;
    let (mut vcpus, mut tables) = (Vec::new(), Vec::new());
    for id in 0..config.vcpus {
        let vcpu = kvm("KVM_CREATE_VCPU", board.vm.create_vcpu(u64::from(id)))?;
        let table = cpuid::for_vcpu(supported.as_slice(), id, config.vcpus);
        kvm("vCPU registers", vcpu::configure(&vcpu, &table, id, entry))?;
        vcpus.push(vcpu);
        tables.push(table);
    }
    let msrs = msrs_to_save(kvm("KVM_GET_MSR_INDEX_LIST", kvm_fd.get_msr_index_list())?.as_slice());
    Ok(board.finish(config, start, Processors { vcpus, tables, msrs, scaled: false }))
}

/// The vCPUs of a machine, and what a save has to know of them.
pub(crate) struct Processors {
    pub(crate) vcpus: Vec<VcpuFd>,
    pub(crate) tables: Vec<Vec<kvm_cpuid_entry2>>,
    pub(crate) msrs: Vec<u32>,
    pub(crate) scaled: bool,
}

/// A machine without vCPUs.
pub(crate) struct Board {
    pub(crate) vm: Arc<VmFd>,
    pub(crate) memory: Memory,
    pub(crate) transports: Vec<Transport>,
    pub(crate) serial: Option<Serial>,
    kicks: Vec<(usize, EventFd)>,
    absorbed: Vec<EventFd>,
    console: Option<Console>,
    net: Option<usize>,
}

impl Board {
    pub(crate) fn assemble(
        config: &Config,
        vm: Arc<VmFd>,
        memory: Memory,
        parts: Parts,
        mailbox: &Mailbox,
    ) -> Result<Self, MachineError> {
        let devices = FIRST_DISK.saturating_add(config.disks.len()).saturating_add(usize::from(config.net.is_some()));
        let pages = Arc::new(memory::device_pages(devices.saturating_mul(layout::VIRTIO_PAGE))?);
        map_memory(&vm, &memory.ram, &pages)?;
        let mut wiring = Wiring {
            vm: &vm,
            ram: &memory.ram,
            pages: &pages,
            transports: Vec::new(),
            kicks: Vec::new(),
            absorbed: Vec::new(),
        };
        wiring.absorb_ports()?;
        wiring.add_vsock()?;
        wiring.add_rng()?;
        for (index, (disk, layers)) in config.disks.iter().zip(parts.disks).enumerate() {
            wiring.add_disk(index, disk, layers, mailbox)?;
        }
        let net = config.net.zip(parts.frames).map(|(net, frames)| wiring.add_net(net.mac, frames)).transpose()?;
        let Wiring { transports, kicks, absorbed, .. } = wiring;
        let (serial, console) = match parts.console {
            Some(file) => {
                // A pipe whose reader is stuck must not stop the event loop.
                let nonblocking = rustix::fs::fcntl_getfl(&file)
                    .and_then(|flags| rustix::fs::fcntl_setfl(&file, flags | rustix::fs::OFlags::NONBLOCK));
                io("console file", nonblocking.map_err(std::io::Error::from))?;
                let interrupt = io("console interrupt", EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC))?;
                kvm("KVM_IRQFD of the console", vm.register_irqfd(&interrupt, layout::SERIAL_GSI))?;
                let (serial, bytes) = Serial::new(interrupt);
                (Some(serial), Some(Console { bytes, file }))
            }
            None => (None, None),
        };
        Ok(Self { vm, memory, transports, serial, kicks, absorbed, console, net })
    }

    /// What the machine is.
    pub(crate) fn facts(&self, config: &Config) -> Facts {
        let size = |transport: &Transport| match &transport.device {
            Device::Block(block) => Some(block.size()),
            _ => None,
        };
        Facts::of(config, &self.transports.iter().filter_map(size).collect::<Vec<_>>())
    }

    pub(crate) fn finish(self, config: &Config, start: Instant, processors: Processors) -> Machine {
        let facts = self.facts(config);
        let Processors { vcpus, tables: cpuid, msrs, scaled } = processors;
        let shared = Arc::new(Shared::new(self.transports.len(), self.serial, start));
        Machine {
            vm: self.vm,
            vcpus,
            shared,
            transports: self.transports,
            kicks: self.kicks,
            console: self.console,
            absorbed: self.absorbed,
            net: self.net,
            made_of: MadeOf { facts, memory: self.memory, cpuid, msrs, scaled },
        }
    }
}

pub(crate) fn check(config: &Config) -> Result<(), MachineError> {
    let out = |thing, value: String, limit: String| Err(MachineError::Config { thing, value, limit });
    if !(1..=MAX_VCPUS).contains(&config.vcpus) {
        return out("cpus", config.vcpus.to_string(), format!("1 to {MAX_VCPUS}"));
    }
    if config.memory < MIN_MEMORY || !config.memory.is_multiple_of(4096) {
        let limit = format!("at least {MIN_MEMORY} bytes, in whole pages of 4 KiB");
        return out("memory", config.memory.to_string(), limit);
    }
    if config.cmdline.len() > MAX_CMDLINE || config.cmdline.contains('\0') {
        let limit = format!("at most {MAX_CMDLINE} bytes without NUL");
        return out("kernel command line", format!("{} bytes", config.cmdline.len()), limit);
    }
    if usize::from(config.initrds) > MAX_INITRDS {
        return out("initramfs archives", config.initrds.to_string(), format!("at most {MAX_INITRDS}"));
    }
    if config.disks.len() > MAX_DISKS {
        return out("disks", config.disks.len().to_string(), format!("at most {MAX_DISKS}"));
    }
    for disk in &config.disks {
        if !(1..=MAX_LAYERS).contains(&usize::from(disk.layers)) {
            return out("disk layers", disk.layers.to_string(), format!("1 to {MAX_LAYERS}"));
        }
        if !(1..=MAX_QUEUES).contains(&disk.queues) {
            return out("disk queues", disk.queues.to_string(), format!("1 to {MAX_QUEUES}"));
        }
        if disk.serial.len() > ID_LENGTH || !disk.serial.is_ascii() {
            return out("disk serial", disk.serial.clone(), format!("at most {ID_LENGTH} ASCII bytes"));
        }
    }
    Ok(())
}

/// The descriptors of a request, in their order.
pub(crate) struct Descriptors(pub(crate) std::vec::IntoIter<OwnedFd>);

impl Descriptors {
    pub(crate) fn next(&mut self) -> Result<OwnedFd, MachineError> {
        self.0.next().ok_or(MachineError::Descriptors("fewer descriptors than parts"))
    }

    pub(crate) fn files(&mut self, count: u8) -> Result<Vec<File>, MachineError> {
        (0..count).map(|_| self.next().map(File::from)).collect()
    }
}

/// What every machine is made of, each descriptor in its place.
pub(crate) struct Parts {
    disks: Vec<Vec<LayerFiles>>,
    console: Option<File>,
    frames: Option<OwnedFd>,
}

impl Parts {
    /// Takes all that are left.
    pub(crate) fn take(config: &Config, mut descriptors: Descriptors) -> Result<Self, MachineError> {
        let mut disks = Vec::new();
        for disk in &config.disks {
            let mut layers = Vec::new();
            for layer in 0..disk.layers {
                let data = File::from(descriptors.next()?);
                let raw = layer == 0 && disk.raw_base;
                let map = if raw { None } else { Some(File::from(descriptors.next()?)) };
                layers.push(LayerFiles { data, map });
            }
            disks.push(layers);
        }
        let console = if config.console { Some(File::from(descriptors.next()?)) } else { None };
        let frames = if config.net.is_some() { Some(descriptors.next()?) } else { None };
        if descriptors.next().is_ok() {
            return Err(MachineError::Descriptors("more descriptors than parts"));
        }
        Ok(Self { disks, console, frames })
    }
}

pub(crate) fn create_vm(fd: OwnedFd) -> Result<(Kvm, VmFd), MachineError> {
    // SAFETY: the descriptor is owned and given up here. If it is not KVM's, each call on it fails.
    let kvm_fd = unsafe { <Kvm as std::os::fd::FromRawFd>::from_raw_fd(fd.into_raw_fd()) };
    if u32::try_from(kvm_fd.get_api_version()) != Ok(KVM_API_VERSION) {
        return Err(MachineError::Capability("the KVM interface, version 12 (is the descriptor /dev/kvm?)"));
    }
    for (capability, name) in [
        (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
        (Cap::Irqfd, "KVM_CAP_IRQFD"),
        (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::ReadonlyMem, "KVM_CAP_READONLY_MEM"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        (Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER"),
    ] {
        if !kvm_fd.check_extension(capability) {
            return Err(MachineError::Capability(name));
        }
    }
    // A signal can interrupt the creation of a VM (Firecracker issue 5046).
    let mut tries = 0;
    let vm = loop {
        match kvm_fd.create_vm() {
            Err(error) if error.errno() == libc::EINTR && tries < 5 => tries += 1,
            other => break kvm("KVM_CREATE_VM", other)?,
        }
    };
    kvm("KVM_SET_TSS_ADDR", vm.set_tss_address(layout::TSS))?;
    kvm("KVM_CREATE_IRQCHIP", vm.create_irq_chip())?;
    Ok((kvm_fd, vm))
}

fn map_memory(vm: &VmFd, ram: &Ram, pages: &MmapRegion<()>) -> Result<(), MachineError> {
    let mut slot = 0;
    let mut map = |guest_phys_addr, memory_size, host: *mut u8, flags| {
        let region =
            kvm_userspace_memory_region { slot, flags, guest_phys_addr, memory_size, userspace_addr: host as u64 };
        slot += 1;
        // SAFETY: the range is mapped, and stays so for the life of the process (see `memory`).
        kvm("KVM_SET_USER_MEMORY_REGION", unsafe { vm.set_user_memory_region(region) })
    };
    for region in ram.iter() {
        map(region.start_addr().0, region.len(), region.as_ptr(), 0)?;
    }
    map(layout::VIRTIO_BASE, pages.size() as u64, pages.as_ptr(), KVM_MEM_READONLY)
}
