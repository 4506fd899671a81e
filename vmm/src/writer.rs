//! A copy of this process that writes a machine's memory out while the machine goes on.
//!
//! Guest memory is mapped privately, so a copy of the process has all of it as it was at the moment of the fork, whatever the guest
//! writes afterwards: the kernel copies a page when either side is about to change it. Of the process's threads the copy has one,
//! so a lock may be held in it by a thread that is not there. It therefore allocates nothing, takes no lock and returns to
//! nobody: all that it needs is made before the fork, and it ends by `_exit`.
//!
//! It first closes every descriptor but those that it writes to and reads from, KVM's among them. What this process closes
//! later is kept alive by its copy for a moment only, but for the vCPUs and with them the machine in the kernel: the copy has their shared
//! pages mapped until it ends. It is bound to the list of the thread that forked, and the kernel kills it when
//! that thread ends.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::process::{Signal, WaitId, WaitIdOptions, set_parent_process_death_signal, waitid};
use vm_memory::{MmapRegion, VolatileMemory};
use vmm_control::Saved;

use crate::image::{self, ImageError};
use crate::memory::Memory;

/// What the copy is to do.
#[derive(Debug)]
pub(crate) struct Job {
    /// The machine's state, and where it goes.
    pub(crate) state: (Vec<u8>, File),
    /// Where its memory goes.
    pub(crate) memory: File,
    /// The pagemap of this process.
    pub(crate) pagemap: File,
}

/// Why nothing came of it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriterError {
    /// No copy could be made.
    #[error("the process that would write the memory: {0}")]
    Fork(io::Error),
    /// The copy's last words.
    #[error("{0}: {1}")]
    Failed(&'static str, io::Error),
    /// It ended without any.
    #[error("the process that wrote the memory was killed by signal {0}{hint}", hint = hint(*.0))]
    Killed(i32),
    /// It is not known how it ended.
    #[error("the process that wrote the memory: {0}")]
    Wait(io::Error),
}

fn hint(signal: i32) -> &'static str {
    match signal {
        libc::SIGKILL => " (somebody's, or the kernel's because memory ran out)",
        libc::SIGBUS => " (a page of an image that the machine went on from could not be read)",
        _ => "",
    }
}

/// What the copy was doing when it failed.
#[derive(Clone, Copy)]
#[repr(u64)]
enum Part {
    Itself = 1,
    State,
    Image,
    Pagemap,
    Memory,
}

impl Part {
    const ALL: [Self; 5] = [Self::Itself, Self::State, Self::Image, Self::Pagemap, Self::Memory];

    fn text(self) -> &'static str {
        match self {
            Self::Itself => "the process that would write the memory",
            Self::State => "state file",
            Self::Image => "memory file",
            Self::Pagemap => "pagemap of this process",
            Self::Memory => "guest memory",
        }
    }
}

/// A page that both processes see.
#[derive(Debug)]
struct Report(MmapRegion<()>);

/// Places in it.
const PART: usize = 0;
const ERROR: usize = 8;
const WRITTEN: usize = 16;

impl Report {
    fn new() -> io::Result<Self> {
        let (readable, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        MmapRegion::build(None, 4096, readable, shared).map(Self).map_err(io::Error::other)
    }

    fn set(&self, place: usize, value: u64) {
        if let Ok(word) = self.0.get_atomic_ref::<AtomicU64>(place) {
            word.store(value, Ordering::Release);
        }
    }

    fn get(&self, place: usize) -> u64 {
        self.0.get_atomic_ref::<AtomicU64>(place).map_or(0, |word| word.load(Ordering::Acquire))
    }
}

/// A copy at work. Dropping it does not end it: it ends with this process.
#[derive(Debug)]
pub(crate) struct Writer {
    process: OwnedFd,
    report: Report,
    state_bytes: u64,
}

impl AsFd for Writer {
    /// Readable when it has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }
}

impl Writer {
    /// Makes the copy. What is in guest memory when this is called is what it writes.
    pub(crate) fn start(job: &Job, memory: &Memory) -> Result<Self, WriterError> {
        let report = Report::new().map_err(WriterError::Fork)?;
        let mut pages = image::Writer::default();
        let Some(process) = fork().map_err(WriterError::Fork)? else {
            let code = match write(job, memory, &mut pages, &report) {
                Ok(()) => 0,
                Err((part, error)) => {
                    report.set(ERROR, error.raw_os_error().map_or(0, |number| u64::from(number.unsigned_abs())));
                    report.set(PART, part as u64);
                    1
                }
            };
            exit(code)
        };
        Ok(Self { process, report, state_bytes: job.state.0.len() as u64 })
    }

