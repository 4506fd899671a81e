//! What the machine reaches: whether a name resolves, and who answers at some addresses. The host has machines that were allowed
//! nothing look, to see that they reach nothing.

use crate::link::GATEWAY;
use crate::message::{Answered, Reached};
use std::{
    io::{self, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream, UdpSocket},
    time::Duration,
};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often a question is asked. The link loses nothing but what is too much.
const TRIES: usize = 3;

/// Looks, and says what it found.
pub(super) fn look(name: &str, addresses: &[SocketAddrV4]) -> io::Result<()> {
    let name = ask(name)?;
    let connects = |address: &SocketAddrV4| TcpStream::connect_timeout(&(*address).into(), PATIENCE).is_ok();
    let connected = addresses.iter().copied().filter(connects).collect();
    io::stdout().write_all(&serde_json::to_vec(&Reached { name, connected })?)
}

/// Asks the machine's name server for a name's addresses.
fn ask(name: &str) -> io::Result<Option<Answered>> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect((GATEWAY, 53))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let question = question(name);
    for _ in 0..TRIES {
        socket.send(&question)?;
        let mut answer = [0; 512];
        match socket.recv(&mut answer) {
            Ok(count) => return Ok(answered(answer.get(..count).unwrap_or_default())),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// A question for A records (RFC 1035, 4.1).
fn question(name: &str) -> Vec<u8> {
    let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        message.push(u8::try_from(label.len()).unwrap_or(u8::MAX));
        message.extend_from_slice(label.as_bytes());
    }
    message.extend_from_slice(&[0, 0, 1, 0, 1]);
    message
}

/// The code of an answer, and how many records it has.
fn answered(message: &[u8]) -> Option<Answered> {
    let [_, _, _, flags, _, _, high, low, ..] = message else { return None };
    Some(Answered { code: flags & 15, records: u16::from_be_bytes([*high, *low]) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read() {
        assert_eq!(question("a.example")[12..], *b"\x01a\x07example\0\0\x01\0\x01");
        let denied = [0, 7, 0x81, 0x83, 0, 1, 0, 0, 0, 0, 0, 0];
        assert_eq!(answered(&denied), Some(Answered { code: 3, records: 0 }));
        let found = [0, 7, 0x81, 0x80, 0, 1, 1, 2, 0, 0, 0, 0];
        assert_eq!(answered(&found), Some(Answered { code: 0, records: 258 }));
        assert_eq!(answered(&denied[..7]), None);
    }
}
