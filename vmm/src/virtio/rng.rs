//! The entropy device: fills whatever the guest offers with the host's random bytes.
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Bytes, GuestMemoryBackend};
use vmm_sys_util::eventfd::EventFd;

use super::chain::Chain;
use super::device::Reset;
use super::notify::wants_interrupt;
use crate::memory::Ram;

const QUEUE_SIZE: u16 = 64;
/// Most bytes given for one buffer: as much as a getrandom call gives without being interrupted.
const MAX_BYTES: usize = 256;
/// Most buffers filled at one wake-up, so that a guest that asks without end leaves time for other devices.
const BUDGET: usize = 16;

/// The device.
#[derive(Debug)]
pub struct Rng {
    ram: Ram,
    interrupt: EventFd,
    kick: EventFd,
    queue: Option<Queue>,
}

/// The guest broke the ring.
#[derive(Debug)]
pub struct Broken;

impl Rng {
    /// A device without a queue. `kick` is what the guest's notifications arrive on.
    pub fn new(ram: Ram, interrupt: EventFd, kick: EventFd) -> Self {
        Self { ram, interrupt, kick, queue: None }
    }

    pub(super) fn features(&self) -> u64 {
        0
    }

    pub(super) fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    pub(super) fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    pub(super) fn activate(&mut self, queues: Vec<Option<Queue>>, _: u64) -> bool {
        self.queue = queues.into_iter().next().flatten();
        // A kick may have come before.
        self.resume();
        self.queue.is_some()
    }

    pub(super) fn resume(&mut self) {
        let _ = self.kick.write(1);
    }

    pub(super) fn queues(&self) -> Vec<Option<QueueState>> {
        vec![self.queue.as_ref().map(Queue::state)]
    }

    pub(super) fn reset(&mut self) -> Reset {
        self.queue = None;
        Reset::Done
    }

    pub(super) fn interrupt(&self) {
        let _ = self.interrupt.write(1);
    }

    /// Serves the queue once. If it is broken, the device does nothing more before its reset.
    pub fn process(&mut self) -> Result<(), Broken> {
        let served = self.serve();
        if served.is_err() {
            self.queue = None;
        }
        served
    }

    fn serve(&mut self) -> Result<(), Broken> {
        let Some(queue) = &mut self.queue else { return Ok(()) };
        let mut used = false;
        for turn in 0..=BUDGET {
            if turn == BUDGET {
                let _ = self.kick.write(1);
                break;
            }
            let Some(chain) = queue.iter(&self.ram).map_err(|_| Broken)?.next() else { break };
            let head = chain.head_index();
            let mut bytes = [0; MAX_BYTES];
            let mut descriptors = Chain::new(&self.ram, queue, head).map_while(Result::ok);
            let buffer = descriptors.find(|descriptor| descriptor.is_write_only());
            let filled = buffer.and_then(|descriptor| {
                let length = usize::try_from(descriptor.len()).ok()?.min(MAX_BYTES);
                let slice = self.ram.get_slice(descriptor.addr(), length).ok()?;
                let n = getrandom(bytes.get_mut(..length)?, GetRandomFlags::empty()).ok()?;
                slice.write_slice(bytes.get(..n)?, 0).ok()?;
                u32::try_from(n).ok()
            });
            queue.add_used(&self.ram, head, filled.unwrap_or(0)).map_err(|_| Broken)?;
            used = true;
        }
        if used && wants_interrupt(&self.ram, queue).map_err(|_| Broken)? {
            self.interrupt();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use virtio_queue::QueueState;
    use vm_memory::GuestAddress;

    use super::*;
    use crate::memory::guest_ram;

    #[test]
    fn a_broken_ring_ends_the_device_until_its_reset() {
        let ram = guest_ram(2 << 20).unwrap();
        let state = QueueState {
            max_size: QUEUE_SIZE,
            size: QUEUE_SIZE,
            ready: true,
            desc_table: 0x1000,
            avail_ring: 0x2000,
            used_ring: 0x3000,
            ..QueueState::default()
        };
        let eventfd = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let mut rng = Rng::new(ram.clone(), eventfd(), eventfd());
        assert!(rng.activate(vec![Some(Queue::try_from(state).unwrap())], 0));
        rng.process().unwrap();
        // An index further ahead than the ring is long.
        ram.write_obj(QUEUE_SIZE + 1, GuestAddress(0x2002)).unwrap();
        rng.process().unwrap_err();
        ram.write_obj(1u16, GuestAddress(0x2002)).unwrap();
        rng.process().unwrap();
        assert_eq!(ram.read_obj::<u16>(GuestAddress(0x3002)).unwrap(), 0, "nothing is served any more");
    }
}
