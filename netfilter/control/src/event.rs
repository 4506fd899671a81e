//! What a network filter records.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

/// Longest text of somebody else's that a record quotes, in bytes.
pub const MAX_QUOTE: usize = 256;

/// One decision or happening. Its JSON has a `type` of dotted words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", deny_unknown_fields)]
pub enum Record {
    /// A name got its address.
    #[serde(rename = "net.dns.answered")]
    DnsAnswered {
        /// The name.
        name: String,
        /// The address that means it in this sandbox.
        address: IpAddr,
        /// The rule that allows it.
        rule: String,
        /// Whether the name looks as if it carried data: a long label, or many more labels than the rule has.
        unusual: bool,
    },
    /// A DNS question was refused.
    #[serde(rename = "net.dns.denied")]
    DnsDenied {
        /// What was asked, anything but host name characters as `\xNN`.
        name: String,
        /// The number of the question's type.
        qtype: u16,
        /// Why.
        reason: Reason,
        /// The denial that denied it.
        rule: Option<String>,
        /// What would allow it.
        hint: String,
    },
    /// A flow was joined to its destination.
    #[serde(rename = "net.flow.opened")]
    FlowOpened {
        /// Its number.
        flow: u64,
        /// The name or address that the guest dialled.
        subject: String,
        /// The port.
        port: u16,
        /// The rule that allows it.
        rule: String,
        /// The protocol that the rule wants; `raw` is unchecked.
        protocol: String,
        /// What the host dialled.
        upstream: SocketAddr,
    },
    /// A TLS flow's hello was checked.
    #[serde(rename = "net.flow.tls")]
    FlowTls {
        /// Its number.
        flow: u64,
        /// The server name, if the hello has one.
        server_name: Option<String>,
        /// The protocols that the client offers.
        alpn: Vec<String>,
    },
    /// A flow was refused, before or after it was joined.
    #[serde(rename = "net.flow.denied")]
    FlowDenied {
        /// Its number, if it had got one.
        flow: Option<u64>,
        /// The name or address that the guest dialled.
        subject: String,
        /// The port.
        port: u16,
        /// How far it had come.
        stage: Stage,
        /// Why.
        reason: Reason,
        /// More about it: a server name, an address, what the host's kernel said.
        detail: String,
        /// The rule or denial that was in force.
        rule: Option<String>,
        /// What would allow it.
        hint: String,
    },
    /// A flow ended.
    #[serde(rename = "net.flow.closed")]
    FlowClosed {
        /// Its number.
        flow: u64,
        /// Bytes from the guest.
        up: u64,
        /// Bytes to the guest.
        down: u64,
        /// How long it lived.
        millis: u64,
        /// Why it ended.
        cause: Cause,
    },
    /// A request over plain HTTP got its answer.
    #[serde(rename = "net.http.request")]
    HttpRequest {
        /// The flow's number.
        flow: u64,
        /// The method.
        method: String,
        /// The path, without what follows `?`.
        path: String,
        /// The answer's status.
        status: u16,
    },
    /// A new policy is in force.
    #[serde(rename = "net.policy.set")]
    PolicySet {
        /// Its number.
        generation: u64,
        /// Live flows that it does not allow, and that were reset.
        revoked: u64,
    },
    /// Frames that nothing is there for.
    #[serde(rename = "net.frames.dropped")]
    FramesDropped {
        /// Which kind.
        class: String,
        /// How many since the last such record.
        count: u64,
    },
    /// Flows of a saved machine were reset when it came back.
    #[serde(rename = "net.flows.reset")]
    FlowsReset {
        /// How many.
        count: u64,
    },
    /// Records that were not written one by one. They are counted in full.
    #[serde(rename = "net.suppressed")]
    Suppressed {
        /// The `type` of the records.
        of: String,
        /// Their reason, where they have one.
        reason: Option<Reason>,
        /// How many since the last such record.
        count: u64,
    },
}

/// How far a refused flow had come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// The guest asked for a connection.
    Syn,
    /// The name was resolved.
    Resolve,
    /// The host dialled.
    Dial,
    /// The first bytes of the protocol were checked.
    FirstBytes,
    /// It was joined.
    Joined,
}

/// Why something was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// No rule is about it.
    NoRule,
    /// A denial is about it.
    Denied,
    /// Rules are about it, but not about this port.
    OtherPort,
    /// A public DNS-over-HTTPS service that only a wildcard matches.
    PublicDoh,
    /// The name is reserved, and never resolves.
    ReservedName,
    /// What was asked is no host name.
    BadName,
    /// An address that stands for no name and that no `cidr:` rule is about.
    UnknownAddress,
    /// An address that no rule may reach.
    ForbiddenAddress,
    /// One of the host's own addresses, or its router's.
    HostAddress,
    /// The name did not resolve on the host.
    Unresolvable,
    /// Nobody answered at the destination.
    Unreachable,
    /// The upstream proxy refused, or was not there.
    ProxyRefused,
    /// TLS was to be spoken, and something else was.
    NotTls,
    /// A TLS hello without a server name.
    NoServerName,
    /// A TLS hello whose server name is not the name that was dialled.
    ServerNameMismatch,
    /// A TLS hello with an encrypted inner hello.
    EncryptedHello,
    /// A TLS hello that offers a protocol which the rule does not list.
    Alpn,
    /// SSH was to be spoken, and something else was.
    NotSsh,
    /// HTTP that is not strictly framed.
    BadHttp,
    /// An HTTP request for another host.
    HostMismatch,
    /// An HTTP method that the rule does not allow.
    Method,
    /// An HTTP path that the rule does not allow.
    Path,
    /// An HTTP request that would turn the connection into something else.
    Upgrade,
    /// An answer that is not strictly framed HTTP.
    BadAnswer,
    /// The first bytes took too long.
    Slow,
    /// A limit of the sandbox.
    Limit,
    /// More names than a sandbox may learn.
    NameLimit,
    /// The policy was changed.
    Revoked,
}

