//! One connection from the host: bytes in, frames out of them, and frames on their way back.

use super::exec::Input;
use crate::frame::{self, Decoder, MAX_FRAME, MAX_REQUEST};
use crate::message::{FromAgent, MAX_TEXT, Opening, Refusal, RefusalKind, Stream};
use crate::window::{Cursor, Sender};
use rustix::{fd::OwnedFd, io::Errno};

/// Bytes on their way to the host above which a connection's requests wait: a host that asks without listening.
const MAX_BACKLOG: usize = 4 * MAX_REQUEST;

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) fd: OwnedFd,
    pub(super) decoder: Decoder,
    out: Vec<u8>,
    /// Bytes of `out` that were written.
    done: usize,
    pub(super) role: Role,
    /// Ends once everything was written.
    closing: bool,
    pub(super) dead: bool,
}

/// What the opening said that it is for.
#[derive(Debug)]
pub(super) enum Role {
    Unopened,
    Control,
    Output { exec: String, stream: Stream, cursor: Cursor },
    Input { exec: String, acked: u64 },
}

impl Connection {
    pub(super) fn new(fd: OwnedFd) -> Connection {
        Connection {
            fd,
            decoder: Decoder::new(MAX_REQUEST),
            out: Vec::new(),
            done: 0,
            role: Role::Unopened,
            closing: false,
            dead: false,
        }
    }

    pub(super) fn send(&mut self, message: &FromAgent) {
        if frame::put_json(&mut self.out, message, MAX_FRAME).is_err() {
            self.dead = true;
        }
    }

    /// Says what became of an input stream since `before` bytes of it were acknowledged.
    pub(super) fn report(&mut self, input: &Input, before: u64) {
        if self.closing {
            return;
        }
        if input.closed {
            self.send(&FromAgent::Closed { offset: input.written });
            self.close();
        } else if input.complete() {
            frame::put_end(&mut self.out, input.written);
            self.close();
        } else if input.written > before {
            frame::put_ack(&mut self.out, input.written);
        }
    }

    /// Refuses the opening.
    pub(super) fn refuse(&mut self, kind: RefusalKind, message: impl Into<String>) {
        self.send(&FromAgent::Refused(refusal(kind, message)));
        self.closing = true;
    }

    /// The last frame was queued.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// Queues an output stream's next frame.
    pub(super) fn queue_next(&mut self, sender: &Sender) {
        if let Role::Output { cursor, .. } = &mut self.role {
            sender.put_next(cursor, &mut self.out);
        }
    }

    pub(super) fn idle(&self) -> bool {
        self.done == self.out.len()
    }

    pub(super) fn reads(&self) -> bool {
        !self.closing && self.out.len() - self.done < MAX_BACKLOG
    }

    /// Reads once into the decoder.
    pub(super) fn fill(&mut self, buffer: &mut [u8]) {
        match rustix::io::read(&self.fd, &mut *buffer) {
            Ok(0) => self.dead = true,
            Ok(count) => self.decoder.push(buffer.get(..count).unwrap_or_default()),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.dead = true,
        }
    }

    /// Writes what the connection takes. Returns whether all is written.
    pub(super) fn flush(&mut self) -> bool {
        while let Some(rest) = self.out.get(self.done..).filter(|rest| !rest.is_empty()) {
            match rustix::io::write(&self.fd, rest) {
                Ok(count) => self.done += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Err(_) => {
                    self.dead = true;
                    return false;
                }
            }
        }
        self.out.clear();
        self.done = 0;
        self.dead |= self.closing;
        true
    }

    /// Reads the opening, if that is what came.
    pub(super) fn opening(&mut self) -> Option<Opening> {
        let parsed = match self.decoder.next_frame() {
            Ok(None) => return None,
            Ok(Some(frame::Body::Json(json))) => frame::parse(json).map_err(|e| e.to_string()),
            Ok(Some(_)) => Err("the first frame is not JSON".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        match parsed {
            Ok(opening) => Some(opening),
            Err(why) => {
                self.refuse(RefusalKind::Malformed, why);
                None
            }
        }
    }
}

pub(super) fn refusal(kind: RefusalKind, message: impl Into<String>) -> Refusal {
    Refusal { kind, message: message.into().chars().take(MAX_TEXT).collect() }
}
