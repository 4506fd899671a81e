//! What this host's kernel offers the jail.
#![allow(unsafe_code)]

use std::io;

use rustix::io::Errno;

/// The version of Landlock's interface, from 1.
pub fn landlock_version() -> Result<usize, Errno> {
    const VERSION: libc::c_int = 1;
    let nothing: *const libc::c_void = std::ptr::null();
    // SAFETY: without attributes and with this flag, it only answers.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0_usize, VERSION) };
    usize::try_from(version).map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL))
}
