//! What a supervisor and its network filter say to each other.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::event::{Counters, Record};

/// Most resolvers.
pub const MAX_RESOLVERS: usize = 8;
/// Most bytes of a saved network: every name and flow at its largest stays below.
pub const MAX_SAVED: usize = 2 << 20;

/// From the supervisor to the network filter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Serve a guest. Descriptors, in this order: the frame socket (`SOCK_SEQPACKET`, one packet one frame); a
    /// `NETLINK_ROUTE` socket of the network that is dialled from; the policy, a file that holds a [`crate::Policy`] as
    /// JSON; then, if `restored` is set, a file that [`Request::Save`] wrote.
    Start(Config),
    /// Put a policy in force. One descriptor: the policy, as above.
    SetPolicy {
        /// Its number, which records name.
        generation: u64,
    },
    /// Ask other resolvers from now on.
    SetResolvers {
        /// Their addresses.
        resolvers: Vec<SocketAddr>,
    },
    /// Write down what a snapshot keeps. One descriptor: an empty file.
    Save,
    /// Report [`Event::Stats`].
    Stats,
    /// End with [`Event::Stopped`].
    Stop,
}

/// How a guest is served. Descriptors come with the message.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The number of the policy.
    pub generation: u64,
    /// Whom to ask for addresses, at most [`MAX_RESOLVERS`]. Without any, no name can be dialled.
    pub resolvers: Vec<SocketAddr>,
    /// An HTTP proxy that every flow goes through.
    pub proxy: Option<SocketAddr>,
    /// Whether the machine comes from a snapshot.
    pub restored: bool,
}

/// From the network filter to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Event {
    /// The guest is served.
    Running,
    /// The guest cannot be served. The process ends.
    Refused {
        /// Names the thing, the value and the reason.
        error: String,
    },
    /// A policy is in force. It is said at once; [`Record::PolicySet`] stands in its order among the records.
    PolicySet {
        /// Its number.
        generation: u64,
        /// Live flows that it does not allow, and that were reset.
        revoked: u64,
    },
    /// A policy was not put in force: the one before stays.
    PolicyRefused {
        /// Its number.
        generation: u64,
        /// Why.
        error: String,
    },
    /// Resolvers were not taken: the ones before stay.
    ResolversRefused {
        /// Why.
        error: String,
    },
    /// The file of [`Request::Save`] is complete.
    Saved,
    /// It could not be written.
    SaveFailed {
        /// Why.
        error: String,
    },
    /// Something happened.
    Record {
        /// What.
        record: Record,
    },
    /// The answer to [`Request::Stats`].
    Stats(Counters),
    /// The process ends.
    Stopped(Counters),
}
