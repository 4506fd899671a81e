//! The stream that layers come in: chunks of at most 1 MiB, each after its length (u32, little-endian). Length 0 ends a
//! layer, all ones in place of a layer's first length end the image. A stream that is cut is so never taken for whole.

use super::BuildError;
use crate::build::{END_OF_IMAGE, END_OF_LAYER, MAX_CHUNK};
use std::io::{self, Read};

/// All layers.
#[derive(Debug)]
pub(super) struct Layers<R> {
    from: R,
    /// Of the current chunk.
    left: usize,
    /// The current layer's end was read.
    ended: bool,
}

impl<R: Read> Layers<R> {
    pub(super) fn new(from: R) -> Self {
        Self { from, left: 0, ended: true }
    }

    /// The next layer; nothing after the last. The one before is read to its end.
    pub(super) fn next_layer(&mut self) -> Result<Option<&mut Self>, BuildError> {
        io::copy(self, &mut io::sink()).map_err(BuildError::io("the stream of layers"))?;
        match self.length().map_err(BuildError::io("the stream of layers"))? {
            END_OF_IMAGE => Ok(None),
            first => {
                self.begin(first).map_err(BuildError::io("the stream of layers"))?;
                Ok(Some(self))
            }
        }
    }

    fn length(&mut self) -> io::Result<u32> {
        let mut length = [0; 4];
        self.from.read_exact(&mut length).map_err(cut)?;
        Ok(u32::from_le_bytes(length))
    }

    fn begin(&mut self, length: u32) -> io::Result<()> {
        self.ended = length == END_OF_LAYER;
        self.left = usize::try_from(length).unwrap_or(usize::MAX);
        if self.left > MAX_CHUNK {
            return Err(io::Error::other(format!("a chunk of {length} bytes: the limit is {MAX_CHUNK}")));
        }
        Ok(())
    }
}

fn cut(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::other("it was cut short"),
        _ => error,
    }
}

/// Reads one layer.
impl<R: Read> Read for Layers<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 && !self.ended {
            let length = self.length()?;
            self.begin(length)?;
        }
        if self.ended || buffer.is_empty() {
            return Ok(0);
        }
        let want = self.left.min(buffer.len());
        let n = self.from.read(buffer.get_mut(..want).unwrap_or_default())?;
        if n == 0 {
            return Err(cut(io::ErrorKind::UnexpectedEof.into()));
        }
        self.left = self.left.saturating_sub(n);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(stream: &[u8]) -> Result<Vec<Vec<u8>>, BuildError> {
        let mut layers = Layers::new(stream);
        let mut all = Vec::new();
        while let Some(layer) = layers.next_layer()? {
            let mut bytes = Vec::new();
            layer.read_to_end(&mut bytes).map_err(BuildError::io("layer"))?;
            all.push(bytes);
        }
        Ok(all)
    }

    #[test]
    fn layers_are_told_apart() {
        let stream = b"\x02\0\0\0ab\x01\0\0\0c\0\0\0\0\0\0\0\0\x01\0\0\0d\0\0\0\0\xff\xff\xff\xff";
        assert_eq!(read(stream).unwrap(), [&b"abc"[..], b"", b"d"]);
        assert!(read(b"\xff\xff\xff\xff").unwrap().is_empty());
        // A layer that nobody read to its end does not become the next.
        let mut layers = Layers::new(&stream[..]);
        layers.next_layer().unwrap().unwrap().read_exact(&mut [0; 1]).unwrap();
        let mut rest = Vec::new();
        layers.next_layer().unwrap().unwrap().read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty());
    }

    #[test]
    fn a_cut_stream_is_no_whole_one() {
        let stream = b"\x02\0\0\0ab\0\0\0\0\xff\xff\xff\xff";
        for length in 0..stream.len() {
            assert!(read(&stream[..length]).is_err(), "{length}");
        }
        assert!(read(b"\0\0\x11\0").unwrap_err().to_string().contains("limit"));
    }
}
