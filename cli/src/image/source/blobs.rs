//! Where the blobs of an image lie: in a directory, or in an archive that is never unpacked here.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use guest::archive::{Kind, Layout, Parser, Pushed, padded};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::SourceError;
use super::json::MAX_JSON;
use crate::image::digest::Digest;

/// What is said of a part that is not there.
const MISSING: &str = "it is missing";
/// Most members of an archive of blobs. An image has a few for each layer.
const MAX_MEMBERS: usize = 16_384;
/// Links that are followed from one member to another.
const MAX_LINKS: usize = 8;

/// Bytes of a file, read without a position that others share.
#[derive(Debug, Clone)]
pub(super) struct Part {
    file: Arc<File>,
    offset: u64,
    left: u64,
}

impl Part {
    pub(super) fn new(file: Arc<File>, offset: u64, length: u64) -> Self {
        Self { file, offset, left: length }
    }

    pub(super) fn length(&self) -> u64 {
        self.left
    }
}

impl Read for Part {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if want == 0 {
            return Ok(0);
        }
        let n = self.file.read_at(buffer.get_mut(..want).unwrap_or_default(), self.offset)?;
        if n == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter while it was read"));
        }
        let read = u64::try_from(n).unwrap_or(u64::MAX);
        self.offset = self.offset.saturating_add(read);
        self.left = self.left.saturating_sub(read);
        Ok(n)
    }
}

/// The blobs of one image or several.
#[derive(Debug)]
pub(super) enum Blobs {
    /// Below a directory, and nowhere else.
    Directory(PathBuf, OwnedFd),
    /// In an archive.
    Archive(PathBuf, Arc<File>, Members),
}

/// The members of an archive, by their cleaned paths.
pub(super) type Members = HashMap<String, Member>;

#[derive(Debug, Clone)]
pub(super) enum Member {
    /// A file: where its content is.
    File { offset: u64, length: u64 },
    /// Another name for this path.
    Link(String),
}

impl Blobs {
    /// A file of the layout by its path.
    pub(super) fn open(&self, name: &str) -> Result<Part, SourceError> {
        let missing = || SourceError::part(name, MISSING);
        match self {
            Self::Directory(_, directory) => {
                let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
                let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
                let file = match rustix::fs::openat2(directory, name, flags, Mode::empty(), resolve) {
                    Err(Errno::NOENT) => return Err(missing()),
                    Err(Errno::XDEV) => {
                        return Err(SourceError::part(
                            name,
                            "it is a link that leads out of the layout; copy what it leads to",
                        ));
                    }
                    Err(Errno::LOOP) => return Err(SourceError::part(name, "it is a link without end")),
                    other => File::from(other.map_err(|error| SourceError::part(name, io::Error::from(error)))?),
                };
                let found = file.metadata().map_err(|error| SourceError::part(name, error))?;
                if !found.is_file() {
                    return Err(SourceError::part(name, "it is not a file"));
                }
                Ok(Part::new(Arc::new(file), 0, found.len()))
            }
            Self::Archive(_, file, members) => {
                let mut name = name;
                for _ in 0..MAX_LINKS {
                    match members.get(name).ok_or_else(missing)? {
                        Member::File { offset, length } => return Ok(Part::new(Arc::clone(file), *offset, *length)),
                        Member::Link(target) => name = target,
                    }
                }
                Err(SourceError::part(name, "it is a link without end"))
            }
        }
    }

    /// Whether there is a file of this path. Something else that stands there is an error.
    pub(super) fn has(&self, name: &str) -> Result<bool, SourceError> {
        match self.open(name) {
            Ok(_) => Ok(true),
            Err(SourceError::Part { why, .. }) if why == MISSING => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// A small file.
    pub(super) fn read(&self, name: &str) -> Result<Vec<u8>, SourceError> {
        let part = self.open(name)?;
        crate::image::disk::read_bounded(part, MAX_JSON).map_err(|error| SourceError::part(name, error))
    }

    /// A small blob, which must be what its digest says.
    pub(super) fn read_blob(&self, digest: &Digest) -> Result<Vec<u8>, SourceError> {
        let name = blob(digest);
        let bytes = self.read(&name)?;
        let found = Digest::of(&bytes);
        if found != *digest {
            return Err(SourceError::Digest { part: name, found, expected: digest.clone() });
        }
        Ok(bytes)
    }

    /// The layout's own path.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Directory(path, _) | Self::Archive(path, ..) => path,
        }
    }
}

/// Where a blob lies in a layout.
pub(super) fn blob(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// What an archive is.
#[derive(Debug)]
pub(super) enum Found {
    /// Blobs, and what names them.
    Blobs(Members),
    /// Something else: a root file system, if it is an archive at all.
    Other,
    /// No archive.
    Nothing(String),
}

/// Reads the headers of an archive as long as its members look like those of an image. The first that does not tells.
pub(super) fn look(file: &File, length: u64) -> io::Result<Found> {
    let mut parser = Parser::new();
    let mut members = Members::new();
    let mut offset: u64 = 0;
    loop {
        let mut bytes = vec![0; parser.wants()];
        let wanted = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if offset.saturating_add(wanted) > length {
            // Cut, or, at the beginning, too short for anything.
            return Ok(if members.is_empty() { Found::Nothing("too short".into()) } else { Found::Other });
        }
        file.read_exact_at(&mut bytes, offset)?;
        offset = offset.saturating_add(wanted);
        let member = match parser.push(&bytes) {
            Ok(Pushed::More) => continue,
            Ok(Pushed::End) => return Ok(if members.is_empty() { Found::Other } else { Found::Blobs(members) }),
            Ok(Pushed::Member(member)) => member,
            Err(error) if members.is_empty() => return Ok(Found::Nothing(error.to_string())),
            // What comes later is damaged: whoever unpacks it says so.
            Err(_) => return Ok(Found::Other),
        };
        let Some(name) = clean(&member.path).filter(|name| is_expected(name)) else { return Ok(Found::Other) };
        let entry = match member.kind {
            Kind::File if member.layout == Layout::Whole => Some(Member::File { offset, length: member.stored }),
            Kind::HardLink => clean(&member.target).map(Member::Link),
            Kind::Symlink => clean(&[parent(&name).as_bytes(), b"/", &member.target].concat()).map(Member::Link),
            Kind::Directory => None,
            _ => return Ok(Found::Other),
        };
        offset = offset.saturating_add(padded(member.stored));
        if let Some(entry) = entry {
            members.insert(name, entry);
        }
        if members.len() > MAX_MEMBERS {
            return Ok(Found::Other);
        }
    }
}

/// Whether an archive with this first header is one of an image.
pub(super) fn begins_as_image(head: &[u8]) -> Result<bool, String> {
    match Parser::new().push(head).map_err(|error| error.to_string())? {
        // An archive of a whole tree may begin with its root.
        Pushed::Member(member) => Ok(clean(&member.path).is_some_and(|name| !name.is_empty() && is_expected(&name))),
        Pushed::More | Pushed::End => Ok(false),
    }
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// A path from the archive's root, with `..` applied.
fn clean(path: &[u8]) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in std::str::from_utf8(path).ok()?.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Whether an archive of an image has members of this name.
fn is_expected(name: &str) -> bool {
    let first = name.split('/').next().unwrap_or(name);
    let stem = first.strip_suffix(".json").or_else(|| first.strip_suffix(".tar")).unwrap_or(first);
    matches!(name, "" | "oci-layout" | "index.json" | "manifest.json" | "repositories")
        || first == "blobs"
        || Digest::from_hex(stem).is_some()
}

#[cfg(test)]
#[path = "blobs_tests.rs"]
mod tests;
