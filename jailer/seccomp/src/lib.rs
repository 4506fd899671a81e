//! What each jailed thread may ask of the kernel.
//!
//! The lists stand in `resources/seccomp`, one file for each thread or step, with the reason for each system call. They
//! are compiled when this crate is built. Whatever a program does not allow ends the whole process with SIGSYS.
//!
//! A thread inherits the programs of the one that starts it, and the strictest answer of all of them counts.

use std::io;

/// A program for the kernel.
#[derive(Debug)]
pub struct Program(&'static [libc::sock_filter]);

include!(concat!(env!("OUT_DIR"), "/programs.rs"));

impl Program {
    /// Binds the calling thread, and those that it starts from now on, to this program for good.
    ///
    /// The thread must have set no_new_privs.
    pub fn install(&self) -> io::Result<()> {
        let program = libc::sock_fprog {
            len: u16::try_from(self.0.len()).map_err(io::Error::other)?,
            // The kernel only reads it.
            filter: self.0.as_ptr().cast_mut(),
        };
        // SAFETY: the program and its length describe a static array, and the kernel copies it.
        let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Its instructions.
    pub fn instructions(&self) -> &'static [libc::sock_filter] {
        self.0
    }
}
