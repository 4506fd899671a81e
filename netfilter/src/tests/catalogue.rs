//! Rows 25, 30, 48 and 51: what the parts do together.

use std::net::Ipv4Addr;

use netfilter_control::{Reason, Record};
use smoltcp::socket::tcp::State;

use super::frames::{ACK, RST, SYN, Tcp};
use super::net::{Net, ORIGIN};

/// Row 25: options of all kinds open a connection or do not, and none is answered but those that every stack has. No
/// timestamps, so that a clock that jumps while a machine is saved matters to nobody.
#[test]
fn row_25_options_in_a_syn_are_not_taken_up() {
    let mut net = Net::new("raw.example.com:7000+raw");
    let address = net.lookup("raw.example.com").unwrap();
    net.deaf = true;
    let padded = |options: &[u8]| {
        let mut options = options.to_vec();
        options.resize(options.len().next_multiple_of(4), 1);
        options
    };
    let usual = [&[2, 4, 5, 0xb4][..], &[1, 3, 3, 7], &[4, 2], &[8, 10, 0, 0, 0, 1, 0, 0, 0, 0]].concat();
    let signed = [&[19, 18][..], &[7; 16]].concat();
    let multipath = [&[30, 12, 1, 1][..], &[7; 8]].concat();
    let fast_open = [&[34, 10][..], &[7; 8]].concat();
    let odd: [&[u8]; 10] = [
        &signed,
        &multipath,
        &fast_open,
        &[253, 6, 1, 2, 3, 4],
        &[2, 0],
        &[2, 1],
        &[2, 200],
        &[8, 3, 1],
        &[3, 3, 255],
        &[0, 2, 4, 0, 0],
    ];
    let mut opened = 0;
    for (port, options) in (50_000..).zip(odd.into_iter().chain([usual.as_slice()])) {
        net.send(&Tcp { port, options: padded(options), ..Tcp::syn((address, 7000)) }.frame());
        let answer = net.frames.iter().rev().find(|frame| frame[23] == 6 && frame[36..38] == u16::to_be_bytes(port));
        let Some(answer) = answer.filter(|frame| frame[47] == SYN | ACK) else { continue };
        opened += 1;
        let mut rest = &answer[54..34 + usize::from(answer[46] >> 4) * 4];
        while let [kind, tail @ ..] = rest {
            assert!(matches!(kind, 0..=4), "{options:?}: option {kind} in the answer");
            rest = if *kind < 2 { tail } else { &rest[usize::from(tail[0])..] };
        }
    }
    assert!(opened >= 5, "{opened} of 11: an option that is not understood is no obstacle");
    assert!(net.world.peers.values().all(|peer| peer.received.is_empty()));
}

/// Row 30: what begins in the clear and becomes TLS later is nothing that a `tls` rule could judge.
#[test]
fn row_30_tls_that_is_asked_for_later_needs_a_raw_rule() {
    let hellos: [&[u8]; 4] =
        [&[0, 0, 0, 8, 4, 0xd2, 0x16, 0x2f], b"EHLO a\r\nSTARTTLS\r\n", b"a STARTTLS\r\n", b"\x30\x1d\x02\x01"];
    for hello in hellos {
        let mut net = Net::new("api.example.com:5432+tls,raw.example.com:5432+raw");
        let flow = net.dial("api.example.com", 5432);
        net.write(flow, hello);
        assert_eq!(net.state(flow), State::Closed, "{hello:?}");
        assert!(net.received().is_empty());
        assert_eq!(net.refusal(), Some(Reason::NotTls));

        let flow = net.dial("raw.example.com", 5432);
        net.write(flow, hello);
        assert_eq!(net.received(), hello);
        let unchecked = |record: &Record| matches!(record, Record::FlowOpened { protocol, .. } if protocol == "raw");
        assert!(net.records().iter().any(unchecked), "the record says that nobody looked");
    }
}

/// Row 48: names at one address have nothing in common.
#[test]
fn row_48_names_that_share_an_address_share_no_rule() {
    let mut net = Net::new("api.example.com:7000+raw,other.example.com:7001+raw");
    let (api, other) = (net.lookup("api.example.com").unwrap(), net.lookup("other.example.com").unwrap());
    assert!(net.lookup("web.example.com").is_none(), "the third at that address, which no rule is about");
    assert_ne!(api, other);
    for (address, port) in [(api, 7001), (other, 7000)] {
        let flow = net.begin(address, port);
        assert_eq!(net.state(flow), State::Closed);
        assert_eq!(net.refusal(), Some(Reason::OtherPort));
    }
    assert!(net.world.dialled.is_empty());
    for (address, port) in [(api, 7000), (other, 7001)] {
        let flow = net.begin(address, port);
        assert_eq!(net.state(flow), State::Established);
        assert_eq!(net.world.dialled.pop(), Some((ORIGIN, port).into()));
    }
}

/// Row 51: a sweep of the pool finds what was given out, and nothing else.
#[test]
fn row_51_a_sweep_of_the_pool_finds_nothing() {
    let mut net = Net::new("raw.example.com:7000+raw,api.example.com:7000+raw");
    let given = [net.lookup("raw.example.com").unwrap(), net.lookup("api.example.com").unwrap()];
    net.deaf = true;
    let pool = Ipv4Addr::new(198, 18, 0, 4).to_bits()..Ipv4Addr::new(198, 20, 0, 0).to_bits();
    let near = given[0].to_bits() - 100..given[0].to_bits() + 100;
    let mut refused = 0;
    for bits in pool.step_by(97).chain(near) {
        let address = Ipv4Addr::from_bits(bits);
        if given.contains(&address) {
            continue;
        }
        let before = net.frames.len();
        net.send(&Tcp::syn((address, 7000)).frame());
        let answers = &net.frames[before..];
        assert!(matches!(answers, [answer] if answer[47] & RST != 0), "{address}: {answers:?}");
        refused += 1;
    }
    assert!(refused > 1500 && net.world.dialled.is_empty() && net.world.asked.is_empty());
    assert_eq!(net.engine.log().counters.flows_denied, refused);
}
