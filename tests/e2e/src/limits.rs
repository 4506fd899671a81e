//! What a run may use, and who may start one: cgroups, ordinary users, hosts that forbid what the jail needs.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use jailer::cgroup::{Cgroup, Controller, Limits, Place};
use jailer::{NAMESPACES, Seen};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::mount_bind;
use serde_json::Value;

use crate::cli::Bulkhead;
use crate::command::{Output, output, until};
use crate::refusals::{NOBODY, for_nobody, private_mounts};
use crate::{Test, host, processes};

pub(crate) const TESTS: &[Test] = &[
    ("limits::a_run_meets_its_limits", a_run_meets_its_limits),
    ("limits::a_greedy_guest_stays_within_its_limits", a_greedy_guest_stays_within_its_limits),
    ("limits::what_a_killed_supervisor_leaves_is_removed", what_a_killed_supervisor_leaves_is_removed),
    ("limits::cgroups_are_made_side_by_side", cgroups_are_made_side_by_side),
    ("limits::an_ordinary_user_is_jailed_as_well", an_ordinary_user_is_jailed_as_well),
];

/// Where root's cgroups are.
const CGROUPS: &str = "/sys/fs/cgroup/bulkhead";
const MIB: u64 = 1 << 20;
/// What `systemd-run --user --scope` does, as far as it matters here.
const FAKE_MANAGER: &str = "#!/bin/sh
while [ \"$1\" != -- ]; do shift; done
shift
mkdir /sys/fs/cgroup/bulkhead-test/scope
echo $$ >/sys/fs/cgroup/bulkhead-test/scope/cgroup.procs
exec \"$@\"
";

/// How the VMM of a run is confined.
fn jail(home: &Path, name: &str) -> Value {
    let read = |path: PathBuf| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    let runs = fs::read_dir(home.join("runs")).unwrap().map(|run| run.unwrap().path()).filter(|run| run.is_dir());
    let run = runs.into_iter().find(|run| read(run.join("spec.json"))["name"] == name).unwrap();
    read(run.join("jail.json"))
}

fn cgroup_of(jail: &Value) -> PathBuf {
    PathBuf::from(jail["cgroup"].as_str().unwrap())
}

fn file(cgroup: &Path, name: &str) -> String {
    fs::read_to_string(cgroup.join(name)).unwrap().trim().to_owned()
}

fn cpu_micros(cgroup: &Path) -> u64 {
    let text = file(cgroup, "cpu.stat");
    text.lines().find_map(|line| line.strip_prefix("usage_usec ")).unwrap().parse().unwrap()
}

fn a_run_meets_its_limits() {
    // Given a run with half a CPU, 4 MiB of writes a second and 128 MiB of memory,
    let bulkhead = Bulkhead::new();
    let options = ["-m", "128M", "--cpus", "0.5", "--io-max", "wbps=4M"];
    let resident = bulkhead.reside("box", &options);
    let jail = jail(bulkhead.home(), "box");
    assert_eq!(jail["unenforced"], Value::Array(Vec::new()));

    // the kernel says so,
    let cgroup = cgroup_of(&jail);
    assert!(cgroup.starts_with(CGROUPS), "{}", cgroup.display());
    let memory = 128 * MIB + 128 * MIB / 256 + 128 * MIB + 64 * MIB;
    assert_eq!(file(&cgroup, "memory.max"), memory.to_string());
    assert_eq!(file(&cgroup, "pids.max"), "5");
    assert_eq!(file(&cgroup, "cpu.max"), "50000 100000");
    assert!(file(&cgroup, "io.max").contains("wbps=4194304"), "{}", file(&cgroup, "io.max"));
    // and that every thread of the VMM is bound by three lists, and has nothing.
    let pid = i32::try_from(jail["pid"].as_i64().unwrap()).unwrap();
    assert_eq!(file(&cgroup, "cgroup.procs"), pid.to_string());
    let seen = Seen::of(pid).unwrap();
    assert_eq!((seen.no_new_privs, seen.capabilities, seen.mounts.unwrap().len()), (true, 0, 1));
    assert_eq!(seen.namespaces, NAMESPACES);
    assert_eq!(seen.cgroup.as_deref(), Some(&*cgroup));
    assert!((0x7000_0000..0x7001_0000).contains(&seen.uid));
    for thread in seen.threads {
        // KVM's own thread never leaves the kernel.
        assert!(thread.name.starts_with("kvm-nx") || thread.seccomp_filters == 3, "{thread:?}");
    }
    // The program says the same.
    let inspected: Value = serde_json::from_str(&bulkhead.output(&["inspect", "box"]).expect(0)).unwrap();
    let process = &inspected[0]["processes"][0];
    assert_eq!((&process["pid"], &process["namespaces"]), (&Value::from(pid), &Value::from(NAMESPACES.to_vec())));
    assert_eq!((&process["capabilities"], &process["no_new_privs"]), (&"0000000000000000".into(), &true.into()));
    assert_eq!(process["cgroup"]["limits"]["memory.max"], memory.to_string());

    // When its guest computes without end, it uses half a CPU;
    let mut computing = bulkhead.start(&["exec", "box", "sh", "-c", "echo go; while :; do :; done"]);
    computing.until_printed("go\n");
    let (start, before) = (Instant::now(), cpu_micros(&cgroup));
    std::thread::sleep(Duration::from_secs(3));
    let used = Duration::from_micros(cpu_micros(&cgroup) - before).as_secs_f64() / start.elapsed().as_secs_f64();
    assert!((0.3..0.6).contains(&used), "used {used} of a CPU");
    drop(computing);
    // when it writes without end, that takes the time that it has to, as soon as the kernel has noticed whose writes these
    // are: it counts a file's to the cgroup of who made it, our supervisor, until another has written most of it for seconds;
    until("the limit of the disk's writes", || {
        let start = Instant::now();
        bulkhead.shell("box", "dd if=/dev/zero of=/large bs=1M count=8 conv=fsync 2>/dev/null").expect(0);
        start.elapsed() >= Duration::from_millis(1500)
    });
    // when its memory is gone, it ends, and it is said why.
    fs::write(cgroup.join("memory.max"), (16 * MIB).to_string()).unwrap();
    let ended = resident.finish();
    assert_eq!(ended.code, 125, "{ended:?}");
    assert!(ended.stderr.contains("out-of-memory"), "{ended:?}");
    let inspected: Value = serde_json::from_str(&bulkhead.output(&["inspect", "box"]).expect(0)).unwrap();
    assert_eq!((&inspected[0]["reason"], &inspected[0]["processes"]), (&"out-of-memory".into(), &Value::Array(vec![])));
    until("the end of the cgroup", || !cgroup.exists());
}

/// What eats all that there is, at once: CPU time, processes, memory, disk bandwidth.
const GREEDY: &str = "for i in 1 2 3; do while :; do :; done & done
while :; do sleep 1 & done 2>/dev/null &
while :; do tail /dev/zero; done 2>/dev/null &
echo go
while :; do dd if=/dev/zero of=/large bs=1M count=8 conv=fsync 2>/dev/null; done";
/// Work that a neighbour does; at what cost beside an eater is a benchmark (tests/bench/neighbour).
const WORK: &str = "i=0; while [ $i -lt 10000 ]; do i=$((i+1)); done; echo $i";

fn a_greedy_guest_stays_within_its_limits() {
    // Given a guest that eats whatever it gets, within limits, and a neighbour,
    let bulkhead = Bulkhead::new();
    let _greedy = bulkhead.reside("greedy", &["-m", "128M", "--cpus", "0.5", "--io-max", "wbps=4M"]);
    let _next = bulkhead.reside("next", &["-m", "128M"]);
    let greedy = cgroup_of(&jail(bulkhead.home(), "greedy"));
    let mut eating = bulkhead.start(&["exec", "greedy", "sh", "-c", GREEDY]);
    eating.until_printed("go\n");
    // when the eater was held back, the neighbour still works,
    until("the limit of CPU time", || !file(&greedy, "cpu.stat").contains("nr_throttled 0\n"));
    assert_eq!(bulkhead.shell("next", WORK).expect(0), "10000\n");
    // and the eater has met its limits, and is still there.
    for (peak, most) in [("memory.peak", "memory.max"), ("pids.peak", "pids.max")] {
        let number = |name: &str| file(&greedy, name).parse::<u64>().unwrap();
        assert!(number(peak) <= number(most), "{peak}");
    }
    assert_ne!(file(&greedy, "cgroup.procs"), "");
}

fn what_a_killed_supervisor_leaves_is_removed() {
    let bulkhead = Bulkhead::new();
    let resident = bulkhead.reside("box", &["-m", "128M"]);
    let cgroup = cgroup_of(&jail(bulkhead.home(), "box"));
    processes::supervisor(&bulkhead).kill();
    drop(resident);
    processes::none_left(&bulkhead);
    assert!(cgroup.exists(), "nobody was left to remove it");
    // The next start does.
    assert_eq!(bulkhead.output(&["run", "-m", "128M", "busybox", "echo", "next"]).expect(0), "next\n");
    until("the end of the cgroup", || !cgroup.exists());
}

/// Each start sweeps away what nobody holds, and must not take for that what another is about to hold.
fn cgroups_are_made_side_by_side() {
    let place = Place::find(true, &[Controller::Memory, Controller::Pids]).unwrap();
    let limits = Limits { memory: MIB, pids: 1, cpu: None, io: None };
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (place, limits) = (&place, &limits);
            scope.spawn(move || {
                for _ in 0..50 {
                    let cgroup = Cgroup::create(place, &format!("bulkhead-test-{thread}"), limits).unwrap();
                    std::thread::yield_now();
                    assert_eq!(file(cgroup.path(), "pids.max"), "1");
                }
            });
        }
    });
}

