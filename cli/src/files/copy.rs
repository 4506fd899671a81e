//! Copies between the user's files and a guest: looks what stands where, decides, and moves.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest::message::{FileKind, FileStat};
use rustix::fs::{Mode, OFlags, mkdirat, open, openat2};
use rustix::io::Errno;

use super::archive::{Budget, shown};
use super::channel::{Channel, INPUT_PATIENCE};
use super::extract::{Destination, Rules, SAFELY, Shape, Summary};
use super::pack::{self, Form, Owner, PackError, Packed};
use super::rules::{Ending, Plan, Source, There, absolute, contents_only, plan, split};
use super::umask;
use crate::frame::{Copy, Request};
use crate::image::progress::{Counted, Progress};
use crate::units::show_size;

/// A running guest, by its supervisor.
pub(crate) struct Guest<'a> {
    /// Makes a connection.
    pub(crate) dial: &'a dyn Fn() -> Result<UnixStream, String>,
}

/// How files go in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inwards {
    /// Whose they are there.
    pub(crate) owner: Owner,
    /// Whether a link stands for what it leads to.
    pub(crate) follow: bool,
    /// Whether what is missing of the destination's directory is made.
    pub(crate) make_parents: bool,
    /// Whether the destination is a directory in any case.
    pub(crate) into: bool,
}

/// How files come out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outwards {
    /// Whether they keep their owners.
    pub(crate) owners: bool,
    /// Whether a link stands for what it leads to.
    pub(crate) follow: bool,
    /// Most bytes.
    pub(crate) limit: u64,
}

