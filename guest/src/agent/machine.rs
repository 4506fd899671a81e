//! From the kernel's first user process to a machine that serves: mounts, modules, listener; and its end.

use super::{
    network,
    server::Server,
    workload::{Root, Workload, standard_descriptors},
};
use crate::{
    message::{AGENT_PORT, Epoch, MAX_ENTROPY, MAX_HOSTNAME},
    sys,
};
use rustix::{
    fs::{Mode, OFlags, open},
    mount::{MountFlags, mount},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
    system::{RebootCommand, finit_module, reboot, sethostname},
    time::{ClockId, Timespec, clock_settime},
};
use std::{
    env,
    ffi::CStr,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
};

/// The root disk: the first virtio block device.
const DISK: &str = "/dev/vda";

/// The variable that names the device with all of the kernel's modules, if the machine has one. The kernel makes
/// variables of its first process of the words of its command line that it does not know.
const MODULES: &str = "BULKHEAD_MODULES";

/// Where the machine's cgroups are mounted, out of the workload's sight.
const CGROUPS: &str = "/cgroup";

/// Where the workload reads the number of its epoch.
const EPOCH: &str = "/dev/bulkhead/epoch";

/// Modules to load, one file name a line, in this order; beside the files.
const ORDER: &str = "/modules/order";

/// The driver of the vsock device. What comes after it is for the network.
const TRANSPORT: &str = "vmw_vsock_virtio_transport";

const MODULE_COMPRESSED: i32 = 4;

/// Runs the machine as its PID 1, from the kernel's first instruction in user space to its power-off. `builder`: its
/// disk is an image that is being made.
pub fn boot(builder: bool) -> ! {
    sys::mark(1);
    if let Err(error) = run(builder) {
        note(&format!("bulkhead-guest: {error}"));
    }
    rustix::fs::sync();
    let _ = reboot(RebootCommand::PowerOff);
    // Returning would be a kernel panic, which the machine's other side takes for what it is.
    sys::exit_now(1)
}

/// Why the machine cannot be run.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {error}")]
struct BootError {
    what: String,
    #[source]
    error: io::Error,
}

fn failed<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> BootError {
    move |error| BootError { what: what.into(), error: error.into() }
}

fn run(builder: bool) -> Result<(), BootError> {
    for (kind, at) in [("devtmpfs", "/dev"), ("cgroup2", CGROUPS)] {
        // The directory may be in the initramfs already; if it cannot be made, the mount says so.
        let _ = fs::create_dir(at);
        mount(kind, at, kind, MountFlags::NOSUID, None::<&CStr>).map_err(failed(format!("mount {at}")))?;
    }
    standard_descriptors().map_err(failed("/dev/null"))?;
    sys::ignore(libc::SIGPIPE);
    let mut drivers = Drivers::read();
    let listener = drivers.load_first()?;
    // Programs that listen on 127.0.0.1 expect it; a machine without it is no reason not to run.
    if let Err(error) = sys::loopback_up() {
        note(&format!("bulkhead-guest: loopback: {error}"));
    }
    let device = PathBuf::from(DISK);
    let modules = env::var_os(MODULES).map(PathBuf::from);
    let root = if builder { Root::Builder(device) } else { Root::Disk { device, modules } };
    let workload = Workload::start(&root, Some(Path::new(CGROUPS)))
        .map_err(|e| BootError { what: "workload".into(), error: io::Error::other(e) })?;
    // While the workload's first process mounts the disk. A machine that does not come to its network runs without.
    drivers.load_rest();
    if let Err(error) = network::bring_up() {
        note(&format!("bulkhead-guest: network: {error}"));
    }
    // A console of another VMM, for comparing boot times; ours has none.
    if let Ok(mut console) = OpenOptions::new().write(true).custom_flags(libc::O_NOCTTY).open("/dev/hvc0") {
        let _ = console.write_all(b"bulkhead-guest ready\n");
    }
    Server::new(listener, workload, true).run().map_err(failed("serve"))
}

/// The modules that are still to be loaded. Their files are removed as they are, since their memory is the machine's.
struct Drivers(std::vec::IntoIter<String>);

impl Drivers {
    fn read() -> Self {
        let order = fs::read_to_string(ORDER).unwrap_or_default();
        let _ = fs::remove_file(ORDER);
        let names = order.lines().map(str::trim).filter(|line| !line.is_empty());
        Self(names.map(str::to_owned).collect::<Vec<_>>().into_iter())
    }

    /// Loads what a disk and the host's connections take, up to the transport of vsock. The listener is made as soon as
    /// there are vsock sockets: the host connects when the vsock device's driver is up, and would otherwise be refused.
    fn load_first(&mut self) -> Result<OwnedFd, BootError> {
        let mut listener = None;
        for name in self.0.by_ref() {
            load_and_remove(&name);
            if is_module(&name, "vsock") {
                listener = sys::vsock_listener(AGENT_PORT).ok();
            }
            if is_module(&name, TRANSPORT) {
                break;
            }
        }
        listener.map_or_else(|| sys::vsock_listener(AGENT_PORT), Ok).map_err(failed(format!("vsock port {AGENT_PORT}")))
    }

