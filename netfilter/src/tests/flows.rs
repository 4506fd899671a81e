//! Rows 19 to 35, 42 to 51, 60, 96 to 101 and 107: flows, from SYN to end.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use netfilter_control::{Cause, Reason, Record};
use smoltcp::socket::tcp::State;

use super::frames::{self, ACK, RST, SYN, Tcp};
use super::net::{Answer, Net, ORIGIN};
use crate::host::Route;
use crate::limits;
use crate::plan::GATEWAY;
use crate::stack::BUFFER;

const RAW: &str = "raw.example.com:1-65535+raw";

fn cause(net: &mut Net) -> Option<Cause> {
    net.records().iter().rev().find_map(|record| match record {
        Record::FlowClosed { cause, .. } => Some(*cause),
        _ => None,
    })
}

#[test]
fn a_name_is_resolved_dialled_and_joined() {
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    assert_eq!(net.state(flow), State::Established);
    assert_eq!(net.world.dialled, ["93.184.216.34:7000".parse().unwrap()]);
    net.write(flow, b"ping");
    assert_eq!(net.received(), b"ping");
    net.answer(b"pong");
    assert_eq!(net.read(flow), b"pong");
    let records = net.records();
    assert!(
        records
            .iter()
            .any(|record| matches!(record, Record::FlowOpened { subject, port: 7000, rule, protocol, upstream, .. }
        if subject == "raw.example.com" && rule == RAW && protocol == "raw" && upstream.ip() == IpAddr::V4(ORIGIN)))
    );
}

#[test]
fn nothing_is_resolved_before_it_is_dialled() {
    let mut net = Net::new(RAW);
    let address = net.lookup("raw.example.com").unwrap();
    assert!(net.world.asked.is_empty());
    net.begin(address, 7000);
    assert_eq!(net.world.asked, ["raw.example.com", "raw.example.com"], "A and AAAA");
    assert!(net.lookup("evil.test").is_none());
    assert_eq!(net.world.asked.len(), 2);
}

/// Row 49 and 51: addresses that mean no name, and the gateway.
#[test]
fn rows_49_51_101_unmapped_addresses_are_reset() {
    let mut net = Net::new(RAW);
    net.lookup("raw.example.com").unwrap();
    for address in [
        Ipv4Addr::new(203, 0, 113, 66),
        ORIGIN,
        Ipv4Addr::new(198, 18, 1, 2),
        Ipv4Addr::new(198, 19, 200, 1),
        Ipv4Addr::new(169, 254, 169, 254),
        Ipv4Addr::new(10, 0, 0, 5),
        GATEWAY,
    ] {
        for port in [443, 80, 22, 7000] {
            let flow = net.begin(address, port);
            assert_eq!(net.state(flow), State::Closed, "{address}:{port}");
            assert_eq!(net.refusal(), Some(Reason::UnknownAddress));
            net.pass(Duration::from_millis(100));
        }
    }
    assert!(net.world.dialled.is_empty() && net.world.asked.is_empty());
}

#[test]
fn row_27_only_the_ports_of_a_rule_lead_anywhere() {
    let mut net = Net::new("raw.example.com:7000-7001+raw");
    let address = net.lookup("raw.example.com").unwrap();
    for port in [1, 22, 25, 443, 6999, 7002, 65_535] {
        let flow = net.begin(address, port);
        assert_eq!(net.state(flow), State::Closed, "{port}");
        assert_eq!(net.refusal(), Some(Reason::OtherPort));
        let (flags, _) = net.last_segment(40_000).unwrap_or((RST, 0));
        assert_ne!(flags & RST, 0);
    }
    let flow = net.begin(address, 7001);
    assert_eq!(net.state(flow), State::Established);
}

/// The guest learns that nobody is there before it believes to be connected.
#[test]
fn an_unreachable_destination_is_a_refused_connection() {
    let mut net = Net::new(RAW);
    net.world.answers.insert("93.184.216.34:7000".parse().unwrap(), Answer::Refuse);
    let flow = net.dial("raw.example.com", 7000);
    assert_eq!(net.state(flow), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::Unreachable));

    net.world.answers.insert("93.184.216.34:7001".parse().unwrap(), Answer::Silence);
    let flow = net.dial("raw.example.com", 7001);
    assert_eq!(net.state(flow), State::SynSent, "no SYN-ACK before the destination is reached");
    net.pass(Duration::from_millis(9_900));
    assert_eq!(net.state(flow), State::SynSent);
    net.pass(Duration::from_secs(5));
    assert_eq!(net.state(flow), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::Unreachable));

    net.world.zone.clear();
    net.pass(Duration::from_secs(120));
    let flow = net.dial("raw.example.com", 7002);
    assert_eq!(net.state(flow), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::Unresolvable));
}

