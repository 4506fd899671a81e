//! Stage 2 of the system call filters: each thread binds itself to what it needs, before it sees anything of the guest's.
//!
//! A thread inherits what the one that starts it is bound to. So the main thread first binds itself to the list of the
//! start, which has what every thread needs, and to its own when all threads exist.

use std::io;

use seccomp_lists::{VMM_DISK, VMM_MAIN, VMM_START, VMM_VCPU};

/// The lists: `resources/seccomp/vmm-*.toml`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// While the machine is built and its threads are started.
    Start,
    /// The event loop.
    Main,
    /// A vCPU.
    Vcpu,
    /// A queue of a disk.
    Disk,
}

/// Binds the calling thread for good: whatever the list does not name ends the process.
///
/// In unit tests of this crate it does nothing: the standard library's own checks in unoptimised code make calls that no
/// program of ours makes.
pub fn confine(program: Program) -> io::Result<()> {
    if cfg!(test) {
        return Ok(());
    }
    // The jailer has done so; but nothing here depends on who started us.
    rustix::thread::set_no_new_privs(true)?;
    match program {
        Program::Start => VMM_START.install(),
        Program::Main => VMM_MAIN.install(),
        Program::Vcpu => VMM_VCPU.install(),
        Program::Disk => VMM_DISK.install(),
    }
}
