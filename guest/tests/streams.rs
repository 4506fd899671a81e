//! Bytes arrive complete, in order and once, whatever happens to their connections.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use common::{Machine, Slow, noise, run, run_into, sh};
use guest::{
    host::AgentError,
    message::{ExecSpec, ExitRecord},
};
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

const OK: ExitRecord = ExitRecord::Exited { code: 0 };

fn cat(id: &str) -> ExecSpec {
    ExecSpec { stdin: true, ..ExecSpec::command(id, vec!["cat".into()]) }
}

#[test]
fn cat_ends_at_the_end_of_its_input() {
    let machine = Machine::start();
    let agent = machine.agent();
    for (number, size) in [0, 1, 65_536, 3_000_001].into_iter().enumerate() {
        let input = noise(size);
        let ran = run(&agent, cat(&format!("c{number}")), &input);
        assert_eq!(ran.record, OK);
        assert!(ran.stdout == input, "{size} bytes");
        assert_eq!(ran.accepted, size as u64);
    }
}

#[test]
fn cuts_lose_and_double_nothing() {
    let size = if std::env::var_os("BULKHEAD_SOAK").is_some() { 200_000_000 } else { 20_000_000 };
    let machine = Machine::start();
    let agent = machine.agent();
    let input = noise(size);
    machine.cut_every(1_000_000);
    let slow = |out| Slow(out, Duration::from_micros(300));
    let ran = run_into(&agent, cat("cat"), &input, slow).unwrap();
    assert_eq!(ran.record, OK);
    assert_eq!(ran.stdout.len(), input.len());
    assert!(ran.stdout == input);
    assert!(machine.cuts() > size as u64 / 1_000_000, "only {} connections", machine.cuts());
}

#[test]
fn many_small_cuts_in_everything() {
    let machine = Machine::start();
    // From the first byte on: also openings, requests, replies and records are lost.
    machine.cut_every(150_000);
    let agent = machine.agent();
    for number in 0..10 {
        let input = noise(200_000);
        let ran =
            run(&agent, ExecSpec { stdin: true, ..sh(&format!("x{number}"), "cat; echo end >&2; exit 9") }, &input);
        assert_eq!((ran.record, ran.stderr.as_str()), (ExitRecord::Exited { code: 9 }, "end\n"));
        assert!(ran.stdout == input);
    }
}

#[test]
fn input_that_is_not_read_blocks_nobody() {
    let machine = Machine::start();
    let agent = machine.agent();
    // The command ends while most of its input waits.
    let before = Instant::now();
    let ran = run(&agent, ExecSpec { stdin: true, ..sh("a", "head -c 10") }, &noise(10_000_000));
    assert_eq!((ran.record, ran.stdout.len()), (OK, 10));
    assert!(ran.accepted < 10_000_000);
    // It closes its input and goes on.
    let ran = run(&agent, ExecSpec { stdin: true, ..sh("b", "exec <&-; sleep 0.2; echo on") }, &noise(10_000_000));
    assert_eq!((ran.text(), ran.record.clone()), ("on\n", OK));
    // It takes its time.
    let ran = run(&agent, ExecSpec { stdin: true, ..sh("c", "sleep 1; wc -c") }, &noise(2_000_000));
    assert_eq!(ran.text().trim(), "2000000");
    assert!(before.elapsed() < Duration::from_secs(20));
}

#[test]
fn input_is_sent_again_while_its_source_is_silent() {
    let machine = Machine::start();
    let agent = machine.agent();
    let exec = agent.exec(cat("a")).unwrap();
    machine.cut_every(400);
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    let (mut printed, mut sink) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| exec.copy_stdin(&mut theirs).unwrap());
        scope.spawn(|| exec.copy_stdout(&mut sink).unwrap());
        for number in 0..20 {
            let line = format!("{number:060}\n");
            ours.write_all(line.as_bytes()).unwrap();
            let mut got = vec![0; line.len()];
            printed.read_exact(&mut got).unwrap();
            assert_eq!(got, line.as_bytes());
        }
        ours.shutdown(std::net::Shutdown::Write).unwrap();
    });
    assert_eq!(exec.wait().unwrap(), OK);
}

#[test]
fn a_slow_reader_holds_the_command_back() {
    let machine = Machine::start();
    let agent = machine.agent();
    let exec = agent.exec(sh("a", "head -c 50000000 /dev/zero; touch /tmp/ended")).unwrap();
    thread::sleep(Duration::from_millis(500));
    assert!(!machine.root.join("tmp/ended").exists(), "the agent took 50 MB that nobody asked for");
    let status = std::fs::read_to_string(format!("/proc/{}/status", machine.child.id())).unwrap();
    let rss: u64 =
        status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap().trim().trim_end_matches(" kB").parse().unwrap();
    assert!(rss < 16 * 1024, "the agent has {rss} KiB");
    assert_eq!(exec.copy_stdout(&mut std::io::sink()).unwrap(), 50_000_000);
    assert_eq!(exec.wait().unwrap(), OK);
}

#[test]
fn an_exec_outlives_the_client_that_started_it() {
    let machine = Machine::start();
    let first = machine.agent();
    let exec = first.exec(sh("a", "echo one; sleep 0.3; echo two; exit 5")).unwrap();
    let second = machine.agent();
    let again = second.attach("a").unwrap();
    let mut out = Vec::new();
    again.copy_stdout_from(0, &mut out).unwrap();
    assert_eq!(out, b"one\ntwo\n");
    assert_eq!(again.wait().unwrap(), ExitRecord::Exited { code: 5 });
    let third = machine.agent().attach("a").unwrap();
    assert_eq!(third.wait().unwrap(), ExitRecord::Exited { code: 5 }, "also long after its end");
    assert!(again.copy_stdout_from(100, &mut out).is_err(), "those bytes never were");
    drop(exec);
}

#[test]
fn a_machine_that_dies_is_gone() {
    let mut machine = Machine::start();
    let agent = machine.agent();
    let exec = agent.exec(cat("a")).unwrap();
    let (_ours, mut theirs) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| exec.wait());
        let reading = scope.spawn(|| exec.copy_stdout(&mut Vec::new()));
        let writing = scope.spawn(|| exec.copy_stdin(&mut theirs));
        thread::sleep(Duration::from_millis(200));
        machine.dial.gone.store(true, Ordering::Relaxed);
        machine.child.kill().unwrap();
        machine.child.wait().unwrap();
        assert!(matches!(waiting.join().unwrap(), Err(AgentError::Gone)));
        assert!(matches!(reading.join().unwrap(), Err(AgentError::Gone)));
        // Its caller makes the source return, as the documentation says.
        _ours.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(matches!(writing.join().unwrap(), Err(AgentError::Gone)));
    });
    assert!(matches!(agent.sync(), Err(AgentError::Gone)));
}
