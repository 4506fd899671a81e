//! What the facts mean, and what to do about them. Pure.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use jailer::cgroup::Unavailable;
use jailer::{NAMESPACES, Part, Seen};

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
        Err(error) => {
            let (found, mend) = with_mend(error, "see dmesg");
            Check::failed("kvm", found, mend)
        }
    }
}

/// What the jail cannot do without, unless the user says so.
fn missing_part(name: &'static str, part: Part, what: &str, mend: &str) -> Check {
    Check::failed(name, format!("{what}: no run starts without --allow-unenforced {part}"), mend)
}

/// Root needs them as well, but is subject to fewer of the switches.
pub(super) fn user_namespaces(root: bool, most: &str, debian: &str, apparmor: &str) -> Check {
    let name = "user-namespaces";
    let set = |text: &str, value: &str| text.trim() == value;
    let missing =
        |what: &str, mend: &str| missing_part(name, Part::Namespaces, what, &format!("sudo sysctl -w {mend}"));
    match () {
        () if most.is_empty() => missing("the kernel has none", "user.max_user_namespaces=65536"),
        () if set(most, "0") => missing("none are allowed", "user.max_user_namespaces=65536"),
        () if root => Check::ok(name, "root may make them"),
        () if set(debian, "0") => missing("only root may make them", "kernel.unprivileged_userns_clone=1"),
        () if set(apparmor, "1") => {
            missing("AppArmor takes their rights away", "kernel.apparmor_restrict_unprivileged_userns=0")
        }
        () => Check::ok(name, "users may make them"),
    }
}

/// Root's runs are always in a cgroup; an ordinary user's where it can be had, or where something that was asked for depends on
/// it. `place` is where it would be made, with the controllers there; `manager` is whether a service manager makes a place.
pub(super) fn cgroup(root: bool, place: Result<(PathBuf, String), Unavailable>, manager: bool) -> Check {
    let name = "cgroup";
    let lacks = |found: &str, mend: &str| {
        if root {
            missing_part(name, Part::Cgroup, found, mend)
        } else {
            let found = format!("{found}: limits on memory and processes hold by construction alone");
            Check::warning(name, found, mend)
        }
    };
    let (directory, controllers) = match place {
        Err(Unavailable::NotDelegated { .. }) if manager => {
            return Check::ok(name, "v2, in a scope that systemd-run --user makes where something depends on it");
        }
        Err(error) => {
            let (found, mend) = with_mend(error.to_string(), "see dmesg");
            return lacks(found.trim_start_matches("cgroup: "), &mend);
        }
        Ok(place) => place,
    };
    let has = |wanted: &&str| controllers.split_ascii_whitespace().any(|have| have == *wanted);
    let missing: Vec<&str> = ["cpu", "memory", "pids"].into_iter().filter(|wanted| !has(wanted)).collect();
    let directory = directory.display();
    if missing.is_empty() {
        Check::ok(name, format!("v2, ours to divide: {directory} with cpu, memory and pids"))
    } else {
        let missing = missing.join(" and ");
        let mend =
            format!("have {missing} delegated: systemctl edit user@.service, [Service] Delegate=cpu memory pids");
        lacks(&format!("v2, but without {missing} in {directory}"), &mend)
    }
}

/// An error that has the next step after a semicolon, in two.
fn with_mend(error: String, otherwise: &str) -> (String, String) {
    match error.split_once("; ") {
        Some((found, mend)) => (found.to_owned(), mend.to_owned()),
        None => (error, otherwise.to_owned()),
    }
}

pub(super) fn landlock(abi: Option<usize>) -> Check {
    let name = "landlock";
    match abi {
        Some(abi @ 6..) => Check::ok(name, format!("ABI {abi}")),
        Some(abi) => {
            Check::ok(name, format!("ABI {abi}; from 6 on (Linux 6.12) it bounds signals and abstract sockets too"))
        }
        None => missing_part(
            name,
            Part::Landlock,
            "the kernel has none, or has it off",
            "add landlock to the kernel's lsm= parameter",
        ),
    }
}

/// `actions` is what the kernel's filters can do.
pub(super) fn seccomp(actions: &str) -> Check {
    if actions.split_ascii_whitespace().any(|action| action == "kill_process") {
        Check::ok("seccomp", "filters that end the process")
    } else {
        let found = "the kernel's filters cannot end a process: no run starts";
        Check::failed("seccomp", found, "boot a kernel with CONFIG_SECCOMP_FILTER")
    }
}

