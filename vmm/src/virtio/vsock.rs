//! The socket device, as the transport and the event loop see it. Its substance is in [`crate::vsock`].

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_queue::{Queue, QueueState};
use vmm_sys_util::eventfd::EventFd;

use super::device::Reset;
use crate::memory::Ram;
use crate::vsock::{Error, GUEST_CID, QUEUE_SIZES, State, Vsock};

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
        self.resume();
        self.queues.is_some()
    }

    pub(super) fn resume(&mut self) {
        if let Some(kick) = self.kicks.first() {
            let _ = kick.write(1);
        }
    }

    pub(super) fn queues(&self) -> Vec<Option<QueueState>> {
        match &self.queues {
            Some(queues) => queues.iter().map(|queue| Some(queue.state())).collect(),
            None => vec![None; Self::QUEUES],
        }
    }

    /// What is to be kept beside the queues.
    pub fn save(&self) -> State {
        self.sockets.save()
    }

    /// Goes on from there, in place of a device without queues and connections. Host ports start anew all the same.
    pub fn restore(&mut self, state: State) -> std::io::Result<()> {
        let next_host_port = self.sockets.save().next_host_port;
        self.sockets = Vsock::restore(GUEST_CID, State { next_host_port, ..state })?;
        Ok(())
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

    /// Does what there is to do on either side. On an error the device needs a reset, and does nothing before it.
    pub fn process(&mut self) -> Result<(), Error> {
        let Some(queues) = &mut self.queues else { return Ok(()) };
        let outcome = self.sockets.process(&self.ram, queues);
        if outcome.is_err() {
            self.queues = None;
        }
        if outcome? {
            self.interrupt();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use virtio_queue::QueueState;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::memory::guest_ram;

    #[test]
    fn a_broken_ring_ends_the_device_until_its_reset() {
        let ram = guest_ram(2 << 20).unwrap();
        let queue = |n: u64| {
            let at = 0x1_0000 * (n + 1);
            let (size, rings) = (QUEUE_SIZES[1], (at + 0x4000, at + 0x8000));
            let state = QueueState {
                max_size: size,
                size,
                ready: true,
                desc_table: at,
                avail_ring: rings.0,
                used_ring: rings.1,
                ..QueueState::default()
            };
            Some(Queue::try_from(state).unwrap())
        };
        let interrupt = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let mut device = VsockDevice::new(ram.clone(), interrupt, Vec::new()).unwrap();
        assert!(device.activate((0..3).map(queue).collect(), 0));
        device.process().unwrap();
        // From the guest: an index further ahead than the ring is long.
        ram.write_obj(QUEUE_SIZES[1] + 1, GuestAddress(0x2_4002)).unwrap();
        device.process().unwrap_err();
        assert!(!device.is_active());
        ram.write_obj(0u16, GuestAddress(0x2_4002)).unwrap();
        device.process().unwrap();
        assert!(!device.is_active(), "only a reset and a driver bring it back");
    }
}
