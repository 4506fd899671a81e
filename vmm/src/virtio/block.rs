//! The disk device: a virtio-blk front of a layered disk, with a thread of its own for each queue.
//!
//! The event loop holds a [`Block`], which speaks with the transport; each queue's thread owns its queue while the
//! driver runs, and nothing else shares it. Guest kicks wake the thread directly (ioeventfd), and it raises the
//! interrupt directly: the event loop sees neither.
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use snapshot::disk::{BLOCK, Disk, DiskError, LayerFiles};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_queue::{Queue, QueueState};
use vmm_control::BlockStats;
use vmm_sys_util::eventfd::EventFd;

use super::block_queue::Server;
use super::device::Reset;
use super::request::{ID_LENGTH, MAX_DESCRIPTORS, MAX_RANGE_SECTORS, MAX_RANGES, SECTOR};
use crate::interrupt::Interrupt;
use crate::mailbox::Mailbox;
use crate::memory::Ram;

/// Descriptors of a queue. A request of 1 MiB in 4 KiB pieces fits.
const QUEUE_SIZE: u16 = MAX_DESCRIPTORS;
/// Most pieces of data in a request: what fits a queue beside header and status.
const SEG_MAX: u32 = 510;

/// What a queue's thread needs to know of its disk.
#[derive(Debug, Clone)]
pub struct Backing {
    /// The layers.
    pub disk: Arc<Disk>,
    /// Index among the devices.
    pub device: usize,
    /// Index among the disks.
    pub index: u8,
    /// What the guest reads as the disk's id.
    pub id: [u8; ID_LENGTH],
    /// Guest memory.
    pub ram: Ram,
    /// Raises the device's interrupt.
    pub interrupt: Arc<dyn Interrupt>,
    /// To the event loop.
    pub mailbox: Mailbox,
    /// Counters of all queues together.
    pub counters: Arc<Counters>,
}

/// Counters of a disk.
#[derive(Debug, Default)]
pub struct Counters {
    pub(super) requests: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    pub(super) interrupts: AtomicU64,
    pub(super) wakeups: AtomicU64,
    /// Queues that wait for room on the host.
    pub(super) waiting: AtomicU64,
}

impl Counters {
    /// What was counted until now.
    pub fn stats(&self) -> BlockStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        BlockStats {
            requests: load(&self.requests),
            failed: load(&self.failed),
            read_bytes: load(&self.read_bytes),
            written_bytes: load(&self.written_bytes),
            interrupts: load(&self.interrupts),
            wakeups: load(&self.wakeups),
        }
    }
}

pub(super) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// The device, as the transport sees it.
#[derive(Debug)]
pub struct Block {
    backing: Backing,
    read_only: bool,
    workers: Vec<Worker>,
    /// Queues that the driver set up, and that threads have not let go of for good.
    held: usize,
    /// Queues that threads have still to give back before the device is paused.
    awaited: usize,
    write_through: bool,
}

#[derive(Debug)]
struct Worker {
    commands: Sender<Command>,
    kick: EventFd,
    active: bool,
    /// The queue while the device is paused.
    parked: Option<Box<Queue>>,
    thread: JoinHandle<()>,
}

/// What the event loop tells a queue's thread.
#[derive(Debug)]
pub(super) enum Command {
    /// Serve this queue of this disk; with `write_through`, each change is durable when it is done.
    Serve {
        queue: Box<Queue>,
        disk: Arc<Disk>,
        write_through: bool,
    },
    /// Give the queue back as it is.
    Pause,
    /// Let go of the queue for good.
    Release,
    End,
}

impl Block {
    /// Starts a thread for each of `kicks`, which are what the guest's notifications arrive on.
    pub fn new(backing: Backing, read_only: bool, kicks: Vec<EventFd>) -> std::io::Result<Self> {
        let mut workers = Vec::new();
        for (index, kick) in kicks.into_iter().enumerate() {
            let (commands, inbox) = channel();
            let kick_too = kick.try_clone()?;
            let server = Server::new(index, backing.clone(), kick_too, inbox);
            let thread = std::thread::Builder::new()
                .name(format!("blk{}.{index}", backing.index))
                .stack_size(256 << 10)
                .spawn(move || server.run())?;
            workers.push(Worker { commands, kick, active: false, parked: None, thread });
        }
        Ok(Self { backing, read_only, workers, held: 0, awaited: 0, write_through: false })
    }

    /// The disk's counters.
    pub fn stats(&self) -> BlockStats {
        self.backing.counters.stats()
    }

    pub(super) fn features(&self) -> u64 {
        let mut features = 1 << VIRTIO_BLK_F_BLK_SIZE | 1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_SEG_MAX;
        if self.workers.len() > 1 {
            features |= 1 << VIRTIO_BLK_F_MQ;
        }
        if self.read_only {
            features |= 1 << VIRTIO_BLK_F_RO;
        } else {
            features |= 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES;
        }
        features
    }

