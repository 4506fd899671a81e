//! The virtio-mmio transport (virtio 1.2, section 4.2), version 2 registers only.
//!
//! Reads never get here. Each device's window is a page of ours that the guest maps read-only, so a read is a
//! plain load without an exit; only writes come, and each rewrites what it changed in the page. The interrupt
//! status is constant: "a queue was used" is always true enough, since a driver looks at its queues to know, and
//! the acknowledge is absorbed by an ioeventfd. So an interrupt costs no exit to user space at all.
//!
//! The status register is a state machine that only goes forward: reset, acknowledged, driver, features, running.
//! Queues can be set up between features and running and never after (the rule whose absence was CVE-2026-5747).
//!
//! Indirect descriptors and the event index are not offered: fewer shapes of a ring to be wrong about, and no
//! suppressed notification that a restored driver would wait for (Firecracker issue 5969).
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::{Queue, QueueState, QueueT};
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

use super::device::{Device, Reset};
use crate::layout;
use crate::memory::Ram;

const MAGIC: u64 = 0x00;
const VERSION: u64 = 0x04;
const DEVICE_ID: u64 = 0x08;
const VENDOR_ID: u64 = 0x0c;
const DEVICE_FEATURES: u64 = 0x10;
const DEVICE_FEATURES_SEL: u64 = 0x14;
const DRIVER_FEATURES: u64 = 0x20;
const DRIVER_FEATURES_SEL: u64 = 0x24;
const QUEUE_SEL: u64 = 0x30;
const QUEUE_SIZE_MAX: u64 = 0x34;
const QUEUE_SIZE: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
/// Where the driver kicks: an ioeventfd for each queue.
pub const QUEUE_NOTIFY: u64 = 0x50;
const INTERRUPT_STATUS: u64 = 0x60;
/// Where the driver acknowledges: an ioeventfd that nobody reads.
pub const INTERRUPT_ACK: u64 = 0x64;
const STATUS: u64 = 0x70;
const QUEUE_DESC: u64 = 0x80;
const QUEUE_AVAIL: u64 = 0x90;
const QUEUE_USED: u64 = 0xa0;
const CONFIG: u64 = 0x100;

/// Steps of the status register, each with all before it.
mod status {
    pub(super) const RESET: u32 = 0;
    pub(super) const ACKNOWLEDGED: u32 = 1;
    pub(super) const DRIVER: u32 = 3;
    pub(super) const FEATURES_OK: u32 = 11;
    pub(super) const RUNNING: u32 = 15;
    pub(super) const NEEDS_RESET: u32 = 64;
    pub(super) const FAILED: u32 = 128;
}

/// Interrupt status: a queue was used.
const USED: u32 = 1;
/// Interrupt status: the configuration, or the status, changed.
const CONFIG_CHANGED: u32 = 2;

/// The pages that the guest reads registers from: one for each device, one memory slot for all.
#[derive(Debug, Clone)]
pub struct RegisterPage {
    pages: Arc<MmapRegion<()>>,
    start: usize,
}

impl RegisterPage {
    /// The page of device `index` in `pages`.
    pub fn new(pages: Arc<MmapRegion<()>>, index: usize) -> Self {
        Self { pages, start: index.saturating_mul(layout::VIRTIO_PAGE) }
    }

    fn store(&self, offset: u64, value: u32) {
        let at = self.start.saturating_add(usize::try_from(offset).unwrap_or(usize::MAX));
        // Offsets are this file's constants, inside the page.
        let _ = self.pages.as_volatile_slice().store(value.to_le(), at, Ordering::Release);
    }

    fn store_bytes(&self, offset: u64, bytes: &[u8]) {
        let at = self.start.saturating_add(usize::try_from(offset).unwrap_or(usize::MAX));
        let _ = self.pages.as_volatile_slice().write_slice(bytes, at);
    }
}

