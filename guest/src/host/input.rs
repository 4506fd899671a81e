//! The pump of the input stream. Two sides share one [`Sender`]: the caller's thread reads the source and fills it;
//! a relay thread owns the connection, sends, takes acknowledgements, and sends again after a reset, also while the
//! source is silent (a terminal whose user waits for an answer).

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use super::{
    AgentError,
    control::{Control, locked},
    link::{Attached, Backoff, Incoming, Link},
};
use crate::{
    frame::MAX_FRAME,
    message::{FromAgent, Stream},
    window::{CREDIT, Cursor, Sender, WINDOW},
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::{
    io::{self, Read},
    os::fd::OwnedFd,
    sync::{Condvar, Mutex},
    thread,
};

struct Shared {
    state: Mutex<State>,
    /// The window has room, or the relay has ended.
    moved: Condvar,
    /// Wakes the relay: there is more to send.
    wake: OwnedFd,
}

#[derive(Default)]
struct State {
    sender: Sender,
    /// Whether the offset of its first byte is known.
    begun: bool,
    /// Set by the relay when it is done: the bytes that were accepted, or why not.
    outcome: Option<Result<u64, AgentError>>,
    /// Set by the caller's side when the source failed.
    abandoned: bool,
}

/// `attached`: somebody else had the stream before, and where it goes on is what the agent says.
pub(super) fn copy(control: &Control, exec: &str, attached: bool, from: &mut dyn Read) -> Result<u64, AgentError> {
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from);
    let shared = Shared {
        state: Mutex::new(State { begun: !attached, ..State::default() }),
        moved: Condvar::new(),
        wake: wake.map_err(AgentError::Connection)?,
    };
    thread::scope(|scope| {
        let relay = || {
            let outcome = relay(control, exec, &shared);
            locked(&shared.state).outcome = Some(outcome);
            shared.moved.notify_all();
        };
        thread::Builder::new().name("stdin-relay".into()).spawn_scoped(scope, relay).map_err(AgentError::Thread)?;
        let source = fill(&shared, from);
        if source.is_err() {
            locked(&shared.state).abandoned = true;
        }
        shared.ring();
        let mut state = locked(&shared.state);
        loop {
            match (state.outcome.take(), &source) {
                (Some(Ok(count)), Ok(())) => return Ok(count),
                (Some(Err(error)), Ok(())) => return Err(error),
                (Some(_), Err(_)) => break,
                (None, _) => state = shared.wait(state),
            }
        }
        source.map(|()| 0)
    })
}

/// Reads the source into the window until it ends, or nobody wants it any more.
fn fill(shared: &Shared, from: &mut dyn Read) -> Result<(), AgentError> {
    let mut buffer = vec![0; MAX_FRAME];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(AgentError::Source(error)),
        };
        let bytes = buffer.get(..count).unwrap_or_default();
        let mut state = locked(&shared.state);
        while state.outcome.is_none() && state.sender.room(WINDOW) < bytes.len() {
            state = shared.wait(state);
        }
        if state.outcome.is_some() {
            return Ok(());
        }
        if bytes.is_empty() {
            state.sender.finish();
            return Ok(());
        }
        state.sender.push(bytes);
        drop(state);
        shared.ring();
    }
}

impl Shared {
    fn ring(&self) {
        // It fails only if the counter is full, and then the relay is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn wait<'a>(&self, state: std::sync::MutexGuard<'a, State>) -> std::sync::MutexGuard<'a, State> {
        self.moved.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn relay(control: &Control, exec: &str, shared: &Shared) -> Result<u64, AgentError> {
    let mut backoff = Backoff::new();
    let mut progress = 0;
    loop {
        match serve(control, exec, shared) {
            Ok(count) => return Ok(count),
            Err(error) if !control.worth_retrying(&error) => return Err(error),
            Err(_) => {}
        }
        let state = locked(&shared.state);
        if state.abandoned {
            return Ok(0);
        }
        let now = state.sender.acknowledged();
        drop(state);
        if now > progress {
            progress = now;
            backoff.reset();
        }
        backoff.wait();
    }
}

/// One connection's life; `Ok` when everything was accepted, or nobody reads it any more.
fn serve(control: &Control, exec: &str, shared: &Shared) -> Result<u64, AgentError> {
    let opening = control.opening(exec, Stream::Stdin, 0);
    let (mut link, attached) = Link::attach(control.dial(), &opening)?;
    let mut cursor = match attached {
        Attached::Closed(offset) => return Ok(offset),
        Attached::At(offset) => attach(shared, offset)?,
    };
    let mut frames = Vec::new();
    loop {
        // First what came, which may have come along with the answer to the opening.
        if let Some(accepted) = take(&mut link, shared)? {
            return Ok(accepted);
        }
        // One frame at a time, so that acknowledgements are taken between two; and never more than the credit, so
        // that the write does not wait for the process.
        {
            let state = locked(&shared.state);
            if state.abandoned {
                return Ok(0);
            }
            frames.clear();
            if state.sender.in_flight(&cursor) < CREDIT {
                state.sender.put_next(&mut cursor, &mut frames);
            }
        }
        if !frames.is_empty() {
            link.write(&frames)?;
        }
        let wait = if frames.is_empty() { None } else { Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }) };
        let mut ready = [PollFd::new(link.stream(), PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        match poll(&mut ready, wait) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(AgentError::Connection(error.into())),
        }
        let [connection, wake] = ready.map(|fd| !fd.revents().is_empty());
        if wake {
            let _ = rustix::io::read(&shared.wake, &mut [0u8; 8]);
        }
        if connection {
            link.fill()?;
        }
    }
}

/// Takes what has arrived; the accepted length once there is no more to send.
fn take(link: &mut Link, shared: &Shared) -> Result<Option<u64>, AgentError> {
    while let Some(incoming) = link.receive_ready()? {
        match incoming {
            Incoming::Ack(offset) => acknowledge(shared, offset)?,
            Incoming::Message(FromAgent::Closed { offset }) => return Ok(Some(offset)),
            Incoming::End(total) => {
                acknowledge(shared, total)?;
                return Ok(Some(total));
            }
            other => return Err(AgentError::protocol(format_args!("{other:?} on an input stream"))),
        }
    }
    Ok(None)
}

fn attach(shared: &Shared, offset: u64) -> Result<Cursor, AgentError> {
    let mut state = locked(&shared.state);
    if !std::mem::replace(&mut state.begun, true) {
        state.sender.begin_at(offset);
    }
    let cursor = state.sender.attach(offset)?;
    drop(state);
    shared.moved.notify_all();
    Ok(cursor)
}

fn acknowledge(shared: &Shared, offset: u64) -> Result<(), AgentError> {
    locked(&shared.state).sender.acknowledge(offset)?;
    shared.moved.notify_all();
    Ok(())
}
