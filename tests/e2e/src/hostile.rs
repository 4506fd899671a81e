//! Guests that do their worst. The host stays as it was, the run ends, and it is clear why.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount};
use vmm_control::{Config, Disk, Event, Request, StopReason};

use crate::cli::Bulkhead;
use crate::command::{code, until};
use crate::host::{self, open};
use crate::vmm::Vmm;
use crate::{Test, processes};

pub(crate) const TESTS: &[Test] = &[
    ("hostile::a_panic_is_told", a_panic_is_told),
    ("hostile::a_guest_that_never_boots_is_given_up", a_guest_that_never_boots_is_given_up),
    ("hostile::garbage_everywhere", garbage_everywhere),
    ("hostile::a_full_disk_is_the_guests_own_trouble", a_full_disk_is_the_guests_own_trouble),
    ("hostile::a_full_host_makes_the_guest_wait", a_full_host_makes_the_guest_wait),
    ("hostile::a_full_host_does_not_keep_a_run_from_ending", a_full_host_does_not_keep_a_run_from_ending),
    ("hostile::endless_output_that_nobody_reads", endless_output_that_nobody_reads),
    ("hostile::forks_without_end", forks_without_end),
    ("hostile::memory_without_end", memory_without_end),
    ("hostile::a_workload_that_kills_and_powers_off", a_workload_that_kills_and_powers_off),
];

/// Most memory of a client or a supervisor, in KiB, whatever the guest does.
const MOST_MEMORY: u64 = 32 << 10;

fn a_panic_is_told() {
    let bulkhead = Bulkhead::new();
    // One that happens while the command runs, with what the kernel said of it.
    let script = "echo before; read -r line; echo c > /proc/sysrq-trigger; sleep 1000";
    let mut panicking = bulkhead.start(&["run", "-i", "--console", "--name", "box", "busybox", "sh", "-c", script]);
    // What a command says in its last moment, nobody might hear.
    panicking.until_printed("before\n");
    let ended = panicking.finish();
    assert_eq!((ended.code, ended.stdout.as_str()), (125, "before\n"), "{ended:?}");
    let first = ended.stderr.lines().next().unwrap();
    assert!(first.contains("the guest's kernel reset the machine before the command ended"), "{ended:?}");
    assert!(ended.stderr.contains("sysrq triggered crash"), "the console is quoted: {}", ended.stderr);
    let all = bulkhead.output(&["list", "-a"]).expect(0);
    assert!(all.contains("failed (the guest's kernel reset the machine before the command ended"), "{all}");
    processes::none_left(&bulkhead);
}

