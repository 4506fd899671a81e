//! What the facts mean, and what to do about them. Pure.

use std::path::Path;

use super::Check;
use crate::units::show_size;

/// The oldest kernel on which everything that we call is there.
const OLDEST: (u32, u32) = (5, 11);
/// Less free memory than this is too little for a run as large as runs are.
const MEMORY: u64 = 1 << 30;
/// Less free space than this is soon used up.
const SPACE: u64 = 1 << 30;

pub(super) fn kernel_version(release: &str) -> Check {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let oldest = format!("{}.{}", OLDEST.0, OLDEST.1);
    if version < OLDEST {
        Check::failed("host-kernel", format!("{release} is older than {oldest}"), "boot a newer kernel")
    } else {
        Check::ok("host-kernel", format!("{release} ({oldest} or newer is needed)"))
    }
}

pub(super) fn kvm(opened: Result<(), String>, cpuinfo: &str) -> Check {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let has = |flag: &str| flags.split_ascii_whitespace().any(|word| word == flag);
    let kind = match (has("vmx"), has("svm")) {
        (true, _) => "Intel VMX",
        (_, true) => "AMD SVM",
        _ => "a kind that the CPU does not show",
    };
    let nested = if has("hypervisor") { "; nested: this host is a virtual machine itself" } else { "" };
    match opened {
        Ok(()) => Check::ok("kvm", format!("/dev/kvm can be opened for reading and writing; {kind}{nested}")),
        // The message has the next step in it already.
        Err(error) => match error.split_once("; ") {
            Some((found, mend)) => Check::failed("kvm", found, mend),
            None => Check::failed("kvm", error, "see dmesg"),
        },
    }
}

pub(super) fn user_namespaces(root: bool, most: &str, debian: &str, apparmor: &str) -> Check {
    let name = "user-namespaces";
    let set = |text: &str, value: &str| text.trim() == value;
    if root {
        return Check::ok(name, "not needed by root");
    }
    let missing = |what: &str, mend: &str| {
        Check::warning(name, format!("{what}: the jail of a run has one wall less"), format!("sudo sysctl -w {mend}"))
    };
    match () {
        () if most.is_empty() => missing("the kernel has none", "user.max_user_namespaces=65536"),
        () if set(most, "0") => missing("none are allowed", "user.max_user_namespaces=65536"),
        () if set(debian, "0") => missing("only root may make them", "kernel.unprivileged_userns_clone=1"),
        () if set(apparmor, "1") => {
            missing("AppArmor takes their rights away", "kernel.apparmor_restrict_unprivileged_userns=0")
        }
        () => Check::ok(name, "users may make them"),
    }
}

/// Where cgroup v2 is mounted.
pub(super) fn cgroup_mount(mounts: &str) -> Option<&str> {
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
    line.split(' ').nth(1)
}

/// Our own cgroup: its directory, its controllers, and whether we may make others below it.
pub(super) fn cgroup(own: Option<(&Path, &str, bool)>) -> Check {
    let name = "cgroup";
    let Some((directory, controllers, writable)) = own else {
        return Check::warning(
            name,
            "cgroup v2 is not mounted: limits on memory and processes hold by construction alone",
            "boot with systemd.unified_cgroup_hierarchy=1",
        );
    };
    let has = |wanted: &&str| controllers.split_ascii_whitespace().any(|have| have == *wanted);
    let missing: Vec<&str> = ["cpu", "memory", "pids"].into_iter().filter(|wanted| !has(wanted)).collect();
    let directory = directory.display();
    if !writable {
        let mend = "start it in a scope of your own: systemd-run --user --scope -p Delegate=yes bulkhead ...";
        return Check::warning(name, format!("v2, but {directory} is not delegated to this user"), mend);
    }
    if missing.is_empty() {
        Check::ok(name, format!("v2, delegated: {directory} with cpu, memory and pids"))
    } else {
        let missing = missing.join(" and ");
        let mend =
            format!("have {missing} delegated: systemctl edit user@.service, [Service] Delegate=cpu memory pids");
        Check::warning(name, format!("v2, delegated, but without {missing} in {directory}"), mend)
    }
}

pub(super) fn landlock(abi: Option<i64>) -> Check {
    match abi {
        Some(abi) => Check::ok("landlock", format!("ABI {abi}")),
        None => Check::warning(
            "landlock",
            "the kernel has none, or has it switched off: the jail of a run has one wall less",
            "add landlock to the kernel's lsm= parameter",
        ),
    }
}

pub(super) fn userfaultfd(allowed: bool, sysctl: &str) -> Check {
    if allowed || sysctl.trim() == "1" {
        Check::ok("userfaultfd", "this user may use it")
    } else {
        let mend = "sudo setfacl -m u:$USER:rw /dev/userfaultfd, or sudo sysctl -w vm.unprivileged_userfaultfd=1";
        Check::warning("userfaultfd", "not for this user; nothing that runs today needs it", mend)
    }
}

