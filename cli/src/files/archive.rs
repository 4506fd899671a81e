//! Reads an archive of a guest's: sizes are bounded, names are checked, nothing is believed.
//!
//! The blocks are taken apart by [`guest::archive`], which reads the archives of images, too.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use guest::archive::{self, Layout, Member, Parser, Pushed, padded};
use guest::message::printable;

/// Longest name that Linux takes.
const MAX_PATH: usize = 4095;
/// Longest part of one.
const MAX_PART: usize = 255;
/// Deepest name. Each level costs a look-up for every file below it.
const MAX_DEPTH: usize = 200;
/// What may follow an archive's end: a record of padding.
const MAX_PADDING: u64 = 1 << 20;

/// What can be wrong with an archive.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArchiveError {
    /// It cannot be read.
    #[error("the guest's archive: {0}")]
    Read(#[from] io::Error),
    /// It is none.
    #[error("the guest's archive: {0}")]
    Malformed(#[from] archive::ArchiveError),
    /// A name that leads out, or that no file can have.
    #[error("the guest's archive: name {name:?}: {why}")]
    Name {
        /// Fit to print.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// More bytes than it may have.
    #[error("the guest sends more than {}", crate::units::show_size(*.0))]
    TooLarge(u64),
    /// More entries than it may have.
    #[error("the guest sends more than {0} files")]
    TooMany(u64),
    /// It does not end.
    #[error("the guest's archive goes on after its end")]
    Endless,
}

/// What may still come, over several archives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// The bytes that were allowed at first.
    limit: u64,
    bytes: u64,
    entries: u64,
}

/// Most entries.
pub(crate) const MAX_ENTRIES: u64 = 1_000_000;

/// What a directory takes of a disk, on most.
const DIRECTORY: u64 = 4096;

impl Budget {
    /// So many bytes of content, and [`MAX_ENTRIES`].
    pub(crate) fn new(bytes: u64) -> Self {
        Self { limit: bytes, bytes, entries: MAX_ENTRIES }
    }

    /// For a directory that is made here, whether the archive has an entry for it or names it in a path alone.
    pub(crate) fn directory(&mut self) -> Result<(), ArchiveError> {
        self.entry(DIRECTORY)
    }

    fn entry(&mut self, size: u64) -> Result<(), ArchiveError> {
        self.entries = self.entries.checked_sub(1).ok_or(ArchiveError::TooMany(MAX_ENTRIES))?;
        self.bytes = self.bytes.checked_sub(size).ok_or(ArchiveError::TooLarge(self.limit))?;
        Ok(())
    }
}

/// One entry, but for its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    /// Relative, without `.` and `..`; empty for the archive's root.
    pub(crate) path: PathBuf,
    /// What it is.
    pub(crate) kind: Kind,
    /// Bytes of content.
    pub(crate) size: u64,
    /// Permission bits: nothing else of a mode comes through.
    pub(crate) mode: u32,
    /// Seconds since 1970.
    pub(crate) mtime: u64,
    /// User.
    pub(crate) uid: u32,
    /// Group.
    pub(crate) gid: u32,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A directory.
    Directory,
    /// A file with content.
    File,
    /// A symbolic link to this.
    Link(Vec<u8>),
    /// What is never made here.
    Other(&'static str),
}

/// Calls `each` for every entry of an archive, with its content; then reads what follows the end.
pub(crate) fn read<E: From<ArchiveError>>(
    from: &mut dyn Read,
    budget: &mut Budget,
    mut each: impl FnMut(Header, &mut dyn Read, &mut Budget) -> Result<(), E>,
) -> Result<(), E> {
    let mut parser = Parser::new();
    let mut block = Vec::new();
    loop {
        block.clear();
        let wanted = u64::try_from(parser.wants()).unwrap_or(u64::MAX);
        let read = from.take(wanted).read_to_end(&mut block).map_err(ArchiveError::Read)?;
        if read == 0 && parser.is_between_members() {
            return Ok(());
        }
        if read < parser.wants() {
            return Err(ArchiveError::from(archive::ArchiveError::Cut).into());
        }
        match parser.push(&block).map_err(ArchiveError::Malformed)? {
            Pushed::More => budget.entry(0)?,
            Pushed::End => break,
            Pushed::Member(member) => {
                budget.entry(member.stored)?;
                let mut content = from.take(member.stored);
                each(header(&member)?, &mut content, budget)?;
                // What was not taken of it, and its padding.
                let rest = content.limit().saturating_add(padded(member.stored).saturating_sub(member.stored));
                let skipped = io::copy(&mut from.take(rest), &mut io::sink()).map_err(ArchiveError::Read)?;
                if skipped < rest {
                    return Err(ArchiveError::from(archive::ArchiveError::Cut).into());
                }
            }
        }
    }
    let rest = io::copy(&mut from.take(MAX_PADDING.saturating_add(1)), &mut io::sink()).map_err(ArchiveError::Read)?;
    if rest > MAX_PADDING { Err(ArchiveError::Endless.into()) } else { Ok(()) }
}

fn header(member: &Member) -> Result<Header, ArchiveError> {
    let kind = match member.kind {
        archive::Kind::File if member.layout == Layout::Whole => Kind::File,
        archive::Kind::File => Kind::Other("a sparse file"),
        archive::Kind::Directory => Kind::Directory,
        archive::Kind::Symlink => {
            let target = member.target.clone();
            if target.is_empty() || target.len() > MAX_PATH || target.contains(&0) {
                return Err(bad_name(&member.path, "it is a link to nothing that could be"));
            }
            Kind::Link(target)
        }
        archive::Kind::HardLink => Kind::Other("a hard link"),
        archive::Kind::Character | archive::Kind::Block => Kind::Other("a device"),
        archive::Kind::Fifo => Kind::Other("a named pipe"),
        archive::Kind::Label => Kind::Other("a label"),
    };
    Ok(Header {
        path: inside(&member.path)?,
        kind,
        size: member.stored,
        mode: member.mode & 0o777,
        mtime: u64::try_from(member.mtime.seconds).unwrap_or(0),
        uid: member.uid,
        gid: member.gid,
    })
}

/// A name as a path that leads downwards.
fn inside(name: &[u8]) -> Result<PathBuf, ArchiveError> {
    if name.len() > MAX_PATH {
        return Err(bad_name(name, "it is longer than any can be"));
    }
    if name.first() == Some(&b'/') {
        return Err(bad_name(name, "it is absolute"));
    }
    let mut path = PathBuf::new();
    let mut depth: usize = 0;
    for part in name.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".") {
        if part == b".." {
            return Err(bad_name(name, "it leads out of the directory"));
        }
        if part.contains(&0) || part.len() > MAX_PART {
            return Err(bad_name(name, "no file can be called so"));
        }
        depth = depth.saturating_add(1);
        path.push(OsStr::from_bytes(part));
    }
    if depth > MAX_DEPTH { Err(bad_name(name, "it is too deep")) } else { Ok(path) }
}

