//! Puts a guest's archive below one directory of the host.
//!
//! Nothing that the guest sends, and nothing that another user does in the directory meanwhile, makes it write anywhere
//! else: every directory on the way is looked up with `openat2`, beneath the first one and without following links;
//! a file is written under a name of its own, then moved to its place, so no file, link or device that is there is ever
//! written through. Devices, pipes and hard links are left out, and so are links that lead out of what is copied. Of a mode
//! only the permissions are taken, within the umask.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, UTIME_OMIT, fchmod, fchown, fstat, futimens,
    mkdirat, openat, openat2, renameat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;

use super::archive::{self, ArchiveError, Budget, Header, Kind, shown};
use crate::image::progress::Progress;

/// Every component is looked up so.
pub(crate) const SAFELY: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
/// Most bytes of names of directories whose modes wait for the end.
const MAX_NAMES: usize = 64 << 20;
/// Bytes that are copied at once.
const CHUNK: usize = 128 << 10;
/// Most things left out that are named; the others are counted.
const MAX_NAMED: usize = 8;

/// Why a copy stopped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExtractError {
    /// The archive.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// What is in its way here.
    #[error("{path}: {why}", path = shown(path))]
    InTheWay {
        /// Where, below the destination.
        path: PathBuf,
        /// What.
        why: &'static str,
    },
    /// The host's file system.
    #[error("{path}: {error}", path = shown(path))]
    Io {
        /// Where, below the destination.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The guest sends something else than it said.
    #[error("the guest sends {0}, which was not asked for")]
    Unasked(String),
}

/// What an archive may hold, and where it goes.
#[derive(Debug, Clone)]
pub(crate) enum Shape {
    /// One file or link, which gets this name whatever the archive calls it.
    Single(OsString),
    /// Anything, below the directory.
    Tree,
}

/// How files are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// Permissions that no file gets.
    pub(crate) umask: u32,
    /// Whether files get the owner that they have in the guest.
    pub(crate) owners: bool,
}

/// What was copied.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    /// Files and links.
    pub(crate) files: u64,
    /// Directories, those that were there among them.
    pub(crate) directories: u64,
    /// Bytes of content.
    pub(crate) bytes: u64,
    /// What was left out and why; the first few.
    pub(crate) left_out: Vec<String>,
    /// How much more was.
    pub(crate) more_left_out: u64,
}

impl Summary {
    fn leave_out(&mut self, path: &Path, why: &str) {
        if self.left_out.len() < MAX_NAMED {
            self.left_out.push(format!("{}: left out: {why}", shown(path)));
        } else {
            self.more_left_out = self.more_left_out.saturating_add(1);
        }
    }

    /// What the user is told.
    pub(crate) fn notes(&self) -> Vec<String> {
        let more = (self.more_left_out > 0).then(|| format!("and {} more were left out", self.more_left_out));
        self.left_out.iter().cloned().chain(more).collect()
    }
}

/// A directory that archives are put into.
#[derive(Debug)]
pub(crate) struct Destination<'a> {
    root: BorrowedFd<'a>,
    rules: Rules,
    /// Whether the root itself gets the mode and the time that the archive says.
    root_is_new: bool,
    /// What earlier archives brought, where several share the directory.
    brought: Option<HashSet<PathBuf>>,
    /// Directories that were made, with what they get in the end.
    made: Vec<Made>,
    names: usize,
    /// Who is told how much has come.
    progress: Option<&'a mut Progress>,
}

/// A directory that was made here.
#[derive(Debug)]
struct Made {
    path: PathBuf,
    mode: u32,
    mtime: u64,
    /// Which it is, whatever has its name in the end.
    identity: Identity,
}

/// Device and inode.
#[derive(Debug, PartialEq, Eq)]
struct Identity(u64, u64);

impl Identity {
    fn of(directory: impl AsFd) -> Result<Self, Errno> {
        fstat(directory).map(|stat| Self(stat.st_dev, stat.st_ino))
    }
}