impl Guest<'_> {
    /// Looks what stands at a path in the guest; as root, or as a user.
    pub(crate) fn stat(&self, path: &str, follow: bool, user: Option<&str>) -> Result<FileStat, String> {
        Channel::stat((self.dial)()?, path, follow, user).map_err(|error| format!("{path}: {error}"))
    }

    fn channel(&self, copy: Copy, patience: Option<Duration>) -> Result<Channel, String> {
        Channel::open((self.dial)()?, Request::Copy(copy), patience).map_err(|error| error.to_string())
    }

    /// Copies what a run's command waits for into the guest. It may take its time, but not stand still: nobody may be there
    /// who would end it.
    pub(crate) fn copy_in(&self, source: &str, destination: &str, how: Inwards) -> Result<Packed, String> {
        let mut progress = Progress::new("copying", None, true);
        self.carry_in(source, destination, how, Some(INPUT_PATIENCE), &mut progress)
    }

    /// Copies a file or directory of the user's into the guest.
    pub(crate) fn copy_in_telling(
        &self,
        source: &str,
        destination: &str,
        how: Inwards,
        progress: &mut Progress,
    ) -> Result<Packed, String> {
        self.carry_in(source, destination, how, None, progress)
    }

    fn carry_in(
        &self,
        source: &str,
        destination: &str,
        how: Inwards,
        patience: Option<Duration>,
        progress: &mut Progress,
    ) -> Result<Packed, String> {
        let path = Path::new(source);
        let kind = here(path, how.follow).map_err(|error| format!("{source}: {error}"))?;
        let destination = absolute(destination);
        let (there, resolved) = self.there(&destination, how.make_parents)?;
        let ending = match Ending::of(&destination) {
            // What is missing is made, so a directory that is to be there is one that becomes one.
            Ending::Dot if how.make_parents => Ending::Slash,
            ending => ending,
        };
        let into = how.into || (how.make_parents && ending == Ending::Slash && kind == Source::File);
        let made = into && matches!(there, There::Absent { .. });
        let there = if made { There::Directory } else { there };
        let plan = plan(kind, there, ending).map_err(|why| format!("{destination} in the run: {why}"))?;
        let nowhere = || format!("{destination} in the run: it has no name to give");
        let (directory, name) = match plan {
            Plan::Into => (resolved, Some(own_name(path).map_err(|error| format!("{source}: {error}"))?)),
            Plan::As => split(&resolved).map(|(above, name)| (above, Some(name.into()))).ok_or_else(nowhere)?,
            Plan::Contents => (resolved, None),
        };
        // A directory that is made belongs to whom the files belong.
        let (directory, within) = match split(&directory).filter(|_| made) {
            Some((above, last)) => (above, Some(OsString::from(last))),
            None => (directory, None),
        };
        let form = Form { owner: how.owner, within: within.as_deref() };
        if let Some(found) = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file) {
            progress.expect(found.len());
        }
        let mut channel = self.channel(Copy::In { directory }, patience)?;
        let mut counted = Counted(&mut channel, progress);
        let packed = match (kind, name) {
            (Source::File, Some(name)) => pack::single(path, how.follow, &name, form, &mut counted),
            (_, name) => pack::tree(path, name.as_deref(), form, &mut counted),
        };
        match packed {
            Ok(packed) => {
                // If the guest's end is gone, it has said why.
                let _ = channel.end_input();
                channel.finish().map(|()| packed).map_err(|error| format!("{destination} in the run: {error}"))
            }
            // The guest's end has stopped, and says why.
            Err(PackError::There(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
                let why = channel.finish().err().unwrap_or_else(|| error.to_string());
                Err(format!("{destination} in the run: {why}"))
            }
            // Dropped, and not ended: the guest's end must not take it for the whole.
            Err(error) => Err(error.to_string()),
        }
    }

    /// Copies a file or directory of the guest's to the user's files.
    pub(crate) fn copy_out(
        &self,
        source: &str,
        destination: &str,
        how: Outwards,
        progress: &mut Progress,
    ) -> Result<Summary, String> {
        let path = absolute(source);
        let in_the_run = |why: &str| format!("{path} in the run: {why}");
        let slash = path.len() > 1 && path.ends_with('/');
        let found = self.stat(path.trim_end_matches('/'), how.follow || slash, None);
        let found = if path.trim_end_matches('/').is_empty() { self.stat("/", true, None) } else { found }?;
        let kind = match found.kind {
            FileKind::Directory => Source::Directory { contents: contents_only(source) },
            FileKind::File | FileKind::Link if !slash => Source::File,
            FileKind::File | FileKind::Link => return Err(in_the_run("it is not a directory")),
            FileKind::Absent => return Err(in_the_run("there is no such file or directory")),
            FileKind::Other => return Err(in_the_run("it is a device, pipe or socket")),
        };
        let real = if how.follow { found.path.unwrap_or_else(|| path.clone()) } else { path.clone() };
        let local = Local::find(destination)?;
        let plan = plan(kind, local.there, Ending::of(destination)).map_err(|why| format!("{destination}: {why}"))?;
        let name = match plan {
            Plan::Into => Some(
                split(&path)
                    .map(|(_, name)| OsString::from(name))
                    .ok_or_else(|| in_the_run("it has no name of its own"))?,
            ),
            Plan::As | Plan::Contents => None,
        };
        let rules = Rules { umask: if how.owners { 0 } else { umask() }, owners: how.owners };
        let mut budget = Budget::new(how.limit);
        let failed = |error: &dyn std::fmt::Display| format!("{destination}: {error}");
        let (out, shape, root, new) = match (kind, plan) {
            (Source::File, _) => {
                let (directory, name) = match name {
                    Some(name) => (local.open()?, name),
                    None => local.open_above()?,
                };
                (real, Shape::Single(name), directory, false)
            }
            (Source::Directory { .. }, Plan::Contents) => (below(&real), Shape::Tree, local.open()?, false),
            (Source::Directory { .. }, _) => {
                let (above, name) = match name {
                    Some(name) => (local.open()?, name),
                    None => local.open_above()?,
                };
                let (root, new) = make_directory(&above, &name).map_err(|error| failed(&error))?;
                (below(&real), Shape::Tree, root, new)
            }
        };
        let mut channel = self.channel(Copy::Out { path: out }, None)?;
        let mut into = Destination::new(root.as_fd(), rules, new).telling(progress);
        let extracted = into.extract(&mut channel, &shape, &mut budget);
        let finished = into.finish();
        let summary = extracted.and_then(|summary| finished.map(|()| summary)).map_err(|error| failed(&error))?;
        channel.finish().map_err(|error| in_the_run(&error))?;
        match (&shape, summary.files, summary.left_out.first()) {
            // A file that was not copied is no success.
            (Shape::Single(_), 0, Some(why)) => Err(format!("{why}; -L copies what it leads to")),
            (Shape::Single(_), 0, None) => Err(in_the_run("the guest sent nothing")),
            _ => Ok(summary),
        }
    }

    /// Unpacks the user's archive in a directory of the guest's.
    pub(crate) fn archive_in(&self, from: &mut dyn Read, destination: &str) -> Result<(), String> {
        let destination = absolute(destination);
        let failed = |error: &str| format!("{destination} in the run: {error}");
        match self.there(&destination, false)? {
            (There::Directory, directory) => {
                let mut channel = self.channel(Copy::In { directory }, None)?;
                match io::copy(from, &mut channel) {
                    Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error.to_string()),
                    _ => {}
                }
                let _ = channel.end_input();
                channel.finish().map_err(|error| failed(&error))
            }
            _ => Err(failed("an archive needs a directory that is there")),
        }
    }

    /// Writes a file or directory of the guest's as an archive, of which at most the limit comes.
    pub(crate) fn archive_out(&self, source: &str, follow: bool, limit: u64, to: &mut dyn Write) -> Result<(), String> {
        let path = absolute(source);
        let found = self.stat(&path, follow, None)?;
        if found.kind == FileKind::Absent {
            return Err(format!("{path} in the run: there is no such file or directory"));
        }
        // Named below as the user has: what it leads to is the guest's word.
        let real = if follow { found.path.unwrap_or_else(|| path.clone()) } else { path.clone() };
        let mut channel = self.channel(Copy::Out { path: real }, None)?;
        match io::copy(&mut (&mut channel).take(limit), to) {
            // Nobody reads it any more.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            other => other.map_err(|error| error.to_string())?,
        };
        if channel.read(&mut [0]).map_err(|error| error.to_string())? > 0 {
            return Err(format!("{path} in the run: its archive is longer than {}; see --limit", show_size(limit)));
        }
        channel.finish().map_err(|error| format!("{path} in the run: {error}"))
    }

    /// What stands at a destination in the guest, and its path once links are followed.
    fn there(&self, path: &str, make_parents: bool) -> Result<(There, String), String> {
        let found = self.stat(path, true, None)?;
        let resolved = found.path.unwrap_or_else(|| path.to_owned());
        let there = match found.kind {
            FileKind::Directory => There::Directory,
            FileKind::File => There::File,
            FileKind::Link | FileKind::Other => There::Other,
            FileKind::Absent => {
                let bare = path.trim_end_matches('/');
                if self.stat(if bare.is_empty() { "/" } else { bare }, false, None)?.kind == FileKind::Link {
                    return Err(format!("{path} in the run: it is a link to nothing"));
                }
                let parent = match split(path) {
                    Some((above, _)) if !make_parents => self.stat(&above, true, None)?.kind == FileKind::Directory,
                    Some(_) => true,
                    None => false,
                };
                There::Absent { parent }
            }
        };
        Ok((there, resolved))
    }
}

