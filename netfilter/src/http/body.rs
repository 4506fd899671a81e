//! Bodies: read by their framing, and written anew in the same one.

use super::head::Framing;

/// Longest line of a chunk's size or of a trailer.
const MAX_LINE: usize = 8 << 10;
/// Most bytes of all trailers together. They are dropped.
const MAX_TRAILERS: usize = 16 << 10;

/// A body on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Body(State);

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Done,
    Length(u64),
    UntilEnd,
    /// A chunk's size, as far as it is there.
    Size(Vec<u8>),
    /// What is left of a chunk.
    Chunk(u64),
    /// The line end after a chunk, and how much of it is there.
    ChunkEnd(bool),
    /// A trailer's line, as far as it is there, and the bytes of those before.
    Trailer(Vec<u8>, usize),
}

/// A body that is not framed as it was announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

impl Body {
    /// A body that begins.
    pub fn new(framing: Framing) -> Self {
        Self(match framing {
            Framing::None | Framing::Length(0) => State::Done,
            Framing::Length(length) => State::Length(length),
            Framing::Chunked => State::Size(Vec::new()),
            Framing::UntilEnd => State::UntilEnd,
        })
    }

    /// Whether all of it has been read.
    pub fn is_done(&self) -> bool {
        self.0 == State::Done
    }

    /// Whether it may end where the connection ends now.
    pub fn may_end(&self) -> bool {
        matches!(self.0, State::Done | State::UntilEnd)
    }

    /// Reads on, and writes what is to be passed on to `out`. Returns how many bytes were its own; what follows it is
    /// not touched.
    pub fn read(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<usize, Broken> {
        let mut rest = bytes;
        while !rest.is_empty() && !self.is_done() {
            rest = self.step(rest, out)?;
        }
        Ok(bytes.len().saturating_sub(rest.len()))
    }

    fn step<'b>(&mut self, bytes: &'b [u8], out: &mut Vec<u8>) -> Result<&'b [u8], Broken> {
        let (first, after_first) = bytes.split_first().ok_or(Broken)?;
        match &mut self.0 {
            State::Done => Ok(bytes),
            State::UntilEnd => {
                out.extend_from_slice(bytes);
                Ok(&[])
            }
            State::Length(left) => {
                let (data, rest) = take(bytes, *left);
                out.extend_from_slice(data);
                *left = left.saturating_sub(length(data));
                if *left == 0 {
                    self.0 = State::Done;
                }
                Ok(rest)
            }
            State::Chunk(left) => {
                let (data, rest) = take(bytes, *left);
                out.extend_from_slice(format!("{:x}\r\n", data.len()).as_bytes());
                out.extend_from_slice(data);
                out.extend_from_slice(b"\r\n");
                *left = left.saturating_sub(length(data));
                if *left == 0 {
                    self.0 = State::ChunkEnd(false);
                }
                Ok(rest)
            }
            State::ChunkEnd(returned) => {
                match (*returned, first) {
                    (false, b'\r') => *returned = true,
                    (true, b'\n') => self.0 = State::Size(Vec::new()),
                    _ => return Err(Broken),
                }
                Ok(after_first)
            }
            State::Size(line) => {
                if push_line(line, *first)? {
                    self.0 = match chunk_size(line)? {
                        0 => State::Trailer(Vec::new(), 0),
                        size => State::Chunk(size),
                    };
                }
                Ok(after_first)
            }
            State::Trailer(line, total) => {
                *total = total.saturating_add(1);
                if *total > MAX_TRAILERS {
                    return Err(Broken);
                }
                if push_line(line, *first)? {
                    if line.is_empty() {
                        out.extend_from_slice(b"0\r\n\r\n");
                        self.0 = State::Done;
                    } else {
                        // Whatever it says (a Host, a credential), it is said too late to be checked: dropped.
                        line.clear();
                    }
                }
                Ok(after_first)
            }
        }
    }
}

fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}

fn take(bytes: &[u8], most: u64) -> (&[u8], &[u8]) {
    let most = usize::try_from(most).unwrap_or(usize::MAX).min(bytes.len());
    bytes.split_at_checked(most).unwrap_or((bytes, &[]))
}

/// Adds a byte to a line. `true` when the line is there, without its end. No line ends without a carriage return, and
/// none has one inside.
fn push_line(line: &mut Vec<u8>, byte: u8) -> Result<bool, Broken> {
    match (line.last() == Some(&b'\r'), byte) {
        (true, b'\n') => {
            line.pop();
            Ok(true)
        }
        (true, _) | (false, b'\n') => Err(Broken),
        (false, byte) if line.len() < MAX_LINE && (byte == b'\r' || byte == b'\t' || byte >= 0x20) => {
            line.push(byte);
            Ok(false)
        }
        _ => Err(Broken),
    }
}

/// A chunk's size: hexadecimal digits and nothing else, extensions neither.
fn chunk_size(line: &[u8]) -> Result<u64, Broken> {
    if line.is_empty() || line.len() > 15 || !line.iter().all(u8::is_ascii_hexdigit) {
        return Err(Broken);
    }
    let text = std::str::from_utf8(line).map_err(|_| Broken)?;
    u64::from_str_radix(text, 16).map_err(|_| Broken)
}