fn a_guest_that_never_boots_is_given_up() {
    let bulkhead = Bulkhead::new();
    // A kernel that stops dead long before it looks for an init.
    let words = ["--cmdline-extra", "initcall_debug rdinit=/nothing root=/dev/none rootwait", "--start-timeout", "5s"];
    let ended = bulkhead.output(&[&["run"], &words[..], &["busybox", "echo", "never"]].concat());
    assert_eq!((ended.code, ended.stdout.as_str()), (125, ""), "{ended:?}");
    assert!(
        ended.stderr.contains("the guest did not boot within 5s") && ended.stderr.contains("--start-timeout"),
        "{ended:?}"
    );
    // One whose init is not there panics, which is told at once and not after the timeout.
    let ended = bulkhead.output(&["run", "--cmdline-extra", "rdinit=/nothing", "busybox", "echo", "never"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (125, ""), "{ended:?}");
    assert!(ended.stderr.contains("the guest's kernel reset the machine while it booted"), "{ended:?}");
    assert!(bulkhead.runs().is_empty());
    processes::none_left(&bulkhead);
}

/// Every port, every register, then each device by its rules and against them, from one CPU and from all: the VMM
/// answers all the while, and the devices work afterwards.
fn garbage_everywhere() {
    let wanted = if host::soak() { 50 } else { 1 };
    let first: u64 = std::env::var("SEED").map_or(1, |seed| seed.parse().unwrap());
    let progress = host::Progress::of_this_run();
    let mut passed = 0;
    for seed in first.. {
        let [began, ended] = ["began", "ended"].map(|what| format!("garbage of seed {seed} {what}"));
        if progress.has(&ended) {
            passed += 1;
        } else if !progress.has(&began) {
            // Where it began and did not end, the emulated host's kernel died of its guest (see tests/rig/README.md), which
            // says nothing of the VMM: another seed has to.
            progress.add(&began);
            garbage(seed);
            progress.add(&ended);
            passed += 1;
        }
        if passed == wanted {
            break;
        }
    }
}

fn garbage(seed: u64) {
    let files = host::directory();
    let file = |name| {
        let path = files.path().join(name);
        File::options().read(true).write(true).create(true).truncate(true).open(path).unwrap()
    };
    let size = 512 << 20;
    snapshot::disk::create_layer(&file("data"), &file("map"), size).unwrap();
    let layer = |name| File::options().read(true).write(true).open(files.path().join(name)).unwrap();
    let disk = Disk { serial: "root".into(), read_only: false, raw_base: true, layers: 2, queues: 4 };
    let config = Config {
        disks: vec![disk],
        console: true,
        net: None,
        // Device memory may be reached; a page of memory is never given to anybody else while a device writes to it.
        cmdline: format!("{} iomem=relaxed payload=garbage payload.seed={seed}", host::CMDLINE),
        ..host::config(2, 256 << 20, 1)
    };
    let parts = [
        open(&host::newest_kernel().join("vmlinux")),
        open(&host::program("test/payload.cpio")),
        open(&host::image("busybox")),
        layer("data"),
        layer("map"),
        file("console"),
    ];
    let vmm = Vmm::start(config, &parts.each_ref()).unwrap();
    let (mut answers, mut connections) = (0, Vec::new());
    let deadline = Instant::now() + Duration::from_secs(240);
    let (reason, stats) = loop {
        // It may have ended: its last words tell. A guest that hangs is stopped.
        let _ = vmm.send(if Instant::now() < deadline { &Request::Stats } else { &Request::Stop });
        match vmm.event().unwrap() {
            Event::Stopped { reason, stats } => break (reason, stats),
            Event::Stats(_) => answers += 1,
            Event::Refused { error } => panic!("{error}"),
            _ => {}
        }
        // Somebody who wants to talk to the guest meanwhile.
        if answers % 8 == 0 && connections.len() < 64 {
            connections.extend(vmm.connect(1024).ok());
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let marks: Vec<u8> = stats.marks.iter().map(|at| at.mark).collect();
    eprintln!("seed {seed}: {reason:?} after {answers} answers, marks {marks:?}");
    if reason != StopReason::PowerOff {
        // What its kernel made of it.
        let console = fs::read(files.path().join("console")).unwrap();
        eprintln!("{}", String::from_utf8_lossy(&console[console.len().saturating_sub(4000)..]));
    }
    // What it does to its own devices and interrupts, its kernel need not survive; the VMM does.
    let own = matches!(reason, StopReason::PowerOff | StopReason::Reset { .. } | StopReason::Asked);
    assert!(own, "seed {seed}: {reason:?}");
    assert!(answers > 10, "{answers} answers");
    // From one CPU, nothing is written but to ports, registers and memory of the payload's own, so it always comes so far:
    // every port, every register, three devices, a request of each served, and all of their misuse.
    for mark in [1, 20, 21, 22, 33, 40 + 2, 40 + 4, 23] {
        assert!(marks.contains(&mark), "seed {seed}: no mark {mark}; marks {marks:?}");
    }
    // From several at once, it can come to harm by itself. If it did not, the devices work afterwards.
    if reason == StopReason::PowerOff {
        assert!(marks.contains(&24) && marks.contains(&25), "seed {seed}; marks {marks:?}");
    }
    assert!(stats.blocks[0].requests > 0 && stats.blocks[0].failed > 0, "seed {seed}: {stats:?}");
    let used = fs::metadata(files.path().join("data")).unwrap().blocks() * 512;
    assert!(used <= size, "seed {seed}: {used} bytes on the host");
}

/// What the files of the only run take up on the host, in bytes.
fn host_usage(bulkhead: &Bulkhead) -> u64 {
    let mut directories: Vec<PathBuf> = bulkhead.runs();
    let mut sum = 0;
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let metadata = entry.metadata().unwrap();
            sum += metadata.blocks() * 512;
            directories.extend(metadata.is_dir().then(|| entry.path()));
        }
    }
    sum
}

fn a_full_disk_is_the_guests_own_trouble() {
    let bulkhead = Bulkhead::new();
    let _resident = bulkhead.reside("box", &[]);
    let filled = bulkhead.shell("box", "cat /dev/urandom > /big");
    assert_eq!(filled.code, 1, "{filled:?}");
    assert!(filled.stderr.contains("No space left on device"), "{filled:?}");
    assert_eq!(bulkhead.shell("box", "sync; echo still here").expect(0), "still here\n");
    let (most, used) = (fs::metadata(host::image("busybox")).unwrap().len(), host_usage(&bulkhead));
    // The disk, its map, and the small files beside them.
    assert!(used > most / 2 && used <= most + (1 << 20), "{used} of {most}");
    bulkhead.shell("box", "rm /big; sync; fstrim /; sync").expect(0);
    until("room on the host again", || host_usage(&bulkhead) < used / 2);
}

/// A state directory on a host file system of this size; the programs' own files are elsewhere.
fn on_a_small_host(mib: u64) -> Bulkhead {
    let bulkhead = Bulkhead::new();
    make_small(&bulkhead, "runs", mib);
    bulkhead
}

/// Gives a part of the state directory, which is not there yet, a file system of its own.
pub(crate) fn make_small(bulkhead: &Bulkhead, part: &str, mib: u64) {
    crate::refusals::private_mounts();
    let part = bulkhead.home().join(part);
    fs::create_dir(&part).unwrap();
    let options = std::ffi::CString::new(format!("size={mib}m,mode=700")).unwrap();
    mount("small", &part, "tmpfs", MountFlags::empty(), options.as_c_str()).unwrap();
}

/// Given a host whose file system is full, the guest's writes wait, and the state says so; when there is room again they
/// go on, and every byte is right.
fn a_full_host_makes_the_guest_wait() {
    let bulkhead = on_a_small_host(100);
    let ballast = bulkhead.home().join("runs/ballast");
    fs::write(&ballast, vec![1; 60 << 20]).unwrap();
    let script = "head -c 64000000 /dev/urandom | tee /big | md5sum && sync && echo synced && \
                  echo 3 > /proc/sys/vm/drop_caches && md5sum < /big";
    let mut running = bulkhead.start(&["run", "-m", "256M", "--name", "box", "busybox", "sh", "-c", script]);
    let state = || bulkhead.output(&["list"]).expect(0);
    until("the full host in the state", || {
        let ended = running.has_ended();
        let state = state();
        assert!(!ended, "{state}");
        state.contains("running (host-disk-full: disk 0 waits for room)")
    });
    assert!(!running.printed().contains("synced"));
    // The machine lives: what needs no disk goes on.
    assert_eq!(bulkhead.shell("box", "echo alive").expect(0), "alive\n");
    fs::remove_file(&ballast).unwrap();
    let printed = running.finish().expect(0);
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!((lines.len(), lines[0], lines[1]), (3, lines[2], "synced"), "{printed}");
    assert!(bulkhead.output(&["list", "-a"]).expect(0).contains("stopped (exited)"));
}

fn a_full_host_does_not_keep_a_run_from_ending() {
    let bulkhead = on_a_small_host(40);
    let script = "cat /dev/urandom > /big & sleep 100000";
    let running = bulkhead.start(&["run", "-m", "256M", "--name", "box", "busybox", "sh", "-c", script]);
    until("the full host in the state", || bulkhead.output(&["list"]).expect(0).contains("host-disk-full"));
    running.signal(rustix::process::Signal::TERM);
    let ended = running.finish();
    assert_eq!(ended.code, 143, "{ended:?}");
    let all = bulkhead.output(&["list", "-a"]).expect(0);
    assert!(all.contains("box   busybox  stopped (killed by signal 15)"), "{all}");
    processes::none_left(&bulkhead);
}

/// Nobody reads: the command waits, nothing is stored without bound, and the run can be ended all the same.
fn endless_output_that_nobody_reads() {
    let bulkhead = Bulkhead::new();
    let words = ["run", "--timeout", "6s", "busybox", "sh", "-c", "yes 0123456789 & exec yes 0123456789 >&2"];
    let mut child =
        bulkhead.command(&words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (supervisor, vmm) = (processes::supervisor(&bulkhead), processes::vmm(&bulkhead));
    let mut peak = 0;
    until("the machine's end", || {
        let alive = processes::all(&bulkhead);
        let own = alive.iter().filter(|process| process.pid != vmm.pid);
        peak = own.filter_map(processes::Process::peak_memory).fold(peak, u64::max);
        !alive.iter().any(|process| process.pid == vmm.pid)
    });
    assert!(peak > 0 && peak < MOST_MEMORY, "{peak} KiB");
    until("the run's end", || bulkhead.runs().is_empty());
    // The client still has what it could not pass on, and then the end.
    let mut errors = child.stderr.take().unwrap();
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        errors.read_to_string(&mut text).map(|_| text)
    });
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    let errors = errors.join().unwrap().unwrap();
    assert_eq!(code(child.wait().unwrap()), 124);
    assert!(text.starts_with("0123456789\n") && text.len() < 4 << 20, "{} bytes", text.len());
    assert!(errors.contains("ended after 6s (--timeout)"), "{}", &errors[errors.len().saturating_sub(200)..]);
    until("the supervisor's end", || !processes::all(&bulkhead).iter().any(|process| process.pid == supervisor.pid));
}

