//! One connection to the agent: dialled, opened, and read frame by frame. Also how long to wait between two.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use super::{AgentError, Dial};
use crate::{
    frame::{self, Body, Decoder, MAX_FRAME, MAX_REQUEST},
    message::{AGENT_PORT, FromAgent, Opening},
};
use serde::Serialize;
use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};

/// How long the agent may take to answer an opening before the connection is given up and made anew.
const OPENING_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a write may block before the connection counts as broken. Losing one costs nothing but its resumption,
/// so a machine that was paused for longer is no problem; a guest that does not read cannot hold a thread for ever.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// A frame, owned: at most [`MAX_FRAME`] bytes.
#[derive(Debug)]
pub(super) enum Incoming {
    Message(FromAgent),
    Data { offset: u64, bytes: Vec<u8> },
    Ack(u64),
    End(u64),
}

/// A connection in blocking mode.
#[derive(Debug)]
pub(super) struct Link {
    stream: UnixStream,
    decoder: Decoder,
    buffer: Vec<u8>,
}

impl Link {
    /// Dials and sends the opening.
    pub(super) fn open(dial: &dyn Dial, opening: &Opening) -> Result<Link, AgentError> {
        let stream = dial.dial(AGENT_PORT).map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionAborted => AgentError::Gone,
            _ => AgentError::Dial(error),
        })?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT)).map_err(AgentError::Connection)?;
        let mut link = Link { stream, decoder: Decoder::new(MAX_FRAME), buffer: Vec::new() };
        link.send(opening)?;
        Ok(link)
    }

    /// Opens a stream's connection and returns the offset that the agent names.
    pub(super) fn attach(dial: &dyn Dial, opening: &Opening) -> Result<(Link, Attached), AgentError> {
        let mut link = Link::open(dial, opening)?;
        match link.first(Instant::now().checked_add(OPENING_TIMEOUT))? {
            FromAgent::Attached { offset } => Ok((link, Attached::At(offset))),
            FromAgent::Closed { offset } => Ok((link, Attached::Closed(offset))),
            FromAgent::Refused(refusal) => Err(AgentError::refused(&refusal)),
            other => Err(AgentError::protocol(format_args!("{other:?} in answer to an opening"))),
        }
    }

    /// The answer to the opening, which must be JSON, by a deadline.
    pub(super) fn first(&mut self, deadline: Option<Instant>) -> Result<FromAgent, AgentError> {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
        self.stream.set_read_timeout(left).map_err(AgentError::Connection)?;
        let answer = match self.receive() {
            Ok(Incoming::Message(message)) => message,
            Ok(other) => return Err(AgentError::protocol(format_args!("{other:?} in answer to an opening"))),
            Err(AgentError::Connection(error)) if timed_out(&error) => {
                return Err(AgentError::Late("connected, but no answer".into()));
            }
            Err(error) => return Err(error),
        };
        self.stream.set_read_timeout(None).map_err(AgentError::Connection)?;
        Ok(answer)
    }

    /// The next frame; waits for it.
    pub(super) fn receive(&mut self) -> Result<Incoming, AgentError> {
        loop {
            if let Some(incoming) = self.receive_ready()? {
                return Ok(incoming);
            }
            self.fill()?;
        }
    }

    /// The next frame of those that were read already.
    pub(super) fn receive_ready(&mut self) -> Result<Option<Incoming>, AgentError> {
        Ok(match self.decoder.next_frame()? {
            None => None,
            Some(Body::Data { offset, bytes }) => Some(Incoming::Data { offset, bytes: bytes.to_vec() }),
            Some(Body::Json(json)) => Some(Incoming::Message(frame::parse(json)?)),
            Some(Body::Ack(offset)) => Some(Incoming::Ack(offset)),
            Some(Body::End(total)) => Some(Incoming::End(total)),
        })
    }

    /// Reads once from the connection.
    pub(super) fn fill(&mut self) -> Result<(), AgentError> {
        self.buffer.resize(MAX_FRAME, 0);
        let count = loop {
            match self.stream.read(&mut self.buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other.map_err(AgentError::Connection)?,
            }
        };
        if count == 0 {
            return Err(AgentError::Connection(io::ErrorKind::UnexpectedEof.into()));
        }
        self.decoder.push(self.buffer.get(..count).unwrap_or_default());
        Ok(())
    }

    pub(super) fn send(&mut self, message: &impl Serialize) -> Result<(), AgentError> {
        let mut out = Vec::new();
        frame::put_json(&mut out, message, MAX_REQUEST).map_err(AgentError::TooLong)?;
        self.write(&out)
    }

    pub(super) fn ack(&mut self, have: u64) -> Result<(), AgentError> {
        let mut out = Vec::new();
        frame::put_ack(&mut out, have);
        self.write(&out)
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), AgentError> {
        (&self.stream).write_all(bytes).map_err(AgentError::Connection)
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }
}

/// Where a stream continues.
#[derive(Debug, Clone, Copy)]
pub(super) enum Attached {
    At(u64),
    /// Input that nobody will read any more.
    Closed(u64),
}

/// Whether a socket's read or write ended because of its timeout.
pub(super) fn timed_out(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Waits between attempts: 10 ms, doubled each time up to 1 s, until something succeeds.
#[derive(Debug)]
pub(super) struct Backoff(Duration);

impl Backoff {
    const FIRST: Duration = Duration::from_millis(10);
    const LAST: Duration = Duration::from_secs(1);

    pub(super) fn new() -> Backoff {
        Backoff(Backoff::FIRST)
    }

    /// Progress was made: the next wait is short again.
    pub(super) fn reset(&mut self) {
        self.0 = Backoff::FIRST;
    }

    pub(super) fn wait(&mut self) {
        thread::sleep(self.0);
        self.0 = self.0.saturating_mul(2).min(Backoff::LAST);
    }
}
