//! The addresses of the machine's one network link, the same in every machine: the agent sets them itself, and waits for no
//! DHCP. They are the network filter's (`netfilter/control/src/plan.rs`); a test of `cli` compares.

use std::net::Ipv4Addr;

/// The machine's address.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// The other end: router and name server.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The link has these two.
pub const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);
