//! Layers as the builder takes them, hashed on their way.

use std::fs::File;
use std::io::{self, Read};

use guest::build::{END_OF_IMAGE, END_OF_LAYER, MAX_CHUNK};

use super::SourceError;
use super::blobs::Part;
use crate::image::digest::{Digest, Hasher};

/// Bytes of a chunk.
const CHUNK: usize = 64 << 10;

/// One layer.
#[derive(Debug)]
pub(in crate::image) struct Layer {
    /// What it is called in errors.
    name: String,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// Part of a file that can be read again, and what it must be.
    Part(Part, Digest),
    /// A pipe, which gives its bytes once.
    Pipe(io::Chain<io::Cursor<Vec<u8>>, File>),
}

impl Layer {
    pub(super) fn of(name: String, part: Part, digest: Digest) -> Self {
        Self { name, content: Content::Part(part, digest) }
    }

    /// What a pipe gives after `head`, which was read from it already.
    pub(super) fn pipe(name: String, head: Vec<u8>, pipe: File) -> Self {
        Self { name, content: Content::Pipe(io::Cursor::new(head).chain(pipe)) }
    }

    /// Its length, if that is known.
    pub(super) fn length(&self) -> Option<u64> {
        match &self.content {
            Content::Part(part, _) => Some(part.length()),
            Content::Pipe(_) => None,
        }
    }

    /// The digest of a part, and whether it is compressed.
    pub(super) fn hash(name: &str, part: &Part, progress: &mut dyn FnMut(u64)) -> Result<(Digest, bool), SourceError> {
        let mut part = part.clone();
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; MAX_CHUNK];
        let mut compressed = None;
        loop {
            let n = part.read(&mut buffer).map_err(|error| SourceError::part(name, error))?;
            let bytes = buffer.get(..n).unwrap_or_default();
            if bytes.is_empty() {
                return Ok((hasher.finish(), compressed.unwrap_or(false)));
            }
            compressed.get_or_insert_with(|| is_compressed(bytes));
            hasher.update(bytes);
            progress(u64::try_from(n).unwrap_or(u64::MAX));
        }
    }
}

/// Whether something begins as what the builder decompresses.
pub(super) fn is_compressed(bytes: &[u8]) -> bool {
    matches!(
        bytes,
        [0x1f, 0x8b, ..]
            | [0xfd, b'7', b'z', b'X', b'Z', 0, ..]
            | [0x28, 0xb5, 0x2f, 0xfd, ..]
            | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..]
    )
}

/// All layers in chunks: see [`guest::build`]. A layer whose digest is wrong ends the stream with an error before the
/// builder hears that it was whole.
pub(in crate::image) struct LayerStream<'a> {
    layers: std::vec::IntoIter<Layer>,
    current: Option<(Layer, Hasher)>,
    /// Bytes that are ready to be read.
    ready: io::Cursor<Vec<u8>>,
    ended: bool,
    /// The digest of the last layer that was read whole.
    last: Option<Digest>,
    error: Option<SourceError>,
    progress: &'a mut dyn FnMut(u64),
}

impl<'a> LayerStream<'a> {
    /// `progress` is told how many bytes of layers were read.
    pub(in crate::image) fn new(layers: Vec<Layer>, progress: &'a mut dyn FnMut(u64)) -> Self {
        let ready = io::Cursor::default();
        Self { layers: layers.into_iter(), current: None, ready, ended: false, last: None, error: None, progress }
    }

    /// Why it broke, if it did.
    pub(in crate::image) fn take_error(&mut self) -> Option<SourceError> {
        self.error.take()
    }

    /// The digest of the last layer, if all was read: of a pipe, what its bytes were.
    pub(in crate::image) fn digest(&self) -> Option<&Digest> {
        self.last.as_ref().filter(|_| self.ended)
    }

    fn refill(&mut self) -> Result<(), SourceError> {
        let Some((layer, hasher)) = &mut self.current else {
            match self.layers.next() {
                Some(layer) => self.current = Some((layer, Hasher::default())),
                None => {
                    self.ended = true;
                    self.ready = io::Cursor::new(END_OF_IMAGE.to_le_bytes().to_vec());
                }
            }
            return Ok(());
        };
        let mut chunk = vec![0; CHUNK.saturating_add(4)];
        let (length, room) = chunk.split_at_mut(4);
        let read = match &mut layer.content {
            Content::Part(part, _) => part.read(room),
            Content::Pipe(pipe) => pipe.read(room),
        };
        let n = match read {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            other => other.map_err(|error| SourceError::part(layer.name.as_str(), error))?,
        };
        if n > 0 {
            hasher.update(room.get(..n).unwrap_or_default());
            length.copy_from_slice(&u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes());
            chunk.truncate(n.saturating_add(4));
            (self.progress)(u64::try_from(n).unwrap_or(u64::MAX));
            self.ready = io::Cursor::new(chunk);
            return Ok(());
        }
        let found = std::mem::take(hasher).finish();
        if let Content::Part(_, expected) = &layer.content
            && found != *expected
        {
            return Err(SourceError::Digest { part: layer.name.clone(), found, expected: expected.clone() });
        }
        self.last = Some(found);
        self.current = None;
        self.ready = io::Cursor::new(END_OF_LAYER.to_le_bytes().to_vec());
        Ok(())
    }
}

impl Read for LayerStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let n = self.ready.read(buffer)?;
            if n > 0 || buffer.is_empty() || self.ended && self.ready.get_ref().is_empty() {
                return Ok(n);
            }
            if self.ended {
                self.ready = io::Cursor::default();
            } else if let Err(error) = self.refill() {
                let said = io::Error::other(error.to_string());
                self.error = Some(error);
                return Err(said);
            }
        }
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
