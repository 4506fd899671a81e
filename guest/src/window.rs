//! Streams with byte offsets: what one end keeps until the other has it, and what the other accepts.
//!
//! The same two halves serve both directions: the agent sends output and receives input, the host the reverse. A
//! connection may break between any two bytes; [`Sender`] and [`Receiver`] outlive it, a [`Cursor`] does not.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use crate::frame;
use std::collections::VecDeque;

/// Bytes that a sender keeps for a stream at most.
pub const WINDOW: usize = 1024 * 1024;

/// Input bytes that the host may send beyond what was acknowledged. The agent acknowledges what the process's pipe
/// took and has room for this much, so that it never stops reading a connection, and a host's write never waits for
/// the process.
pub const CREDIT: usize = 256 * 1024;

/// Why the other end's offsets make no sense. The connection is of no use after any of these; the stream may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    /// offset {offset} is outside of what is held, {from} to {to}
    #[error("offset {offset} is outside of what is held, {from} to {to}")]
    Outside {
        /// What was said.
        offset: u64,
        /// Oldest offset that is held.
        from: u64,
        /// Where the stream is now.
        to: u64,
    },
    /// data at offset {offset}, but {have} bytes were received
    #[error("data at offset {offset}, but {have} bytes were received")]
    Gap {
        /// What was said.
        offset: u64,
        /// What is there.
        have: u64,
    },
    /// data after the end of the stream at {0}
    #[error("data after the end of the stream at {0}")]
    AfterEnd(u64),
}

/// The sending half: bytes from the first that is not acknowledged to the last that the source gave.
#[derive(Debug, Default)]
pub struct Sender {
    acked: u64,
    held: VecDeque<u8>,
    ended: bool,
}

impl Sender {
    /// Adds bytes of the source. The caller keeps within [`Sender::room`].
    pub fn push(&mut self, bytes: &[u8]) {
        self.held.extend(bytes);
    }

    /// How many more bytes may be pushed, if `limit` may be held.
    #[must_use]
    pub fn room(&self, limit: usize) -> usize {
        if self.ended { 0 } else { limit.saturating_sub(self.held.len()) }
    }

    /// The source has no more.
    pub fn finish(&mut self) {
        self.ended = true;
    }

    /// Whether the source has ended.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.ended
    }

    /// Bytes held.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Offset up to which the other end has everything.
    #[must_use]
    pub fn acknowledged(&self) -> u64 {
        self.acked
    }

    /// Offset of the next byte that the source gives; the total once it has ended.
    #[must_use]
    pub fn produced(&self) -> u64 {
        self.acked.saturating_add(u64::try_from(self.held.len()).unwrap_or(u64::MAX))
    }

    /// The other end has everything before `offset`.
    ///
    /// # Errors
    /// It is not an offset of a byte that is held or comes next.
    pub fn acknowledge(&mut self, offset: u64) -> Result<(), WindowError> {
        let outside = WindowError::Outside { offset, from: self.acked, to: self.produced() };
        let drop = offset.checked_sub(self.acked).and_then(|n| usize::try_from(n).ok());
        match drop {
            Some(count) if count <= self.held.len() => {
                self.held.drain(..count);
                self.acked = offset;
                // A burst should not hold its memory for as long as the stream lives.
                if self.held.is_empty() && self.held.capacity() > frame::MAX_FRAME {
                    self.held.shrink_to(frame::MAX_FRAME);
                }
                Ok(())
            }
            _ => Err(outside),
        }
    }

    /// A new connection's position: the other end says that it has everything before `offset`.
    ///
    /// # Errors
    /// As [`Sender::acknowledge`].
    pub fn attach(&mut self, offset: u64) -> Result<Cursor, WindowError> {
        self.acknowledge(offset)?;
        Ok(Cursor { sent: offset, end_sent: false })
    }

    /// For a stream whose first bytes another sender had: what is held, and was not offered to any connection yet,
    /// begins at `offset`.
    pub fn begin_at(&mut self, offset: u64) {
        self.acked = offset;
    }

    /// Bytes that were sent to this connection and not acknowledged.
    #[must_use]
    pub fn in_flight(&self, cursor: &Cursor) -> usize {
        usize::try_from(cursor.sent.saturating_sub(self.acked)).unwrap_or(usize::MAX)
    }

    /// Whether [`Sender::put_next`] has something to write for this connection.
    #[must_use]
    pub fn has_next(&self, cursor: &Cursor) -> bool {
        cursor.sent < self.produced() || (self.ended && !cursor.end_sent)
    }

    /// Appends the connection's next frame: data, or the end. Returns whether there was one.
    pub fn put_next(&self, cursor: &mut Cursor, out: &mut Vec<u8>) -> bool {
        let skip = cursor.sent.checked_sub(self.acked).and_then(|n| usize::try_from(n).ok());
        let (front, back) = self.held.as_slices();
        let next = skip.and_then(|skip| match front.get(skip..) {
            Some([]) | None => back.get(skip.saturating_sub(front.len())..),
            some => some,
        });
        match next {
            Some(bytes) if !bytes.is_empty() => {
                let count = frame::put_data(out, cursor.sent, bytes);
                cursor.sent = cursor.sent.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
                true
            }
            _ if self.ended && !cursor.end_sent => {
                frame::put_end(out, self.produced());
                cursor.end_sent = true;
                true
            }
            _ => false,
        }
    }
}

/// How far one connection has been served.
#[derive(Debug)]
pub struct Cursor {
    sent: u64,
    end_sent: bool,
}

/// The receiving half.
#[derive(Debug, Default)]
pub struct Receiver {
    have: u64,
    total: Option<u64>,
}

