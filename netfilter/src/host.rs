//! What the engine asks of the world: sockets, randomness, and which addresses are the host's own.

use std::io;
use std::net::{IpAddr, SocketAddr};

/// A host socket, for as long as it is not closed. Numbers are not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// What an address is to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Another machine's.
    Elsewhere,
    /// The host's own, or one that it would broadcast to.
    Own,
    /// The router that the host itself uses.
    Router,
    /// Nowhere that the host knows of.
    Nowhere,
}

/// The world. Nothing in it blocks: what cannot be done now is `WouldBlock`, and the engine is told when it can.
pub trait Host {
    /// Begins to connect. The token is told to be ready when it is decided.
    fn connect(&mut self, address: SocketAddr) -> io::Result<Token>;
    /// How connecting ended, once the token was ready.
    fn connected(&mut self, token: Token) -> io::Result<()>;
    /// A datagram socket that sends to and receives from this address alone.
    fn datagrams(&mut self, address: SocketAddr) -> io::Result<Token>;
    /// Reads. 0 is the end.
    fn read(&mut self, token: Token, buffer: &mut [u8]) -> io::Result<usize>;
    /// Writes, at least one byte.
    fn write(&mut self, token: Token, bytes: &[u8]) -> io::Result<usize>;
    /// Says that no more will be written.
    fn finish(&mut self, token: Token);
    /// Closes, with a reset if `reset` is set.
    fn close(&mut self, token: Token, reset: bool);
    /// What an address is to the host, now.
    fn route(&mut self, address: IpAddr) -> io::Result<Route>;
    /// Random bits.
    fn random(&mut self) -> u64;
}