/// Everything about a transport that outlives a save and restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportState {
    /// The status register.
    pub status: u32,
    /// Which half of the device's features is shown.
    pub device_features_sel: u32,
    /// Which half of the driver's features is written.
    pub driver_features_sel: u32,
    /// What the driver accepted.
    pub driver_features: u64,
    /// The queue that the queue registers speak of.
    pub queue_sel: u32,
    /// The queues as the driver set them up, and as far as they were served.
    pub queues: Vec<QueueState>,
    /// The queues that the device serves: bit n is queue n.
    pub served: u32,
}

/// Why a saved transport cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// Queues of another device.
    #[error("its queues are not those of this device")]
    Queues,
    /// A status that no driver can bring about.
    #[error("status {0:#x} is none that a driver can bring about")]
    Status(u32),
    /// Features that were not offered.
    #[error("features {0:#x} are not those that this device offers")]
    Features(u64),
    /// A queue whose size or place is not sound.
    #[error("queue {0} is not one that the device could serve")]
    Queue(usize),
}

impl TransportState {
    fn new(sizes: &[u16]) -> Self {
        let queue = |size: &u16| QueueState { max_size: *size, ..QueueState::default() };
        Self {
            status: status::RESET,
            device_features_sel: 0,
            driver_features_sel: 0,
            driver_features: 0,
            queue_sel: 0,
            queues: sizes.iter().map(queue).collect(),
            served: 0,
        }
    }
}

/// What the writer of a register has to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// Nothing.
    Done,
    /// The device is being reset: until [`Transport::finish_reset`].
    Resetting,
}

/// One device behind one window.
#[derive(Debug)]
pub struct Transport {
    /// The device.
    pub device: Device,
    page: RegisterPage,
    ram: Ram,
    state: TransportState,
}

impl Transport {
    /// A device in reset.
    pub fn new(device: Device, page: RegisterPage, ram: Ram) -> Self {
        let state = TransportState::new(&device.queue_sizes());
        let transport = Self { device, page, ram, state };
        transport.fill_page();
        transport
    }

    /// A write of 32 bits at `offset` of the window.
    pub fn write(&mut self, offset: u64, value: u32) -> Written {
        let configuring = self.state.status == status::FEATURES_OK;
        match offset {
            DEVICE_FEATURES_SEL => self.state.device_features_sel = value,
            DRIVER_FEATURES_SEL => self.state.driver_features_sel = value,
            DRIVER_FEATURES if self.state.status == status::DRIVER => self.accept_features(value),
            QUEUE_SEL => self.state.queue_sel = value,
            STATUS => return self.write_status(value),
            QUEUE_SIZE | QUEUE_READY | 0x80..=0xa7 if configuring => self.write_queue(offset, value),
            _ => return Written::Done,
        }
        self.update_page();
        Written::Done
    }

    /// The device has let go of its queues: the reset is complete.
    pub fn finish_reset(&mut self) {
        self.state = TransportState::new(&self.device.queue_sizes());
        self.fill_page();
    }

    /// The guest broke the rules of a queue. The driver is told; only a reset brings the device back.
    pub fn needs_reset(&mut self) {
        self.state.status |= status::NEEDS_RESET;
        self.page.store(INTERRUPT_STATUS, USED | CONFIG_CHANGED);
        self.update_page();
        self.device.interrupt();
    }

    /// What a snapshot keeps of the transport. The device is paused.
    pub fn save(&self) -> TransportState {
        let mut state = self.state.clone();
        for (index, (known, served)) in (0u32..).zip(state.queues.iter_mut().zip(self.device.queues())) {
            if let Some(served) = served {
                *known = served;
                state.served |= 1u32.checked_shl(index).unwrap_or(0);
            }
        }
        state
    }

