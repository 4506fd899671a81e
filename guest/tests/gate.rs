//! A workload stops, and goes on in another epoch, with the same client or another.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use common::{Machine, noise, run, sh};
use guest::{
    host::{AgentError, Dial, Frozen, Welcome},
    message::{ExecSpec, ExitRecord, RefusalKind},
};
use std::{
    fs,
    io::Write,
    os::unix::net::UnixStream,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(10);

fn epoch(number: u64, hostname: &str, renew_identity: bool) -> Welcome {
    Welcome { epoch: number, renew_identity, entropy: vec![9; 32], hostname: hostname.into() }
}

#[test]
fn a_stopped_workload_does_nothing_before_its_next_epoch() {
    let machine = Machine::start();
    let agent = machine.agent();
    let count = machine.root.join("tmp/count");
    let _counter = agent.exec(sh("count", "while :; do echo >>/tmp/count; done")).unwrap();
    let length = || fs::metadata(&count).map_or(0, |found| found.len());
    let until = |limit: u64| {
        let deadline = Instant::now() + PATIENCE;
        while length() < limit {
            assert!(Instant::now() < deadline, "it counts to {}", length());
            thread::sleep(Duration::from_millis(5));
        }
    };
    until(1);
    fs::write(machine.root.join("etc/machine-id"), "0123456789abcdef0123456789abcdef\n").unwrap();
    for number in 2..5 {
        let frozen = agent.freeze(PATIENCE).unwrap();
        let before = length();
        thread::sleep(Duration::from_millis(50));
        assert_eq!(length(), before, "epoch {number}");
        let refused = agent.exec(sh(&format!("e{number}"), "true")).unwrap_err();
        assert!(matches!(refused, AgentError::Refused { kind: RefusalKind::Frozen, .. }), "{refused}");
        assert_eq!(length(), before, "epoch {number}");
        let agent = frozen.thaw(&epoch(number, &format!("box{number}"), number == 4), PATIENCE).unwrap();
        until(before + 1);
        let ran = run(&agent, sh(&format!("h{number}"), "hostname; cat /etc/machine-id"), b"");
        let (name, id) = ran.text().split_once('\n').unwrap();
        assert_eq!(name, format!("box{number}"));
        assert_eq!(id == "0123456789abcdef0123456789abcdef\n", number != 4, "only a copy gets another: {id}");
    }
}

#[test]
fn a_step_that_fails_keeps_it_stopped() {
    let machine = Machine::start();
    let agent = machine.agent();
    let count = machine.root.join("tmp/count");
    let _counter = agent.exec(sh("count", "while :; do echo >>/tmp/count; done")).unwrap();
    while !count.exists() {
        thread::sleep(Duration::from_millis(5));
    }
    fs::create_dir(machine.root.join("etc/ssh")).unwrap();
    let key = machine.root.join("etc/ssh/ssh_host_test_key");
    fs::write(&key, "secret").unwrap();
    // A program that is to make keys, and does not end well.
    fs::create_dir_all(machine.root.join("usr/bin")).unwrap();
    std::os::unix::fs::symlink("/bin/false", machine.root.join("usr/bin/ssh-keygen")).unwrap();
    let frozen = agent.freeze(PATIENCE).unwrap();
    let before = fs::metadata(&count).unwrap().len();
    for (welcome, says) in [
        (epoch(2, "", false), "host name"),
        (epoch(2, "box", true), "ssh-keygen"),
        (Welcome { entropy: vec![0; 10_000], ..epoch(2, "box", false) }, "entropy"),
    ] {
        let error = frozen.thaw(&welcome, PATIENCE).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        thread::sleep(Duration::from_millis(30));
        assert_eq!(fs::metadata(&count).unwrap().len(), before, "{says}");
    }
    assert!(!key.exists(), "a copy does not keep its original's keys");
    frozen.thaw(&epoch(2, "box", false), PATIENCE).unwrap();
}

#[test]
fn another_client_goes_on_where_the_first_one_was() {
    let machine = Machine::start();
    let line = machine.line();
    let agent = machine.agent_of(&line);
    let input = noise(3_000_000);
    let (first, rest) = input.split_at(1_000_000);
    let exec = agent.exec(ExecSpec { stdin: true, ..ExecSpec::command("cat", vec!["cat".into()]) }).unwrap();
    let exec = Arc::new(exec);
    let (mut to, from) = UnixStream::pair().unwrap();
    let pump = {
        let (exec, mut from) = (Arc::clone(&exec), from);
        thread::spawn(move || exec.copy_stdin(&mut from))
    };
    let output = {
        let exec = Arc::clone(&exec);
        let (reader, mut writer) = UnixStream::pair().unwrap();
        (reader, thread::spawn(move || exec.copy_stdout(&mut writer)))
    };
    to.write_all(first).unwrap();
    let mut got = vec![0; first.len()];
    std::io::Read::read_exact(&mut { &output.0 }, &mut got).unwrap();
    assert!(got == first);
    let deadline = Instant::now() + PATIENCE;
    while exec.passed().0 < first.len() as u64 {
        assert!(Instant::now() < deadline, "{:?}", exec.passed());
        thread::sleep(Duration::from_millis(5));
    }
    let frozen = agent.freeze(PATIENCE).unwrap();
    let passed = exec.passed();
    // The first client dies, as a supervisor does that is killed: without a word. Its threads live on here, and would come back.
    line.gone.store(true, Ordering::Relaxed);
    std::mem::forget((agent, frozen, exec, pump));

    let dial: Arc<dyn Dial> = Arc::clone(&machine.dial) as _;
    let frozen = Frozen::connect(dial, Instant::now() + PATIENCE).unwrap();
    let agent = frozen.thaw(&epoch(2, "box", false), PATIENCE).unwrap();
    let exec = agent.attach("cat").unwrap();
    let mut got = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| assert_eq!(exec.copy_stdin(&mut &*rest).unwrap(), input.len() as u64));
        assert_eq!(exec.copy_stdout_from(passed.0, &mut got).unwrap(), input.len() as u64);
    });
    assert!(got == rest, "{} bytes", got.len());
    assert_eq!(exec.wait().unwrap(), ExitRecord::Exited { code: 0 });
}