impl<'a> Destination<'a> {
    /// A directory; `root_is_new` if it was made for what comes.
    pub(crate) fn new(root: BorrowedFd<'a>, rules: Rules, root_is_new: bool) -> Self {
        Self { root, rules, root_is_new, brought: None, made: Vec::new(), names: 0, progress: None }
    }

    /// Tells how much has come.
    pub(crate) fn telling(mut self, progress: &'a mut Progress) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Of two archives that bring the same file the first counts.
    pub(crate) fn shared(mut self) -> Self {
        self.brought = Some(HashSet::new());
        self
    }

    /// Puts an archive here. What was put here before an error stays. Until [`Destination::finish`] the directories that were
    /// made are ours alone, so that the next archive can write in them.
    pub(crate) fn extract(
        &mut self,
        from: &mut dyn Read,
        shape: &Shape,
        budget: &mut Budget,
    ) -> Result<Summary, ExtractError> {
        let mut summary = Summary::default();
        let mut new = Vec::new();
        let result = archive::read(from, budget, |mut header, content, budget| {
            if let Shape::Single(name) = shape {
                if summary.files > 0 || !matches!(header.kind, Kind::File | Kind::Link(_)) {
                    return Err(ExtractError::Unasked(shown(&header.path)));
                }
                header.path = PathBuf::from(name);
                if let Some(progress) = &mut self.progress {
                    progress.expect(header.size);
                }
            }
            if self.brought.as_ref().is_some_and(|all| header.kind != Kind::Directory && all.contains(&header.path)) {
                summary.leave_out(&header.path, "another pattern brought it already");
                return Ok(());
            }
            self.put(&header, content, budget, &mut summary)?;
            if self.brought.is_some() && header.kind != Kind::Directory {
                self.keep_name(&header.path)?;
                new.push(header.path);
            }
            Ok(())
        });
        if let Some(brought) = &mut self.brought {
            brought.extend(new);
        }
        result.map(|()| summary)
    }

    fn put(
        &mut self,
        header: &Header,
        content: &mut dyn Read,
        budget: &mut Budget,
        summary: &mut Summary,
    ) -> Result<(), ExtractError> {
        let path = header.path.as_path();
        let name = match (path.file_name(), &header.kind) {
            (Some(name), _) => name,
            (None, Kind::Directory) => {
                if self.root_is_new {
                    let identity = Identity::of(self.root).map_err(io_at(path))?;
                    self.made.push(Made { path: PathBuf::new(), mode: header.mode, mtime: header.mtime, identity });
                }
                return Ok(());
            }
            (None, _) => return Err(ExtractError::Unasked("a file without a name".to_owned())),
        };
        let above = path.parent().unwrap_or(Path::new(""));
        match &header.kind {
            Kind::Other(what) => summary.leave_out(path, &format!("it is {what}")),
            Kind::Link(target) if !stays_inside(above, target) => {
                let target = shown(Path::new(OsStr::from_bytes(target)));
                summary.leave_out(path, &format!("it is a link to {target}, outside of what is copied"));
            }
            Kind::Directory => {
                self.directory(path, header, budget)?;
                summary.directories = summary.directories.saturating_add(1);
            }
            Kind::Link(target) => {
                let directory = self.open(above, budget)?;
                let temporary = Temporary::link(&directory, target).map_err(io_at(path))?;
                temporary.move_to(name, path)?;
                summary.files = summary.files.saturating_add(1);
            }
            Kind::File => {
                let directory = self.open(above, budget)?;
                self.file(&directory, name, header, content)?;
                summary.files = summary.files.saturating_add(1);
                summary.bytes = summary.bytes.saturating_add(header.size);
            }
        }
        Ok(())
    }

    /// Opens a directory below the root, and makes what is missing of it.
    fn open(&self, path: &Path, budget: &mut Budget) -> Result<OwnedFd, ExtractError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let look = |at: BorrowedFd<'_>, name: &Path| openat2(at, name, flags, Mode::empty(), SAFELY);
        let whole = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        match look(self.root, whole) {
            Err(Errno::NOENT) => {}
            other => return other.map_err(|error| in_the_way(path, error)),
        }
        let mut at: Option<OwnedFd> = None;
        let mut so_far = PathBuf::new();
        for part in path.components() {
            so_far.push(part);
            let here = at.as_ref().map_or(self.root, AsFd::as_fd);
            let part = Path::new(part.as_os_str());
            let next = match look(here, part) {
                Err(Errno::NOENT) => {
                    budget.directory()?;
                    match mkdirat(here, part, Mode::from_raw_mode(0o777)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(io_at(&so_far)(error)),
                    }
                    look(here, part)
                }
                other => other,
            };
            at = Some(next.map_err(|error| in_the_way(&so_far, error))?);
        }
        at.ok_or_else(|| in_the_way(path, Errno::NOENT))
    }