    /// Brings a transport in reset to where a saved one was, its device paused. The state is checked as if a guest had
    /// written it.
    pub fn restore(&mut self, mut state: TransportState) -> Result<(), TransportError> {
        let of_this_device = |(queue, size): (&QueueState, &u16)| queue.max_size == *size && !queue.event_idx_enabled;
        let sizes = self.device.queue_sizes();
        if state.queues.len() != sizes.len() || !state.queues.iter().zip(&sizes).all(of_this_device) {
            return Err(TransportError::Queues);
        }
        let step = state.status & !(status::NEEDS_RESET | status::FAILED);
        let steps =
            [status::RESET, status::ACKNOWLEDGED, status::DRIVER, status::FEATURES_OK, status::RUNNING].contains(&step);
        let served = std::mem::take(&mut state.served);
        if !steps || served != 0 && step != status::RUNNING {
            return Err(TransportError::Status(state.status));
        }
        let accepted = state.driver_features;
        if step >= status::FEATURES_OK && !self.features_acceptable(accepted) {
            return Err(TransportError::Features(accepted));
        }
        let mut queues = Vec::new();
        for (index, queue) in state.queues.iter().enumerate() {
            let is_served =
                u32::try_from(index).ok().and_then(|n| served.checked_shr(n)).is_some_and(|bits| bits & 1 == 1);
            let checked = if queue.ready { checked_queue(queue, &self.ram) } else { None };
            match checked {
                Some(checked) if is_served => queues.push(Some(checked)),
                None if is_served => return Err(TransportError::Queue(index)),
                _ => queues.push(None),
            }
        }
        let beyond = u32::try_from(queues.len()).ok().and_then(|count| served.checked_shr(count));
        if beyond.is_some_and(|bits| bits != 0) {
            return Err(TransportError::Queue(queues.len()));
        }
        if served != 0 && !self.device.adopt(queues, accepted) {
            return Err(TransportError::Queues);
        }
        self.state = state;
        self.fill_page();
        if self.state.status & status::NEEDS_RESET != 0 {
            self.page.store(INTERRUPT_STATUS, USED | CONFIG_CHANGED);
        }
        Ok(())
    }

    fn write_status(&mut self, value: u32) -> Written {
        let now = self.state.status;
        // From anywhere else, and from running above all, nothing but a reset leads on.
        let next = match now {
            status::RESET => Some(status::ACKNOWLEDGED),
            status::ACKNOWLEDGED => Some(status::DRIVER),
            status::DRIVER => Some(status::FEATURES_OK),
            status::FEATURES_OK => Some(status::RUNNING),
            _ => None,
        };
        match value {
            status::RESET => {
                return match self.device.reset() {
                    Reset::Done => {
                        self.finish_reset();
                        Written::Done
                    }
                    Reset::Pending => Written::Resetting,
                };
            }
            _ if value & status::FAILED != 0 => self.state.status |= status::FAILED,
            // Features that we did not offer: the bit stays clear, which tells the driver.
            status::FEATURES_OK if next == Some(value) && !self.features_acceptable(self.state.driver_features) => {}
            status::RUNNING if next == Some(value) => self.activate(),
            _ if next == Some(value) => self.state.status = value,
            _ => {}
        }
        self.update_page();
        Written::Done
    }

    fn offered(&self) -> u64 {
        self.device.features() | 1 << VIRTIO_F_VERSION_1
    }

    fn features_acceptable(&self, accepted: u64) -> bool {
        accepted & !self.offered() == 0 && accepted & 1 << VIRTIO_F_VERSION_1 != 0
    }

    fn accept_features(&mut self, value: u32) {
        let half = u64::from(value);
        let kept = self.state.driver_features;
        match self.state.driver_features_sel {
            0 => self.state.driver_features = kept & !0xffff_ffff | half,
            1 => self.state.driver_features = kept & 0xffff_ffff | half << 32,
            _ => {}
        }
    }

