//! The bytes of an archive of snapshots. `docs/formats/snapshot-archive.md` describes them.
//!
//! What is read here comes from anywhere. Nothing is allocated by what it claims but a piece and a manifest, which are
//! small; and it holds no names but those of the manifests' closed set.

use std::io::{self, Read, Write};

use super::manifest::{MAX_BYTES, MAX_SNAPSHOTS};

pub(super) const MAGIC: [u8; 8] = *b"BHKSNAPS";
pub(super) const VERSION: u32 = 1;
/// Bytes of a piece of a file: as many as a lineage's memories share in one go, and a record is small beside it.
pub(super) const PIECE: usize = 64 << 10;
/// [`PIECE`], as an offset counts.
pub(super) const PIECE_BYTES: u64 = 64 << 10;

const DATA: u8 = 1;
const PACKED: u8 = 2;
const SAME: u8 = 3;
const END: u8 = 0;

/// What is wrong with an archive.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// It cannot be read or written.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It ends too early.
    #[error("it ends in the middle; part of it is missing")]
    Short,
    /// It is none.
    #[error("it is no archive of snapshots")]
    Magic,
    /// Another version.
    #[error("it is of version {0}, and this program knows version {VERSION}")]
    Version(u32),
    /// What it holds is wrong.
    #[error("byte {at}: {why}; it is damaged, or was not written by bulkhead")]
    Content {
        /// How many bytes of it were read.
        at: u64,
        /// What is wrong.
        why: String,
    },
    /// Its hash is not that of its bytes.
    #[error("its hash is not the one at its end; it was damaged on its way")]
    Sum,
}

/// Where a piece lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// The snapshot, in the archive's order.
    pub(super) snapshot: u8,
    /// The file, in the manifest's order.
    pub(super) file: u8,
    /// Which piece of it.
    pub(super) piece: u64,
}

/// One piece of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    /// These bytes.
    Bytes(u64, &'a [u8]),
    /// What lies in an earlier place.
    Same(u64, Place),
}

/// Writes an archive and hashes it.
#[derive(Debug)]
pub(super) struct Writer<W> {
    out: W,
    hasher: blake3::Hasher,
    packed: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Begins one with these manifests, the exported one last.
    pub(super) fn new(out: W, manifests: &[Vec<u8>]) -> Result<Self, ArchiveError> {
        let packed = vec![0; lz4_flex::block::get_maximum_output_size(PIECE)];
        let mut writer = Self { out, hasher: blake3::Hasher::new(), packed };
        writer.put(&MAGIC)?;
        writer.put(&VERSION.to_le_bytes())?;
        writer.put(&[u8::try_from(manifests.len()).unwrap_or(u8::MAX)])?;
        for manifest in manifests {
            writer.put(&u32::try_from(manifest.len()).unwrap_or(u32::MAX).to_le_bytes())?;
            writer.put(manifest)?;
        }
        Ok(writer)
    }

    /// Adds a piece of the present file.
    pub(super) fn piece(&mut self, piece: &Piece<'_>) -> Result<(), ArchiveError> {
        match piece {
            Piece::Same(number, place) => {
                self.put(&[SAME])?;
                self.put(&number.to_le_bytes())?;
                self.put(&[place.snapshot, place.file])?;
                self.put(&place.piece.to_le_bytes())
            }
            Piece::Bytes(number, bytes) => {
                let packed = lz4_flex::block::compress_into(bytes, &mut self.packed).unwrap_or(usize::MAX);
                if packed < bytes.len() {
                    self.put(&[PACKED])?;
                    self.put(&number.to_le_bytes())?;
                    self.put(&u32::try_from(packed).unwrap_or(u32::MAX).to_le_bytes())?;
                    let bytes = std::mem::take(&mut self.packed);
                    let put = self.put(bytes.get(..packed).unwrap_or_default());
                    self.packed = bytes;
                    put
                } else {
                    self.put(&[DATA])?;
                    self.put(&number.to_le_bytes())?;
                    self.put(bytes)
                }
            }
        }
    }

    /// Ends the present file.
    pub(super) fn end_file(&mut self) -> Result<(), ArchiveError> {
        self.put(&[END])
    }

    /// Ends the archive.
    pub(super) fn finish(mut self) -> Result<(), ArchiveError> {
        let sum = self.hasher.finalize();
        self.out.write_all(sum.as_bytes())?;
        Ok(self.out.flush()?)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), ArchiveError> {
        self.hasher.update(bytes);
        Ok(self.out.write_all(bytes)?)
    }
}

/// Reads an archive and hashes it.
#[derive(Debug)]
pub(super) struct Reader<R> {
    from: R,
    hasher: blake3::Hasher,
    at: u64,
    packed: Vec<u8>,
    piece: Vec<u8>,
}

