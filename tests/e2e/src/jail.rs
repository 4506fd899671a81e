//! The jail: what a program in it can do, tried with a probe in place of the VMM.

use std::fs::File;
use std::io::{Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use jailer::launch::Lifetime;
use jailer::report::{Report, Step};
use jailer::{Ended, Jail, Jailed, Limits, NAMESPACES, Request, Seen, Target};
use probe::{Attempt, LISTS, Surroundings, attempts};
use rustix::thread::{Gid, Uid};
use seccomp_lists::{NETFILTER, NETFILTER_EXEC, Program, VMM_DISK, VMM_EXEC, VMM_MAIN, VMM_START, VMM_VCPU};

use crate::bpf::{ALLOW, Data, KILL_PROCESS, X86_64, run};
use crate::{Test, host};

pub(crate) const TESTS: &[Test] = &[
    ("jail::a_process_has_nothing_but_its_descriptors", a_process_has_nothing_but_its_descriptors),
    ("jail::a_start_that_is_not_as_it_should_be_is_refused", a_start_that_is_not_as_it_should_be_is_refused),
    ("jail::a_start_takes_few_system_calls", a_start_takes_few_system_calls),
    ("jail::a_probe_gets_nowhere_as_root", a_probe_gets_nowhere_as_root),
    ("jail::a_probe_gets_nowhere_as_a_user", a_probe_gets_nowhere_as_a_user),
];

/// A user of the tests.
const USER: u32 = 61_000;
/// Half of what an ordinary program tries has to work, or the probe proves nothing.
const UNJAILED: usize = 2;

/// The programs of the jail, where an ordinary user can reach them.
struct Programs {
    directory: tempfile::TempDir,
}

impl Programs {
    fn new() -> Self {
        let directory = host::directory();
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(directory.path(), open).unwrap();
        for program in ["lib/bulkhead/bulkhead-jailer", "test/probe"] {
            let from = host::program(program);
            std::fs::copy(&from, directory.path().join(from.file_name().unwrap())).unwrap();
        }
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Starts the probe in the jail, as the program that it stands in for would be.
    fn jailed(&self, uid: u32, target: Target) -> (Jailed, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let program = File::open(self.path("probe")).unwrap();
        let request = Request { target, ..request(uid) };
        let jail = Jail {
            jailer: &self.path("bulkhead-jailer"),
            request: &request,
            program: program.as_fd(),
            control: theirs.as_fd(),
            errors: tempfile::tempfile().unwrap(),
            cgroup: None,
        };
        (jail.start().unwrap().finish().unwrap(), ours)
    }
}

fn request(uid: u32) -> Request {
    let limits = Limits { descriptors: 64, threads: 4, memory: 64 << 20, file_size: 1 << 20 };
    Request { target: Target::Vmm, uid, gid: uid, limits, cgroup: false, without: Vec::new() }
}

/// How an attempt ended.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// The kernel's answer: negative numbers are errors.
    Answer(i64),
    /// No answer, and this end of the process.
    None(Ended),
}

fn order(list: usize, attempt: usize) -> Vec<u8> {
    let mut order = vec![u8::try_from(list).unwrap(), u8::try_from(attempt).unwrap()];
    order.extend(std::process::id().to_le_bytes());
    order
}

fn answer(mut control: UnixStream, end: impl FnOnce() -> Ended) -> Outcome {
    let mut answer = [0; 8];
    match control.read_exact(&mut answer) {
        Ok(()) => {
            end();
            Outcome::Answer(i64::from_le_bytes(answer))
        }
        Err(_) => Outcome::None(end()),
    }
}

fn try_jailed(programs: &Programs, uid: u32, list: usize, attempt: usize) -> Outcome {
    let target = if LISTS[list].starts_with("netfilter") { Target::Netfilter } else { Target::Vmm };
    let (mut jailed, mut control) = programs.jailed(uid, target);
    control.write_all(&order(list, attempt)).unwrap();
    answer(control, || jailed.wait().unwrap())
}

fn try_unjailed(programs: &Programs, attempt: usize) -> Outcome {
    let (mut control, theirs) = UnixStream::pair().unwrap();
    control.write_all(&order(0, attempt)).unwrap();
    let work = tempfile::tempdir_in(programs.directory.path()).unwrap();
    let mut command = Command::new(programs.path("probe"));
    command.current_dir(work.path()).stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
    command.stderr(tempfile::tempfile().unwrap());
    let place = move || {
        // SAFETY: whatever descriptor 3 is in the child is replaced, and is nobody's to close.
        let mut third = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(3) });
        Ok(rustix::io::dup2(&theirs, &mut third)?)
    };
    // SAFETY: between fork and exec there is only dup2, which is async-signal-safe.
    unsafe { command.pre_exec(place) };
    let mut child = command.spawn().unwrap();
    // The command holds the other end too.
    drop(command);
    answer(control, || {
        let status = child.wait().unwrap();
        status.code().map_or_else(|| Ended::Killed(status.signal().unwrap()), Ended::Exited)
    })
}

