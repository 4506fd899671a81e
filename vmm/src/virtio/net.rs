//! The network device: whole frames between the guest's two queues and one socket, each a message of its own.
//!
//! What a frame says is not looked at here: at the socket's other end stands the egress filter. Nothing is offloaded, so
//! a header says nothing, and one that does is refused with its frame. Between two calls at most one frame is held.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::GuestMemoryBackend;
use vmm_control::NetStats;
use vmm_sys_util::eventfd::EventFd;

use super::chain::{BrokenChain, Chain};
use super::device::Reset;
use super::iovec::GuestBuffer;
use super::notify::wants_interrupt;
use crate::memory::Ram;

/// The greatest packet that the guest may put into a frame.
pub const MTU: u16 = 65_520;
/// Bytes of an Ethernet header: the shortest frame.
const ETHERNET: usize = 14;
/// The longest frame.
const MAX_FRAME: usize = MTU as usize + ETHERNET;
/// Bytes of the header in front of each frame (virtio 1.2, section 5.1.6).
const HEADER: usize = 12;
/// The header of a frame to the guest: no offload, one buffer.
const TO_GUEST: [u8; HEADER] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
/// `VIRTIO_NET_F_MTU` and `VIRTIO_NET_F_MAC`.
const FEATURES: u64 = 1 << 3 | 1 << 5;
/// Sizes of the queues: to the guest, from the guest. A buffer for the longest frame takes 18 descriptors.
const QUEUE_SIZES: [u16; 2] = [256, 256];
/// Frames that one call moves in each direction, so that a busy guest leaves time for the other devices.
const BUDGET: usize = 64;

/// The guest broke a ring. The device does nothing more before its reset.
#[derive(Debug, PartialEq, Eq)]
pub struct Broken;

impl From<virtio_queue::Error> for Broken {
    fn from(_: virtio_queue::Error) -> Self {
        Self
    }
}

impl From<BrokenChain> for Broken {
    fn from(_: BrokenChain) -> Self {
        Self
    }
}

/// The device.
#[derive(Debug)]
pub struct Net {
    ram: Ram,
    interrupt: EventFd,
    kicks: Vec<EventFd>,
    mac: [u8; 6],
    frames: Frames,
    queues: Option<[Queue; 2]>,
}

/// The socket, and the frame that came from it and waits for a buffer of the guest's.
#[derive(Debug)]
struct Frames {
    socket: OwnedFd,
    /// Room for one frame and a byte more, by which a longer one shows.
    buffer: Box<[u8]>,
    waiting: Option<usize>,
    stats: NetStats,
}

/// What became of a frame of the guest's.
#[derive(Debug, PartialEq, Eq)]
enum Sent {
    /// It went out, or was refused and counted.
    Done,
    /// The socket has no room; the frame stays where it is.
    Later,
}

/// What the socket had for the guest.
enum Taken {
    /// A frame of this length, in the buffer.
    Frame(usize),
    /// Something of a length that no frame has.
    Unfit,
    /// Nothing.
    Nothing,
}

impl Net {
    /// Number of queues.
    pub const QUEUES: usize = QUEUE_SIZES.len();

    /// A device without queues. `kicks` are what the guest's notifications arrive on, `socket` is one of messages.
    pub fn new(ram: Ram, interrupt: EventFd, kicks: Vec<EventFd>, mac: [u8; 6], socket: OwnedFd) -> Self {
        let buffer = vec![0; MAX_FRAME.saturating_add(1)].into_boxed_slice();
        let frames = Frames { socket, buffer, waiting: None, stats: NetStats::default() };
        Self { ram, interrupt, kicks, mac, frames, queues: None }
    }

    /// Becomes readable and writable as frames can come and go; to be watched for changes, not for levels.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.frames.socket.as_fd()
    }

    /// Its counters.
    pub fn stats(&self) -> NetStats {
        self.frames.stats
    }

    pub(super) fn features(&self) -> u64 {
        FEATURES
    }

    /// Address, status (not offered), pairs of queues (not offered), MTU.
    pub(super) fn config(&self) -> Vec<u8> {
        [&self.mac[..], &[0; 4], &MTU.to_le_bytes()].concat()
    }

    pub(super) fn queue_sizes(&self) -> Vec<u16> {
        QUEUE_SIZES.to_vec()
    }

    pub(super) fn activate(&mut self, queues: Vec<Option<Queue>>, _: u64) -> bool {
        self.queues = queues.into_iter().collect::<Option<Vec<_>>>().and_then(|queues| queues.try_into().ok());
        // Frames and kicks may have come before.
        self.resume();
        self.queues.is_some()
    }

    pub(super) fn resume(&mut self) {
        self.again();
    }

    pub(super) fn queues(&self) -> Vec<Option<QueueState>> {
        match &self.queues {
            Some(queues) => queues.iter().map(|queue| Some(queue.state())).collect(),
            None => vec![None; Self::QUEUES],
        }
    }

    pub(super) fn reset(&mut self) -> Reset {
        self.queues = None;
        Reset::Done
    }

    pub(super) fn interrupt(&self) {
        // The only failure is a full counter: the interrupt is pending already.
        let _ = self.interrupt.write(1);
    }

    /// Has the event loop call once more.
    fn again(&self) {
        if let Some(kick) = self.kicks.first() {
            let _ = kick.write(1);
        }
    }

    /// Moves frames in both directions, as many as there are, within the budget.
    pub fn process(&mut self) -> Result<(), Broken> {
        let Some([to_guest, from_guest]) = &mut self.queues else { return Ok(()) };
        let outcome = self
            .frames
            .transmit(&self.ram, from_guest)
            .and_then(|sent| Ok((sent, self.frames.receive(&self.ram, to_guest)?)));
        match outcome {
            Ok((sent, received)) => {
                if sent.interrupt || received.interrupt {
                    self.interrupt();
                }
                if sent.more || received.more {
                    self.again();
                }
                Ok(())
            }
            Err(broken) => {
                self.queues = None;
                Err(broken)
            }
        }
    }
}

