//! The guest agent and its protocol, both ends.
//!
//! - [`message`], [`frame`] and [`window`] are the protocol: pure, no descriptors, no clock.
//! - [`build`] is what a machine that builds an image says on top of the protocol.
//! - [`link`] has the addresses of a machine's network.
//! - [`archive`] reads tar archives: pure as well, for both ends.
//! - [`host`] is the supervisor's end. Everything that it reads is hostile.
//! - [`agent`] is the guest's end, PID 1 of the machine.
//!
//! `docs/formats/agent-protocol.md` describes what goes over the wire.

#![deny(unsafe_code)]

pub mod agent;
pub mod archive;
pub mod build;
pub mod frame;
pub mod host;
pub mod link;
pub mod message;
mod sys;
pub mod window;
