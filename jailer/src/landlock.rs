//! Landlock: the target may execute its own program and touch no other file, connect no port, and neither signal nor
//! reach by abstract socket anything outside. See `include/uapi/linux/landlock.h`.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;

use crate::sys;

/// The rights that each version of the interface brought: to files, to TCP ports, and scopes.
const RIGHTS: [sys::Ruleset; 6] = [
    // 1: execute, write, read, list, remove (2), make (7)
    sys::Ruleset { files: 0x1fff, ports: 0, scopes: 0 },
    // 2: link or rename into another directory
    sys::Ruleset { files: 0x3fff, ports: 0, scopes: 0 },
    // 3: truncate
    sys::Ruleset { files: 0x7fff, ports: 0, scopes: 0 },
    // 4: bind, connect
    sys::Ruleset { files: 0x7fff, ports: 3, scopes: 0 },
    // 5: ioctl of devices that are opened from here on
    sys::Ruleset { files: 0xffff, ports: 3, scopes: 0 },
    // 6: abstract sockets, signals
    sys::Ruleset { files: 0xffff, ports: 3, scopes: 3 },
];
const EXECUTE: u64 = 1;
const READ_FILE: u64 = 4;
const CONNECT_TCP: u64 = 2;

/// Denies everything that this kernel's Landlock can deny, but to execute and read the program: to execute alone would not
/// do, since the kernel reads what it executes.
///
/// A program that needs the network may connect ports, but not offer any.
pub(crate) fn only_execute(program: BorrowedFd<'_>, network: bool) -> Result<(), Errno> {
    let version = jailer::landlock_version()?;
    let rights = RIGHTS.get(version.min(RIGHTS.len()).saturating_sub(1)).ok_or(Errno::OPNOTSUPP)?;
    let ports = if network { rights.ports & !CONNECT_TCP } else { rights.ports };
    let ruleset = sys::landlock_ruleset(&sys::Ruleset { ports, ..*rights })?;
    sys::landlock_allow(ruleset.as_fd(), program, EXECUTE | READ_FILE)?;
    sys::landlock_restrict(ruleset.as_fd())
}
