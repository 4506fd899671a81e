//! The frame gate: of all that a guest can send, the few shapes that have code behind them.
//!
//! A frame is checked once, from the outside in, and becomes a [`Packet`] whose lengths and checksums hold. Everything
//! else is a [`Dropped`]: there is no path by which it could be forwarded. Nothing is learned from a frame and nothing is
//! put together from several: no tables, no reassembly.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::net::{Ipv4Addr, SocketAddrV4};

use crate::plan::{BROADCAST_MAC, GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, MAX_FRAME, Mac};
use crate::wire::{Checksum, Reader, protocol};

/// Largest DHCP message that is read: what every client may send (RFC 2131, 2).
pub const MAX_DHCP: usize = 576;
/// Largest body of an echo request that is answered.
pub const MAX_ECHO: usize = 64;

/// A frame with code behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packet<'f> {
    /// The guest asks for the gateway's link-layer address.
    Arp {
        /// The address that it asks from; unspecified while it has none.
        sender: Ipv4Addr,
    },
    /// A DHCP message to a server.
    Dhcp(&'f [u8]),
    /// A DNS message over UDP, to whatever address.
    Dns {
        /// The address that was asked, and that the answer comes from.
        server: Ipv4Addr,
        /// The guest's port.
        port: u16,
        /// The message.
        message: &'f [u8],
    },
    /// Any other UDP datagram: answered with "port unreachable", never delivered.
    Udp {
        /// Where it was sent.
        destination: SocketAddrV4,
        /// Its IP header and first 8 bytes, which the answer quotes.
        quote: &'f [u8],
    },
    /// An echo request to the gateway.
    Echo(&'f [u8]),
    /// A TCP segment.
    Tcp(Segment<'f>),
}

/// A TCP segment whose checksum holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment<'f> {
    /// The whole IP packet, without what followed it in the frame.
    pub packet: &'f [u8],
    /// The guest's port.
    pub port: u16,
    /// Where it goes.
    pub destination: SocketAddrV4,
    /// Whether it asks for a new connection.
    pub opens: bool,
}

/// Why a frame has no code behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dropped {
    /// Shorter than its headers, longer than the link allows, or with lengths that contradict each other.
    Length,
    /// Not from the guest's own link-layer address.
    SourceMac,
    /// Not to the gateway's, and not a broadcast that something answers.
    DestinationMac,
    /// An IEEE 802.3 length instead of a type.
    Llc,
    /// A VLAN tag.
    Vlan,
    /// IPv6.
    Ipv6,
    /// Another EtherType.
    EtherType,
    /// ARP that is no request for the gateway.
    Arp,
    /// An IPv4 header that is not plain: version, options, checksum, reserved bits.
    Ipv4Header,
    /// A fragment.
    Fragment,
    /// Not from the guest's own address.
    SourceAddress,
    /// To loopback, multicast, broadcast or a reserved address.
    DestinationAddress,
    /// Neither TCP, UDP nor ICMP.
    Protocol,
    /// ICMP that is no short echo request to the gateway.
    Icmp,
    /// A TCP or UDP header or checksum that does not hold.
    Transport,
    /// More than a guest may send in a second.
    Rate,
    /// A DHCP or DNS message that gets no answer.
    Unanswerable,
}

impl Dropped {
    /// Every class, for counters.
    pub const ALL: [Self; 17] = [
        Self::Length,
        Self::SourceMac,
        Self::DestinationMac,
        Self::Llc,
        Self::Vlan,
        Self::Ipv6,
        Self::EtherType,
        Self::Arp,
        Self::Ipv4Header,
        Self::Fragment,
        Self::SourceAddress,
        Self::DestinationAddress,
        Self::Protocol,
        Self::Icmp,
        Self::Transport,
        Self::Rate,
        Self::Unanswerable,
    ];

    /// The word that events use.
    pub fn word(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::SourceMac => "source-mac",
            Self::DestinationMac => "destination-mac",
            Self::Llc => "llc",
            Self::Vlan => "vlan",
            Self::Ipv6 => "ipv6",
            Self::EtherType => "ethertype",
            Self::Arp => "arp",
            Self::Ipv4Header => "ipv4-header",
            Self::Fragment => "fragment",
            Self::SourceAddress => "source-address",
            Self::DestinationAddress => "destination-address",
            Self::Protocol => "protocol",
            Self::Icmp => "icmp",
            Self::Transport => "transport",
            Self::Rate => "rate",
            Self::Unanswerable => "unanswerable",
        }
    }
}

