//! A whole network in memory: a guest with a TCP stack of its own, the engine, and hosts that a test plays.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use netfilter_control::{Policy, Reason, Record};
use netfilter_policy::Compiler;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr};

use super::frames;
use crate::dns::qtype;
use crate::engine::Engine;
use crate::host::{Host, Route, Token};
use crate::plan::{GATEWAY, GUEST, MTU};

/// A host socket, from the other side.
#[derive(Debug, Default)]
pub(super) struct Peer {
    /// What the engine has written.
    pub(super) received: Vec<u8>,
    /// What the engine has not read yet.
    pub(super) unread: VecDeque<u8>,
    /// The other side has ended its direction.
    pub(super) ended: bool,
    /// The engine has ended its direction.
    pub(super) finished: bool,
    /// The engine has closed it, perhaps with a reset.
    pub(super) closed: Option<bool>,
    /// The other side has reset it.
    pub(super) reset: bool,
    /// The other side reads no more: writing fails.
    pub(super) stopped: bool,
    /// How many more bytes it takes.
    pub(super) room: Option<usize>,
    connected: Option<Result<(), io::ErrorKind>>,
    datagrams: Option<VecDeque<Vec<u8>>>,
}

/// What happens when the engine connects to an address.
#[derive(Debug, Clone, Copy)]
pub(super) enum Answer {
    Accept,
    Refuse,
    Silence,
}

/// The world that a test plays.
#[derive(Debug, Default)]
pub(super) struct World {
    pub(super) peers: BTreeMap<u64, Peer>,
    /// What names resolve to.
    pub(super) zone: HashMap<String, Vec<IpAddr>>,
    /// Every question that reached a resolver.
    pub(super) asked: Vec<String>,
    pub(super) routes: HashMap<IpAddr, Route>,
    pub(super) answers: HashMap<SocketAddr, Answer>,
    /// Every address that was dialled.
    pub(super) dialled: Vec<SocketAddr>,
    pub(super) deaf_resolvers: bool,
    ready: Vec<Token>,
    next: u64,
}

impl World {
    fn peer(&mut self, token: Token) -> io::Result<&mut Peer> {
        let peer = self.peers.get_mut(&token.0).filter(|peer| peer.closed.is_none());
        peer.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn add(&mut self, peer: Peer) -> Token {
        self.next += 1;
        self.peers.insert(self.next, peer);
        Token(self.next)
    }

    /// Answers a question as a resolver would.
    fn resolve(&mut self, message: &[u8]) -> Vec<u8> {
        let mut at = 12;
        let mut labels = Vec::new();
        while message[at] != 0 {
            let end = at + 1 + usize::from(message[at]);
            labels.push(String::from_utf8(message[at + 1..end].to_vec()).unwrap());
            at = end;
        }
        let name = labels.join(".");
        let kind = u16::from_be_bytes([message[at + 1], message[at + 2]]);
        self.asked.push(name.clone());
        let addresses = self.zone.get(&name);
        let ours: Vec<Vec<u8>> = addresses
            .into_iter()
            .flatten()
            .filter_map(|address| match address {
                IpAddr::V4(v4) if kind == qtype::A => Some(v4.octets().to_vec()),
                IpAddr::V6(v6) if kind == qtype::AAAA => Some(v6.octets().to_vec()),
                _ => None,
            })
            .collect();
        let code = if addresses.is_some() { 0 } else { 3 };
        let count = u8::try_from(ours.len()).unwrap();
        let mut reply = vec![message[0], message[1], 0x81, 0x80 | code, 0, 1, 0, count, 0, 0, 0, 0];
        reply.extend_from_slice(&message[12..at + 5]);
        for data in ours {
            reply.extend_from_slice(&[0xc0, 12]);
            reply.extend_from_slice(&kind.to_be_bytes());
            reply.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, u8::try_from(data.len()).unwrap()]);
            reply.extend_from_slice(&data);
        }
        reply
    }
}

