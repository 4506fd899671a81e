//! Frames between a client and a supervisor: `docs/formats/supervisor-protocol.md`.
//!
//! A frame is one byte of kind, four bytes of length (little-endian) and the payload. Both ends run as
//! the same user, and still bound what they read: a length over [`MAX_PAYLOAD`] or an unknown kind ends
//! the connection.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::net::SocketAddrV4;

use netfilter_control::{MAX_POLICY, Policy};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vmm_control::Stats;

/// Most bytes of a payload: the VMM's longest message, and room for what is said beside it.
pub(crate) const MAX_PAYLOAD: usize = 128 << 10;
/// Most bytes of a request: the longest policy, likewise.
const MAX_REQUEST: usize = MAX_POLICY + (16 << 10);
/// The kind of a request.
const REQUEST: u8 = 0x01;
/// Most bytes of standard input that a client may have sent and the supervisor not passed on: the credit
/// with which a connection starts. [`Frame::StdinRoom`] gives back what was passed on.
pub(crate) const STDIN_WINDOW: usize = 256 << 10;

/// One frame.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Frame {
    /// Client: what it wants. First and once.
    Request(Request),
    /// Client: bytes for the command's standard input.
    Stdin(Vec<u8>),
    /// Client: the standard input has ended.
    StdinEof,
    /// Client: the terminal's new size.
    Resize(Size),
    /// Client: a signal for the command, by its number on Linux.
    Signal(u8),
    /// Client: what had to be done before the command is done; it may start.
    Go,
    /// Supervisor: the command was started.
    Started,
    /// Supervisor: bytes of the command's standard output, or of its terminal.
    Stdout(Vec<u8>),
    /// Supervisor: bytes of the command's standard error.
    Stderr(Vec<u8>),
    /// Supervisor: so many bytes of standard input were passed on.
    StdinRoom(u32),
    /// Supervisor: the answer to [`Request::Stats`]. The connection ends.
    Stats(Box<Stats>),
    /// Supervisor: the guest has booted, and the command waits for [`Frame::Go`].
    Ready,
    /// Supervisor: how far something long is.
    Progress(Stage),
    /// Supervisor: the end, after all output. The connection ends.
    Exit(Exit),
}

/// How far a save is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "stage", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Stage {
    /// Its memory is being written.
    Writing {
        /// Bytes that are.
        done: u64,
        /// Bytes that there are at most.
        total: u64,
    },
    /// What was written is being hashed.
    Hashing {
        /// Bytes that are.
        done: u64,
    },
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Request {
    /// Attach to the run's own command. Only on the connection that the supervisor was born with.
    Primary {
        /// The terminal's size, if the run has one.
        size: Option<Size>,
        /// Whether the command waits, once the guest has booted, for [`Frame::Go`].
        hold: bool,
        /// Whether the machine boots, also where one was saved that it could go on from.
        cold: bool,
    },
    /// Move files, or look for some.
    Copy(Copy),
    /// End the run.
    Stop {
        /// Whether the workload is asked to end and a disk that is kept written back; else it ends at once.
        orderly: bool,
        /// Why, for the record and for the run's client.
        why: String,
    },
    /// Run another command.
    Exec(Exec),
    /// Report the VMM's counters.
    Stats,
    /// Stop the machine and all that runs in it. The answer is an [`Exit`].
    Pause {
        /// Whether it is saved as a snapshot, and the run's processes end.
        save: bool,
        /// The snapshot's name.
        name: Option<String>,
    },
    /// Save the machine as a snapshot, while it goes on. Its id comes as standard output.
    Snapshot {
        /// The snapshot's name.
        name: Option<String>,
        /// Whether it stands still until its memory is written.
        stop: bool,
    },
    /// Have the guest look what it reaches. A [`guest::message::Reached`] comes as standard output.
    Reach {
        /// A name to resolve.
        name: String,
        /// Addresses to connect to.
        addresses: Vec<SocketAddrV4>,
    },
    /// Let a paused machine go on. The answer is an [`Exit`].
    Resume,
    /// Put a network policy in force. The answer is an [`Exit`].
    SetPolicy {
        /// The policy.
        policy: Policy,
    },
}

/// Another command in a running run. What is not said here is as in the run's spec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Exec {
    /// Command and arguments.
    pub(crate) command: Vec<String>,
    /// Variables over those of the run.
    pub(crate) env: Vec<String>,
    /// Working directory.
    pub(crate) workdir: Option<String>,
    /// User, as `-u` takes it.
    pub(crate) user: Option<String>,
    /// Whether standard input follows.
    pub(crate) stdin: bool,
    /// A terminal of this size.
    pub(crate) tty: Option<Size>,
    /// The terminal's type.
    pub(crate) term: String,
}

