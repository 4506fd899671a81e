//! The tree that grows: everything that is done to the file system.
//!
//! Paths are relative to the current root, which is the image's: symbolic links on the way are followed as the image
//! itself would, and lead nowhere else. The last part of a path is never followed.

use super::BuildError;
use crate::archive::{Kind, Layout, Member, Time};
use rustix::{
    fs::{
        AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags, chmodat, chownat, ftruncate,
        linkat, lsetxattr, makedev, mkdirat, mknodat, openat, statat, symlinkat, utimensat,
    },
    io::Errno,
};
use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// Symbolic links on the way to one directory, as the kernel has it.
const MAX_LINKS: u32 = 40;

/// Bytes that are copied at once.
const BUFFER: usize = 256 << 10;

/// A directory as the root of an image.
#[derive(Debug)]
pub(super) struct Tree {
    root: PathBuf,
    /// The directory that was last made sure of: most members have the same as the one before.
    made: Vec<u8>,
    buffer: Vec<u8>,
}

/// What is at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum There {
    Nothing,
    Directory,
    Other,
}

impl Tree {
    /// A tree at this directory. Only `/` keeps symbolic links inside; others are for tests.
    pub(super) fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), made: Vec::new(), buffer: vec![0; BUFFER] }
    }

    pub(super) fn at(&self, path: &[u8]) -> PathBuf {
        self.root.join(OsStr::from_bytes(path))
    }

    /// What is there, without following it.
    pub(super) fn there(&self, path: &[u8]) -> Result<There, BuildError> {
        match statat(CWD, self.at(path), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => Ok(There::Directory),
            Ok(_) => Ok(There::Other),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(There::Nothing),
            Err(error) => Err(self.failed(path, error)),
        }
    }

    /// Whether two paths lead to one file.
    pub(super) fn is_same(&self, one: &[u8], other: &[u8]) -> Result<bool, BuildError> {
        let found = |path| match statat(CWD, self.at(path), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some((stat.st_dev, stat.st_ino))),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(error) => Err(self.failed(path, error)),
        };
        Ok(found(one)?.is_some_and(|one| found(other).is_ok_and(|other| other == Some(one))))
    }

    /// Names in a directory; none if it is none.
    pub(super) fn names(&self, path: &[u8]) -> Result<Vec<Vec<u8>>, BuildError> {
        let entries = match std::fs::read_dir(self.at(path)) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(Vec::new());
            }
            other => other.map_err(BuildError::io(show(path)))?,
        };
        let names: io::Result<Vec<_>> =
            entries.map(|entry| entry.map(|entry| entry.file_name().as_bytes().to_vec())).collect();
        names.map_err(BuildError::io(show(path)))
    }

    /// Removes whatever is there, with all below it.
    pub(super) fn remove(&mut self, path: &[u8]) -> Result<(), BuildError> {
        self.made.clear();
        let removed = match self.there(path)? {
            There::Nothing => Ok(()),
            There::Directory => std::fs::remove_dir_all(self.at(path)),
            There::Other => std::fs::remove_file(self.at(path)),
        };
        removed.map_err(BuildError::io(show(path)))
    }

    /// Makes the directories above a path that are missing.
    pub(super) fn make_parents(&mut self, path: &[u8]) -> Result<(), BuildError> {
        let parent = path.iter().rposition(|byte| *byte == b'/').and_then(|at| path.get(..at)).unwrap_or_default();
        if parent == self.made {
            return Ok(());
        }
        self.make_directories(parent, MAX_LINKS)?;
        self.made = parent.to_vec();
        Ok(())
    }

    fn make_directories(&self, path: &[u8], links: u32) -> Result<(), BuildError> {
        let mut done = Vec::new();
        for part in path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            if !done.is_empty() {
                done.push(b'/');
            }
            done.extend_from_slice(part);
            match statat(CWD, self.at(&done), AtFlags::empty()) {
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {}
                Ok(_) => {
                    return Err(BuildError::Archive(format!("{}: {} is not a directory", show(path), show(&done))));
                }
                // What a link that leads nowhere yet leads to is made in its place.
                Err(Errno::NOENT) if self.there(&done)? == There::Other => {
                    let links = links.checked_sub(1).ok_or_else(|| self.failed(&done, Errno::LOOP))?;
                    let target = rustix::fs::readlinkat(CWD, self.at(&done), Vec::new())
                        .map_err(|error| self.failed(&done, error))?;
                    let base = match done.iter().rposition(|byte| *byte == b'/') {
                        Some(at) if !target.as_bytes().starts_with(b"/") => done.get(..at).unwrap_or_default(),
                        _ => &[],
                    };
                    let target = join(base, target.as_bytes());
                    self.make_directories(&target, links)?;
                }
                Err(Errno::NOENT) => mkdirat(CWD, self.at(&done), Mode::from_raw_mode(0o755))
                    .map_err(|error| self.failed(&done, error))?,
                Err(error) => return Err(self.failed(&done, error)),
            }
        }
        Ok(())
    }

    /// Makes a directory where there is none.
    pub(super) fn directory(&self, path: &[u8]) -> Result<(), BuildError> {
        mkdirat(CWD, self.at(path), Mode::from_raw_mode(0o700)).map_err(|error| self.failed(path, error))
    }

    pub(super) fn symlink(&self, target: &[u8], path: &[u8]) -> Result<(), BuildError> {
        symlinkat(target, CWD, self.at(path)).map_err(|error| self.failed(path, error))
    }

    /// Gives what is at `target` another name. Whether there was something.
    pub(super) fn hard_link(&self, target: &[u8], path: &[u8]) -> Result<bool, BuildError> {
        match linkat(CWD, self.at(target), CWD, self.at(path), AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(self.failed(path, error)),
        }
    }

    pub(super) fn node(&self, member: &Member, path: &[u8]) -> Result<(), BuildError> {
        let kind = match member.kind {
            Kind::Character => FileType::CharacterDevice,
            Kind::Block => FileType::BlockDevice,
            _ => FileType::Fifo,
        };
        let device = makedev(member.device.0, member.device.1);
        mknodat(CWD, self.at(path), kind, Mode::from_raw_mode(0o600), device).map_err(|error| self.failed(path, error))
    }

    /// Makes a file and writes its content.
    pub(super) fn file(&mut self, member: &Member, path: &[u8], from: &mut impl Read) -> Result<(), BuildError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(CWD, self.at(path), flags, Mode::from_raw_mode(0o600));
        let mut file = File::from(opened.map_err(|error| self.failed(path, error))?);
        let mut buffer = std::mem::take(&mut self.buffer);
        let outcome = match &member.layout {
            Layout::Pieces(pieces) => pieces.iter().try_for_each(|(offset, length)| {
                file.seek(SeekFrom::Start(*offset)).map_err(|error| self.broken(path, error))?;
                self.copy(from, &mut file, *length, path, &mut buffer)
            }),
            _ => self.copy(from, &mut file, member.stored, path, &mut buffer),
        };
        self.buffer = buffer;
        outcome?;
        if member.layout != Layout::Whole {
            ftruncate(&file, member.size).map_err(|error| self.failed(path, error))?;
        }
        Ok(())
    }

    fn copy(
        &self,
        from: &mut impl Read,
        to: &mut File,
        length: u64,
        path: &[u8],
        buffer: &mut [u8],
    ) -> Result<(), BuildError> {
        let mut left = length;
        while left > 0 {
            let want = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            let n = from.read(buffer.get_mut(..want).unwrap_or_default());
            let n = match n {
                Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                other => other,
            }
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => BuildError::Archive(format!("it is cut short within {}", show(path))),
                io::ErrorKind::QuotaExceeded => BuildError::Full(error.to_string()),
                _ => BuildError::Archive(format!("{}: {error}", show(path))),
            })?;
            to.write_all(buffer.get(..n).unwrap_or_default()).map_err(|error| self.broken(path, error))?;
            left = left.saturating_sub(u64::try_from(n).unwrap_or(u64::MAX));
        }
        Ok(())
    }

    /// Owner, mode and attributes, in this order: each takes some of the later ones away.
    pub(super) fn attributes(&self, member: &Member, path: &[u8]) -> Result<(), BuildError> {
        let at = self.at(path);
        let (uid, gid) = (Uid::from_raw(member.uid), Gid::from_raw(member.gid));
        chownat(CWD, &at, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).map_err(|error| self.failed(path, error))?;
        if member.kind != Kind::Symlink {
            // Nothing but a symbolic link would be followed, and this is none.
            chmodat(CWD, &at, Mode::from_raw_mode(member.mode), AtFlags::empty())
                .map_err(|error| self.failed(path, error))?;
        }
        for (name, value) in &member.xattrs {
            lsetxattr(&at, name.as_slice(), value, XattrFlags::empty()).map_err(|error| {
                let what = format!("{}: attribute {}", show(path), show(name));
                match error {
                    // Said where an attribute is larger than ext4 takes, not only where the disk is full.
                    Errno::NOSPC if value.len() > 2048 => {
                        BuildError::Archive(format!("{what}: {} bytes are more than ext4 takes", value.len()))
                    }
                    Errno::NOSPC => self.full(&what),
                    error => BuildError::Archive(format!("{what}: {}", io::Error::from(error))),
                }
            })?;
        }
        Ok(())
    }

    pub(super) fn time(&self, time: Time, path: &[u8]) -> Result<(), BuildError> {
        let time = Timespec { tv_sec: time.seconds, tv_nsec: i64::from(time.nanoseconds) };
        let times = Timestamps { last_access: time, last_modification: time };
        utimensat(CWD, self.at(path), &times, AtFlags::SYMLINK_NOFOLLOW).map_err(|error| self.failed(path, error))
    }

    fn failed(&self, path: &[u8], error: Errno) -> BuildError {
        self.broken(path, error.into())
    }

    fn broken(&self, path: &[u8], error: io::Error) -> BuildError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::FileTooLarge => self.full(&show(path)),
            _ => BuildError::Io { what: show(path), error },
        }
    }

    fn full(&self, what: &str) -> BuildError {
        let inodes = rustix::fs::statvfs(Path::new(&self.root)).is_ok_and(|found| found.f_ffree == 0);
        let what = format!("{what}: no {} left in its file system", if inodes { "inode" } else { "room" });
        BuildError::Full(what)
    }
}

/// A path fit to print.
pub(super) fn show(path: &[u8]) -> String {
    String::from_utf8_lossy(path).chars().take(256).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// `path`, seen from `base`, without `.`, and with `..` applied as far as there is something to apply it to.
fn join(base: &[u8], path: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in base.split(|byte| *byte == b'/').chain(path.split(|byte| *byte == b'/')) {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join(&b'/')
}