impl<R: Read> Reader<R> {
    /// Reads its head; gives the manifests, as they are.
    pub(super) fn new(from: R) -> Result<(Self, Vec<Vec<u8>>), ArchiveError> {
        let (packed, piece) = (vec![0; PIECE], vec![0; PIECE]);
        let mut reader = Self { from, hasher: blake3::Hasher::new(), at: 0, packed, piece };
        if reader.take::<8>()? != MAGIC {
            return Err(ArchiveError::Magic);
        }
        let version = u32::from_le_bytes(reader.take()?);
        if version != VERSION {
            return Err(ArchiveError::Version(version));
        }
        let [count] = reader.take()?;
        if count == 0 || usize::from(count) > MAX_SNAPSHOTS {
            return Err(reader.wrong(format!("it says that it holds {count} snapshots, not 1 to {MAX_SNAPSHOTS}")));
        }
        let mut manifests = Vec::new();
        for _ in 0..count {
            let length = u32::from_le_bytes(reader.take()?);
            if u64::from(length) > MAX_BYTES {
                return Err(reader.wrong(format!("a manifest of {length} bytes, over {MAX_BYTES}")));
            }
            let mut manifest = vec![0; usize::try_from(length).unwrap_or(0)];
            reader.fill(&mut manifest)?;
            manifests.push(manifest);
        }
        Ok((reader, manifests))
    }

    /// The next piece of the present file, which has `length` bytes; nothing at its end. `last` is the number of the piece
    /// before.
    pub(super) fn next(&mut self, length: u64, last: Option<u64>) -> Result<Option<Piece<'_>>, ArchiveError> {
        let [tag] = self.take()?;
        if tag == END {
            return Ok(None);
        }
        let number = u64::from_le_bytes(self.take()?);
        let bytes = piece_length(length, number);
        if bytes == 0 || last.is_some_and(|last| number <= last) {
            return Err(self.wrong(format!("piece {number} of a file of {length} bytes is out of place")));
        }
        match tag {
            SAME => {
                let [snapshot, file] = self.take()?;
                let piece = u64::from_le_bytes(self.take()?);
                Ok(Some(Piece::Same(number, Place { snapshot, file, piece })))
            }
            DATA => {
                let mut piece = std::mem::take(&mut self.piece);
                let filled = self.fill(piece.get_mut(..bytes).unwrap_or_default());
                self.piece = piece;
                filled?;
                Ok(Some(Piece::Bytes(number, self.piece.get(..bytes).unwrap_or_default())))
            }
            PACKED => {
                let length = usize::try_from(u32::from_le_bytes(self.take()?)).unwrap_or(usize::MAX);
                if length >= bytes {
                    return Err(self.wrong(format!("a packed piece of {length} bytes, where {bytes} need no packing")));
                }
                let mut packed = std::mem::take(&mut self.packed);
                let filled = self.fill(packed.get_mut(..length).unwrap_or_default());
                self.packed = packed;
                filled?;
                let packed = self.packed.get(..length).unwrap_or_default();
                let to = self.piece.get_mut(..bytes).unwrap_or_default();
                match lz4_flex::block::decompress_into(packed, to) {
                    Ok(unpacked) if unpacked == bytes => {
                        Ok(Some(Piece::Bytes(number, self.piece.get(..bytes).unwrap_or_default())))
                    }
                    Ok(unpacked) => Err(self.wrong(format!("a piece of {unpacked} bytes, not {bytes}"))),
                    Err(error) => Err(self.wrong(format!("a packed piece: {error}"))),
                }
            }
            other => Err(self.wrong(format!("a record of kind {other}, which is none"))),
        }
    }

    /// Checks its end.
    pub(super) fn finish(mut self) -> Result<(), ArchiveError> {
        let sum = self.hasher.finalize();
        if self.take::<32>()? != *sum.as_bytes() {
            return Err(ArchiveError::Sum);
        }
        match self.from.read_exact(&mut [0]) {
            Ok(()) => Err(self.wrong("there is more behind its end".to_owned())),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// That something in it is wrong, and where.
    pub(super) fn wrong(&self, why: String) -> ArchiveError {
        ArchiveError::Content { at: self.at, why }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], ArchiveError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), ArchiveError> {
        match self.from.read_exact(bytes) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(ArchiveError::Short),
            other => other?,
        }
        self.hasher.update(bytes);
        self.at = self.at.saturating_add(bytes.len() as u64);
        Ok(())
    }
}

/// How many bytes a piece of a file of `length` bytes has; none, if it lies behind its end.
pub(super) fn piece_length(length: u64, number: u64) -> usize {
    let Some(start) = number.checked_mul(PIECE_BYTES) else { return 0 };
    usize::try_from(length.saturating_sub(start).min(PIECE_BYTES)).unwrap_or(0)
}
