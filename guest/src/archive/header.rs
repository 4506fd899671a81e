//! One header of 512 bytes.

use super::{ArchiveError, BLOCK};

/// The fields, not yet interpreted together.
#[derive(Debug)]
pub(super) struct Header<'a> {
    block: &'a [u8; BLOCK],
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// Before POSIX: no magic.
    Old,
    /// POSIX: a prefix of the name.
    Ustar,
    /// GNU: other fields in the prefix's place.
    Gnu,
}

impl<'a> Header<'a> {
    /// Takes a block, unless it is all zeros: the archive's end.
    pub(super) fn read(block: &'a [u8; BLOCK]) -> Result<Option<Self>, ArchiveError> {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let format = match (part(block, 257, 6), part(block, 263, 2)) {
            (b"ustar\0", _) => Format::Ustar,
            (b"ustar ", b" \0") => Format::Gnu,
            _ => Format::Old,
        };
        let header = Self { block, format };
        header.check()?;
        Ok(Some(header))
    }

    /// The checksum is over the header with spaces in the checksum's own place. Some old programs summed signed bytes.
    fn check(&self) -> Result<(), ArchiveError> {
        let said = octal(self.part(148, 8)).ok_or(ArchiveError::Checksum)?;
        let (mut unsigned, mut signed) = (0_i128, 0_i128);
        for (at, byte) in self.block.iter().enumerate() {
            let byte = if (148..156).contains(&at) { b' ' } else { *byte };
            unsigned = unsigned.wrapping_add(i128::from(byte));
            signed = signed.wrapping_add(i128::from(byte.cast_signed()));
        }
        if said == unsigned || said == signed { Ok(()) } else { Err(ArchiveError::Checksum) }
    }

    pub(super) fn part(&self, at: usize, length: usize) -> &'a [u8] {
        part(self.block, at, length)
    }

    pub(super) fn format(&self) -> Format {
        self.format
    }

    pub(super) fn kind(&self) -> u8 {
        self.part(156, 1).first().copied().unwrap_or(0)
    }

    pub(super) fn path(&self) -> Vec<u8> {
        let name = text(self.part(0, 100));
        let prefix = text(self.part(345, 155));
        if self.format != Format::Ustar || prefix.is_empty() {
            return name.to_vec();
        }
        [prefix, name].join(&b'/')
    }

    pub(super) fn target(&self) -> Vec<u8> {
        text(self.part(157, 100)).to_vec()
    }

    /// A numeric field.
    pub(super) fn number(&self, field: &'static str, at: usize, length: usize) -> Result<i128, ArchiveError> {
        number(self.part(at, length)).ok_or(ArchiveError::Number { field })
    }
}

fn part(block: &[u8; BLOCK], at: usize, length: usize) -> &[u8] {
    block.get(at..).and_then(|rest| rest.get(..length)).unwrap_or_default()
}

/// A field's text, which a NUL ends if it is shorter than its field.
pub(super) fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// A number: octal digits, or, with the first bit set, big-endian two's complement in the remaining bits.
pub(super) fn number(field: &[u8]) -> Option<i128> {
    let (first, rest) = field.split_first()?;
    if first & 0x80 == 0 {
        return octal(field);
    }
    // Sign-extended from the bit after the mark.
    let mut value = i128::from(first & 0x7f);
    if first & 0x40 != 0 {
        value = value.wrapping_sub(0x80);
    }
    for byte in rest {
        value = value.checked_mul(256)?.checked_add(i128::from(*byte))?;
    }
    Some(value)
}

/// Octal digits between spaces, up to a NUL. None at all mean 0: some writers leave what does not apply empty.
fn octal(field: &[u8]) -> Option<i128> {
    let text = text(field).trim_ascii();
    text.iter().try_fold(0_i128, |value, byte| match byte {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(i128::from(byte.wrapping_sub(b'0'))),
        _ => None,
    })
}
