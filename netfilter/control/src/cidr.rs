//! Blocks of addresses and ranges of ports.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

/// A block of addresses, such as `10.1.2.0/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "(IpAddr, u8)", into = "(IpAddr, u8)")]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

/// Why an address and a prefix are no block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CidrError {
    /// A prefix longer than the address.
    #[error("the prefix /{0} is longer than the address")]
    Prefix(u8),
    /// Bits after the prefix: was the address meant, or the block?
    #[error("bits after the prefix are set; the block is {0}")]
    HostBits(Cidr),
}

impl Cidr {
    /// A block. Bits after the prefix must be zero.
    pub fn new(address: IpAddr, prefix: u8) -> Result<Self, CidrError> {
        let block = match address {
            IpAddr::V4(_) if prefix > 32 => return Err(CidrError::Prefix(prefix)),
            IpAddr::V6(_) if prefix > 128 => return Err(CidrError::Prefix(prefix)),
            IpAddr::V4(v4) => Self::v4(v4, prefix),
            IpAddr::V6(v6) => Self::v6(v6, prefix),
        };
        if block.address == address { Ok(block) } else { Err(CidrError::HostBits(block)) }
    }

    /// The IPv4 block that an address lies in. A prefix over 32 counts as 32.
    pub const fn v4(address: Ipv4Addr, prefix: u8) -> Self {
        let prefix = if prefix > 32 { 32 } else { prefix };
        let mask = if prefix == 0 { 0 } else { u32::MAX << (32 - prefix) };
        Self { address: IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & mask)), prefix }
    }

    /// The IPv6 block that an address lies in. A prefix over 128 counts as 128.
    pub const fn v6(address: Ipv6Addr, prefix: u8) -> Self {
        let prefix = if prefix > 128 { 128 } else { prefix };
        let mask = if prefix == 0 { 0 } else { u128::MAX << (128 - prefix) };
        Self { address: IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & mask)), prefix }
    }

    /// Its first address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// How many leading bits its addresses share.
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Whether an address lies in it. An IPv4 address lies in no IPv6 block, mapped or not.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(_), IpAddr::V4(v4)) => Self::v4(v4, self.prefix) == *self,
            (IpAddr::V6(_), IpAddr::V6(v6)) => Self::v6(v6, self.prefix) == *self,
            _ => false,
        }
    }

    /// Whether all of `other` lies in it.
    pub fn covers(&self, other: &Self) -> bool {
        self.prefix <= other.prefix && self.contains(other.address)
    }

    /// Whether they share an address.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.covers(other) || other.covers(self)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl TryFrom<(IpAddr, u8)> for Cidr {
    type Error = CidrError;

    fn try_from((address, prefix): (IpAddr, u8)) -> Result<Self, CidrError> {
        Self::new(address, prefix)
    }
}

impl From<Cidr> for (IpAddr, u8) {
    fn from(block: Cidr) -> Self {
        (block.address, block.prefix)
    }
}

/// A range of ports, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "(u16, u16)", into = "(u16, u16)")]
pub struct Ports {
    first: u16,
    last: u16,
}

/// A range that ends before it begins, or begins at port 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}-{1} is no range of ports from 1 to 65535")]
pub struct PortsError(u16, u16);

impl Ports {
    /// Every port.
    pub const ALL: Self = Self { first: 1, last: u16::MAX };

    /// A range. Port 0 is in none.
    pub fn new(first: u16, last: u16) -> Result<Self, PortsError> {
        if first == 0 || last < first { Err(PortsError(first, last)) } else { Ok(Self { first, last }) }
    }

    /// The first port.
    pub fn first(&self) -> u16 {
        self.first
    }

    /// The last port.
    pub fn last(&self) -> u16 {
        self.last
    }

    /// Whether a port is in it.
    pub fn contains(&self, port: u16) -> bool {
        self.first <= port && port <= self.last
    }

    /// Whether they share a port.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last { write!(f, "{}", self.first) } else { write!(f, "{}-{}", self.first, self.last) }
    }
}

impl TryFrom<(u16, u16)> for Ports {
    type Error = PortsError;

    fn try_from((first, last): (u16, u16)) -> Result<Self, PortsError> {
        Self::new(first, last)
    }
}

impl From<Ports> for (u16, u16) {
    fn from(ports: Ports) -> Self {
        (ports.first, ports.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(text: &str) -> Cidr {
        let (address, prefix) = text.split_once('/').unwrap();
        Cidr::new(address.parse().unwrap(), prefix.parse().unwrap()).unwrap()
    }

    #[test]
    fn blocks_contain_their_addresses() {
        assert!(block("10.1.2.0/24").contains("10.1.2.255".parse().unwrap()));
        assert!(!block("10.1.2.0/24").contains("10.1.3.0".parse().unwrap()));
        assert!(block("0.0.0.0/0").contains("255.255.255.255".parse().unwrap()));
        assert!(!block("::/0").contains("1.2.3.4".parse().unwrap()));
        assert!(block("2001:db8::/32").contains("2001:db8:ffff::1".parse().unwrap()));
        assert!(block("10.0.0.0/8").covers(&block("10.1.0.0/16")));
        assert!(!block("10.1.0.0/16").covers(&block("10.0.0.0/8")));
        assert!(block("10.1.0.0/16").overlaps(&block("10.0.0.0/8")));
        assert!(!block("10.1.0.0/16").overlaps(&block("10.2.0.0/16")));
    }

    #[test]
    fn a_block_has_no_bits_after_its_prefix() {
        let error = Cidr::new("10.1.2.3".parse().unwrap(), 24).unwrap_err();
        assert_eq!(error, CidrError::HostBits(block("10.1.2.0/24")));
        assert_eq!(Cidr::new("10.0.0.0".parse().unwrap(), 33), Err(CidrError::Prefix(33)));
    }

    #[test]
    fn ranges_of_ports_hold_both_ends() {
        let range = Ports::new(8000, 8002).unwrap();
        assert!(range.contains(8000) && range.contains(8002) && !range.contains(8003) && !range.contains(7999));
        assert!(Ports::new(0, 5).is_err() && Ports::new(5, 4).is_err());
        assert!(!Ports::ALL.contains(0));
    }
}
