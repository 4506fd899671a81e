//! What does not start says why, in one line, and leaves nothing.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount};
use rustix::thread::UnshareFlags;

use crate::Test;
use crate::cli::Bulkhead;
use crate::command::{Output, output};
use crate::{host, processes};

pub(crate) const TESTS: &[Test] = &[
    ("refusals::wrong_words", wrong_words),
    ("refusals::a_kernel_that_is_none", a_kernel_that_is_none),
    ("refusals::sizes_that_do_not_fit", sizes_that_do_not_fit),
    ("refusals::a_host_without_kvm", a_host_without_kvm),
    ("refusals::a_kvm_that_only_emulates", a_kvm_that_only_emulates),
    ("refusals::a_kvm_without_rights", a_kvm_without_rights),
];

/// Somebody of the host who has no rights.
pub(crate) const NOBODY: u32 = 65_534;

/// One line of ours that has these words, a status of 125, no standard output.
fn assert_refused(output: &Output, words: &[&str]) {
    let Output { code, stdout, stderr } = output;
    assert_eq!((*code, stdout.as_str()), (125, ""), "{words:?}: {stderr}");
    assert!(stderr.starts_with("bulkhead: ") && stderr.ends_with('\n') && stderr.lines().count() == 1, "{stderr:?}");
    assert!(words.iter().all(|word| stderr.contains(word)), "{words:?}: {stderr}");
}

/// `bulkhead run` with these arguments is refused and leaves nothing.
fn assert_run_refused(bulkhead: &Bulkhead, arguments: &[&str], words: &[&str]) {
    let output = bulkhead.output(&[&["run"], arguments].concat());
    assert_refused(&output, words);
    assert!(bulkhead.runs().is_empty(), "{arguments:?} left {:?}", bulkhead.runs());
    processes::none_left(bulkhead);
}

fn wrong_words() {
    let bulkhead = Bulkhead::new();
    for (arguments, words) in [
        (&["--cpus", "0", "busybox"][..], &["--cpus", "'0'", "from 0.01 to 32"][..]),
        (&["--cpus", "33", "busybox"], &["--cpus", "'33'", "from 0.01 to 32"]),
        (&["--cpus", "two", "busybox"], &["--cpus", "'two'", "from 0.01 to 32"]),
        (&["--io-max", "speed=1", "busybox"], &["--io-max", "'speed=1'", "rbps, wbps, riops, wiops"]),
        (&["--users", "0-5", "busybox"], &["--users", "'0-5'", "FIRST-LAST"]),
        (&["--allow-unenforced", "seccomp", "busybox"], &["'seccomp'", "namespaces, landlock, cgroup"]),
        (&["-m", "much", "busybox"], &["--memory", "'much'", "512M"]),
        (&["-m", "4X", "busybox"], &["--memory", "'4X'", "K, M, G or T"]),
        (&["-m", "0", "busybox"], &["--memory", "zero"]),
        (&["--disk=-1G", "busybox"], &["--disk", "'-1G'"]),
        (&["--timeout", "15", "busybox"], &["--timeout", "'15'", "30s"]),
        (&["--timeout", "0s", "busybox"], &["--timeout", "zero"]),
        (&["--start-timeout", "soon", "busybox"], &["--start-timeout", "'soon'"]),
        (&["--name", "../x", "busybox"], &["--name", "'../x'", "letters, digits"]),
        (&["-u", "a:b:c", "busybox"], &["--user", "'a:b:c'", "USER:GROUP"]),
        (&["-w", "tmp", "busybox"], &["--workdir", "'tmp'", "absolute"]),
        (&["-e", "=x", "busybox"], &["-e \"=x\"", "name is empty"]),
        (&["-e", "A\nB=x", "busybox"], &["-e", "control character"]),
        (&["--memroy", "4G", "busybox"], &["--memroy", "'--memory'"]),
        (&["busybx", "true"], &["image \"busybx\"", "did you mean busybox?"]),
        (&["../images/busybox", "true"], &["image \"../images/busybox\": not found"]),
        (&["--kernel", "no-such", "busybox", "true"], &["kernel \"no-such\": not found", "there are: "]),
        (&["busybox", ""], &["the command is empty"]),
        (&[], &["required"]),
    ] {
        assert_run_refused(&bulkhead, arguments, words);
    }
    // What is wrong with a policy is shown with the place, on lines of its own.
    for (option, policy, words) in [
        ("--network-policy", "allow-all", "`allow-all` is no policy"),
        ("--network-policy", "@/no/such", "@/no/such: No such file"),
        ("--allow", "*", "--allow"),
        ("--allow", "x.example.com:8080", "8080"),
        ("--allow", "cidr:0.0.0.0/0:443+raw", "--i-accept-open-egress"),
        ("-p", "127.0.0.1:0:80", "PORT:GUESTPORT"),
    ] {
        let refused = bulkhead.output(&["run", option, policy, "busybox", "true"]).refused(125);
        assert!(refused.starts_with("bulkhead: ") && refused.contains(words), "{policy}: {refused}");
        assert!(bulkhead.runs().is_empty(), "{policy}");
    }
    for (arguments, words) in [(&["exec", "nowhere", "true"][..], "none with this id"), (&["lsit"], "'list'")] {
        assert_refused(&bulkhead.output(arguments), &[words]);
    }
}

