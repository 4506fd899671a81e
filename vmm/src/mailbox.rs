//! What the other threads tell the event loop, and how they wake it.
//!
//! Every sender has at most one message under way that it waits for, or sends one kind of message once, so the
//! channel is bounded by the number of threads (and 256 marks), whatever a guest does.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use kvm_ioctls::VcpuFd;
use virtio_queue::Queue;
use vmm_control::{Mark, StopReason};
use vmm_sys_util::eventfd::EventFd;

/// Most messages that are taken at one wake-up: vCPUs that write registers without end must not keep the loop from the
/// supervisor, the sockets and the console.
const BATCH: usize = 64;

/// From a thread to the event loop.
#[derive(Debug)]
pub enum Message {
    /// A vCPU wrote a register of a virtio device, and waits until `done` hears from the loop.
    RegisterWrite {
        /// Index of the device.
        device: usize,
        /// Offset in its window.
        offset: u64,
        /// Value, 32 bits.
        value: u32,
        /// The waiting vCPU.
        done: Sender<()>,
    },
    /// The guest wrote a mark for the first time.
    Mark(Mark),
    /// The machine is to end.
    Stop(StopReason),
    /// A queue's thread let go of its queue, as it was told to.
    QueueReleased {
        /// Index of the device.
        device: usize,
    },
    /// A vCPU left the guest, as it was told to, with nothing pending. It waits until `back` gives it its descriptor again.
    VcpuPaused {
        /// Which.
        id: u8,
        /// What it runs the guest with.
        vcpu: VcpuFd,
        /// The waiting thread.
        back: Sender<VcpuFd>,
    },
    /// A queue's thread gave its queue back for a while, as it was told to.
    QueuePaused {
        /// Index of the device.
        device: usize,
        /// Which of its queues.
        index: usize,
        /// The queue, unless the guest broke it.
        queue: Option<Box<Queue>>,
    },
    /// The guest broke the ring of a queue: the device needs a reset.
    QueueBroken {
        /// Index of the device.
        device: usize,
    },
    /// The host's file system is full (`true`), or has room again.
    DiskFull {
        /// Index of the disk.
        disk: u8,
        /// Full, or no longer.
        full: bool,
    },
}

/// Sends messages to the event loop.
#[derive(Debug, Clone)]
pub struct Mailbox {
    sender: Sender<Message>,
    wake: Arc<EventFd>,
}

/// The event loop's end.
#[derive(Debug)]
pub struct Inbox {
    receiver: Receiver<Message>,
    wake: Arc<EventFd>,
}

/// Makes both ends.
pub fn mailbox() -> std::io::Result<(Mailbox, Inbox)> {
    let wake = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
    let (sender, receiver) = channel();
    Ok((Mailbox { sender, wake: wake.clone() }, Inbox { receiver, wake }))
}

impl Mailbox {
    /// Sends a message. Returns whether the loop is still there to read it.
    pub fn send(&self, message: Message) -> bool {
        let sent = self.sender.send(message).is_ok();
        self.wake();
        sent
    }

    /// Wakes the loop without a message.
    pub fn wake(&self) {
        // The only failure is a full counter, which wakes as well.
        let _ = self.wake.write(1);
    }
}

impl Inbox {
    /// Readable when there is something to do.
    pub fn wake_fd(&self) -> &EventFd {
        &self.wake
    }

    /// What there is to do, up to a batch of it; of what is left, [`Self::wake_fd`] tells again.
    pub fn batch(&self) -> Vec<Message> {
        // Reset first: what arrives while we look wakes us again.
        let _ = self.wake.read();
        let batch: Vec<Message> = std::iter::from_fn(|| self.next()).take(BATCH).collect();
        if batch.len() == BATCH {
            let _ = self.wake.write(1);
        }
        batch
    }

    /// The next message, if there is one.
    pub fn next(&self) -> Option<Message> {
        self.receiver.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_without_end_come_in_batches() {
        let (mailbox, inbox) = mailbox().unwrap();
        for _ in 0..3 * BATCH {
            mailbox.send(Message::QueueReleased { device: 0 });
        }
        for _ in 0..3 {
            assert_eq!(inbox.batch().len(), BATCH);
        }
        assert!(inbox.batch().is_empty(), "woken for what was left");
        assert!(inbox.wake_fd().read().is_err(), "and only for that");
    }
}
