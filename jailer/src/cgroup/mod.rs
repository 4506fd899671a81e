//! Cgroups: the second wall. What a run is promised holds without them; with them the kernel itself counts.
//!
//! A supervisor makes a cgroup for its VMM, which is born in it, and removes it afterwards. It holds a lock on the directory
//! meanwhile, so that a cgroup whose supervisor was killed can be told from one in use, and the next start removes it.

mod memory;
mod place;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, ResolveFlags, flock, mkdirat, openat2, unlinkat};
use rustix::io::Errno;

pub use memory::{MemoryLimit, Raised};
pub use place::{Controller, Place, Unavailable};

/// The period in which a share of CPU time is given, in microseconds.
const CPU_PERIOD: u64 = 100_000;
/// How often and how long we wait for a cgroup whose process has just been reaped to become empty.
const EMPTY_TRIES: u32 = 100;
const EMPTY_WAIT: Duration = Duration::from_millis(2);

/// What a cgroup bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory, page cache and kernel memory included.
    pub memory: u64,
    /// Processes and threads.
    pub pids: u64,
    /// CPU time, in thousandths of a CPU; nothing if it is not bounded.
    pub cpu: Option<u64>,
    /// A line for `io.max`: device and limits.
    pub io: Option<String>,
}

/// Why a cgroup could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The host has none for us.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// One of its files, or itself.
    #[error("cgroup: {path}: {error}", path = path.display())]
    File {
        /// Where.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A directory whose disk is not known.
    #[error(
        "io.max: {path}: its file system shows no disk of its own ({error}); put the state directory on a plain disk, or \
         leave --io-max out",
        path = path.display()
    )]
    NoDisk {
        /// The directory.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// Another supervisor's.
    #[error("cgroup: {path} is in use by another run", path = path.display())]
    InUse {
        /// Where.
        path: PathBuf,
    },
}

/// A cgroup of ours. Dropping it removes it; its process has to be reaped before.
#[derive(Debug)]
pub struct Cgroup {
    parent: OwnedFd,
    name: String,
    path: PathBuf,
    directory: OwnedFd,
    /// Killings that were none of its own process.
    excused: Arc<AtomicU64>,
}

impl Cgroup {
    /// Makes a cgroup with these limits, after removing what killed supervisors left beside it.
    pub fn create(place: &Place, name: &str, limits: &Limits) -> Result<Self, CgroupError> {
        let path = place.path().join(name);
        let failed = |error: Errno| CgroupError::File { path: path.clone(), error: error.into() };
        let parent = place.open().map_err(failed)?;
        sweep(parent.as_fd());
        loop {
            // Ours alone: whoever may open it can lock it.
            match mkdirat(&parent, name, Mode::RWXU) {
                Ok(()) => {}
                Err(Errno::EXIST) => return Err(CgroupError::InUse { path }),
                Err(error) => return Err(failed(error)),
            }
            // Until it is locked, another's sweep takes it for one that a killed supervisor left: it may be gone before it is
            // opened, or while we wait for the sweep to let it go.
            let directory = match open_directory(parent.as_fd(), name) {
                Ok(directory) => directory,
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(failed(error)),
            };
            flock(&directory, FlockOperation::LockExclusive).map_err(failed)?;
            if !exists(directory.as_fd()) {
                continue;
            }
            let parent = parent.try_clone().map_err(|error| CgroupError::File { path: path.clone(), error })?;
            let cgroup = Self { parent, name: name.to_owned(), path: path.clone(), directory, excused: Arc::default() };
            cgroup.limit(limits)?;
            return Ok(cgroup);
        }
    }

    /// For `CLONE_INTO_CGROUP`.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many of its processes the kernel has killed because they reached the memory limit, but those that were excused.
    pub fn killed_for_memory(&self) -> u64 {
        killings(self.directory.as_fd()).saturating_sub(self.excused.load(Ordering::Relaxed))
    }

