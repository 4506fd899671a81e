//! What there is to know of this host.

use std::fs::File;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jailer::Seen;
use jailer::cgroup::Place;
use rustix::fs::statvfs;
use rustix::process::{Resource, getrlimit};

use super::super::scope;
use super::{Check, Verdict, canary as guest_canary, judge};
use crate::home::{Home, HomeError, ProgramFiles};
use crate::image::Images;
use crate::kernel::{self, host::HostKernel};
use crate::preflight::{check_kernel, check_limits, open_kvm};
use crate::supervisor::canary;
use crate::supervisor::jail::try_out;
use crate::upstream;

/// How long a proxy may take to take a connection.
const PROXY_PATIENCE: Duration = Duration::from_secs(3);

/// Every check, in the order in which to mend things.
pub(super) fn checks() -> Vec<Check> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let root = rustix::process::geteuid().is_root();
    let mut checks = vec![
        judge::kernel_version(&rustix::system::uname().release().to_string_lossy()),
        judge::kvm(open_kvm().map(drop).map_err(|error| error.to_string()), &read("/proc/cpuinfo")),
    ];
    let limits = [Resource::Fsize, Resource::Nofile].map(getrlimit);
    let [largest_file, descriptors] = limits;
    let limits = check_limits(1 << 30, 1 << 30, largest_file.current, descriptors.maximum);
    checks.push(match limits {
        Ok(()) => Check::ok("limits", "files and descriptors suffice"),
        Err(error) => Check::failed("limits", error.to_string(), "ulimit -f unlimited; ulimit -Hn 65536 (as root)"),
    });
    checks.push(judge::user_namespaces(
        root,
        &read("/proc/sys/user/max_user_namespaces"),
        &read("/proc/sys/kernel/unprivileged_userns_clone"),
        &read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
    ));
    checks.push(judge::cgroup(root, Place::first(root), scope::has_manager()));
    checks.push(judge::landlock(jailer::landlock_version().ok()));
    checks.push(judge::seccomp(&read("/proc/sys/kernel/seccomp/actions_avail")));
    let device = File::options().read(true).write(true).open("/dev/userfaultfd").is_ok();
    checks.push(judge::userfaultfd(root || device, &read("/proc/sys/vm/unprivileged_userfaultfd")));
    checks.push(judge::memory(&read("/proc/meminfo")));
    match ProgramFiles::find() {
        Ok(files) => {
            let found =
                [&files.vmm, &files.netfilter, &files.jailer, &files.agent].map(|file| file.display().to_string());
            checks.push(Check::ok("programs", found.join(", ")));
            checks.push(judge::jail(try_jail(&files)));
            checks.push(judge::network(try_network(&files)));
        }
        Err(error) => {
            checks.push(Check::failed("programs", error.to_string(), "install bulkhead as a whole (make install)"));
        }
    }
    match Home::find() {
        Ok(home) => {
            checks.extend(state(&home));
            let well = checks.iter().all(|check| check.verdict != Verdict::Failed);
            checks.push(judge::canary(well.then(|| try_guest(&home))));
        }
        Err(error) => {
            checks.push(Check::failed("state", error.to_string(), "set BULKHEAD_HOME to a directory of yours"));
        }
    }
    checks
}

/// The state directory, and what a run needs from it.
fn state(home: &Home) -> Vec<Check> {
    let path = home.path();
    let space =
        statvfs(path).map(|found| found.f_bavail.saturating_mul(found.f_frsize)).map_err(|error| error.to_string());
    let kernel = match kernel::Store::of(home).kernel(None) {
        Ok(kernel) => check_kernel(&kernel).map(|()| kernel.name).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    // The one that this host runs is at hand.
    let import = HostKernel::find().import_command();
    let import = import.unwrap_or_else(|why| format!("{why}; give another to bulkhead kernel import"));
    let images = match images(home) {
        Ok(names) => judge::images(&names, path),
        Err(error) => Check::failed("image", error.to_string(), "make it readable for this user, or move it away"),
    };
    let proxy = upstream::proxy(path).map_err(|error| error.to_string());
    let proxy = judge::proxy(&upstream::path(path), proxy, reach);
    vec![judge::disk(path, space), judge::kernel(kernel, &import), images, proxy]
}

/// Whether a proxy takes a connection. It is asked for nothing.
fn reach(proxy: SocketAddr) -> Result<(), String> {
    TcpStream::connect_timeout(&proxy, PROXY_PATIENCE).map(drop).map_err(|error| error.to_string())
}

/// Starts a run of the smallest image, and has its guest look for a way out.
fn try_guest(home: &Home) -> Result<(), String> {
    let names = images(home).map_err(|error| error.to_string())?;
    let store = Images::of(home);
    let found = names.iter().filter_map(|name| store.find(name).ok());
    let image = found.min_by_key(|image| image.size).ok_or("there is no image that can be used")?;
    guest_canary::look(home, &image.name)
}

/// The images that there are, by name, or by id where they have none.
fn images(home: &Home) -> Result<Vec<String>, HomeError> {
    let images = Images::of(home);
    let named = images.names()?;
    let nameless = images.ids()?.into_iter().filter(|id| !named.iter().any(|(_, named)| named == id));
    let by_name = named.iter().map(|(name, _)| name.clone());
    Ok(by_name.chain(nameless).chain(images.by_hand_names()?).collect())
}

fn resolved(path: &Path) -> Result<PathBuf, String> {
    path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))
}

/// Has a guest that was allowed nothing look for a way out.
fn try_network(files: &ProgramFiles) -> Result<(), String> {
    canary::try_out(&resolved(&files.jailer)?, &resolved(&files.netfilter)?)
}

/// Starts a VMM in the jail, and looks at it.
fn try_jail(files: &ProgramFiles) -> Result<Seen, String> {
    try_out(&resolved(&files.jailer)?, &resolved(&files.vmm)?).map_err(|error| error.to_string())
}