#[test]
fn a_second_address_is_tried_when_the_first_is_silent_or_refuses() {
    for answer in [Answer::Silence, Answer::Refuse] {
        let mut net = Net::new(RAW);
        let second: IpAddr = "93.184.216.35".parse().unwrap();
        net.world.zone.insert("raw.example.com".into(), vec![ORIGIN.into(), second]);
        net.world.answers.insert("93.184.216.34:7000".parse().unwrap(), answer);
        let flow = net.dial("raw.example.com", 7000);
        net.pass(Duration::from_millis(400));
        assert_eq!(net.state(flow), State::Established);
        assert_eq!(net.world.dialled.len(), 2);
        net.write(flow, b"x");
        assert_eq!(net.received(), b"x");
    }
}

#[test]
fn silent_resolvers_are_given_up() {
    let mut net = Net::new(RAW);
    net.engine.set_resolvers(vec!["9.9.9.9:53".parse().unwrap(), "9.9.9.10:53".parse().unwrap()]);
    net.world.deaf_resolvers = true;
    let flow = net.dial("raw.example.com", 7000);
    net.pass(Duration::from_secs(11));
    assert_eq!(net.state(flow), State::SynSent);
    net.pass(Duration::from_secs(2));
    assert_eq!(net.state(flow), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::Unresolvable));
    let open = net.world.peers.values().filter(|peer| peer.closed.is_none()).count();
    assert_eq!(open, 0, "no socket is left");

    let mut net = Net::new(RAW);
    net.engine.set_resolvers(Vec::new());
    let flow = net.dial("raw.example.com", 7000);
    assert_eq!(net.state(flow), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::Unresolvable));
}

/// Rows 42 and 43: what a hostile answer points at is never dialled.
#[test]
fn rows_42_43_rebinding_is_refused_before_the_dial() {
    for address in [
        "127.0.0.1",
        "169.254.169.254",
        "10.0.0.5",
        "192.168.1.1",
        "100.64.0.1",
        "172.16.0.1",
        "0.0.0.0",
        "198.18.1.1",
        "168.63.129.16",
        "::1",
        "fd00::5",
        "fe80::1",
        "::ffff:127.0.0.1",
        "64:ff9b::a00:5",
        "2002:a00:1::",
    ] {
        let mut net = Net::new(RAW);
        net.world.zone.insert("raw.example.com".into(), vec![address.parse().unwrap()]);
        let flow = net.dial("raw.example.com", 7000);
        assert_eq!(net.state(flow), State::Closed, "{address}");
        assert_eq!(net.refusal(), Some(Reason::ForbiddenAddress), "{address}");
        assert!(net.world.dialled.is_empty(), "{address}");
    }
    let mut net = Net::new(RAW);
    net.world.zone.insert("raw.example.com".into(), vec!["10.0.0.5".parse().unwrap(), ORIGIN.into()]);
    let flow = net.dial("raw.example.com", 7000);
    assert_eq!(net.state(flow), State::Established);
    assert_eq!(net.world.dialled, ["93.184.216.34:7000".parse().unwrap()]);
}

#[test]
fn row_44_the_hosts_own_addresses_are_not_dialled() {
    for (route, reason) in
        [(Route::Own, Reason::HostAddress), (Route::Router, Reason::HostAddress), (Route::Nowhere, Reason::Unreachable)]
    {
        let mut net = Net::new(&format!("{RAW},cidr:93.184.216.0/24:7000+raw"));
        net.world.routes.insert(ORIGIN.into(), route);
        let by_name = net.dial("raw.example.com", 7000);
        assert_eq!(net.state(by_name), State::Closed);
        assert_eq!(net.refusal(), Some(reason));
        let by_address = net.begin(ORIGIN, 7000);
        assert_eq!(net.state(by_address), State::Closed);
        assert_eq!(net.refusal(), Some(reason));
        assert!(net.world.dialled.is_empty());
    }
}

