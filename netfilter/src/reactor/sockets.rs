//! The host's sockets, none of which ever blocks.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType, connect, getpeername, send, shutdown, socket_with,
    sockopt,
};

use super::routes::Routes;
use crate::host::{Host, Route, Token};

/// Silence after which the host's kernel asks whether the other side still is there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// The sockets, and the epoll instance that tells of them once for each change.
#[derive(Debug)]
pub(super) struct Sockets {
    epoll: OwnedFd,
    routes: Routes,
    open: HashMap<u64, OwnedFd>,
    next: u64,
    /// Connections that were just reached, and are as the kernel made them.
    fresh: Vec<Token>,
}

impl Sockets {
    /// No sockets yet. Numbers begin at `first`; what is below is the caller's to use with the same epoll instance.
    pub(super) fn new(epoll: OwnedFd, routes: Routes, first: u64) -> Self {
        Self { epoll, routes, open: HashMap::new(), next: first, fresh: Vec::new() }
    }

    /// The epoll instance.
    pub(super) fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn socket(&mut self, address: SocketAddr, kind: SocketType) -> io::Result<Token> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        match connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let token = self.next;
        self.next = self.next.wrapping_add(1);
        let interest =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        // After connect: a socket that is not connecting counts as hung up.
        epoll::add(&self.epoll, &socket, epoll::EventData::new_u64(token), interest)?;
        self.open.insert(token, socket);
        Ok(Token(token))
    }

    /// Has new connections send what they are given at once, and notice when the other side is gone. The guest, which waits for
    /// its answer, need not wait for this: there is nothing to send yet.
    pub(super) fn tune(&mut self) {
        for token in std::mem::take(&mut self.fresh) {
            let Ok(socket) = self.get(token) else { continue };
            // A socket of this kind takes these, whatever its state.
            let _ = sockopt::set_tcp_nodelay(socket, true);
            let _ = sockopt::set_socket_keepalive(socket, true);
            let _ = sockopt::set_tcp_keepidle(socket, KEEPALIVE);
        }
    }

    fn get(&self, token: Token) -> io::Result<&OwnedFd> {
        self.open.get(&token.0).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Host for Sockets {
    fn connect(&mut self, address: SocketAddr) -> io::Result<Token> {
        self.socket(address, SocketType::STREAM)
    }

    fn connected(&mut self, token: Token) -> io::Result<()> {
        let socket = self.get(token)?;
        sockopt::socket_error(socket)??;
        match getpeername(socket) {
            Ok(_) => {
                self.fresh.push(token);
                Ok(())
            }
            Err(Errno::NOTCONN) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(error.into()),
        }
    }

    fn datagrams(&mut self, address: SocketAddr) -> io::Result<Token> {
        self.socket(address, SocketType::DGRAM)
    }

    fn read(&mut self, token: Token, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(self.get(token)?, &mut *buffer) {
                Err(Errno::INTR) => {}
                other => return Ok(other?),
            }
        }
    }

    fn write(&mut self, token: Token, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match send(self.get(token)?, bytes, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                other => return Ok(other?),
            }
        }
    }

    fn finish(&mut self, token: Token) {
        if let Ok(socket) = self.get(token) {
            // It may have been reset in between, and then there is nothing to finish.
            let _ = shutdown(socket, Shutdown::Write);
        }
    }

    fn close(&mut self, token: Token, reset: bool) {
        if let Some(socket) = self.open.remove(&token.0)
            && reset
        {
            let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
        }
    }

    fn route(&mut self, address: IpAddr) -> io::Result<Route> {
        self.routes.route(address)
    }

    fn random(&mut self) -> u64 {
        random()
    }
}

/// 64 random bits of the kernel's.
pub(super) fn random() -> u64 {
    let mut bytes = [0; 8];
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = bytes.get_mut(filled..).unwrap_or_default();
        match rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled = filled.saturating_add(count),
            Err(Errno::INTR) => {}
            // getrandom(2) without flags has no other failure on a kernel that has it.
            Err(_) => std::process::abort(),
        }
    }
    u64::from_ne_bytes(bytes)
}