fn bad_name(name: &[u8], why: &'static str) -> ArchiveError {
    ArchiveError::Name { name: shown(Path::new(OsStr::from_bytes(name))), why }
}

/// A path fit to print.
pub(crate) fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tar::EntryType;

    use super::*;

    #[test]
    fn names_lead_downwards_or_are_refused() {
        for (name, path) in [("a/b", "a/b"), ("./a//b/", "a/b"), (".", ""), ("", ""), ("a/./b", "a/b"), ("...", "...")]
        {
            assert_eq!(inside(name.as_bytes()).unwrap(), Path::new(path), "{name}");
        }
        let (long, deep) = ("x".repeat(256), "x/".repeat(201));
        for name in ["/", "/a", "..", "a/..", "a/../b", "../a", "a\0b", &long, &deep, &"y/".repeat(2100)] {
            assert!(matches!(inside(name.as_bytes()), Err(ArchiveError::Name { .. })), "{name:?}");
        }
    }

    fn count(bytes: &[u8], limit: u64) -> Result<u64, ArchiveError> {
        let mut seen = 0;
        read(&mut &bytes[..], &mut Budget::new(limit), |header, content, _| {
            seen += 1;
            let copied = io::copy(content, &mut io::sink())?;
            assert!(copied <= header.size);
            Ok::<(), ArchiveError>(())
        })
        .map(|()| seen)
    }

    fn record(kind: EntryType, size: u64, content: &[u8]) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.set_path("x").unwrap();
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_cksum();
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    }

    #[test]
    fn a_long_name_of_any_length_takes_no_memory() {
        let huge = record(EntryType::GNULongName, 1 << 40, &[b'x'; 8192]);
        assert!(matches!(count(&huge, 1 << 50), Err(ArchiveError::Malformed(_))));
        let long = record(EntryType::GNULongName, 5000, &[b'x'; 5000]);
        let long = [long, record(EntryType::Regular, 0, b"")].concat();
        assert!(matches!(count(&long, 1 << 50), Err(ArchiveError::Name { .. })));
        let pax = record(EntryType::XHeader, 1 << 40, b"30 path=x");
        assert!(count(&pax, 1 << 50).is_err());
    }

    #[test]
    fn entries_and_bytes_are_counted() {
        let file = record(EntryType::Regular, 5, b"hello");
        let many = file.repeat(10);
        assert_eq!(count(&many, 50).unwrap(), 10);
        assert!(matches!(count(&many, 49), Err(ArchiveError::TooLarge(49))));
        let mut budget = Budget::new(u64::MAX);
        budget.entries = 2;
        let result = read(&mut many.as_slice(), &mut budget, |_, _, _| Ok::<(), ArchiveError>(()));
        assert!(matches!(result, Err(ArchiveError::TooMany(_))));
        assert!(matches!(count(&record(EntryType::Regular, 1 << 62, b"x"), 1 << 30), Err(ArchiveError::TooLarge(_))));
    }

    #[test]
    fn what_follows_the_end_is_bounded() {
        let mut endless = io::repeat(0);
        let result = read(&mut endless, &mut Budget::new(1), |_, _, _| Ok::<(), ArchiveError>(()));
        assert!(matches!(result, Err(ArchiveError::Endless)));
    }

    #[test]
    fn a_cut_archive_is_an_error() {
        let file = record(EntryType::Regular, 5, b"hello");
        for cut in [1, 100, 511, 512, 514, 700, 1023] {
            assert!(count(&file[..cut], 50).is_err(), "{cut}");
        }
        assert_eq!(count(&file, 50).unwrap(), 1, "without an end mark");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
            let _ = count(&bytes, 1 << 20);
        }

        #[test]
        fn any_change_to_an_archive_is_read_or_refused(at in 0_usize..1024, byte: u8, kind: u8) {
            let mut bytes = record(EntryType::new(kind), 5, b"hello");
            bytes.extend(record(EntryType::Regular, 5, b"hello"));
            bytes[at] = byte;
            let _ = count(&bytes, 1 << 20);
        }
    }
}