    fn load_rest(&mut self) {
        self.0.by_ref().for_each(|name| load_and_remove(&name));
    }
}

fn load_and_remove(name: &str) {
    let path = Path::new("/modules").join(name);
    match load(&path) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => note(&format!("bulkhead-guest: module {name}: {error}")),
    }
    let _ = fs::remove_file(&path);
}

fn load(path: &Path) -> rustix::io::Result<()> {
    let file = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let plain = path.extension().is_some_and(|extension| extension == "ko");
    finit_module(&file, c"", if plain { 0 } else { MODULE_COMPRESSED })
}

/// Whether this is the file of a module, packed or not.
fn is_module(file: &str, name: &str) -> bool {
    file.strip_prefix(name).is_some_and(|rest| rest == ".ko" || rest.starts_with(".ko."))
}

/// Writes a line to the kernel's log: the one place where a machine without a console can be read afterwards.
fn note(text: &str) {
    if let Ok(mut log) = OpenOptions::new().write(true).open("/dev/kmsg") {
        let _ = log.write_all(format!("<3>{text}\n").as_bytes());
    }
}

/// Takes on what each epoch brings. The pool, the clock and the devices are only touched if the machine is ours.
pub(super) fn begin(ours: bool, epoch: &Epoch) -> Result<(), String> {
    let Epoch { number, wall_clock, entropy, hostname, .. } = epoch;
    let entropy = from_hex(entropy).ok_or("entropy: not hexadecimal, or too long")?;
    if hostname.len() > MAX_HOSTNAME || hostname.is_empty() {
        return Err(format!("host name {hostname:?}: must have 1 to {MAX_HOSTNAME} bytes"));
    }
    sethostname(hostname.as_bytes()).map_err(|error| format!("host name: {error}"))?;
    if !ours {
        return Ok(());
    }
    let random = File::open("/dev/urandom").and_then(|file| sys::add_entropy(&file, &entropy));
    random.map_err(|error| format!("entropy: {error}"))?;
    const SECOND: u64 = 1_000_000_000;
    let seconds = i64::try_from(*wall_clock / SECOND).map_err(|_| "wall clock: out of range")?;
    let nanoseconds = i64::try_from(*wall_clock % SECOND).map_err(|_| "wall clock: out of range")?;
    clock_settime(ClockId::Realtime, Timespec { tv_sec: seconds, tv_nsec: nanoseconds })
        .map_err(|error| format!("wall clock: {error}"))?;
    tell_epoch(*number).map_err(|error| format!("{EPOCH}: {error}"))
}

/// Tells the workload, which has the same `/dev`: who keeps random numbers or tokens in memory can see that it is
/// time for others.
fn tell_epoch(number: u64) -> io::Result<()> {
    let path = Path::new(EPOCH);
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let new = path.with_extension("new");
    fs::write(&new, format!("{number}\n"))?;
    fs::rename(new, path)
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || text.len() > 2 * MAX_ENTROPY {
        return None;
    }
    let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|d| u8::try_from(d).ok());
    text.as_bytes().chunks_exact(2).map(|pair| Some(digit(pair.first()?)? << 4 | digit(pair.last()?)?)).collect()
}

/// Serves on a Unix socket with a directory as the workload's root: the same agent without a machine, for tests and
/// for trying things out. Needs root. The clock and the disks are left alone; a power-off ends the process.
///
/// # Errors
/// The socket or the namespaces could not be made.
pub fn serve_directory(socket: &Path, root: &Path, cgroups: Option<&Path>) -> io::Result<()> {
    sys::ignore(libc::SIGPIPE);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&listener, &SocketAddrUnix::new(socket)?)?;
    listen(&listener, 128)?;
    let workload = Workload::start(&Root::Directory(root.to_owned()), cgroups).map_err(io::Error::other)?;
    Ok(Server::new(listener, workload, false).run()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal() {
        assert_eq!(from_hex("00ff1A"), Some(vec![0, 255, 26]));
        assert_eq!(from_hex(""), Some(vec![]));
        assert_eq!(from_hex("0"), None);
        assert_eq!(from_hex("0g"), None);
        assert_eq!(from_hex(&"00".repeat(MAX_ENTROPY + 1)), None);
    }

    #[test]
    fn the_vsock_core_is_known_from_its_neighbours() {
        assert!(is_module("vsock.ko", "vsock") && is_module("vsock.ko.xz", "vsock"));
        assert!(!is_module("vmw_vsock_virtio_transport.ko", "vsock"));
        assert!(!is_module("vmw_vsock_virtio_transport_common.ko", TRANSPORT));
    }
}