    /// `struct virtio_blk_config` of virtio 1.2, section 5.2.4, up to the write-zeroes fields.
    pub(super) fn config(&self) -> Vec<u8> {
        let word = |value: u64| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
        let queues = u16::try_from(self.workers.len()).unwrap_or(u16::MAX);
        let mut config = (self.backing.disk.size() / SECTOR).to_le_bytes().to_vec();
        config.extend(0u32.to_le_bytes()); // size_max: not offered
        config.extend(SEG_MAX.to_le_bytes());
        config.extend([0; 4]); // geometry: not offered
        config.extend(word(BLOCK));
        config.extend([0; 8]); // topology: not offered
        config.extend([0, 0]); // writeback: not offered
        config.extend(queues.to_le_bytes());
        config.extend(MAX_RANGE_SECTORS.to_le_bytes());
        config.extend(word(MAX_RANGES as u64));
        config.extend(word(BLOCK / SECTOR)); // discard alignment
        config.extend(MAX_RANGE_SECTORS.to_le_bytes());
        config.extend(word(MAX_RANGES as u64));
        config.extend([1, 0, 0, 0]); // write-zeroes may unmap
        config
    }

    pub(super) fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; self.workers.len()]
    }

    pub(super) fn activate(&mut self, queues: Vec<Option<Queue>>, features: u64) -> bool {
        let accepted = self.adopt(queues, features);
        self.resume();
        accepted
    }

    /// Takes queues as if it were paused.
    pub(super) fn adopt(&mut self, queues: Vec<Option<Queue>>, features: u64) -> bool {
        // A driver that cannot flush relies on it (virtio 1.2, section 5.2.6.2).
        self.write_through = features & 1 << VIRTIO_BLK_F_FLUSH == 0;
        for (worker, queue) in self.workers.iter_mut().zip(queues) {
            if let Some(queue) = queue {
                worker.parked = Some(Box::new(queue));
                worker.active = true;
                self.held = self.held.saturating_add(1);
            }
        }
        self.held > 0
    }

    /// Has the threads give their queues back, with every request answered that they had begun and the guest told of it.
    /// Returns whether that is done already.
    pub(super) fn pause(&mut self) -> bool {
        for worker in self.workers.iter().filter(|worker| worker.active) {
            self.awaited = self.awaited.saturating_add(usize::from(worker.tell(Command::Pause)));
        }
        self.awaited == 0
    }

    /// A thread gave its queue back.
    pub fn paused(&mut self, index: usize, queue: Option<Box<Queue>>) {
        if let Some(worker) = self.workers.get_mut(index) {
            worker.parked = queue;
        }
        self.awaited = self.awaited.saturating_sub(1);
    }

    /// Whether a thread has still to give its queue back.
    pub fn is_pausing(&self) -> bool {
        self.awaited > 0
    }

    /// Gives the threads their queues, and has each look into its own.
    pub(super) fn resume(&mut self) {
        for worker in &mut self.workers {
            let Some(queue) = worker.parked.take() else { continue };
            let disk = self.backing.disk.clone();
            if !worker.tell(Command::Serve { queue, disk, write_through: self.write_through }) {
                worker.active = false;
                self.held = self.held.saturating_sub(1);
            }
        }
    }

    /// The queues as they are while the device is paused.
    pub(super) fn queues(&self) -> Vec<Option<QueueState>> {
        self.workers.iter().map(|worker| worker.parked.as_ref().map(|queue| queue.state())).collect()
    }

    /// Whether the disk takes changes, and so has a live layer.
    pub fn is_writable(&self) -> bool {
        !self.read_only
    }

    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.backing.disk.size()
    }

    /// The disk with a new live layer, for [`Self::replace_disk`]. Only while paused.
    pub fn cut(&self, layer: LayerFiles) -> Result<Disk, DiskError> {
        self.backing.disk.with_layer(layer)
    }

    /// Goes on with another disk. Only while paused.
    pub fn replace_disk(&mut self, disk: Disk) {
        self.backing.disk = Arc::new(disk);
    }

    pub(super) fn reset(&mut self) -> Reset {
        for worker in &mut self.workers {
            if std::mem::take(&mut worker.active) {
                worker.tell(Command::Release);
            }
        }
        if self.held == 0 { Reset::Done } else { Reset::Pending }
    }

    /// A thread gave its queue back. Returns whether that was the last.
    pub fn released(&mut self) -> bool {
        self.held = self.held.saturating_sub(1);
        self.held == 0
    }

    /// Lets every thread finish the request that it holds, and waits for them.
    pub fn end(&mut self) {
        for worker in &self.workers {
            worker.tell(Command::End);
        }
        for worker in self.workers.drain(..) {
            // A panic aborts the process, so there is no other outcome to report.
            let _ = worker.thread.join();
        }
    }

    pub(super) fn interrupt(&self) {
        self.backing.interrupt.raise();
    }
}

impl Worker {
    fn tell(&self, command: Command) -> bool {
        let told = self.commands.send(command).is_ok();
        let _ = self.kick.write(1);
        told
    }
}

#[cfg(test)]
#[path = "block_tests.rs"]
mod tests;
