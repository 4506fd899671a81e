//! Builds a machine from what the supervisor sent.

use std::fs::File;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use kvm_bindings::{KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES, KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, NoDatamatch, VcpuFd, VmFd};
use snapshot::disk::{Disk, DiskError, LayerFiles};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MmapRegion};
use vmm_control::{Config, MAX_CMDLINE, MAX_DISKS, MAX_INITRDS, MAX_LAYERS, MAX_VCPUS, MIN_MEMORY};
use vmm_sys_util::eventfd::EventFd;

use crate::interrupt::Pin;
use crate::mailbox::Mailbox;
use crate::memory::{self, MemoryError, Ram};
use crate::serial::Serial;
use crate::vcpu::{self, Shared};
use crate::virtio::block::{Backing, Block, Counters};
use crate::virtio::device::Device;
use crate::virtio::mmio::{INTERRUPT_ACK, QUEUE_NOTIFY, RegisterPage, Transport};
use crate::virtio::net::Net;
use crate::virtio::request::ID_LENGTH;
use crate::virtio::rng::Rng;
use crate::virtio::vsock::VsockDevice;
use crate::{acpi, boot, layout};

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
    #[error("start request: {0}")]
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
    /// A descriptor or a thread.
    #[error("{what}: {error}")]
    Io {
        /// What was being made.
        what: &'static str,
        /// Why.
        error: std::io::Error,
    },
}

fn kvm<T>(what: &'static str, result: Result<T, kvm_ioctls::Error>) -> Result<T, MachineError> {
    result.map_err(|error| MachineError::Kvm { what, error })
}

fn io<T>(what: &'static str, result: std::io::Result<T>) -> Result<T, MachineError> {
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
    let mut parts = Parts::take(config, descriptors)?;
    let (kvm_fd, vm) = create_vm(parts.kvm)?;
    let vm = Arc::new(vm);
    let ram = memory::guest_ram(config.memory)?;
    let devices = FIRST_DISK.saturating_add(config.disks.len()).saturating_add(usize::from(config.net.is_some()));
    let pages = Arc::new(memory::device_pages(devices.saturating_mul(layout::VIRTIO_PAGE))?);
    map_memory(&vm, &ram, &pages)?;

    let entry = boot::load(
        &ram,
        config.memory,
        &mut parts.kernel,
        &mut parts.initrds,
        &config.cmdline,
        acpi::Tables { vcpus: config.vcpus, virtio_devices: devices, serial: config.console },
    )?;

    let mut wiring =
        Wiring { vm: &vm, ram: &ram, pages: &pages, transports: Vec::new(), kicks: Vec::new(), absorbed: Vec::new() };
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

    let supported = kvm("KVM_GET_SUPPORTED_CPUID", kvm_fd.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES))?;
    let mut vcpus = Vec::new();
    for id in 0..config.vcpus {
        let vcpu = kvm("KVM_CREATE_VCPU", vm.create_vcpu(u64::from(id)))?;
        kvm("vCPU registers", vcpu::configure(&vcpu, supported.as_slice(), id, config.vcpus, entry))?;
        vcpus.push(vcpu);
    }
    let shared = Arc::new(Shared::new(devices, serial, start));
    Ok(Machine { vm, vcpus, shared, transports, kicks, console, absorbed, net, scaled: false })
}

fn check(config: &Config) -> Result<(), MachineError> {
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

/// The descriptors of a start request, each in its place.
struct Parts {
    kvm: OwnedFd,
    kernel: File,
    initrds: Vec<File>,
    disks: Vec<Vec<LayerFiles>>,
    console: Option<File>,
    frames: Option<OwnedFd>,
}

impl Parts {
    fn take(config: &Config, descriptors: Vec<OwnedFd>) -> Result<Self, MachineError> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or(MachineError::Descriptors("fewer descriptors than parts"));
        let kvm = next()?;
        let kernel = File::from(next()?);
        let initrds = (0..config.initrds).map(|_| next().map(File::from)).collect::<Result<_, _>>()?;
        let mut disks = Vec::new();
        for disk in &config.disks {
            let mut layers = Vec::new();
            for layer in 0..disk.layers {
                let data = File::from(next()?);
                let map = if layer == 0 && disk.raw_base { None } else { Some(File::from(next()?)) };
                layers.push(LayerFiles { data, map });
            }
            disks.push(layers);
        }
        let console = if config.console { Some(File::from(next()?)) } else { None };
        let frames = if config.net.is_some() { Some(next()?) } else { None };
        if descriptors.next().is_some() {
            return Err(MachineError::Descriptors("more descriptors than parts"));
        }
        Ok(Self { kvm, kernel, initrds, disks, console, frames })
    }
}

fn create_vm(fd: OwnedFd) -> Result<(Kvm, VmFd), MachineError> {
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

/// Puts devices into the machine: register page, interrupt, kicks.
struct Wiring<'a> {
    vm: &'a Arc<VmFd>,
    ram: &'a Ram,
    pages: &'a Arc<MmapRegion<()>>,
    transports: Vec<Transport>,
    kicks: Vec<(usize, EventFd)>,
    absorbed: Vec<EventFd>,
}

