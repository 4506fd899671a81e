//! TCP with the guest, by smoltcp: segments in and out, one socket for each flow that was admitted.
//!
//! A socket, and with it its buffers, is made only when the destination has been reached: until then a connection is
//! the bytes of its SYN. So what the guest sees is honest (nobody there: a reset, and never a connection that opens and
//! then ends), and a flood of SYNs costs nothing that grows.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::SocketAddrV4;
use std::time::Duration;

use smoltcp::iface::{Config, Interface, PollResult, SocketHandle, SocketSet};
use smoltcp::phy::{Checksum, ChecksumCapabilities, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr, IpEndpoint};

use crate::flow::Tuple;
use crate::plan::{ETHERNET, GATEWAY, MTU};
use crate::wire::{self, Reader};

/// Bytes that a flow may hold in each direction.
pub const BUFFER: usize = 256 << 10;
/// Frames for the guest that may wait. Beyond, sockets keep what they have.
const MAX_OUT: usize = 64;
/// Sockets of connections that are over, kept for new ones. To give their buffers back and take others makes the host's kernel
/// clear half a MiB, and as much as 2 MiB where it uses huge pages, before the guest hears of its connection.
const MAX_IDLE: usize = 8;

/// The guest's TCP connections.
pub struct Stack {
    interface: Interface,
    sockets: SocketSet<'static>,
    out: VecDeque<Vec<u8>>,
    /// Buffers of frames that were sent, to be used again.
    spare: Vec<Vec<u8>>,
    /// By connection: the sequence number after the last byte that was sent.
    sent: HashMap<Tuple, u32>,
    /// Sockets without a connection.
    idle: Vec<Socket<'static>>,
}

impl fmt::Debug for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stack").field("out", &self.out.len()).finish_non_exhaustive()
    }
}

impl Stack {
    /// A stack without connections. `seed` makes its sequence numbers its own.
    pub fn new(seed: u64) -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = seed;
        let (mut out, mut spare, mut sent) = (VecDeque::new(), Vec::new(), HashMap::new());
        let mut link = Link { incoming: None, out: &mut out, spare: &mut spare, sent: &mut sent };
        let mut interface = Interface::new(config, &mut link, Instant::ZERO);
        interface.update_ip_addrs(|addresses| {
            // There is room: it is the first. A block of one address has no broadcast address.
            let _ = addresses.push(IpCidr::new(IpAddress::Ipv4(GATEWAY), 32));
        });
        // Every destination is ours to answer for. Whether it is answered by more than a reset is decided before a
        // socket exists.
        interface.set_any_ip(true);
        Self { interface, sockets: SocketSet::new(Vec::new()), out, spare, sent, idle: Vec::new() }
    }

    /// Takes a segment that the gate has checked. One that belongs to no connection gets a reset.
    pub fn segment(&mut self, packet: &[u8], now: Duration) {
        let mut link =
            Link { incoming: Some(packet), out: &mut self.out, spare: &mut self.spare, sent: &mut self.sent };
        let _ = self.interface.poll_ingress_single(instant(now), &mut link, &mut self.sockets);
    }

    /// Opens the connection that a SYN asked for. `None` if it is no SYN that a connection can begin with.
    pub fn open(&mut self, destination: SocketAddrV4, syn: &[u8], now: Duration) -> Option<SocketHandle> {
        let mut socket = self.idle.pop().unwrap_or_else(new_socket);
        let endpoint = IpEndpoint::new(IpAddress::Ipv4(*destination.ip()), destination.port());
        socket.listen(endpoint).ok()?;
        let handle = self.sockets.add(socket);
        self.segment(syn, now);
        if self.socket(handle).state() == State::SynReceived {
            return Some(handle);
        }
        self.close(handle);
        None
    }

    /// A connection's socket.
    pub fn socket(&mut self, handle: SocketHandle) -> &mut Socket<'static> {
        self.sockets.get_mut(handle)
    }

    /// Forgets a connection. Segments that still come get a reset.
    pub fn close(&mut self, handle: SocketHandle) {
        let smoltcp::socket::Socket::Tcp(mut socket) = self.sockets.remove(handle);
        if self.idle.len() < MAX_IDLE {
            // Only one that is closed can listen anew, and then nothing of it is left but its buffers.
            socket.abort();
            self.idle.push(socket);
        }
    }

    /// The sequence number after the last byte that was sent on a connection.
    pub fn next_sequence(&self, tuple: &Tuple) -> Option<u32> {
        self.sent.get(tuple).copied()
    }

    /// Forgets which sequence numbers were sent but on these connections.
    pub fn keep_sequences(&mut self, keep: impl Fn(&Tuple) -> bool) {
        self.sent.retain(|tuple, _| keep(tuple));
    }

    /// Resets a connection of which nothing is left here but its next sequence number.
    pub fn reset(&mut self, (port, source): Tuple, sequence: u32) {
        self.out.push_back(wire::tcp_reset(*source.ip(), source.port(), port, sequence));
    }

    /// Makes the frames that connections have to send. `false` if some have to wait for room.
    pub fn egress(&mut self, now: Duration) -> bool {
        let mut link = Link { incoming: None, out: &mut self.out, spare: &mut self.spare, sent: &mut self.sent };
        while link.out.len() < MAX_OUT {
            if self.interface.poll_egress(instant(now), &mut link, &mut self.sockets) == PollResult::None {
                return true;
            }
        }
        false
    }

    /// When a connection has something to do of itself: to send again, to acknowledge.
    pub fn due(&mut self, now: Duration) -> Option<Duration> {
        let at = self.interface.poll_at(instant(now), &self.sockets)?;
        Some(Duration::from_micros(u64::try_from(at.total_micros()).unwrap_or(0)))
    }

    /// Whether there is room for a frame that does not come from a connection.
    pub fn has_room(&self) -> bool {
        self.out.len() < MAX_OUT
    }

    /// Queues a frame that does not come from a connection.
    pub fn push(&mut self, frame: Vec<u8>) {
        self.out.push_back(frame);
    }

    /// The next frame for the guest. It stays until [`Self::sent`].
    pub fn front(&self) -> Option<&[u8]> {
        self.out.front().map(Vec::as_slice)
    }

    /// The frame at the front has been sent.
    pub fn sent(&mut self) {
        if let Some(frame) = self.out.pop_front()
            && self.spare.len() < MAX_OUT
        {
            self.spare.push(frame);
        }
    }
}