/// Row 46: what was vetted is what is dialled, and there is no second question in between.
#[test]
fn row_46_one_resolution_serves_check_and_use() {
    let mut net = Net::new(RAW);
    for n in 0..50 {
        let good = n % 2 == 0;
        let address: IpAddr = if good { ORIGIN.into() } else { "10.0.0.5".parse().unwrap() };
        net.world.zone.insert("raw.example.com".into(), vec![address]);
        let asked = net.world.asked.len();
        let flow = net.dial("raw.example.com", 7000);
        assert_eq!(net.world.asked.len(), asked + 2, "TTL 0: asked once for each connection");
        assert_eq!(net.state(flow) == State::Established, good);
        net.pass(Duration::from_millis(500));
    }
    assert!(net.world.dialled.iter().all(|address| address.ip() == IpAddr::V4(ORIGIN)));
}

#[test]
fn blocks_are_reached_by_rules_about_them_alone() {
    let mut net = Net::new("cidr:10.1.2.0/24:5432+raw,cidr:93.184.0.0/16:7000+raw,!cidr:93.184.216.99/32");
    let flow = net.begin(Ipv4Addr::new(10, 1, 2, 3), 5432);
    assert_eq!(net.state(flow), State::Established);
    let flow = net.begin(ORIGIN, 7000);
    assert_eq!(net.state(flow), State::Established);
    for (address, port, reason) in [
        ([10, 1, 3, 3], 5432, Reason::UnknownAddress),
        ([10, 1, 2, 3], 22, Reason::OtherPort),
        ([93, 184, 216, 99], 7000, Reason::Denied),
    ] {
        let flow = net.begin(address.into(), port);
        assert_eq!(net.state(flow), State::Closed);
        assert_eq!(net.refusal(), Some(reason));
    }
    let mut open = netfilter_policy::Compiler::default().accept_open_egress();
    open.rules("test", "cidr:0.0.0.0/0:1-65535+raw").unwrap();
    let mut net = Net::with_policy(open.finish().unwrap());
    for address in ["10.0.0.5", "192.168.0.1", "169.254.169.254", "100.100.100.200", "198.18.1.77", "198.18.0.1"] {
        let flow = net.begin(address.parse().unwrap(), 80);
        assert_eq!(net.state(flow), State::Closed, "{address}");
    }
    assert!(net.world.dialled.is_empty());
}

#[test]
fn a_name_that_resolves_into_a_denied_block_is_refused() {
    let mut net = Net::new(&format!("{RAW},!cidr:93.184.216.0/24"));
    let flow = net.dial("raw.example.com", 7000);
    assert_eq!(net.state(flow), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::Denied));
    assert!(net.world.dialled.is_empty());
}

#[test]
fn row_19_a_flood_of_syns_costs_nothing_that_grows() {
    let mut net = Net::new(RAW);
    let address = net.lookup("raw.example.com").unwrap();
    net.world.answers.insert("93.184.216.34:7000".parse().unwrap(), Answer::Silence);
    for n in 0..8_000u32 {
        let syn = Tcp { port: u16::try_from(1 + n % 60_000).unwrap(), seq: n, ..Tcp::syn((address, 7000)) };
        net.engine.frame(&syn.frame(), &mut net.world, net.now);
        if n % 64 == 0 {
            net.settle();
        }
    }
    let pending = net.world.peers.values().filter(|peer| peer.closed.is_none()).count();
    assert_eq!(pending, limits::PENDING);
    assert_eq!(net.refusal(), Some(Reason::Limit));
    net.pass(Duration::from_secs(11));
    let flow = net.dial("raw.example.com", 7001);
    assert_eq!(net.state(flow), State::Established, "an honest flow still works");
}

#[test]
fn row_20_the_flow_table_is_limited_and_evicts_nobody() {
    let mut net = Net::new(RAW);
    let mut flows = Vec::new();
    for _ in 0..limits::FLOWS {
        flows.push(net.dial("raw.example.com", 7000));
        net.pass(Duration::from_millis(60));
    }
    assert!(flows.iter().all(|flow| net.socket(*flow).state() == State::Established));
    let more = net.dial("raw.example.com", 7000);
    assert_eq!(net.state(more), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::Limit));
    assert!(flows.iter().all(|flow| net.socket(*flow).state() == State::Established));
    let first = flows[0];
    net.socket(first).abort();
    net.settle();
    net.pass(Duration::from_millis(100));
    let again = net.dial("raw.example.com", 7000);
    assert_eq!(net.state(again), State::Established);
}

