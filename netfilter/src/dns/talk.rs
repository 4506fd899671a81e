//! DNS over TCP: the guest may ask any server it likes, and is answered here.

use std::time::Duration;

use netfilter_control::Policy;
use smoltcp::iface::SocketHandle;
use smoltcp::socket::tcp::State;

use super::responder;
use crate::bucket::Bucket;
use crate::log::Log;
use crate::names::Names;
use crate::stack::Stack;

/// Most such connections.
pub const MAX_TALKS: usize = 16;
/// How long one may last.
const LIFE: Duration = Duration::from_secs(30);
/// Longest question.
const MAX_QUESTION: usize = 1024;

/// One connection.
#[derive(Debug)]
pub struct Talk {
    /// Its socket.
    pub handle: SocketHandle,
    since: Duration,
}

/// What answering needs.
#[derive(Debug)]
pub struct Answers<'a> {
    /// The policy.
    pub policy: &'a Policy,
    /// The names.
    pub names: &'a mut Names,
    /// The log.
    pub log: &'a mut Log,
    /// How many questions may be asked.
    pub questions: &'a mut Bucket,
}

impl Talk {
    /// A connection that begins.
    pub fn new(handle: SocketHandle, now: Duration) -> Self {
        Self { handle, since: now }
    }

    /// When it ends at the latest.
    pub fn due(&self) -> Duration {
        self.since.saturating_add(LIFE)
    }

    /// Answers what was asked. `false` when the connection is over.
    pub fn step(&mut self, stack: &mut Stack, answers: &mut Answers<'_>, now: Duration) -> bool {
        let socket = stack.socket(self.handle);
        if matches!(socket.state(), State::Closed | State::TimeWait | State::Listen) {
            return false;
        }
        if now >= self.due() {
            socket.abort();
            return false;
        }
        // An answer has at most 512 bytes; without room for one, the question waits.
        while socket.send_capacity().saturating_sub(socket.send_queue()) > 1024 {
            let mut buffer = [0; MAX_QUESTION];
            let mut prefix = [0; 2];
            if socket.peek_slice(&mut prefix) != Ok(2) {
                break;
            }
            let length = usize::from(u16::from_be_bytes(prefix));
            let whole = length.saturating_add(2);
            if length == 0 || whole > MAX_QUESTION {
                socket.abort();
                return false;
            }
            if socket.recv_queue() < whole {
                break;
            }
            let taken = socket.recv_slice(buffer.get_mut(..whole).unwrap_or_default());
            if taken != Ok(whole) {
                break;
            }
            let message = buffer.get(2..whole).unwrap_or_default();
            if !answers.questions.take(now) {
                socket.abort();
                return false;
            }
            let reply = responder::answer(message, answers.policy, answers.names, answers.log, now);
            if let Some(reply) = reply {
                let length = u16::try_from(reply.len()).unwrap_or(0).to_be_bytes();
                let _ = socket.send_slice(&[&length[..], &reply].concat());
            }
        }
        if socket.state() == State::CloseWait && socket.recv_queue() < 2 {
            socket.close();
        }
        true
    }
}
