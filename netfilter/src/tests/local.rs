//! What the gateway answers itself.

use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::frames;
use crate::gate::{Packet, check};
use crate::local;
use crate::plan::{GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC};
use crate::wire::Checksum;

/// A DHCP message of one type, with further options.
fn dhcp(kind: u8, options: &[u8]) -> Vec<u8> {
    let mut message = vec![1, 1, 6, 0, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0x80, 0];
    message.resize(28, 0);
    message.extend_from_slice(&GUEST_MAC);
    message.resize(236, 0);
    message.extend_from_slice(&[99, 130, 83, 99, 53, 1, kind]);
    message.extend_from_slice(options);
    message.push(255);
    message
}

/// The payload of the reply, after its headers were checked.
fn payload(reply: &[u8]) -> &[u8] {
    assert_eq!(&reply[..6], &GUEST_MAC);
    assert_eq!(&reply[6..12], &GATEWAY_MAC);
    assert_eq!(Checksum::default().add(&reply[14..34]).finish(), 0);
    let datagram = &reply[34..];
    assert_eq!(Checksum::pseudo(GATEWAY, GUEST, 17, datagram.len()).add(datagram).finish(), 0);
    assert_eq!(&datagram[..4], &[0, 67, 0, 68]);
    &datagram[8..]
}

fn option(reply: &[u8], code: u8) -> Option<&[u8]> {
    let mut rest = &reply[240..];
    while let [found, length, tail @ ..] = rest {
        if *found == 255 {
            return None;
        }
        let (value, tail) = tail.split_at(usize::from(*length));
        if *found == code {
            return Some(value);
        }
        rest = tail;
    }
    None
}

#[test]
fn the_one_lease_is_given() {
    let offer = local::dhcp_reply(&dhcp(1, &[])).unwrap();
    let offer = payload(&offer);
    assert_eq!(&offer[..12], &[2, 1, 6, 0, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0x80, 0]);
    assert_eq!(&offer[16..20], &GUEST.octets());
    assert_eq!(option(offer, 53), Some(&[2][..]));
    assert_eq!(option(offer, 1), Some(&[255, 255, 255, 252][..]));
    assert_eq!(option(offer, 3), Some(&GATEWAY.octets()[..]));
    assert_eq!(option(offer, 6), Some(&GATEWAY.octets()[..]));
    assert_eq!(option(offer, 26), Some(&65_520u16.to_be_bytes()[..]));
    for code in [12, 15, 119, 121, 42] {
        assert_eq!(option(offer, code), None, "no search list, no routes, no name of the host's");
    }
    let mut request = vec![50, 4];
    request.extend_from_slice(&GUEST.octets());
    let ack = local::dhcp_reply(&dhcp(3, &request)).unwrap();
    assert_eq!(option(payload(&ack), 53), Some(&[5][..]));
    let nak = local::dhcp_reply(&dhcp(3, &[50, 4, 10, 0, 0, 1])).unwrap();
    assert_eq!(option(payload(&nak), 53), Some(&[6][..]));
    assert_eq!(&payload(&nak)[16..20], &[0; 4]);
}

#[test]
fn row_8_malformed_dhcp_gets_nothing() {
    let good = dhcp(1, &[]);
    for length in 0..good.len() - 1 {
        let reply = local::dhcp_reply(&good[..length]);
        assert!(reply.is_none() || length >= 243, "cut to {length}");
    }
    for options in [&[61, 200, 1][..], &[53, 1, 3], &[50, 3, 1, 2, 3], &[54, 5, 1, 2, 3, 4, 5], &[54, 4, 10, 0, 0, 1]] {
        assert_eq!(local::dhcp_reply(&dhcp(3, options)), None, "{options:?}");
    }
    for kind in [0, 2, 4, 5, 6, 7, 9, 255] {
        assert_eq!(local::dhcp_reply(&dhcp(kind, &[])), None, "type {kind}");
    }
    let mut other = dhcp(1, &[]);
    other[30] ^= 1;
    assert_eq!(local::dhcp_reply(&other), None, "another client's address");
    // Option overload: the name and file fields are never read as options.
    let mut overload = dhcp(1, &[52, 1, 3]);
    overload[44] = 53;
    assert!(local::dhcp_reply(&overload).is_some());
    let server = frames::udp_from((GUEST, 67), (Ipv4Addr::BROADCAST, 68), &dhcp(2, &[]));
    assert!(check(&server).is_err(), "a rogue server's offer");
    let mut discover = frames::udp_from((Ipv4Addr::UNSPECIFIED, 68), (Ipv4Addr::BROADCAST, 67), &dhcp(1, &[]));
    discover[..6].fill(0xff);
    assert!(matches!(check(&discover), Ok(Packet::Dhcp(_))));
    let long = frames::udp_from((Ipv4Addr::UNSPECIFIED, 68), (Ipv4Addr::BROADCAST, 67), &[0; 577]);
    assert!(check(&long).is_err());
}

#[test]
fn replies_are_well_formed() {
    let arp = local::arp_reply(GUEST);
    assert_eq!((arp.len(), &arp[..6], &arp[12..14]), (42, &GUEST_MAC[..], &[8, 6][..]));
    assert_eq!(&arp[20..32], &[&[0, 2][..], &GATEWAY_MAC, &GATEWAY.octets()].concat());

    let echo = frames::echo(GATEWAY, 10);
    let Ok(Packet::Echo(rest)) = check(&echo) else { panic!() };
    let reply = local::echo_reply(rest);
    assert_eq!(reply[34], 0);
    assert_eq!(&reply[38..], &echo[38..]);
    assert_eq!(Checksum::default().add(&reply[34..]).finish(), 0);

    let datagram = frames::udp((Ipv4Addr::new(8, 8, 8, 8), 123), b"ntp");
    let Ok(Packet::Udp { destination, quote }) = check(&datagram) else { panic!() };
    let reply = local::port_unreachable(*destination.ip(), quote);
    assert_eq!(&reply[26..30], &[8, 8, 8, 8]);
    assert_eq!(&reply[34..36], &[3, 3]);
    assert_eq!(&reply[42..], &datagram[14..42]);
    assert_eq!(Checksum::default().add(&reply[34..]).finish(), 0);
}

proptest! {
    #[test]
    fn no_dhcp_message_panics(tail in prop::collection::vec(any::<u8>(), 0..300), kind in any::<u8>()) {
        let _ = local::dhcp_reply(&dhcp(kind, &tail));
        let _ = local::dhcp_reply(&tail);
    }
}