/// Why a flow ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// Both sides said all they had to say.
    Finished,
    /// The guest reset it.
    GuestReset,
    /// The other side reset it.
    UpstreamReset,
    /// It was refused; a record of its own says why.
    Refused,
    /// Nothing was said for too long.
    Idle,
    /// One side did not take what the other had sent.
    Stalled,
    /// One direction had ended, and the other did not.
    HalfClosed,
    /// A term of its rule: bytes or time.
    Term,
    /// The run ends.
    Ended,
}

/// Counters from the start. None is ever less than what happened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Counters {
    /// Frames from the guest.
    pub frames_in: u64,
    /// Frames to the guest.
    pub frames_out: u64,
    /// Frames from the guest that nothing is there for.
    pub frames_dropped: u64,
    /// DNS questions that got an address.
    pub dns_answered: u64,
    /// DNS questions that were refused.
    pub dns_denied: u64,
    /// Flows that were joined.
    pub flows_opened: u64,
    /// Flows that were refused.
    pub flows_denied: u64,
    /// Flows that ended after they were joined.
    pub flows_closed: u64,
    /// HTTP requests that got an answer.
    pub http_requests: u64,
    /// Bytes from the guest that were passed on.
    pub bytes_up: u64,
    /// Bytes to the guest that were passed on.
    pub bytes_down: u64,
    /// Records that were only counted.
    pub suppressed: u64,
}

impl Record {
    /// Its `type`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::DnsAnswered { .. } => "net.dns.answered",
            Self::DnsDenied { .. } => "net.dns.denied",
            Self::FlowOpened { .. } => "net.flow.opened",
            Self::FlowTls { .. } => "net.flow.tls",
            Self::FlowDenied { .. } => "net.flow.denied",
            Self::FlowClosed { .. } => "net.flow.closed",
            Self::HttpRequest { .. } => "net.http.request",
            Self::PolicySet { .. } => "net.policy.set",
            Self::FramesDropped { .. } => "net.frames.dropped",
            Self::FlowsReset { .. } => "net.flows.reset",
            Self::Suppressed { .. } => "net.suppressed",
        }
    }

    /// Why, if it is a refusal.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::DnsDenied { reason, .. } | Self::FlowDenied { reason, .. } => Some(*reason),
            _ => None,
        }
    }
}

/// Text of somebody else's as it may stand in a record: printable ASCII, the rest as `\xNN`, cut at [`MAX_QUOTE`].
///
/// ```
/// assert_eq!(netfilter_control::quote(b"a\n\x1b[2J\"b"), "a\\x0a\\x1b[2J\"b");
/// ```
pub fn quote(bytes: &[u8]) -> String {
    let mut quoted = String::new();
    for &byte in bytes {
        if quoted.len() >= MAX_QUOTE {
            quoted.push('…');
            break;
        }
        if (byte.is_ascii_graphic() || byte == b' ') && byte != b'\\' {
            quoted.push(char::from(byte));
        } else {
            quoted.push_str(&format!("\\x{byte:02x}"));
        }
    }
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row 126: nothing of somebody else's can end a line, colour a terminal or turn text round.
    #[test]
    fn quotes_are_printable() {
        let hostile = "\r\n{\"type\":\"x\"}\u{1b}[31m\u{202e}\0\\".as_bytes();
        let quoted = quote(hostile);
        assert!(quoted.bytes().all(|byte| (0x20..0x7f).contains(&byte)), "{quoted}");
        assert!(quote(&[b'a'; 10_000]).len() < MAX_QUOTE + 10);
        assert_eq!(quote(b"\\x41"), "\\x5cx41", "an escape cannot be forged");
    }

    #[test]
    fn the_kind_is_the_type() {
        let record = Record::FlowsReset { count: 1 };
        let json = serde_json::to_value(&record).unwrap();
        assert_eq!(json["type"], record.kind());
        let record = Record::Suppressed { of: "x".into(), reason: Some(Reason::NoRule), count: 2 };
        let json = serde_json::to_string(&record).unwrap();
        assert_eq!(json, r#"{"type":"net.suppressed","of":"x","reason":"no-rule","count":2}"#);
        assert_eq!(serde_json::from_str::<Record>(&json).unwrap(), record);
    }
}
