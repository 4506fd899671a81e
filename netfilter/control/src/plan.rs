//! The addresses on a guest's link. Every guest has the same, so nothing needs a new address after a restore or a fork.

use std::net::Ipv4Addr;

/// A link-layer address.
pub type Mac = [u8; 6];

/// The guest's end. Locally administered.
pub const GUEST_MAC: Mac = [0x02, 0x62, 0x75, 0x6c, 0x6b, 0x02];
/// Our end.
pub const GATEWAY_MAC: Mac = [0x02, 0x62, 0x75, 0x6c, 0x6b, 0x01];
/// All stations.
pub const BROADCAST_MAC: Mac = [0xff; 6];

/// Our address: router, DNS and DHCP server of the link, and nothing else.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The guest's address.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// The link's prefix and mask: the two of us.
pub const PREFIX: u8 = 30;
/// The same as a mask.
pub const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);

/// The first address that can stand for a name. The /24 of the link itself is left out.
pub const FIRST_NAME: Ipv4Addr = Ipv4Addr::new(198, 18, 1, 1);

/// Largest IP packet on the link: the largest that is a multiple of 4 KiB less the headers of IP and TCP, so that a
/// segment's data fills whole pages. Large packets are what makes a user-space stack fast.
pub const MTU: usize = 65_520;
/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;
/// Largest frame.
pub const MAX_FRAME: usize = MTU + ETHERNET;
