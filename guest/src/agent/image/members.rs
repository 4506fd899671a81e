//! The members of one archive, with their content.

use super::BuildError;
use crate::archive::{BLOCK, Layout, MapReader, Member, Parser, Pushed, padded};
use std::io::{self, Read};

/// Bytes after an archive's end mark that are taken for its padding.
const MAX_PADDING: u64 = 64 << 20;

const UNMARKED: &str = "it is cut short: its end mark is missing";

/// Reads members one after the other.
pub(super) struct Members<R> {
    from: R,
    parser: Parser,
    /// Of the current member's stored bytes.
    left: u64,
    padding: usize,
    /// Bytes that were read in all, and how many there may be.
    total: u64,
    limit: u64,
}

impl<R: Read> Members<R> {
    /// `total` bytes of at most `limit` were read before.
    pub(super) fn new(from: R, total: u64, limit: u64) -> Self {
        Self { from, parser: Parser::new(), left: 0, padding: 0, total, limit }
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// The next member, whose content is then read from here; nothing at the archive's end, which must be marked if
    /// `marked`. What the last member's reader left is skipped.
    pub(super) fn next_member(&mut self, marked: bool) -> Result<Option<Box<Member>>, BuildError> {
        self.skip(self.left)?;
        let mut padding = [0; BLOCK];
        let padding = padding.get_mut(..std::mem::take(&mut self.padding)).unwrap_or_default();
        self.left = 0;
        // Some writers of layers leave out the last padding along with the end mark.
        match self.fill(padding)? {
            0 if !padding.is_empty() && !marked => return Ok(None),
            read if read < padding.len() => return Err(BuildError::Archive(UNMARKED.into())),
            _ => {}
        }
        loop {
            let mut bytes = vec![0; self.parser.wants()];
            let read = self.fill(&mut bytes)?;
            if read == 0 && self.parser.is_between_members() && !marked {
                return Ok(None);
            }
            if read < bytes.len() {
                return Err(BuildError::Archive(UNMARKED.into()));
            }
            match self.parser.push(&bytes).map_err(|error| BuildError::Archive(error.to_string()))? {
                Pushed::More => {}
                Pushed::Member(mut member) => {
                    self.left = member.stored;
                    self.padding = usize::try_from(padded(member.stored).saturating_sub(member.stored)).unwrap_or(0);
                    if member.layout == Layout::MapFirst {
                        member.layout = Layout::Pieces(self.map(&member)?);
                    }
                    return Ok(Some(member));
                }
                Pushed::End => {
                    self.rest()?;
                    return Ok(None);
                }
            }
        }
    }

    fn map(&mut self, member: &Member) -> Result<Vec<(u64, u64)>, BuildError> {
        let mut map = MapReader::default();
        let mut block = [0; BLOCK];
        loop {
            self.read_exact(&mut block).map_err(|error| self.broken(&error))?;
            let pieces = map.push(&block, member.size, member.stored);
            if let Some(pieces) = pieces.map_err(|error| BuildError::Archive(error.to_string()))? {
                return Ok(pieces);
            }
        }
    }

    /// Reads what follows the end mark, so that a checksum at the end of what was compressed is checked.
    fn rest(&mut self) -> Result<(), BuildError> {
        let mut buffer = [0; 8192];
        let mut rest: u64 = 0;
        while let n @ 1.. = self.fill(&mut buffer)? {
            rest = rest.saturating_add(u64::try_from(n).unwrap_or(u64::MAX));
            if rest > MAX_PADDING {
                return Err(BuildError::Archive("it goes on after its end mark".into()));
            }
        }
        Ok(())
    }

    fn skip(&mut self, length: u64) -> Result<(), BuildError> {
        let mut buffer = [0; 8192];
        let mut left = length;
        while left > 0 {
            let want = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            let read = self.fill(buffer.get_mut(..want).unwrap_or_default())?;
            if read == 0 {
                return Err(BuildError::Archive("it is cut short: it ends within a file".into()));
            }
            left = left.saturating_sub(u64::try_from(read).unwrap_or(u64::MAX));
        }
        Ok(())
    }

    /// Fills the buffer as far as there are bytes.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, BuildError> {
        let mut filled: usize = 0;
        while filled < buffer.len() {
            match self.from.read(buffer.get_mut(filled..).unwrap_or_default()) {
                Ok(0) => break,
                Ok(n) => filled = filled.saturating_add(n),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(&error)),
            }
        }
        self.count(filled)?;
        Ok(filled)
    }

    fn count(&mut self, read: usize) -> Result<(), BuildError> {
        self.total = self.total.saturating_add(u64::try_from(read).unwrap_or(u64::MAX));
        if self.total > self.limit {
            return Err(BuildError::Full(format!("it unpacks to more than {} bytes", self.limit)));
        }
        Ok(())
    }

    /// What the reader below says: the stream broke, or what is compressed is damaged.
    pub(super) fn broken(&self, error: &io::Error) -> BuildError {
        BuildError::Archive(match error.kind() {
            io::ErrorKind::UnexpectedEof => "it is cut short".into(),
            _ => format!("it cannot be decompressed: {error}"),
        })
    }
}

/// Reads the current member's stored bytes.
impl<R: Read> Read for Members<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if want == 0 {
            return Ok(0);
        }
        let n = self.from.read(buffer.get_mut(..want).unwrap_or_default())?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left = self.left.saturating_sub(u64::try_from(n).unwrap_or(u64::MAX));
        self.count(n).map_err(|error| io::Error::new(io::ErrorKind::QuotaExceeded, error))?;
        Ok(n)
    }
}
