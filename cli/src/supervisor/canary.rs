//! A filter that is tried out: this process plays a guest that was allowed nothing, and looks for a way out.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::time::{Duration, Instant};

use netfilter_control::plan::{GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC};
use netfilter_control::{ControlSocket, Policy};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::network::{Link, begin, wait_until_it_serves};
use super::{jail, network::NetworkError};
use crate::spec::SetPolicy;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// A port that the guest dials from.
const FROM: u16 = 40_000;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// Nobody's address (RFC 5737).
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Starts a filter in the jail with the policy of a run without options. A name must not exist for its guest, connections must be
/// refused, and a listener on the host's loopback must hear nothing. An error says what is wrong.
pub(crate) fn try_out(jailer: &Path, filter: &Path) -> Result<(), String> {
    let text = |error: NetworkError| error.to_string();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| format!("a listener: {error}"))?;
    listener.set_nonblocking(true).map_err(|error| format!("a listener: {error}"))?;
    let port = listener.local_addr().map_err(|error| format!("a listener: {error}"))?.port();
    let (control, theirs) = ControlSocket::pair().map_err(|error| error.to_string())?;
    let link =
        begin(&control, &SetPolicy { generation: 1, policy: Policy::default() }, (&[], None), None).map_err(text)?;
    let started = jail::start_bare_filter(jailer, filter, std::os::fd::AsFd::as_fd(&theirs));
    let (_user, mut jailed) = started.map_err(|error| error.to_string())?;
    drop(theirs);
    wait_until_it_serves(&control, &mut jailed).map_err(text)?;

    let answer = ask(&link, &question(), |packet| packet.get(9) == Some(&UDP))?;
    // The code of a DNS message: byte 3 of what follows the headers of IP and UDP. 3: there is no such name.
    if answer.get(31).map(|flags| flags & 15) != Some(3) {
        return Err("a name resolved that no policy allows".to_owned());
    }
    // What is on the way to loopback is dropped; the others tell when it has been looked at.
    for destination in [Ipv4Addr::LOCALHOST, GATEWAY, ELSEWHERE] {
        let segment = syn(destination, port);
        if destination.is_loopback() {
            put(&link, &segment)?;
            continue;
        }
        let answer = ask(&link, &segment, |packet| {
            packet.get(9) == Some(&TCP) && packet.get(12..16) == Some(&destination.octets())
        })?;
        // Its flags: RST, and not SYN.
        if answer.get(33).map(|flags| flags & 6) != Some(4) {
            return Err(format!("a connection to {destination} was not refused, which no policy allows"));
        }
    }
    match listener.accept() {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
        _ => Err("the host's own loopback was reached".to_owned()),
    }
}

fn put(link: &Link, packet: &[u8]) -> Result<(), String> {
    let frame = [&GATEWAY_MAC[..], &GUEST_MAC, &[8, 0], packet].concat();
    match send(link.frames(), &frame, SendFlags::NOSIGNAL) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("a frame to the network filter: {error}")),
    }
}

/// Sends a packet, and waits for the one that answers it.
fn ask(link: &Link, packet: &[u8], is_it: impl Fn(&[u8]) -> bool) -> Result<Vec<u8>, String> {
    put(link, packet)?;
    let deadline = Instant::now().checked_add(PATIENCE);
    let mut buffer = vec![0; 2048];
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())).unwrap_or_default();
        let time = Timespec::try_from(left).unwrap_or_default();
        let frames = link.frames();
        // What is wrong with it, the next call tells.
        let _ = poll(&mut [PollFd::new(&frames, PollFlags::IN)], Some(&time));
        // Also for a filter that sends without end what answers nothing.
        if left.is_zero() {
            return Err(format!("the network filter does not answer its guest in {PATIENCE:?}"));
        }
        match recv(frames, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err("the network filter ended".to_owned()),
            Ok((length, _)) => {
                if let Some(packet) = buffer.get(14..length).filter(|packet| is_it(packet)) {
                    return Ok(packet.to_vec());
                }
            }
            // Nothing yet.
            Err(_) => {}
        }
    }
}

/// A question for the address of a name, to the gateway.
fn question() -> Vec<u8> {
    let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    message.extend_from_slice(b"\x06canary\x07example\x03com\0\0\x01\0\x01");
    let length = u16::try_from(message.len()).unwrap_or(0).saturating_add(8);
    // Its checksum may be left out.
    let header: Vec<u8> = [FROM, 53, length, 0].into_iter().flat_map(u16::to_be_bytes).collect();
    ipv4(UDP, GATEWAY, &[header, message].concat())
}

fn syn(destination: Ipv4Addr, port: u16) -> Vec<u8> {
    let mut segment: Vec<u8> = [FROM, port].into_iter().flat_map(u16::to_be_bytes).collect();
    // Sequence, acknowledgement, 20 bytes of header, SYN, window, checksum, urgent pointer.
    segment.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0]);
    let pseudo = [&GUEST.octets()[..], &destination.octets(), &[0, TCP, 0, 20], &segment].concat();
    segment.splice(16..18, checksum(&pseudo));
    ipv4(TCP, destination, &segment)
}

fn ipv4(protocol: u8, destination: Ipv4Addr, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).unwrap_or(0).saturating_add(20).to_be_bytes();
    let mut header = vec![0x45, 0, length[0], length[1], 0, 0, 0, 0, 64, protocol, 0, 0];
    header.extend_from_slice(&GUEST.octets());
    header.extend_from_slice(&destination.octets());
    let sum = checksum(&header);
    header.splice(10..12, sum);
    [&header, payload].concat()
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let word = |pair: &[u8]| {
        u32::from(pair.first().copied().unwrap_or(0)).wrapping_shl(8) | u32::from(pair.get(1).copied().unwrap_or(0))
    };
    let mut sum = bytes.chunks(2).map(word).fold(0, u32::wrapping_add);
    while sum > 0xffff {
        sum = (sum & 0xffff).wrapping_add(sum.wrapping_shr(16));
    }
    (!u16::try_from(sum).unwrap_or(0)).to_be_bytes()
}
