//! `kill -9` of each of our processes at several moments: nothing is left running, and the next command works.

use crate::Test;
use crate::cli::Bulkhead;
use crate::command::{Running, until};
use crate::processes::{self, Process};

pub(crate) const TESTS: &[Test] = &[
    ("kill::a_client_takes_its_run_along", a_client_takes_its_run_along),
    ("kill::a_supervisor_takes_its_machine_along", a_supervisor_takes_its_machine_along),
    ("kill::a_vmm_ends_its_run", a_vmm_ends_its_run),
    (
        "kill::a_supervisor_that_is_asked_to_end_does_so_in_good_order",
        a_supervisor_that_is_asked_to_end_does_so_in_good_order,
    ),
    ("kill::all_at_once_leave_nothing", all_at_once_leave_nothing),
];

/// When to kill.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// The VMM was just started.
    Boot,
    /// The command runs and prints as fast as it can.
    Output,
}

/// What prints for ever, to a reader that reads.
const TALK: [&str; 4] = ["busybox", "sh", "-c", "echo begin; exec yes"];

fn run_until(bulkhead: &Bulkhead, options: &[&str], moment: Moment) -> Running {
    let mut running = bulkhead.start(&[&["run"], options, &TALK].concat());
    match moment {
        Moment::Boot => drop(processes::vmm(bulkhead)),
        Moment::Output => running.until_printed("begin\ny\n"),
    }
    running
}

/// The next command works, in the same directory, and finds nothing of what died but what was to be kept.
fn next_works(bulkhead: &Bulkhead, kept: usize) {
    processes::none_left(bulkhead);
    assert_eq!(bulkhead.output(&["list", "-q"]).expect(0), "");
    assert_eq!(bulkhead.runs().len(), kept, "{:?}", bulkhead.runs());
    assert_eq!(bulkhead.output(&["list", "-a", "-q"]).expect(0).lines().count(), kept);
}

fn a_client_takes_its_run_along() {
    let bulkhead = Bulkhead::new();
    for moment in [Moment::Boot, Moment::Output] {
        let running = run_until(&bulkhead, &[], moment);
        // Dropping it kills it.
        drop(running);
        next_works(&bulkhead, 0);
    }
    assert_eq!(bulkhead.output(&["run", "busybox", "echo", "works"]).expect(0), "works\n");
}

fn a_supervisor_takes_its_machine_along() {
    let bulkhead = Bulkhead::new();
    for (moment, options, kept) in [(Moment::Boot, &[][..], 0), (Moment::Output, &["--name", "box"], 1)] {
        let running = run_until(&bulkhead, options, moment);
        processes::supervisor(&bulkhead).kill();
        let ended = running.finish();
        assert_eq!(ended.code, 125, "{moment:?}");
        assert!(ended.stderr.starts_with("bulkhead: run "), "{}", ended.stderr);
        assert!(ended.stderr.ends_with(": its supervisor ended unexpectedly\n"), "{}", ended.stderr);
        next_works(&bulkhead, kept);
    }
    let all = bulkhead.output(&["list", "-a"]).expect(0);
    assert!(all.contains("box   busybox  failed (its supervisor was killed)  "), "{all}");
    let refused = bulkhead.output(&["exec", "box", "true"]).refused(125);
    assert!(refused.ends_with(": not running; its state is failed\n"), "{refused}");
}

fn a_vmm_ends_its_run() {
    let bulkhead = Bulkhead::new();
    for (moment, options, kept) in [(Moment::Boot, &[][..], 0), (Moment::Output, &["--name", "box"], 1)] {
        let running = run_until(&bulkhead, options, moment);
        processes::vmm(&bulkhead).kill();
        let ended = running.finish();
        assert_eq!(ended.code, 125, "{moment:?}");
        let why = ": its VMM ended unexpectedly (signal: 9 (SIGKILL))";
        assert!(ended.stderr.contains(why) && ended.stderr.lines().count() == 1, "{}", ended.stderr);
        next_works(&bulkhead, kept);
    }
    let all = bulkhead.output(&["list", "-a"]).expect(0);
    assert!(all.contains("failed (its VMM ended unexpectedly (signal: 9 (SIGKILL)))  "), "{all}");
}