fn forks_without_end() {
    let bulkhead = Bulkhead::new();
    let bomb = "echo here; bomb() { bomb | bomb & }; bomb; sleep 100000";
    let words = ["run", "-m", "256M", "--timeout", "30s", "--name", "box", "busybox", "sh", "-c", bomb];
    let mut running = bulkhead.start(&words);
    running.until_printed("here\n");
    std::thread::sleep(Duration::from_secs(3));
    // Another command either runs or is told why it cannot.
    let other = bulkhead.output(&["exec", "box", "echo", "hello"]);
    let said = match other.code {
        0 => other.stdout == "hello\n",
        125 => other.stderr.contains("cannot start") || other.stderr.contains("it ended before the command did"),
        _ => false,
    };
    assert!(said, "{other:?}");
    // The timeout ends it, unless its first shell is what the guest's kernel killed for want of memory.
    let ended = running.finish();
    let last = match ended.code {
        124 => ": ended after 30s (--timeout)\n",
        137 => "killed: out of memory in the guest; give the run more with -m\n",
        other => panic!("{other}: {}", &ended.stderr[ended.stderr.len().saturating_sub(300)..]),
    };
    assert!(ended.stderr.ends_with(last));
    processes::none_left(&bulkhead);
}

fn memory_without_end() {
    let bulkhead = Bulkhead::new();
    let words = ["run", "-m", "192M", "--name", "box", "busybox", "sh", "-c", "echo here; exec sleep 100000"];
    let mut resident = bulkhead.start(&words);
    resident.until_printed("here\n");
    // One line of endless length, which tail keeps.
    let eaten = bulkhead.output(&["exec", "box", "tail", "/dev/zero"]);
    assert_eq!(eaten.code, 137, "{eaten:?}");
    assert_eq!(eaten.stderr, "bulkhead: \"tail\": killed: out of memory in the guest; give the run more with -m\n");
    // In files of memory, which no process's end gives back.
    let eaten = bulkhead.shell("box", "cat /dev/zero > /dev/shm/big");
    assert!(matches!(eaten.code, 1 | 137), "{eaten:?}");
    assert_eq!(bulkhead.shell("box", "rm -f /dev/shm/big; echo still here").expect(0), "still here\n");
}

