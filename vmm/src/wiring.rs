//! Puts devices into a machine: register page, interrupt, kicks.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use snapshot::disk::{Disk, LayerFiles};
use vm_memory::MmapRegion;
use vmm_sys_util::eventfd::EventFd;

use crate::interrupt::Pin;
use crate::layout;
use crate::machine::{MachineError, io, kvm};
use crate::mailbox::Mailbox;
use crate::memory::Ram;
use crate::virtio::block::{Backing, Block, Counters};
use crate::virtio::device::Device;
use crate::virtio::mmio::{INTERRUPT_ACK, QUEUE_NOTIFY, RegisterPage, Transport};
use crate::virtio::net::Net;
use crate::virtio::request::ID_LENGTH;
use crate::virtio::rng::Rng;
use crate::virtio::vsock::VsockDevice;

/// What has been put in so far.
pub(crate) struct Wiring<'a> {
    pub(crate) vm: &'a Arc<VmFd>,
    pub(crate) ram: &'a Ram,
    pub(crate) pages: &'a Arc<MmapRegion<()>>,
    pub(crate) transports: Vec<Transport>,
    pub(crate) kicks: Vec<(usize, EventFd)>,
    pub(crate) absorbed: Vec<EventFd>,
}

impl Wiring<'_> {
    /// Lets KVM itself take writes to ports that every kernel tries and where nothing is: no exit to user space.
    pub(crate) fn absorb_ports(&mut self) -> Result<(), MachineError> {
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

    pub(crate) fn add_vsock(&mut self) -> Result<(), MachineError> {
        let interrupt = self.interrupt()?;
        let kicks = self.loop_kicks(VsockDevice::QUEUES)?;
        let device = io("vsock device", VsockDevice::new(self.ram.clone(), interrupt, kicks))?;
        self.add(Device::Vsock(device))
    }

    pub(crate) fn add_rng(&mut self) -> Result<(), MachineError> {
        let interrupt = self.interrupt()?;
        let mut kicks = self.loop_kicks(1)?;
        let kick = kicks.pop().ok_or(MachineError::Descriptors("no kick"))?;
        self.add(Device::Rng(Rng::new(self.ram.clone(), interrupt, kick)))
    }

    pub(crate) fn add_disk(
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

    pub(crate) fn add_net(&mut self, mac: [u8; 6], frames: OwnedFd) -> Result<usize, MachineError> {
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