#[test]
fn row_35_a_scanner_is_slowed_down() {
    let mut net = Net::new(RAW);
    for port in 1..=u16::MAX {
        net.world.answers.insert((ORIGIN, port).into(), Answer::Refuse);
    }
    let address = net.lookup("raw.example.com").unwrap();
    for n in 0..2000u32 {
        let port = u16::try_from(1000 + n).unwrap();
        let syn = Tcp { port: 30_000, seq: n, ..Tcp::syn((address, port)) };
        net.send(&syn.frame());
        net.pass(Duration::from_millis(5));
    }
    assert!(net.world.dialled.len() <= 130, "{} ports in 10 s", net.world.dialled.len());
}

#[test]
fn row_22_a_guest_that_does_not_read_stops_the_other_side_and_is_ended() {
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    net.answer(&vec![7; 8 << 20]);
    // The guest's stack takes a MiB, ours a buffer; what is more stays at the other side.
    let left = net.peer().1.unread.len();
    assert!(left >= (7 << 20) - BUFFER - 65_536, "{left} bytes were not read");
    net.pass(Duration::from_secs(59));
    assert_eq!(net.state(flow), State::Established);
    net.pass(Duration::from_secs(3));
    assert_eq!(cause(&mut net), Some(Cause::Stalled));
    assert_eq!(net.peer().1.closed, Some(true));
}

/// What it takes is made up for at once, so that as much waits for it afterwards as before.
#[test]
fn row_22_a_guest_that_reads_slowly_is_not_ended() {
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    net.answer(&vec![7; 64 << 20]);
    for second in 0..180 {
        let read = net.socket(flow).recv(|bytes| (bytes.len().min(200_000), bytes.len())).unwrap();
        assert!(read > 0, "after {second} s");
        net.settle();
        net.pass(Duration::from_secs(1));
        assert_eq!(cause(&mut net), None, "after {second} s");
    }
    assert_eq!(net.state(flow), State::Established);
}

/// Nor is one that has not come to the end yet when the other side has.
#[test]
fn row_22_a_guest_that_reads_slowly_gets_all_of_what_has_ended() {
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    let all = (1 << 20) + BUFFER / 2;
    net.answer(&vec![7; all]);
    net.hang_up();
    let mut read = 0;
    // Until what is left is with the guest.
    for second in 0..200 {
        read += net.socket(flow).recv(|bytes| (bytes.len().min(1500), bytes.len().min(1500))).unwrap();
        net.settle();
        net.pass(Duration::from_secs(1));
        assert_eq!(cause(&mut net), None, "after {second} s");
    }
    assert_eq!(read + net.read(flow).len(), all);
    assert_eq!(net.state(flow), State::CloseWait);
}

#[test]
fn row_107_a_slow_other_side_holds_the_guest_back() {
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    net.peer().1.room = Some(1000);
    let sent = net.socket(flow).send_slice(&vec![7; 1 << 20]).unwrap();
    net.settle();
    assert_eq!(net.received().len(), 1000);
    assert!(net.socket(flow).send_queue() >= sent - BUFFER - 1000, "the guest keeps what we have no room for");
    net.peer().1.room = None;
    net.poke();
    assert_eq!(net.received().len(), sent);
}

#[test]
fn row_22_an_other_side_that_does_not_read_is_ended() {
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    net.peer().1.room = Some(0);
    net.write(flow, b"never taken");
    net.pass(Duration::from_secs(59));
    assert_eq!(cause(&mut net), None);
    net.pass(Duration::from_secs(2));
    assert_eq!(cause(&mut net), Some(Cause::Stalled));
    assert_eq!(net.state(flow), State::Closed);
}

#[test]
fn idle_flows_end_and_busy_ones_stay() {
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    for _ in 0..5 {
        net.pass(Duration::from_secs(3000));
        net.write(flow, b"still here");
    }
    assert_eq!(net.state(flow), State::Established);
    net.pass(Duration::from_secs(3601));
    assert_eq!(cause(&mut net), Some(Cause::Idle));
}

