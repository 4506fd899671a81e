//! The supervisor's side: starts the jailer, hears what came of it, holds the process.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use crate::hint;
use crate::launch::{self, Lifetime};
use crate::report::{Report, Step, receive};
use crate::request::{Part, Request};

/// How long a start may take. It is a matter of milliseconds; a host that thrashes is given time.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why a process did not start in its jail.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// The jailer's program.
    #[error("jailer {path}: {error}", path = path.display())]
    Jailer {
        /// Where it should be.
        path: PathBuf,
        /// Why it does not start.
        error: io::Error,
    },
    /// A step of the jail.
    #[error("jail: {}: {}{}", step.text(), io::Error::from(*error), hint::next_step(*step, *error))]
    Step {
        /// Which.
        step: Step,
        /// Why.
        error: Errno,
    },
    /// The jailer ended and said nothing.
    #[error("jail: the jailer ended without a word ({0})")]
    Silent(ExitStatus),
    /// The socket of the reports.
    #[error("jail: {0}")]
    Report(io::Error),
}

impl JailError {
    /// The part of the jail that this host cannot give, if that is what is wrong.
    pub fn part(&self) -> Option<Part> {
        match self {
            Self::Step { step, error } => hint::part(*step, *error),
            _ => None,
        }
    }
}

/// What is started, and with what.
#[derive(Debug)]
pub struct Jail<'a> {
    /// `bulkhead-jailer`
    pub jailer: &'a Path,
    /// What it is asked.
    pub request: &'a Request,
    /// The program that is to run, opened for reading.
    pub program: BorrowedFd<'a>,
    /// The target's one descriptor.
    pub control: BorrowedFd<'a>,
    /// The target's standard error.
    pub errors: File,
    /// The cgroup, if the request says that there is one.
    pub cgroup: Option<BorrowedFd<'a>>,
}

impl Jail<'_> {
    /// Starts the jailer. What the supervisor does until [`Starting::finish`], it does while the jail is built.
    ///
    /// Call it on the main thread: the target is killed when the thread that started it ends.
    pub fn start(self) -> Result<Starting, JailError> {
        let (reports, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|error| JailError::Report(error.into()))?;
        set_socket_timeout(&reports, Timeout::Recv, Some(PATIENCE)).map_err(|error| JailError::Report(error.into()))?;
        let mut descriptors = vec![self.control, theirs.as_fd(), self.program];
        descriptors.extend(self.cgroup);
        let arguments = self.request.arguments();
        let arguments: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
        let jailer = launch::start(self.jailer, &arguments, &[], &descriptors, self.errors, Lifetime::Parents)
            .map_err(|error| JailError::Jailer { path: self.jailer.to_owned(), error })?;
        Ok(Starting { jailer, reports })
    }
}

/// A start that is under way.
#[derive(Debug)]
pub struct Starting {
    jailer: Child,
    reports: OwnedFd,
}

impl Starting {
    /// Waits until the target runs, or until it is known why it does not; then nothing of it is left.
    pub fn finish(mut self) -> Result<Jailed, JailError> {
        let mut started = None;
        let mut failed = None;
        let end = loop {
            match receive(&self.reports) {
                Ok(Some(Report::Started { pid, pidfd })) => {
                    started = Some(Jailed { pid, process: pidfd, ended: None });
                }
                Ok(Some(Report::Failed { step, error })) => failed = failed.or(Some(JailError::Step { step, error })),
                Ok(None) => break Ok(()),
                Err(error) => break Err(JailError::Report(error)),
            }
        };
        if end.is_err() {
            // It hangs, or it is no jailer of ours. If it has ended, this fails, and the wait tells.
            let _ = self.jailer.kill();
        }
        let status = self.jailer.wait().map_err(JailError::Report)?;
        match (failed, end, started) {
            // A process that was made is dropped here, and with that ended.
            (Some(error), _, _) | (None, Err(error), _) => Err(error),
            (None, Ok(()), Some(jailed)) => Ok(jailed),
            (None, Ok(()), None) => Err(JailError::Silent(status)),
        }
    }
}

/// A process in its jail. Dropping it kills and reaps it.
#[derive(Debug)]
pub struct Jailed {
    pid: i32,
    process: OwnedFd,
    ended: Option<Ended>,
}

impl Jailed {
    /// Its id. It stays its own until the process is waited for, so `/proc/PID` is this process for as long as this
    /// value lives and [`Self::try_wait`] has not told of an end.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// How it ended, if it has.
    pub fn try_wait(&mut self) -> io::Result<Option<Ended>> {
        self.wait_with(WaitIdOptions::EXITED | WaitIdOptions::NOHANG)
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> io::Result<Ended> {
        self.wait_with(WaitIdOptions::EXITED)?.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    /// Kills it. It is not yet gone afterwards: wait for it.
    pub fn kill(&self) -> io::Result<()> {
        Ok(pidfd_send_signal(&self.process, Signal::KILL)?)
    }

    fn wait_with(&mut self, options: WaitIdOptions) -> io::Result<Option<Ended>> {
        if self.ended.is_none() {
            let status = rustix::io::retry_on_intr(|| waitid(WaitId::PidFd(self.process.as_fd()), options))?;
            self.ended = status.map(|status| match (status.exit_status(), status.terminating_signal()) {
                (Some(status), _) => Ended::Exited(status),
                (None, signal) => Ended::Killed(signal.unwrap_or(0)),
            });
        }
        Ok(self.ended)
    }
}

impl Drop for Jailed {
    fn drop(&mut self) {
        if self.ended.is_none() {
            // It may end by itself just now: then this fails, and the wait tells.
            let _ = self.kill();
            let _ = self.wait();
        }
    }
}

/// How a jailed process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// With this status.
    Exited(i32),
    /// By this signal.
    Killed(i32),
}

impl Ended {
    /// Whether a filter ended it.
    pub fn broke_its_list(self) -> bool {
        self == Self::Killed(libc::SIGSYS)
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Exited(status) => write!(f, "exit status: {status}"),
            Self::Killed(libc::SIGSYS) => f.write_str("it made a system call that its list does not have: signal 31"),
            // The first process of a pid namespace cannot be ended by its own SIGABRT; the C library then
            // executes an instruction that faults.
            Self::Killed(signal @ libc::SIGSEGV) => write!(f, "it crashed or aborted: signal {signal}"),
            // As the standard library says it, with the signal's name.
            Self::Killed(signal) => ExitStatus::from_raw(signal).fmt(f),
        }
    }
}
