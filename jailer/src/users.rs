//! Users for runs of root: each VMM runs as a user that no one else is, for as long as it lives.
//!
//! A lease is a lock on one byte of a file, which the kernel releases when the supervisor dies, however it dies. Nothing is
//! written, so nothing can be left behind.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::{Mode, OFlags, ResolveFlags};

/// Where root's leases are.
pub const LEASES: &str = "/run/bulkhead/users";

/// A range of user numbers, which are group numbers as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Users {
    first: u32,
    last: u32,
}

/// What users and packages leave alone: systemd keeps this part free of its own ranges (its "Users, Groups, UIDs and GIDs").
pub const DEFAULT: Users = Users { first: 0x7000_0000, last: 0x7000_ffff };

/// Why there is no user for a run.
#[derive(Debug, thiserror::Error)]
pub enum UsersError {
    /// Not a range.
    #[error("users {0:?}: expected FIRST-LAST, two numbers from 1 to 4294967294")]
    Range(String),
    /// Every one is in use.
    #[error("users {first} to {last}: each is in use by a run; end one, or give a wider range with --users")]
    Exhausted {
        /// The first of the range.
        first: u32,
        /// The last.
        last: u32,
    },
    /// The file of the leases.
    #[error("{path}: {error}", path = path.display())]
    File {
        /// Where.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

impl FromStr for Users {
    type Err = UsersError;

    fn from_str(text: &str) -> Result<Self, UsersError> {
        let wrong = || UsersError::Range(text.to_owned());
        let (first, last) = text.split_once('-').ok_or_else(wrong)?;
        let number = |text: &str| text.parse::<u32>().map_err(|_| wrong());
        let (first, last) = (number(first)?, number(last)?);
        // Not root, and not the number that means "no change".
        if first == 0 || last == u32::MAX || first > last { Err(wrong()) } else { Ok(Self { first, last }) }
    }
}

impl std::fmt::Display for Users {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// A user that is ours until this is dropped.
#[derive(Debug)]
pub struct Lease {
    id: u32,
    _file: File,
}

impl Lease {
    /// Its number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Takes a user that is free. The search starts at a place that `start` chooses, so that many at once do not all try
    /// the same.
    pub fn take(path: &Path, users: Users, start: u32) -> Result<Self, UsersError> {
        let file = open(path).map_err(|error| UsersError::File { path: path.to_owned(), error })?;
        let count = users.last.saturating_sub(users.first).saturating_add(1);
        let offset = start.checked_rem(count).unwrap_or(0);
        let ids = (offset..count).chain(0..offset).map(|offset| users.first.saturating_add(offset));
        for id in ids {
            if lock(&file, id).map_err(|error| UsersError::File { path: path.to_owned(), error })? {
                return Ok(Self { id, _file: file });
            }
        }
        Err(UsersError::Exhausted { first: users.first, last: users.last })
    }
}

/// Opens the file, and makes it and its directory if they are missing. A symbolic link anywhere in the path is refused: root
/// would follow it.
fn open(path: &Path) -> io::Result<File> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let open = || -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::RUSR | Mode::WUSR, resolve)
    };
    let made = match open() {
        Err(rustix::io::Errno::NOENT) => {
            let parent = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
            match rustix::fs::mkdir(parent, Mode::RWXU) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => open(),
                Err(error) => Err(error),
            }
        }
        other => other,
    };
    Ok(made?.into())
}

/// Locks the byte that stands for a user. Returns whether nobody else has it.
fn lock(file: &File, id: u32) -> io::Result<bool> {
    // SAFETY: all zero is a valid value: from the start of the file, by no process in particular.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(libc::F_WRLCK).map_err(io::Error::other)?;
    lock.l_start = id.into();
    lock.l_len = 1;
    // SAFETY: the kernel reads a valid structure.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) { Ok(false) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_one_run_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/users");
        let users = Users { first: 10, last: 12 };
        let first = Lease::take(&path, users, 1).unwrap();
        let second = Lease::take(&path, users, 1).unwrap();
        let third = Lease::take(&path, users, 1).unwrap();
        assert_eq!([first.id(), second.id(), third.id()], [11, 12, 10]);
        let error = Lease::take(&path, users, 1).unwrap_err().to_string();
        assert!(error.contains("10 to 12: each is in use"), "{error}");
        drop(second);
        assert_eq!(Lease::take(&path, users, 0).unwrap().id(), 12);
    }

    #[test]
    fn a_symbolic_link_on_the_way_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("real")).unwrap();
        std::os::unix::fs::symlink("real", directory.path().join("link")).unwrap();
        let error = Lease::take(&directory.path().join("link/users"), DEFAULT, 0).unwrap_err();
        assert!(
            matches!(&error, UsersError::File { error, .. } if error.raw_os_error() == Some(libc::ELOOP)),
            "{error}"
        );
    }

    #[test]
    fn ranges_are_two_numbers_without_root() {
        assert_eq!("1000-1999".parse::<Users>().unwrap().to_string(), "1000-1999");
        for wrong in ["", "5", "0-5", "6-5", "1-4294967295", "a-b", "-1-5"] {
            assert!(wrong.parse::<Users>().is_err(), "{wrong}");
        }
    }
}
