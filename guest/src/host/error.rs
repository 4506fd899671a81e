//! What can go wrong between the supervisor and the agent.

use crate::{
    frame::FrameError,
    message::{Refusal, RefusalKind, SpecError},
    window::WindowError,
};
use std::io;

/// Why the agent's client could not do something.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// the machine is gone
    #[error("the machine is gone")]
    Gone,
    /// the agent did not answer within the time allowed: {0}
    #[error("the agent did not answer within the time allowed: {0}")]
    Late(String),
    /// cannot connect to the agent: {0}
    #[error("cannot connect to the agent: {0}")]
    Dial(#[source] io::Error),
    /// connection to the agent: {0}
    #[error("connection to the agent: {0}")]
    Connection(#[source] io::Error),
    /// the agent broke the protocol: {0}
    #[error("the agent broke the protocol: {0}")]
    Protocol(String),
    /// the agent refused ({kind:?}): {message}
    #[error("the agent refused ({kind:?}): {message}")]
    Refused {
        /// For programs.
        kind: RefusalKind,
        /// For people; control characters replaced.
        message: String,
    },
    /// request: {0}
    #[error("request: {0}")]
    Spec(#[from] SpecError),
    /// request is too long: {0}
    #[error("request is too long: {0}")]
    TooLong(FrameError),
    /// cannot read the input: {0}
    #[error("cannot read the input: {0}")]
    Source(#[source] io::Error),
    /// cannot write the output: {0}
    #[error("cannot write the output: {0}")]
    Sink(#[source] io::Error),
    /// cannot start a thread: {0}
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
}

impl AgentError {
    pub(super) fn refused(refusal: &Refusal) -> AgentError {
        AgentError::Refused { kind: refusal.kind, message: crate::message::printable(&refusal.message) }
    }

    pub(super) fn protocol(text: impl std::fmt::Display) -> AgentError {
        AgentError::Protocol(crate::message::printable(&text.to_string()))
    }
}

impl From<FrameError> for AgentError {
    fn from(error: FrameError) -> Self {
        AgentError::protocol(error)
    }
}

impl From<WindowError> for AgentError {
    fn from(error: WindowError) -> Self {
        AgentError::protocol(error)
    }
}