    fn directory(&mut self, path: &Path, header: &Header, budget: &mut Budget) -> Result<(), ExtractError> {
        let above = self.open(path.parent().unwrap_or(Path::new("")), budget)?;
        let name = path.file_name().unwrap_or_default();
        // For us alone until the end: what it will be may forbid us to write in it.
        match mkdirat(&above, name, Mode::RWXU) {
            Ok(()) => {
                budget.directory()?;
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let made = openat2(&above, name, flags, Mode::empty(), SAFELY).map_err(io_at(path))?;
                if self.rules.owners {
                    own(&made, header).map_err(io_at(path))?;
                }
                let identity = Identity::of(&made).map_err(io_at(path))?;
                self.keep_name(path)?;
                self.made.push(Made { path: path.to_owned(), mode: header.mode, mtime: header.mtime, identity });
                Ok(())
            }
            // What is a directory here already stays as it is; anything else is in the way.
            Err(Errno::EXIST) => self.open(path, budget).map(drop),
            Err(error) => Err(io_at(path)(error)),
        }
    }

    fn file(
        &mut self,
        directory: &OwnedFd,
        name: &OsStr,
        header: &Header,
        content: &mut dyn Read,
    ) -> Result<(), ExtractError> {
        let path = header.path.as_path();
        let (temporary, mut file) = Temporary::file(directory).map_err(io_at(path))?;
        let mut left = header.size;
        let mut buffer = vec![0; CHUNK];
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
            let n = content.read(buffer.get_mut(..most).unwrap_or_default()).map_err(ArchiveError::Read)?;
            if n == 0 {
                return Err(ArchiveError::Read(io::ErrorKind::UnexpectedEof.into()).into());
            }
            let bytes = buffer.get(..n).unwrap_or_default();
            file.write_all(bytes).map_err(|error| ExtractError::Io { path: path.to_owned(), error })?;
            let n = u64::try_from(n).unwrap_or(u64::MAX);
            left = left.saturating_sub(n);
            if let Some(progress) = &mut self.progress {
                progress.add(n);
            }
        }
        if self.rules.owners {
            own(&file, header).map_err(io_at(path))?;
        }
        fchmod(&file, self.mode(header.mode)).map_err(io_at(path))?;
        set_time(&file, header.mtime).map_err(io_at(path))?;
        temporary.move_to(name, path)
    }

    fn mode(&self, mode: u32) -> Mode {
        Mode::from_raw_mode(mode & 0o777 & !self.rules.umask)
    }

    /// Counts a name that is held until the end.
    fn keep_name(&mut self, path: &Path) -> Result<(), ExtractError> {
        self.names = self.names.saturating_add(path.as_os_str().len()).saturating_add(64);
        if self.names > MAX_NAMES { Err(ArchiveError::TooMany(archive::MAX_ENTRIES).into()) } else { Ok(()) }
    }

    /// Gives the directories that were made their modes and times, the deepest first: once nothing more comes, also after
    /// an archive that failed. One that someone has put in the place of ours meanwhile is left as it is.
    pub(crate) fn finish(self) -> Result<(), ExtractError> {
        for made in self.made.iter().rev() {
            let path = made.path.as_path();
            let whole = if path.as_os_str().is_empty() { Path::new(".") } else { path };
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let directory =
                openat2(self.root, whole, flags, Mode::empty(), SAFELY).map_err(|error| in_the_way(path, error))?;
            if Identity::of(&directory).map_err(io_at(path))? != made.identity {
                return Err(in_the_way(path, Errno::XDEV));
            }
            fchmod(&directory, self.mode(made.mode)).map_err(io_at(path))?;
            set_time(&directory, made.mtime).map_err(io_at(path))?;
        }
        Ok(())
    }
}

