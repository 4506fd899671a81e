//! Rows 1 to 18, 24 and 25: what the gate lets through, and what it has no code for.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::frames::{self, ACK, FIN, RST, SYN, Tcp};
use crate::gate::{Dropped, Packet, check};
use crate::plan::{GATEWAY, GUEST, MAX_FRAME, MTU};

const SOMEWHERE: Ipv4Addr = Ipv4Addr::new(198, 18, 1, 1);

fn syn() -> Vec<u8> {
    Tcp::syn((SOMEWHERE, 443)).frame()
}

#[test]
fn honest_frames_pass() {
    assert!(matches!(check(&frames::arp_request(GUEST, GATEWAY)), Ok(Packet::Arp { sender: GUEST })));
    assert!(matches!(check(&frames::arp_request(Ipv4Addr::UNSPECIFIED, GATEWAY)), Ok(Packet::Arp { .. })));
    assert!(matches!(check(&syn()), Ok(Packet::Tcp(segment)) if segment.opens && segment.port == 50_000));
    let dns = frames::udp((GATEWAY, 53), b"question");
    assert!(matches!(check(&dns), Ok(Packet::Dns { server: GATEWAY, port: 40_000, message: b"question" })));
    assert!(matches!(check(&frames::echo(GATEWAY, 56)), Ok(Packet::Echo(_))));
    let big = Tcp { flags: ACK, payload: vec![7; MTU - 40], ..Tcp::syn((SOMEWHERE, 443)) };
    assert!(matches!(check(&big.frame()), Ok(Packet::Tcp(segment)) if segment.packet.len() == MTU));
}

#[test]
fn row_1_odd_ethertypes_have_no_code() {
    let inner = syn()[14..].to_vec();
    for ethertype in 0..=u16::MAX {
        let frame = frames::ethernet(ethertype, &inner);
        let checked = check(&frame);
        match ethertype {
            0x0800 => assert!(checked.is_ok()),
            0x0806 => assert_eq!(checked, Err(Dropped::Arp)),
            _ => assert!(checked.is_err(), "{ethertype:#x}"),
        }
    }
}

#[test]
fn row_2_vlan_tags_are_never_stripped() {
    let frame = syn();
    for tags in [&[0x81, 0, 0, 5][..], &[0x88, 0xa8, 0, 5], &[0x91, 0, 0, 5], &[0x81, 0, 0, 5, 0x81, 0, 0, 6]] {
        let mut tagged = frame[..12].to_vec();
        tagged.extend_from_slice(tags);
        tagged.extend_from_slice(&frame[12..]);
        assert_eq!(check(&tagged), Err(Dropped::Vlan));
    }
}

#[test]
fn row_3_length_fields_are_no_types() {
    for length in [0, 46, 0x05ff] {
        assert_eq!(check(&frames::ethernet(length, &syn()[14..])), Err(Dropped::Llc));
    }
}

#[test]
fn row_4_lengths_must_agree() {
    let frame = syn();
    for length in 0..frame.len() {
        assert!(check(&frame[..length]).is_err(), "cut to {length}");
    }
    let mut long = syn();
    long.resize(MAX_FRAME + 1, 0);
    assert_eq!(check(&long), Err(Dropped::Length));

    // Padding is cut off: what follows the packet reaches nobody.
    let mut padded = syn();
    padded.extend_from_slice(b"hidden");
    assert!(matches!(check(&padded), Ok(Packet::Tcp(segment)) if segment.packet.len() == frame.len() - 14));

    for total in [0u16, 19, 20, 39, 41, 1000, 65_535] {
        let mut lies = syn();
        lies[16..18].copy_from_slice(&total.to_be_bytes());
        frames::fix_ip(&mut lies[14..]);
        assert!(check(&lies).is_err(), "total length {total}");
    }
    for length in [0u16, 7, 8, 15, 17, 1000, 65_535] {
        let mut lies = frames::udp((GATEWAY, 53), b"question");
        lies[38..40].copy_from_slice(&length.to_be_bytes());
        lies[40..42].fill(0);
        assert_eq!(check(&lies), Err(Dropped::Transport), "UDP length {length}");
    }
    for offset in [0u8, 4, 6, 15] {
        let mut segment = Tcp::syn((SOMEWHERE, 443)).segment();
        segment[12] = offset << 4;
        frames::fix_tcp(&mut segment, SOMEWHERE);
        assert_eq!(check(&frames::ip(SOMEWHERE, 6, &segment)), Err(Dropped::Transport), "data offset {offset}");
    }
}

