//! Asks the host's kernel what an address is to it (rtnetlink(7)): the same tables that will route the connection, at the
//! time of the connection. No list of the host's addresses can be out of date, since there is none.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::host::Route;

const NLMSG_ERROR: u16 = 2;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const NLM_F_REQUEST: u16 = 1;
const RTA_DST: u16 = 1;
const RTA_GATEWAY: u16 = 5;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// `rtm_type`: a gateway or direct route; the types after it are local, broadcast, anycast, multicast, and refusals.
const RTN_UNICAST: u8 = 1;
const RTN_MULTICAST: u8 = 5;

/// Addresses that nobody has (RFC 5737, RFC 3849), so they take the default route.
const NOBODY: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];

/// A `NETLINK_ROUTE` socket.
#[derive(Debug)]
pub(super) struct Routes {
    socket: OwnedFd,
    sequence: u32,
}

/// What the kernel said about an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Via(u8, Option<IpAddr>),
    Error(i32),
}

impl Routes {
    /// Takes a socket that was handed over.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, sequence: 0 }
    }

    /// What an address is to the host.
    pub(super) fn route(&mut self, address: IpAddr) -> io::Result<Route> {
        match self.ask(address)? {
            Found::Error(_) => Ok(Route::Nowhere),
            // It lies behind a router, and so is none of this host's, which are beside it.
            Found::Via(RTN_UNICAST, Some(gateway)) if gateway != address => Ok(Route::Elsewhere),
            Found::Via(RTN_UNICAST, _) => {
                for nobody in NOBODY.iter().filter(|nobody| nobody.is_ipv4() == address.is_ipv4()) {
                    if self.ask(*nobody)? == Found::Via(RTN_UNICAST, Some(address)) {
                        return Ok(Route::Router);
                    }
                }
                Ok(Route::Elsewhere)
            }
            Found::Via(kind, _) if kind <= RTN_MULTICAST => Ok(Route::Own),
            Found::Via(..) => Ok(Route::Nowhere),
        }
    }

    fn ask(&mut self, address: IpAddr) -> io::Result<Found> {
        self.sequence = self.sequence.wrapping_add(1);
        send(&self.socket, &request(address, self.sequence), SendFlags::DONTWAIT)?;
        let mut buffer = [0u8; 4096];
        // The kernel answers before `send` returns. An answer to an earlier question is passed over.
        for _ in 0..16 {
            let (_, count) = recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT)?;
            if let Some(found) = answer(buffer.get(..count).unwrap_or_default(), self.sequence) {
                return Ok(found);
            }
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer about a route cannot be read"))
    }
}

/// A `nlmsghdr`, a `rtmsg` and the destination.
fn request(address: IpAddr, sequence: u32) -> Vec<u8> {
    let (family, octets) = match address {
        IpAddr::V4(v4) => (AF_INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (AF_INET6, v6.octets().to_vec()),
    };
    let (bits, bytes) = if family == AF_INET { (32, 4u16) } else { (128, 16) };
    let mut message = Vec::new();
    message.extend_from_slice(&u32::from(16 + 12 + 4 + bytes).to_ne_bytes());
    message.extend_from_slice(&RTM_GETROUTE.to_ne_bytes());
    message.extend_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    message.extend_from_slice(&sequence.to_ne_bytes());
    message.extend_from_slice(&[0; 4]);
    message.extend_from_slice(&[family, bits, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    message.extend_from_slice(&(4 + bytes).to_ne_bytes());
    message.extend_from_slice(&RTA_DST.to_ne_bytes());
    message.extend_from_slice(&octets);
    message
}

fn answer(message: &[u8], sequence: u32) -> Option<Found> {
    let field16 = |at: usize| message.get(at..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes));
    let field32 = |at: usize| message.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
    if field32(8)? != sequence {
        return None;
    }
    match field16(4)? {
        NLMSG_ERROR => Some(Found::Error(field32(16)?.cast_signed())),
        RTM_NEWROUTE => {
            let kind = *message.get(23)?;
            let mut rest = message.get(28..)?;
            let mut gateway = None;
            while let Some(([a, b, c, d], tail)) = rest.split_first_chunk::<4>() {
                let (length, attribute) = (usize::from(u16::from_ne_bytes([*a, *b])), u16::from_ne_bytes([*c, *d]));
                let value = tail.get(..length.checked_sub(4)?)?;
                if attribute == RTA_GATEWAY {
                    gateway = <[u8; 4]>::try_from(value)
                        .map(IpAddr::from)
                        .or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from))
                        .ok();
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
            Some(Found::Via(kind, gateway))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

    use super::*;

    /// Row 44: the host's own addresses, whatever they are called.
    #[test]
    fn the_kernel_knows_its_own_addresses() {
        // NETLINK_ROUTE is protocol 0.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
        let mut routes = Routes::new(socket);
        for own in ["127.0.0.1", "127.9.9.9"] {
            let found = routes.ask(own.parse().unwrap()).unwrap();
            // Where loopback is down there is no route to it at all: that is no way out either.
            assert!(matches!(found, Found::Via(2, _) | Found::Error(_)), "{own}: {found:?}");
            assert_ne!(routes.route(own.parse().unwrap()).unwrap(), Route::Elsewhere);
        }
    }

    #[test]
    fn answers_are_read_with_care() {
        let whole = {
            let mut message = vec![36, 0, 0, 0];
            message.extend_from_slice(&RTM_NEWROUTE.to_ne_bytes());
            message.extend_from_slice(&[0; 2]);
            message.extend_from_slice(&7u32.to_ne_bytes());
            message.extend_from_slice(&[0; 4]);
            message.extend_from_slice(&[AF_INET, 32, 0, 0, 0, 0, 0, RTN_UNICAST, 0, 0, 0, 0]);
            message.extend_from_slice(&[8, 0, 5, 0, 10, 0, 0, 1]);
            message
        };
        assert_eq!(answer(&whole, 7), Some(Found::Via(RTN_UNICAST, Some([10, 0, 0, 1].into()))));
        assert_eq!(answer(&whole, 8), None);
        for length in 0..whole.len() {
            let _ = answer(&whole[..length], 7);
        }
        let mut looping = whole.clone();
        looping[28] = 0;
        assert_eq!(answer(&looping, 7), None, "an attribute without a length");
    }
}