/// Whether a link in this directory leads to somewhere in what is copied, whatever other such links there are: only its
/// first parts may lead upwards, and from a real directory, so no further than its depth.
fn stays_inside(above: &Path, target: &[u8]) -> bool {
    let mut parts = target.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
    let depth = above.components().count();
    let upwards = parts.by_ref().take_while(|part| *part == b"..").count();
    target.first() != Some(&b'/') && upwards <= depth && !parts.any(|part| part == b"..")
}

fn own(file: impl AsFd, header: &Header) -> Result<(), Errno> {
    let (uid, gid) = (rustix::fs::Uid::from_raw(header.uid), rustix::fs::Gid::from_raw(header.gid));
    fchown(file, Some(uid), Some(gid))
}

fn set_time(file: impl AsFd, mtime: u64) -> Result<(), Errno> {
    // A time that no file system has is left as it is.
    let Ok(seconds) = u32::try_from(mtime) else { return Ok(()) };
    let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    futimens(file, &Timestamps { last_access: time(0, UTIME_OMIT), last_modification: time(i64::from(seconds), 0) })
}

/// A file or link under a name of its own, which is removed unless it is moved to its place.
struct Temporary<'a> {
    directory: &'a OwnedFd,
    name: String,
}

impl<'a> Temporary<'a> {
    fn file(directory: &'a OwnedFd) -> Result<(Self, File), Errno> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Self::make(directory, |name| openat(directory, name, flags, Mode::RUSR | Mode::WUSR).map(File::from))
    }

    fn link(directory: &'a OwnedFd, target: &[u8]) -> Result<Self, Errno> {
        Self::make(directory, |name| symlinkat(target, directory, name)).map(|(temporary, ())| temporary)
    }

    fn make<T>(directory: &'a OwnedFd, make: impl Fn(&str) -> Result<T, Errno>) -> Result<(Self, T), Errno> {
        loop {
            let mut random = [0; 8];
            rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
            let name = format!(".bulkhead-{:016x}", u64::from_le_bytes(random));
            match make(&name) {
                Err(Errno::EXIST) => {}
                other => return other.map(|made| (Self { directory, name }, made)),
            }
        }
    }

    /// Takes the place of a file or link of that name, and of nothing else.
    fn move_to(mut self, name: &OsStr, path: &Path) -> Result<(), ExtractError> {
        let in_the_way = |why| Err(ExtractError::InTheWay { path: path.to_owned(), why });
        match statat(self.directory, name, AtFlags::SYMLINK_NOFOLLOW).map(|stat| FileType::from_raw_mode(stat.st_mode))
        {
            Err(Errno::NOENT) | Ok(FileType::RegularFile | FileType::Symlink) => {}
            Ok(FileType::Directory) => return in_the_way("a directory is in its place here"),
            Ok(_) => return in_the_way("a device, pipe or socket is in its place here"),
            Err(error) => return Err(io_at(path)(error)),
        }
        renameat(self.directory, &*self.name, self.directory, name).map_err(io_at(path))?;
        self.name.clear();
        Ok(())
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if !self.name.is_empty() {
            // It may be gone with its directory.
            let _ = unlinkat(self.directory, &*self.name, AtFlags::empty());
        }
    }
}

fn io_at(path: &Path) -> impl Fn(Errno) -> ExtractError + '_ {
    move |error| ExtractError::Io { path: path.to_owned(), error: error.into() }
}

fn in_the_way(path: &Path, error: Errno) -> ExtractError {
    let why = match error {
        Errno::LOOP => "a symbolic link is in its way here; it is not followed",
        Errno::NOTDIR => "a file is here, where the guest has a directory",
        Errno::XDEV => "its directory was moved away meanwhile",
        other => return io_at(path)(other),
    };
    ExtractError::InTheWay { path: path.to_owned(), why }
}