#[test]
fn row_6_another_source_mac_is_dropped() {
    let mut frame = syn();
    frame[11] ^= 1;
    assert_eq!(check(&frame), Err(Dropped::SourceMac));
    for destination in [[0x33, 0x33, 0, 0, 0, 1], [0x01, 0, 0x5e, 0, 0, 0xfb], [2, 2, 2, 2, 2, 2]] {
        let mut frame = syn();
        frame[..6].copy_from_slice(&destination);
        assert_eq!(check(&frame), Err(Dropped::DestinationMac));
    }
    let mut broadcast = syn();
    broadcast[..6].fill(0xff);
    assert_eq!(check(&broadcast), Err(Dropped::DestinationMac));
}

#[test]
fn row_7_arp_is_answered_for_the_gateway_alone() {
    for target in [GUEST, SOMEWHERE, Ipv4Addr::new(198, 18, 0, 3), Ipv4Addr::UNSPECIFIED] {
        assert_eq!(check(&frames::arp_request(GUEST, target)), Err(Dropped::Arp), "{target}");
    }
    assert_eq!(check(&frames::arp_request(GATEWAY, GATEWAY)), Err(Dropped::Arp), "claims the gateway's address");
    let honest = frames::arp_request(GUEST, GATEWAY);
    for (at, value) in [(15, 2), (17, 1), (18, 5), (19, 5), (21, 2), (21, 3), (27, 9)] {
        let mut frame = honest.clone();
        frame[at] = value;
        assert_eq!(check(&frame), Err(Dropped::Arp), "byte {at}");
    }
}

#[test]
fn row_9_ipv6_is_dropped() {
    let mut body = vec![0x60, 0, 0, 0, 0, 8, 58, 255];
    body.resize(48, 0xfe);
    assert_eq!(check(&frames::ethernet(0x86dd, &body)), Err(Dropped::Ipv6));
    let mut in_ipv4 = syn();
    in_ipv4[14] = 0x65;
    frames::fix_ip(&mut in_ipv4[14..]);
    assert_eq!(check(&in_ipv4), Err(Dropped::Ipv4Header));
}

#[test]
fn row_10_fragments_are_dropped() {
    let packets =
        [syn(), frames::udp((GATEWAY, 53), b"question"), Tcp { flags: ACK, ..Tcp::syn((SOMEWHERE, 443)) }.frame()];
    for packet in packets {
        for fragment in [0x2000u16, 0x0001, 0x1fff, 0x2001, 0x6000, 0x4001] {
            let mut frame = packet.clone();
            frame[20..22].copy_from_slice(&fragment.to_be_bytes());
            frames::fix_ip(&mut frame[14..]);
            assert_eq!(check(&frame), Err(Dropped::Fragment), "{fragment:#x}");
        }
        let mut reserved = packet.clone();
        reserved[20] |= 0x80;
        frames::fix_ip(&mut reserved[14..]);
        assert_eq!(check(&reserved), Err(Dropped::Ipv4Header));
    }
}

#[test]
fn row_11_ip_options_are_dropped() {
    for option in [[131, 4, 4, 0], [7, 4, 4, 0], [148, 4, 0, 0], [1, 1, 1, 1]] {
        let frame = syn();
        let mut packet = frame[14..34].to_vec();
        packet.extend_from_slice(&option);
        packet.extend_from_slice(&frame[34..]);
        packet[0] = 0x46;
        packet[3] += 4;
        frames::fix_ip(&mut packet);
        assert_eq!(check(&frames::ethernet(0x0800, &packet)), Err(Dropped::Ipv4Header));
    }
    let mut wrong_sum = syn();
    wrong_sum[24] ^= 1;
    assert_eq!(check(&wrong_sum), Err(Dropped::Ipv4Header));
}

#[test]
fn row_13_special_destinations_are_dropped_silently() {
    for text in [
        "0.0.0.0",
        "0.1.2.3",
        "127.0.0.1",
        "127.255.0.1",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "198.18.0.2",
    ] {
        let to: Ipv4Addr = text.parse().unwrap();
        assert_eq!(check(&Tcp::syn((to, 443)).frame()), Err(Dropped::DestinationAddress), "{text}");
        assert_eq!(check(&frames::udp((to, 53), b"x")), Err(Dropped::DestinationAddress), "{text}");
    }
    for text in ["0.0.0.0", "127.0.0.1", "198.18.0.1", "198.18.0.3", "10.0.0.1", "224.0.0.1"] {
        let segment = Tcp::syn((SOMEWHERE, 443)).segment();
        let frame = frames::ip_from(text.parse().unwrap(), SOMEWHERE, 6, &segment);
        assert_eq!(check(&frame), Err(Dropped::SourceAddress), "from {text}");
    }
}

#[test]
fn row_14_other_protocols_are_dropped() {
    for protocol in 0..=255 {
        let payload = Tcp::syn((SOMEWHERE, 443)).segment();
        let frame = frames::ip(SOMEWHERE, protocol, &payload);
        let checked = check(&frame);
        assert_eq!(checked.is_ok(), protocol == 6, "protocol {protocol}");
        if ![1, 6, 17].contains(&protocol) {
            assert_eq!(checked, Err(Dropped::Protocol), "protocol {protocol}");
        }
    }
}

