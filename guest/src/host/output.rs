//! The pump of an output stream: attach where the last connection broke, write, acknowledge, until the end.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use super::{
    AgentError,
    control::Control,
    link::{Attached, Backoff, Incoming, Link},
};
use crate::{message::Stream, window::Receiver};
use std::{
    io::Write,
    sync::atomic::{AtomicU64, Ordering},
};

pub(super) fn copy(
    control: &Control,
    exec: &str,
    stream: Stream,
    have: u64,
    to: &mut dyn Write,
    passed: &AtomicU64,
) -> Result<u64, AgentError> {
    passed.store(have, Ordering::Release);
    let mut receiver = Receiver::starting_at(have);
    let mut backoff = Backoff::new();
    loop {
        let before = receiver.have();
        match serve(control, exec, stream, &mut receiver, to, passed) {
            Ok(()) => return Ok(receiver.have()),
            Err(error) if !control.worth_retrying(&error) => return Err(error),
            Err(_) => {}
        }
        if receiver.have() > before {
            backoff.reset();
        }
        backoff.wait();
    }
}

/// One connection's life; `Ok` when the stream has ended.
fn serve(
    control: &Control,
    exec: &str,
    stream: Stream,
    receiver: &mut Receiver,
    to: &mut dyn Write,
    passed: &AtomicU64,
) -> Result<(), AgentError> {
    let opening = control.opening(exec, stream, receiver.have());
    let (mut link, attached) = Link::attach(control.dial(), &opening)?;
    match attached {
        Attached::At(offset) if offset == receiver.have() => {}
        other => return Err(AgentError::protocol(format_args!("{other:?}, {} asked for", receiver.have()))),
    }
    loop {
        match link.receive()? {
            Incoming::Data { offset, bytes } => {
                receiver.data(offset, &bytes)?;
                to.write_all(&bytes).and_then(|()| to.flush()).map_err(AgentError::Sink)?;
                passed.store(receiver.have(), Ordering::Release);
                link.ack(receiver.have())?;
            }
            Incoming::End(total) => {
                receiver.end(total)?;
                // The last word is a courtesy: it lets the agent drop what it holds. Releasing the exec does too.
                let _ = link.ack(total);
                return Ok(());
            }
            other => return Err(AgentError::protocol(format_args!("{other:?} on an output stream"))),
        }
    }
}