    /// What came of it, if it has ended.
    pub(crate) fn outcome(&self) -> Option<Result<Saved, WriterError>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let status = match waitid(WaitId::PidFd(self.process.as_fd()), options) {
            Ok(None) | Err(Errno::INTR) => return None,
            Ok(Some(status)) => status,
            Err(error) => return Some(Err(WriterError::Wait(error.into()))),
        };
        Some(match (status.exit_status(), status.terminating_signal()) {
            (Some(0), _) => Ok(Saved { state_bytes: self.state_bytes, memory_bytes: self.report.get(WRITTEN) }),
            (Some(_), _) => Err(self.last_words()),
            (None, signal) => Err(WriterError::Killed(signal.unwrap_or(0))),
        })
    }

    /// Waits for its end.
    pub(crate) fn wait(&self) {
        // Whatever it was, nothing comes of it.
        let _ = rustix::io::retry_on_intr(|| waitid(WaitId::PidFd(self.process.as_fd()), WaitIdOptions::EXITED));
    }

    fn last_words(&self) -> WriterError {
        let number = self.report.get(PART);
        let part = Part::ALL.into_iter().find(|part| *part as u64 == number).unwrap_or(Part::Itself);
        let error = match i32::try_from(self.report.get(ERROR)) {
            Ok(number @ 1..) => io::Error::from_raw_os_error(number),
            _ => io::Error::other("it ended early"),
        };
        WriterError::Failed(part.text(), error)
    }
}

/// All that the copy does.
fn write(job: &Job, memory: &Memory, pages: &mut image::Writer, report: &Report) -> Result<(), (Part, io::Error)> {
    let Job { state: (bytes, state), memory: to, pagemap } = job;
    // One that ended just before is not noticed, where it was not the first process of a namespace: then files are written that
    // nobody takes.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| (Part::Itself, error.into()))?;
    close_all_but([state, to, pagemap]).map_err(|error| (Part::Itself, error))?;
    state.write_all_at(bytes, 0).map_err(|error| (Part::State, error))?;
    let written = pages.write(memory, pagemap, to).map_err(|error| match error {
        ImageError::File(error) => (Part::Image, error),
        ImageError::Pagemap(error) => (Part::Pagemap, error),
        ImageError::NotOurs => (Part::Pagemap, io::ErrorKind::InvalidData.into()),
        ImageError::Memory(_) => (Part::Memory, io::ErrorKind::InvalidData.into()),
    })?;
    report.set(WRITTEN, written);
    Ok(())
}

/// Closes every other descriptor: ranges between those that stay.
fn close_all_but(stay: [&File; 3]) -> io::Result<()> {
    let mut stay = stay.map(|file| u32::try_from(file.as_raw_fd()).unwrap_or(u32::MAX));
    stay.sort_unstable();
    let mut first = 0u32;
    for number in stay {
        if let Some(last) = number.checked_sub(1).filter(|last| first <= *last) {
            close_range(first, last)?;
        }
        first = number.saturating_add(1);
    }
    close_range(first, u32::MAX)
}

fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: only the copy comes here, which returns to nobody: what is closed is used by nothing that runs in it again.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Copies this process. In the copy, which has one thread, there is no descriptor of it.
fn fork() -> io::Result<Option<OwnedFd>> {
    let flags = libc::c_long::from(libc::CLONE_PIDFD | libc::SIGCHLD);
    let mut process: libc::c_int = -1;
    // SAFETY: without a stack of its own the copy goes on here, on its copy of this one. No handler of the C library's runs, and
    // its locks are as they were: what follows in the copy uses none. The kernel writes a descriptor to an int that lives on.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, &raw mut process, 0, 0) };
    match pid {
        0 => Ok(None),
        1.. => {
            // SAFETY: the kernel has just made it, and nobody else knows it.
            Ok(Some(unsafe { OwnedFd::from_raw_fd(process) }))
        }
        _ => Err(io::Error::last_os_error()),
    }
}

fn exit(code: libc::c_int) -> ! {
    // SAFETY: ends the process, with nothing of the C library's or ours run before.
    unsafe { libc::_exit(code) }
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects)]
#[path = "writer_tests.rs"]
mod tests;