#[test]
fn row_15_icmp_is_a_short_echo_to_the_gateway() {
    assert!(check(&frames::echo(GATEWAY, 64)).is_ok());
    assert_eq!(check(&frames::echo(GATEWAY, 65)), Err(Dropped::Icmp));
    assert_eq!(check(&frames::echo(SOMEWHERE, 8)), Err(Dropped::Icmp));
    assert_eq!(check(&frames::echo(Ipv4Addr::new(8, 8, 8, 8), 1400)), Err(Dropped::Icmp));
    for kind in (0..=255).filter(|kind| *kind != 8) {
        let mut frame = frames::echo(GATEWAY, 8);
        frame[34] = kind;
        let sum = u16::from_be_bytes([frame[36], frame[37]]).wrapping_sub(u16::from(kind) << 8).wrapping_add(8 << 8);
        frame[36..38].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(check(&frame), Err(Dropped::Icmp), "type {kind}");
    }
}

#[test]
fn row_17_multicast_names_are_dropped() {
    for (group, port) in [([224, 0, 0, 251], 5353), ([239, 255, 255, 250], 1900), ([224, 0, 0, 252], 5355)] {
        let mut frame = frames::udp((group.into(), port), b"who");
        frame[..6].copy_from_slice(&[1, 0, 0x5e, group[1] & 0x7f, group[2], group[3]]);
        assert_eq!(check(&frame), Err(Dropped::DestinationMac));
        assert_eq!(check(&frames::udp((group.into(), port), b"who")), Err(Dropped::DestinationAddress));
    }
    let igmp = frames::ip([224, 0, 0, 22].into(), 2, &[0x22, 0, 0, 0, 0, 0, 0, 1]);
    assert!(check(&igmp).is_err());
    let mut broadcast = frames::udp((Ipv4Addr::BROADCAST, 137), b"who");
    broadcast[..6].fill(0xff);
    assert!(check(&broadcast).is_err());
}

#[test]
fn row_18_other_udp_is_never_delivered() {
    for port in (1..=u16::MAX).filter(|port| *port != 53) {
        let frame = frames::udp((SOMEWHERE, port), b"data");
        assert!(matches!(check(&frame), Ok(Packet::Udp { quote, .. }) if quote.len() == 28), "port {port}");
    }
    assert_eq!(check(&frames::udp((SOMEWHERE, 0), b"data")), Err(Dropped::Transport));
    let mut broken = frames::udp((SOMEWHERE, 53), b"data");
    broken[42] ^= 1;
    assert_eq!(check(&broken), Err(Dropped::Transport), "a wrong checksum");
}

#[test]
fn row_25_segments_that_no_stack_sends_are_dropped() {
    for flags in 0..=255u8 {
        let frame = Tcp { flags, ..Tcp::syn((SOMEWHERE, 443)) }.frame();
        let checked = check(&frame);
        let odd = flags & SYN != 0 && flags & (FIN | RST) != 0 || flags & (SYN | RST | ACK) == 0;
        assert_eq!(checked.is_err(), odd, "flags {flags:#x}");
    }
    for (port, to) in [(0, 443), (50_000, 0)] {
        assert_eq!(check(&Tcp { port, ..Tcp::syn((SOMEWHERE, to)) }.frame()), Err(Dropped::Transport));
    }
    let mut broken = syn();
    let last = broken.len() - 1;
    broken[last] ^= 1;
    assert_eq!(check(&broken), Err(Dropped::Transport), "a wrong checksum");
}

#[test]
fn every_class_of_drop_has_a_word_of_its_own() {
    let words: BTreeMap<&str, Dropped> = Dropped::ALL.iter().map(|drop| (drop.word(), *drop)).collect();
    assert_eq!(words.len(), Dropped::ALL.len());
}

proptest! {
    #[test]
    fn no_frame_panics(frame in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = check(&frame);
    }

    /// Whatever one changed byte does to an honest frame, what passes holds.
    #[test]
    fn a_changed_frame_is_dropped_or_still_whole(at in 0usize..70, value in any::<u8>(), which in 0usize..4) {
        let mut frame = match which {
            0 => syn(),
            1 => frames::udp((GATEWAY, 53), b"question"),
            2 => frames::echo(GATEWAY, 20),
            _ => frames::arp_request(GUEST, GATEWAY),
        };
        let at = at % frame.len();
        frame[at] = value;
        match check(&frame) {
            Ok(Packet::Tcp(segment)) => prop_assert!(segment.packet.len() >= 40),
            Ok(Packet::Udp { quote, .. }) => prop_assert_eq!(quote.len(), 28),
            _ => {}
        }
    }
}