/// Given a user who may open KVM and nothing more: in a cgroup that is not theirs, in one that is, and on a host that
/// forbids user namespaces.
fn an_ordinary_user_is_jailed_as_well() {
    private_mounts();
    let (place, client, home) = for_nobody();
    // That place has the beginnings of a kernel and an image. Here the real ones lie over them.
    let (kernel, image) = (host::newest_kernel(), host::image("busybox"));
    for (from, to) in [
        (kernel.join("vmlinux"), "kernels/beginning/vmlinux"),
        (kernel.join("modules.cpio"), "kernels/beginning/modules.cpio"),
    ] {
        mount_bind(from.canonicalize().unwrap(), home.join(to)).unwrap();
    }
    let copied = Command::new("cp")
        .arg("--sparse=always")
        .args([&image, &image.with_file_name("image.json")])
        .arg(home.join("images/busybox"))
        .status();
    assert!(copied.unwrap().success());
    for file in ["root.img", "image.json"] {
        fs::set_permissions(home.join("images/busybox").join(file), fs::Permissions::from_mode(0o644)).unwrap();
    }
    let device = place.path().join("kvm");
    mknodat(CWD, &device, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(10, 232)).unwrap();
    fs::set_permissions(&device, fs::Permissions::from_mode(0o666)).unwrap();
    mount_bind(&device, "/dev/kvm").unwrap();
    let run = |cgroup: Option<&Path>, options: &[&str], script: &str| -> Output {
        let mut command = Command::new(&client);
        command.env_clear().env("BULKHEAD_HOME", &home).uid(NOBODY).gid(NOBODY);
        command.args([&["run", "-m", "128M"], options, &["busybox", "sh", "-c", script]].concat());
        if let Some(cgroup) = cgroup {
            // Goes there first, and becomes the user then, as it is at a login.
            let become_user = "exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\"";
            let script = format!("echo $$ > {}/cgroup.procs; {become_user}", cgroup.display());
            let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
            let mut login = Command::new("/bin/sh");
            login.args(["-c", &script, "sh"]).args(words);
            login.env_clear().env("BULKHEAD_HOME", &home).env("XDG_RUNTIME_DIR", place.path().join("runtime"));
            login.env("PATH", format!("{}:/usr/bin:/bin", place.path().display()));
            return output(&mut login, b"");
        }
        output(&mut command, b"")
    };

    // Then a run works without a cgroup, if nothing depends on one,
    assert_eq!(run(None, &[], "echo jailed; id -u").expect(0), "jailed\n0\n");
    // and is refused by name if something does.
    for (options, why) in [(&["--require-cgroup"][..], "--require-cgroup"), (&["--cpus", "0.5"], "--cpus")] {
        let refused = run(None, options, "true").refused(125);
        assert!(refused.contains("not delegated") && refused.contains(why), "{refused}");
        assert!(refused.contains("systemd-run --user --scope"), "{refused}");
    }

    // In a cgroup that is theirs, it gets one;
    let delegated = Path::new("/sys/fs/cgroup/bulkhead-test");
    let leaf = delegated.join("login");
    fs::create_dir(delegated).unwrap();
    fs::create_dir(&leaf).unwrap();
    fs::write(delegated.join("cgroup.subtree_control"), "+memory +pids +cpu").unwrap();
    let give =
        |paths: &[&str]| paths.iter().for_each(|path| chown(delegated.join(path), Some(NOBODY), Some(NOBODY)).unwrap());
    give(&["", "cgroup.procs", "cgroup.subtree_control", "login/cgroup.procs"]);
    // from a login's that is not theirs, through their service manager, here a stand-in that does what it would do,
    let runtime = place.path().join("runtime");
    fs::create_dir_all(runtime.join("systemd")).unwrap();
    fs::write(runtime.join("systemd/private"), "").unwrap();
    let manager = place.path().join("systemd-run");
    fs::write(&manager, FAKE_MANAGER).unwrap();
    fs::set_permissions(&manager, fs::Permissions::from_mode(0o755)).unwrap();
    let scoped = run(Some(&leaf), &["--require-cgroup"], "echo scoped");
    let handed_in_scope = fs::read_to_string(delegated.join("scope/cgroup.subtree_control"));
    // or directly.
    give(&["login", "login/cgroup.subtree_control"]);
    let limited = run(Some(&leaf), &["--require-cgroup", "--cpus", "0.5"], "echo limited");
    until("the end of the cgroups", || {
        // Innermost first; what is gone is gone.
        ["scope/supervisor", "scope", "login", ""].iter().for_each(|path| drop(fs::remove_dir(delegated.join(path))));
        !delegated.exists()
    });
    assert_eq!(scoped.expect(0), "scoped\n");
    assert!(handed_in_scope.is_ok_and(|handed| handed.contains("memory") && handed.contains("pids")));
    assert_eq!(limited.expect(0), "limited\n");

    // Where user namespaces are forbidden, that is said, and how to change it;
    let switch = Path::new("/proc/sys/kernel/unprivileged_userns_clone");
    let (switch, off, on) = if switch.exists() {
        (switch, "0".to_owned(), "1".to_owned())
    } else {
        let switch = Path::new("/proc/sys/user/max_user_namespaces");
        (switch, "0".to_owned(), fs::read_to_string(switch).unwrap())
    };
    fs::write(switch, off).unwrap();
    let refused = run(None, &[], "true");
    let allowed = run(None, &["--allow-unenforced", "namespaces"], "echo bare");
    fs::write(switch, on).unwrap();
    let refused = refused.refused(125);
    assert!(refused.contains("jail: clone3: ") && refused.contains("sysctl -w "), "{refused}");
    // and with the user's word the rest of the jail does without.
    assert_eq!(allowed.expect(0), "bare\n");
}
