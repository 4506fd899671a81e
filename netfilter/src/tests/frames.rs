//! Frames as a guest sends them, honest unless a test breaks them.

use std::net::Ipv4Addr;

use crate::plan::{GATEWAY_MAC, GUEST, GUEST_MAC};
use crate::wire::Checksum;

pub(super) const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
pub(super) const RST: u8 = 4;
pub(super) const ACK: u8 = 16;

pub(super) fn ethernet(ethertype: u16, body: &[u8]) -> Vec<u8> {
    let mut frame = GATEWAY_MAC.to_vec();
    frame.extend_from_slice(&GUEST_MAC);
    frame.extend_from_slice(&ethertype.to_be_bytes());
    frame.extend_from_slice(body);
    frame
}

pub(super) fn ip_from(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let total = u16::try_from(payload.len() + 20).unwrap().to_be_bytes();
    let mut packet = vec![0x45, 0, total[0], total[1], 0x12, 0x34, 0x40, 0, 64, protocol, 0, 0];
    packet.extend_from_slice(&source.octets());
    packet.extend_from_slice(&destination.octets());
    packet.extend_from_slice(payload);
    fix_ip(&mut packet);
    ethernet(0x0800, &packet)
}

pub(super) fn ip(destination: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    ip_from(GUEST, destination, protocol, payload)
}

/// Puts the right checksum into an IP header, whatever else was changed.
pub(super) fn fix_ip(packet: &mut [u8]) {
    packet[10..12].fill(0);
    let header = usize::from(packet[0] & 15) * 4;
    let sum = Checksum::default().add(&packet[..header.min(packet.len())]).finish();
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
}

pub(super) fn udp_from(source: (Ipv4Addr, u16), destination: (Ipv4Addr, u16), payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len() + 8).unwrap();
    let mut datagram = Vec::new();
    for field in [source.1, destination.1, length, 0] {
        datagram.extend_from_slice(&field.to_be_bytes());
    }
    datagram.extend_from_slice(payload);
    let sum = Checksum::pseudo(source.0, destination.0, 17, datagram.len()).add(&datagram).finish();
    datagram[6..8].copy_from_slice(&sum.to_be_bytes());
    ip_from(source.0, destination.0, 17, &datagram)
}

pub(super) fn udp(destination: (Ipv4Addr, u16), payload: &[u8]) -> Vec<u8> {
    udp_from((GUEST, 40_000), destination, payload)
}

pub(super) struct Tcp {
    pub(super) port: u16,
    pub(super) to: (Ipv4Addr, u16),
    pub(super) seq: u32,
    pub(super) ack: u32,
    pub(super) flags: u8,
    pub(super) options: Vec<u8>,
    pub(super) payload: Vec<u8>,
}

impl Tcp {
    pub(super) fn syn(to: (Ipv4Addr, u16)) -> Self {
        Self { port: 50_000, to, seq: 1000, ack: 0, flags: SYN, options: Vec::new(), payload: Vec::new() }
    }

    pub(super) fn segment(&self) -> Vec<u8> {
        let mut segment = Vec::new();
        segment.extend_from_slice(&self.port.to_be_bytes());
        segment.extend_from_slice(&self.to.1.to_be_bytes());
        segment.extend_from_slice(&self.seq.to_be_bytes());
        segment.extend_from_slice(&self.ack.to_be_bytes());
        let offset = u8::try_from((20 + self.options.len()) / 4).unwrap() << 4;
        segment.extend_from_slice(&[offset, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        segment.extend_from_slice(&self.options);
        segment.extend_from_slice(&self.payload);
        fix_tcp(&mut segment, self.to.0);
        segment
    }

    pub(super) fn frame(&self) -> Vec<u8> {
        ip(self.to.0, 6, &self.segment())
    }
}

pub(super) fn fix_tcp(segment: &mut [u8], destination: Ipv4Addr) {
    segment[16..18].fill(0);
    let sum = Checksum::pseudo(GUEST, destination, 6, segment.len()).add(segment).finish();
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
}

pub(super) fn echo(destination: Ipv4Addr, body: usize) -> Vec<u8> {
    let mut message = vec![8, 0, 0, 0, 0, 1, 0, 1];
    message.resize(8 + body, 0x55);
    let sum = Checksum::default().add(&message).finish();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    ip(destination, 1, &message)
}

pub(super) fn arp_request(sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut body = vec![0, 1, 8, 0, 6, 4, 0, 1];
    body.extend_from_slice(&GUEST_MAC);
    body.extend_from_slice(&sender.octets());
    body.extend_from_slice(&[0; 6]);
    body.extend_from_slice(&target.octets());
    let mut frame = ethernet(0x0806, &body);
    frame[..6].fill(0xff);
    frame.resize(60, 0);
    frame
}

pub(super) fn dns_question(name: &str, qtype: u16, edns: bool) -> Vec<u8> {
    let mut message = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(edns)];
    for label in name.split('.').filter(|label| !label.is_empty()) {
        message.push(u8::try_from(label.len()).unwrap());
        message.extend_from_slice(label.as_bytes());
    }
    message.push(0);
    message.extend_from_slice(&qtype.to_be_bytes());
    message.extend_from_slice(&[0, 1]);
    if edns {
        message.extend_from_slice(&[0, 0, 41, 0x10, 0, 0, 0, 0, 0, 0, 0]);
    }
    message
}
