//! Records of pax headers: `LENGTH KEY=VALUE\n`, the length counting itself.

use super::{ArchiveError, MAX_PIECES, Time};

/// What records said that matters here.
#[derive(Debug, Clone, Default)]
pub(super) struct Pax {
    pub(super) path: Option<Vec<u8>>,
    pub(super) target: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) mtime: Option<Time>,
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(super) has_acl: bool,
    pub(super) sparse: Sparse,
}

/// GNU's three ways to say that a file is sparse.
#[derive(Debug, Clone, Default)]
pub(super) struct Sparse {
    /// 1.0: the map is in the data.
    pub(super) map_first: bool,
    /// 0.0 and 0.1: the map is here.
    pub(super) pieces: Option<Vec<(u64, u64)>>,
    /// 0.0: an offset whose length comes next.
    offset: Option<u64>,
    pub(super) real_size: Option<u64>,
    /// The member's name; the header has one that was made up.
    pub(super) name: Option<Vec<u8>>,
}

const DAMAGED: ArchiveError = ArchiveError::Pax("a record is not LENGTH KEY=VALUE");

impl Pax {
    /// Takes the records of one header. Of two with the same key the later counts.
    pub(super) fn read(&mut self, mut records: &[u8]) -> Result<(), ArchiveError> {
        while !records.is_empty() {
            let space = records.iter().position(|byte| *byte == b' ').ok_or(DAMAGED)?;
            let (digits, _) = records.split_at_checked(space).ok_or(DAMAGED)?;
            let length = usize::try_from(decimal(digits).ok_or(DAMAGED)?).map_err(|_| DAMAGED)?;
            let (record, rest) = records.split_at_checked(length).ok_or(DAMAGED)?;
            let record = record.get(space.saturating_add(1)..).ok_or(DAMAGED)?;
            let record = record.strip_suffix(b"\n").ok_or(DAMAGED)?;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or(DAMAGED)?;
            let (key, value) = record.split_at_checked(equals).ok_or(DAMAGED)?;
            self.take(key, value.get(1..).unwrap_or_default())?;
            records = rest;
        }
        Ok(())
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> Result<(), ArchiveError> {
        match key {
            b"path" => self.path = text(value)?,
            b"linkpath" => self.target = text(value)?,
            b"size" => self.size = number(value)?,
            b"uid" => self.uid = number(value)?,
            b"gid" => self.gid = number(value)?,
            b"mtime" => self.mtime = if value.is_empty() { None } else { Some(time(value)?) },
            b"GNU.sparse.major" => self.sparse.map_first = value == b"1",
            b"GNU.sparse.name" => self.sparse.name = text(value)?,
            b"GNU.sparse.realsize" | b"GNU.sparse.size" => self.sparse.real_size = number(value)?,
            b"GNU.sparse.map" => self.sparse.pieces = Some(pieces(value)?),
            b"GNU.sparse.offset" => self.sparse.offset = number(value)?,
            b"GNU.sparse.numbytes" => {
                let piece = self.sparse.offset.take().zip(number(value)?);
                let piece = piece.ok_or(ArchiveError::Sparse("a length without an offset"))?;
                let pieces = self.sparse.pieces.get_or_insert_default();
                pieces.push(piece);
            }
            // A file that is one hole has no pieces at all.
            b"GNU.sparse.numblocks" => drop(self.sparse.pieces.get_or_insert_default()),
            _ if key.starts_with(b"SCHILY.acl.") => self.has_acl = !value.is_empty(),
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    if name.is_empty() || name.contains(&0) {
                        return Err(ArchiveError::Pax("an attribute without a name"));
                    }
                    self.xattrs.retain(|(have, _)| have != name);
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Ok(())
    }
}

/// An empty value takes back what an earlier header said.
fn text(value: &[u8]) -> Result<Option<Vec<u8>>, ArchiveError> {
    if value.contains(&0) {
        return Err(ArchiveError::Pax("a name with a NUL byte"));
    }
    Ok(Some(value.to_vec()).filter(|value| !value.is_empty()))
}

fn number(value: &[u8]) -> Result<Option<u64>, ArchiveError> {
    if value.is_empty() {
        return Ok(None);
    }
    decimal(value).map(Some).ok_or(ArchiveError::Pax("a value that should be a number is none"))
}

/// Decimal digits.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0_u64, |value, byte| match byte {
        b'0'..=b'9' => value.checked_mul(10)?.checked_add(u64::from(byte.wrapping_sub(b'0'))),
        _ => None,
    })
}

/// Seconds with a sign and a fraction, of which nine digits count.
fn time(value: &[u8]) -> Result<Time, ArchiveError> {
    const WRONG: ArchiveError = ArchiveError::Pax("a time is no number");
    let (negative, value) = value.strip_prefix(b"-").map_or((false, value), |rest| (true, rest));
    let mut parts = value.splitn(2, |byte| *byte == b'.');
    let whole = parts.next().and_then(decimal).and_then(|whole| i64::try_from(whole).ok()).ok_or(WRONG)?;
    let fraction = parts.next().unwrap_or_default();
    let digits: Vec<u8> = fraction.iter().copied().chain(std::iter::repeat(b'0')).take(9).collect();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return Err(WRONG);
    }
    let nanoseconds = decimal(&digits).and_then(|digits| u32::try_from(digits).ok()).ok_or(WRONG)?;
    Ok(match (negative, nanoseconds) {
        (false, nanoseconds) => Time { seconds: whole, nanoseconds },
        (true, 0) => Time { seconds: whole.wrapping_neg(), nanoseconds },
        // The fraction counts forwards.
        (true, _) => Time {
            seconds: whole.wrapping_neg().wrapping_sub(1),
            nanoseconds: 1_000_000_000_u32.saturating_sub(nanoseconds),
        },
    })
}

/// `OFFSET,LENGTH,OFFSET,LENGTH…`
fn pieces(value: &[u8]) -> Result<Vec<(u64, u64)>, ArchiveError> {
    const WRONG: ArchiveError = ArchiveError::Sparse("it is not a list of offsets and lengths");
    let numbers: Option<Vec<u64>> =
        if value.is_empty() { Some(Vec::new()) } else { value.split(|byte| *byte == b',').map(decimal).collect() };
    let (pairs, rest) = numbers.as_deref().ok_or(WRONG)?.as_chunks::<2>();
    if !rest.is_empty() || pairs.len() > MAX_PIECES {
        return Err(WRONG);
    }
    Ok(pairs.iter().map(|[offset, length]| (*offset, *length)).collect())
}