/// Files on their way, as tar archives on the streams. As root in the guest unless a user is named.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "copy", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Copy {
    /// What comes as standard input is unpacked below a directory.
    In {
        /// Which; it is made if it is missing.
        directory: String,
    },
    /// A file, or a tree, comes as standard output.
    Out {
        /// Which; what ends in `/.` comes without its own name.
        path: String,
    },
    /// A [`guest::message::FileStat`] comes as standard output.
    Stat {
        /// Of what.
        path: String,
        /// Whether a link stands for what it leads to.
        follow: bool,
        /// Who asks; the run's user is named by an empty name.
        user: Option<String>,
    },
}

/// A terminal's size in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Size {
    /// Lines.
    pub(crate) rows: u16,
    /// Characters a line.
    pub(crate) columns: u16,
}

/// How it ended.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Exit {
    /// The exit status for the client.
    pub(crate) code: u8,
    /// What to tell the user, when it was not simply the command that ended.
    pub(crate) error: Option<String>,
    /// Why a run ended, as its state has it.
    #[serde(default)]
    pub(crate) reason: Option<String>,
    /// What else to tell the user.
    #[serde(default)]
    pub(crate) notes: Vec<String>,
    /// The VMM's last counters, for the run's own command.
    pub(crate) stats: Option<Box<Stats>>,
}

