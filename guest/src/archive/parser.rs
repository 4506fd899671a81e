//! From blocks to members.

use super::{
    ArchiveError, BLOCK, Kind, Layout, MAX_EXTENSION, MAX_EXTENSIONS, Member, Time,
    header::{Format, Header, text},
    padded,
    pax::Pax,
    sparse,
};

/// Highest owner: the one above means "none" in system calls.
const MAX_ID: u64 = 0xffff_fffe;

/// What a push led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pushed {
    /// Nothing yet.
    More,
    /// A member, whose [`stored`](Member::stored) bytes follow, [`padded`] to whole blocks; after them the next header.
    Member(Box<Member>),
    /// The end of the archive. What follows is padding.
    End,
}

/// Turns headers into members. Holds at most one member's worth of extensions.
#[derive(Debug, Default)]
pub struct Parser {
    state: State,
    pax: Pax,
    global: Pax,
    long_path: Option<Vec<u8>>,
    long_target: Option<Vec<u8>>,
    extensions: u32,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Header,
    /// The body of an extension of this kind and length.
    Extension(u8, u64),
    /// More of a GNU sparse map, for this member.
    Map(Box<Member>),
}

impl Parser {
    /// At the beginning of an archive.
    #[must_use]
    pub fn new() -> Parser {
        Parser::default()
    }

    /// How many bytes the next push takes: whole blocks, at most [`MAX_EXTENSION`].
    #[must_use]
    pub fn wants(&self) -> usize {
        match self.state {
            State::Extension(_, length) => usize::try_from(padded(length)).unwrap_or(BLOCK),
            _ => BLOCK,
        }
    }

    /// Whether the archive may end here without its end mark: no header has been taken that waits for another.
    #[must_use]
    pub fn is_between_members(&self) -> bool {
        matches!(self.state, State::Header) && self.extensions == 0
    }