/// What a VMM had in its jail, or why it came to nothing.
pub(super) fn jail(tried: Result<Seen, String>) -> Check {
    let name = "jail";
    match tried {
        Ok(seen) => {
            let all = NAMESPACES.iter().all(|namespace| seen.namespaces.contains(namespace));
            let filtered = seen.threads.iter().all(|thread| thread.seccomp_filters > 0);
            if all && filtered && seen.capabilities == 0 && seen.no_new_privs {
                let Seen { uid, .. } = seen;
                let found = "no capabilities, no_new_privs, seccomp";
                Check::ok(
                    name,
                    format!("a VMM was started in it: user {uid}, {} namespaces, {found}", NAMESPACES.len()),
                )
            } else {
                Check::failed(name, format!("a VMM in it is not confined: {seen:?}"), "report this as a fault of ours")
            }
        }
        Err(error) => {
            let (found, mend) = with_mend(error, "see what is above, or install bulkhead as a whole (make install)");
            Check::failed(name, found, mend)
        }
    }
}

/// What came of a guest that was allowed nothing.
pub(super) fn network(tried: Result<(), String>) -> Check {
    let name = "network";
    match tried {
        Ok(()) => Check::ok(name, "a guest that was allowed nothing resolves nothing and reaches nothing"),
        Err(error) => {
            let (found, mend) = with_mend(error, "see what is above, or report this as a fault of ours");
            Check::failed(name, found, mend)
        }
    }
}

/// What came of a run that was allowed nothing; nothing if there was none, since none would start.
pub(super) fn canary(tried: Option<Result<(), String>>) -> Check {
    let name = "canary";
    match tried {
        Some(Ok(())) => {
            let found =
                "a run without network options has an interface; its guest resolves nothing and reaches nothing";
            Check::ok(name, found)
        }
        Some(Err(error)) => {
            let (found, mend) = with_mend(error, "see what is above, or report this as a fault of ours");
            Check::failed(name, found, mend)
        }
        None => Check::warning(name, "not tried: no run would start", "mend what has FAILED, and try again"),
    }
}

