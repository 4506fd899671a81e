//! The devices that there are, and what a transport asks of each.

use virtio_queue::{Queue, QueueState};

use super::block::Block;
use super::net::Net;
use super::rng::Rng;
use super::vsock::VsockDevice;

/// How far a reset has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reset {
    /// The device holds no queue.
    Done,
    /// Its threads are finishing what they hold; the event loop hears of it.
    Pending,
}

/// One device. Nothing in it knows of the transport.
#[derive(Debug)]
pub enum Device {
    /// A disk.
    Block(Block),
    /// Sockets between host and guest.
    Vsock(VsockDevice),
    /// Random numbers.
    Rng(Rng),
    /// The network.
    Net(Net),
}

macro_rules! each {
    ($self:expr, $device:ident => $call:expr) => {
        match $self {
            Device::Block($device) => $call,
            Device::Vsock($device) => $call,
            Device::Rng($device) => $call,
            Device::Net($device) => $call,
        }
    };
}

impl Device {
    /// Its virtio device id.
    pub fn id(&self) -> u32 {
        match self {
            Device::Block(_) => 2,
            Device::Vsock(_) => 19,
            Device::Rng(_) => 4,
            Device::Net(_) => 1,
        }
    }

    /// The features that it offers.
    pub fn features(&self) -> u64 {
        each!(self, device => device.features())
    }

    /// Its configuration space, which the guest can only read.
    pub fn config(&self) -> Vec<u8> {
        each!(self, device => device.config())
    }

    /// The greatest size of each queue.
    pub fn queue_sizes(&self) -> Vec<u16> {
        each!(self, device => device.queue_sizes())
    }

    /// The driver is ready. Returns whether the device can work with these queues.
    pub fn activate(&mut self, queues: Vec<Option<Queue>>, features: u64) -> bool {
        each!(self, device => device.activate(queues, features))
    }

    /// Give up every queue.
    pub fn reset(&mut self) -> Reset {
        each!(self, device => device.reset())
    }

    /// Take queues that a saved machine's driver had set up, as if the device were paused: it serves them from
    /// [`Self::resume`] on. Returns whether it can work with them.
    pub fn adopt(&mut self, queues: Vec<Option<Queue>>, features: u64) -> bool {
        match self {
            Device::Block(block) => block.adopt(queues, features),
            // They serve when the event loop calls them, which it does not while it is paused.
            Device::Vsock(device) => device.activate(queues, features),
            Device::Rng(device) => device.activate(queues, features),
            Device::Net(device) => device.activate(queues, features),
        }
    }

    /// Bring what is under way to its end, and begin nothing new. Returns whether that is done already; else the event loop
    /// hears of it.
    pub fn pause(&mut self) -> bool {
        match self {
            Device::Block(block) => block.pause(),
            // Between two calls of the event loop's nothing is under way.
            Device::Vsock(_) | Device::Rng(_) | Device::Net(_) => true,
        }
    }

    /// Serve again. What the guest asked for before may never be told again: each queue is looked at once in any case, and
    /// the guest is interrupted once in any case, since of an interrupt that was under way nothing may be left.
    pub fn resume(&mut self) {
        if self.queues().iter().all(Option::is_none) {
            return;
        }
        each!(self, device => device.resume());
        self.interrupt();
    }

    /// The queues that it serves, while it is paused; none for one that the driver did not set up, or broke.
    pub fn queues(&self) -> Vec<Option<QueueState>> {
        each!(self, device => device.queues())
    }

    /// Raise the device's interrupt.
    pub fn interrupt(&self) {
        each!(self, device => device.interrupt());
    }
}
