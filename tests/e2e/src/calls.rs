//! What the threads of VMMs really ask of the kernel, over the whole suite, beside what their lists let them ask.
//!
//! The kernel counts, by thread name and system call: histograms of tracefs. In the rig they are set up before its other CPUs
//! start (`tests/rig/start`). What was counted is noted after each test, since a boot of the rig may end without warning.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::names::number;

const EVENT: &str = "/sys/kernel/tracing/events/raw_syscalls/sys_enter";
/// What a thread calls under its own name before it is bound to its list.
const BEFORE: [&str; 2] = ["prctl", "seccomp"];

/// A list, and the threads that are bound to it.
struct Threads {
    list: &'static str,
    text: &'static str,
    filter: &'static str,
}

macro_rules! threads {
    ($($list:literal: $filter:literal;)*) => {
        [$(Threads {
            list: $list,
            text: include_str!(concat!("../../../resources/seccomp/", $list, ".toml")),
            filter: $filter,
        }),*]
    };
}

/// As `tests/rig/start` has them. New threads are called as the one that starts them until they have a name.
const THREADS: [Threads; 4] = threads! {
    "vmm-start": "comm == \"vmm-start\"";
    "vmm-main": "comm == \"vmm-main\"";
    "vmm-vcpu": "comm ~ \"vcpu*\"";
    "vmm-disk": "comm ~ \"blk*\"";
};

/// Where counts are noted: in the rig where they outlive a boot of it.
fn notes() -> PathBuf {
    let directory = std::env::var_os("RIG_OUT").map_or_else(std::env::temp_dir, PathBuf::from);
    directory.join("calls")
}

/// Has the kernel count, unless it does already. The rig's does, if it was started with -c.
pub(crate) fn count() {
    if std::env::var_os("BULKHEAD_RIG").is_some() {
        return;
    }
    // Of an earlier run on this host.
    let _ = fs::remove_file(notes());
    let trigger = Path::new(EVENT).join("trigger");
    let set = fs::read_to_string(&trigger).unwrap_or_default();
    for Threads { filter, .. } in THREADS.iter().filter(|threads| !set.contains(threads.filter)) {
        let write = || {
            let mut file = fs::File::options().append(true).open(&trigger)?;
            file.write_all(format!("hist:keys=id if {filter}").as_bytes())
        };
        if let Err(error) = write() {
            eprintln!("{}: {error}: system calls are not counted", trigger.display());
        }
    }
}

/// Notes which calls each kind of thread has made so far.
pub(crate) fn note() {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Ok(text) = fs::read_to_string(Path::new(EVENT).join("hist")) else { return };
    let mut known = noted();
    for (list, numbers) in counted(&text) {
        known.entry(list).or_default().extend(numbers);
    }
    let lines: String =
        known.iter().flat_map(|(list, numbers)| numbers.iter().map(move |n| format!("{list} {n}\n"))).collect();
    fs::write(notes(), lines).unwrap();
}

type Calls = BTreeMap<String, BTreeSet<i64>>;

fn noted() -> Calls {
    let mut calls = Calls::new();
    for line in fs::read_to_string(notes()).unwrap_or_default().lines() {
        let (list, number) = line.split_once(' ').unwrap();
        calls.entry(list.to_owned()).or_default().insert(number.parse().unwrap());
    }
    calls
}

/// From the kernel's histograms: a comment that quotes the trigger, then a line for each key.
fn counted(text: &str) -> Calls {
    let mut calls = Calls::new();
    let mut list = None;
    for line in text.lines() {
        if line.starts_with("# trigger info:") {
            list = THREADS.iter().find(|threads| line.contains(threads.filter)).map(|threads| threads.list);
        }
        let id = line.strip_prefix("{ id:").and_then(|rest| rest.split('}').next());
        if let (Some(list), Some(id)) = (list, id.and_then(|id| id.trim().parse().ok())) {
            calls.entry(list.to_owned()).or_default().insert(id);
        }
    }
    calls
}

/// Compares: what is called is allowed, and what is allowed is called, but for what a list says that tests never bring about.
/// Returns whether it is so.
pub(crate) fn as_the_lists_say() -> bool {
    let calls = noted();
    if calls.is_empty() {
        println!("no system calls were counted: in the rig that takes run -c, elsewhere tracefs");
        return false;
    }
    let lists = THREADS.map(|threads| (threads.list, threads.text.parse::<toml::Table>().unwrap()));
    let mut wrong = Vec::new();
    for (list, table) in &lists {
        let called = calls.get(*list).cloned().unwrap_or_default();
        // While the machine is built, every list holds.
        let allowed = lists.iter().filter(|(other, _)| other == list || *list == "vmm-start");
        let allowed: BTreeSet<i64> =
            allowed.flat_map(|(_, table)| table.keys().map(String::as_str)).chain(BEFORE).filter_map(number).collect();
        wrong
            .extend(called.difference(&allowed).map(|number| format!("{list}: call {number} is made, and not listed")));
        let mut made = 0;
        for (name, call) in table.iter().filter_map(|(name, call)| Some((name, call.as_table()?))) {
            let is_made = called.contains(&number(name).unwrap());
            made += u32::from(is_made);
            if !is_made && !call.contains_key("seldom") {
                wrong.push(format!("{list}: {name} is listed, and never made"));
            }
        }
        println!("{list}: {made} of {} calls on the list were made", table.len());
    }
    wrong.iter().for_each(|line| println!("{line}"));
    wrong.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_are_read() {
        let text = "# event histogram\n#\n# trigger info: hist:keys=id:vals=hitcount:size=2048 if comm ~ \"vcpu*\" [active]\n\
                    #\n\n{ id:         16 } hitcount:      81234\n{ id:          1 } hitcount:          3\n\nTotals:\n    Hits: 5\n\
                    # trigger info: hist:keys=id:vals=hitcount if comm ~ \"other\" [active]\n{ id:          9 } hitcount: 1\n";
        assert_eq!(counted(text), Calls::from([("vmm-vcpu".to_owned(), BTreeSet::from([1, 16]))]));
    }
}
