//! Asking an upstream HTTP proxy, which the host's owner set, for a destination (RFC 9110, 9.3.6).

use std::io;

use netfilter_control::quote;

use super::Dialled;
use crate::host::{Host, Token};

/// Most bytes of the proxy's answer.
const MAX_ANSWER: usize = 8 << 10;

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
    /// There is no tunnel.
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
                Err(error) => return Progress::Refused(format!("the proxy: {error}")),
            }
        }
        let mut buffer = [0; 1024];
        loop {
            match host.read(token, &mut buffer) {
                Ok(0) => return Progress::Refused("the proxy closed the connection".to_owned()),
                Ok(count) => self.answer.extend_from_slice(buffer.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Progress::Pending,
                Err(error) => return Progress::Refused(format!("the proxy: {error}")),
            }
            if let Some(at) = self.answer.windows(4).position(|window| window == b"\r\n\r\n") {
                let early = self.answer.split_off(at.saturating_add(4).min(self.answer.len()));
                let line = self.answer.split(|byte| *byte == b'\r').next().unwrap_or_default();
                let opened = [&b"HTTP/1.1 200"[..], b"HTTP/1.0 200"].iter().any(|prefix| line.starts_with(prefix));
                return if opened { Progress::Open(early) } else { Progress::Refused(quote(line)) };
            }
            if self.answer.len() > MAX_ANSWER {
                return Progress::Refused("the proxy's answer does not end".to_owned());
            }
        }
    }
}
