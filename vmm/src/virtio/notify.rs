//! Whether the guest wants to be interrupted.

use std::sync::atomic::{Ordering, fence};

use virtio_queue::{Error, Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// `VRING_AVAIL_F_NO_INTERRUPT`.
const NO_INTERRUPT: u16 = 1;

/// Whether the guest wants to hear of used buffers (virtio 1.2, section 2.7.7). Linux switches interrupts off while it
/// drains a queue; without this each buffer that is used meanwhile would cost a useless one. The virtio-queue crate
/// looks only at the event index, which we do not offer.
pub fn wants_interrupt<M: GuestMemory>(mem: &M, queue: &Queue) -> Result<bool, Error> {
    // The used index must be visible before the flag is read, or both sides could wait.
    fence(Ordering::SeqCst);
    let flags = mem.load::<u16>(GuestAddress(queue.avail_ring()), Ordering::Relaxed).map_err(Error::GuestMemory)?;
    Ok(u16::from_le(flags) & NO_INTERRUPT == 0)
}