/// A path as one of what is below it alone.
fn below(path: &str) -> String {
    if path.ends_with("/.") { path.to_owned() } else { format!("{}/.", path.trim_end_matches('/')) }
}

/// What a path of the user's is.
fn here(path: &Path, follow: bool) -> Result<Source, String> {
    let text = path.to_str().unwrap_or_default();
    let found = if follow || text.ends_with('/') { std::fs::metadata(path) } else { std::fs::symlink_metadata(path) };
    let found = found.map_err(|error| error.to_string())?;
    match found.file_type() {
        kind if kind.is_dir() => Ok(Source::Directory { contents: contents_only(text) }),
        kind if kind.is_file() || kind.is_symlink() => Ok(Source::File),
        _ => Err("it is a device, pipe or socket".to_owned()),
    }
}

/// The name that a path of the user's has, if need be by where it is.
fn own_name(path: &Path) -> io::Result<OsString> {
    match path.file_name() {
        Some(name) => Ok(name.to_owned()),
        None => path.canonicalize()?.file_name().map(OsStr::to_owned).ok_or_else(|| io::ErrorKind::InvalidInput.into()),
    }
}

/// A destination among the user's files.
struct Local {
    path: PathBuf,
    there: There,
}

impl Local {
    /// The path is the user's own word: links in it are followed.
    fn find(destination: &str) -> Result<Self, String> {
        let path = PathBuf::from(destination);
        let failed = |error: io::Error| format!("{destination}: {error}");
        match std::fs::metadata(&path) {
            Ok(found) => {
                let there = match found.file_type() {
                    kind if kind.is_dir() => There::Directory,
                    kind if kind.is_file() => There::File,
                    _ => There::Other,
                };
                Ok(Self { path: path.canonicalize().map_err(failed)?, there })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if path.symlink_metadata().is_ok() {
                    return Err(format!("{destination}: it is a link to nothing"));
                }
                let parent = above(&path).is_dir() && path.file_name().is_some();
                Ok(Self { path, there: There::Absent { parent } })
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// The directory itself.
    fn open(&self) -> Result<OwnedFd, String> {
        open_directory(&self.path)
    }

    /// The directory above, and the name in it.
    fn open_above(&self) -> Result<(OwnedFd, OsString), String> {
        let name = self.path.file_name().ok_or_else(|| format!("{}: it has no name", shown(&self.path)))?;
        Ok((open_directory(above(&self.path))?, name.to_owned()))
    }
}

fn above(path: &Path) -> &Path {
    path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn open_directory(path: &Path) -> Result<OwnedFd, String> {
    open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| format!("{}: {error}", shown(path)))
}

/// A directory in another, and whether it was made.
fn make_directory(above: &OwnedFd, name: &OsStr) -> Result<(OwnedFd, bool), String> {
    let new = match mkdirat(above, name, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => return Err(error.to_string()),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat2(above, name, flags, Mode::empty(), SAFELY) {
        Ok(directory) => Ok((directory, new)),
        Err(Errno::LOOP) => {
            Err(format!("{}: a symbolic link is in its way here; it is not followed", shown(Path::new(name))))
        }
        Err(Errno::NOTDIR) => Err(format!("{}: a file is in its place here", shown(Path::new(name)))),
        Err(error) => Err(format!("{}: {error}", shown(Path::new(name)))),
    }
}
