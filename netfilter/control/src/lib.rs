//! Compiled egress policies, and what a supervisor and its network filter say to each other.
//!
//! A policy is written in a grammar (crate `netfilter-policy`), compiled once into a [`Policy`], and from then on only
//! matched: [`Policy::decide`] is the one function that says whether a destination may be reached.
#![forbid(unsafe_code)]

mod cidr;
pub mod classify;
mod event;
mod name;
mod policy;

pub use cidr::{Cidr, CidrError, Ports, PortsError};
pub use event::{Cause, Counters, MAX_QUOTE, Reason, Record, Stage, quote};
pub use name::{MAX_LABEL, MAX_NAME, Name, NameError, is_public_doh, reserved_for};
pub use policy::{Decision, Denial, MAX_POLICY, MAX_RULES, Policy, Protocol, Rule, Subject, Target, Terms};
