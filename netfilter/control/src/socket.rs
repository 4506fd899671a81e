//! Packets with descriptors, that never block.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, send, sendmsg, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Most bytes of a message. Policies, which are longer, come in files.
pub const MAX_MESSAGE: usize = 16 << 10;
/// Most descriptors of a message.
pub const MAX_DESCRIPTORS: usize = 4;

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
    /// A message over the limit, or with too many descriptors.
    #[error("control socket: a message of over {MAX_MESSAGE} bytes or {MAX_DESCRIPTORS} descriptors")]
    TooLong,
}

/// One end of a control socket. It is waited for with poll(2) and the like.
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

    /// Sends one message with its descriptors. `false`, and nothing is sent, if there is no room for it now.
    pub fn send<M: Serialize>(&self, message: &M, descriptors: &[BorrowedFd<'_>]) -> Result<bool, ControlError> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MAX_MESSAGE || descriptors.len() > MAX_DESCRIPTORS {
            return Err(ControlError::TooLong);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(ControlError::TooLong);
        }
        loop {
            // The filter never has a descriptor to send, and its jail lets it send none.
            let sent = if descriptors.is_empty() {
                send(&self.0, &bytes, flags)
            } else {
                sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut ancillary, flags)
            };
            match sent {
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ControlError::Closed),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// Takes one message and its descriptors, which are close-on-exec. `None` if there is none now.
    pub fn receive<M: DeserializeOwned>(&self) -> Result<Option<(M, Vec<OwnedFd>)>, ControlError> {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = loop {
            match recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
                // A reset is told once, when the other side closed without reading all of ours; what it had sent before
                // is still there, and after it the end.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                Err(Errno::AGAIN) => return Ok(None),
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
        if received.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) {
            return Err(ControlError::TooLong);
        }
        if received.bytes == 0 {
            return Err(ControlError::Closed);
        }
        let message = serde_json::from_slice(bytes.get(..received.bytes).unwrap_or_default())?;
        Ok(Some((message, descriptors)))
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
    use crate::event::Counters;
    use crate::message::{Event, Request};

    #[test]
    fn messages_arrive_whole_and_with_their_descriptors() {
        let (ours, theirs) = ControlSocket::pair().unwrap();
        assert!(ours.receive::<Event>().unwrap().is_none());
        assert!(theirs.send(&Request::Save, &[ours.as_fd()]).unwrap());
        let (request, descriptors) = ours.receive::<Request>().unwrap().unwrap();
        assert_eq!((request, descriptors.len()), (Request::Save, 1));
        assert!(ours.send(&Event::Stats(Counters::default()), &[]).unwrap());
        assert!(theirs.receive::<Event>().unwrap().is_some());
        drop(theirs);
        assert!(matches!(ours.receive::<Request>(), Err(ControlError::Closed)));
        assert!(matches!(ours.send(&Event::Running, &[]), Err(ControlError::Closed)));
    }

    #[test]
    fn a_reader_that_does_not_read_is_no_obstacle() {
        let (ours, theirs) = ControlSocket::pair().unwrap();
        while ours.send(&Event::Running, &[]).unwrap() {}
        assert!(theirs.receive::<Event>().unwrap().is_some());
        assert!(ours.send(&Event::Running, &[]).unwrap());
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let (ours, theirs) = ControlSocket::pair().unwrap();
        theirs.send(&"hello", &[]).unwrap();
        assert!(matches!(ours.receive::<Request>(), Err(ControlError::Malformed(_))));
        assert!(matches!(theirs.send(&"x".repeat(MAX_MESSAGE), &[]), Err(ControlError::TooLong)));
    }
}