/// As root it kills all that it sees, and powers off as it knows how. The agent is not among what it sees; the machine is
/// its own to end, and that is told.
fn a_workload_that_kills_and_powers_off() {
    let bulkhead = Bulkhead::new();
    let mut resident = bulkhead.reside("box", &[]);
    // A fresh /proc, wherever it is mounted, shows the same processes.
    let seen = bulkhead.shell("box", "mkdir -p /p; mount -t proc proc /p; cat /p/[0-9]*/comm /p/1/cmdline").expect(0);
    assert!(seen.contains("bulkhead-init") && !seen.contains("bulkhead-guest") && !seen.contains("kthreadd"), "{seen}");
    // The shell's own command is killed with the rest.
    let killed = bulkhead.output(&["exec", "box", "busybox", "sh", "-c", "busybox kill -9 -1; sleep 1000"]);
    assert_eq!((killed.code, killed.stderr.as_str()), (137, ""), "{killed:?}");
    until("the end of the run's own command", || resident.has_ended());
    assert_eq!(resident.finish().code, 137);
    let all = bulkhead.output(&["list", "-a"]).expect(0);
    assert!(all.contains("stopped (killed by signal 9)"), "{all}");

    // Power-off in the workload's own namespace ends what is in it; by the kernel's own key, the machine.
    let ended = bulkhead.output(&["run", "busybox", "sh", "-c", "poweroff -f; sleep 1000"]);
    assert_ne!(ended.code, 0, "{ended:?}");
    eprintln!("poweroff -f: {ended:?}");
    let ended = bulkhead.output(&["run", "busybox", "sh", "-c", "echo o > /proc/sysrq-trigger; sleep 1000"]);
    assert_eq!(ended.code, 125, "{ended:?}");
    assert!(ended.stderr.contains("the guest powered off before the command ended"), "{ended:?}");
    processes::none_left(&bulkhead);
}
