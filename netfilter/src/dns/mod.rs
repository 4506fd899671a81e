//! DNS: the answers that the guest gets, and the questions that the host asks.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

pub mod message;
pub mod reply;
pub mod resolver;
pub mod responder;
pub mod talk;

/// Types of records (IANA, DNS parameters).
pub mod qtype {
    /// An IPv4 address.
    pub const A: u16 = 1;
    /// Another name.
    pub const CNAME: u16 = 5;
    /// Start of authority.
    pub const SOA: u16 = 6;
    /// An IPv6 address.
    pub const AAAA: u16 = 28;
    /// EDNS's pseudo record.
    pub const OPT: u16 = 41;
    /// Incremental zone transfer; zone transfer, two mail types and "any" follow it.
    pub const IXFR: u16 = 251;
}

/// Response codes.
pub mod rcode {
    /// An answer, perhaps an empty one.
    pub const NOERROR: u8 = 0;
    /// The question could not be read.
    pub const FORMERR: u8 = 1;
    /// The name does not exist.
    pub const NXDOMAIN: u8 = 3;
    /// The kind of question is not answered.
    pub const NOTIMP: u8 = 4;
    /// The question is not answered.
    pub const REFUSED: u8 = 5;
}
