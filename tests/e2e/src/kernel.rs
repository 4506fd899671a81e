//! Kernels that are imported as a user does it, and what machines make of them.

use std::fs;
use std::path::PathBuf;

use crate::Test;
use crate::cli::Bulkhead;
use crate::host;

pub(crate) const TESTS: &[Test] = &[
    ("kernel::a_package_becomes_a_kernel_that_boots", a_package_becomes_a_kernel_that_boots),
    ("kernel::a_vmlinuz_with_its_modules_becomes_one_too", a_vmlinuz_with_its_modules_becomes_one_too),
    ("kernel::modules_come_from_a_disk_of_their_own", modules_come_from_a_disk_of_their_own),
];

/// A state directory with the images of this machine and no kernel.
fn without_kernels() -> Bulkhead {
    let bulkhead = Bulkhead::new();
    fs::remove_file(bulkhead.home().join("kernels")).unwrap();
    bulkhead
}

fn words(output: &str) -> Vec<&str> {
    output.split_whitespace().collect()
}

fn a_package_becomes_a_kernel_that_boots() {
    let bulkhead = without_kernels();
    let refused = bulkhead.output(&["run", "busybox", "true"]).refused(125);
    assert!(refused.contains("no kernel in ") && refused.contains("bulkhead kernel import"), "{refused}");

    let package = host::package("6.12").canonicalize().unwrap();
    let import = ["kernel", "import", "--name", "old", package.to_str().unwrap()];
    let id = bulkhead.output(&import).expect(0);
    let id = id.trim_end();
    assert!(id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");

    // A kept run, for which the kernel is the newest that there is. Nobody asked for the disk with all modules.
    let script = ["sh", "-c", "uname -r; ls /dev/vd*"];
    let said = bulkhead.output(&[&["run", "--name", "kept", "busybox"][..], &script].concat()).expect(0);
    let [release, "/dev/vda"] = words(&said)[..] else { panic!("{said}") };
    assert!(release.starts_with("6.12."), "{release}");
    let listed = bulkhead.output(&["kernel", "ls"]).expect(0);
    assert_eq!(words(&listed)[5..8], ["old", &id[..12], release], "{listed}");
    let refused = bulkhead.output(&["run", "--modules", "busybox", "true"]).refused(125);
    assert!(refused.contains("import it again with --full-modules"), "{refused}");

    // The run needs its kernel.
    let refused = bulkhead.output(&["kernel", "rm", "old"]).refused(125);
    assert!(refused.contains("kernel old: run ") && refused.contains("needs it"), "{refused}");
    let runs = bulkhead.home().join("runs");
    fs::remove_dir_all(runs).unwrap();

    // What was changed behind our back is noticed.
    let vmlinux = bulkhead.home().join("kernels").join(id).join("vmlinux");
    fs::OpenOptions::new().write(true).open(&vmlinux).unwrap().set_len(1 << 20).unwrap();
    let refused = bulkhead.output(&["run", "--kernel", "old", "busybox", "true"]).refused(125);
    assert!(refused.contains("vmlinux is damaged: it has 1048576 bytes"), "{refused}");

    assert_eq!(bulkhead.output(&["kernel", "rm", "old"]).expect(0).trim_end(), id);
    assert_eq!(fs::read_dir(bulkhead.home().join("kernels/names")).unwrap().count(), 0);
    assert!(!vmlinux.exists());
}

/// Its file system driver is a module, and its modules are compressed.
fn a_vmlinuz_with_its_modules_becomes_one_too() {
    let bulkhead = without_kernels();
    let boot = host::unpacked().join("boot");
    let find = |entry: fs::DirEntry| entry.file_name().to_str()?.starts_with("vmlinuz-").then(|| entry.path());
    let vmlinuz: PathBuf = fs::read_dir(&boot).unwrap().find_map(|entry| find(entry.unwrap())).unwrap();
    let modules = host::unpacked().join("lib/modules");
    let import = ["kernel", "import", vmlinuz.to_str().unwrap(), "--modules", modules.to_str().unwrap()];
    bulkhead.output(&import).expect(0);
    let release = vmlinuz.file_name().unwrap().to_str().unwrap().strip_prefix("vmlinuz-").unwrap();
    let said =
        bulkhead.output(&["run", "--kernel", release, "busybox", "sh", "-c", "uname -r; df -T / | tail -1"]).expect(0);
    assert_eq!(words(&said)[..3], [release, "/dev/vda", "ext4"], "{said}");
}

fn modules_come_from_a_disk_of_their_own() {
    let bulkhead = Bulkhead::new();
    // Also those that the kernel asks for by itself, here when something is mounted.
    let script = "mkdir -p /mnt; mount -t overlay none /mnt -o lowerdir=/bin:/etc 2>/dev/null && ls -d /mnt/sh
                  uname -r; ls -d /lib/modules/[1-9]*; modprobe dummy && grep -c '^dummy ' /proc/modules
                  touch /lib/modules/x 2>/dev/null || echo read-only; mount -o remount,rw /lib/modules 2>/dev/null || echo still
                  dd if=/dev/zero of=/dev/vdb count=1 2>/dev/null || echo neither; env | grep -c MODULES";
    let said = bulkhead.output(&["run", "--modules", "busybox", "sh", "-c", script]);
    let (release, _) = host::kernels().pop().unwrap();
    // No variable of the agent's is the workload's.
    let said = (said.code, said.stdout);
    assert_eq!(said, (1, format!("/mnt/sh\n{release}\n/lib/modules/{release}\n1\nread-only\nstill\nneither\n0\n")));
}
