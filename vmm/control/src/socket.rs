//! Packets with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Most bytes of a message: a start request with every limit reached is under half of it.
pub const MAX_MESSAGE: usize = 64 << 10;
/// Most descriptors of a message: the kernel's `SCM_MAX_FD`.
pub const MAX_DESCRIPTORS: usize = 253;

/// What can go wrong on the control socket.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The socket failed.
    #[error("control socket: {0}")]
    Io(#[from] io::Error),
    /// The other side is gone.
    #[error("control socket: the other side closed it")]
    Closed,
    /// A message that is not one of ours.
    #[error("control socket: not a message: {0}")]
    Malformed(#[from] serde_json::Error),
    /// A message over the limit.
    #[error("control socket: a message of over {MAX_MESSAGE} bytes")]
    TooLong,
    /// More descriptors than a message may carry.
    #[error("control socket: a message with over {MAX_DESCRIPTORS} descriptors")]
    TooManyDescriptors,
}

/// One end of a control socket.
#[derive(Debug)]
pub struct ControlSocket(OwnedFd);

impl ControlSocket {
    /// Both ends of a new control socket, close-on-exec.
    pub fn pair() -> Result<(Self, Self), ControlError> {
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(io::Error::from)?;
        Ok((Self(a), Self(b)))
    }

    /// Takes an end that was inherited.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Sends one message with its descriptors.
    pub fn send<M: Serialize>(&self, message: &M, descriptors: &[BorrowedFd<'_>]) -> Result<(), ControlError> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MAX_MESSAGE {
            return Err(ControlError::TooLong);
        }
        if descriptors.len() > MAX_DESCRIPTORS {
            return Err(ControlError::TooManyDescriptors);
        }
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(ControlError::TooManyDescriptors);
        }
        loop {
            match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Err(ControlError::Closed),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// Waits for one message and its descriptors, which are close-on-exec.
    pub fn receive<M: DeserializeOwned>(&self) -> Result<(M, Vec<OwnedFd>), ControlError> {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                // A reset is told once, when the other side closed without reading all of ours; what it had sent before
                // is still there, and after it the end.
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNRESET) => {}
                other => break other.map_err(io::Error::from)?,
            }
        };
        let descriptors: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(ControlError::TooManyDescriptors);
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(ControlError::TooLong);
        }
        if received.bytes == 0 {
            return Err(ControlError::Closed);
        }
        let message = serde_json::from_slice(bytes.get(..received.bytes).unwrap_or_default())?;
        Ok((message, descriptors))
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockStats, Config, Event, ExitCounts, Mark, NetStats, Request, Restore, Saved, Stats, StopReason};

    #[test]
    fn a_message_arrives_with_its_descriptors() {
        let (a, b) = ControlSocket::pair().unwrap();
        let (end, _other) = ControlSocket::pair().unwrap();
        a.send(&Request::Connect { port: 7 }, &[end.as_fd(), end.as_fd()]).unwrap();
        let (message, descriptors) = b.receive::<Request>().unwrap();
        assert_eq!(message, Request::Connect { port: 7 });
        assert_eq!(descriptors.len(), 2);
    }

    #[test]
    fn every_event_survives_the_way() {
        let (a, b) = ControlSocket::pair().unwrap();
        let exits = ExitCounts { total: 7, ..ExitCounts::default() };
        let stats = Stats {
            exits,
            marks: vec![Mark { mark: 1, exits, micros: 5 }],
            blocks: vec![BlockStats::default()],
            console_dropped: 0,
            net: NetStats::default(),
        };
        for event in [
            Event::Running,
            Event::Refused { error: "memory".into() },
            Event::Paused,
            Event::Resumed,
            Event::Saved(Saved { state_bytes: 5, memory_bytes: 7 }),
            Event::SaveFailed { error: "memory".into() },
            Event::DiskFull { disk: 1 },
            Event::Stats(stats.clone()),
            Event::Stopped { reason: StopReason::Reset { by: "acpi".into() }, stats },
        ] {
            a.send(&event, &[]).unwrap();
            assert_eq!(b.receive::<Event>().unwrap().0, event);
        }
    }

    #[test]
    fn every_request_of_a_save_and_restore_survives_the_way() {
        let (a, b) = ControlSocket::pair().unwrap();
        let config = Config {
            vcpus: 4,
            memory: 1 << 30,
            cmdline: String::new(),
            initrds: 0,
            disks: Vec::new(),
            console: true,
            net: None,
        };
        let restore = Request::Restore(Restore { config, memory_files: 1 });
        for request in [Request::Pause, Request::Save, Request::Resume, restore] {
            a.send(&request, &[]).unwrap();
            assert_eq!(b.receive::<Request>().unwrap().0, request);
        }
    }

    #[test]
    fn the_end_of_the_other_side_is_seen() {
        let (a, b) = ControlSocket::pair().unwrap();
        drop(a);
        assert!(matches!(b.receive::<Event>(), Err(ControlError::Closed)));
        assert!(matches!(b.send(&Event::Running, &[]), Err(ControlError::Closed)));
    }

    #[test]
    fn last_words_are_heard_though_ours_were_not_read() {
        let (a, b) = ControlSocket::pair().unwrap();
        b.send(&Request::Stop, &[]).unwrap();
        a.send(&Event::Running, &[]).unwrap();
        drop(a);
        assert_eq!(b.receive::<Event>().unwrap().0, Event::Running);
        assert!(matches!(b.receive::<Event>(), Err(ControlError::Closed)));
    }

    #[test]
    fn what_is_not_a_message_is_refused() {
        let (a, b) = ControlSocket::pair().unwrap();
        a.send(&serde_json::json!({"event": "running", "more": 1}), &[]).unwrap();
        assert!(matches!(b.receive::<Request>(), Err(ControlError::Malformed(_))));
        a.send(&"x".repeat(MAX_MESSAGE - 2), &[]).unwrap();
        assert!(matches!(b.receive::<Request>(), Err(ControlError::Malformed(_))));
        assert!(matches!(a.send(&"x".repeat(MAX_MESSAGE), &[]), Err(ControlError::TooLong)));
    }
}