/// The proxy that the owner has set in this file, and whether it takes connections.
pub(super) fn proxy(
    file: &Path,
    set: Result<Option<SocketAddr>, String>,
    reach: impl FnOnce(SocketAddr) -> Result<(), String>,
) -> Check {
    let (name, file) = ("proxy", file.display());
    match set.map(|set| set.map(|address| (address, reach(address)))) {
        Ok(None) => Check::ok(name, "none is set: what runs may reach, this host connects to"),
        Ok(Some((address, Ok(())))) => {
            Check::ok(name, format!("all connections of runs go through {address}, which takes them (set in {file})"))
        }
        Ok(Some((address, Err(error)))) => {
            let found =
                format!("all connections of runs go through {address} (set in {file}), and are refused: {error}");
            Check::warning(name, found, "start the proxy, or set another")
        }
        Err(error) => {
            let (found, mend) = with_mend(error, "mend the file");
            Check::failed(name, format!("{found}: no run starts"), mend)
        }
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
    use jailer::Thread;

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
        assert_eq!(check(true, "0", "1", "0"), Failed);
        assert_eq!(check(true, "9", "0", "1"), Good);
        assert_eq!(check(false, "65536\n", "", ""), Good);
        assert_eq!(check(false, "65536\n", "1\n", "0\n"), Good);
        for (most, debian, apparmor) in [("", "", ""), ("0\n", "", ""), ("9\n", "0\n", ""), ("9\n", "1\n", "1\n")] {
            let check = user_namespaces(false, most, debian, apparmor);
            assert_eq!(check.verdict, Failed);
            assert!(check.found.ends_with("no run starts without --allow-unenforced namespaces"), "{check:?}");
            assert!(check.mend.unwrap().starts_with("sudo sysctl -w "));
        }
    }

    #[test]
    fn a_cgroup_is_delegated_with_what_it_takes() {
        let judged = |root, controllers: &str| cgroup(root, Ok(("/sys/fs/cgroup/x".into(), controllers.into())), false);
        assert_eq!(judged(false, "cpu io memory pids\n").verdict, Good);
        assert!(judged(false, "memory pids").found.contains("without cpu"));
        let theirs = || Err(Unavailable::NotDelegated { path: "/x".into() });
        let check = cgroup(false, theirs(), false);
        assert_eq!(check.verdict, Warning);
        assert!(check.found.starts_with("/x is not delegated to this user: "), "{check:?}");
        assert!(check.mend.unwrap().contains("systemd-run --user --scope"));
        assert_eq!(cgroup(false, theirs(), true).verdict, Good);
        let old = || Err(Unavailable::Version("v1 and v2 side by side (hybrid)"));
        assert_eq!(cgroup(false, old(), true).verdict, Warning);
        // Root's runs need one.
        let check = cgroup(true, old(), false);
        assert!(check.found.contains("hybrid") && check.found.contains("--allow-unenforced cgroup"), "{check:?}");
        assert!(check.verdict == Failed && check.mend.unwrap().contains("systemd.unified_cgroup_hierarchy=1"));
        assert!(judged(true, "cpu").found.contains("--allow-unenforced cgroup"));
    }

    #[test]
    fn a_jail_is_told_from_what_is_none() {
        let thread = |seccomp_filters| Thread { name: "x".into(), seccomp_filters };
        let jailed = Seen {
            uid: 1000,
            no_new_privs: true,
            capabilities: 0,
            namespaces: NAMESPACES.to_vec(),
            descriptors: Some(4),
            mounts: Some(vec!["none / tmpfs".into()]),
            threads: vec![thread(2)],
            cgroup: None,
            limits: vec![],
        };
        assert_eq!(jail(Ok(jailed.clone())).verdict, Good);
        for wrong in [
            Seen { no_new_privs: false, ..jailed.clone() },
            Seen { capabilities: 1, ..jailed.clone() },
            Seen { namespaces: vec!["mnt"], ..jailed.clone() },
            Seen { threads: vec![thread(2), thread(0)], ..jailed.clone() },
        ] {
            assert_eq!(jail(Ok(wrong)).verdict, Failed);
        }
        let refused = jail(Err("jail: clone3: not permitted; sysctl -w x=1".into()));
        assert_eq!(
            (refused.found.as_str(), refused.mend.as_deref()),
            ("jail: clone3: not permitted", Some("sysctl -w x=1"))
        );
    }

    #[test]
    fn a_proxy_that_is_set_is_told_with_how_it_is() {
        let (file, address) = (Path::new("/s/network.toml"), "10.0.0.7:3128".parse().unwrap());
        let unasked = |_| panic!("there is none");
        assert_eq!(proxy(file, Ok(None), unasked).verdict, Good);
        let good = proxy(file, Ok(Some(address)), |_| Ok(()));
        assert!(good.verdict == Good && good.found.contains("through 10.0.0.7:3128"), "{good:?}");
        let away = proxy(file, Ok(Some(address)), |_| Err("connection refused".into()));
        assert!(away.verdict == Warning && away.found.ends_with("and are refused: connection refused"), "{away:?}");
        let wrong = proxy(file, Err("/s/network.toml: line 2: no; docs/egress.md shows it".into()), unasked);
        assert_eq!((wrong.verdict, wrong.found.as_str()), (Failed, "/s/network.toml: line 2: no: no run starts"));
        assert_eq!(wrong.mend.as_deref(), Some("docs/egress.md shows it"));
    }

    #[test]
    fn a_guest_that_reaches_something_is_a_failure() {
        assert_eq!(canary(Some(Ok(()))).verdict, Good);
        assert_eq!(canary(Some(Err("it connected".into()))).verdict, Failed);
        assert_eq!(canary(None).verdict, Warning);
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
        assert_eq!(landlock(None).verdict, Failed);
        assert!(landlock(Some(1)).found.contains("from 6 on"));
        assert_eq!(seccomp("kill_thread trap errno allow\n").verdict, Failed);
        assert_eq!(seccomp("kill_process kill_thread trap errno allow\n").verdict, Good);
        assert_eq!(landlock(Some(6)).found, "ABI 6");
        assert_eq!(userfaultfd(false, "1\n").verdict, Good);
        assert_eq!(userfaultfd(false, "0\n").verdict, Warning);
        assert_eq!(images(&[], at).verdict, Failed);
        assert_eq!(images(&["busybox".into()], at).found, "busybox");
        assert_eq!(kernel(Err("none".into()), "x").verdict, Failed);
    }
}