    /// Its memory limit, which can be raised for a while: it has this one otherwise.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn memory_limit(&self, usual: u64) -> io::Result<MemoryLimit> {
        Ok(MemoryLimit::new(self.directory.try_clone()?, self.path.clone(), usual, Arc::clone(&self.excused)))
    }

    fn limit(&self, limits: &Limits) -> Result<(), CgroupError> {
        self.write("memory.max", &limits.memory.to_string())?;
        // A guest's memory belongs in memory. A kernel that was built without swap has no such file.
        match self.write("memory.swap.max", "0") {
            Err(CgroupError::File { error, .. }) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
        self.write("pids.max", &limits.pids.to_string())?;
        if let Some(thousandths) = limits.cpu {
            let quota = thousandths.saturating_mul(CPU_PERIOD / 1000);
            self.write("cpu.max", &format!("{quota} {CPU_PERIOD}"))?;
        }
        if let Some(line) = &limits.io {
            self.write("io.max", line)?;
        }
        Ok(())
    }

    fn write(&self, file: &str, text: &str) -> Result<(), CgroupError> {
        write(self.directory.as_fd(), file, text)
            .map_err(|error| CgroupError::File { path: self.path.join(file), error: error.into() })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A copy of its process may be there still.
        end_all(self.directory.as_fd());
        for _ in 0..EMPTY_TRIES {
            // A reaped process is counted for an instant more. What stays, the next start's sweep removes.
            match unlinkat(&self.parent, &self.name, AtFlags::REMOVEDIR) {
                Err(Errno::BUSY) => std::thread::sleep(EMPTY_WAIT),
                _ => return,
            }
        }
    }
}

/// The cgroup that a process is in, where cgroups are v2 and we may know.
pub fn of(pid: i32) -> Option<PathBuf> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    place::of_text(&text)
}

/// What bounds a cgroup and what it uses, as the kernel's files say it; what has no file is left out.
pub fn figures(cgroup: &Path) -> Vec<(&'static str, String)> {
    const FILES: [&str; 7] =
        ["memory.max", "memory.swap.max", "memory.current", "pids.max", "pids.current", "cpu.max", "io.max"];
    let read = |name| Some((name, std::fs::read_to_string(cgroup.join(name)).ok()?.trim().to_owned()));
    FILES.into_iter().filter_map(read).collect()
}

/// The disk that a directory's files are on, as `MAJOR:MINOR`. Limits are the whole disk's, not a partition's.
pub fn device_of(directory: &Path) -> Result<String, CgroupError> {
    let failed = |error: io::Error| CgroupError::NoDisk { path: directory.to_owned(), error };
    let device = rustix::fs::stat(directory).map_err(|error| failed(error.into()))?.st_dev;
    let name = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let block = Path::new("/sys/dev/block").join(&name).canonicalize().map_err(failed)?;
    if !block.join("partition").exists() {
        return Ok(name);
    }
    let disk = block.parent().unwrap_or(&block).join("dev");
    Ok(std::fs::read_to_string(disk).map_err(failed)?.trim().to_owned())
}

/// What begins the name of a cgroup of ours.
pub const PREFIX: &str = "bulkhead-";

/// Removes cgroups of ours that nobody holds.
fn sweep(parent: BorrowedFd<'_>) {
    let Ok(entries) = rustix::fs::Dir::read_from(parent) else { return };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().to_str() else { continue };
        if !name.starts_with(PREFIX) {
            continue;
        }
        if let Ok(directory) = open_directory(parent, name)
            && flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok()
            // Else the name may be another's by now.
            && exists(directory.as_fd())
        {
            // What is left in it belongs to nobody. Where it ends late, the next sweep removes it.
            end_all(directory.as_fd());
            let _ = unlinkat(parent, name, AtFlags::REMOVEDIR);
        }
    }
}

/// Kills every process in a cgroup, where the kernel can (5.14).
fn end_all(cgroup: BorrowedFd<'_>) {
    let _ = write(cgroup, "cgroup.kill", "1");
}

/// How many processes of a cgroup the kernel has killed because they reached its memory limit.
fn killings(cgroup: BorrowedFd<'_>) -> u64 {
    let events = open_file(cgroup, "memory.events", OFlags::RDONLY).map_err(io::Error::from);
    let events = events.and_then(|file| io::read_to_string(std::fs::File::from(file))).unwrap_or_default();
    events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok()).unwrap_or(0)
}

/// Whether an open cgroup was not removed meanwhile. While it is locked, nobody else of ours removes it.
fn exists(directory: BorrowedFd<'_>) -> bool {
    open_file(directory, "cgroup.procs", OFlags::RDONLY).is_ok()
}

fn write(directory: BorrowedFd<'_>, file: &str, text: &str) -> Result<(), Errno> {
    rustix::io::write(open_file(directory, file, OFlags::WRONLY)?, text.as_bytes()).map(drop)
}

fn open_directory(parent: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Errno> {
    open_beneath(parent, name, OFlags::RDONLY | OFlags::DIRECTORY)
}

fn open_file(directory: BorrowedFd<'_>, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    open_beneath(directory, name, flags)
}

fn open_beneath(parent: BorrowedFd<'_>, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    openat2(parent, name, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
}
