//! The engine: frames, readiness and time in; frames, sockets and records out. It opens nothing itself.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod admit;
mod end;
mod state;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

use netfilter_control::Policy;
use smoltcp::iface::SocketHandle;
use smoltcp::socket::tcp::State as Tcp;

use crate::bucket::Bucket;
use crate::dns::resolver::Resolver;
use crate::dns::responder;
use crate::dns::talk::{Answers, Talk};
use crate::flow::joined::{About, World};
use crate::flow::{Flow, State, Tuple};
use crate::gate::{self, Dropped, Packet, Segment};
use crate::host::{Host, Token};
use crate::log::{Log, increase};
use crate::names::Names;
use crate::stack::Stack;
use crate::{limits, local, wire};

pub use state::{Saved, SavedFlow};

/// Bytes that are read from a host socket at once, where they are not read right into a connection's buffer.
const SCRATCH: usize = 64 << 10;

/// One guest's network.
#[derive(Debug)]
pub struct Engine {
    policy: Policy,
    names: Names,
    resolver: Resolver,
    /// Set: every flow goes through it, or nowhere.
    proxy: Option<SocketAddr>,
    stack: Stack,
    flows: BTreeMap<u64, Flow>,
    tuples: HashMap<Tuple, u64>,
    tokens: HashMap<Token, u64>,
    talks: HashMap<Tuple, Talk>,
    next_flow: u64,
    /// Flows for which something has happened.
    dirty: BTreeSet<u64>,
    /// Connections that are over but for their last segment.
    dying: Vec<SocketHandle>,
    buckets: Buckets,
    log: Log,
    scratch: Vec<u8>,
}

#[derive(Debug)]
struct Buckets {
    frames: Bucket,
    questions: Bucket,
    arp: Bucket,
    dhcp: Bucket,
    echo: Bucket,
    unreachable: Bucket,
    flows: Bucket,
    failures: Bucket,
}

impl Default for Buckets {
    fn default() -> Self {
        let local = || Bucket::new(limits::LOCAL_ANSWERS_A_SECOND, limits::LOCAL_BURST);
        let failures = limits::FAILED_DIALS_A_MINUTE;
        Self {
            frames: Bucket::new(limits::FRAMES_A_SECOND, limits::FRAME_BURST),
            questions: Bucket::new(limits::QUESTIONS_A_SECOND, limits::QUESTION_BURST),
            arp: local(),
            dhcp: local(),
            echo: local(),
            unreachable: local(),
            flows: Bucket::new(limits::FLOWS_A_SECOND, limits::FLOW_BURST),
            failures: Bucket::per(Duration::from_secs(60), failures, failures),
        }
    }
}

impl Engine {
    /// A network that denies everything. `seed` is random.
    pub fn new(seed: u64) -> Self {
        Self {
            policy: Policy::default(),
            names: Names::default(),
            resolver: Resolver::default(),
            proxy: None,
            stack: Stack::new(seed),
            flows: BTreeMap::new(),
            tuples: HashMap::new(),
            tokens: HashMap::new(),
            talks: HashMap::new(),
            next_flow: 1,
            dirty: BTreeSet::new(),
            dying: Vec::new(),
            buckets: Buckets::default(),
            log: Log::default(),
            scratch: vec![0; SCRATCH],
        }
    }

    /// Sets the resolvers that the host's owner named.
    pub fn set_resolvers(&mut self, servers: Vec<SocketAddr>) {
        self.resolver.set_servers(servers);
    }

    /// Whether every flow goes through an HTTP proxy.
    pub fn has_proxy(&self) -> bool {
        self.proxy.is_some()
    }

    /// Sends every flow through an HTTP proxy.
    pub fn set_proxy(&mut self, proxy: Option<SocketAddr>) {
        self.proxy = proxy;
    }

    /// What is written down.
    pub fn log(&mut self) -> &mut Log {
        &mut self.log
    }

    /// Takes a frame from the guest.
    pub fn frame(&mut self, frame: &[u8], host: &mut dyn Host, now: Duration) {
        increase(&mut self.log.counters.frames_in, 1);
        if !self.buckets.frames.take(now) {
            return self.log.dropped(Dropped::Rate);
        }
        let packet = match gate::check(frame) {
            Ok(packet) => packet,
            Err(class) => return self.log.dropped(class),
        };
        let buckets = &mut self.buckets;
        let (within, reply): (bool, Option<Vec<u8>>) = match packet {
            Packet::Tcp(segment) => return self.segment(segment, host, now),
            Packet::Arp { sender } => (buckets.arp.take(now), Some(local::arp_reply(sender))),
            Packet::Dhcp(message) => (buckets.dhcp.take(now), local::dhcp_reply(message)),
            Packet::Echo(rest) => (buckets.echo.take(now), Some(local::echo_reply(rest))),
            Packet::Udp { destination, quote } => {
                (buckets.unreachable.take(now), Some(local::port_unreachable(*destination.ip(), quote)))
            }
            // A question over the limit costs neither an answer nor a name.
            Packet::Dns { .. } if !buckets.questions.take(now) => (false, None),
            Packet::Dns { server, port, message } => {
                let reply = responder::answer(message, &self.policy, &mut self.names, &mut self.log, now);
                (true, reply.map(|reply| wire::udp(server, 53, port, &reply)))
            }
        };
        match reply {
            _ if !within || !self.stack.has_room() => self.log.dropped(Dropped::Rate),
            Some(reply) => self.stack.push(reply),
            None => self.log.dropped(Dropped::Unanswerable),
        }
    }

