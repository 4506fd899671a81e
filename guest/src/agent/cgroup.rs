//! The workload's cgroup and those of its execs, in cgroup v2.
//!
//! ```text
//! <root>              the agent, without limits
//! └── workload        limits of the whole; root of the workload's cgroup namespace
//!     ├── init        the workload's PID 1
//!     └── exec-<id>   one for each exec
//! ```

use crate::sys;
use rustix::{
    fs::{Mode, OFlags, open},
    mount::{MountFlags, mount},
    pipe::{PipeFlags, pipe_with},
    process::{WaitId, WaitIdOptions, waitid},
    thread::{ThreadNameSpaceType, UnshareFlags, move_into_thread_name_spaces},
};
use std::{
    ffi::CStr,
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

/// Memory that the workload may not take, so that the agent and the kernel can always go on.
const RESERVE: u64 = 16 * 1024 * 1024;

/// Memory for each process that may exist: a task costs the kernel about 16 KiB, so a fork bomb meets this limit
/// before it meets that of the memory.
const MEMORY_PER_PROCESS: u64 = 64 * 1024;

/// Processes of the workload: below the kernel's own default limit, so that the agent can always fork.
const MAX_PROCESSES: u64 = 30_000;
const MIN_PROCESSES: u64 = 256;

const CONTROLLERS: [&str; 4] = ["cpu", "io", "memory", "pids"];

#[derive(Debug)]
pub(super) struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Makes the workload's cgroup below a cgroup2 mount, with its limits.
    pub(super) fn make(root: &Path) -> io::Result<Cgroup> {
        let path = root.join("workload");
        make(&path)?;
        make(&path.join("init"))?;
        for controller in enable(root)? {
            match controller {
                "memory" => fs::write(path.join("memory.max"), memory_limit(total_memory()).to_string())?,
                "pids" => fs::write(path.join("pids.max"), process_limit(total_memory()).to_string())?,
                _ => {}
            }
        }
        Ok(Cgroup { path })
    }

    /// Makes the calling process's cgroup namespace one that begins here, and hands the controllers down.
    ///
    /// A namespace begins at its maker's cgroup, but a cgroup that hands controllers down has no processes of its own,
    /// and moving one costs a kernel-wide wait. So a helper is born here, makes the namespace, and is gone.
    pub(super) fn enter_namespace(&self) -> io::Result<()> {
        let (gate, hold) = pipe_with(PipeFlags::CLOEXEC)?;
        let (made, report) = pipe_with(PipeFlags::CLOEXEC)?;
        let here = self.open("")?;
        let Some(helper) = sys::fork(Some(here.as_fd()))? else {
            drop((hold, made));
            let status = i32::from(sys::unshare(UnshareFlags::NEWCGROUP).is_err());
            drop(report);
            let _ = rustix::io::read(&gate, &mut [0u8; 1]);
            sys::exit_now(status);
        };
        drop((gate, report));
        rustix::io::read(&made, &mut [0u8; 1])?;
        let joined = move_into_thread_name_spaces(helper.as_fd(), ThreadNameSpaceType::CONTROL_GROUP);
        drop(hold);
        let ended = waitid(WaitId::PidFd(helper.as_fd()), WaitIdOptions::EXITED)?;
        joined?;
        if ended.and_then(|status| status.exit_status()) != Some(0) {
            return Err(io::Error::other("no new cgroup namespace"));
        }
        enable(&self.path).map(|_| ())
    }

    /// A descriptor of a cgroup below, for a process to be born in.
    pub(super) fn open(&self, below: &str) -> io::Result<OwnedFd> {
        open_directory(&self.path.join(below))
    }

    pub(super) fn exec(&self, id: &str) -> io::Result<PathBuf> {
        let path = self.path.join(format!("exec-{id}"));
        make(&path)?;
        Ok(path)
    }

    /// The workload's cgroups but PID 1's, also those that the workload made.
    fn children(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        entries.filter(|e| e.file_name() != "init").map(|e| e.path()).filter(|p| p.is_dir()).collect()
    }

    /// Sends a signal to every process but PID 1.
    pub(super) fn signal_all(&self, signal: rustix::process::Signal) {
        for child in self.children() {
            signal_tree(&child, signal);
        }
    }

    pub(super) fn kill_all(&self) {
        for child in self.children() {
            kill(&child);
        }
    }

    /// Stops everything in it, or lets it go on.
    pub(super) fn freeze(&self, frozen: bool) -> io::Result<()> {
        fs::write(self.path.join("cgroup.freeze"), if frozen { "1" } else { "0" })
    }

    /// Whether everything in it has stopped.
    pub(super) fn is_frozen(&self) -> bool {
        has_event(&self.path, "frozen 1")
    }

    /// A process in it that waits in the kernel, where nothing stops it.
    pub(super) fn busy(&self) -> Option<String> {
        // The agent's own place has none until someone asks; where there is one, this one lies on top.
        let _ = fs::create_dir("/proc");
        let _ = mount("proc", "/proc", "proc", MountFlags::NOSUID, None::<&CStr>);
        let mut waiting = vec![self.path.clone()];
        while let Some(cgroup) = waiting.pop() {
            let processes = fs::read_to_string(cgroup.join("cgroup.threads")).unwrap_or_default();
            for id in processes.lines() {
                let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
                let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
                if field("State:").is_some_and(|state| state.starts_with('D')) {
                    // By the number that the workload knows it by.
                    let id = field("NSpid:").and_then(|ids| ids.split_whitespace().last()).unwrap_or(id);
                    return Some(format!("process {id} ({})", field("Name:").unwrap_or_default()));
                }
            }
            let entries = fs::read_dir(&cgroup).into_iter().flatten().flatten();
            waiting.extend(entries.map(|e| e.path()).filter(|p| p.is_dir()));
        }
        None
    }

    /// Whether any process but PID 1 lives.
    pub(super) fn populated(&self) -> bool {
        self.children().iter().any(|child| populated(child))
    }
}

