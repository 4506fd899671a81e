//! One vsock connection as a state machine: no descriptor, no clock, no guest memory.
//!
//! The owner tells it what happened on either side and then asks what is to be sent. What the guest
//! may make us hold is bounded by [`BUFFER_SIZE`]; what we owe the guest is a handful of flags, not a
//! queue, so a guest that takes nothing makes nothing grow.
//!
//! The two directions end apart from one another. The connection ends when both have, or at once when
//! the guest breaks the protocol.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::collections::VecDeque;

use super::packet::{Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

/// Bytes from the guest that one connection holds while the host does not read: the credit that we
/// advertise. It equals the default of Linux, so the guest fills it in whole packets.
pub const BUFFER_SIZE: u32 = 256 * 1024;

/// An emptied buffer larger than this gives its memory back.
const KEPT_CAPACITY: usize = 16 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The guest has not been asked yet: the driver may not even be up.
    Wanted,
    /// Asked; the guest has not answered.
    Requested,
    /// Accepted. Either direction may have ended.
    Open,
    /// The guest is done in both directions; what it sent last is still on its way to the host.
    Draining,
    /// Over, but for one last packet that may be owed.
    Over,
}

/// What the host end is to be told with `shutdown(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostShutdown {
    /// The guest will read no more: writes of the host shall fail.
    Read,
    /// The guest will write no more: the host shall see the end of the stream.
    Write,
}

/// What a connection sends next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A packet without payload: operation and flags.
    Control(Op, u32),
    /// Payload: at most so many bytes of what the host wrote.
    Data(u32),
}

/// Bytes on their way from the guest to the host.
#[derive(Debug, Default)]
struct Inbound {
    /// Received, and not yet taken by the host.
    tail: VecDeque<u8>,
    /// Bytes that the host took, modulo 2^32.
    forwarded: u32,
    /// `forwarded` as the guest last heard it.
    told: u32,
}

/// Bytes on their way from the host to the guest, and what the guest said about its buffer.
#[derive(Debug, Default)]
struct Outbound {
    /// Bytes sent, modulo 2^32.
    sent: u32,
    /// Size of the guest's buffer.
    peer_size: u32,
    /// Bytes that left it, modulo 2^32.
    peer_forwarded: u32,
    /// A CREDIT_REQUEST is out and has not been answered by credit.
    asked: bool,
}

/// The host's end of the connection.
#[derive(Debug)]
struct HostEnd<S> {
    /// Closed by dropping it.
    socket: Option<S>,
    /// There may be something to read: true until a read would block.
    readable: bool,
    /// There may be room to write: true until a write would block.
    writable: bool,
    /// False after the end of what the host sends.
    sends: bool,
    /// False once the host refuses to take more.
    receives: bool,
    /// Nothing new can pass in either direction; what the host wrote before can still be read.
    hung_up: bool,
    /// Shutdowns already handed out, as SHUTDOWN flags seen from the guest.
    shut: u32,
}

/// The guest's end of the connection.
#[derive(Debug)]
struct GuestEnd {
    port: u32,
    sends: bool,
    receives: bool,
}

/// Control packets that the guest has still to get.
#[derive(Debug, Default)]
struct Owed {
    credit: bool,
    /// SHUTDOWN flags that are true, and those that the guest has heard.
    shutdown: u32,
    announced: u32,
    last: Option<(Op, u32)>,
}

/// One connection. `S` is the host's socket, opaque here.
#[derive(Debug)]
pub struct Connection<S> {
    phase: Phase,
    host: HostEnd<S>,
    guest: GuestEnd,
    inbound: Inbound,
    outbound: Outbound,
    owed: Owed,
    /// The muxer's mark: this connection waits for its turn.
    pub(super) queued: bool,
}

impl<S> Connection<S> {
    pub(super) fn new(socket: S, guest_port: u32) -> Self {
        Self {
            phase: Phase::Wanted,
            host: HostEnd {
                socket: Some(socket),
                readable: true,
                writable: true,
                sends: true,
                receives: true,
                hung_up: false,
                shut: 0,
            },
            guest: GuestEnd { port: guest_port, sends: true, receives: true },
            inbound: Inbound::default(),
            outbound: Outbound::default(),
            owed: Owed::default(),
            queued: false,
        }
    }

    /// The host's socket, until the connection is over.
    pub fn socket(&self) -> Option<&S> {
        self.host.socket.as_ref()
    }

    pub(super) fn guest_port(&self) -> u32 {
        self.guest.port
    }

    /// The guest has not heard of this connection yet.
    pub(super) fn is_unrequested(&self) -> bool {
        self.phase == Phase::Wanted
    }

    /// Nothing is left to do, not even a packet to send.
    pub(super) fn is_finished(&self) -> bool {
        self.phase == Phase::Over && self.owed.last.is_none()
    }

