//! What the fuzz targets share.

use std::io;
use std::net::{IpAddr, SocketAddr};

use netfilter::host::{Host, Route, Token};
use netfilter_control::Policy;
use netfilter_policy::Compiler;

/// A policy of some rules.
pub fn policy(rules: &str) -> Policy {
    let mut compiler = Compiler::default();
    compiler.rules("fuzz", rules).expect("the rules of a target are good");
    compiler.finish().expect("the rules of a target are good")
}

/// A world in which everything that is dialled accepts at once and echoes, and every name has the one address.
#[derive(Default)]
pub struct World {
    /// Everything that was dialled.
    pub dialled: Vec<SocketAddr>,
    /// Sockets that have news.
    pub ready: Vec<Token>,
    sockets: Vec<Socket>,
    /// What whoever is dialled says, in pieces of this size, in place of an echo.
    script: Option<(Vec<u8>, usize)>,
}

#[derive(Default)]
struct Socket {
    open: bool,
    datagrams: bool,
    unread: Vec<u8>,
    finished: bool,
}

/// The address of every name.
pub const ORIGIN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(93, 184, 216, 34));

impl World {
    /// A world in which whoever is dialled says this, a piece at a time.
    pub fn saying(script: &[u8], step: usize) -> Self {
        Self { script: Some((script.to_vec(), step)), ..Self::default() }
    }

    /// What was not read of a socket.
    pub fn unread(&mut self, token: Token) -> Vec<u8> {
        self.socket(token).map(|socket| socket.unread.clone()).unwrap_or_default()
    }

    fn socket(&mut self, token: Token) -> io::Result<&mut Socket> {
        let socket = self.sockets.get_mut(usize::try_from(token.0).unwrap()).filter(|socket| socket.open);
        socket.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn add(&mut self, socket: Socket) -> Token {
        self.sockets.push(socket);
        let token = Token(self.sockets.len() as u64 - 1);
        self.ready.push(token);
        token
    }
}

impl Host for World {
    fn connect(&mut self, address: SocketAddr) -> io::Result<Token> {
        self.dialled.push(address);
        let script = self.script.as_ref().map(|(script, _)| script.clone());
        let finished = script.is_some();
        Ok(self.add(Socket { open: true, finished, unread: script.unwrap_or_default(), ..Socket::default() }))
    }

    fn connected(&mut self, token: Token) -> io::Result<()> {
        self.socket(token).map(drop)
    }

    fn datagrams(&mut self, _: SocketAddr) -> io::Result<Token> {
        Ok(self.add(Socket { open: true, datagrams: true, ..Socket::default() }))
    }

    fn read(&mut self, token: Token, buffer: &mut [u8]) -> io::Result<usize> {
        let step = self.script.as_ref().map_or(usize::MAX, |(_, step)| *step);
        let socket = self.socket(token)?;
        let count = buffer.len().min(socket.unread.len()).min(step);
        if count == 0 {
            return if socket.finished { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        buffer[..count].copy_from_slice(&socket.unread[..count]);
        socket.unread.drain(..count);
        Ok(count)
    }

    fn write(&mut self, token: Token, bytes: &[u8]) -> io::Result<usize> {
        self.ready.push(token);
        if self.script.is_some() {
            return Ok(bytes.len());
        }
        let socket = self.socket(token)?;
        if socket.datagrams {
            // A question: the answer is one A record.
            let mut reply = bytes[..12].to_vec();
            reply[2..4].copy_from_slice(&[0x81, 0x80]);
            let end = 12 + bytes[12..].iter().position(|byte| *byte == 0).unwrap() + 5;
            let a = bytes[end - 3] == 1;
            reply[6..12].copy_from_slice(&[0, u8::from(a), 0, 0, 0, 0]);
            reply.extend_from_slice(&bytes[12..end]);
            if a {
                reply.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 93, 184, 216, 34]);
            }
            socket.unread = reply;
        } else {
            socket.unread.extend_from_slice(bytes);
        }
        Ok(bytes.len())
    }

    fn finish(&mut self, token: Token) {
        if let Ok(socket) = self.socket(token) {
            socket.finished = true;
            self.ready.push(token);
        }
    }

    fn close(&mut self, token: Token, _: bool) {
        if let Ok(socket) = self.socket(token) {
            socket.open = false;
        }
    }

    fn route(&mut self, _: IpAddr) -> io::Result<Route> {
        Ok(Route::Elsewhere)
    }

    fn random(&mut self) -> u64 {
        7
    }
}
