//! All connections of one device: routing, fairness and limits. Pure, like [`Connection`].
//!
//! Connections begin on the host only. Each has a host port of its own, so the host port alone finds
//! it. Whoever has something to say to the guest waits in one first-in-first-out line, once, and says
//! one packet a turn.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::collections::{BTreeMap, VecDeque};

use super::connection::{Connection, Next};
use super::packet::{Header, Op, TYPE_STREAM};

/// The context id of the host.
pub const HOST_CID: u64 = 2;

/// Connections at a time. Each costs a descriptor of the VMM and up to
/// [`BUFFER_SIZE`](super::connection::BUFFER_SIZE) of its memory.
pub const MAX_CONNECTIONS: usize = 1024;

/// Ports below are never used by the host: a guest takes them for privileged ones.
pub const FIRST_PORT: u32 = 1024;

/// RSTs that wait for packets that belong to no connection. When so many wait, further ones are
/// dropped: a guest that sends such packets without taking the answers gets no memory for it.
const MAX_STRAY_RESETS: usize = 64;

/// Names a connection: its host port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(pub(super) u32);

/// A packet for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outgoing {
    /// A packet without payload.
    Control(Header),
    /// Up to `limit` bytes of what the host wrote. Report what became of it with [`Muxer::sent`] or
    /// [`Muxer::update`]: the connection has no further turn before.
    Data {
        /// Whose data.
        id: ConnectionId,
        /// The guest's credit; never 0.
        limit: u32,
    },
}

/// What happened since the device was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Connections that were asked for.
    pub connections: u64,
    /// Packets of the guest with a context id that is not its own or not ours. They get no answer.
    pub misaddressed: u64,
    /// Packets of the guest that belong to no connection, attempts to connect among them.
    pub strays: u64,
    /// RSTs for strays that were dropped since too many waited.
    pub resets_dropped: u64,
}

/// As many connections exist as may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no vsock connection to guest port {port}: all {MAX_CONNECTIONS} are in use")]
pub struct TooManyConnections {
    /// The guest port that was asked for.
    pub port: u32,
}

#[derive(Debug)]
enum Turn {
    Of(u32),
    StrayReset(Header),
}

/// The connections of one device.
#[derive(Debug)]
pub struct Muxer<S> {
    guest_cid: u64,
    next_port: u32,
    connections: BTreeMap<u32, Connection<S>>,
    turns: VecDeque<Turn>,
    stray_resets: usize,
    counters: Counters,
}

impl<S> Muxer<S> {
    /// A muxer without connections. `first_port` is where host ports start; a port that may not be
    /// used counts as the first one that may.
    pub fn new(guest_cid: u64, first_port: u32) -> Self {
        Self {
            guest_cid,
            next_port: usable(first_port),
            connections: BTreeMap::new(),
            turns: VecDeque::new(),
            stray_resets: 0,
            counters: Counters::default(),
        }
    }

    /// The host port of the next connection, unless it is in use.
    pub fn next_port(&self) -> u32 {
        self.next_port
    }

    /// Connections that exist, also those that are ending.
    pub fn count(&self) -> usize {
        self.connections.len()
    }

    /// See [`Counters`].
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Begins a connection to `guest_port`.
    pub fn connect(&mut self, socket: S, guest_port: u32) -> Result<ConnectionId, TooManyConnections> {
        if self.connections.len() >= MAX_CONNECTIONS {
            return Err(TooManyConnections { port: guest_port });
        }
        // Ends, since there are more ports than connections.
        while self.connections.contains_key(&self.next_port) {
            self.next_port = usable(self.next_port.wrapping_add(1));
        }
        let id = ConnectionId(self.next_port);
        self.next_port = usable(self.next_port.wrapping_add(1));
        self.connections.insert(id.0, Connection::new(socket, guest_port));
        self.counters.connections = self.counters.connections.saturating_add(1);
        self.enqueue(id);
        Ok(id)
    }

    /// A connection, to look at. It may be gone.
    pub fn get(&self, id: ConnectionId) -> Option<&Connection<S>> {
        self.connections.get(&id.0)
    }

    /// Changes a connection and draws the consequences. `None` if it is gone.
    pub fn update<R>(&mut self, id: ConnectionId, change: impl FnOnce(&mut Connection<S>) -> R) -> Option<R> {
        let connection = self.connections.get_mut(&id.0)?;
        let result = change(connection);
        connection.settle();
        self.enqueue(id);
        Some(result)
    }