    /// Takes the bytes that it [`wants`](Parser::wants).
    ///
    /// # Errors
    /// They are no archive. Nothing sensible follows.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Pushed, ArchiveError> {
        match std::mem::take(&mut self.state) {
            State::Extension(kind, length) => {
                let length = usize::try_from(length).map_err(|_| ArchiveError::Cut)?;
                self.extension(kind, bytes.get(..length).ok_or(ArchiveError::Cut)?)?;
                Ok(Pushed::More)
            }
            State::Header => self.header(bytes.first_chunk().ok_or(ArchiveError::Cut)?),
            State::Map(member) => self.map(member, bytes.first_chunk().ok_or(ArchiveError::Cut)?),
        }
    }

    fn extension(&mut self, kind: u8, body: &[u8]) -> Result<(), ArchiveError> {
        match kind {
            b'L' => self.long_path = Some(text(body).to_vec()),
            b'K' => self.long_target = Some(text(body).to_vec()),
            b'g' => {
                self.global.read(body)?;
                // Names and lengths are one member's own.
                let Pax { uid, gid, mtime, .. } = std::mem::take(&mut self.global);
                self.global = Pax { uid, gid, mtime, ..Pax::default() };
            }
            _ => self.pax.read(body)?,
        }
        Ok(())
    }

    fn header(&mut self, block: &[u8; BLOCK]) -> Result<Pushed, ArchiveError> {
        let Some(header) = Header::read(block)? else { return Ok(Pushed::End) };
        let kind = header.kind();
        if matches!(kind, b'L' | b'K' | b'x' | b'X' | b'g') {
            let size = range("the length", header.number("length", 124, 12)?)?;
            if size > MAX_EXTENSION {
                return Err(ArchiveError::LongExtension(size));
            }
            self.extensions = self.extensions.saturating_add(1);
            if self.extensions > MAX_EXTENSIONS {
                return Err(ArchiveError::ManyExtensions);
            }
            if size > 0 {
                self.state = State::Extension(kind, size);
            }
            return Ok(Pushed::More);
        }
        let pax = std::mem::take(&mut self.pax);
        self.extensions = 0;
        let member = self.member(&header, kind, pax)?;
        if kind == b'S' {
            return self.old_sparse(&header, member);
        }
        Ok(Pushed::Member(Box::new(member)))
    }

    fn member(&mut self, header: &Header<'_>, kind: u8, pax: Pax) -> Result<Member, ArchiveError> {
        let sparse = pax.sparse;
        let path = sparse.name.or(pax.path).or(self.long_path.take()).unwrap_or_else(|| header.path());
        let target = pax.target.or(self.long_target.take()).unwrap_or_else(|| header.target());
        (self.long_path, self.long_target) = (None, None);
        let kind = match kind {
            // Before POSIX a directory was a file whose name ended in a slash.
            0 | b'0' if path.ends_with(b"/") => Kind::Directory,
            0 | b'0' | b'7' | b'S' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' => Kind::Character,
            b'4' => Kind::Block,
            b'5' | b'D' => Kind::Directory,
            b'6' => Kind::Fifo,
            b'V' => Kind::Label,
            b'M' => return Err(ArchiveError::Volumes),
            other => return Err(ArchiveError::Type(char::from(other))),
        };
        if path.is_empty() && kind != Kind::Label {
            return Err(ArchiveError::NoName);
        }
        let length = match pax.size {
            Some(size) => size,
            None => range("the length", header.number("length", 124, 12)?)?,
        };
        // A link or a device has no content, whatever the length says; GNU's directories may have a listing.
        let stored = match kind {
            Kind::File => length,
            Kind::Directory if header.kind() == b'D' => length,
            _ => 0,
        };
        let mut member = Member {
            path,
            target,
            kind,
            mode: u32::try_from(header.number("mode", 100, 8)? & 0o7777).unwrap_or(0),
            uid: owner("owner", pax.uid.or(self.global.uid), || header.number("owner", 108, 8))?,
            gid: owner("group", pax.gid.or(self.global.gid), || header.number("group", 116, 8))?,
            mtime: match pax.mtime.or(self.global.mtime) {
                Some(time) => time,
                None => Time { seconds: range("the time", header.number("time", 136, 12)?)?, nanoseconds: 0 },
            },
            stored,
            size: if kind == Kind::File { stored } else { 0 },
            layout: Layout::Whole,
            device: (0, 0),
            xattrs: pax.xattrs,
            has_acl: pax.has_acl,
        };
        if matches!(kind, Kind::Character | Kind::Block) {
            let device = |at| range("the device", header.number("device", at, 8)?);
            member.device = (device(329)?, device(337)?);
        }
        if kind == Kind::File && (sparse.map_first || sparse.pieces.is_some()) {
            member.size = sparse.real_size.ok_or(ArchiveError::Sparse("the file's length is missing"))?;
            member.layout = match sparse.pieces {
                Some(pieces) if !sparse.map_first => {
                    sparse::check(&pieces, member.size, stored)?;
                    Layout::Pieces(pieces)
                }
                _ => Layout::MapFirst,
            };
        }
        Ok(member)
    }

    /// GNU's own type: four pieces in the header, and 21 in each block that follows if it says so.
    fn old_sparse(&mut self, header: &Header<'_>, mut member: Member) -> Result<Pushed, ArchiveError> {
        if header.format() != Format::Gnu {
            return Err(ArchiveError::Sparse("it is in a header of another format"));
        }
        let mut pieces = Vec::new();
        sparse::add(&mut pieces, header.part(386, 96))?;
        member.size = range("the length", header.number("length", 483, 12)?)?;
        member.layout = Layout::Pieces(pieces);
        let more = header.part(482, 1).first().is_some_and(|more| *more != 0);
        self.end_map(Box::new(member), more)
    }

    fn map(&mut self, mut member: Box<Member>, block: &[u8; BLOCK]) -> Result<Pushed, ArchiveError> {
        let (entries, rest) = block.split_at(504);
        if let Layout::Pieces(pieces) = &mut member.layout {
            sparse::add(pieces, entries)?;
        }
        self.end_map(member, rest.first().is_some_and(|more| *more != 0))
    }

    fn end_map(&mut self, member: Box<Member>, more: bool) -> Result<Pushed, ArchiveError> {
        if more {
            self.state = State::Map(member);
            return Ok(Pushed::More);
        }
        if let Layout::Pieces(pieces) = &member.layout {
            sparse::check(pieces, member.size, member.stored)?;
        }
        Ok(Pushed::Member(member))
    }
}

fn range<T: TryFrom<i128>>(field: &'static str, value: i128) -> Result<T, ArchiveError> {
    T::try_from(value).map_err(|_| ArchiveError::Range { field, value })
}

fn owner(
    field: &'static str,
    pax: Option<u64>,
    header: impl FnOnce() -> Result<i128, ArchiveError>,
) -> Result<u32, ArchiveError> {
    let value = match pax {
        Some(value) => i128::from(value),
        None => header()?,
    };
    let id: u64 = range(field, value)?;
    if id > MAX_ID {
        return Err(ArchiveError::Range { field, value });
    }
    range(field, value)
}