impl Wiring<'_> {
    /// Lets KVM itself take writes to ports that every kernel tries and where nothing is: no exit to user space.
    fn absorb_ports(&mut self) -> Result<(), MachineError> {
        for port in [layout::CMOS_INDEX_PORT, layout::CMOS_DATA_PORT, layout::PCI_INDEX_PORT] {
            self.absorb(IoEventAddress::Pio(u64::from(port)))?;
        }
        Ok(())
    }

    fn absorb(&mut self, address: IoEventAddress) -> Result<(), MachineError> {
        let unread = io("eventfd", EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC))?;
        kvm("KVM_IOEVENTFD", self.vm.register_ioevent(&unread, &address, NoDatamatch))?;
        self.absorbed.push(unread);
        Ok(())
    }

    fn add_vsock(&mut self) -> Result<(), MachineError> {
        let interrupt = self.interrupt()?;
        let kicks = self.loop_kicks(VsockDevice::QUEUES)?;
        let device = io("vsock device", VsockDevice::new(self.ram.clone(), interrupt, kicks))?;
        self.add(Device::Vsock(device))
    }

    fn add_rng(&mut self) -> Result<(), MachineError> {
        let interrupt = self.interrupt()?;
        let mut kicks = self.loop_kicks(1)?;
        let kick = kicks.pop().ok_or(MachineError::Descriptors("no kick"))?;
        self.add(Device::Rng(Rng::new(self.ram.clone(), interrupt, kick)))
    }

    fn add_disk(
        &mut self,
        index: usize,
        config: &vmm_control::Disk,
        layers: Vec<LayerFiles>,
        mailbox: &Mailbox,
    ) -> Result<(), MachineError> {
        let disk = Disk::open(layers, config.read_only).map_err(|error| MachineError::Disk { index, error })?;
        let mut id = [0; ID_LENGTH];
        for (to, from) in id.iter_mut().zip(config.serial.bytes()) {
            *to = from;
        }
        let backing = Backing {
            disk: Arc::new(disk),
            device: self.transports.len(),
            index: u8::try_from(index).unwrap_or(u8::MAX),
            id,
            ram: self.ram.clone(),
            interrupt: Arc::new(Pin::new(self.vm.clone(), self.gsi())),
            mailbox: mailbox.clone(),
            counters: Arc::new(Counters::default()),
        };
        let kicks = self.kicks(usize::from(config.queues), 0)?;
        let block = io("disk thread", Block::new(backing, config.read_only, kicks))?;
        self.add(Device::Block(block))
    }

    fn add_net(&mut self, mac: [u8; 6], frames: OwnedFd) -> Result<usize, MachineError> {
        let index = self.transports.len();
        let interrupt = self.interrupt()?;
        let kicks = self.loop_kicks(Net::QUEUES)?;
        self.add(Device::Net(Net::new(self.ram.clone(), interrupt, kicks, mac, frames)))?;
        Ok(index)
    }

    fn add(&mut self, device: Device) -> Result<(), MachineError> {
        let index = self.transports.len();
        self.absorb(IoEventAddress::Mmio(self.window().saturating_add(INTERRUPT_ACK)))?;
        let page = RegisterPage::new(self.pages.clone(), index);
        self.transports.push(Transport::new(device, page, self.ram.clone()));
        Ok(())
    }

    /// The window of the device that is being added.
    fn window(&self) -> u64 {
        (self.transports.len() as u64).saturating_mul(layout::VIRTIO_WINDOW).saturating_add(layout::VIRTIO_BASE)
    }

    /// The pin of the device that is being added.
    fn gsi(&self) -> u32 {
        layout::VIRTIO_GSI.saturating_add(u32::try_from(self.transports.len()).unwrap_or(u32::MAX))
    }

    fn interrupt(&self) -> Result<EventFd, MachineError> {
        let interrupt = io("eventfd", EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC))?;
        kvm("KVM_IRQFD", self.vm.register_irqfd(&interrupt, self.gsi()))?;
        Ok(interrupt)
    }

    /// One eventfd for each queue, which KVM writes when the guest kicks it.
    fn kicks(&self, queues: usize, flags: i32) -> Result<Vec<EventFd>, MachineError> {
        let address = IoEventAddress::Mmio(self.window().saturating_add(QUEUE_NOTIFY));
        let mut kicks = Vec::new();
        for queue in 0..queues {
            let kick = io("eventfd", EventFd::new(libc::EFD_CLOEXEC | flags))?;
            let number = u32::try_from(queue).unwrap_or(u32::MAX);
            kvm("KVM_IOEVENTFD", self.vm.register_ioevent(&kick, &address, number))?;
            kicks.push(kick);
        }
        Ok(kicks)
    }

    /// Kicks that the event loop waits for as well.
    fn loop_kicks(&mut self, queues: usize) -> Result<Vec<EventFd>, MachineError> {
        let kicks = self.kicks(queues, libc::EFD_NONBLOCK)?;
        for kick in &kicks {
            self.kicks.push((self.transports.len(), io("eventfd", kick.try_clone())?));
        }
        Ok(kicks)
    }
}