pub(super) fn memory(meminfo: &str) -> Check {
    let free = meminfo.lines().find_map(|line| {
        let kib = line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim();
        kib.parse::<u64>().ok()?.checked_mul(1024)
    });
    match free {
        Some(free) if free < MEMORY => {
            let found =
                format!("{} free, and a run has {} unless it says otherwise", show_size(free), show_size(MEMORY));
            Check::warning("memory", found, "stop something, or give runs a smaller -m")
        }
        Some(free) => Check::ok("memory", format!("{} free", show_size(free))),
        None => Check::warning("memory", "the kernel does not say how much is free", "mount /proc"),
    }
}

pub(super) fn disk(path: &Path, free: Result<u64, String>) -> Check {
    let shown = path.display();
    match free {
        Ok(free) if free < SPACE => {
            let found = format!("{} free in {shown}: a guest that fills its disk waits for more", show_size(free));
            Check::warning("disk", found, "make room, or set BULKHEAD_HOME to a directory on a larger disk")
        }
        Ok(free) => Check::ok("disk", format!("{} free in {shown}", show_size(free))),
        Err(error) => Check::failed("disk", format!("{shown}: {error}"), "set BULKHEAD_HOME to another directory"),
    }
}

/// `mend` is how to get one.
pub(super) fn kernel(found: Result<String, String>, mend: &str) -> Check {
    match found {
        Ok(name) => Check::ok("guest-kernel", name),
        Err(error) => Check::failed("guest-kernel", error, mend),
    }
}

pub(super) fn images(names: &[String], path: &Path) -> Check {
    match names {
        [] => {
            let found = format!("none in {}", path.join("images").display());
            Check::failed("image", found, "import one: bulkhead image import")
        }
        names => Check::ok("image", names.iter().take(8).cloned().collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Failed, Ok as Good, Warning};
    use super::*;

    #[test]
    fn kernels_are_old_or_new_enough() {
        for (release, verdict) in [("5.10.0-9-amd64", Failed), ("5.11", Good), ("6.12.43+deb13", Good), ("x", Failed)] {
            assert_eq!(kernel_version(release).verdict, verdict, "{release}");
        }
    }

    #[test]
    fn kvm_is_told_by_its_kind() {
        let good = kvm(Ok(()), "flags : fpu svm hypervisor\n");
        assert!(good.found.contains("AMD SVM; nested"), "{good:?}");
        assert!(kvm(Ok(()), "flags : vmx\n").found.ends_with("Intel VMX"));
        let bad = kvm(Err("/dev/kvm: not there; load the module".into()), "");
        assert_eq!((bad.verdict, bad.found.as_str()), (Failed, "/dev/kvm: not there"));
        assert_eq!(bad.mend.unwrap(), "load the module");
    }

    #[test]
    fn namespaces_may_be_forbidden_in_four_ways() {
        let check = |root, most, debian, apparmor| user_namespaces(root, most, debian, apparmor).verdict;
        assert_eq!(check(true, "0", "0", "1"), Good);
        assert_eq!(check(false, "65536\n", "", ""), Good);
        assert_eq!(check(false, "65536\n", "1\n", "0\n"), Good);
        for (most, debian, apparmor) in [("", "", ""), ("0\n", "", ""), ("9\n", "0\n", ""), ("9\n", "1\n", "1\n")] {
            let check = user_namespaces(false, most, debian, apparmor);
            assert_eq!(check.verdict, Warning);
            assert!(check.mend.unwrap().starts_with("sudo sysctl -w "));
        }
    }

    #[test]
    fn a_cgroup_is_delegated_with_what_it_takes() {
        let mounts = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n";
        assert_eq!(cgroup_mount(mounts), Some("/sys/fs/cgroup"));
        assert_eq!(cgroup_mount("cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\n"), None);
        let at = Path::new("/sys/fs/cgroup/x");
        assert_eq!(cgroup(Some((at, "cpu io memory pids\n", true))).verdict, Good);
        assert!(cgroup(Some((at, "memory pids", true))).found.contains("without cpu"));
        assert!(cgroup(Some((at, "cpu memory pids", false))).mend.unwrap().contains("systemd-run --user --scope"));
        assert_eq!(cgroup(None).verdict, Warning);
    }

    #[test]
    fn what_is_scarce_or_missing_is_said() {
        assert_eq!(memory("MemAvailable:  900000 kB\n").verdict, Warning);
        assert_eq!(memory("MemAvailable: 9000000 kB\n").verdict, Good);
        assert_eq!(memory("").verdict, Warning);
        let at = Path::new("/x");
        assert_eq!(disk(at, Ok(1 << 40)).verdict, Good);
        assert_eq!(disk(at, Ok(1 << 20)).verdict, Warning);
        assert_eq!(disk(at, Err("no".into())).verdict, Failed);
        assert_eq!(landlock(None).verdict, Warning);
        assert_eq!(landlock(Some(6)).found, "ABI 6");
        assert_eq!(userfaultfd(false, "1\n").verdict, Good);
        assert_eq!(userfaultfd(false, "0\n").verdict, Warning);
        assert_eq!(images(&[], at).verdict, Failed);
        assert_eq!(images(&["busybox".into()], at).found, "busybox");
        assert_eq!(kernel(Err("none".into()), "x").verdict, Failed);
    }
}
