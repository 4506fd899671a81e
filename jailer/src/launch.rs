//! The one place where processes are started.
//!
//! A child gets the descriptors that it is given, from 3 upwards, and nothing else: no environment but what is given, no
//! standard streams but the given error log, no working directory of the user's.
#![allow(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal, setsid};

/// The first descriptor that a child is given.
const FIRST: RawFd = 3;

/// What becomes of a child whose parent goes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// It goes on, in a session of its own: a supervisor.
    Own,
    /// It is killed when the *thread* that started it ends: a VMM. So the main thread starts it.
    Parents,
}

/// Starts a program with `descriptors` as its 3, 4, and so on.
pub fn start(
    program: &Path,
    arguments: &[&OsStr],
    environment: &[(OsString, OsString)],
    descriptors: &[BorrowedFd<'_>],
    errors: File,
    lifetime: Lifetime,
) -> io::Result<Child> {
    let count = RawFd::try_from(descriptors.len()).map_err(io::Error::other)?;
    let end = FIRST.checked_add(count).ok_or(io::ErrorKind::InvalidInput)?;
    // Copies above the range, so that moving one into its place never closes another. The fillers occupy
    // the range until the child exists: the pipe on which it reports a failed exec must not lie there.
    let mut fillers = Vec::new();
    let mut copies: Vec<(OwnedFd, RawFd)> = Vec::new();
    for (descriptor, place) in descriptors.iter().zip(FIRST..end) {
        loop {
            let filler = rustix::io::fcntl_dupfd_cloexec(descriptor, FIRST)?;
            if filler.as_raw_fd() >= end {
                break;
            }
            fillers.push(filler);
        }
        copies.push((rustix::io::fcntl_dupfd_cloexec(descriptor, end)?, place));
    }
    let moves: Vec<(RawFd, RawFd)> = copies.iter().map(|(copy, place)| (copy.as_raw_fd(), *place)).collect();
    let parent = getpid();
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(environment.iter().cloned()).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
    // SAFETY: between fork and exec the closure makes system calls on values that it owns; it does not
    // allocate, take a lock or touch anything shared.
    unsafe {
        command.pre_exec(move || in_child(&moves, end, parent, lifetime));
    }
    command.spawn()
}

/// What the child does between fork and exec.
fn in_child(moves: &[(RawFd, RawFd)], end: RawFd, parent: Pid, lifetime: Lifetime) -> io::Result<()> {
    match lifetime {
        Lifetime::Own => {
            setsid()?;
        }
        Lifetime::Parents => {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // It may have died before.
            if getppid() != Some(parent) {
                return Err(io::ErrorKind::NotConnected.into());
            }
        }
    }
    // A file that would grow over an inherited `ulimit -f` is an error like others, not a silent death.
    // SAFETY: sets a signal to be ignored; no handler of ours is involved.
    if unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    for &(copy, place) in moves {
        // SAFETY: both are numbers; `copy` is open, and `place` is the child's to replace.
        if unsafe { libc::dup2(copy, place) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    let first = libc::c_uint::try_from(end).map_err(|_| io::ErrorKind::InvalidInput)?;
    let flags = libc::c_int::try_from(libc::CLOSE_RANGE_CLOEXEC).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: marks descriptors as close-on-exec and closes none, so nothing that is in use goes away.
    if unsafe { libc::close_range(first, libc::c_uint::MAX, flags) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Takes the descriptors that this process was started with, in their order. Called once, first thing.
pub fn inherited(count: u8) -> io::Result<Vec<OwnedFd>> {
    let end = FIRST.saturating_add(RawFd::from(count));
    let mut taken = Vec::new();
    for number in FIRST..end {
        // SAFETY: a number, which need not be open.
        if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it is open, as the line above found, and nothing else in this process has taken it: this
        // is called first thing.
        taken.push(unsafe { OwnedFd::from_raw_fd(number) });
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_child_gets_what_it_is_given_and_nothing_else() {
        let mut errors = tempfile::tempfile().unwrap();
        let files: Vec<File> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
        for (n, file) in files.iter().enumerate() {
            write!(&*file, "file {n}").unwrap();
            (&*file).rewind().unwrap();
        }
        let given: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        // An inheritable descriptor, as a careless parent leaves them.
        let leaked = File::open("/dev/null").unwrap();
        rustix::io::fcntl_setfd(&leaked, rustix::io::FdFlags::empty()).unwrap();
        let script = "cat <&3 >&2; cat <&4 >&2; cat <&5 >&2; echo >&2; env >&2; pwd >&2; echo /proc/self/fd/* >&2";
        let arguments = ["-c".as_ref(), script.as_ref()];
        let child =
            start(Path::new("/bin/sh"), &arguments, &[], &given, errors.try_clone().unwrap(), Lifetime::Parents);
        assert!(child.unwrap().wait().unwrap().success());
        errors.rewind().unwrap();
        let mut text = String::new();
        errors.read_to_string(&mut text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.first(), Some(&"file 0file 1file 2"));
        assert!(!text.contains("HOME="), "{text}");
        assert!(lines.contains(&"/"), "{text}");
        let open = lines.last().unwrap().split(' ').count();
        // 0 to 5, and the directory that the shell reads.
        assert!(open <= 7, "{text}");
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_here() {
        let errors = tempfile::tempfile().unwrap();
        let given = errors.try_clone().unwrap();
        let result = start(Path::new("/no/such/program"), &[], &[], &[given.as_fd()], errors, Lifetime::Own);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
