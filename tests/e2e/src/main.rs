//! End-to-end tests: stock kernels in real microVMs, through the programs as they ship.
//!
//! `tests.list` names every test. A test that is not on it, or a name without its test, fails the suite, and so does
//! a run that executed fewer tests than the list has. Nothing is ever skipped.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation)]

#[path = "../../../jailer/seccomp/tests/bpf/mod.rs"]
mod bpf;
mod calls;
mod cli;
mod command;
mod costs;
mod deaths;
mod guest;
mod host;
#[allow(
    dead_code,
    clippy::cast_sign_loss,
    clippy::needless_pass_by_value,
    reason = "it is a part of the filter's tests, which need more of it"
)]
#[path = "../../../netfilter/tests/process/internet.rs"]
mod internet;
#[allow(dead_code, reason = "what lists are compiled with; here only numbers count")]
#[path = "../../../jailer/seccomp/build/names.rs"]
mod names;
mod vmm;

mod processes;
mod pty;

mod boot;
mod epochs;
mod files;
mod hostile;
mod image;
mod jail;
mod kernel;
mod kill;
mod limits;
mod live;
mod machine;
mod network;
mod refusals;
mod run;
mod snapshot;
mod tools;
mod tty;
mod wayout;

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::Pid;

/// A test: its name and its story.
type Test = (&'static str, fn());

const LIST: &str = include_str!("../tests.list");

/// Says that this process is the Internet of a test, in a network namespace of its own.
const ROLE: &str = "BULKHEAD_TEST_ROLE";

/// This program in a role, in a new network namespace.
fn unshare(role: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net", "--"]).arg(std::env::current_exe().unwrap()).env(ROLE, role);
    command
}

/// Runs ip(8).
fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split_whitespace()).status().unwrap();
    assert!(status.success(), "ip {arguments}: {status}");
}

/// Longer than any one test takes under emulation; one that hangs ends here. Soaks have longer lists.
fn deadline() -> Duration {
    Duration::from_secs(if host::soak() { 4 * 3600 } else { 600 })
}

/// What a line of the list begins with whose test only `make soak` runs.
const SOAK_ONLY: &str = "soak ";

fn main() -> ExitCode {
    let parts = [
        boot::TESTS,
        kernel::TESTS,
        machine::TESTS,
        snapshot::TESTS,
        costs::TESTS,
        deaths::TESTS,
        run::TESTS,
        files::TESTS,
        epochs::TESTS,
        live::TESTS,
        tty::TESTS,
        refusals::TESTS,
        kill::TESTS,
        jail::TESTS,
        limits::TESTS,
        hostile::TESTS,
        image::TESTS,
        network::TESTS,
        wayout::TESTS,
        tools::TESTS,
    ];
    let tests: Vec<Test> = parts.concat();
    if std::env::var_os(ROLE).is_some() {
        internet::play();
        return ExitCode::SUCCESS;
    }
    // Each test is a process of its own, so that one which aborts or hangs takes no other along.
    if let [_, "--one", name] = std::env::args().collect::<Vec<_>>().iter().map(String::as_str).collect::<Vec<_>>()[..]
    {
        let (_, test) = tests.iter().find(|(other, _)| *other == name).expect("a test of this name");
        test();
        return ExitCode::SUCCESS;
    }

    let arguments = Arguments::from_args();
    let lines = || LIST.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let listed: BTreeSet<&str> = lines().map(|line| line.strip_prefix(SOAK_ONLY).unwrap_or(line)).collect();
    let left_out: BTreeSet<&str> =
        lines().filter_map(|line| line.strip_prefix(SOAK_ONLY)).filter(|_| !host::soak()).collect();
    let written: BTreeSet<&str> = tests.iter().map(|(name, _)| *name).collect();
    for name in listed.symmetric_difference(&written) {
        eprintln!("tests.list and the tests differ in: {name}");
    }
    let counted = std::env::var_os("BULKHEAD_CALLS").is_some();
    if counted {
        calls::count();
    }
    let due: Vec<&str> = written.difference(&left_out).copied().collect();
    let trials = due.iter().map(|&name| Trial::test(name, move || one(name)));
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    let ran = conclusion.num_passed + conclusion.num_failed;
    let complete = arguments.filter.is_some() || ran == due.len() as u64;
    if !complete {
        eprintln!("{} tests are due, {ran} ran", due.len());
    }
    left_out.iter().for_each(|name| println!("left to make soak: {name}"));
    // What a part of the suite, or one that failed, makes threads call says little.
    let compared = counted && arguments.filter.is_none() && complete && !conclusion.has_failed();
    let as_listed = !compared || calls::as_the_lists_say();
    let (passed, failed) = (conclusion.num_passed + u64::from(compared && as_listed), conclusion.num_failed);
    println!("{passed} passed, {} failed", failed + u64::from(!as_listed));
    if complete && listed == written && as_listed && !conclusion.has_failed() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs one test in a process, in a process group that is ended with it.
fn one(name: &str) -> Result<(), Failed> {
    let progress = host::Progress::of_this_run();
    if progress.has(name) {
        println!("{name}: passed before the emulated host's kernel died");
        return Ok(());
    }
    // What failed has failed: a new boot is no second chance.
    let failed = format!("{name} failed");
    if progress.has(&failed) {
        return Err("failed before the emulated host's kernel died; how is above".into());
    }
    let (start, deadline) = (Instant::now(), deadline());
    let this = std::env::current_exe()?;
    let log = tempfile::tempfile()?;
    let mut command = Command::new(this);
    command.args(["--one", name]).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
    let mut child = command.process_group(0).spawn()?;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if start.elapsed() > deadline => break None,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let group = Pid::from_child(&child);
    let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    let _ = child.wait();
    println!("{name}: {:.1} s", start.elapsed().as_secs_f32());
    let mut text = vec![0; 256 << 10];
    let read = std::os::unix::fs::FileExt::read_at(&log, &mut text, 0)?;
    if status.is_some_and(|status| status.success()) {
        // Checks that have names of their own.
        for line in String::from_utf8_lossy(&text[..read]).lines().filter(|line| line.starts_with("row ")) {
            println!("  {line}");
        }
        calls::note();
        progress.add(name);
        return Ok(());
    }
    let what = status.map_or_else(|| format!("still running after {deadline:?}"), |status| status.to_string());
    let why = format!("{what}\n{}", String::from_utf8_lossy(&text[..read]));
    // Failures are summed up at the end, which a kernel that dies does not come to.
    println!("{name} failed: {why}");
    progress.add(&failed);
    Err(why.into())
}
