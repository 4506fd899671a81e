//! Which addresses may be dialled: an allow-list of global unicast.
//!
//! The lists follow IANA's registries of special-purpose addresses, of IPv6 unicast and of IPv4 address space. What is
//! not known to be global unicast is refused, so a block that is assigned later is refused until somebody adds it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::cidr::Cidr;

/// What an address is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Global unicast: a name may resolve to it.
    Global,
    /// In this private block: reached only by a `cidr:` rule that lies inside of the block.
    Private(Cidr),
    /// Reached by no rule. The text says what it is for.
    Never(&'static str),
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Cidr {
    Cidr::v4(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn v6(a: u16, b: u16, c: u16, prefix: u8) -> Cidr {
    Cidr::v6(Ipv6Addr::new(a, b, c, 0, 0, 0, 0, 0), prefix)
}

/// RFC 1918 and RFC 6598.
const PRIVATE: [Cidr; 4] = [v4(10, 0, 0, 0, 8), v4(100, 64, 0, 0, 10), v4(172, 16, 0, 0, 12), v4(192, 168, 0, 0, 16)];

/// Checked before `PRIVATE`, since some cloud services sit inside of private blocks.
const NEVER_V4: [(Cidr, &str); 18] = [
    (v4(0, 0, 0, 0, 8), "this network"),
    (v4(127, 0, 0, 0, 8), "loopback"),
    (v4(169, 254, 0, 0, 16), "link-local, cloud metadata among it"),
    (v4(100, 100, 100, 200, 32), "a cloud's metadata service"),
    (v4(168, 63, 129, 16, 32), "a cloud's platform service"),
    (v4(192, 0, 0, 0, 24), "protocol assignments, cloud metadata among it"),
    (v4(192, 0, 2, 0, 24), "documentation"),
    (v4(192, 31, 196, 0, 24), "AS112 name servers"),
    (v4(192, 52, 193, 0, 24), "multicast tunnelling"),
    (v4(192, 88, 99, 0, 24), "6to4 relays"),
    (v4(192, 175, 48, 0, 24), "AS112 name servers"),
    (v4(198, 18, 0, 0, 15), "benchmarks; here, names' own addresses"),
    (v4(198, 51, 100, 0, 24), "documentation"),
    (v4(203, 0, 113, 0, 24), "documentation"),
    (v4(224, 0, 0, 0, 4), "multicast"),
    (v4(233, 252, 0, 0, 24), "documentation"),
    (v4(240, 0, 0, 0, 4), "reserved"),
    (v4(255, 255, 255, 255, 32), "broadcast"),
];

const NEVER_V6: [(Cidr, &str); 6] = [
    (v6(0x2001, 0, 0, 23), "protocol assignments, tunnels among them"),
    (v6(0x2001, 0xdb8, 0, 32), "documentation"),
    (v6(0x2002, 0, 0, 16), "6to4, with an IPv4 address inside"),
    (v6(0x2620, 0x4f, 0x8000, 48), "AS112 name servers"),
    (v6(0x3ffe, 0, 0, 16), "a test network that was given back"),
    (v6(0x3fff, 0, 0, 20), "documentation"),
];

/// All that IANA has given out as IPv6 global unicast.
const GLOBAL_V6: Cidr = v6(0x2000, 0, 0, 3);

/// What an address is for.
pub fn classify(address: IpAddr) -> Reach {
    match address {
        IpAddr::V4(v4) => classify_v4(v4),
        IpAddr::V6(v6) => classify_v6(v6),
    }
}

fn classify_v4(address: Ipv4Addr) -> Reach {
    let address = IpAddr::V4(address);
    if let Some((_, purpose)) = NEVER_V4.iter().find(|(block, _)| block.contains(address)) {
        return Reach::Never(purpose);
    }
    PRIVATE.iter().find(|block| block.contains(address)).map_or(Reach::Global, |block| Reach::Private(*block))
}

fn classify_v6(address: Ipv6Addr) -> Reach {
    if !GLOBAL_V6.contains(IpAddr::V6(address)) {
        return Reach::Never("outside of IPv6 global unicast");
    }
    if let Some((_, purpose)) = NEVER_V6.iter().find(|(block, _)| block.contains(IpAddr::V6(address))) {
        return Reach::Never(purpose);
    }
    // RFC 5214: an ISATAP address ends in an IPv4 address, to which the packet would be tunnelled.
    if let [_, _, _, _, 0 | 0x200, 0x5efe, high, low] = address.segments() {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        if classify_v4(Ipv4Addr::new(a, b, c, d)) != Reach::Global {
            return Reach::Never("a tunnel to a private IPv4 address");
        }
    }
    Reach::Global
}

/// What a `cidr:` rule for `block` says of one of its addresses. A private address is reached only if the whole
/// rule is private: `cidr:0.0.0.0/0` is about the Internet, and no way into the host's own network.
pub fn classify_for_block(block: &Cidr, address: IpAddr) -> Reach {
    match classify(address) {
        Reach::Private(private) if private.covers(block) => Reach::Global,
        other => other,
    }
}

/// What no address of a block may be reached for, if it lies in such a block as a whole.
pub fn never_reached(block: &Cidr) -> Option<&'static str> {
    let mut all = NEVER_V4.iter().chain(&NEVER_V6);
    all.find(|(never, _)| never.covers(block)).map(|(_, purpose)| *purpose)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows 42 to 44: the addresses that a hostile answer points at.
    #[test]
    fn nothing_but_global_unicast_is_reached() {
        let private = [
            "10.0.0.1",
            "10.255.255.255",
            "100.64.0.1",
            "100.127.255.255",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.0.1",
            "192.168.255.255",
        ];
        for text in private {
            assert!(matches!(classify(text.parse().unwrap()), Reach::Private(_)), "{text}");
        }
        let never = [
            "0.0.0.0",
            "0.1.2.3",
            "127.0.0.1",
            "127.255.255.255",
            "169.254.169.254",
            "169.254.0.1",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "192.0.0.170",
            "192.0.2.1",
            "192.88.99.1",
            "192.31.196.1",
            "192.52.193.1",
            "192.175.48.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.255.255.255",
            "233.252.0.1",
            "240.0.0.1",
            "255.255.255.254",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::10.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "::ffff:0:127.0.0.1",
            "64:ff9b::a00:5",
            "64:ff9b::808:808",
            "64:ff9b:1::1",
            "100::1",
            "100:0:0:1::1",
            "2001::1",
            "2001:0:1::1",
            "2001:2::1",
            "2001:3::1",
            "2001:4:112::1",
            "2001:10::1",
            "2001:20::1",
            "2001:30::1",
            "2001:1ff::1",
            "2001:db8::1",
            "2002:7f00:1::1",
            "2002:a00:1::1",
            "2002:808:808::1",
            "2620:4f:8000::1",
            "3ffe::1",
            "3fff::1",
            "3fff:fff::1",
            "4000::1",
            "5f00::1",
            "8000::1",
            "fc00::1",
            "fd00::5",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "ff02::1",
            "ff0e::1",
            "2606:4700::5efe:a00:1",
            "2606:4700::5efe:7f00:1",
            "2606:4700::200:5efe:a9fe:a9fe",
        ];
        for text in never {
            assert!(matches!(classify(text.parse().unwrap()), Reach::Never(_)), "{text}");
        }
        let global = [
            "1.1.1.1",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "93.184.216.34",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.1",
            "168.63.129.15",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "191.255.255.255",
            "192.0.1.1",
            "192.0.3.1",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "198.51.99.255",
            "203.0.112.255",
            "203.0.114.0",
            "223.255.255.255",
            "2000::1",
            "2001:200::1",
            "2001:db7::1",
            "2001:db9::1",
            "2001:4860:4860::8888",
            "2003::1",
            "2606:4700:4700::1111",
            "2606:4700::5efe:808:808",
            "2a00::1",
            "3ffd::1",
            "3fff:1000::1",
        ];
        for text in global {
            assert_eq!(classify(text.parse().unwrap()), Reach::Global, "{text}");
        }
    }

    #[test]
    fn a_block_reaches_private_space_only_from_within() {
        let inside = v4(10, 1, 2, 0, 24);
        let everything = v4(0, 0, 0, 0, 0);
        let address = IpAddr::from([10, 1, 2, 3]);
        assert_eq!(classify_for_block(&inside, address), Reach::Global);
        assert!(matches!(classify_for_block(&everything, address), Reach::Private(_)));
        assert!(matches!(classify_for_block(&v4(8, 0, 0, 0, 6), address), Reach::Private(_)));
        for never in ["127.0.0.1", "169.254.169.254"] {
            let block = Cidr::new(never.parse().unwrap(), 32).unwrap();
            assert!(matches!(classify_for_block(&block, never.parse().unwrap()), Reach::Never(_)), "{never}");
            assert!(never_reached(&block).is_some());
        }
        assert!(never_reached(&everything).is_none());
    }
}
