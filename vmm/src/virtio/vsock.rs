//! The socket device, as the transport and the event loop see it. Its substance is in [`crate::vsock`].

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use super::device::Reset;
use crate::memory::Ram;
use crate::vsock::{Error, GUEST_CID, QUEUE_SIZES, Vsock};

/// The device with the queues that it holds while the driver runs.
#[derive(Debug)]
pub struct VsockDevice {
    sockets: Vsock,
    ram: Ram,
    interrupt: EventFd,
    kicks: Vec<EventFd>,
    queues: Option<Vec<Queue>>,
}

impl VsockDevice {
    /// Number of queues.
    pub const QUEUES: usize = QUEUE_SIZES.len();

    /// A device without queues. `kicks` are what the guest's notifications arrive on.
    pub fn new(ram: Ram, interrupt: EventFd, kicks: Vec<EventFd>) -> std::io::Result<Self> {
        let mut port = [0; 4];
        getrandom(&mut port, GetRandomFlags::empty())?;
        let sockets = Vsock::new(GUEST_CID, u32::from_le_bytes(port))?;
        Ok(Self { sockets, ram, interrupt, kicks, queues: None })
    }

    pub(super) fn features(&self) -> u64 {
        0
    }

    pub(super) fn config(&self) -> Vec<u8> {
        self.sockets.config().to_vec()
    }

    pub(super) fn queue_sizes(&self) -> Vec<u16> {
        QUEUE_SIZES.to_vec()
    }

    pub(super) fn activate(&mut self, queues: Vec<Option<Queue>>, _: u64) -> bool {
        self.queues = queues.into_iter().collect();
        // Kicks may have come before.
        if let Some(kick) = self.kicks.first() {
            let _ = kick.write(1);
        }
        self.queues.is_some()
    }

    pub(super) fn reset(&mut self) -> Reset {
        self.queues = None;
        self.sockets.reset();
        Reset::Done
    }

    pub(super) fn interrupt(&self) {
        // The only failure is a full counter: the interrupt is pending already.
        let _ = self.interrupt.write(1);
    }

    /// Whether the driver runs: only then is [`Self::epoll_fd`] to be watched.
    pub fn is_active(&self) -> bool {
        self.queues.is_some()
    }

    /// Readable when there is work on the host's side.
    pub fn epoll_fd(&self) -> BorrowedFd<'_> {
        self.sockets.epoll_fd()
    }

    /// Connects a host socket to a port of the guest. A socket that cannot be connected is closed.
    pub fn connect(&mut self, socket: OwnedFd, port: u32) {
        let _ = self.sockets.connect(socket, port);
    }

    /// Does what there is to do on either side. On an error the device needs a reset.
    pub fn process(&mut self) -> Result<(), Error> {
        if let Some(queues) = &mut self.queues
            && self.sockets.process(&self.ram, queues)?
        {
            self.interrupt();
        }
        Ok(())
    }
}