/// Checks a frame from the guest.
pub fn check(frame: &[u8]) -> Result<Packet<'_>, Dropped> {
    if frame.len() > MAX_FRAME {
        return Err(Dropped::Length);
    }
    let mut reader = Reader::new(frame);
    let (Some(destination), Some(source), Some(ethertype)) = (reader.array(), reader.array(), reader.u16()) else {
        return Err(Dropped::Length);
    };
    if source != GUEST_MAC {
        return Err(Dropped::SourceMac);
    }
    if destination != GATEWAY_MAC && destination != BROADCAST_MAC {
        return Err(Dropped::DestinationMac);
    }
    match ethertype {
        0x0800 => ipv4(destination, reader.rest()),
        0x0806 => arp(reader.rest()),
        0x86dd => Err(Dropped::Ipv6),
        0x8100 | 0x88a8 | 0x9100 => Err(Dropped::Vlan),
        0..0x0600 => Err(Dropped::Llc),
        _ => Err(Dropped::EtherType),
    }
}

/// RFC 826. Ethernet pads short frames, so bytes may follow.
fn arp(body: &[u8]) -> Result<Packet<'_>, Dropped> {
    const REQUEST: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
    let mut reader = Reader::new(body);
    let fields = (|| {
        let header: [u8; 8] = reader.array()?;
        let sender_mac: Mac = reader.array()?;
        let sender = reader.address()?;
        let _unknown: Mac = reader.array()?;
        Some((header, sender_mac, sender, reader.address()?))
    })();
    match fields {
        Some((REQUEST, GUEST_MAC, sender, GATEWAY)) if sender == GUEST || sender.is_unspecified() => {
            Ok(Packet::Arp { sender })
        }
        _ => Err(Dropped::Arp),
    }
}

/// RFC 791, without options and fragments.
fn ipv4(destination_mac: Mac, body: &[u8]) -> Result<Packet<'_>, Dropped> {
    let (header, _) = body.split_at_checked(20).ok_or(Dropped::Length)?;
    let mut reader = Reader::new(header);
    let fields = (|| {
        let [version, _service] = reader.array()?;
        let total = usize::from(reader.u16()?);
        let _identification = reader.u16()?;
        let fragment = reader.u16()?;
        let [_hops, protocol] = reader.array()?;
        let _checksum = reader.u16()?;
        Some((version, total, fragment, protocol, reader.address()?, reader.address()?))
    })();
    let (version, total, fragment, protocol, source, destination) = fields.ok_or(Dropped::Length)?;
    if version != 0x45 || Checksum::default().add(header).finish() != 0 {
        return Err(Dropped::Ipv4Header);
    }
    let packet = body.get(..total).ok_or(Dropped::Length)?;
    let payload = packet.get(20..).ok_or(Dropped::Length)?;
    // All but "don't fragment": more fragments to come, an offset, the reserved bit.
    if fragment & 0x8000 != 0 {
        return Err(Dropped::Ipv4Header);
    }
    if fragment & 0x3fff != 0 {
        return Err(Dropped::Fragment);
    }
    if protocol == protocol::UDP
        && let Some(packet) = dhcp(source, destination, payload)
    {
        return packet;
    }
    if destination_mac != GATEWAY_MAC {
        return Err(Dropped::DestinationMac);
    }
    if source != GUEST {
        return Err(Dropped::SourceAddress);
    }
    if !may_be_asked_for(destination) {
        return Err(Dropped::DestinationAddress);
    }
    match protocol {
        protocol::TCP => tcp(packet, payload, destination),
        protocol::UDP => udp(packet, payload, destination),
        protocol::ICMP => echo(payload, destination),
        _ => Err(Dropped::Protocol),
    }
}

/// Whether an address can be a destination at all. What else it may be is the policy's to say.
fn may_be_asked_for(address: Ipv4Addr) -> bool {
    let [first, ..] = address.octets();
    (1..224).contains(&first) && first != 127 && address != GUEST
}

