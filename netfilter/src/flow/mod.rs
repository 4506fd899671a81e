//! A flow: one TCP connection of the guest's, and what it is joined to.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

pub mod joined;
mod pipe;
pub mod proxy;
mod web;

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;

use netfilter_control::{Name, Policy, Rule, Subject};

use crate::dial::Dial;
use crate::host::Token;
use joined::Joined;
use proxy::Handshake;

/// The guest's port and the destination: what tells connections apart.
pub type Tuple = (u16, SocketAddrV4);

/// Whom the guest dialled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dialled {
    /// A name, by its address here.
    Name(Name),
    /// An address that stands for no name.
    Address(Ipv4Addr),
}

impl Dialled {
    /// The same, for a policy to decide about.
    pub fn subject(&self) -> Subject<'_> {
        match self {
            Self::Name(name) => Subject::Name(name),
            Self::Address(address) => Subject::Address((*address).into()),
        }
    }
}

impl std::fmt::Display for Dialled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// One flow.
#[derive(Debug)]
pub struct Flow {
    /// Which connection of the guest's it is.
    pub tuple: Tuple,
    /// Whom the guest dialled.
    pub dialled: Dialled,
    /// The rule that allows it.
    pub rule: Rule,
    /// When the guest asked for it.
    pub since: Duration,
    /// How far it has come.
    pub state: State,
}

/// How far a flow has come.
#[derive(Debug)]
pub enum State {
    /// The name is being resolved. The SYN is kept: it is the connection until the destination is reached.
    Resolving(Vec<u8>),
    /// The destination is being dialled.
    Dialling(Vec<u8>, Dial),
    /// The proxy was reached, and is asked for the destination.
    Asking(Vec<u8>, Token, SocketAddr, Handshake),
    /// The guest is joined to its destination.
    Joined(Box<Joined>),
}

impl Flow {
    /// The destination port.
    pub fn port(&self) -> u16 {
        self.tuple.1.port()
    }

    /// Whether the guest has no answer to its SYN yet.
    pub fn is_pending(&self) -> bool {
        !matches!(self.state, State::Joined(_))
    }

    /// What it is joined to.
    pub fn peer(&self) -> Option<SocketAddr> {
        match &self.state {
            State::Joined(joined) => Some(joined.peer()),
            _ => None,
        }
    }

    /// Whether a policy allows it as it is. The rule may be another one, if it asks for the same. Through a proxy the
    /// address that was dialled says nothing.
    pub fn is_allowed_by(&self, policy: &Policy, proxied: bool) -> bool {
        let netfilter_control::Decision::Allow(rule) = policy.decide(self.dialled.subject(), self.port()) else {
            return false;
        };
        let denied = self
            .peer()
            .filter(|_| !proxied)
            .is_some_and(|peer| policy.denied_address(peer.ip(), self.port()).is_some());
        !denied && rule.protocol == self.rule.protocol && rule.terms == self.rule.terms
    }
}