/// SIGTERM, as a host sends it that shuts down: a kept run's disk is written back and the machine powered off; the record and
/// the client say why. Then `rm`, which refuses what runs, and `rm -f`, which does not.
fn a_supervisor_that_is_asked_to_end_does_so_in_good_order() {
    let bulkhead = Bulkhead::new();
    let resident = bulkhead.reside("box", &["--label", "team=red", "--timeout", "1h"]);
    assert_eq!(bulkhead.shell("box", "echo kept > /file").expect(0), "");
    let refused = bulkhead.output(&["rm", "box"]).refused(125);
    assert!(refused.ends_with(": it is running; bulkhead rm -f ends it at once and removes it\n"), "{refused}");
    processes::supervisor(&bulkhead).send(rustix::process::Signal::TERM);
    let ended = resident.finish();
    assert_eq!(
        (ended.code, ended.stderr.contains(": its supervisor was ended by SIGTERM\n")),
        (125, true),
        "{ended:?}"
    );
    next_works(&bulkhead, 1);

    let text = bulkhead.output(&["inspect", "box"]).expect(0);
    let run = &serde_json::from_str::<serde_json::Value>(&text).unwrap()[0];
    assert_eq!((&run["state"], &run["exit_code"]), (&"stopped".into(), &125.into()), "{text}");
    assert_eq!(
        (&run["reason"], &run["spec"]["labels"]["team"]),
        (&"its supervisor was ended by SIGTERM".into(), &"red".into())
    );
    let log = std::fs::read_to_string(run["events"].as_str().unwrap()).unwrap();
    let events: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    let expected = ["run.created", "net.policy.set", "run.booted", "run.started", "exec.started", "exec.ended"];
    assert_eq!(names, [&expected[..], &["net.stopped", "run.ended"]].concat());
    assert!(events.iter().enumerate().all(|(n, event)| event["seq"] == n), "{log}");
    // Nothing of the disk was lost: its journal needs no replay.
    assert_eq!(bulkhead.output(&["rm", "box"]).expect(0), "box\n");

    let resident = bulkhead.reside("box", &[]);
    assert_eq!(bulkhead.output(&["rm", "-f", "box"]).expect(0), "box\n");
    let ended = resident.finish();
    assert_eq!((ended.code, ended.stderr.contains(": removed (bulkhead rm -f)\n")), (125, true), "{ended:?}");
    next_works(&bulkhead, 0);
}

/// Supervisor, VMM and client die together, in the two orders that matter, while other clients have commands there.
fn all_at_once_leave_nothing() {
    let bulkhead = Bulkhead::new();
    let resident = bulkhead.reside("box", &[]);
    let mut other = bulkhead.start(&["exec", "box", "sh", "-c", "echo begin; exec yes"]);
    other.until_printed("begin\ny\n");
    let processes: Vec<Process> = processes::all(&bulkhead);
    assert_eq!(processes.len(), 5, "{processes:?}");
    // The supervisor first: whoever saw the VMM die could not report it.
    for process in processes.iter().filter(|process| process.supervises) {
        process.kill();
    }
    for process in processes.iter().filter(|process| process.program == "bulkhead-vmm") {
        process.kill();
    }
    drop(resident);
    let ended = other.finish();
    assert_eq!(ended.code, 125);
    assert!(ended.stderr.ends_with(": its supervisor ended unexpectedly\n"), "{}", ended.stderr);
    next_works(&bulkhead, 1);
    // The name is the kept run's until that is removed.
    let refused = bulkhead.output(&["run", "--name", "box", "busybox", "true"]).refused(125);
    assert!(refused.contains("name \"box\""), "{refused}");
    until("room for the name", || std::fs::remove_dir_all(&bulkhead.runs()[0]).is_ok());
    assert_eq!(bulkhead.output(&["run", "--name", "box", "busybox", "echo", "works"]).expect(0), "works\n");
}