/// A client's message to any DHCP server (RFC 2131, 4.1), which is all that may come from or go to no address.
fn dhcp(source: Ipv4Addr, destination: Ipv4Addr, payload: &[u8]) -> Option<Result<Packet<'_>, Dropped>> {
    let (port, to, message) = match datagram(source, destination, payload) {
        Ok(parts) => parts,
        Err(drop) => return Some(Err(drop)),
    };
    if (port, to) != (68, 67) {
        return None;
    }
    let addressed = destination == GATEWAY || destination.is_broadcast();
    let from = source == GUEST || source.is_unspecified();
    let fits = message.len() <= MAX_DHCP;
    Some(if addressed && from && fits { Ok(Packet::Dhcp(message)) } else { Err(Dropped::Transport) })
}

/// RFC 768: ports and payload. The length is exact: nothing hides behind the datagram.
fn datagram(source: Ipv4Addr, destination: Ipv4Addr, payload: &[u8]) -> Result<(u16, u16, &[u8]), Dropped> {
    let mut reader = Reader::new(payload);
    let (Some(port), Some(to), Some(length), Some(checksum)) = (reader.u16(), reader.u16(), reader.u16(), reader.u16())
    else {
        return Err(Dropped::Transport);
    };
    let sum = || Checksum::pseudo(source, destination, protocol::UDP, payload.len()).add(payload).finish();
    if usize::from(length) != payload.len() || port == 0 || to == 0 || (checksum != 0 && sum() != 0) {
        return Err(Dropped::Transport);
    }
    Ok((port, to, reader.rest()))
}

fn udp<'f>(packet: &'f [u8], payload: &'f [u8], destination: Ipv4Addr) -> Result<Packet<'f>, Dropped> {
    let (port, to, message) = datagram(GUEST, destination, payload)?;
    if to == 53 {
        return Ok(Packet::Dns { server: destination, port, message });
    }
    let quote = packet.get(..28).ok_or(Dropped::Length)?;
    Ok(Packet::Udp { destination: SocketAddrV4::new(destination, to), quote })
}

/// RFC 9293, 3.1. Options are the stack's to read; they lie inside of the header.
fn tcp<'f>(packet: &'f [u8], payload: &'f [u8], destination: Ipv4Addr) -> Result<Packet<'f>, Dropped> {
    const FIN: u8 = 0x01;
    const SYN: u8 = 0x02;
    const RST: u8 = 0x04;
    const ACK: u8 = 0x10;
    let mut reader = Reader::new(payload);
    let fields = (|| {
        let (port, to) = (reader.u16()?, reader.u16()?);
        let (_sequence, _acknowledged) = (reader.u32()?, reader.u32()?);
        let [offset, flags] = reader.array()?;
        let _window_checksum_urgent: [u8; 6] = reader.array()?;
        Some((port, to, usize::from(offset >> 4).saturating_mul(4), flags))
    })();
    let (port, to, header, flags) = fields.ok_or(Dropped::Transport)?;
    if port == 0 || to == 0 || header < 20 || header > payload.len() {
        return Err(Dropped::Transport);
    }
    // No stack sends these; what they do to another's state is not worth finding out.
    if flags & SYN != 0 && flags & (FIN | RST) != 0 || flags & (SYN | RST | ACK) == 0 {
        return Err(Dropped::Transport);
    }
    if Checksum::pseudo(GUEST, destination, protocol::TCP, payload.len()).add(payload).finish() != 0 {
        return Err(Dropped::Transport);
    }
    let opens = flags & SYN != 0 && flags & ACK == 0;
    Ok(Packet::Tcp(Segment { packet, port, destination: SocketAddrV4::new(destination, to), opens }))
}

/// RFC 792: an echo request. What it carries goes nowhere but back.
fn echo(payload: &[u8], destination: Ipv4Addr) -> Result<Packet<'_>, Dropped> {
    let rest = match payload {
        [8, 0, _, _, rest @ ..] => rest,
        _ => return Err(Dropped::Icmp),
    };
    // The rest is an identifier and a sequence number, 4 bytes, and the body.
    let fits = (4..=MAX_ECHO.saturating_add(4)).contains(&rest.len());
    if destination != GATEWAY || !fits || Checksum::default().add(payload).finish() != 0 {
        return Err(Dropped::Icmp);
    }
    Ok(Packet::Echo(rest))
}
