//! Reaching one of several addresses: one after the other, the next one early if the first is slow (RFC 8305, lighter).
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::host::{Host, Token};

/// How long all of it may take.
pub const BUDGET: Duration = Duration::from_secs(10);
/// How long an address is waited for before the next one is tried beside it.
const STAGGER: Duration = Duration::from_millis(250);
/// Most that are tried at once.
const MAX_AT_ONCE: usize = 3;

/// Addresses that are being dialled. All of them were vetted.
#[derive(Debug)]
pub struct Dial {
    waiting: VecDeque<SocketAddr>,
    trying: Vec<(Token, SocketAddr)>,
    next: Duration,
    deadline: Duration,
    error: Option<io::Error>,
}

/// How dialling goes.
#[derive(Debug)]
pub enum Progress {
    /// Nothing is decided.
    Pending,
    /// This one was reached first.
    Reached(Token, SocketAddr),
    /// None was.
    Failed(io::Error),
}

impl Dial {
    /// Dials the first address at the next [`Self::step`].
    pub fn new(addresses: impl IntoIterator<Item = SocketAddr>, now: Duration) -> Self {
        let waiting = addresses.into_iter().collect();
        Self { waiting, trying: Vec::new(), next: now, deadline: now.saturating_add(BUDGET), error: None }
    }

    /// Whether a socket is one of these.
    pub fn owns(&self, token: Token) -> bool {
        self.trying.iter().any(|(trying, _)| *trying == token)
    }

    /// Goes on: `ready` is a socket whose connecting was decided, if there is one. New sockets are left in `opened`.
    pub fn step(
        &mut self,
        ready: Option<Token>,
        host: &mut dyn Host,
        now: Duration,
        opened: &mut Vec<Token>,
    ) -> Progress {
        if let Some(token) = ready
            && let Some(at) = self.trying.iter().position(|(trying, _)| *trying == token)
        {
            match host.connected(token) {
                Ok(()) => {
                    let (token, address) = self.trying.swap_remove(at);
                    self.cancel(host);
                    return Progress::Reached(token, address);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    self.trying.swap_remove(at);
                    host.close(token, false);
                    self.error = Some(error);
                    self.next = now;
                }
            }
        }
        while (now >= self.next || self.trying.is_empty()) && self.trying.len() < MAX_AT_ONCE && now < self.deadline {
            let Some(address) = self.waiting.pop_front() else { break };
            match host.connect(address) {
                Ok(token) => {
                    self.trying.push((token, address));
                    opened.push(token);
                    self.next = now.saturating_add(STAGGER);
                }
                Err(error) => self.error = Some(error),
            }
        }
        if now >= self.deadline {
            self.cancel(host);
            let late = || io::Error::new(io::ErrorKind::TimedOut, "nobody answered in time");
            return Progress::Failed(self.error.take().unwrap_or_else(late));
        }
        if self.trying.is_empty() && self.waiting.is_empty() {
            let none = || io::Error::new(io::ErrorKind::AddrNotAvailable, "there is no address to dial");
            return Progress::Failed(self.error.take().unwrap_or_else(none));
        }
        Progress::Pending
    }

    /// When [`Self::step`] has something to do of itself.
    pub fn due(&self) -> Duration {
        if self.waiting.is_empty() || self.trying.len() >= MAX_AT_ONCE { self.deadline } else { self.next }
    }

    /// Gives up.
    pub fn cancel(&mut self, host: &mut dyn Host) {
        for (token, _) in self.trying.drain(..) {
            host.close(token, true);
        }
    }
}