/// What the lists say of an attempt: the strictest of all that bind the probe. What a list answers with an error is stricter
/// than what it allows, and less strict than the end.
fn said(list: usize, attempt: &Attempt) -> u32 {
    let programs: &[&Program] = match LISTS[list] {
        "exec" => &[&VMM_EXEC],
        "start" => &[&VMM_EXEC, &VMM_START],
        "main" => &[&VMM_EXEC, &VMM_START, &VMM_MAIN],
        "vcpu" => &[&VMM_EXEC, &VMM_START, &VMM_VCPU],
        "netfilter-exec" => &[&NETFILTER_EXEC],
        "netfilter" => &[&NETFILTER_EXEC, &NETFILTER],
        _ => &[&VMM_EXEC, &VMM_START, &VMM_DISK],
    };
    let parent = std::process::id().cast_signed();
    let arguments = (attempt.arguments)(&mut Surroundings { parent, buffer: [0; 512] });
    let data = Data { number: i32::try_from(attempt.call).unwrap(), architecture: X86_64, arguments };
    // As a signed number, KILL_PROCESS is the least.
    programs.iter().map(|program| run(program.instructions(), &data)).min_by_key(|said| said.cast_signed()).unwrap()
}

/// Whether it ended as the list says; where it is allowed, as the other walls have it.
fn as_said(said: u32, attempt: &Attempt, outcome: &Outcome) -> bool {
    match (said, outcome) {
        (KILL_PROCESS, outcome) => *outcome == Outcome::None(Ended::Killed(libc::SIGSYS)),
        (ALLOW, Outcome::Answer(answer)) => {
            attempt.where_allowed.iter().any(|error| -i64::from(*error) == (*answer).min(0))
        }
        (error, Outcome::Answer(answer)) => *answer == -i64::from(error & 0xffff),
        _ => false,
    }
}

/// Tries everything under every list, from two threads at a time.
fn everything_fails(programs: &Programs, uid: u32) {
    let attempts = attempts();
    assert!(attempts.len() >= 60);
    let cases = AtomicUsize::new(0);
    let work = || {
        let mut wrong = Vec::new();
        loop {
            let case = cases.fetch_add(1, Ordering::Relaxed);
            let (list, number) = (case / attempts.len(), case % attempts.len());
            if list >= LISTS.len() {
                return wrong;
            }
            let attempt = attempts[number];
            let outcome = try_jailed(programs, uid, list, number);
            if !as_said(said(list, attempt), attempt, &outcome) {
                wrong.push(format!("{}, {}: {outcome:?}", LISTS[list], attempt.name));
            }
        }
    };
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let workers = [scope.spawn(work), scope.spawn(work)];
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "not as the lists say: {wrong:#?}");
}

