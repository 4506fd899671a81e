//! The host's side of the device: connected sockets, and one epoll descriptor that stands for all.
//!
//! Sockets are registered once, edge-triggered; what an edge said is remembered in the connection until
//! a call would block. So a socket that nobody can serve for want of credit or of buffers costs no
//! wake-up, and no edge is lost when buffers come later.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{Shutdown, shutdown};
use rustix::time::Timespec;

use super::connection::HostShutdown;
use super::muxer::ConnectionId;

/// Events taken at a time. If there are more, the descriptor stays readable.
const BATCH: usize = 64;

/// Marks the eventfd among the events; host ports are 32 bits wide.
const WAKE: u64 = u64::MAX;

/// What happened on a socket.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostEvent {
    pub(super) id: ConnectionId,
    pub(super) readable: bool,
    pub(super) writable: bool,
    pub(super) hung_up: bool,
}

/// All host sockets of a device.
#[derive(Debug)]
pub(super) struct Poll {
    epoll: Arc<OwnedFd>,
    wake: OwnedFd,
}

impl Poll {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // Edge-triggered: each write wakes once, and nobody has to read.
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        Ok(Self { epoll: Arc::new(epoll), wake })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Makes the descriptor readable.
    pub(super) fn wake(&self) {
        // It can only fail when 2^64 wake-ups were never read, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Makes a connected socket ready to be used for connection `id`.
    pub(super) fn prepare(&self, socket: OwnedFd) -> io::Result<HostSocket> {
        fcntl_setfl(&socket, fcntl_getfl(&socket)? | OFlags::NONBLOCK)?;
        Ok(HostSocket { socket, epoll: Arc::clone(&self.epoll) })
    }

    /// Starts to watch a socket.
    pub(super) fn watch(&self, socket: &HostSocket, id: ConnectionId) -> io::Result<()> {
        use epoll::EventFlags;
        epoll::add(
            &self.epoll,
            &socket.socket,
            epoll::EventData::new_u64(id.0.into()),
            EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET,
        )?;
        Ok(())
    }

    /// Takes a batch of events, without waiting.
    pub(super) fn take(&self) -> io::Result<Vec<HostEvent>> {
        use epoll::EventFlags;
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut ready = Vec::with_capacity(BATCH);
        match epoll::wait(&self.epoll, spare_capacity(&mut ready), Some(&now)) {
            // A signal; the events are still there.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let sockets = ready.iter().filter_map(|event| {
            let (flags, data) = (event.flags, event.data);
            Some(HostEvent {
                id: ConnectionId(u32::try_from(data.u64()).ok()?),
                readable: flags.intersects(EventFlags::IN | EventFlags::RDHUP),
                writable: flags.contains(EventFlags::OUT),
                hung_up: flags.intersects(EventFlags::HUP | EventFlags::ERR),
            })
        });
        Ok(sockets.collect())
    }
}

/// The host's end of a connection. Dropping it ends the stream with `shutdown` before the descriptor is
/// closed, because a process forked for a snapshot holds a copy that would keep the stream alive; for
/// the same reason it leaves the epoll set by name.
#[derive(Debug)]
pub(super) struct HostSocket {
    socket: OwnedFd,
    epoll: Arc<OwnedFd>,
}

impl HostSocket {
    pub(super) fn shut(&self, what: HostShutdown) {
        let how = match what {
            HostShutdown::Read => Shutdown::Read,
            HostShutdown::Write => Shutdown::Write,
        };
        // It fails only if the other end is gone, and then a hang-up tells.
        let _ = shutdown(&self.socket, how);
    }
}

impl AsFd for HostSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for HostSocket {
    fn drop(&mut self) {
        // Neither can fail in a way that matters: the socket is about to be closed.
        let _ = epoll::delete(&self.epoll, &self.socket);
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}
