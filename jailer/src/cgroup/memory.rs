//! A memory limit that is raised for a while.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{CgroupError, killings, write};

/// Where cgroups are mounted.
const ROOT: &str = "/sys/fs/cgroup";
/// How often and how long we wait for what a cgroup holds to be less than its usual limit again.
const LOWER_TRIES: u32 = 40;
const LOWER_WAIT: Duration = Duration::from_millis(50);

/// The memory limit of a cgroup of ours.
#[derive(Debug)]
pub struct MemoryLimit {
    directory: OwnedFd,
    path: PathBuf,
    usual: u64,
    /// Killings that its cgroup does not count.
    excused: Arc<AtomicU64>,
}

/// Until it is dropped, the limit is higher.
#[derive(Debug)]
pub struct Raised<'a>(&'a MemoryLimit);

impl MemoryLimit {
    pub(super) fn new(directory: OwnedFd, path: PathBuf, usual: u64, excused: Arc<AtomicU64>) -> Self {
        Self { directory, path, usual, excused }
    }

    /// What the kernel has killed so far was not what the cgroup is for, which lives.
    pub fn excuse_killings(&self) {
        self.excused.store(killings(self.directory.as_fd()), Ordering::Relaxed);
    }

    /// Allows `more` bytes than usual.
    ///
    /// # Errors
    /// The cgroup's files.
    pub fn raise(&self, more: u64) -> Result<Raised<'_>, CgroupError> {
        self.write("memory.max", &self.usual.saturating_add(more).to_string())?;
        let raised = Raised(self);
        // It may be lower since the last time.
        self.write("memory.high", "max")?;
        Ok(raised)
    }

    /// Bytes that the cgroups above this one leave it, page cache that they can give up included; nothing where none of them has a
    /// limit.
    pub fn room_above(&self) -> Option<u64> {
        let above = self.path.ancestors().skip(1).take_while(|path| path.starts_with(ROOT));
        above.filter_map(room).min()
    }

    fn lower(&self) -> Result<(), CgroupError> {
        // Written to `memory.max`, a limit below what is used kills when the page cache cannot be given up at once. `memory.high` never
        // does: it has the kernel take back until there is room for the other.
        self.write("memory.high", &(self.usual / 16).saturating_mul(15).to_string())?;
        let fits = || number(&self.path, "memory.current").is_some_and(|used| used <= self.usual);
        let fits = (0..LOWER_TRIES).any(|_| {
            fits() || {
                std::thread::sleep(LOWER_WAIT);
                false
            }
        });
        // Where it stays too much, the other one is what holds it back.
        let (lowered, high) = if fits {
            (self.write("memory.max", &self.usual.to_string()), "max".to_owned())
        } else {
            (Ok(()), self.usual.to_string())
        };
        lowered.and(self.write("memory.high", &high))
    }

    fn write(&self, file: &str, text: &str) -> Result<(), CgroupError> {
        write(self.directory.as_fd(), file, text)
            .map_err(|error| CgroupError::File { path: self.path.join(file), error: error.into() })
    }
}

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        // If it fails, the cgroup is gone. If what it holds stays too much, it keeps the higher limit until the next time.
        let _ = self.0.lower();
    }
}

/// What a cgroup may still take.
fn room(path: &Path) -> Option<u64> {
    let limit = number(path, "memory.max")?;
    let used = number(path, "memory.current")?;
    let stat = read(path, "memory.stat").ok()?;
    let cache = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let cache = ["inactive_file ", "active_file "].into_iter().filter_map(cache).fold(0, u64::saturating_add);
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

/// A file with one number; one that says "max" has none.
fn number(path: &Path, file: &str) -> Option<u64> {
    read(path, file).ok()?.trim().parse().ok()
}

fn read(path: &Path, file: &str) -> io::Result<String> {
    fs::read_to_string(path.join(file))
}
