//! The entropy device: fills whatever the guest offers with the host's random bytes.
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestMemoryBackend};
use vmm_sys_util::eventfd::EventFd;

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
        let _ = self.kick.write(1);
        self.queue.is_some()
    }

    pub(super) fn reset(&mut self) -> Reset {
        self.queue = None;
        Reset::Done
    }

    pub(super) fn interrupt(&self) {
        let _ = self.interrupt.write(1);
    }

    /// Serves the queue once.
    pub fn process(&mut self) -> Result<(), Broken> {
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
            let buffer = chain.into_iter().find(|descriptor| descriptor.is_write_only());
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