/// Given no jail, when the probe tries the same, then most of it works.
fn most_works_unjailed(programs: &Programs) {
    let attempts = attempts();
    let works = |number: &usize| {
        matches!(try_unjailed(programs, *number), Outcome::Answer(0..) | Outcome::None(Ended::Exited(0)))
    };
    let failed: Vec<&str> =
        (0..attempts.len()).filter(|number| !works(number)).map(|number| attempts[number].name).collect();
    println!("unjailed, {} of {} work; these do not: {failed:#?}", attempts.len() - failed.len(), attempts.len());
    assert!(failed.len() * UNJAILED < attempts.len());
}

fn a_process_has_nothing_but_its_descriptors() {
    let programs = Programs::new();
    // Given an inheritable descriptor of ours, as careless parents leave them.
    let leaked = File::open("/").unwrap();
    rustix::io::fcntl_setfd(&leaked, rustix::io::FdFlags::empty()).unwrap();
    for uid in [0x7000_1234, USER] {
        if uid == USER {
            become_user();
        }
        // When a process runs in the jail,
        let (mut jailed, control) = programs.jailed(uid, Target::Vmm);
        // then the kernel says that it has nothing.
        let seen = Seen::of(jailed.pid()).unwrap();
        assert_eq!((seen.uid, seen.no_new_privs, seen.capabilities), (uid, true, 0));
        assert_eq!(seen.namespaces, NAMESPACES);
        let filters: Vec<u32> = seen.threads.iter().map(|thread| thread.seccomp_filters).collect();
        assert_eq!((seen.descriptors, filters), (Some(4), vec![1]));
        let mounts = seen.mounts.unwrap();
        assert!(mounts.len() == 1 && mounts[0].starts_with("none / tmpfs ro,nosuid,nodev,noexec"), "{mounts:?}");
        let proc = PathBuf::from(format!("/proc/{}", jailed.pid()));
        assert_eq!(std::fs::read_dir(proc.join("root")).unwrap().count(), 0);
        assert_eq!(std::fs::read(proc.join("environ")).unwrap(), b"");
        assert_eq!(std::fs::read(proc.join("cmdline")).unwrap(), b"bulkhead-vmm\0");
        let groups = std::fs::read_to_string(proc.join("status")).unwrap();
        assert!(groups.lines().any(|line| line.strip_prefix("Groups:").is_some_and(|list| list.trim().is_empty())));
        let limits = std::fs::read_to_string(proc.join("limits")).unwrap();
        for (name, most) in [("Max open files", "64"), ("Max processes", "4"), ("Max core file size", "0")] {
            let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            assert_eq!(line.split_whitespace().take(2).collect::<Vec<_>>(), [most, most], "{name}");
        }
        // When its supervisor's thread ends, it ends too; here it ends with its socket.
        drop(control);
        assert_eq!(jailed.wait().unwrap(), Ended::Exited(99));
    }
}

fn a_start_that_is_not_as_it_should_be_is_refused() {
    let jailer = host::program("lib/bulkhead/bulkhead-jailer");
    let jailer = jailer.to_str().unwrap();
    let arguments = request(0x7000_1234).arguments().join(" ");
    let root = arguments.replace("uid=1879052852", "uid=0");
    assert_ne!(root, arguments);
    let static_program = host::program("test/probe");
    let cases = [
        (format!("exec env -i {jailer} {arguments} <&-"), &static_program, Step::Descriptors),
        (format!("exec env -i {jailer} {arguments} >&-"), &static_program, Step::Descriptors),
        (format!("exec env -i {jailer} {arguments} 3<&-"), &static_program, Step::Descriptors),
        (format!("exec env -i {jailer} {arguments} 5<&-"), &static_program, Step::Descriptors),
        (format!("exec env -i LD_PRELOAD=/x {jailer} {arguments}"), &static_program, Step::Environment),
        (format!("exec env -i {jailer}"), &static_program, Step::Arguments),
        (format!("exec env -i {jailer} {arguments} more"), &static_program, Step::Arguments),
        (format!("exec env -i {jailer} {root}"), &static_program, Step::Arguments),
        (format!("exec env -i {jailer} {arguments}"), &PathBuf::from("/bin/true"), Step::Program),
        (format!("exec env -i {jailer} {arguments}"), &PathBuf::from("/etc/passwd"), Step::Program),
    ];
    for (script, program, expected) in cases {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let (program, errors) = (File::open(program).unwrap(), tempfile::tempfile().unwrap());
        let words = ["-c".as_ref(), script.as_ref()];
        let descriptors = [theirs.as_fd(), theirs.as_fd(), program.as_fd()];
        let shell = PathBuf::from("/bin/sh");
        let mut child = jailer::launch::start(&shell, &words, &[], &descriptors, errors, Lifetime::Parents).unwrap();
        drop(theirs);
        let report = jailer::report::receive(&ours).unwrap();
        assert!(matches!(report, Some(Report::Failed { step, .. }) if step == expected), "{script}: {report:?}");
        assert_eq!(child.wait().unwrap().code(), Some(i32::from(expected as u8)));
    }
}