/// Overlapping and out-of-order segments, with bytes that differ: what passes is one stream, the same that was judged.
#[test]
fn row_23_there_is_one_reassembler() {
    let mut net = Net::new(RAW);
    let address = net.lookup("raw.example.com").unwrap();
    net.deaf = true;
    let syn = Tcp::syn((address, 7000));
    net.send(&syn.frame());
    let (flags, sequence) = net.last_segment(50_000).unwrap();
    assert_eq!(flags, SYN | ACK);
    let data = |offset: u32, payload: &[u8]| {
        Tcp {
            seq: 1001 + offset,
            ack: sequence.wrapping_add(1),
            flags: ACK,
            payload: payload.to_vec(),
            ..Tcp::syn((address, 7000))
        }
        .frame()
    };
    net.send(&data(0, b""));
    net.send(&data(4, b"4567"));
    net.send(&data(6, b"XXYY"));
    net.send(&data(2, b"ZZ"));
    assert!(net.received().is_empty());
    net.send(&data(0, b"01"));
    let first = net.received();
    net.send(&data(0, b"AAAAAAAAAA"));
    assert_eq!(net.received()[..first.len()], first[..], "what was passed on does not change");
    assert_eq!(&first[..4], b"01ZZ");
    assert_eq!(first.len(), 10);
}

/// Row 24: urgent data stays in its place. Row 25: data in a SYN is no data.
#[test]
fn rows_24_25_urgent_data_and_data_in_a_syn() {
    let mut net = Net::new(RAW);
    let address = net.lookup("raw.example.com").unwrap();
    net.deaf = true;
    let options = vec![2, 4, 5, 0xb4, 34, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1];
    net.send(&Tcp { payload: b"early".to_vec(), options, ..Tcp::syn((address, 7000)) }.frame());
    let (flags, sequence) = net.last_segment(50_000).unwrap();
    assert_eq!(flags, SYN | ACK);
    let ack = sequence.wrapping_add(1);
    let mut segment =
        Tcp { seq: 1001, ack, flags: ACK | 0x20, payload: b"abc".to_vec(), ..Tcp::syn((address, 7000)) }.segment();
    segment[18..20].copy_from_slice(&[0, 2]);
    frames::fix_tcp(&mut segment, address);
    net.send(&frames::ip(address, 6, &segment));
    assert_eq!(net.received(), b"abc");
}

/// Row 31: half-closes, in every order.
#[test]
fn row_31_directions_end_one_by_one() {
    // The guest first: the answer comes after the question's end.
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    net.write(flow, b"question");
    net.end(flow);
    assert!(net.peer().1.finished && net.peer().1.closed.is_none());
    net.pass(Duration::from_secs(100));
    net.answer(b"late answer");
    assert_eq!(net.read(flow), b"late answer");
    net.hang_up();
    net.pass(Duration::from_millis(50));
    assert_eq!(cause(&mut net), Some(Cause::Finished));
    assert_eq!(net.peer().1.closed, Some(false));

    // The other side first: the guest goes on to send.
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    net.answer(b"banner");
    net.hang_up();
    assert_eq!(net.read(flow), b"banner");
    assert_eq!(net.state(flow), State::CloseWait);
    net.write(flow, b"goes on");
    assert_eq!(net.received(), b"goes on");
    net.end(flow);
    assert_eq!(cause(&mut net), Some(Cause::Finished));

    // Both at once, with data on the way in both directions.
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    net.peer().1.unread.extend(b"answer");
    net.peer().1.ended = true;
    net.socket(flow).send_slice(b"question").unwrap();
    net.socket(flow).close();
    net.poke();
    assert_eq!((net.received(), net.read(flow)), (b"question".to_vec(), b"answer".to_vec()));
    net.pass(Duration::from_millis(50));
    assert_eq!(cause(&mut net), Some(Cause::Finished));

    // One half, and then nothing.
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    net.end(flow);
    net.pass(Duration::from_secs(121));
    assert_eq!(cause(&mut net), Some(Cause::HalfClosed));
}

#[test]
fn resets_reach_the_other_side() {
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    net.socket(flow).abort();
    net.settle();
    assert_eq!(net.peer().1.closed, Some(true));
    assert_eq!(cause(&mut net), Some(Cause::GuestReset));

    let flow = net.dial("raw.example.com", 7000);
    net.peer().1.reset = true;
    net.poke();
    assert_eq!(net.state(flow), State::Closed);
    assert_eq!(cause(&mut net), Some(Cause::UpstreamReset));
}

