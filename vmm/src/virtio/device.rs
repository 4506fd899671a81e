//! The devices that there are, and what a transport asks of each.

use virtio_queue::Queue;

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

    /// Raise the device's interrupt.
    pub fn interrupt(&self) {
        each!(self, device => device.interrupt());
    }
}