impl Receiver {
    /// For one that has the first bytes already.
    #[must_use]
    pub fn starting_at(have: u64) -> Receiver {
        Receiver { have, total: None }
    }

    /// Bytes received; also what to tell a new connection.
    #[must_use]
    pub fn have(&self) -> u64 {
        self.have
    }

    /// Whether the end was announced, with everything before it received.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.total.is_some()
    }

    /// Takes a data frame's bytes.
    ///
    /// # Errors
    /// They are not the bytes that come next. Nothing was taken.
    pub fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), WindowError> {
        if let Some(total) = self.total {
            return Err(WindowError::AfterEnd(total));
        }
        let gap = WindowError::Gap { offset, have: self.have };
        if offset != self.have {
            return Err(gap);
        }
        let count = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.have = self.have.checked_add(count).ok_or(gap)?;
        Ok(())
    }

    /// Goes back to an earlier offset: what came after it was not used, and will come again.
    pub fn rewind(&mut self, have: u64) {
        self.have = self.have.min(have);
        self.total = None;
    }

    /// Takes the end; again after a reconnection, if the first acknowledgement was lost.
    ///
    /// # Errors
    /// Bytes are missing.
    pub fn end(&mut self, total: u64) -> Result<(), WindowError> {
        if total != self.have {
            return Err(WindowError::Gap { offset: total, have: self.have });
        }
        self.total = Some(total);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Body, Decoder, MAX_FRAME};
    use proptest::prelude::*;

    /// One step of a life: the source gives bytes, the wire carries some, or it breaks.
    #[derive(Debug, Clone)]
    enum Step {
        Source(Vec<u8>),
        Send,
        Carry(usize),
        Ack,
        Cut,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            prop::collection::vec(any::<u8>(), 1..200).prop_map(Step::Source),
            Just(Step::Send),
            (1usize..300).prop_map(Step::Carry),
            Just(Step::Ack),
            Just(Step::Cut),
        ]
    }

    /// The two halves and a connection that carries bytes and can be cut.
    struct Life {
        sender: Sender,
        receiver: Receiver,
        cursor: Cursor,
        wire: Vec<u8>,
        decoder: Decoder,
        source: Vec<u8>,
        got: Vec<u8>,
    }

    impl Life {
        fn new() -> Life {
            let mut sender = Sender::default();
            let cursor = sender.attach(0).unwrap();
            Life {
                sender,
                receiver: Receiver::default(),
                cursor,
                wire: vec![],
                decoder: Decoder::new(MAX_FRAME),
                source: vec![],
                got: vec![],
            }
        }

        fn carry(&mut self, count: usize) {
            let piece: Vec<u8> = self.wire.drain(..count.min(self.wire.len())).collect();
            self.decoder.push(&piece);
            loop {
                match self.decoder.next_frame().unwrap() {
                    Some(Body::Data { offset, bytes }) => {
                        self.receiver.data(offset, bytes).unwrap();
                        self.got.extend_from_slice(bytes);
                    }
                    Some(Body::End(total)) => self.receiver.end(total).unwrap(),
                    Some(other) => panic!("{other:?}"),
                    None => break,
                }
            }
        }

        fn run(&mut self, step: Step) {
            match step {
                Step::Source(bytes) => {
                    let room = self.sender.room(500);
                    let bytes = &bytes[..bytes.len().min(room)];
                    self.sender.push(bytes);
                    self.source.extend_from_slice(bytes);
                }
                Step::Send => {
                    self.sender.put_next(&mut self.cursor, &mut self.wire);
                }
                Step::Carry(count) => self.carry(count),
                Step::Ack => self.sender.acknowledge(self.receiver.have()).unwrap(),
                Step::Cut => {
                    self.wire.clear();
                    self.decoder = Decoder::new(MAX_FRAME);
                    self.cursor = self.sender.attach(self.receiver.have()).unwrap();
                }
            }
            assert!(self.sender.held() <= 500);
        }
    }

    proptest! {
        #[test]
        fn cuts_lose_and_double_nothing(steps in prop::collection::vec(step(), 0..400)) {
            let mut life = Life::new();
            for step in steps {
                life.run(step);
            }
            life.sender.finish();
            life.run(Step::Cut);
            while !life.receiver.ended() {
                prop_assert!(life.sender.has_next(&life.cursor));
                life.run(Step::Send);
                life.run(Step::Carry(usize::MAX));
            }
            prop_assert_eq!(&life.got, &life.source);
            life.run(Step::Ack);
            prop_assert_eq!(life.sender.held(), 0);
            prop_assert!(!life.sender.has_next(&life.cursor));
        }
    }

    #[test]
    fn wrong_offsets_are_refused() {
        let mut sender = Sender::default();
        sender.push(b"hello");
        sender.acknowledge(2).unwrap();
        assert!(sender.attach(1).is_err(), "those bytes are gone");
        assert!(sender.attach(6).is_err(), "those bytes do not exist");
        assert!(sender.acknowledge(u64::MAX).is_err());
        assert!(sender.attach(5).is_ok());

        let mut receiver = Receiver::default();
        receiver.data(0, b"abc").unwrap();
        assert_eq!(receiver.data(0, b"abc"), Err(WindowError::Gap { offset: 0, have: 3 }));
        assert!(receiver.data(4, b"x").is_err());
        assert!(receiver.end(2).is_err());
        assert!(receiver.end(4).is_err());
        receiver.end(3).unwrap();
        receiver.end(3).unwrap();
        assert_eq!(receiver.data(3, b"x"), Err(WindowError::AfterEnd(3)));
    }
}