/// A server may answer and close without reading all: the answer is worth having.
#[test]
fn an_answer_is_read_after_the_other_side_stopped_reading() {
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    net.peer().1.stopped = true;
    net.peer().1.unread.extend(b"no, thank you");
    net.peer().1.ended = true;
    net.write(flow, &[7; 100_000]);
    assert_eq!(net.read(flow), b"no, thank you");
    assert_eq!(net.state(flow), State::CloseWait);
    net.end(flow);
    assert_eq!(cause(&mut net), Some(Cause::Finished));
}

#[test]
fn a_large_transfer_arrives_as_it_was_sent() {
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    let sent: Vec<u8> = (0..1_500_000u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    net.write(flow, &sent);
    assert!(net.received() == sent);
    net.answer(&sent);
    let mut got = net.read(flow);
    for _ in 0..100 {
        net.poke();
        got.extend(net.read(flow));
    }
    assert!(got == sent);
}

#[test]
fn rows_32_96_100_a_new_policy_ends_what_it_does_not_allow() {
    let mut net = Net::new(&format!("{RAW},git.example.com:22"));
    let kept = net.dial("git.example.com", 22);
    let cut = net.dial("raw.example.com", 7000);
    net.world.answers.insert("93.184.216.34:7001".parse().unwrap(), Answer::Silence);
    let pending = net.dial("raw.example.com", 7001);
    net.records();
    net.set_policy("git.example.com:{22|2222}+ssh");
    assert_eq!(net.state(kept), State::Established, "another rule that asks for the same");
    assert_eq!(net.state(cut), State::Closed);
    assert_eq!(net.state(pending), State::Closed);
    let records = net.records();
    assert!(records.contains(&Record::PolicySet { generation: 2, revoked: 2 }));
    assert!(records.iter().any(|record| record.reason() == Some(Reason::Revoked)));
    // The name keeps its address, and the policy of now decides about it.
    let again = net.begin(Ipv4Addr::new(198, 18, 1, 2), 7000);
    assert_eq!(net.state(again), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::NoRule));
    net.set_policy("git.example.com:22+raw");
    assert_eq!(net.state(kept), State::Closed, "the same port, under other terms");
}

#[test]
fn a_denied_block_ends_flows_into_it() {
    let mut net = Net::new(RAW);
    let flow = net.dial("raw.example.com", 7000);
    net.set_policy(&format!("{RAW},!cidr:93.184.216.0/24"));
    assert_eq!(net.state(flow), State::Closed);
}

/// Row 97: a saved machine's connections are reset at once, and its names mean what they meant.
#[test]
fn row_97_a_restored_guest_is_told_at_once() {
    let mut net = Net::new(RAW);
    net.lookup("raw.example.com").unwrap();
    let flow = net.dial("raw.example.com", 7000);
    net.write(flow, b"question");
    net.answer(b"some answer");
    let saved = net.engine.save();
    assert_eq!(saved.names.len(), 1);
    let port = net.local_port(flow);
    assert_eq!((saved.flows.len(), saved.flows[0].port), (1, port));

    // The guest goes on with another network filter.
    let text = serde_json::to_string(&saved).unwrap();
    net.engine = crate::engine::Engine::new(2);
    net.engine.restore(serde_json::from_str(&text).unwrap()).unwrap();
    net.engine.set_policy(super::net::policy(RAW), 1, &mut net.world, net.now);
    net.engine.set_resolvers(vec!["9.9.9.9:53".parse().unwrap()]);
    net.settle();
    assert_eq!(net.state(flow), State::Closed, "a blocked reader wakes");
    assert!(net.records().contains(&Record::FlowsReset { count: 1 }));
    let address = net.lookup("raw.example.com").unwrap();
    assert_eq!(address, Ipv4Addr::new(198, 18, 1, 1));
    let flow = net.begin(address, 7000);
    assert_eq!(net.state(flow), State::Established);
    assert!(net.engine.restore(saved).is_err(), "not into a network that is in use");
    // A stray segment of an old connection.
    net.send(&Tcp { port: 1234, flags: ACK, seq: 5, ack: 77, ..Tcp::syn((address, 7000)) }.frame());
    assert_eq!(net.last_segment(1234), Some((RST, 77)));
}