/// Enables the controllers that there are for a cgroup's children, and says which.
fn enable(cgroup: &Path) -> io::Result<Vec<&'static str>> {
    let there = fs::read_to_string(cgroup.join("cgroup.controllers"))?;
    let mut wanted = CONTROLLERS.to_vec();
    wanted.retain(|controller| there.split_whitespace().any(|t| t == *controller));
    let change: String = wanted.iter().map(|controller| format!("+{controller} ")).collect();
    if !change.is_empty() {
        fs::write(cgroup.join("cgroup.subtree_control"), change)?;
    }
    Ok(wanted)
}

pub(super) fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    Ok(open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

fn make(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Kills every process in a cgroup and below, as one.
pub(super) fn kill(cgroup: &Path) {
    let _ = fs::write(cgroup.join("cgroup.kill"), "1");
}

pub(super) fn populated(cgroup: &Path) -> bool {
    has_event(cgroup, "populated 1")
}

fn has_event(cgroup: &Path, event: &str) -> bool {
    fs::read_to_string(cgroup.join("cgroup.events")).is_ok_and(|events| events.lines().any(|line| line == event))
}

/// Times that the kernel killed something in it for want of memory.
pub(super) fn oom_kills(cgroup: &Path) -> u64 {
    let events = fs::read_to_string(cgroup.join("memory.events")).unwrap_or_default();
    let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// Sends a signal to each process of a cgroup and below. Processes that appear meanwhile may be missed; only
/// [`kill`] is complete.
pub(super) fn signal_tree(cgroup: &Path, signal: rustix::process::Signal) {
    let mut waiting = vec![cgroup.to_owned()];
    while let Some(cgroup) = waiting.pop() {
        let processes = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
        for pid in processes.lines().filter_map(|pid| pid.parse().ok()).filter_map(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, signal);
        }
        let entries = fs::read_dir(&cgroup).into_iter().flatten().flatten();
        waiting.extend(entries.map(|e| e.path()).filter(|p| p.is_dir()));
    }
}

/// The guest's memory in bytes.
pub(super) fn total_memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

fn memory_limit(total: u64) -> u64 {
    total.saturating_sub(RESERVE).max(total / 2)
}

fn process_limit(total: u64) -> u64 {
    (total / MEMORY_PER_PROCESS).clamp(MIN_PROCESSES, MAX_PROCESSES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_leave_room() {
        const MIB: u64 = 1024 * 1024;
        assert_eq!(memory_limit(100 * MIB), 84 * MIB);
        assert_eq!(memory_limit(20 * MIB), 10 * MIB);
        assert_eq!(process_limit(100 * MIB), 1600);
        assert_eq!(process_limit(MIB), 256);
        assert_eq!(process_limit(64 * 1024 * MIB), 30_000);
    }
}
