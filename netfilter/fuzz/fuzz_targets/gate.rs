//! The frame gate and the services of the link: what passes is whole, and its answers are too.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter::gate::{self, Packet};
use netfilter::local;

fuzz_target!(|frame: &[u8]| {
    match gate::check(frame) {
        Ok(Packet::Tcp(segment)) => {
            assert!(segment.packet.len() >= 40 && segment.port > 0 && segment.destination.port() > 0);
            let first = segment.destination.ip().octets()[0];
            assert!(first > 0 && first != 127 && first < 224);
        }
        Ok(Packet::Dhcp(message)) => {
            if let Some(reply) = local::dhcp_reply(message) {
                assert!(reply.len() >= 300 && reply.len() < 700);
            }
        }
        Ok(Packet::Echo(rest)) => assert!(local::echo_reply(rest).len() <= 14 + 20 + 8 + gate::MAX_ECHO),
        Ok(Packet::Udp { quote, .. }) => assert_eq!(quote.len(), 28),
        Ok(Packet::Arp { .. } | Packet::Dns { .. }) | Err(_) => {}
    }
    let _ = local::dhcp_reply(frame);
});
