//! Frames: a length, and a body whose first byte says what it is.
//!
//! | first byte | rest |
//! |---|---|
//! | `{` | JSON (the byte belongs to it) |
//! | 1 | data: offset u64, then at least one byte of the stream |
//! | 2 | acknowledge: offset u64, everything before it was taken |
//! | 3 | end: offset u64, the stream's whole length |
//!
//! All integers are little-endian; the length counts the body.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use serde::{Serialize, de::DeserializeOwned};

/// Longest body of any frame from the agent, and of data frames both ways.
pub const MAX_FRAME: usize = 64 * 1024;

/// Longest body that the agent takes from the host: a command line with its environment may be long (Linux takes
/// 128 KiB for one argument).
pub const MAX_REQUEST: usize = 1024 * 1024;

/// Most stream bytes in one data frame.
pub const MAX_DATA: usize = MAX_FRAME - DATA_HEADER;

const DATA_HEADER: usize = 9;
const LENGTH: usize = 4;
const DATA: u8 = 1;
const ACK: u8 = 2;
const END: u8 = 3;

/// A frame's body, understood as far as its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body<'a> {
    /// A JSON text, not yet parsed.
    Json(&'a [u8]),
    /// Bytes of a stream.
    Data {
        /// Offset of the first byte.
        offset: u64,
        /// The bytes, at least one.
        bytes: &'a [u8],
    },
    /// Everything before this offset was taken.
    Ack(u64),
    /// The stream ends at this offset.
    End(u64),
}

/// Why bytes are not a frame. The connection is of no use after any of these.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// frame of {length} bytes: the limit is {limit}
    #[error("frame of {length} bytes: the limit is {limit}")]
    Length {
        /// What the header says.
        length: u32,
        /// What is allowed here.
        limit: usize,
    },
    /// frame of kind {0}: unknown
    #[error("frame of kind {0}: unknown")]
    Kind(u8),
    /// frame of kind {kind} has {length} bytes
    #[error("frame of kind {kind} has {length} bytes")]
    Shape {
        /// Its first byte.
        kind: u8,
        /// Its length.
        length: usize,
    },
    /// frame's JSON: {0}
    #[error("frame's JSON: {0}")]
    Json(String),
}

/// Appends a JSON frame.
///
/// # Errors
/// The value cannot be written, or is longer than `limit`.
pub fn put_json<T: Serialize>(out: &mut Vec<u8>, value: &T, limit: usize) -> Result<(), FrameError> {
    let body = serde_json::to_vec(value).map_err(|e| FrameError::Json(e.to_string()))?;
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    if body.len() > limit {
        return Err(FrameError::Length { length, limit });
    }
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&body);
    Ok(())
}

/// Appends a data frame with as many of the bytes as fit in one; returns how many that were.
pub fn put_data(out: &mut Vec<u8>, offset: u64, bytes: &[u8]) -> usize {
    let bytes = bytes.get(..MAX_DATA).unwrap_or(bytes);
    let length = u32::try_from(bytes.len().saturating_add(DATA_HEADER)).unwrap_or(u32::MAX);
    out.extend_from_slice(&length.to_le_bytes());
    out.push(DATA);
    out.extend_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(bytes);
    bytes.len()
}

/// Appends an acknowledgement.
pub fn put_ack(out: &mut Vec<u8>, offset: u64) {
    put_mark(out, ACK, offset);
}

/// Appends the end of a stream.
pub fn put_end(out: &mut Vec<u8>, total: u64) {
    put_mark(out, END, total);
}

fn put_mark(out: &mut Vec<u8>, kind: u8, offset: u64) {
    out.extend_from_slice(&9u32.to_le_bytes());
    out.push(kind);
    out.extend_from_slice(&offset.to_le_bytes());
}

/// Parses a JSON body.
///
/// # Errors
/// It is not JSON, or not of this type.
pub fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, FrameError> {
    serde_json::from_slice(json).map_err(|e| FrameError::Json(e.to_string()))
}

/// Takes bytes as they come and gives frames back. It holds at most one frame's worth beyond what was pushed last.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Bytes at the front that were given back already.
    taken: usize,
    limit: usize,
}

impl Decoder {
    /// A decoder that refuses bodies longer than `limit`.
    #[must_use]
    pub fn new(limit: usize) -> Decoder {
        Decoder { buffer: Vec::new(), taken: 0, limit }
    }

