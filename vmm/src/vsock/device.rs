//! The virtio socket device (virtio 1.2, section 5.10): the queues of the guest on one side, the host's
//! sockets on the other, [`Muxer`] between them.
//!
//! All work is done inside [`Vsock::process`], synchronously and within a budget; between two calls
//! nothing is in flight, so a pause has nothing to wait for. Payload is read and written between guest
//! memory and socket directly; only what a slow host does not take is copied, into the connection.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestMemory, Permissions};

use super::buffers::{Buffers, ChainError};
use super::connection::Connection;
use super::host::{HostSocket, Poll};
use super::muxer::{ConnectionId, Counters, Muxer, Outgoing, TooManyConnections};
use super::packet::{HEADER_SIZE, Header};
use crate::virtio::notify::wants_interrupt;

/// The virtio device id of a socket device.
pub const DEVICE_ID: u32 = 19;

/// Largest sizes of the queues: to the guest, from the guest, events.
pub const QUEUE_SIZES: [u16; 3] = [256, 256, 16];

/// The context id that our guests have. One guest a VMM, and no bridge between them, so it need not be
/// unique.
pub const GUEST_CID: u64 = 3;

/// Packets that one call moves in each direction, so that a busy guest does not starve the other
/// devices on the same thread.
const PACKET_BUDGET: usize = 256;

/// Bytes that one call moves in each direction, for the same reason.
const BYTE_BUDGET: usize = 1024 * 1024;

/// Most bytes of one packet to the guest, whatever credit and buffers it claims to have: as many as Linux itself sends.
const PACKET_LIMIT: usize = 64 * 1024;

/// The event that makes the guest reset all its connections (virtio 1.2, section 5.10.6.7).
const TRANSPORT_RESET: [u8; 4] = 0_u32.to_le_bytes();