    // ---- the guest's side ----

    /// Takes a packet from the guest; `op` is `None` if the operation is not one that exists. Returns
    /// how many bytes of payload are to be delivered: pass them to the host or to [`Self::hold`].
    pub(super) fn on_packet(&mut self, op: Option<Op>, header: &Header) -> u32 {
        self.learn_credit(header);
        let payload_fits_op = header.len == 0 || op == Some(Op::Data);
        match (self.phase, op) {
            // We have said the last word, or are about to. A RST says that the guest needs none.
            (Phase::Draining | Phase::Over, Some(Op::Reset)) => self.owed.last = None,
            (Phase::Draining | Phase::Over, _) => {}
            (_, Some(Op::Reset)) => self.end(None),
            _ if !payload_fits_op => self.fail(),
            (Phase::Requested, Some(Op::Response)) => self.phase = Phase::Open,
            (Phase::Open, Some(Op::Data)) => return self.on_data(header.len),
            (Phase::Open, Some(Op::CreditUpdate)) => {}
            (Phase::Open, Some(Op::CreditRequest)) => self.owed.credit = true,
            (Phase::Open, Some(Op::Shutdown)) => self.on_guest_shutdown(header.flags),
            _ => self.fail(),
        }
        0
    }

    fn on_data(&mut self, len: u32) -> u32 {
        let held = u32::try_from(self.inbound.tail.len()).unwrap_or(u32::MAX);
        if !self.guest.sends || len > BUFFER_SIZE.saturating_sub(held) {
            self.fail();
            return 0;
        }
        len
    }

    fn on_guest_shutdown(&mut self, flags: u32) {
        self.guest.receives &= flags & SHUTDOWN_RECEIVE == 0;
        self.guest.sends &= flags & SHUTDOWN_SEND == 0;
        if !self.guest.receives && !self.guest.sends {
            // The guest's `close` waits for this RST; it need not wait for a slow host.
            self.phase = Phase::Draining;
            self.owed.last = Some((Op::Reset, 0));
        }
    }

    fn learn_credit(&mut self, header: &Header) {
        self.outbound.peer_size = header.buf_alloc;
        self.outbound.peer_forwarded = header.fwd_cnt;
        if self.credit() > 0 {
            self.outbound.asked = false;
        }
        self.forward(0);
    }

    /// Bytes that the guest has room for. A guest that shrinks its buffer below what is on the way
    /// has room for none.
    fn credit(&self) -> u32 {
        let out = &self.outbound;
        let in_flight = out.sent.wrapping_sub(out.peer_forwarded);
        out.peer_size.saturating_sub(in_flight)
    }

    /// Counts bytes that left our buffer. The guest hears of it when half of the window is free. The
    /// window is the smaller of the two buffers, because newer Linux guests send no more than they
    /// would themselves receive: with ours alone, a guest with a small buffer would wait for ever.
    fn forward(&mut self, count: u32) {
        let inbound = &mut self.inbound;
        inbound.forwarded = inbound.forwarded.wrapping_add(count);
        let window = BUFFER_SIZE.min(self.outbound.peer_size);
        if inbound.forwarded.wrapping_sub(inbound.told) >= (window / 2).max(1) {
            self.owed.credit = true;
        }
    }

    // ---- the host's side ----

    /// Something may have changed on the host's socket.
    pub fn on_host_event(&mut self, readable: bool, writable: bool, hung_up: bool) {
        self.host.readable |= readable || hung_up;
        self.host.writable |= writable || hung_up;
        self.host.hung_up |= hung_up;
        if !hung_up {
            return;
        }
        match self.phase {
            // Closed before the guest accepted: the host gave up.
            Phase::Wanted => self.end(None),
            Phase::Requested => self.fail(),
            Phase::Open if !self.host.sends => self.host_refuses(),
            Phase::Open | Phase::Draining | Phase::Over => {}
        }
    }

    /// A read of the host's socket would block.
    pub fn host_read_blocks(&mut self) {
        self.host.readable = false;
    }

    /// The host will send no more.
    pub fn host_ended(&mut self) {
        self.host.sends = false;
        self.owed.shutdown |= SHUTDOWN_SEND;
        if self.host.hung_up {
            self.host_refuses();
        }
    }

    /// The host's socket failed: the guest gets a RST.
    pub fn host_failed(&mut self) {
        if self.phase == Phase::Draining {
            self.host_refuses();
        } else {
            self.fail();
        }
    }

    /// `count` bytes of what the host wrote are on their way to the guest.
    pub(super) fn sent(&mut self, count: u32) {
        self.outbound.sent = self.outbound.sent.wrapping_add(count);
    }

    /// Whether payload may go straight to the host, in order.
    pub fn host_takes(&self) -> bool {
        self.host.writable && self.host.receives && self.inbound.tail.is_empty()
    }

