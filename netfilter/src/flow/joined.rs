//! A flow that is joined: bytes between the guest's connection and a host socket, by the rule's protocol.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use netfilter_control::{Cause, Protocol, Reason, Rule, Stage};
use smoltcp::iface::SocketHandle;
use smoltcp::socket::tcp::State as Tcp;

use super::{Dialled, Flow};
use crate::bucket::Bucket;
use crate::host::{Host, Token};
use crate::http::Connection;
use crate::limits;
use crate::log::Log;
use crate::stack::Stack;
use crate::tls::Hello;

/// How the bytes are looked at.
#[derive(Debug)]
pub(super) enum Mode {
    /// The TLS hello is not there yet. Nothing passes.
    Hello(Box<Hello>),
    /// The first line of SSH is not there yet. What the server says passes: it may speak first.
    Ssh,
    /// Bytes pass.
    Pipe,
    /// Requests and answers pass.
    Web(Box<Connection>),
    /// All was said; the guest's connection ends.
    Linger(Duration),
}

/// The joined flow.
#[derive(Debug)]
pub struct Joined {
    pub(super) handle: SocketHandle,
    pub(super) upstream: Token,
    peer: SocketAddr,
    pub(super) mode: Mode,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The other side takes no more, though it may still say something. What the guest says goes nowhere.
    pub(super) deaf: bool,
    /// The guest has said all it had to say, and the other side knows.
    pub(super) guest_done: bool,
    /// The other side has said all it had to say.
    pub(super) upstream_done: bool,
    /// Bytes that were read from the other side and not looked at yet.
    pub(super) early: Vec<u8>,
    pub(super) up: u64,
    pub(super) down: u64,
    pub(super) rate: Option<(Bucket, Bucket)>,
    since: Duration,
    pub(super) pace: Pace,
}

/// When something last moved.
#[derive(Debug)]
pub(super) struct Pace {
    /// Anything, in either direction.
    pub(super) last: Duration,
    /// From the guest, or there was nothing to move.
    pub(super) up: Duration,
    /// To the guest, or there was nothing to move.
    pub(super) down: Duration,
    /// The head that is being read began here.
    pub(super) head: Option<Duration>,
    /// The rate lets bytes pass again then.
    pub(super) wake: Option<Duration>,
    queued: usize,
}

/// Why a flow ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// The cause.
    pub cause: Cause,
    /// If it is refused: why, and more about it.
    pub refusal: Option<(Reason, String)>,
    /// Whether the guest's connection is reset. It is not if both sides have ended it.
    pub reset: bool,
}

impl End {
    pub(super) fn by(cause: Cause) -> Self {
        Self { cause, refusal: None, reset: cause != Cause::Finished }
    }

    pub(super) fn refused(reason: Reason, detail: impl Into<String>) -> Self {
        Self { cause: Cause::Refused, refusal: Some((reason, detail.into())), reset: true }
    }
}

/// What a flow may use while it moves bytes.
pub struct World<'w> {
    /// The guest's connections.
    pub stack: &'w mut Stack,
    /// The host's sockets.
    pub host: &'w mut dyn Host,
    /// The time.
    pub now: Duration,
    /// Where records go.
    pub log: &'w mut Log,
    /// Room for bytes that are on their way.
    pub scratch: &'w mut [u8],
}

impl fmt::Debug for World<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("now", &self.now).finish_non_exhaustive()
    }
}

/// What of a flow does not change.
#[derive(Debug, Clone, Copy)]
pub struct About<'f> {
    /// Its number.
    pub id: u64,
    /// Whom the guest dialled.
    pub dialled: &'f Dialled,
    /// The destination port.
    pub port: u16,
    /// The rule that allows it.
    pub rule: &'f Rule,
}

impl Joined {
    /// Joins the guest's connection to a socket that has reached its destination.
    pub fn new(
        flow: &Flow,
        handle: SocketHandle,
        (upstream, peer): (Token, SocketAddr),
        early: Vec<u8>,
        now: Duration,
    ) -> Self {
        let mode = match (&flow.rule.protocol, &flow.dialled) {
            (Protocol::Tls, _) => Mode::Hello(Box::default()),
            (Protocol::Ssh, _) => Mode::Ssh,
            (Protocol::Raw, _) => Mode::Pipe,
            (Protocol::Http, Dialled::Name(name)) => {
                Mode::Web(Box::new(Connection::new(name.clone(), flow.port(), flow.rule.terms.clone())))
            }
            // The compiler makes no such rule; if one comes all the same, nothing passes.
            (Protocol::Http, Dialled::Address(_)) => Mode::Linger(now),
        };
        let rate = flow.rule.terms.rate.map(|rate| (Bucket::new(rate, rate), Bucket::new(rate, rate)));
        Self {
            handle,
            upstream,
            peer,
            mode,
            readable: true,
            writable: true,
            deaf: false,
            guest_done: false,
            upstream_done: false,
            early,
            up: 0,
            down: 0,
            rate,
            since: now,
            pace: Pace { last: now, up: now, down: now, head: None, wake: None, queued: 0 },
        }
    }