/// Why the device cannot go on. But for `Poll` it is the guest's doing, and the device needs a reset.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The transport passed another number of queues.
    #[error("a vsock device has {} queues, not {got}", QUEUE_SIZES.len())]
    Queues {
        /// How many it passed.
        got: usize,
    },
    /// A ring is not usable.
    #[error("vsock ring: {0}")]
    Ring(#[from] virtio_queue::Error),
    /// A descriptor chain is not usable.
    #[error("vsock packet: {0}")]
    Chain(#[from] ChainError),
    /// The host's sockets cannot be polled.
    #[error("polling the host ends of vsock connections: {0}")]
    Poll(#[source] io::Error),
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// All are in use.
    #[error(transparent)]
    TooMany(#[from] TooManyConnections),
    /// The descriptor is not one that can be used.
    #[error("host end of a vsock connection to guest port {port}: {reason}")]
    Socket {
        /// The guest port that was asked for.
        port: u32,
        /// What the kernel says.
        reason: io::Error,
    },
}

/// What outlives the device. Connections do not: the sockets at their host end cannot be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Where host ports go on. A new epoch may start somewhere else.
    pub next_host_port: u32,
    /// The guest may know connections that are gone, and has not been told.
    pub reset_owed: bool,
}

/// Tells the guest that its connections are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransportReset {
    None,
    Owed,
    /// Told, with this many buffers offered on the event queue, modulo 2^16. The guest offers the
    /// buffer again when it has acted; before that a new connection would be reset with the old ones.
    Told(u16),
}

/// The device.
#[derive(Debug)]
pub struct Vsock {
    guest_cid: u64,
    muxer: Muxer<HostSocket>,
    poll: Poll,
    reset: TransportReset,
}

impl Vsock {
    /// A device without connections. Host ports start at `first_host_port`, which should be random in
    /// each epoch, so that a guest does not take a new connection for one of the past.
    pub fn new(guest_cid: u64, first_host_port: u32) -> io::Result<Self> {
        Ok(Self {
            guest_cid,
            muxer: Muxer::new(guest_cid, first_host_port),
            poll: Poll::new()?,
            reset: TransportReset::None,
        })
    }

    /// A device that continues after [`Vsock::save`].
    pub fn restore(guest_cid: u64, state: State) -> io::Result<Self> {
        let mut device = Self::new(guest_cid, state.next_host_port)?;
        if state.reset_owed {
            device.reset = TransportReset::Owed;
            device.poll.wake();
        }
        Ok(device)
    }

    /// What is to be kept of the device.
    pub fn save(&self) -> State {
        State {
            next_host_port: self.muxer.next_port(),
            reset_owed: self.reset != TransportReset::None || self.muxer.counters().connections > 0,
        }
    }

    /// The configuration space: the guest's context id.
    pub fn config(&self) -> [u8; 8] {
        self.guest_cid.to_le_bytes()
    }

    /// See [`Counters`].
    pub fn counters(&self) -> Counters {
        self.muxer.counters()
    }

    /// Connections that exist, also those that are ending.
    pub fn connections(&self) -> usize {
        self.muxer.count()
    }

    /// Connects `socket`, a connected stream socket of the `AF_UNIX` family, to a port of the guest.
    /// The request waits until the driver is up. If the guest refuses, the socket is shut down; a
    /// socket that the host closes before the guest accepted is a connection given up.
    pub fn connect(&mut self, socket: OwnedFd, port: u32) -> Result<ConnectionId, ConnectError> {
        let failed = |reason| ConnectError::Socket { port, reason };
        let socket = self.poll.prepare(socket).map_err(failed)?;
        let id = self.muxer.connect(socket, port)?;
        let watched = match self.muxer.get(id).and_then(Connection::socket) {
            Some(socket) => self.poll.watch(socket, id),
            None => Ok(()),
        };
        if let Err(reason) = watched {
            self.muxer.update(id, |connection| {
                connection.on_host_event(false, false, true);
            });
            return Err(failed(reason));
        }
        self.poll.wake();
        Ok(id)
    }

    /// The descriptor to watch, level-triggered, while the device is active: when it is readable, call
    /// [`Vsock::process`].
    pub fn epoll_fd(&self) -> BorrowedFd<'_> {
        self.poll.descriptor()
    }

    /// The driver reset the device: the connections that it knew are gone.
    pub fn reset(&mut self) {
        self.muxer.reset();
        // A driver that starts afresh has no connections to reset.
        self.reset = TransportReset::None;
    }

    /// Does what there is to do: to be called when the driver is up, when it kicked any queue, and when
    /// [`Vsock::epoll_fd`] is readable. A call too many does no harm. Returns whether the guest is to
    /// be interrupted. What the budget did not allow makes the descriptor readable again.
    pub fn process<M: GuestMemory>(&mut self, mem: &M, queues: &mut [Queue]) -> Result<bool, Error> {
        let got = queues.len();
        let [to_guest, from_guest, events] = queues else {
            return Err(Error::Queues { got });
        };
        self.take_host_events()?;
        let mut interrupt = self.drain_from_guest(mem, from_guest)?;
        interrupt |= self.tell_reset(mem, events)?;
        if self.reset == TransportReset::None {
            interrupt |= self.fill_to_guest(mem, to_guest)?;
        }
        Ok(interrupt)
    }

    /// Notes what happened on the host's sockets, and writes to those that take bytes again.
    fn take_host_events(&mut self) -> Result<(), Error> {
        for event in self.poll.take().map_err(Error::Poll)? {
            self.muxer.update(event.id, |connection| {
                connection.on_host_event(event.readable, event.writable, event.hung_up);
            });
            self.flush(event.id);
        }
        Ok(())
    }

    // ---- from the guest ----

    fn drain_from_guest<M: GuestMemory>(&mut self, mem: &M, queue: &mut Queue) -> Result<bool, Error> {
        let (mut used, mut bytes) = (false, 0_usize);
        queue.disable_notification(mem)?;
        for _ in 0..PACKET_BUDGET {
            let Some(chain) = queue.iter(mem)?.next() else {
                if queue.enable_notification(mem)? {
                    continue;
                }
                return Ok(used && wants_interrupt(mem, queue)?);
            };
            let head = chain.head_index();
            bytes = bytes.saturating_add(self.take_packet(mem, queue, head)?);
            queue.add_used(mem, head, 0)?;
            used = true;
            if bytes > BYTE_BUDGET {
                break;
            }
        }
        self.poll.wake();
        Ok(used && wants_interrupt(mem, queue)?)
    }

    /// Takes one packet; returns the length of its payload.
    fn take_packet<M: GuestMemory>(&mut self, mem: &M, queue: &Queue, head: u16) -> Result<usize, Error> {
        let mut front = Buffers::new(mem, queue, head, Permissions::Read)?;
        let mut payload = front.split_off(HEADER_SIZE)?;
        let mut bytes = [0; HEADER_SIZE];
        front.copy_to(&mut bytes);
        let header = Header::from_bytes(&bytes);
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        if payload.len() < len {
            return Err(Error::Chain(ChainError::Short { head, have: payload.len(), need: len }));
        }
        if let Some((id, accepted)) = self.muxer.on_packet(&header) {
            if accepted > 0 {
                payload.split_off(len)?;
                self.deliver(id, payload)?;
            }
            self.flush(id);
        }
        Ok(len)
    }

    /// Passes payload to the host as far as it takes it now, and holds the rest.
    fn deliver<M: GuestMemory>(&mut self, id: ConnectionId, mut payload: Buffers<'_, M>) -> Result<(), Error> {
        let direct = self
            .muxer
            .get(id)
            .filter(|connection| connection.host_takes())
            .and_then(Connection::socket)
            .map(|socket| payload.write_to(socket.as_fd()));
        if let Some((written, error)) = direct {
            payload = payload.split_off(written)?;
            self.muxer.update(id, |connection| {
                connection.host_took(u32::try_from(written).unwrap_or(u32::MAX));
                if let Some(error) = error {
                    on_write_error(connection, &error);
                }
            });
        }
        payload.drain(|piece| {
            self.muxer.update(id, |connection| connection.hold(piece));
        });
        Ok(())
    }

    /// Writes held bytes to the host as far as it takes them, then tells it which direction ended.
    fn flush(&mut self, id: ConnectionId) {
        loop {
            let Some(connection) = self.muxer.get(id) else {
                return;
            };
            let (held, Some(socket)) = (connection.held(), connection.socket()) else {
                return;
            };
            if held.is_empty() {
                break;
            }
            let result = rustix::io::write(socket, held);
            self.muxer.update(id, |connection| match result {
                Ok(count) => connection.held_taken(count),
                Err(error) => on_write_error(connection, &error.into()),
            });
        }
        while let Some(Some(what)) = self.muxer.update(id, Connection::take_host_shutdown) {
            if let Some(socket) = self.muxer.get(id).and_then(Connection::socket) {
                socket.shut(what);
            }
        }
    }

    // ---- to the guest ----

    fn fill_to_guest<M: GuestMemory>(&mut self, mem: &M, queue: &mut Queue) -> Result<bool, Error> {
        let (mut used, mut bytes) = (false, 0_usize);
        // The guest need not tell of new buffers as long as we do not wait for one.
        queue.disable_notification(mem)?;
        for _ in 0..PACKET_BUDGET {
            if !self.muxer.has_turns() {
                break;
            }
            let Some(chain) = queue.iter(mem)?.next() else {
                if queue.enable_notification(mem)? {
                    continue;
                }
                break;
            };
            let head = chain.head_index();
            let mut front = Buffers::new(mem, queue, head, Permissions::Write)?;
            let body = front.split_off(HEADER_SIZE)?;
            if body.len() == 0 {
                return Err(Error::Chain(ChainError::Short {
                    head,
                    have: HEADER_SIZE,
                    need: HEADER_SIZE.saturating_add(1),
                }));
            }
            let Some(header) = self.next_packet(&body) else {
                queue.go_to_previous_position();
                break;
            };
            front.copy_from(&header.to_bytes());
            let len = usize::try_from(header.len).unwrap_or(usize::MAX);
            let total = header.len.saturating_add(HEADER_LEN);
            queue.add_used(mem, head, total)?;
            used = true;
            bytes = bytes.saturating_add(len);
            if bytes > BYTE_BUDGET {
                break;
            }
        }
        // Either the budget is spent or the queue is empty; the guest tells when the latter changes.
        if self.muxer.has_turns() && queue.avail_idx(mem, Ordering::Acquire)?.0 != queue.next_avail() {
            self.poll.wake();
        }
        Ok(used && wants_interrupt(mem, queue)?)
    }

    /// The next packet for the guest. Its payload, if it has any, is in `body` already.
    fn next_packet<M: GuestMemory>(&mut self, body: &Buffers<'_, M>) -> Option<Header> {
        loop {
            let (id, limit) = match self.muxer.next_outgoing()? {
                Outgoing::Control(header) => return Some(header),
                Outgoing::Data { id, limit } => (id, limit),
            };
            let Some(socket) = self.muxer.get(id).and_then(Connection::socket) else {
                continue;
            };
            let limit = usize::try_from(limit).unwrap_or(usize::MAX).min(PACKET_LIMIT);
            match body.read_from(socket.as_fd(), limit).map(u32::try_from) {
                Ok(Ok(0)) => self.muxer.update(id, Connection::host_ended),
                Ok(Ok(count)) => return self.muxer.sent(id, count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.muxer.update(id, Connection::host_read_blocks)
                }
                // A signal: another turn.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => self.muxer.update(id, |_| ()),
                Ok(Err(_)) | Err(_) => self.muxer.update(id, Connection::host_failed),
            };
        }
    }

    /// Tells the guest that its connections are gone, if that is owed and there is a buffer; and notes
    /// when it has acted.
    fn tell_reset<M: GuestMemory>(&mut self, mem: &M, queue: &mut Queue) -> Result<bool, Error> {
        match self.reset {
            TransportReset::None => Ok(false),
            TransportReset::Told(offered) => {
                if queue.avail_idx(mem, Ordering::Acquire)?.0 != offered {
                    self.reset = TransportReset::None;
                }
                Ok(false)
            }
            TransportReset::Owed => {
                let Some(chain) = queue.iter(mem)?.next() else {
                    return Ok(false);
                };
                let head = chain.head_index();
                let mut buffer = Buffers::new(mem, queue, head, Permissions::Write)?;
                buffer.split_off(TRANSPORT_RESET.len())?;
                buffer.copy_from(&TRANSPORT_RESET);
                self.reset = TransportReset::Told(queue.avail_idx(mem, Ordering::Acquire)?.0);
                queue.add_used(mem, head, 4)?;
                Ok(wants_interrupt(mem, queue)?)
            }
        }
    }
}

/// [`HEADER_SIZE`] as the length of a used buffer.
#[allow(clippy::cast_possible_truncation)]
const HEADER_LEN: u32 = HEADER_SIZE as u32;

fn on_write_error(connection: &mut Connection<HostSocket>, error: &io::Error) {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::AGAIN) => connection.host_write_blocks(),
        // A signal: what is held is written at once, in `flush`.
        Some(Errno::INTR) => {}
        _ => connection.host_refuses(),
    }
}
