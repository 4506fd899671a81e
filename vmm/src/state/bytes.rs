//! Little-endian fields in sections, written and read.

use super::StateError;
use super::plain::{Plain, bytes_of, from_bytes};

/// A section's name.
pub(super) type Tag = [u8; 4];

/// Appends fields.
#[derive(Debug, Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn plain<T: Plain>(&mut self, value: &T) {
        self.bytes(bytes_of(value));
    }

    /// A section: its name, its length, what `content` writes.
    pub(super) fn section(&mut self, tag: Tag, content: impl FnOnce(&mut Self)) {
        let mut inner = Self::default();
        content(&mut inner);
        self.bytes(&tag);
        self.u32(u32::try_from(inner.0.len()).unwrap_or(u32::MAX));
        self.bytes(&inner.0);
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Takes fields off the front of what is left of a section.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    section: Tag,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(section: Tag, rest: &'a [u8]) -> Self {
        Self { section, rest }
    }

    pub(super) fn bytes(&mut self, length: usize) -> Result<&'a [u8], StateError> {
        let (bytes, rest) =
            self.rest.split_at_checked(length).ok_or(StateError::Short { section: name(self.section) })?;
        self.rest = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], StateError> {
        self.bytes(N)?.try_into().map_err(|_| StateError::Short { section: name(self.section) })
    }

    pub(super) fn u8(&mut self) -> Result<u8, StateError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(super) fn u16(&mut self) -> Result<u16, StateError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, StateError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, StateError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn plain<T: Plain>(&mut self) -> Result<T, StateError> {
        from_bytes(self.bytes(size_of::<T>())?).ok_or(StateError::Short { section: name(self.section) })
    }

    /// A byte that says yes or no.
    pub(super) fn flag(&mut self, what: &'static str) -> Result<bool, StateError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(StateError::Value { what, value: value.into() }),
        }
    }

    /// A number of items, at most `most`.
    pub(super) fn count(&mut self, what: &'static str, most: usize) -> Result<usize, StateError> {
        let value = self.u16()?;
        if usize::from(value) > most {
            return Err(StateError::Value { what, value: value.into() });
        }
        Ok(value.into())
    }

    /// The next section, which has to be this one, read to its end.
    pub(super) fn section<T>(
        &mut self,
        tag: Tag,
        content: impl FnOnce(&mut Self) -> Result<T, StateError>,
    ) -> Result<T, StateError> {
        let found: Tag = self.array()?;
        if found != tag {
            return Err(StateError::Section { expected: name(tag), found: name(found) });
        }
        let length = usize::try_from(self.u32()?).unwrap_or(usize::MAX);
        let mut inner = Self::new(tag, self.bytes(length)?);
        let value = content(&mut inner)?;
        inner.end()?;
        Ok(value)
    }

    /// Nothing may be left.
    pub(super) fn end(&self) -> Result<(), StateError> {
        if self.rest.is_empty() { Ok(()) } else { Err(StateError::Trailing { section: name(self.section) }) }
    }
}

/// A tag in words, whatever its bytes are.
pub(super) fn name(tag: Tag) -> String {
    tag.escape_ascii().to_string()
}
