//! A flow of HTTP in the clear.

use std::io;

use netfilter_control::{Cause, Reason, Record, Stage, quote};

use super::joined::{About, End, Joined, Mode, World};
use super::pipe::guest_ended;
use crate::http::{Connection, Course, Happening, MAX_WAITING};

impl Joined {
    pub(super) fn web(&mut self, about: About<'_>, world: &mut World<'_>) -> Result<(), End> {
        let Mode::Web(mut connection) = std::mem::replace(&mut self.mode, Mode::Pipe) else { return Ok(()) };
        let moved = loop {
            let before = self.up;
            let moved =
                self.web_up(&mut connection, about, world).and_then(|()| self.web_down(&mut connection, about, world));
            // When an answer is through, the next request may be waiting already.
            let waiting = connection.is_idle() && world.stack.socket(self.handle).can_recv();
            if moved.is_err() || !waiting || self.up == before || connection.course() != Course::Open {
                break moved;
            }
        };
        let refused = record(&mut connection, about, world);
        moved?;
        self.pace.head = connection.in_head().then(|| self.pace.head.unwrap_or(world.now));
        match connection.course() {
            Course::Tunnel if connection.to_guest().is_empty() && connection.to_upstream().is_empty() => {
                // What was read already is the beginning of what passes unread from now on.
                self.pipe_up(about, world)?;
                return self.pipe_down(about, world);
            }
            Course::Broken => {
                return Err(match refused {
                    Some((reason, detail)) => End::refused(reason, detail),
                    None => End::by(Cause::UpstreamReset),
                });
            }
            Course::Closing if connection.to_guest().is_empty() => {
                world.stack.socket(self.handle).close();
                self.upstream_done = true;
                self.guest_done = true;
                world.host.finish(self.upstream);
                self.mode = Mode::Linger(world.now);
                return Ok(());
            }
            _ => {}
        }
        self.mode = Mode::Web(connection);
        Ok(())
    }

    fn web_up(&mut self, connection: &mut Connection, about: About<'_>, world: &mut World<'_>) -> Result<(), End> {
        loop {
            let allowance = match world.stack.socket(self.handle).can_recv() {
                true => self.allowance(about.rule.terms.max_up, self.up, false, world.now)?,
                false => 0,
            };
            let taken = world.stack.socket(self.handle).recv(|bytes| {
                let taken = connection.from_guest(bytes.get(..bytes.len().min(allowance)).unwrap_or_default());
                (taken, taken)
            });
            let taken = taken.unwrap_or(0);
            self.moved(taken, false, world.now);
            while self.writable && !connection.to_upstream().is_empty() {
                let waiting = connection.to_upstream();
                match world.host.write(self.upstream, waiting) {
                    Ok(count) => {
                        waiting.drain(..count.min(waiting.len()));
                        self.pace.up = world.now;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                    // It may have answered and closed without reading all: the answer is still to be read.
                    Err(_) => waiting.clear(),
                }
            }
            if taken == 0 {
                break;
            }
        }
        if connection.to_upstream().is_empty() {
            self.pace.up = world.now;
        }
        let socket = world.stack.socket(self.handle);
        // A guest that is done sending may still wait for its answer. Without a request there is none to wait for.
        if guest_ended(socket) && !self.guest_done && connection.to_upstream().is_empty() {
            self.guest_done = true;
            self.pace.last = world.now;
            world.host.finish(self.upstream);
        }
        Ok(())
    }

    fn web_down(&mut self, connection: &mut Connection, about: About<'_>, world: &mut World<'_>) -> Result<(), End> {
        loop {
            let waiting = connection.to_guest();
            let sent = world.stack.socket(self.handle).send_slice(waiting).unwrap_or(0);
            waiting.drain(..sent.min(waiting.len()));
            let full = waiting.len() >= MAX_WAITING;
            if full || connection.course() != Course::Open {
                return Ok(());
            }
            if !self.early.is_empty() {
                let taken = connection.from_upstream(&self.early);
                self.early.drain(..taken.min(self.early.len()));
                if taken > 0 {
                    continue;
                }
                return Ok(());
            }
            if !self.readable || self.upstream_done {
                return Ok(());
            }
            let Some(allowance) = self.room_down(about, world)? else {
                if self.upstream_done {
                    connection.upstream_ended();
                }
                continue;
            };
            if allowance == 0 {
                return Ok(());
            }
            let most = world.scratch.len().min(allowance);
            let room = world.scratch.get_mut(..most).unwrap_or_default();
            match world.host.read(self.upstream, room) {
                Ok(0) => {
                    self.upstream_ended(world.now);
                    connection.upstream_ended();
                }
                Ok(count) => {
                    self.early.extend_from_slice(room.get(..count).unwrap_or_default());
                    self.moved(count, true, world.now);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(_) => return Err(End::by(Cause::UpstreamReset)),
            }
        }
    }
}

/// Writes down what happened. Returns the last refusal.
fn record(connection: &mut Connection, about: About<'_>, world: &mut World<'_>) -> Option<(Reason, String)> {
    let mut refused = None;
    for happening in connection.happenings() {
        let (reason, detail) = match happening {
            Happening::Answered { method, path, status } => {
                world.log.record(Record::HttpRequest { flow: about.id, method, path, status }, world.now);
                continue;
            }
            Happening::Refused(refusal) => (refusal.reason, quote(refusal.text.as_bytes())),
            Happening::BadAnswer => (Reason::BadAnswer, String::new()),
        };
        refused = Some((reason, detail.clone()));
        // A connection that is reset says so in the record of its end.
        if connection.course() != Course::Broken {
            world.log.record(
                Record::FlowDenied {
                    flow: Some(about.id),
                    subject: about.dialled.to_string(),
                    port: about.port,
                    stage: Stage::Joined,
                    reason,
                    detail,
                    rule: Some(about.rule.text.clone()),
                    hint: String::new(),
                },
                world.now,
            );
        }
    }
    refused
}
