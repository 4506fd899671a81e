//! The guest agent and its protocol, both ends.
//!
//! - [`message`], [`frame`] and [`window`] are the protocol: pure, no descriptors, no clock.
//! - [`host`] is the supervisor's end. Everything that it reads is hostile.
//! - [`agent`] is the guest's end, PID 1 of the machine.
//!
//! `docs/formats/agent-protocol.md` describes what goes over the wire.

#![deny(unsafe_code)]

pub mod agent;
pub mod frame;
pub mod host;
pub mod message;
mod sys;
pub mod window;