/// A state directory whose kernels are those that `make` puts there by hand.
fn with_kernels(make: impl Fn(&Path)) -> Bulkhead {
    let bulkhead = Bulkhead::new();
    let kernels = bulkhead.home().join("kernels");
    fs::remove_file(&kernels).unwrap();
    fs::create_dir(&kernels).unwrap();
    make(&kernels);
    bulkhead
}

fn a_kernel_that_is_none() {
    let real = host::newest_kernel();
    let whole = fs::read(real.join("vmlinux")).unwrap();
    let program = fs::read(host::bulkhead()).unwrap();
    let mut other_machine = whole[..4096].to_vec();
    other_machine[18] = 183;
    let mut without_note = whole.clone();
    // The note by which a kernel says where it is entered: name "Xen", type 18.
    let note = b"\x12\0\0\0Xen\0";
    let at = whole.windows(note.len()).position(|window| window == note).unwrap();
    without_note[at] = 99;
    // What begins as a kernel does is read by the VMM alone.
    let cases: &[(&str, &[u8], &str)] = &[
        ("empty", b"", "it is empty"),
        ("text", b"#!/bin/sh\necho no kernel\n", "it has no ELF header"),
        ("bzimage", b"MZ and what follows", "it is a bzImage"),
        ("arm", &other_machine, "it is an ELF file for another machine"),
        ("head", &whole[..40], "it has no ELF header"),
        ("cut", &whole[..1 << 20], "kernel"),
        ("program", &program, "not a loadable 64-bit ELF file"),
        ("without-note", &without_note, "PVH"),
    ];
    let bulkhead = with_kernels(|kernels| {
        for (name, content, _) in cases {
            fs::create_dir(kernels.join(name)).unwrap();
            fs::write(kernels.join(name).join("vmlinux"), content).unwrap();
            symlink(real.join("modules.cpio"), kernels.join(name).join("modules.cpio")).unwrap();
        }
        fs::create_dir(kernels.join("without-modules")).unwrap();
        symlink(real.join("vmlinux"), kernels.join("without-modules/vmlinux")).unwrap();
    });
    for (name, _, why) in cases {
        assert_run_refused(&bulkhead, &["--kernel", name, "busybox", "true"], &["cannot start run", "kernel", why]);
    }
    let arguments = ["--kernel", "without-modules", "busybox", "true"];
    assert_run_refused(&bulkhead, &arguments, &["kernel \"without-modules\"", "modules.cpio", "No such file"]);
    // A link with nothing behind it.
    fs::remove_file(bulkhead.home().join("kernels/text/vmlinux")).unwrap();
    let arguments = ["--kernel", "text", "busybox", "true"];
    assert_run_refused(&bulkhead, &arguments, &["kernel \"text\"", "vmlinux", "No such file"]);
}

fn sizes_that_do_not_fit() {
    let bulkhead = Bulkhead::new();
    for (arguments, words) in [
        (["-m", "32M", "busybox", "true"], &["memory: asked 32.0 MiB", "at least 64.0 MiB"][..]),
        (["-m", "100T", "busybox", "true"], &["memory: asked 100.0 TiB", "free"]),
        (["--disk", "1M", "busybox", "true"], &["disk: asked 1.0 MiB", "256.0 MiB", "--disk"]),
        (["--disk", "1000T", "busybox", "true"], &["disk: asked", "the largest is 16.0 TiB"]),
    ] {
        assert_run_refused(&bulkhead, &arguments, words);
    }
    // Limits that were inherited, and that the run would hit when it is too late to say so.
    for (limit, words) in [
        ("ulimit -f 1000", &["disk: 256.0 MiB", "(ulimit -f)"][..]),
        ("ulimit -n 500", &["descriptors", "500 at most"]),
    ] {
        let script = format!("{limit}; exec \"$@\"");
        let mut command = Command::new("/bin/sh");
        command.env_clear().env("BULKHEAD_HOME", bulkhead.home()).args(["-c", &script, "sh"]).arg(host::bulkhead());
        assert_refused(&output(command.args(["run", "busybox", "true"]), b""), words);
        assert!(bulkhead.runs().is_empty());
    }
    // A kernel command line that no kernel reads whole.
    let long = "x".repeat(3000);
    let arguments = ["--cmdline-extra", &long, "busybox", "true"];
    assert_run_refused(&bulkhead, &arguments, &["kernel command line", "over 2047"]);
}

/// Gives this test's process mounts of its own. Who is not root here is that in a user namespace, until a program is
/// executed.
pub(crate) fn private_mounts() {
    let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
    let flags = if uid.is_root() { UnshareFlags::NEWNS } else { UnshareFlags::NEWNS | UnshareFlags::NEWUSER };
    // SAFETY: this process has no other thread, and no descriptors are concerned.
    unsafe { rustix::thread::unshare_unsafe(flags) }.unwrap();
    if !uid.is_root() {
        fs::write("/proc/self/uid_map", format!("{0} {0} 1", uid.as_raw())).unwrap();
        fs::write("/proc/self/setgroups", "deny").unwrap();
        fs::write("/proc/self/gid_map", format!("{0} {0} 1", gid.as_raw())).unwrap();
    }
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
}

