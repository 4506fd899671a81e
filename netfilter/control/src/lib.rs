//! Compiled egress policies, and what a supervisor and its network filter say to each other.
//!
//! One `SOCK_SEQPACKET` Unix socket joins the two. One packet is one message: JSON of at most [`MAX_MESSAGE`] bytes, with
//! up to [`MAX_DESCRIPTORS`] descriptors attached. The filter opens no path: its sockets to the guest and to the host's
//! routing tables, and every file, come through here. The supervisor sends [`Request::Start`] first and once, and gets
//! [`Event::Running`] or [`Event::Refused`]; [`Event::Stopped`] is the last. When either end closes, the other side ends.
//! The supervisor treats what it reads as hostile: a guest may have taken the filter over.
//!
//! A policy is written in a grammar (crate `netfilter-policy`), compiled once into a [`Policy`], and from then on only
//! matched: [`Policy::decide`] is the one function that says whether a destination may be reached.
#![forbid(unsafe_code)]

mod cidr;
pub mod classify;
mod event;
mod message;
mod name;
pub mod plan;
mod policy;
mod socket;

pub use cidr::{Cidr, CidrError, Ports, PortsError};
pub use event::{Cause, Counters, MAX_QUOTE, Reason, Record, Stage, quote};
pub use message::{Config, Event, MAX_RESOLVERS, MAX_SAVED, Request};
pub use name::{MAX_LABEL, MAX_NAME, Name, NameError, is_public_doh, reserved_for};
pub use policy::{
    Decision, Denial, MAX_POLICY, MAX_RULES, Policy, Protocol, Rule, Subject, Target, Terms, USUAL_METHODS,
};
pub use socket::{ControlError, ControlSocket, MAX_DESCRIPTORS, MAX_MESSAGE};
