//! Maps of sparse files.

use super::{ArchiveError, BLOCK, MAX_PIECES, header, pax};

/// Most bytes of a map in front of the data: 20 digits and a line feed for each number of [`MAX_PIECES`] pieces.
const MAX_MAP: usize = 42 * MAX_PIECES;

/// Checks that pieces are in order, within `size`, and as long together as what is stored.
pub(super) fn check(pieces: &[(u64, u64)], size: u64, stored: u64) -> Result<(), ArchiveError> {
    let (mut end, mut total) = (0_u64, 0_u64);
    for (offset, length) in pieces {
        if *offset < end {
            return Err(ArchiveError::Sparse("its pieces overlap, or are not in order"));
        }
        end = offset.checked_add(*length).ok_or(ArchiveError::Sparse("a piece is out of range"))?;
        total = total.checked_add(*length).ok_or(ArchiveError::Sparse("a piece is out of range"))?;
    }
    if end > size {
        return Err(ArchiveError::Sparse("a piece lies beyond the file's end"));
    }
    if total != stored {
        return Err(ArchiveError::Sparse("its pieces are not as long as what is stored"));
    }
    Ok(())
}

/// Adds the pieces that a part of a GNU header lists: 24 bytes each, up to an empty one.
pub(super) fn add(pieces: &mut Vec<(u64, u64)>, fields: &[u8]) -> Result<(), ArchiveError> {
    const WRONG: ArchiveError = ArchiveError::Sparse("an offset or a length is no number");
    for entry in fields.as_chunks::<24>().0 {
        let (offset, length) = entry.split_at(12);
        if header::text(length).is_empty() {
            break;
        }
        let number = |field| header::number(field).and_then(|n| u64::try_from(n).ok()).ok_or(WRONG);
        if pieces.len() >= MAX_PIECES {
            return Err(ArchiveError::Sparse("it has too many pieces"));
        }
        pieces.push((number(offset)?, number(length)?));
    }
    Ok(())
}

/// Reads a map that begins the stored bytes: the number of pieces, then offset and length of each, one number a line,
/// padded to whole blocks.
#[derive(Debug, Default)]
pub struct MapReader {
    line: Vec<u8>,
    numbers: Vec<u64>,
    read: usize,
}

impl MapReader {
    /// Takes the next block; gives the pieces once they are complete. `size` is the file's length, `stored` that of all
    /// stored bytes, the map's blocks included.
    ///
    /// # Errors
    /// It is no map, or does not fit these lengths.
    pub fn push(
        &mut self,
        block: &[u8; BLOCK],
        size: u64,
        stored: u64,
    ) -> Result<Option<Vec<(u64, u64)>>, ArchiveError> {
        const WRONG: ArchiveError = ArchiveError::Sparse("it is not a list of numbers");
        self.read = self.read.saturating_add(BLOCK);
        if self.read > MAX_MAP {
            return Err(ArchiveError::Sparse("it has too many pieces"));
        }
        for byte in block {
            if *byte != b'\n' {
                // More digits than any number has are none.
                if self.line.len() >= 20 {
                    return Err(WRONG);
                }
                self.line.push(*byte);
                continue;
            }
            self.numbers.push(pax::decimal(&self.line).ok_or(WRONG)?);
            self.line.clear();
            let (count, rest) = self.numbers.split_first().ok_or(WRONG)?;
            let count = usize::try_from(*count).ok().filter(|count| *count <= MAX_PIECES).ok_or(WRONG)?;
            let (pairs, half) = rest.as_chunks::<2>();
            if pairs.len() == count && half.is_empty() {
                let pieces: Vec<_> = pairs.iter().map(|[offset, length]| (*offset, *length)).collect();
                let map = u64::try_from(self.read).map_err(|_| WRONG)?;
                check(&pieces, size, stored.saturating_sub(map))?;
                return Ok(Some(pieces));
            }
        }
        Ok(None)
    }
}
