//! What a jailer, and the process that it makes, tell the supervisor: packets on a socket. Its end without a failure means
//! that the target runs.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

macro_rules! steps {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal;)*) => {
        /// What was being done.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Step { $($(#[$doc])* $name = $number,)* }

        impl Step {
            fn from_number(number: u8) -> Option<Self> {
                match number { $($number => Some(Self::$name),)* _ => None }
            }

            /// In words.
            pub fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

steps! {
    /// Standard input, output and error, and what was handed over, have to be open.
    Descriptors = 1, "descriptors 0 to 6";
    /// No variable may reach the target, or the jailer.
    Environment = 2, "an empty environment";
    /// The arguments have to be a request.
    Arguments = 3, "its arguments";
    /// The program has to be a static executable: nothing else runs in an empty root.
    Program = 4, "a static program";
    /// The new process, in new namespaces and in its cgroup.
    Clone = 5, "clone3";
    /// The user and group that exist in the user namespace.
    Map = 6, "the map of users";
    /// Mounts of its own, that nothing outside sees.
    PrivateMounts = 7, "private mounts";
    /// The empty file system that becomes its root.
    EmptyRoot = 8, "an empty root";
    /// The old root goes away.
    Pivot = 9, "pivot_root";
    /// Limits.
    Limits = 10, "limits";
    /// Groups and user.
    Identity = 11, "user and groups";
    /// Capabilities, now and for ever.
    Capabilities = 12, "capabilities";
    /// Dies with its parent.
    Parent = 13, "a parent that lives";
    /// No program gives rights any more.
    NoNewPrivileges = 14, "no_new_privs";
    /// Landlock.
    Landlock = 15, "Landlock";
    /// The system calls of the target.
    Seccomp = 16, "seccomp";
    /// Becomes the target.
    Exec = 17, "execveat";
}

/// A packet.
#[derive(Debug)]
pub enum Report {
    /// The process exists.
    Started {
        /// Its id, where the jailer is.
        pid: i32,
        /// Itself.
        pidfd: OwnedFd,
    },
    /// A step failed, and with it the start.
    Failed {
        /// Which.
        step: Step,
        /// Why.
        error: Errno,
    },
}

const LENGTH: usize = 6;
const STARTED: u8 = 1;
const FAILED: u8 = 2;

/// Tells that the process exists.
pub fn send_started(socket: BorrowedFd<'_>, pid: i32, pidfd: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [pidfd];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(Errno::NOBUFS);
    }
    send(socket, STARTED, 0, pid, &mut ancillary)
}

/// Tells that a step failed. If nobody hears it, nobody waits for it.
pub fn send_failed(socket: BorrowedFd<'_>, step: Step, error: Errno) {
    let _ = send(socket, FAILED, step as u8, error.raw_os_error(), &mut SendAncillaryBuffer::default());
}

fn send(
    socket: BorrowedFd<'_>,
    kind: u8,
    step: u8,
    number: i32,
    ancillary: &mut SendAncillaryBuffer<'_, '_, '_>,
) -> Result<(), Errno> {
    let [a, b, c, d] = number.to_le_bytes();
    let bytes = [kind, step, a, b, c, d];
    rustix::net::sendmsg(socket, &[io::IoSlice::new(&bytes)], ancillary, SendFlags::NOSIGNAL).map(drop)
}

/// The next packet; nothing when there will be none.
pub fn receive(socket: impl AsFd) -> io::Result<Option<Report>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; LENGTH];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket.as_fd(), &mut [io::IoSliceMut::new(&mut bytes)], &mut ancillary, flags)
    })?;
    if received.bytes == 0 {
        return Ok(None);
    }
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptor: Option<OwnedFd> = descriptors.flatten().next();
    let [kind, step, number @ ..] = bytes;
    let number = i32::from_le_bytes(number);
    let nonsense = || io::Error::new(io::ErrorKind::InvalidData, "no report of a jailer");
    match (kind, descriptor) {
        (STARTED, Some(pidfd)) => Ok(Some(Report::Started { pid: number, pidfd })),
        (FAILED, None) => {
            let step = Step::from_number(step).ok_or_else(nonsense)?;
            Ok(Some(Report::Failed { step, error: Errno::from_raw_os_error(number) }))
        }
        _ => Err(nonsense()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn reports_arrive() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        send_started(theirs.as_fd(), 7, theirs.as_fd()).unwrap();
        assert!(matches!(receive(&ours).unwrap(), Some(Report::Started { pid: 7, .. })));
        send_failed(theirs.as_fd(), Step::Pivot, Errno::PERM);
        let report = receive(&ours).unwrap();
        assert!(matches!(report, Some(Report::Failed { step: Step::Pivot, error: Errno::PERM })), "{report:?}");
    }

    #[test]
    fn nonsense_is_an_error() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        for packet in [&[0; LENGTH][..], &[STARTED], &[FAILED, 200, 0, 0, 0, 0]] {
            theirs.send(packet).unwrap();
            assert!(receive(&ours).is_err(), "{packet:?}");
        }
    }
}