/// What is to be done after a queue was served.
#[derive(Debug, Default)]
struct Served {
    interrupt: bool,
    /// The budget is used up.
    more: bool,
}

/// The next chain that the guest made available. When there is none, the guest is to kick us for the next.
fn next(ram: &Ram, queue: &mut Queue) -> Result<Option<u16>, Broken> {
    loop {
        queue.disable_notification(ram)?;
        if let Some(chain) = queue.iter(ram)?.next() {
            return Ok(Some(chain.head_index()));
        }
        // One that comes while kicks are being asked for again would not be told.
        if !queue.enable_notification(ram)? {
            return Ok(None);
        }
    }
}

impl Frames {
    fn transmit(&mut self, ram: &Ram, queue: &mut Queue) -> Result<Served, Broken> {
        let mut used = false;
        for _ in 0..BUDGET {
            let Some(head) = next(ram, queue)? else { return served(ram, queue, used, false) };
            if self.send(ram, queue, head)? == Sent::Later {
                // The socket tells when it has room.
                queue.go_to_previous_position();
                return served(ram, queue, used, false);
            }
            queue.add_used(ram, head, 0)?;
            used = true;
        }
        served(ram, queue, used, true)
    }

    fn send(&mut self, ram: &Ram, queue: &Queue, head: u16) -> Result<Sent, Broken> {
        let mut frame = GuestBuffer::default();
        let mut sound = true;
        for descriptor in Chain::new(ram, queue, head) {
            let descriptor = descriptor?;
            let slice = ram.get_slice(descriptor.addr(), usize::try_from(descriptor.len()).unwrap_or(usize::MAX));
            match slice {
                Ok(slice) if !descriptor.is_write_only() => frame.push(slice),
                _ => sound = false,
            }
        }
        // Flags and kind of offload; what follows them says only more about those.
        sound &= frame.take_front::<HEADER>().is_some_and(|header| header.starts_with(&[0, 0]));
        let length = frame.length();
        if !sound || !(ETHERNET..=MAX_FRAME).contains(&length) {
            self.drop_frame();
            return Ok(Sent::Done);
        }
        match frame.send(&self.socket) {
            Ok(_) => {
                self.stats.frames_out = self.stats.frames_out.saturating_add(1);
                self.stats.bytes_out = self.stats.bytes_out.saturating_add(length as u64);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(Sent::Later),
            // The filter is gone, and with it the network: there is no other way out.
            Err(_) => self.drop_frame(),
        }
        Ok(Sent::Done)
    }

    fn receive(&mut self, ram: &Ram, queue: &mut Queue) -> Result<Served, Broken> {
        let mut used = false;
        for _ in 0..BUDGET {
            let length = match self.take() {
                Taken::Frame(length) => length,
                Taken::Unfit => {
                    self.drop_frame();
                    continue;
                }
                Taken::Nothing => return served(ram, queue, used, false),
            };
            // While no frame waits, a buffer more is no reason to kick us.
            let Some(head) = next(ram, queue)? else { return served(ram, queue, used, false) };
            let mut buffer = GuestBuffer::default();
            for descriptor in Chain::new(ram, queue, head) {
                let descriptor = descriptor?;
                let slice = ram.get_slice(descriptor.addr(), usize::try_from(descriptor.len()).unwrap_or(usize::MAX));
                if let Ok(slice) = slice
                    && descriptor.is_write_only()
                {
                    buffer.push(slice);
                }
            }
            self.waiting = None;
            let frame = self.buffer.get(..length).unwrap_or_default();
            if buffer.write(0, &TO_GUEST).and_then(|()| buffer.write(HEADER, frame)).is_err() {
                // The guest offers less than the MTU that it was told; the buffer waits for a shorter one.
                queue.go_to_previous_position();
                self.drop_frame();
                continue;
            }
            let whole = HEADER.saturating_add(length);
            queue.add_used(ram, head, u32::try_from(whole).unwrap_or(u32::MAX))?;
            used = true;
            self.stats.frames_in = self.stats.frames_in.saturating_add(1);
            self.stats.bytes_in = self.stats.bytes_in.saturating_add(length as u64);
        }
        served(ram, queue, used, true)
    }

    /// The frame that waits, or the next one from the socket. One datagram at most, so that what is no frame uses up the
    /// budget as well.
    fn take(&mut self) -> Taken {
        if let Some(length) = self.waiting {
            return Taken::Frame(length);
        }
        loop {
            match recv(&self.socket, &mut *self.buffer, RecvFlags::DONTWAIT) {
                // An end, as an error, is forever.
                Ok((0, _)) => return Taken::Nothing,
                Ok((length, _)) if (ETHERNET..=MAX_FRAME).contains(&length) => {
                    self.waiting = Some(length);
                    return Taken::Frame(length);
                }
                Ok(_) => return Taken::Unfit,
                Err(Errno::INTR) => {}
                Err(_) => return Taken::Nothing,
            }
        }
    }

    fn drop_frame(&mut self) {
        self.stats.frames_dropped = self.stats.frames_dropped.saturating_add(1);
    }
}

fn served(ram: &Ram, queue: &Queue, used: bool, more: bool) -> Result<Served, Broken> {
    Ok(Served { interrupt: used && wants_interrupt(ram, queue)?, more })
}

#[cfg(test)]
#[path = "net_tests.rs"]
mod tests;