/// What can go wrong on a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    /// The socket failed.
    #[error("supervisor connection: {0}")]
    Io(#[from] io::Error),
    /// A payload over the limit.
    #[error("supervisor connection: a frame of {0} bytes, which is over the limit")]
    TooLong(usize),
    /// A kind that is none, or has the wrong length.
    #[error("supervisor connection: a frame of kind {kind} with {length} bytes")]
    Malformed {
        /// The kind's byte.
        kind: u8,
        /// The payload's length.
        length: usize,
    },
    /// A payload that is not the JSON it should be.
    #[error("supervisor connection: {0}")]
    Json(#[from] serde_json::Error),
}

impl Frame {
    /// The frame's kind byte and payload.
    fn encode(&self) -> Result<(u8, Cow<'_, [u8]>), FrameError> {
        Ok(match self {
            Self::Request(request) => (REQUEST, serde_json::to_vec(request)?.into()),
            Self::Stdin(bytes) => (0x02, bytes.into()),
            Self::StdinEof => (0x03, Cow::default()),
            Self::Resize(size) => {
                let ([a, b], [c, d]) = (size.rows.to_le_bytes(), size.columns.to_le_bytes());
                (0x04, vec![a, b, c, d].into())
            }
            Self::Signal(number) => (0x05, vec![*number].into()),
            Self::Go => (0x06, Cow::default()),
            Self::Started => (0x81, Cow::default()),
            Self::Stdout(bytes) => (0x82, bytes.into()),
            Self::Stderr(bytes) => (0x83, bytes.into()),
            Self::StdinRoom(bytes) => (0x84, bytes.to_le_bytes().to_vec().into()),
            Self::Stats(stats) => (0x85, serde_json::to_vec(stats)?.into()),
            Self::Exit(exit) => (0x86, serde_json::to_vec(exit)?.into()),
            Self::Ready => (0x87, Cow::default()),
            Self::Progress(stage) => (0x88, serde_json::to_vec(stage)?.into()),
        })
    }

    /// Reads a payload of its kind.
    fn decode(kind: u8, payload: Vec<u8>) -> Result<Self, FrameError> {
        fn json<T: DeserializeOwned>(payload: &[u8]) -> Result<T, FrameError> {
            Ok(serde_json::from_slice(payload)?)
        }
        match (kind, payload.as_slice()) {
            (REQUEST, json_bytes) => Ok(Self::Request(json(json_bytes)?)),
            (0x02, [_, ..]) => Ok(Self::Stdin(payload)),
            (0x03, []) => Ok(Self::StdinEof),
            (0x04, &[a, b, c, d]) => {
                Ok(Self::Resize(Size { rows: u16::from_le_bytes([a, b]), columns: u16::from_le_bytes([c, d]) }))
            }
            (0x05, &[number @ 1..=64]) => Ok(Self::Signal(number)),
            (0x06, []) => Ok(Self::Go),
            (0x81, []) => Ok(Self::Started),
            (0x82, [_, ..]) => Ok(Self::Stdout(payload)),
            (0x83, [_, ..]) => Ok(Self::Stderr(payload)),
            (0x84, &[a, b, c, d]) => Ok(Self::StdinRoom(u32::from_le_bytes([a, b, c, d]))),
            (0x85, json_bytes) => Ok(Self::Stats(json(json_bytes)?)),
            (0x86, json_bytes) => Ok(Self::Exit(json(json_bytes)?)),
            (0x87, []) => Ok(Self::Ready),
            (0x88, json_bytes) => Ok(Self::Progress(json(json_bytes)?)),
            (_, other) => Err(FrameError::Malformed { kind, length: other.len() }),
        }
    }

    /// Writes the frame, with one `write` where the socket takes it.
    pub(crate) fn write(&self, to: &mut impl Write) -> Result<(), FrameError> {
        let (kind, payload) = self.encode()?;
        let length = u32::try_from(payload.len()).ok().filter(|_| payload.len() <= limit(kind));
        let length = length.ok_or(FrameError::TooLong(payload.len()))?;
        let mut bytes = Vec::with_capacity(payload.len().saturating_add(5));
        bytes.push(kind);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&payload);
        to.write_all(&bytes)?;
        Ok(())
    }

    /// Reads one frame; nothing at the end of the connection.
    pub(crate) fn read(from: &mut impl Read) -> Result<Option<Self>, FrameError> {
        let mut kind = [0];
        loop {
            match from.read(&mut kind) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        let mut length = [0; 4];
        from.read_exact(&mut length)?;
        let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
        let [kind] = kind;
        if length > limit(kind) {
            return Err(FrameError::TooLong(length));
        }
        let mut payload = vec![0; length];
        from.read_exact(&mut payload)?;
        Self::decode(kind, payload).map(Some)
    }
}

/// Most bytes of a payload of this kind.
fn limit(kind: u8) -> usize {
    if kind == REQUEST { MAX_REQUEST } else { MAX_PAYLOAD }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn some_of_each() -> Vec<Frame> {
        let size = Size { rows: 24, columns: 80 };
        let exec = Exec {
            command: vec!["true".into()],
            env: vec!["A=1".into()],
            workdir: Some("/".into()),
            user: None,
            stdin: true,
            tty: Some(size),
            term: "xterm".into(),
        };
        vec![
            Frame::Request(Request::Primary { size: Some(size), hold: true, cold: false }),
            Frame::Request(Request::Copy(Copy::In { directory: "/x".into() })),
            Frame::Request(Request::Copy(Copy::Stat { path: "/x".into(), follow: true, user: None })),
            Frame::Request(Request::Stop { orderly: false, why: "removed".into() }),
            Frame::Go,
            Frame::Ready,
            Frame::Progress(Stage::Writing { done: 1 << 20, total: 1 << 30 }),
            Frame::Progress(Stage::Hashing { done: u64::MAX }),
            Frame::Request(Request::Exec(exec)),
            Frame::Request(Request::Stats),
            Frame::Stdin(vec![0; MAX_PAYLOAD]),
            Frame::StdinEof,
            Frame::Resize(Size { rows: 300, columns: 1000 }),
            Frame::Signal(15),
            Frame::Started,
            Frame::Stdout(b"out".to_vec()),
            Frame::Stderr(b"err".to_vec()),
            Frame::StdinRoom(65_537),
            Frame::Stats(Box::default()),
            Frame::Exit(Exit { code: 124, error: Some("why".into()), ..Exit::default() }),
        ]
    }

    #[test]
    fn every_frame_reads_back() {
        let mut bytes = Vec::new();
        for frame in some_of_each() {
            frame.write(&mut bytes).unwrap();
        }
        let mut from = bytes.as_slice();
        for frame in some_of_each() {
            assert_eq!(Frame::read(&mut from).unwrap(), Some(frame));
        }
        assert_eq!(Frame::read(&mut from).unwrap(), None);
    }

    #[test]
    fn lengths_are_bounded_both_ways() {
        let frame = Frame::Stdout(vec![0; MAX_PAYLOAD + 1]);
        assert!(matches!(frame.write(&mut Vec::new()), Err(FrameError::TooLong(_))));
        let mut huge = &[0x82, 0xff, 0xff, 0xff, 0xff][..];
        assert!(matches!(Frame::read(&mut huge), Err(FrameError::TooLong(_))));
    }

    #[test]
    fn a_frame_cut_short_is_an_error() {
        let mut bytes = Vec::new();
        Frame::Stdout(b"abc".to_vec()).write(&mut bytes).unwrap();
        for cut in 1..bytes.len() {
            assert!(matches!(Frame::read(&mut &bytes[..cut]), Err(FrameError::Io(_))), "{cut}");
        }
    }

    #[test]
    fn signals_have_numbers_of_signals() {
        for number in [0, 65, 255] {
            assert!(matches!(Frame::decode(0x05, vec![number]), Err(FrameError::Malformed { .. })));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut from = bytes.as_slice();
            while let Ok(Some(frame)) = Frame::read(&mut from) {
                let mut again = Vec::new();
                frame.write(&mut again).unwrap();
                prop_assert_eq!(Frame::read(&mut again.as_slice()).unwrap(), Some(frame));
            }
        }
    }
}