impl Host for World {
    fn connect(&mut self, address: SocketAddr) -> io::Result<Token> {
        self.dialled.push(address);
        let answer = self.answers.get(&address).copied().unwrap_or(Answer::Accept);
        let connected = match answer {
            Answer::Accept => Some(Ok(())),
            Answer::Refuse => Some(Err(io::ErrorKind::ConnectionRefused)),
            Answer::Silence => None,
        };
        let token = self.add(Peer { connected, ..Peer::default() });
        if connected.is_some() {
            self.ready.push(token);
        }
        Ok(token)
    }

    fn connected(&mut self, token: Token) -> io::Result<()> {
        match self.peer(token)?.connected {
            Some(Ok(())) => Ok(()),
            Some(Err(kind)) => Err(kind.into()),
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn datagrams(&mut self, _: SocketAddr) -> io::Result<Token> {
        Ok(self.add(Peer { datagrams: Some(VecDeque::new()), ..Peer::default() }))
    }

    fn read(&mut self, token: Token, buffer: &mut [u8]) -> io::Result<usize> {
        let peer = self.peer(token)?;
        if peer.reset {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if let Some(datagrams) = &mut peer.datagrams {
            let message = datagrams.pop_front().ok_or(io::ErrorKind::WouldBlock)?;
            buffer[..message.len()].copy_from_slice(&message);
            return Ok(message.len());
        }
        if peer.unread.is_empty() {
            return if peer.ended { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let count = buffer.len().min(peer.unread.len());
        for (slot, byte) in buffer.iter_mut().zip(peer.unread.drain(..count)) {
            *slot = byte;
        }
        Ok(count)
    }

    fn write(&mut self, token: Token, bytes: &[u8]) -> io::Result<usize> {
        if self.peer(token)?.datagrams.is_some() {
            if !self.deaf_resolvers {
                let reply = self.resolve(bytes);
                self.peer(token)?.datagrams.as_mut().unwrap().push_back(reply);
                self.ready.push(token);
            }
            return Ok(bytes.len());
        }
        let peer = self.peer(token)?;
        if peer.reset {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if peer.stopped {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        assert!(!peer.finished && !bytes.is_empty(), "nothing is written after the end");
        let count = bytes.len().min(peer.room.unwrap_or(usize::MAX));
        if count == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if let Some(room) = &mut peer.room {
            *room -= count;
        }
        peer.received.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn finish(&mut self, token: Token) {
        if let Ok(peer) = self.peer(token) {
            peer.finished = true;
        }
    }

    fn close(&mut self, token: Token, reset: bool) {
        if let Ok(peer) = self.peer(token) {
            peer.closed = Some(reset);
        }
    }

    fn route(&mut self, address: IpAddr) -> io::Result<Route> {
        Ok(self.routes.get(&address).copied().unwrap_or(Route::Elsewhere))
    }

    fn random(&mut self) -> u64 {
        self.next
    }
}

/// Everything together.
pub(super) struct Net {
    pub(super) engine: Engine,
    pub(super) world: World,
    pub(super) now: Duration,
    /// The guest's own stack hears nothing: a test plays it frame by frame.
    pub(super) deaf: bool,
    /// Every frame to the guest.
    pub(super) frames: Vec<Vec<u8>>,
    interface: Interface,
    sockets: SocketSet<'static>,
    wire: Wire,
    port: u16,
}

pub(super) fn policy(rules: &str) -> Policy {
    let mut compiler = Compiler::default();
    if !rules.is_empty() {
        compiler.rules("test", rules).unwrap();
    }
    compiler.finish().unwrap()
}

/// The origin that most tests dial: an ordinary global address.
pub(super) const ORIGIN: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 34);

impl Net {
    pub(super) fn new(rules: &str) -> Self {
        Self::with_policy(policy(rules))
    }

    pub(super) fn with_policy(policy: Policy) -> Self {
        let mut world = World::default();
        for name in ["api.example.com", "other.example.com", "web.example.com", "git.example.com", "raw.example.com"] {
            world.zone.insert(name.into(), vec![ORIGIN.into()]);
        }
        let mut engine = Engine::new(1);
        engine.set_resolvers(vec!["9.9.9.9:53".parse().unwrap()]);
        engine.set_policy(policy, 1, &mut world, Duration::ZERO);
        let mut wire = Wire::default();
        let mut interface = Interface::new(Config::new(HardwareAddress::Ip), &mut wire, Instant::ZERO);
        interface.update_ip_addrs(|addresses| {
            addresses.push(IpCidr::new(IpAddress::Ipv4(GUEST), 30)).unwrap();
        });
        interface.routes_mut().add_default_ipv4_route(GATEWAY).unwrap();
        let (sockets, now) = (SocketSet::new(Vec::new()), Duration::from_secs(1));
        Self { engine, world, now, deaf: false, frames: Vec::new(), interface, sockets, wire, port: 40_000 }
    }

    pub(super) fn set_policy(&mut self, rules: &str) {
        self.engine.set_policy(policy(rules), 2, &mut self.world, self.now);
        self.settle();
    }

    /// Sends a frame of the guest's.
    pub(super) fn send(&mut self, frame: &[u8]) {
        self.engine.frame(frame, &mut self.world, self.now);
        self.settle();
    }

    /// The answer to a DNS question: an address.
    pub(super) fn lookup(&mut self, name: &str) -> Option<Ipv4Addr> {
        let before = self.frames.len();
        self.send(&frames::udp((GATEWAY, 53), &frames::dns_question(name, 1, true)));
        let reply = self.frames.get(before).expect("an answer");
        let at = reply.windows(10).position(|w| w == [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60])? + 12;
        Some(Ipv4Addr::new(reply[at], reply[at + 1], reply[at + 2], reply[at + 3]))
    }

    /// Begins to connect.
    pub(super) fn begin(&mut self, address: Ipv4Addr, port: u16) -> SocketHandle {
        let buffer = || SocketBuffer::new(vec![0; 1 << 20]);
        let mut socket = Socket::new(buffer(), buffer());
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        self.port += 1;
        socket.connect(self.interface.context(), (IpAddress::Ipv4(address), port), self.port).unwrap();
        let handle = self.sockets.add(socket);
        self.settle();
        handle
    }

    /// Resolves a name and connects to it.
    pub(super) fn dial(&mut self, name: &str, port: u16) -> SocketHandle {
        let address = self.lookup(name).expect(name);
        self.begin(address, port)
    }

    pub(super) fn local_port(&mut self, handle: SocketHandle) -> u16 {
        self.socket(handle).local_endpoint().unwrap().port
    }

    pub(super) fn socket(&mut self, handle: SocketHandle) -> &mut Socket<'static> {
        self.sockets.get_mut(handle)
    }

    pub(super) fn state(&mut self, handle: SocketHandle) -> State {
        self.socket(handle).state()
    }

    pub(super) fn write(&mut self, handle: SocketHandle, bytes: &[u8]) {
        let mut rest = bytes;
        for _ in 0..10_000 {
            if rest.is_empty() || !self.socket(handle).may_send() {
                return;
            }
            let sent = self.socket(handle).send_slice(rest).unwrap();
            rest = &rest[sent..];
            self.settle();
        }
        panic!("the engine takes no more");
    }

    pub(super) fn read(&mut self, handle: SocketHandle) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let mut buffer = [0; 65_536];
            match self.socket(handle).recv_slice(&mut buffer) {
                Ok(count) if count > 0 => all.extend_from_slice(&buffer[..count]),
                _ => return all,
            }
            self.settle();
        }
    }

    /// The guest ends its direction.
    pub(super) fn end(&mut self, handle: SocketHandle) {
        self.socket(handle).close();
        self.settle();
    }

    /// The peer of the last connection that was made.
    pub(super) fn peer(&mut self) -> (Token, &mut Peer) {
        let (token, peer) =
            self.world.peers.iter_mut().rev().find(|(_, peer)| peer.datagrams.is_none()).expect("a connection");
        (Token(*token), peer)
    }

    /// The other side says something.
    pub(super) fn answer(&mut self, bytes: &[u8]) {
        let (token, peer) = self.peer();
        peer.unread.extend(bytes);
        self.world.ready.push(token);
        self.settle();
    }

    /// The other side ends its direction.
    pub(super) fn hang_up(&mut self) {
        let (token, peer) = self.peer();
        peer.ended = true;
        self.world.ready.push(token);
        self.settle();
    }

    /// The last connection has news.
    pub(super) fn poke(&mut self) {
        let (token, _) = self.peer();
        self.world.ready.push(token);
        self.settle();
    }

    /// What the other side has received until now.
    pub(super) fn received(&mut self) -> Vec<u8> {
        self.peer().1.received.clone()
    }

    /// Lets time pass, in steps in which everything that is due is done.
    pub(super) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        for _ in 0..100_000 {
            let due = self.engine.due(self.now).unwrap_or(end);
            self.now = due.max(self.now + Duration::from_millis(1)).min(end);
            self.settle();
            if self.now >= end {
                return;
            }
        }
        panic!("it never rests");
    }

    /// Plays until nobody has anything to say.
    pub(super) fn settle(&mut self) {
        for _ in 0..100_000 {
            let mut quiet = true;
            for token in std::mem::take(&mut self.world.ready) {
                quiet = false;
                self.engine.ready(token, &mut self.world, self.now);
            }
            let all = self.engine.run(&mut self.world, self.now);
            while let Some(frame) = self.engine.front() {
                quiet = false;
                if !self.deaf {
                    self.wire.incoming.push_back(frame[14..].to_vec());
                }
                self.frames.push(frame.to_vec());
                self.engine.sent();
            }
            let instant = Instant::from_micros(i64::try_from(self.now.as_micros()).unwrap());
            self.interface.poll(instant, &mut self.wire, &mut self.sockets);
            for packet in std::mem::take(&mut self.wire.outgoing) {
                quiet = false;
                self.engine.frame(&frames::ethernet(0x0800, &packet), &mut self.world, self.now);
            }
            if quiet && all {
                return;
            }
        }
        panic!("it never rests");
    }

    /// Every record since it was last asked.
    pub(super) fn records(&mut self) -> Vec<Record> {
        let log = self.engine.log();
        std::iter::from_fn(|| log.front().cloned().inspect(|_| log.sent())).collect()
    }

    /// The reason of the last refusal.
    pub(super) fn refusal(&mut self) -> Option<Reason> {
        self.records().iter().rev().find_map(Record::reason)
    }

    /// The last segment that the guest got for a port of its own: flags and sequence number.
    pub(super) fn last_segment(&self, port: u16) -> Option<(u8, u32)> {
        self.frames.iter().rev().find_map(|frame| {
            let tcp = frame.get(34..).filter(|_| frame[12..14] == [8, 0] && frame[23] == 6)?;
            (tcp[2..4] == port.to_be_bytes()).then(|| (tcp[13], u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]])))
        })
    }
}

#[derive(Default)]
struct Wire {
    incoming: VecDeque<Vec<u8>>,
    outgoing: VecDeque<Vec<u8>>,
}

struct In(Vec<u8>);
struct Out<'w>(&'w mut VecDeque<Vec<u8>>);

impl Device for Wire {
    type RxToken<'a> = In;
    type TxToken<'a> = Out<'a>;

    fn receive(&mut self, _: Instant) -> Option<(In, Out<'_>)> {
        Some((In(self.incoming.pop_front()?), Out(&mut self.outgoing)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Out<'_>> {
        Some(Out(&mut self.outgoing))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        capabilities
    }
}

impl RxToken for In {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

impl TxToken for Out<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut packet = vec![0; len];
        let result = f(&mut packet);
        self.0.push_back(packet);
        result
    }
}