#[test]
fn row_40_dns_over_tcp_is_answered_whatever_server_is_asked() {
    let mut net = Net::new("api.example.com");
    for server in [GATEWAY, Ipv4Addr::new(8, 8, 8, 8)] {
        let talk = net.begin(server, 53);
        assert_eq!(net.state(talk), State::Established);
        let question = frames::dns_question("api.example.com", 1, true);
        let mut message = u16::try_from(question.len()).unwrap().to_be_bytes().to_vec();
        message.extend_from_slice(&question);
        for byte in &message {
            net.write(talk, &[*byte]);
        }
        net.write(talk, &[message.clone(), message.clone()].concat());
        let reply = net.read(talk);
        let length = usize::from(u16::from_be_bytes([reply[0], reply[1]])) + 2;
        assert_eq!(reply.len(), 3 * length, "three questions, three answers");
        assert_eq!(reply[5] & 15, 0);
        net.end(talk);
        assert_eq!(net.state(talk), State::TimeWait);
    }
    // UDP: the answer comes from the address that was asked.
    net.send(&frames::udp((Ipv4Addr::new(8, 8, 8, 8), 53), &frames::dns_question("api.example.com", 1, false)));
    assert_eq!(net.frames.last().unwrap()[26..30], [8, 8, 8, 8]);
    // DNS over TLS and QUIC have no code.
    let dot = net.begin(Ipv4Addr::new(8, 8, 8, 8), 853);
    assert_eq!(net.state(dot), State::Closed);
    assert!(net.world.dialled.is_empty() && net.world.asked.is_empty());
    // Garbage, silence and floods.
    let talk = net.begin(GATEWAY, 53);
    net.write(talk, &[0xff, 0xff, 1, 2, 3]);
    assert_eq!(net.state(talk), State::Closed);
    let silent = net.begin(GATEWAY, 53);
    net.pass(Duration::from_secs(31));
    assert_eq!(net.state(silent), State::Closed);
    let many: Vec<_> = (0..20).map(|_| net.begin(GATEWAY, 53)).collect();
    let open = many.iter().filter(|talk| net.socket(**talk).state() == State::Established).count();
    assert_eq!(open, 16);
}

#[test]
fn rows_15_18_answers_of_our_own_are_few() {
    let mut net = Net::new("");
    for _ in 0..100 {
        net.send(&frames::echo(GATEWAY, 8));
        net.send(&frames::udp((Ipv4Addr::new(8, 8, 8, 8), 123), b"ntp"));
        net.send(&frames::arp_request(crate::plan::GUEST, GATEWAY));
    }
    assert_eq!(net.frames.len(), 60);
    assert!(net.world.peers.is_empty());
}

#[test]
fn row_106_a_flood_of_frames_is_dropped_and_counted() {
    let mut net = Net::new("");
    for _ in 0..60_000 {
        net.engine.frame(&[0; 60], &mut net.world, net.now);
    }
    net.pass(Duration::from_secs(1));
    assert_eq!(net.engine.log().counters.frames_dropped, 60_000);
    let rate: u64 = net
        .records()
        .iter()
        .map(|record| match record {
            Record::FramesDropped { class, count } if class == "rate" => *count,
            _ => 0,
        })
        .sum();
    assert_eq!(rate, 10_000);
}

#[test]
fn row_106_a_guest_that_sends_and_takes_nothing_makes_nothing_grow() {
    let mut net = Net::new("");
    for n in 0..20_000u32 {
        let syn = Tcp { seq: n, ..Tcp::syn((Ipv4Addr::new(203, 0, 113, 66), 443)) };
        net.engine.frame(&syn.frame(), &mut net.world, net.now);
        net.engine.run(&mut net.world, net.now);
    }
    let mut waiting = 0;
    while net.engine.front().is_some() {
        net.engine.sent();
        waiting += 1;
    }
    assert!((64..=128).contains(&waiting), "{waiting} frames wait");
}

