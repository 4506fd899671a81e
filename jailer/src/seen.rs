//! What a process has of its jail, read back from the kernel. Landlock is not among it: the kernel shows it nowhere.

use std::io;
use std::path::{Path, PathBuf};

use crate::cgroup;

/// The namespaces that the jail makes.
pub const NAMESPACES: [&str; 7] = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"];

/// What the kernel says of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Its user.
    pub uid: u32,
    /// Whether no program gives it rights any more.
    pub no_new_privs: bool,
    /// Capabilities that it has or could get: all five sets joined.
    pub capabilities: u64,
    /// Namespaces that are not ours.
    pub namespaces: Vec<&'static str>,
    /// Open descriptors, if we may look.
    pub descriptors: Option<usize>,
    /// What it sees mounted, if we may look: one line each.
    pub mounts: Option<Vec<String>>,
    /// Its threads, the main one first.
    pub threads: Vec<Thread>,
    /// Its cgroup, where cgroups are v2.
    pub cgroup: Option<PathBuf>,
    /// What bounds that cgroup and what it uses, by the kernel's names.
    pub limits: Vec<(&'static str, String)>,
}

/// A thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thread {
    /// Its name.
    pub name: String,
    /// Filters of system calls: the jailer's, and those that it bound itself to. A thread of the kernel's own has none.
    pub seccomp_filters: u32,
}

impl Seen {
    /// Reads it. The caller knows that the process lives: it is its parent, or holds the run.
    pub fn of(pid: i32) -> io::Result<Self> {
        let directory = process(pid);
        let status = Status::read(&directory)?;
        let mut capabilities = 0;
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            capabilities |= u64::from_str_radix(status.field(set)?, 16).map_err(io::Error::other)?;
        }
        let mut threads = Vec::new();
        for entry in std::fs::read_dir(directory.join("task"))? {
            // One that ends while we look is none.
            if let Ok(status) = Status::read(&entry?.path()) {
                threads.push(status.thread()?);
            }
        }
        let cgroup = cgroup::of(pid);
        Ok(Self {
            uid: status.number("Uid")?,
            no_new_privs: status.number("NoNewPrivs")? == 1,
            capabilities,
            namespaces: NAMESPACES.into_iter().filter(|name| differs(&directory, name)).collect(),
            descriptors: std::fs::read_dir(directory.join("fd")).ok().map(Iterator::count),
            mounts: std::fs::read_to_string(directory.join("mounts"))
                .ok()
                .map(|text| text.lines().map(str::to_owned).collect()),
            threads,
            limits: cgroup.as_deref().map(cgroup::figures).unwrap_or_default(),
            cgroup,
        })
    }
}

/// When a process started, in the kernel's ticks since it booted: with its id, this names a process for good. See `proc(5)`.
pub fn started(pid: i32) -> io::Result<u64> {
    let text = read(&process(pid).join("stat"))?;
    // The name is in parentheses, and may have any character in it.
    let field = text.rsplit_once(')').and_then(|(_, fields)| fields.split_ascii_whitespace().nth(19));
    field.and_then(|field| field.parse().ok()).ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat: {text:?}")))
}

/// A file of the kernel's in which a process has had a word: its name, which may be any bytes.
fn read(path: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&std::fs::read(path)?).into_owned())
}

fn process(pid: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

/// The `status` of a process or thread.
struct Status {
    directory: PathBuf,
    text: String,
}

impl Status {
    fn read(directory: &Path) -> io::Result<Self> {
        let text = read(&directory.join("status"))?;
        Ok(Self { directory: directory.to_owned(), text })
    }

    fn field(&self, name: &str) -> io::Result<&str> {
        let line = self.text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next())
            .ok_or_else(|| io::Error::other(format!("{}/status has no {name}", self.directory.display())))
    }

    fn number(&self, name: &str) -> io::Result<u32> {
        self.field(name)?.parse().map_err(io::Error::other)
    }

    fn thread(&self) -> io::Result<Thread> {
        let filtered = self.number("Seccomp")? == 2;
        // Linux before 5.9 does not count.
        let filters = self.number("Seccomp_filters").unwrap_or(1);
        // Empty, if the thread has called itself that.
        let name = self.field("Name").unwrap_or_default();
        let name = name.replace(|character: char| !character.is_ascii_graphic(), "?");
        Ok(Thread { name, seccomp_filters: if filtered { filters } else { 0 } })
    }
}

fn differs(process: &Path, namespace: &str) -> bool {
    let of = |process: &Path| std::fs::read_link(process.join("ns").join(namespace)).ok();
    // One that we may not look into is not shown as a part of the jail.
    matches!((of(process), of(Path::new("/proc/self"))), (Some(theirs), Some(ours)) if theirs != ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_not_jailed_is_seen_as_it_is() {
        let own = i32::try_from(std::process::id()).unwrap();
        let seen = Seen::of(own).unwrap();
        assert!(seen.namespaces.is_empty());
        assert_eq!(seen.uid, rustix::process::getuid().as_raw());
        assert!(!seen.threads.is_empty() && seen.descriptors.is_some_and(|count| count >= 3));
        assert!(seen.mounts.is_some_and(|mounts| mounts.len() > 1));
        assert_eq!(started(own).unwrap(), started(own).unwrap());
        assert!(started(own).unwrap() > started(1).unwrap());
    }

    #[test]
    fn no_name_hides_a_thread() {
        for (name, shown) in [(&b""[..], ""), (b"\xff\x9b", "??"), (b"a\nb", "a\\nb"), (b") S 1", ")")] {
            let named = std::ffi::CString::new(name).unwrap();
            let seen = std::thread::spawn(move || {
                rustix::thread::set_name(&named).unwrap();
                let own = i32::try_from(std::process::id()).unwrap();
                let found = Seen::of(own).unwrap().threads;
                (found, started(rustix::thread::gettid().as_raw_nonzero().get()).unwrap())
            });
            let (threads, _) = seen.join().unwrap();
            assert!(threads.iter().any(|thread| thread.name == shown), "{shown:?} is not among {threads:?}");
        }
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        assert!(Seen::of(i32::MAX).is_err());
        assert!(started(i32::MAX).is_err());
    }
}