    fn write_queue(&mut self, offset: u64, value: u32) {
        let selected = usize::try_from(self.state.queue_sel).unwrap_or(usize::MAX);
        let Some(queue) = self.state.queues.get_mut(selected) else { return };
        // Once ready, a queue keeps its shape until reset.
        if queue.ready {
            return;
        }
        let low = |address: u64| address & !0xffff_ffff | u64::from(value);
        let high = |address: u64| address & 0xffff_ffff | u64::from(value) << 32;
        match offset {
            QUEUE_SIZE => queue.size = u16::try_from(value).unwrap_or(0),
            QUEUE_READY => queue.ready = value == 1,
            QUEUE_DESC => queue.desc_table = low(queue.desc_table),
            0x84 => queue.desc_table = high(queue.desc_table),
            QUEUE_AVAIL => queue.avail_ring = low(queue.avail_ring),
            0x94 => queue.avail_ring = high(queue.avail_ring),
            QUEUE_USED => queue.used_ring = low(queue.used_ring),
            0xa4 => queue.used_ring = high(queue.used_ring),
            _ => {}
        }
    }

    /// The driver is ready: the queues go to the device, if every one of them is sound.
    fn activate(&mut self) {
        let queues: Option<Vec<Option<Queue>>> = self
            .state
            .queues
            .iter()
            .map(|state| if state.ready { checked_queue(state, &self.ram).map(Some) } else { Some(None) })
            .collect();
        let features = self.state.driver_features;
        if queues.is_some_and(|queues| self.device.activate(queues, features)) {
            self.state.status = status::RUNNING;
        } else {
            self.needs_reset();
        }
    }

    /// The registers that never change, and the others.
    fn fill_page(&self) {
        self.page.store(MAGIC, u32::from_le_bytes(*b"virt"));
        self.page.store(VERSION, 2);
        self.page.store(DEVICE_ID, self.device.id());
        self.page.store(VENDOR_ID, u32::from_le_bytes(*b"BLKH"));
        self.page.store(INTERRUPT_STATUS, USED);
        self.page.store_bytes(CONFIG, &self.device.config());
        self.update_page();
    }

    /// The registers that depend on selectors and status.
    fn update_page(&self) {
        let features = self.offered();
        self.page.store(
            DEVICE_FEATURES,
            match self.state.device_features_sel {
                0 => half(features),
                1 => half(features >> 32),
                _ => 0,
            },
        );
        let selected = usize::try_from(self.state.queue_sel).unwrap_or(usize::MAX);
        let queue = self.state.queues.get(selected);
        self.page.store(QUEUE_SIZE_MAX, queue.map_or(0, |queue| u32::from(queue.max_size)));
        self.page.store(QUEUE_READY, queue.map_or(0, |queue| u32::from(queue.ready)));
        self.page.store(STATUS, self.state.status);
    }
}

/// The low 32 bits.
fn half(word: u64) -> u32 {
    u32::try_from(word & 0xffff_ffff).unwrap_or(0)
}

/// A queue whose size, alignment and place in guest memory were checked. The device keeps this copy: what the
/// driver writes later changes nothing.
fn checked_queue(state: &QueueState, ram: &Ram) -> Option<Queue> {
    let size = u64::from(state.size);
    let sound = state.size.is_power_of_two() && state.size <= state.max_size;
    let inside = |address: u64, length: u64| {
        let length = usize::try_from(length).ok()?;
        vm_memory::GuestMemoryBackend::get_slice(ram, vm_memory::GuestAddress(address), length).ok()
    };
    // A ring lies wholly in one region of memory, flags and event index included.
    inside(state.desc_table, size.checked_mul(16)?)?;
    inside(state.avail_ring, size.checked_mul(2)?.checked_add(6)?)?;
    inside(state.used_ring, size.checked_mul(8)?.checked_add(6)?)?;
    let queue = Queue::try_from(*state).ok()?;
    (sound && queue.is_valid(ram)).then_some(queue)
}

#[cfg(test)]
#[path = "mmio_tests.rs"]
mod tests;
