//! What the gateway answers itself, without state: ARP, DHCP, echo, unreachable ports.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::net::Ipv4Addr;

use crate::plan::{GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, MTU, NETMASK};
use crate::wire::{self, Reader};

/// How long a lease is said to last, in seconds. It never ends: the guest's address is its own.
const LEASE: u32 = 0xffff_ffff;
/// DHCP's message types (RFC 2132, 9.6).
const DISCOVER: u8 = 1;
const OFFER: u8 = 2;
const REQUEST: u8 = 3;
const ACK: u8 = 5;
const NAK: u8 = 6;
const INFORM: u8 = 8;

/// The answer to a request for the gateway's link-layer address.
pub fn arp_reply(sender: Ipv4Addr) -> Vec<u8> {
    let mut frame = Vec::with_capacity(42);
    wire::ethernet(0x0806, &mut frame);
    frame.extend_from_slice(&[0, 1, 8, 0, 6, 4, 0, 2]);
    frame.extend_from_slice(&GATEWAY_MAC);
    frame.extend_from_slice(&GATEWAY.octets());
    frame.extend_from_slice(&GUEST_MAC);
    frame.extend_from_slice(&sender.octets());
    frame
}

/// The answer to an echo request; `rest` is what followed its checksum.
pub fn echo_reply(rest: &[u8]) -> Vec<u8> {
    wire::icmp(GATEWAY, 0, 0, rest)
}

/// "Port unreachable" (RFC 792) for a datagram to `destination`, of which `quote` is the beginning.
pub fn port_unreachable(destination: Ipv4Addr, quote: &[u8]) -> Vec<u8> {
    let mut rest = vec![0; 4];
    rest.extend_from_slice(quote);
    wire::icmp(destination, 3, 3, &rest)
}

/// The answer to a DHCP message, if it gets one. There is one lease, the same for ever, so nothing is remembered.
pub fn dhcp_reply(message: &[u8]) -> Option<Vec<u8>> {
    let mut reader = Reader::new(message);
    let [op, hardware, length, _hops] = reader.array()?;
    let transaction: [u8; 4] = reader.array()?;
    let _seconds = reader.u16()?;
    let flags: [u8; 2] = reader.array()?;
    let client = reader.address()?;
    let _yours_servers_relays: [u8; 12] = reader.array()?;
    let chaddr: [u8; 16] = reader.array()?;
    let _server_name_and_file = reader.take(192)?;
    let cookie: [u8; 4] = reader.array()?;
    if (op, hardware, length, cookie) != (1, 1, 6, [99, 130, 83, 99]) || !chaddr.starts_with(&GUEST_MAC) {
        return None;
    }
    let options = Options::read(reader)?;
    let kind = match options.kind? {
        DISCOVER => OFFER,
        REQUEST if options.server.is_some_and(|server| server != GATEWAY) => return None,
        REQUEST => match options.requested.or(Some(client).filter(|address| !address.is_unspecified())) {
            Some(GUEST) => ACK,
            _ => NAK,
        },
        INFORM => ACK,
        _ => return None,
    };
    let leases = kind != NAK && options.kind != Some(INFORM);
    let mut reply = vec![2, 1, 6, 0];
    reply.extend_from_slice(&transaction);
    reply.extend_from_slice(&[0, 0]);
    reply.extend_from_slice(&flags);
    reply.extend_from_slice(&[0; 4]);
    reply.extend_from_slice(&if leases { GUEST } else { Ipv4Addr::UNSPECIFIED }.octets());
    reply.extend_from_slice(&[0; 8]);
    reply.extend_from_slice(&chaddr);
    reply.extend_from_slice(&[0; 192]);
    reply.extend_from_slice(&cookie);
    option(&mut reply, 53, &[kind]);
    option(&mut reply, 54, &GATEWAY.octets());
    if kind != NAK {
        if leases {
            option(&mut reply, 51, &LEASE.to_be_bytes());
        }
        option(&mut reply, 1, &NETMASK.octets());
        option(&mut reply, 3, &GATEWAY.octets());
        option(&mut reply, 6, &GATEWAY.octets());
        option(&mut reply, 26, &u16::try_from(MTU).unwrap_or(1500).to_be_bytes());
    }
    reply.push(255);
    // RFC 1542, 2.1: some clients want the 300 bytes of BOOTP.
    if reply.len() < 300 {
        reply.resize(300, 0);
    }
    Some(wire::udp(GATEWAY, 67, 68, &reply))
}

fn option(reply: &mut Vec<u8>, code: u8, value: &[u8]) {
    reply.extend_from_slice(&[code, u8::try_from(value.len()).unwrap_or(0)]);
    reply.extend_from_slice(value);
}

/// The options that matter (RFC 2132). The rest is skipped, "option overload" among it.
#[derive(Debug, Default)]
struct Options {
    kind: Option<u8>,
    requested: Option<Ipv4Addr>,
    server: Option<Ipv4Addr>,
}

impl Options {
    /// `None` if an option is longer than the message, or stands twice.
    fn read(mut reader: Reader<'_>) -> Option<Self> {
        let mut options = Self::default();
        loop {
            let code = match reader.u8() {
                None | Some(255) => return Some(options),
                Some(0) => continue,
                Some(code) => code,
            };
            let length = usize::from(reader.u8()?);
            let mut value = Reader::new(reader.take(length)?);
            let doubled = match code {
                50 => options.requested.replace(value.address()?).is_some(),
                53 => options.kind.replace(value.u8()?).is_some(),
                54 => options.server.replace(value.address()?).is_some(),
                _ => continue,
            };
            if doubled || !value.is_empty() {
                return None;
            }
        }
    }
}