    /// What it is joined to.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The guest's connection.
    pub fn handle(&self) -> SocketHandle {
        self.handle
    }

    /// The host socket.
    pub fn upstream(&self) -> Token {
        self.upstream
    }

    /// Bytes from and to the guest.
    pub fn bytes(&self) -> (u64, u64) {
        (self.up, self.down)
    }

    /// How far it has come.
    pub fn stage(&self) -> Stage {
        match self.mode {
            Mode::Hello(_) | Mode::Ssh => Stage::FirstBytes,
            _ => Stage::Joined,
        }
    }

    /// The host socket may have something, or room.
    pub fn ready(&mut self) {
        self.readable = true;
        self.writable = true;
    }

    /// Moves what can be moved. An error is the flow's end.
    pub fn pump(&mut self, about: About<'_>, world: &mut World<'_>) -> Result<(), End> {
        self.pace.wake = None;
        match world.stack.socket(self.handle).state() {
            // The guest reset it, before or after it was established.
            Tcp::Listen => return Err(End::by(Cause::GuestReset)),
            Tcp::Closed if !self.upstream_done => return Err(End::by(Cause::GuestReset)),
            // Nothing can have come yet.
            Tcp::SynReceived => return self.check_time(about, world),
            _ => {}
        }
        // Before anything is added: what the guest took is made up for below.
        if world.stack.socket(self.handle).send_queue() < self.pace.queued {
            (self.pace.down, self.pace.last) = (world.now, world.now);
        }
        if let Mode::Hello(_) | Mode::Ssh = self.mode {
            self.first_bytes(about, world)?;
        }
        match self.mode {
            Mode::Hello(_) => {}
            Mode::Ssh => self.pipe_down(about, world)?,
            Mode::Pipe => {
                self.pipe_up(about, world)?;
                self.pipe_down(about, world)?;
            }
            Mode::Web(_) => self.web(about, world)?,
            Mode::Linger(_) => self.drain(world),
        }
        self.note_pace(world);
        let socket = world.stack.socket(self.handle);
        // Both directions are over, but what the guest said last may still have to be passed on.
        if matches!(socket.state(), Tcp::Closed | Tcp::TimeWait) && !socket.can_recv() {
            let whole = self.guest_done || matches!(self.mode, Mode::Linger(_));
            return Err(End::by(if whole { Cause::Finished } else { Cause::GuestReset }));
        }
        self.check_time(about, world)
    }

    /// The guest ends, and what it still says is of no use to anybody.
    fn drain(&mut self, world: &mut World<'_>) {
        let socket = world.stack.socket(self.handle);
        let _ = socket.recv(|bytes| (bytes.len(), ()));
        socket.close();
    }

    fn note_pace(&mut self, world: &mut World<'_>) {
        self.pace.queued = world.stack.socket(self.handle).send_queue();
        if self.pace.queued == 0 {
            self.pace.down = world.now;
        }
    }

    /// Until when something must have happened, and what it means if nothing did.
    fn deadline(&self, rule: &Rule) -> (Duration, fn() -> End) {
        let half = self.guest_done != self.upstream_done;
        let mut first: (Duration, fn() -> End) = match self.mode {
            _ if half => (after(self.pace.last, limits::HALF_CLOSED), || End::by(Cause::HalfClosed)),
            Mode::Hello(_) => (after(self.since, limits::HELLO), || slow(limits::HELLO)),
            Mode::Ssh => (after(self.since, limits::HEAD), || slow(limits::HEAD)),
            Mode::Pipe => (after(self.pace.last, limits::IDLE), || End::by(Cause::Idle)),
            Mode::Web(_) => (after(self.pace.last, limits::HTTP_IDLE), || End::by(Cause::Idle)),
            Mode::Linger(since) => (after(since, limits::LINGER), || End::by(Cause::HalfClosed)),
        };
        let mut sooner = |at: Duration, end: fn() -> End| {
            if at < first.0 {
                first = (at, end);
            }
        };
        sooner(after(self.pace.up.min(self.pace.down), limits::STALL), || End::by(Cause::Stalled));
        if let Some(head) = self.pace.head {
            sooner(after(head, limits::HEAD), || slow(limits::HEAD));
        }
        if let Some(seconds) = rule.terms.max_duration {
            sooner(after(self.since, Duration::from_secs(seconds)), || End::by(Cause::Term));
        }
        first
    }

    fn check_time(&mut self, about: About<'_>, world: &World<'_>) -> Result<(), End> {
        let (at, end) = self.deadline(about.rule);
        if world.now >= at { Err(end()) } else { Ok(()) }
    }

    /// When it has something to do of itself.
    pub fn due(&self, rule: &Rule) -> Duration {
        self.deadline(rule).0.min(self.pace.wake.unwrap_or(Duration::MAX))
    }
}

fn after(from: Duration, limit: Duration) -> Duration {
    from.saturating_add(limit)
}

fn slow(limit: Duration) -> End {
    End::refused(Reason::Slow, format!("the first bytes took over {} s", limit.as_secs()))
}
