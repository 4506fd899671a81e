//! The processes of a state directory: which there are, and what role each has.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::cli::Bulkhead;
use crate::command::until;
use crate::host;

/// A process of ours.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    /// Its id.
    pub(crate) pid: i32,
    /// Its program's file name.
    pub(crate) program: String,
    /// Whether it is a run's supervisor.
    pub(crate) supervises: bool,
    parent: i32,
}

impl Process {
    /// Kills it as nobody should, if it still lives.
    pub(crate) fn kill(&self) {
        self.send(Signal::KILL);
    }

    /// Sends it a signal, if it still lives.
    pub(crate) fn send(&self, signal: Signal) {
        let _ = kill_process(Pid::from_raw(self.pid).unwrap(), signal);
    }

    /// The most memory that it ever had, in KiB, if it still lives.
    pub(crate) fn peak_memory(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.trim().trim_end_matches(" kB").parse().ok()
    }
}

/// Every process whose program is one of those under test, and which has to do with this state directory: by its
/// environment (a client), its arguments (a supervisor) or its open files (a VMM). One that is a zombie runs no more.
pub(crate) fn all(bulkhead: &Bulkhead) -> Vec<Process> {
    let home = bulkhead.home().canonicalize().unwrap();
    let programs = host::program("").canonicalize().unwrap();
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| one(pid, &home, &programs)).collect()
}

fn one(pid: i32, home: &Path, programs: &Path) -> Option<Process> {
    // It may end while it is looked at, at any of these lines.
    let directory = PathBuf::from(format!("/proc/{pid}"));
    let program = fs::read_link(directory.join("exe")).ok().filter(|exe| exe.starts_with(programs))?;
    let arguments = fs::read(directory.join("cmdline")).ok()?;
    let environment = fs::read(directory.join("environ")).unwrap_or_default();
    let files = fs::read_dir(directory.join("fd")).ok()?;
    let mut files = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
    let home = home.to_str()?;
    let named = |text: &[u8]| String::from_utf8_lossy(text).contains(home);
    if !(named(&arguments) || named(&environment) || files.any(|file| file.starts_with(home))) {
        return None;
    }
    let stat = fs::read_to_string(directory.join("stat")).ok()?;
    let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
    let supervises = String::from_utf8_lossy(&arguments).contains("\0supervise\0");
    Some(Process { pid, program: program.file_name()?.to_str()?.into(), supervises, parent })
}

/// The supervisor of the only run, once there is one.
pub(crate) fn supervisor(bulkhead: &Bulkhead) -> Process {
    let mut found = None;
    until("a supervisor", || {
        found = all(bulkhead).into_iter().find(|process| process.supervises);
        found.is_some()
    });
    found.unwrap()
}

/// The VMM of the only run, once there is one.
pub(crate) fn vmm(bulkhead: &Bulkhead) -> Process {
    child(bulkhead, "bulkhead-vmm")
}

/// The process of this program that is the supervisor's child, once there is one.
pub(crate) fn child(bulkhead: &Bulkhead, program: &str) -> Process {
    let supervisor = supervisor(bulkhead).pid;
    let mut found = None;
    until(program, || {
        let is_it = |process: &Process| process.program == program && process.parent == supervisor;
        found = all(bulkhead).into_iter().find(is_it);
        found.is_some()
    });
    found.unwrap()
}

/// The copy of the only run's VMM that writes its machine out, once there is one: stopped at once.
pub(crate) fn stopped_writer(bulkhead: &Bulkhead) -> Process {
    let vmm = vmm(bulkhead).pid;
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        // Nothing else, so that it is caught in time.
        let children = fs::read_to_string(format!("/proc/{vmm}/task/{vmm}/children")).unwrap();
        if let Some(pid) = children.split_whitespace().next().and_then(|pid| pid.parse().ok()) {
            let writer = Process { pid, program: "bulkhead-vmm".into(), supervises: false, parent: vmm };
            writer.send(Signal::STOP);
            return writer;
        }
        assert!(Instant::now() < deadline, "the VMM made no copy of itself");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until none is left.
pub(crate) fn none_left(bulkhead: &Bulkhead) {
    until("the end of all processes", || all(bulkhead).is_empty());
}

/// What every process of ours is doing, for whoever has to find out why a test hangs: of each thread its state, its CPU time
/// and where in the kernel it is, and of each run its events.
pub(crate) fn what_they_do() -> String {
    let programs = host::program("").canonicalize().unwrap();
    let mut text = String::new();
    for process in fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path())) {
        if !fs::read_link(process.join("exe")).is_ok_and(|exe| exe.starts_with(&programs)) {
            continue;
        }
        let read = |path: PathBuf| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        let arguments = read(process.join("cmdline"));
        text += &format!("\n{}: {}\n", process.display(), arguments.replace('\0', " "));
        for thread in
            fs::read_dir(process.join("task")).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
        {
            let [stat, call, stack] = ["stat", "syscall", "stack"].map(|file| read(thread.join(file)));
            let place: Vec<_> = stack.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
            text += &format!("  {} | {} | {}\n", stat.trim(), call.trim(), place.join(" "));
        }
        if let Some((_, directory)) = arguments.split_once("\0supervise\0") {
            text += &read(Path::new(directory.split('\0').next().unwrap()).join("events.jsonl"));
        }
    }
    text
}
