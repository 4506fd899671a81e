//! Tar archives, as far as reading them takes: pure, bounded, without descriptors.
//!
//! [`Parser`] takes headers and extensions and gives [`Member`]s; whoever reads the archive moves the bytes. The host
//! reads the outside of image archives with it, the builder in a guest their layers. It understands ustar, the old
//! format before it, GNU's long names and sparse files, and pax with what GNU tar, star and bsdtar put in it.
//!
//! ```
//! use guest::archive::{Parser, Pushed};
//! let archive = [0; 1024];
//! let mut parser = Parser::new();
//! assert_eq!(parser.wants(), 512);
//! assert!(matches!(parser.push(&archive[..512]), Ok(Pushed::End)));
//! ```

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod header;
mod parser;
mod pax;
mod sparse;

pub use parser::{Parser, Pushed};
pub use sparse::MapReader;

/// An archive's unit: headers have this length, data is padded to it.
pub const BLOCK: usize = 512;

/// Longest pax header or long name. Attributes of one file have at most 64 KiB each on Linux; a header with more than
/// this is an attack on memory.
pub const MAX_EXTENSION: u64 = 1 << 20;

/// Most extension headers for one member. Real archives have three.
pub const MAX_EXTENSIONS: u32 = 16;

/// Most pieces of a sparse file.
pub const MAX_PIECES: usize = 1 << 20;

/// What a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A file with content.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// Another name of an earlier member.
    HardLink,
    /// A character device.
    Character,
    /// A block device.
    Block,
    /// A named pipe.
    Fifo,
    /// Nothing that belongs to the tree: a volume label.
    Label,
}

/// A moment: seconds since 1970, which may be negative, and nanoseconds after them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Time {
    /// Seconds.
    pub seconds: i64,
    /// 0 to 999,999,999.
    pub nanoseconds: u32,
}

/// Where the content of a file lies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Layout {
    /// The stored bytes are the content.
    #[default]
    Whole,
    /// Each piece, offset and length, is stored after the one before; what is between them is zeros.
    Pieces(Vec<(u64, u64)>),
    /// As before, but the map of the pieces begins the stored bytes: see [`MapReader`].
    MapFirst,
}

/// One member of an archive, with everything that the headers before it said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its path, as written.
    pub path: Vec<u8>,
    /// What a link leads to, as written.
    pub target: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Permissions, with set-uid, set-gid and sticky: at most 0o7777.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// When it was last changed.
    pub mtime: Time,
    /// Bytes that follow the header, without padding.
    pub stored: u64,
    /// Length of the content.
    pub size: u64,
    /// Where the content lies.
    pub layout: Layout,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// It has access control lists in star's textual form, which are not understood.
    pub has_acl: bool,
}

/// Why bytes are no archive.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ArchiveError {
    /// not a tar archive, or damaged: the header's checksum is wrong
    #[error("not a tar archive, or damaged: the header's checksum is wrong")]
    Checksum,
    /// the header's {field} is no number
    #[error("the header's {field} is no number")]
    Number { field: &'static str },
    /// {field} {value} is out of range
    #[error("{field} {value} is out of range")]
    Range { field: &'static str, value: i128 },
    /// a member of unknown type {0:?}
    #[error("a member of unknown type {0:?}")]
    Type(char),
    /// a member without a name
    #[error("a member without a name")]
    NoName,
    /// it is one part of an archive in several volumes
    #[error("it is one part of an archive in several volumes")]
    Volumes,
    /// an extended header of {0} bytes: the limit is 1 MiB
    #[error("an extended header of {0} bytes: the limit is 1 MiB")]
    LongExtension(u64),
    /// more than 16 extended headers before one member
    #[error("more than 16 extended headers before one member")]
    ManyExtensions,
    /// a pax header is damaged: {0}
    #[error("a pax header is damaged: {0}")]
    Pax(&'static str),
    /// the map of a sparse file is damaged: {0}
    #[error("the map of a sparse file is damaged: {0}")]
    Sparse(&'static str),
    /// it ends in the middle of a header
    #[error("it ends in the middle of a header")]
    Cut,
}

/// `length`, rounded up to whole blocks.
#[must_use]
pub fn padded(length: u64) -> u64 {
    length.checked_next_multiple_of(BLOCK as u64).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
pub(crate) mod testing;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
mod tests;
