//! Asking an upstream HTTP proxy, which the host's owner set, for a destination (RFC 9110, 9.3.6).

use std::io;

use netfilter_control::quote;

use super::Dialled;
use crate::host::{Host, Token};

/// Most bytes of the proxy's answer.
const MAX_ANSWER: usize = 8 << 10;
/// What an answer begins with. What begins otherwise is not waited for.
const PROTOCOL: &[u8] = b"HTTP/1.";

/// A request for a tunnel.
#[derive(Debug)]
pub struct Handshake {
    unsent: Vec<u8>,
    answer: Vec<u8>,
}

/// How it goes.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// Not decided.
    Pending,
    /// The tunnel is open. The bytes came through it already.
    Open(Vec<u8>),
    /// There is no tunnel: what the proxy did instead, as the rest of a sentence.
    Refused(String),
}

impl Handshake {
    /// Asks for a destination.
    pub fn new(dialled: &Dialled, port: u16) -> Self {
        let target = format!("{dialled}:{port}");
        let unsent = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").into_bytes();
        Self { unsent, answer: Vec::new() }
    }

    /// Goes on as far as it can.
    pub fn step(&mut self, token: Token, host: &mut dyn Host) -> Progress {
        while !self.unsent.is_empty() {
            match host.write(token, &self.unsent) {
                Ok(count) => drop(self.unsent.drain(..count.min(self.unsent.len()))),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Progress::Pending,
                Err(error) => return Progress::Refused(format!("took no request: {error}")),
            }
        }
        let mut buffer = [0; 1024];
        loop {
            match host.read(token, &mut buffer) {
                Ok(0) => return Progress::Refused("closed the connection without an answer".to_owned()),
                Ok(count) => self.answer.extend_from_slice(buffer.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Progress::Pending,
                Err(error) => return Progress::Refused(format!("gave no answer: {error}")),
            }
            let compared = self.answer.len().min(PROTOCOL.len());
            if self.answer.get(..compared) != PROTOCOL.get(..compared) {
                return Progress::Refused(format!("does not speak HTTP/1: it said {}", quote(&self.answer)));
            }
            if let Some(at) = self.answer.windows(4).position(|window| window == b"\r\n\r\n") {
                let early = self.answer.split_off(at.saturating_add(4).min(self.answer.len()));
                let line = self.answer.split(|byte| *byte == b'\r').next().unwrap_or_default();
                return match status(line) {
                    // Whatever it says of a length, what follows such an answer is the tunnel's.
                    Some([b'2', ..]) => Progress::Open(early),
                    Some(b"407") => Progress::Refused("wants a login, and none can be given to it".to_owned()),
                    Some(_) => Progress::Refused(format!("refused: it said {}", quote(line))),
                    None => Progress::Refused(format!("does not speak HTTP/1: it said {}", quote(line))),
                };
            }
            if self.answer.len() > MAX_ANSWER {
                return Progress::Refused(format!("gave an answer that does not end within {MAX_ANSWER} bytes"));
            }
        }
    }
}

/// The three digits of a status line (RFC 9112, 4).
fn status(line: &[u8]) -> Option<&[u8; 3]> {
    let (minor, rest) = line.strip_prefix(PROTOCOL)?.split_first()?;
    let (code, rest) = rest.strip_prefix(b" ")?.split_first_chunk::<3>()?;
    let digits = minor.is_ascii_digit() && code.iter().all(u8::is_ascii_digit);
    (digits && (rest.is_empty() || rest.starts_with(b" "))).then_some(code)
}