fn a_host_without_kvm() {
    private_mounts();
    let bulkhead = Bulkhead::new();
    let null = bulkhead.home().join("null");
    File::create(&null).unwrap();
    mount_bind("/dev/null", &null).unwrap();
    mount("dev", "/dev", "tmpfs", MountFlags::empty(), None).unwrap();
    File::create("/dev/null").unwrap();
    mount_bind(&null, "/dev/null").unwrap();
    assert_run_refused(&bulkhead, &["busybox", "true"], &["/dev/kvm: not there", "modprobe"]);
}

fn a_kvm_that_only_emulates() {
    private_mounts();
    let bulkhead = Bulkhead::new();
    let fake = bulkhead.home().join("cpuinfo");
    let real = fs::read_to_string("/proc/cpuinfo").unwrap();
    fs::write(&fake, real.replace(" vmx ", " ").replace(" svm ", " ")).unwrap();
    mount_bind(&fake, "/proc/cpuinfo").unwrap();
    assert_run_refused(
        &bulkhead,
        &["busybox", "true"],
        &["KVM only emulates", "vmx", "svm", "hardware virtualisation"],
    );
}

/// A directory whose content goes with its mount. What is mounted in it is the real thing, so nothing here ever removes a
/// file.
pub(crate) struct Place(PathBuf);

impl Place {
    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    fn new() -> Self {
        let place = host::directory().keep();
        mount("place", &place, "tmpfs", MountFlags::empty(), Some(c"mode=755")).unwrap();
        Self(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        unmount(&self.0, UnmountFlags::DETACH).unwrap();
        fs::remove_dir(&self.0).unwrap();
    }
}

/// Everything that a run needs, where nobody may reach it: the client, and a state directory of theirs.
pub(crate) fn for_nobody() -> (Place, PathBuf, PathBuf) {
    let place = Place::new();
    let [programs, home] = ["programs", "home"].map(|name| place.0.join(name));
    // An image of which nothing is read before the device.
    let image = home.join("images/busybox");
    fs::create_dir_all(&image).unwrap();
    fs::write(image.join("root.img"), [0; 8192]).unwrap();
    fs::write(image.join("image.json"), r#"{"config":{}}"#).unwrap();
    // As much of a kernel as is looked at before the device.
    let kernel = home.join("kernels/beginning");
    fs::create_dir_all(&kernel).unwrap();
    let mut head = [0; 4096];
    host::open(&host::newest_kernel().join("vmlinux")).read_exact(&mut head).unwrap();
    fs::write(kernel.join("vmlinux"), head).unwrap();
    fs::write(kernel.join("modules.cpio"), "").unwrap();
    fs::create_dir_all(&programs).unwrap();
    mount_bind(host::program("").canonicalize().unwrap(), &programs).unwrap();
    if rustix::process::getuid().is_root() {
        chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    (place, programs.join("bin/bulkhead"), home)
}

/// The device belongs to root alone; to a group that the user is not in; to one that the user joined after the login.
/// The last two need another owner of a file, which only root can make; for others the client's own tests stand.
fn a_kvm_without_rights() {
    private_mounts();
    let (place, client, home) = for_nobody();
    let device = place.0.join("kvm");
    File::create(&device).unwrap();
    mount_bind(&device, "/dev/kvm").unwrap();
    let root = rustix::process::getuid().is_root();
    let run = || {
        let mut command = Command::new(&client);
        command.env_clear().env("BULKHEAD_HOME", &home).args(["run", "busybox", "true"]);
        if root {
            command.uid(NOBODY).gid(NOBODY);
        }
        let refused = output(&mut command, b"");
        // Not even a place for runs was made.
        assert!(!home.join("runs").exists());
        refused
    };
    fs::set_permissions(&device, fs::Permissions::from_mode(0o000)).unwrap();
    assert_refused(&run(), &["/dev/kvm: permission denied", "no group has the right", "chgrp"]);
    if !root {
        return;
    }
    let files = [("group", "daemon:x:1:\nkvm:x:777:someone\n"), ("passwd", "dave:x:65534:65534::/:/bin/sh\n")];
    for (name, content) in files {
        let file = place.0.join(name);
        fs::write(&file, content).unwrap();
        mount_bind(&file, format!("/etc/{name}")).unwrap();
    }
    fs::set_permissions(&device, fs::Permissions::from_mode(0o660)).unwrap();
    chown(&device, Some(0), Some(777)).unwrap();
    assert_refused(&run(), &["it belongs to group kvm", "usermod -aG kvm dave"]);
    fs::write(place.0.join("group"), "kvm:x:777:someone,dave\n").unwrap();
    assert_refused(&run(), &["user dave is in its group kvm", "this process does not have the group"]);
}