    /// Adds what was read from the connection.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.taken.min(self.buffer.len()));
        self.taken = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// Lowers or raises the limit for frames to come.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// The next whole frame, if there is one.
    ///
    /// # Errors
    /// What comes is not a frame.
    pub fn next_frame(&mut self) -> Result<Option<Body<'_>>, FrameError> {
        let rest = self.buffer.get(self.taken..).unwrap_or_default();
        let Some((header, rest)) = rest.split_first_chunk::<LENGTH>() else { return Ok(None) };
        let length = u32::from_le_bytes(*header);
        let wanted = usize::try_from(length).unwrap_or(usize::MAX);
        if wanted == 0 || wanted > self.limit {
            return Err(FrameError::Length { length, limit: self.limit });
        }
        let Some(body) = rest.get(..wanted) else { return Ok(None) };
        self.taken = self.taken.saturating_add(LENGTH).saturating_add(wanted);
        classify(body).map(Some)
    }
}

fn classify(body: &[u8]) -> Result<Body<'_>, FrameError> {
    let Some((&kind, rest)) = body.split_first() else { return Err(FrameError::Shape { kind: 0, length: 0 }) };
    if kind == b'{' {
        return Ok(Body::Json(body));
    }
    let wrong = FrameError::Shape { kind, length: body.len() };
    let Some((offset, bytes)) = rest.split_first_chunk::<8>() else { return Err(wrong) };
    let offset = u64::from_le_bytes(*offset);
    match (kind, bytes.len()) {
        (DATA, 1..=MAX_DATA) => Ok(Body::Data { offset, bytes }),
        (ACK, 0) => Ok(Body::Ack(offset)),
        (END, 0) => Ok(Body::End(offset)),
        (DATA | ACK | END, _) => Err(wrong),
        _ => Err(FrameError::Kind(kind)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Opening, Stream};
    use proptest::prelude::*;

    fn owned(body: Body<'_>) -> (u8, u64, Vec<u8>) {
        match body {
            Body::Json(b) => (0, 0, b.to_vec()),
            Body::Data { offset, bytes } => (1, offset, bytes.to_vec()),
            Body::Ack(o) => (2, o, vec![]),
            Body::End(o) => (3, o, vec![]),
        }
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            frames in prop::collection::vec((1u8..4, any::<u64>(), prop::collection::vec(any::<u8>(), 1..300)), 0..20),
            cut in 1usize..50,
        ) {
            let mut wire = Vec::new();
            for (kind, offset, bytes) in &frames {
                match kind {
                    1 => { put_data(&mut wire, *offset, bytes); }
                    2 => put_ack(&mut wire, *offset),
                    _ => put_end(&mut wire, *offset),
                }
            }
            let mut decoder = Decoder::new(MAX_FRAME);
            let mut got = Vec::new();
            for piece in wire.chunks(cut) {
                decoder.push(piece);
                while let Some(body) = decoder.next_frame().unwrap() {
                    got.push(owned(body));
                }
            }
            let want: Vec<_> = frames.into_iter()
                .map(|(k, o, b)| (k, o, if k == 1 { b } else { vec![] })).collect();
            prop_assert_eq!(got, want);
        }

        #[test]
        fn garbage_never_panics_nor_grows(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let mut decoder = Decoder::new(1000);
            for piece in bytes.chunks(7) {
                decoder.push(piece);
                while let Ok(Some(_)) = decoder.next_frame() {}
                prop_assert!(decoder.buffer.len() <= bytes.len());
            }
        }
    }

    #[test]
    fn limits_hold() {
        let mut decoder = Decoder::new(MAX_FRAME);
        decoder.push(&(65_537u32).to_le_bytes());
        assert!(matches!(decoder.next_frame(), Err(FrameError::Length { length: 65_537, .. })));
        let mut decoder = Decoder::new(MAX_FRAME);
        decoder.push(&[0, 0, 0, 0]);
        assert!(decoder.next_frame().is_err());
        let mut out = Vec::new();
        assert_eq!(put_data(&mut out, 5, &vec![9; MAX_FRAME * 2]), MAX_DATA);
        let mut decoder = Decoder::new(MAX_FRAME);
        decoder.push(&out);
        assert!(matches!(decoder.next_frame(), Ok(Some(Body::Data { offset: 5, bytes })) if bytes.len() == MAX_DATA));
        for bad in [&[1u8, 0, 0, 0, 7][..], &[9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0], &[2, 0, 0, 0, 2, 2]] {
            let mut decoder = Decoder::new(MAX_FRAME);
            decoder.push(bad);
            assert!(decoder.next_frame().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn json_goes_round() {
        let opening = Opening::Stream { version: 1, exec: "main".into(), stream: Stream::Stdout, have: 1 << 60 };
        let mut out = Vec::new();
        put_json(&mut out, &opening, MAX_FRAME).unwrap();
        let mut decoder = Decoder::new(MAX_FRAME);
        decoder.push(&out);
        let Ok(Some(Body::Json(json))) = decoder.next_frame() else { panic!("no frame") };
        assert_eq!(parse::<Opening>(json).unwrap(), opening);
        assert!(put_json(&mut out, &opening, 10).is_err());
    }
}
