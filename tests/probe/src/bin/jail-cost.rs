//! `jail-cost JAILER PROBE`: what a start in the jail costs, beside a bare `clone3` with the same namespaces and an exec.
//! Prints one line of JSON. Times are CPU time, which other load of the machine changes little.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use jailer::{Jail, Limits, Request, Target};

/// Starts of each kind, in turn.
const ROUNDS: u32 = 100;
const AT_ONCE: u32 = 10;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (jailer, program) = (Path::new(&arguments[1]), File::open(&arguments[2]).unwrap());
    let (mut jailed, mut bare) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..ROUNDS {
        jailed += cost(|| finish(start_jailed(jailer, &program)));
        bare += cost(|| end(start_bare(&program)));
    }
    // Each waits for its end, so this is what one after the other takes, and then ten together.
    let one = time(|| (0..AT_ONCE).for_each(|_| finish(start_jailed(jailer, &program))));
    let ten = time(|| {
        let all: Vec<_> = (0..AT_ONCE).map(|_| start_jailed(jailer, &program)).collect();
        all.into_iter().for_each(finish);
    });
    let micros = |all: Duration| all.as_micros() / u128::from(ROUNDS);
    println!(
        r#"{{"jailed_cpu_us":{},"bare_cpu_us":{},"ratio":{:.2},"ten_in_turn_us":{},"ten_at_once_us":{}}}"#,
        micros(jailed),
        micros(bare),
        jailed.as_secs_f64() / bare.as_secs_f64(),
        one.as_micros(),
        ten.as_micros(),
    );
}

fn start_jailed(jailer: &Path, program: &File) -> jailer::Starting {
    let (_ours, theirs) = UnixStream::pair().unwrap();
    // SAFETY: takes nothing and cannot fail.
    let uid = unsafe { libc::getuid() };
    // SAFETY: as above.
    let gid = unsafe { libc::getgid() };
    let limits = Limits { descriptors: 64, threads: 4, memory: 64 << 20, file_size: 1 << 20 };
    let id = |own: u32| if own == 0 { 0x7000_1234 } else { own };
    let request =
        Request { target: Target::Vmm, uid: id(uid), gid: id(gid), limits, cgroup: false, without: Vec::new() };
    let errors = File::options().write(true).open("/dev/null").unwrap();
    let jail =
        Jail { jailer, request: &request, program: program.as_fd(), control: theirs.as_fd(), errors, cgroup: None };
    jail.start().unwrap()
}

/// Waits for the probe, which finds that nobody wants anything of it.
fn finish(starting: jailer::Starting) {
    assert_eq!(starting.finish().unwrap().wait().unwrap(), jailer::Ended::Exited(99));
}

/// The same namespaces and an exec, and nothing else.
fn start_bare(program: &File) -> libc::pid_t {
    let flags = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWCGROUP;
    // SAFETY: all zero is a valid value.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = u64::from(flags.cast_unsigned());
    arguments.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    // SAFETY: without CLONE_VM the child runs on copies; this program has one thread.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut arguments, size_of::<libc::clone_args>()) };
    if pid == 0 {
        let words: [*const libc::c_char; 2] = [c"probe".as_ptr(), std::ptr::null()];
        let none: [*const libc::c_char; 1] = [std::ptr::null()];
        let (program, path) = (program.as_raw_fd(), c"".as_ptr());
        // SAFETY: both lists end with a null pointer.
        unsafe {
            libc::syscall(libc::SYS_execveat, program, path, &raw const words, &raw const none, libc::AT_EMPTY_PATH)
        };
        // SAFETY: ends the process.
        unsafe { libc::_exit(98) };
    }
    libc::pid_t::try_from(pid).unwrap()
}

fn end(pid: libc::pid_t) {
    let mut status = 0;
    // SAFETY: the kernel writes one number.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(libc::WEXITSTATUS(status), 99);
}

/// CPU time that `work` takes: ours, since whoever calls `clone3` pays for the namespaces, and that of the children that end
/// meanwhile.
fn cost(work: impl FnOnce()) -> Duration {
    let used = || used_by(libc::RUSAGE_SELF) + used_by(libc::RUSAGE_CHILDREN);
    let before = used();
    work();
    used().saturating_sub(before)
}

fn used_by(whom: libc::c_int) -> Duration {
    // SAFETY: all zero is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes the structure.
    assert_eq!(unsafe { libc::getrusage(whom, &raw mut usage) }, 0);
    let time = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec.cast_unsigned()) + Duration::from_micros(time.tv_usec.cast_unsigned())
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

fn time(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}