    /// Takes a packet of the guest. Returns the connection that it belongs to, and the number of bytes
    /// of payload to be delivered.
    pub fn on_packet(&mut self, header: &Header) -> Option<(ConnectionId, u32)> {
        if header.src_cid != self.guest_cid || header.dst_cid != HOST_CID {
            self.counters.misaddressed = self.counters.misaddressed.saturating_add(1);
            return None;
        }
        let id = ConnectionId(header.dst_port);
        let known = self.get(id).is_some_and(|connection| connection.guest_port() == header.src_port);
        if !known || header.kind != TYPE_STREAM {
            self.on_stray(header);
            return None;
        }
        let op = Op::from_wire(header.op);
        let payload = self.update(id, |connection| connection.on_packet(op, header))?;
        Some((id, payload))
    }

    /// Whether somebody waits for a turn. It may turn out that there is nothing to say.
    pub fn has_turns(&self) -> bool {
        !self.turns.is_empty()
    }

    /// The next packet for the guest.
    pub fn next_outgoing(&mut self) -> Option<Outgoing> {
        loop {
            let port = match self.turns.pop_front()? {
                Turn::StrayReset(header) => {
                    self.stray_resets = self.stray_resets.saturating_sub(1);
                    return Some(Outgoing::Control(header));
                }
                Turn::Of(port) => port,
            };
            let id = ConnectionId(port);
            let Some(connection) = self.connections.get_mut(&port) else {
                continue;
            };
            connection.queued = false;
            match connection.next_turn() {
                Some(Next::Data(limit)) => return Some(Outgoing::Data { id, limit }),
                Some(Next::Control(op, flags)) => {
                    let header = address(self.guest_cid, id, connection, op, flags, 0);
                    self.enqueue(id);
                    return Some(Outgoing::Control(header));
                }
                None => {}
            }
        }
    }

    /// `len` bytes of a connection's data go to the guest: the header that belongs before them.
    pub fn sent(&mut self, id: ConnectionId, len: u32) -> Option<Header> {
        let guest_cid = self.guest_cid;
        self.update(id, |connection| {
            connection.sent(len);
            address(guest_cid, id, connection, Op::Data, 0, len)
        })
    }

    /// The guest's driver went away: so did every connection that it knew. Those that it never heard
    /// of stay, because a driver that starts resets the device first.
    pub fn reset(&mut self) {
        self.connections.retain(|_, connection| connection.is_unrequested());
        self.turns = self.connections.keys().copied().map(Turn::Of).collect();
        for connection in self.connections.values_mut() {
            connection.queued = true;
        }
        self.stray_resets = 0;
    }

    /// Puts a connection in line, or removes it if it is finished.
    fn enqueue(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id.0) else {
            return;
        };
        if connection.is_finished() {
            if connection.queued {
                self.turns.retain(|turn| !matches!(turn, Turn::Of(port) if *port == id.0));
            }
            self.connections.remove(&id.0);
        } else if !connection.queued {
            connection.queued = true;
            self.turns.push_back(Turn::Of(id.0));
        }
    }

    /// Answers a packet that belongs to no connection with a RST, unless it is one.
    fn on_stray(&mut self, header: &Header) {
        self.counters.strays = self.counters.strays.saturating_add(1);
        if header.op == Op::Reset as u16 {
            return;
        }
        if self.stray_resets >= MAX_STRAY_RESETS {
            self.counters.resets_dropped = self.counters.resets_dropped.saturating_add(1);
            return;
        }
        self.stray_resets = self.stray_resets.saturating_add(1);
        self.turns.push_back(Turn::StrayReset(Header {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: header.dst_port,
            dst_port: header.src_port,
            kind: header.kind,
            op: Op::Reset as u16,
            ..Header::default()
        }));
    }
}

/// The header of a packet of `connection`.
fn address<S>(
    guest_cid: u64,
    id: ConnectionId,
    connection: &mut Connection<S>,
    op: Op,
    flags: u32,
    len: u32,
) -> Header {
    let (buf_alloc, fwd_cnt) = connection.tell_credit();
    Header {
        src_cid: HOST_CID,
        dst_cid: guest_cid,
        src_port: id.0,
        dst_port: connection.guest_port(),
        len,
        kind: TYPE_STREAM,
        op: op as u16,
        flags,
        buf_alloc,
        fwd_cnt,
    }
}

/// `port`, or the first usable one: neither a low port nor the wildcard `VMADDR_PORT_ANY`.
fn usable(port: u32) -> u32 {
    if port < FIRST_PORT || port == u32::MAX { FIRST_PORT } else { port }
}