    fn segment(&mut self, segment: Segment<'_>, host: &mut dyn Host, now: Duration) {
        let tuple = (segment.port, segment.destination);
        if let Some(id) = self.tuples.get(&tuple) {
            // Until the destination is reached the guest gets no answer, however often it asks.
            if self.flows.get(id).is_some_and(Flow::is_pending) {
                return;
            }
            self.dirty.insert(*id);
            self.stack.segment(segment.packet, now);
        } else if segment.opens && !self.talks.contains_key(&tuple) {
            self.open(segment, host, now);
        } else {
            self.stack.segment(segment.packet, now);
        }
    }

    /// A host socket has something, or room, or its connecting is decided.
    pub fn ready(&mut self, token: Token, host: &mut dyn Host, now: Duration) {
        if self.resolver.owns(token) {
            if let Some((name, resolved)) = self.resolver.ready(token, host, now) {
                self.resolved(&name, &resolved, host, now);
            }
            return;
        }
        let Some(id) = self.tokens.get(&token).copied() else { return };
        match self.flows.get_mut(&id).map(|flow| &mut flow.state) {
            Some(State::Joined(joined)) => {
                joined.ready();
                self.dirty.insert(id);
            }
            Some(_) => self.advance(id, Some(token), host, now),
            None => {}
        }
    }

    /// Does what has become possible or due, and makes the frames that come of it. `false` if some have to wait until
    /// frames were sent.
    pub fn run(&mut self, host: &mut dyn Host, now: Duration) -> bool {
        for (name, resolved) in self.resolver.expire(host, now) {
            self.resolved(&name, &resolved, host, now);
        }
        let due: Vec<(u64, bool)> = self
            .flows
            .iter()
            .filter(|(id, flow)| self.dirty.contains(id) || flow_due(flow).is_some_and(|at| at <= now))
            .map(|(id, flow)| (*id, flow.is_pending()))
            .collect();
        self.dirty.clear();
        for (id, pending) in due {
            if pending {
                self.advance(id, None, host, now);
            } else {
                self.pump(id, host, now);
            }
        }
        self.talk(now);
        let all = self.stack.egress(now);
        if all {
            self.bury();
        }
        self.log.summarise(now, false);
        all
    }

    fn pump(&mut self, id: u64, host: &mut dyn Host, now: Duration) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let port = flow.port();
        let Flow { dialled, rule, state: State::Joined(joined), .. } = flow else { return };
        let about = About { id, dialled, port, rule };
        let mut world = World { stack: &mut self.stack, host, now, log: &mut self.log, scratch: &mut self.scratch };
        if let Err(end) = joined.pump(about, &mut world) {
            self.end(id, end, host, now);
        }
    }

    fn talk(&mut self, now: Duration) {
        let mut answers = Answers {
            policy: &self.policy,
            names: &mut self.names,
            log: &mut self.log,
            questions: &mut self.buckets.questions,
        };
        let (stack, dying) = (&mut self.stack, &mut self.dying);
        self.talks.retain(|_, talk| {
            let goes_on = talk.step(stack, &mut answers, now);
            if !goes_on {
                dying.push(talk.handle);
            }
            goes_on
        });
    }

    /// Lets go of connections whose last segment is on its way.
    fn bury(&mut self) {
        if self.dying.is_empty() {
            return;
        }
        let stack = &mut self.stack;
        self.dying.retain(|handle| {
            let socket = stack.socket(*handle);
            let over = socket.local_endpoint().is_none() || matches!(socket.state(), Tcp::TimeWait | Tcp::Listen);
            if over {
                stack.close(*handle);
            }
            !over
        });
        let (tuples, talks) = (&self.tuples, &self.talks);
        self.stack.keep_sequences(|tuple| tuples.contains_key(tuple) || talks.contains_key(tuple));
    }

    /// The next frame for the guest. It stays until [`Self::sent`].
    pub fn front(&self) -> Option<&[u8]> {
        self.stack.front()
    }

    /// The frame at the front has been sent.
    pub fn sent(&mut self) {
        increase(&mut self.log.counters.frames_out, 1);
        self.stack.sent();
    }

    /// When [`Self::run`] has something to do of itself.
    pub fn due(&mut self, now: Duration) -> Option<Duration> {
        let flows = self.flows.values().filter_map(flow_due).min();
        let talks = self.talks.values().map(Talk::due).min();
        // Without room for a frame, it is the room that is waited for.
        let stack = if self.stack.has_room() { self.stack.due(now) } else { None };
        [flows, talks, stack, self.resolver.due(), self.log.due()].into_iter().flatten().min()
    }
}

fn flow_due(flow: &Flow) -> Option<Duration> {
    match &flow.state {
        State::Resolving(_) => None,
        State::Dialling(_, dial) => Some(dial.due()),
        State::Asking(..) => Some(flow.since.saturating_add(crate::dial::BUDGET)),
        State::Joined(joined) => Some(joined.due(&flow.rule)),
    }
}