fn new_socket() -> Socket<'static> {
    let buffer = || SocketBuffer::new(vec![0; BUFFER]);
    let mut socket = Socket::new(buffer(), buffer());
    // The link is local and loses nothing: there is no gain in waiting.
    socket.set_nagle_enabled(false);
    socket.set_ack_delay(None);
    socket
}

/// The connection of a segment of ours, and the sequence number after it.
fn next_sequence(packet: &[u8]) -> Option<(Tuple, u32)> {
    let mut reader = Reader::new(packet.get(12..)?);
    let source = reader.address()?;
    let _guest = reader.address()?;
    let (source_port, port, sequence) = (reader.u16()?, reader.u16()?, reader.u32()?);
    let _acknowledged = reader.u32()?;
    let [offset, flags] = reader.array()?;
    let header = usize::from(offset >> 4).saturating_mul(4).saturating_add(20);
    let payload = u32::try_from(packet.len().saturating_sub(header)).ok()?;
    // SYN and FIN count as a byte each.
    let control = u32::from(flags & 1).saturating_add(u32::from(flags >> 1 & 1));
    let next = sequence.wrapping_add(payload).wrapping_add(control);
    // A reset ends what there is to know.
    (flags & 4 == 0).then_some(((port, SocketAddrV4::new(source, source_port)), next))
}

fn instant(now: Duration) -> Instant {
    Instant::from_micros(i64::try_from(now.as_micros()).unwrap_or(i64::MAX))
}

/// What smoltcp sees as its device: at most one segment in, and the queue of frames out.
struct Link<'l> {
    incoming: Option<&'l [u8]>,
    out: &'l mut VecDeque<Vec<u8>>,
    spare: &'l mut Vec<Vec<u8>>,
    sent: &'l mut HashMap<Tuple, u32>,
}

struct Incoming<'l>(&'l [u8]);

struct Outgoing<'l> {
    out: &'l mut VecDeque<Vec<u8>>,
    spare: &'l mut Vec<Vec<u8>>,
    sent: &'l mut HashMap<Tuple, u32>,
}

impl Device for Link<'_> {
    type RxToken<'a>
        = Incoming<'a>
    where
        Self: 'a;
    type TxToken<'a>
        = Outgoing<'a>
    where
        Self: 'a;

    fn receive(&mut self, _: Instant) -> Option<(Incoming<'_>, Outgoing<'_>)> {
        // Each segment may be answered at once. A guest that sends and takes nothing must not make the queue grow.
        let packet = self.incoming.take().filter(|_| self.out.len() < MAX_OUT.saturating_mul(2))?;
        Some((Incoming(packet), Outgoing { out: self.out, spare: self.spare, sent: self.sent }))
    }

    fn transmit(&mut self, _: Instant) -> Option<Outgoing<'_>> {
        (self.out.len() < MAX_OUT).then_some(Outgoing { out: self.out, spare: self.spare, sent: self.sent })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        // The gate has verified both of every frame that comes here.
        let mut checksum = ChecksumCapabilities::default();
        checksum.ipv4 = Checksum::Tx;
        checksum.tcp = Checksum::Tx;
        capabilities.checksum = checksum;
        capabilities
    }
}

impl RxToken for Incoming<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

impl TxToken for Outgoing<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = self.spare.pop().unwrap_or_default();
        frame.clear();
        wire::ethernet(0x0800, &mut frame);
        frame.resize(len.saturating_add(ETHERNET), 0);
        let result = f(frame.get_mut(ETHERNET..).unwrap_or_default());
        if let Some((tuple, next)) = next_sequence(frame.get(ETHERNET..).unwrap_or_default()) {
            let last = self.sent.entry(tuple).or_insert(next);
            // Sent again is not sent further. Sequence numbers turn over, so it is their distance that counts.
            if next.wrapping_sub(*last) < 1 << 31 {
                *last = next;
            }
        }
        self.out.push_back(frame);
        result
    }
}
