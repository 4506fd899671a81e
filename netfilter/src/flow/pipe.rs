//! Passing bytes, within the rule's terms, and looking at the first of them.

use std::io;
use std::time::Duration;

use netfilter_control::{Cause, Name, Reason, Record, quote};
use smoltcp::socket::tcp::{RecvError, Socket, State as Tcp};

use super::Dialled;
use super::joined::{About, End, Joined, Mode, World};
use crate::log::increase;
use crate::tls::{MAX_HELLO, Verdict};

/// What a client of SSH says first (RFC 4253, 4.2).
const SSH: &[u8] = b"SSH-2.0-";
/// How long a flow that used its second's bytes up waits.
const THROTTLE: Duration = Duration::from_millis(20);

impl Joined {
    /// Looks at what the guest said first. It stays in the connection's buffer until all of it was looked at: the bytes
    /// that were judged are the bytes that pass.
    pub(super) fn first_bytes(&mut self, about: About<'_>, world: &mut World<'_>) -> Result<(), End> {
        let socket = world.stack.socket(self.handle);
        let ended = matches!(socket.state(), Tcp::CloseWait | Tcp::LastAck | Tcp::Closing | Tcp::TimeWait);
        let peeked = socket.peek(MAX_HELLO.saturating_mul(2)).unwrap_or_default();
        match &mut self.mode {
            Mode::Hello(hello) => {
                let Some(fresh) = peeked.get(hello.seen()..) else { return Ok(()) };
                let nameless;
                let name = match &about.dialled {
                    Dialled::Name(name) => name,
                    // A rule about addresses cannot ask for TLS; if it did, no name would fit.
                    Dialled::Address(_) => {
                        nameless = Name::parse("invalid.invalid").map_err(|_| End::by(Cause::Refused))?;
                        &nameless
                    }
                };
                match hello.read(fresh, name, &about.rule.terms) {
                    Verdict::More if ended && peeked.is_empty() => Err(End::by(Cause::Finished).with_reset()),
                    Verdict::More if ended => Err(End::refused(Reason::NotTls, "it ended within its hello")),
                    Verdict::More => Ok(()),
                    Verdict::Refuse(reason, detail) => Err(End::refused(reason, detail)),
                    Verdict::Pass { server_name, alpn } => {
                        world.log.record(Record::FlowTls { flow: about.id, server_name, alpn }, world.now);
                        self.mode = Mode::Pipe;
                        Ok(())
                    }
                }
            }
            Mode::Ssh => {
                let compared = peeked.len().min(SSH.len());
                if peeked.get(..compared) != SSH.get(..compared) {
                    return Err(End::refused(
                        Reason::NotSsh,
                        quote(peeked.get(..32.min(peeked.len())).unwrap_or_default()),
                    ));
                }
                if compared == SSH.len() {
                    self.mode = Mode::Pipe;
                } else if ended {
                    return Err(End::by(Cause::Finished).with_reset());
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// From the guest.
    pub(super) fn pipe_up(&mut self, about: About<'_>, world: &mut World<'_>) -> Result<(), End> {
        while self.writable && !self.deaf && world.stack.socket(self.handle).can_recv() {
            let allowance = self.allowance(about.rule.terms.max_up, self.up, false, world.now)?;
            if allowance == 0 {
                break;
            }
            let (host, token) = (&mut *world.host, self.upstream);
            let written = world.stack.socket(self.handle).recv(|bytes| {
                let part = bytes.get(..bytes.len().min(allowance)).unwrap_or_default();
                match host.write(token, part) {
                    Ok(count) => (count.min(part.len()), Ok(count.min(part.len()))),
                    Err(error) => (0, Err(error)),
                }
            });
            match written {
                Ok(Ok(count)) => self.moved(count, false, world.now),
                Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                // It has closed its end, perhaps after an answer that is still to be read.
                Ok(Err(_)) => {
                    self.deaf = true;
                    self.readable = true;
                    break;
                }
                Err(_) => break,
            }
        }
        if self.deaf {
            let _ = world.stack.socket(self.handle).recv(|bytes| (bytes.len(), ()));
        }
        let socket = world.stack.socket(self.handle);
        if !socket.can_recv() {
            self.pace.up = world.now;
            if guest_ended(socket) && !self.guest_done {
                world.host.finish(self.upstream);
                self.guest_done = true;
                self.pace.last = world.now;
            }
        }
        Ok(())
    }

    /// To the guest.
    pub(super) fn pipe_down(&mut self, about: About<'_>, world: &mut World<'_>) -> Result<(), End> {
        if !self.early.is_empty() {
            let sent = world.stack.socket(self.handle).send_slice(&self.early).unwrap_or(0);
            self.early.drain(..sent.min(self.early.len()));
            self.moved(sent, true, world.now);
            if !self.early.is_empty() {
                return Ok(());
            }
        }
        while self.readable && !self.upstream_done && world.stack.socket(self.handle).can_send() {
            let Some(allowance) = self.room_down(about, world)? else { continue };
            if allowance == 0 {
                break;
            }
            let (host, token) = (&mut *world.host, self.upstream);
            let read = world.stack.socket(self.handle).send(|room| {
                let most = room.len().min(allowance);
                match host.read(token, room.get_mut(..most).unwrap_or_default()) {
                    Ok(count) => (count.min(most), Ok(count.min(most))),
                    Err(error) => (0, Err(error)),
                }
            });
            match read {
                Ok(Ok(0)) => self.upstream_ended(world.now),
                Ok(Ok(count)) => self.moved(count, true, world.now),
                Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Ok(Err(_)) => return Err(End::by(Cause::UpstreamReset)),
                Err(_) => break,
            }
        }
        if self.upstream_done {
            world.stack.socket(self.handle).close();
        }
        Ok(())
    }

    /// How many bytes may be read now. At the rule's total it is looked whether there are more: if there are, that is one
    /// too many, and if not, all is well. `None` if it was found that there will be none, or are none yet.
    pub(super) fn room_down(&mut self, about: About<'_>, world: &mut World<'_>) -> Result<Option<usize>, End> {
        let term = match self.allowance(about.rule.terms.max_down, self.down, true, world.now) {
            Ok(allowance) => return Ok(Some(allowance)),
            Err(term) => term,
        };
        match world.host.read(self.upstream, &mut [0]) {
            Ok(0) => self.upstream_ended(world.now),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Ok(_) | Err(_) => return Err(term),
        }
        Ok(None)
    }

    pub(super) fn upstream_ended(&mut self, now: Duration) {
        self.upstream_done = true;
        self.pace.last = now;
    }

    /// Counts bytes that moved.
    pub(super) fn moved(&mut self, count: usize, down: bool, now: Duration) {
        if count == 0 {
            return;
        }
        let bytes = u64::try_from(count).unwrap_or(u64::MAX);
        self.pace.last = now;
        if down {
            increase(&mut self.down, bytes);
        } else {
            increase(&mut self.up, bytes);
            self.pace.up = now;
        }
        if let Some((up, down_bucket)) = &mut self.rate {
            let bucket = if down { down_bucket } else { up };
            bucket.take_up_to(bytes, now);
        }
    }

    /// How many bytes may move now: by the rule's total, and by its rate.
    pub(super) fn allowance(&mut self, most: Option<u64>, moved: u64, down: bool, now: Duration) -> Result<usize, End> {
        let total = most.map_or(u64::MAX, |most| most.saturating_sub(moved));
        if total == 0 {
            return Err(End::by(Cause::Term));
        }
        let rate = match &mut self.rate {
            None => u64::MAX,
            Some((up, _)) if !down => up.available(now),
            Some((_, down)) => down.available(now),
        };
        if rate == 0 {
            // It is we who hold it up, so nobody stalls.
            self.pace.wake = Some(now.saturating_add(THROTTLE));
            (self.pace.up, self.pace.down) = (now, now);
        }
        Ok(usize::try_from(total.min(rate)).unwrap_or(usize::MAX))
    }
}

impl End {
    /// The same end, with a reset of the guest's connection.
    pub(super) fn with_reset(self) -> Self {
        Self { reset: true, ..self }
    }
}

/// Whether the guest has sent its FIN, and all before it was taken.
pub(super) fn guest_ended(socket: &mut Socket<'_>) -> bool {
    let ended = match socket.state() {
        Tcp::CloseWait | Tcp::LastAck | Tcp::Closing | Tcp::TimeWait => true,
        Tcp::Closed => socket.peek(1) == Err(RecvError::Finished),
        _ => false,
    };
    ended && !socket.can_recv()
}
