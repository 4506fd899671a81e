//! Bytes of packets: reading them with a check at each step, and building the few that are ours.

use std::net::Ipv4Addr;

use crate::plan::{GATEWAY_MAC, GUEST, GUEST_MAC};

/// Reads big-endian fields one after the other. Past the end there is `None`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'b>(&'b [u8]);

impl<'b> Reader<'b> {
    pub(crate) fn new(bytes: &'b [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn take(&mut self, count: usize) -> Option<&'b [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn address(&mut self) -> Option<Ipv4Addr> {
        self.array::<4>().map(Ipv4Addr::from)
    }

    pub(crate) fn rest(self) -> &'b [u8] {
        self.0
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Sums up 16-bit words in one's complement (RFC 1071). A byte that is left over counts as a word's high half.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Checksum(u64);

impl Checksum {
    /// Adds a part. Every part but the last has an even length.
    pub(crate) fn add(self, bytes: &[u8]) -> Self {
        let (words, rest) = bytes.as_chunks::<4>();
        // Packets have at most 2^16 bytes, so at most 2^14 words of 32 bits go into 64: it cannot overflow.
        let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from(u32::from_be_bytes(*word))));
        let last = match rest {
            [a, b, c] => u64::from(u16::from_be_bytes([*a, *b])).wrapping_add(u64::from(*c) << 8),
            [a, b] => u64::from(u16::from_be_bytes([*a, *b])),
            [a] => u64::from(*a) << 8,
            _ => 0,
        };
        Self(self.0.wrapping_add(sum).wrapping_add(last))
    }

    /// The pseudo-header that TCP and UDP sum up first.
    pub(crate) fn pseudo(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, length: usize) -> Self {
        let length = u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes();
        Self::default().add(&source.octets()).add(&destination.octets()).add(&[0, protocol]).add(&length)
    }

    /// The checksum: what makes the whole sum up to all ones. Over bytes that hold a right one it is 0.
    pub(crate) fn finish(self) -> u16 {
        let mut sum = self.0;
        while let Some(high) = Some(sum >> 16).filter(|high| *high > 0) {
            sum = (sum & 0xffff).wrapping_add(high);
        }
        !u16::try_from(sum & 0xffff).unwrap_or(0)
    }
}

/// Protocol numbers of IP.
pub(crate) mod protocol {
    pub(crate) const ICMP: u8 = 1;
    pub(crate) const TCP: u8 = 6;
    pub(crate) const UDP: u8 = 17;
}

/// An Ethernet header from us to the guest.
pub(crate) fn ethernet(ethertype: u16, frame: &mut Vec<u8>) {
    frame.extend_from_slice(&GUEST_MAC);
    frame.extend_from_slice(&GATEWAY_MAC);
    frame.extend_from_slice(&ethertype.to_be_bytes());
}

/// A frame with an IPv4 packet for the guest. `payload` is far below 64 KiB.
pub(crate) fn ipv4(source: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(payload.len().saturating_add(34));
    ethernet(0x0800, &mut frame);
    let total = u16::try_from(payload.len().saturating_add(20)).unwrap_or(u16::MAX).to_be_bytes();
    let mut header = Vec::with_capacity(20);
    header.extend_from_slice(&[0x45, 0, total[0], total[1], 0, 0, 0x40, 0, 64, protocol, 0, 0]);
    header.extend_from_slice(&source.octets());
    header.extend_from_slice(&GUEST.octets());
    put_checksum(&mut header, 10, Checksum::default());
    frame.extend_from_slice(&header);
    frame.extend_from_slice(payload);
    frame
}

/// A frame with a UDP datagram for the guest.
pub(crate) fn udp(source: Ipv4Addr, source_port: u16, port: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len().saturating_add(8)).unwrap_or(u16::MAX);
    let mut datagram = Vec::with_capacity(usize::from(length));
    for field in [source_port, port, length, 0] {
        datagram.extend_from_slice(&field.to_be_bytes());
    }
    datagram.extend_from_slice(payload);
    put_checksum(&mut datagram, 6, Checksum::pseudo(source, GUEST, protocol::UDP, usize::from(length)));
    // RFC 768: a checksum of 0 means none.
    if let Some(checksum) = datagram.get_mut(6..8)
        && checksum == [0, 0]
    {
        checksum.fill(0xff);
    }
    ipv4(source, protocol::UDP, &datagram)
}

/// A frame with an ICMP message for the guest.
pub(crate) fn icmp(source: Ipv4Addr, kind: u8, code: u8, rest: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, code, 0, 0];
    message.extend_from_slice(rest);
    put_checksum(&mut message, 2, Checksum::default());
    ipv4(source, protocol::ICMP, &message)
}

/// A frame with a TCP reset for the guest, as a connection's other end would send it.
pub(crate) fn tcp_reset(source: Ipv4Addr, source_port: u16, port: u16, sequence: u32) -> Vec<u8> {
    let mut segment = Vec::with_capacity(20);
    segment.extend_from_slice(&source_port.to_be_bytes());
    segment.extend_from_slice(&port.to_be_bytes());
    segment.extend_from_slice(&sequence.to_be_bytes());
    // No acknowledgement; a header of 5 words; RST; no window, no urgent data.
    segment.extend_from_slice(&[0, 0, 0, 0, 0x50, 0x04, 0, 0, 0, 0, 0, 0]);
    put_checksum(&mut segment, 16, Checksum::pseudo(source, GUEST, protocol::TCP, 20));
    ipv4(source, protocol::TCP, &segment)
}

/// Writes the checksum of `bytes`, on top of `start`, at `at`, where there are zeros now.
fn put_checksum(bytes: &mut [u8], at: usize, start: Checksum) {
    let sum = start.add(bytes).finish();
    if let Some(field) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *field = sum.to_be_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_rfc() {
        // RFC 1071, 3: the sum of 0001 f203 f4f5 f6f7 is ddf2.
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(Checksum::default().add(&bytes).finish(), !0xddf2);
        for cut in (0..=8).step_by(2) {
            let parts = Checksum::default().add(&bytes[..cut]).add(&bytes[cut..]);
            assert_eq!(parts.finish(), !0xddf2, "cut at {cut}");
        }
        assert_eq!(Checksum::default().add(&[0xff; 65_536]).finish(), 0);
        assert_eq!(Checksum::default().add(&[1]).finish(), !0x0100);
        assert_eq!(Checksum::default().add(&[0, 1, 2]).finish(), !0x0201);
    }
}