#[test]
fn terms_end_a_flow() {
    let with = |change: &dyn Fn(&mut netfilter_control::Terms)| {
        let mut policy = super::net::policy(RAW);
        change(&mut policy.rules[0].terms);
        Net::with_policy(policy)
    };
    let mut net = with(&|terms| terms.max_up = Some(1000));
    let flow = net.dial("raw.example.com", 7000);
    net.write(flow, &[7; 1500]);
    assert_eq!(net.received().len(), 1000, "no byte more");
    assert_eq!(cause(&mut net), Some(Cause::Term));

    let mut net = with(&|terms| terms.max_down = Some(1000));
    let flow = net.dial("raw.example.com", 7000);
    net.answer(&[7; 1500]);
    assert!(net.read(flow).len() <= 1000);
    assert_eq!(cause(&mut net), Some(Cause::Term));

    let mut net = with(&|terms| terms.max_down = Some(1000));
    let flow = net.dial("raw.example.com", 7000);
    net.answer(&[7; 1000]);
    net.pass(Duration::from_secs(1));
    net.hang_up();
    assert_eq!(net.read(flow).len(), 1000, "all that is allowed, and no more came");
    net.end(flow);
    net.pass(Duration::from_secs(1));
    assert_eq!(cause(&mut net), Some(Cause::Finished));

    let mut net = with(&|terms| terms.max_duration = Some(30));
    let flow = net.dial("raw.example.com", 7000);
    net.pass(Duration::from_secs(29));
    assert_eq!(net.state(flow), State::Established);
    net.pass(Duration::from_secs(2));
    assert_eq!(cause(&mut net), Some(Cause::Term));

    let mut net = with(&|terms| terms.rate = Some(10_000));
    let flow = net.dial("raw.example.com", 7000);
    let began = net.now;
    net.socket(flow).send_slice(&[7; 50_000]).unwrap();
    net.settle();
    assert_eq!(net.received().len(), 10_000, "one second's worth at once");
    while net.received().len() < 50_000 {
        net.pass(Duration::from_millis(100));
    }
    let took = net.now - began;
    assert!((Duration::from_millis(3900)..Duration::from_millis(4300)).contains(&took), "{took:?}");
}

/// Sockets of connections that are over are used again, whatever was left in them.
#[test]
fn a_connection_has_nothing_of_an_earlier_one() {
    let mut net = Net::new(RAW);
    let address = net.lookup("raw.example.com").unwrap();
    for round in 0..20_u8 {
        // One that is reset before it has opened.
        net.send(&Tcp::syn((address, 7001)).frame());
        let (flags, sequence) = net.last_segment(50_000).unwrap();
        assert_eq!(flags, SYN | ACK);
        net.send(&Tcp { seq: 1001, ack: sequence + 1, flags: RST | ACK, ..Tcp::syn((address, 7001)) }.frame());
        assert_eq!(cause(&mut net), Some(Cause::GuestReset));

        let flow = net.dial("raw.example.com", 7000);
        assert_eq!(net.state(flow), State::Established);
        assert_eq!(net.read(flow), b"");
        net.write(flow, &[round; 1000]);
        assert_eq!(net.received(), [round; 1000]);
        net.answer(&[round; 1000]);
        assert_eq!(net.read(flow), [round; 1000]);
        // It ends in the middle: neither side takes what the other has sent.
        net.peer().1.room = Some(0);
        net.write(flow, &[0xee; 100_000]);
        net.answer(&[0xdd; 1_000_000]);
        net.socket(flow).abort();
        net.settle();
        assert_eq!(cause(&mut net), Some(Cause::GuestReset));
        net.pass(Duration::from_secs(1));
    }
}

/// Row 29: a server that speaks first is heard at once. Row 28: something else than SSH is not passed.
#[test]
fn rows_28_29_ssh_speaks_first_and_only_ssh_passes() {
    let mut net = Net::new("git.example.com:22");
    let flow = net.dial("git.example.com", 22);
    net.answer(b"SSH-2.0-OpenSSH_9\r\n");
    assert_eq!(net.read(flow), b"SSH-2.0-OpenSSH_9\r\n");
    net.write(flow, b"SSH-");
    assert!(net.received().is_empty(), "not before it is known to be SSH");
    net.write(flow, b"2.0-client\r\n");
    assert_eq!(net.received(), b"SSH-2.0-client\r\n");

    for hello in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"SSH-1.99-x\r\n", b"\x16\x03\x01", b"SSX"] {
        let flow = net.dial("git.example.com", 22);
        net.write(flow, hello);
        assert_eq!(net.state(flow), State::Closed);
        assert!(net.received().is_empty());
        assert_eq!(net.refusal(), Some(Reason::NotSsh));
    }
    let flow = net.dial("git.example.com", 22);
    net.pass(Duration::from_secs(11));
    assert_eq!(net.state(flow), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::Slow));
}