    /// The host took `count` bytes of payload directly.
    pub fn host_took(&mut self, count: u32) {
        self.forward(count);
    }

    /// A write to the host's socket would block.
    pub fn host_write_blocks(&mut self) {
        self.host.writable = false;
    }

    /// The host will take no more: what is held for it is dropped, and the guest told.
    pub fn host_refuses(&mut self) {
        self.host.receives = false;
        self.owed.shutdown |= SHUTDOWN_RECEIVE;
        let dropped = u32::try_from(self.inbound.tail.len()).unwrap_or(u32::MAX);
        self.inbound.tail = VecDeque::new();
        self.forward(dropped);
    }

    /// Holds payload that the host has not taken yet. The total is bounded: `on_packet` accepted it.
    pub fn hold(&mut self, bytes: &[u8]) {
        if self.host.receives {
            self.inbound.tail.extend(bytes);
        } else {
            // On its way when the host went; the guest will learn it from our SHUTDOWN.
            self.forward(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        }
    }

    /// Held bytes to write to the host now; empty if there are none or the host does not take any.
    pub fn held(&self) -> &[u8] {
        if self.host.writable { self.inbound.tail.as_slices().0 } else { &[] }
    }

    /// The host took the first `count` of the held bytes.
    pub fn held_taken(&mut self, count: usize) {
        let tail = &mut self.inbound.tail;
        let count = count.min(tail.len());
        drop(tail.drain(..count));
        if tail.is_empty() && tail.capacity() > KEPT_CAPACITY {
            *tail = VecDeque::new();
        }
        self.forward(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// A shutdown that the host's socket is to get now, handed out once.
    pub fn take_host_shutdown(&mut self) -> Option<HostShutdown> {
        let shut = self.host.shut;
        if !self.guest.receives && shut & SHUTDOWN_RECEIVE == 0 {
            self.host.shut |= SHUTDOWN_RECEIVE;
            return Some(HostShutdown::Read);
        }
        let all_taken = self.inbound.tail.is_empty();
        if !self.guest.sends && all_taken && shut & SHUTDOWN_SEND == 0 {
            self.host.shut |= SHUTDOWN_SEND;
            return Some(HostShutdown::Write);
        }
        None
    }

    // ---- both sides ----

    /// Ends the connection if both directions have ended. To be called after every change.
    pub(super) fn settle(&mut self) {
        let from_host_done = !self.host.sends || !self.guest.receives;
        let from_guest_done = self.inbound.tail.is_empty() && (!self.guest.sends || !self.host.receives);
        match self.phase {
            Phase::Open if from_host_done && from_guest_done => {
                self.end(Some((Op::Shutdown, SHUTDOWN_BOTH)));
            }
            Phase::Draining if from_guest_done => {
                let last = self.owed.last;
                self.end(last);
            }
            _ => {}
        }
    }

    /// What is to be sent next, once; `None` if there is nothing to send for now. Credit goes first,
    /// since the guest may wait for it in order to send what the host waits for. The end of the host's
    /// stream comes after its data because it is read after them.
    pub(super) fn next_turn(&mut self) -> Option<Next> {
        match self.phase {
            Phase::Wanted => {
                self.phase = Phase::Requested;
                Some(Next::Control(Op::Request, 0))
            }
            Phase::Requested => None,
            Phase::Open if self.owed.credit => Some(Next::Control(Op::CreditUpdate, 0)),
            Phase::Open if self.owed.shutdown & !self.owed.announced != 0 => {
                self.owed.announced = self.owed.shutdown;
                Some(Next::Control(Op::Shutdown, self.owed.shutdown))
            }
            Phase::Open if self.host.readable && self.host.sends && self.guest.receives => match self.credit() {
                0 if self.outbound.asked => None,
                0 => {
                    self.outbound.asked = true;
                    Some(Next::Control(Op::CreditRequest, 0))
                }
                credit => Some(Next::Data(credit)),
            },
            Phase::Open => None,
            Phase::Draining | Phase::Over => {
                let (op, flags) = self.owed.last.take()?;
                Some(Next::Control(op, flags))
            }
        }
    }

    /// The credit that goes into a header; from now on the guest knows it.
    pub(super) fn tell_credit(&mut self) -> (u32, u32) {
        self.inbound.told = self.inbound.forwarded;
        self.owed.credit = false;
        (BUFFER_SIZE, self.inbound.forwarded)
    }

    /// Ends the connection at once with a RST.
    fn fail(&mut self) {
        self.end(Some((Op::Reset, 0)));
    }

    fn end(&mut self, last: Option<(Op, u32)>) {
        self.phase = Phase::Over;
        self.host.socket = None;
        self.inbound.tail = VecDeque::new();
        self.owed.last = last;
    }
}
