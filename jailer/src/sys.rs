//! The system calls that no crate of ours offers safely, each in a function of its own.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use libc::{c_int, c_long};
use rustix::io::Errno;

/// An error of the standard library's as the kernel's number.
pub(crate) fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::INVAL)
}

fn checked(result: c_long) -> Result<c_long, Errno> {
    if result < 0 { Err(errno(&io::Error::last_os_error())) } else { Ok(result) }
}

fn descriptor(result: c_long) -> Result<OwnedFd, Errno> {
    let number = RawFd::try_from(checked(result)?).map_err(|_| Errno::BADF)?;
    // SAFETY: a system call has just made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A descriptor that this process was started with, if it is open.
pub(crate) fn given(number: RawFd) -> Result<BorrowedFd<'static>, Errno> {
    // SAFETY: asks about a number, which need not be open.
    checked(unsafe { libc::fcntl(number, libc::F_GETFD) }.into())?;
    // SAFETY: it is open, and nothing in this program closes one that it was started with.
    Ok(unsafe { BorrowedFd::borrow_raw(number) })
}

/// Which of the two processes this is.
pub(crate) enum Cloned {
    Child,
    Parent { pid: i32, pidfd: OwnedFd },
}

/// Namespaces of its own: none, all, or all but the network's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Namespaces {
    None,
    All,
    ButNetwork,
}

/// Makes a process whose parent is our parent.
pub(crate) fn clone3(namespaces: Namespaces, cgroup: Option<BorrowedFd<'_>>) -> Result<Cloned, Errno> {
    const BUT_NETWORK: c_int = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWCGROUP;
    /// Linux 5.7.
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    let flags = |flags: c_int| u64::from(flags.cast_unsigned());
    let mut pidfd: c_int = -1;
    // SAFETY: all zero is a valid value: no stack of its own, no signal to the parent but what CLONE_PARENT inherits.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = flags(libc::CLONE_PARENT | libc::CLONE_PIDFD);
    arguments.pidfd = (&raw mut pidfd).addr() as u64;
    arguments.flags |= match namespaces {
        Namespaces::None => 0,
        Namespaces::All => flags(BUT_NETWORK | libc::CLONE_NEWNET),
        Namespaces::ButNetwork => flags(BUT_NETWORK),
    };
    if let Some(cgroup) = cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = u64::try_from(cgroup.as_raw_fd()).map_err(|_| Errno::BADF)?;
    }
    let size = size_of::<libc::clone_args>();
    // SAFETY: without CLONE_VM the child runs on copies of everything. This process has one thread, so no lock is held by
    // one that the child does not have.
    let pid = checked(unsafe { libc::syscall(libc::SYS_clone3, &raw mut arguments, size) })?;
    if pid == 0 {
        return Ok(Cloned::Child);
    }
    Ok(Cloned::Parent { pid: i32::try_from(pid).map_err(|_| Errno::INVAL)?, pidfd: descriptor(pidfd.into())? })
}

/// Ends the process, without anything that would run at its exit.
pub(crate) fn exit(status: c_int) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(status) }
}

/// Drops every capability from the bounding set, as many as this kernel has.
pub(crate) fn empty_bounding_set() -> Result<(), Errno> {
    for capability in 0..64_u64 {
        // SAFETY: takes numbers.
        match checked(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) }.into()) {
            Ok(_) => {}
            // Beyond the last one.
            Err(Errno::INVAL) if capability > 0 => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// What a Landlock domain handles: `struct landlock_ruleset_attr`.
#[repr(C)]
pub(crate) struct Ruleset {
    pub(crate) files: u64,
    pub(crate) ports: u64,
    pub(crate) scopes: u64,
}

/// A set of rules, without any.
pub(crate) fn landlock_ruleset(rights: &Ruleset) -> Result<OwnedFd, Errno> {
    let size = size_of::<Ruleset>();
    let rights: *const Ruleset = rights;
    // SAFETY: the kernel reads `size` bytes of a valid structure. An older one accepts the longer structure as long as
    // what it does not know is zero.
    descriptor(unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, rights, size, 0) })
}

/// Allows `access` to the file `path`.
pub(crate) fn landlock_allow(ruleset: BorrowedFd<'_>, path: BorrowedFd<'_>, access: u64) -> Result<(), Errno> {
    /// `struct landlock_path_beneath_attr`
    #[repr(C, packed)]
    struct PathBeneath {
        access: u64,
        parent: c_int,
    }
    const RULE_PATH_BENEATH: c_int = 1;
    let rule = PathBeneath { access, parent: path.as_raw_fd() };
    let ruleset = ruleset.as_raw_fd();
    // SAFETY: the kernel reads a structure that lives until the call returns.
    checked(unsafe { libc::syscall(libc::SYS_landlock_add_rule, ruleset, RULE_PATH_BENEATH, &raw const rule, 0) })
        .map(drop)
}

/// Binds this process to the rules.
pub(crate) fn landlock_restrict(ruleset: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: takes numbers.
    checked(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) }).map(drop)
}

/// Has every descriptor after `last` closed when the program is executed.
pub(crate) fn leave_only(last: BorrowedFd<'_>) -> Result<(), Errno> {
    let first = last.as_raw_fd().saturating_add(1);
    // SAFETY: marks descriptors and closes none, so nothing that is in use goes away.
    checked(unsafe { libc::syscall(libc::SYS_close_range, first, c_int::MAX, libc::CLOSE_RANGE_CLOEXEC) }).map(drop)
}

/// Becomes a program, with its name as the only argument and no environment. Returns only if it cannot.
pub(crate) fn execute(program: BorrowedFd<'_>, name: &str) -> Errno {
    let Ok(name) = CString::new(name) else { return Errno::INVAL };
    let arguments = [name.as_ptr(), std::ptr::null()];
    let environment: [*const libc::c_char; 1] = [std::ptr::null()];
    let (program, empty, arguments, environment) =
        (program.as_raw_fd(), c"".as_ptr(), arguments.as_ptr(), environment.as_ptr());
    // SAFETY: both lists end with a null pointer and live until the call returns, if it does.
    let result =
        unsafe { libc::syscall(libc::SYS_execveat, program, empty, arguments, environment, libc::AT_EMPTY_PATH) };
    checked(result).err().unwrap_or(Errno::INVAL)
}