/// How many calls a start takes, from the jailer's first to the program's own start. What the C library does before `main`
/// is counted; the bounding set takes one for each capability that the kernel has, and is not.
fn a_start_takes_few_system_calls() {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    let (control, other) = UnixStream::pair().unwrap();
    let directory = host::directory();
    let log = directory.path().join("calls");
    let jailer = host::program("lib/bulkhead/bulkhead-jailer");
    let program = File::open(host::program("test/probe")).unwrap();
    let arguments = request(0x7000_1234).arguments().join(" ");
    let script = format!("exec strace -f -qq -o {} /usr/bin/env -i {} {arguments}", log.display(), jailer.display());
    let words = ["-c".as_ref(), script.as_ref()];
    let descriptors = [other.as_fd(), theirs.as_fd(), program.as_fd()];
    let errors = tempfile::tempfile().unwrap();
    let shell = PathBuf::from("/bin/sh");
    let mut strace = jailer::launch::start(&shell, &words, &[], &descriptors, errors, Lifetime::Parents).unwrap();
    drop((other, control, theirs));
    let report = jailer::report::receive(&ours).unwrap();
    assert!(matches!(report, Some(Report::Started { .. })), "{report:?}");
    strace.wait().unwrap();

    let text = std::fs::read_to_string(&log).unwrap();
    // Resumed calls have a line for their end too.
    let calls: Vec<(&str, &str)> = text
        .lines()
        .filter(|line| !line.contains("<... "))
        .filter_map(|line| line.split_once(|c: char| c.is_whitespace()))
        .map(|(pid, call)| (pid, call.trim_start()))
        .collect();
    let jailers = calls[0].0;
    let begin = calls.iter().position(|(_, call)| call.contains("bulkhead-jailer\", ")).unwrap();
    let own = calls[begin..].iter().filter(|(pid, _)| *pid == jailers).count();
    let childs: Vec<&str> = calls.iter().filter(|(pid, _)| *pid != jailers).map(|(_, call)| *call).collect();
    let exec = childs.iter().position(|call| call.starts_with("execveat(")).unwrap();
    let childs = childs[..=exec].iter().filter(|call| !call.contains("PR_CAPBSET_DROP")).count();
    println!("{own} calls of the jailer, {childs} of the process before it is the program");
    assert!(own <= 42 && childs <= 32, "{own} and {childs}: {text}");
}

fn a_probe_gets_nowhere_as_root() {
    let programs = Programs::new();
    most_works_unjailed(&programs);
    everything_fails(&programs, 0x7000_1234);
}

fn a_probe_gets_nowhere_as_a_user() {
    let programs = Programs::new();
    become_user();
    most_works_unjailed(&programs);
    everything_fails(&programs, USER);
}

/// This process is a test's own, and has one thread.
fn become_user() {
    let (uid, gid) = (Uid::from_raw(USER), Gid::from_raw(USER));
    rustix::thread::set_thread_groups(&[]).unwrap();
    rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
    rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
}
