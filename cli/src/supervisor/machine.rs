//! The VMM of a run: its files, its process, its control socket.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use guest::host::Dial;
use jailer::cgroup::MemoryLimit;
use jailer::{Jailed, Part};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use vmm_control::{Config, ControlError, ControlSocket, Disk, Event, MAX_CMDLINE, Request, Restore};

use super::console;
use super::ending::OUT_OF_MEMORY_IS;
use super::jail::{self, Confined, Ground};
use super::layers::Layers;
use super::network::Link;
use crate::home::HomeError;
use crate::preflight::{PreflightError, open_kvm};
use crate::spec::Machine;
use crate::store::{VMM_JAIL, write_jail};

/// How long a VMM that does not read its control socket may hold us up.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a machine did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MachineError {
    /// The host has no usable KVM.
    #[error(transparent)]
    Preflight(#[from] PreflightError),
    /// A file of the machine.
    #[error("{path}: {error}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A layer of the disk.
    #[error("disk layer {path}: {error}", path = path.display())]
    Layer {
        /// Its data file.
        path: PathBuf,
        /// Why.
        error: String,
    },
    /// The run's directory.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// Too long a command line for the kernel.
    #[error("kernel command line: {length} bytes, over {MAX_CMDLINE}; shorten --cmdline-extra")]
    Cmdline {
        /// Its length.
        length: usize,
    },
    /// The jail.
    #[error(transparent)]
    Jail(#[from] jail::ConfineError),
    /// The control socket.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// Anything else of the system's.
    #[error("{0}: {1}")]
    System(&'static str, io::Error),
}

/// A machine that was saved.
#[derive(Debug, Clone)]
pub(crate) struct SavedMachine {
    /// Its state.
    pub(crate) state: PathBuf,
    /// Its memory, the oldest image first.
    pub(crate) memory: Vec<PathBuf>,
}

/// A VMM whose page map can be asked for. Nobody else gets its process's number before it is reaped, when there is nothing left
/// to save.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pagemap(i32);

impl Pagemap {
    pub(super) fn open(self) -> io::Result<File> {
        File::open(format!("/proc/{}/pagemap", self.0))
    }

    /// Bytes of memory of its own that the process has: what lies in no file.
    pub(super) fn own_memory(self) -> io::Result<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/statm", self.0))?;
        let pages: Vec<u64> = text.split_whitespace().map_while(|word| word.parse().ok()).collect();
        match pages.as_slice() {
            [_, resident, shared, ..] => Ok(resident.saturating_sub(*shared).saturating_mul(4096)),
            _ => Err(io::Error::other("statm: not as the kernel writes it")),
        }
    }

    /// How readily the kernel kills it when memory runs out. What is open is this process's, whatever its number becomes.
    pub(super) fn oom_score(self) -> io::Result<File> {
        File::options().read(true).write(true).open(format!("/proc/{}/oom_score_adj", self.0))
    }
}

/// A running VMM. Dropping it kills and reaps it.
#[derive(Debug)]
pub(crate) struct Vmm {
    process: Confined,
    control: Arc<ControlSocket>,
    gone: Arc<AtomicBool>,
}

impl Vmm {
    /// Starts a machine's VMM, whose own files are in `directory`: it boots, or goes on from what was saved. Call it on the
    /// main thread: the VMM is killed when the thread that started it ends. Without a link it has no network interface.
    pub(crate) fn start(
        ground: &Ground,
        directory: &Path,
        machine: &Machine,
        layers: &Layers,
        saved: Option<&SavedMachine>,
        link: Option<&Link>,
    ) -> Result<Self, MachineError> {
        let config = Config { net: link.map(|_| Link::interface()), ..config(machine, layers)? };
        let (ours, theirs) = ControlSocket::pair()?;
        rustix::net::sockopt::set_socket_timeout(&ours, rustix::net::sockopt::Timeout::Send, Some(SEND_TIMEOUT))
            .map_err(|error| MachineError::System("control socket", error.into()))?;
        let errors = create(&directory.join("vmm.log"))?;
        let starting = jail::start_vmm(ground, machine, threads(&config), directory, theirs.as_fd(), errors)?;

        // While the jail is built.
        let mut files: Vec<OwnedFd> = vec![open_kvm()?.into()];
        let first = match saved {
            Some(saved) => [&saved.state].into_iter().chain(&saved.memory).collect::<Vec<_>>(),
            None => [&machine.kernel_file].into_iter().chain(&machine.initrds).collect(),
        };
        for path in first.into_iter().chain([&machine.image_file]) {
            files.push(open(path)?);
        }
        files.extend(layers.open()?);
        if let Some(modules) = &machine.modules {
            files.push(open(modules)?);
        }
        if machine.console {
            files.push(console::record(directory).map_err(|error| MachineError::System("console.log", error))?);
        }
        let mut files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        files.extend(link.map(Link::frames));
        let request = match saved {
            Some(saved) => {
                let memory_files = u8::try_from(saved.memory.len()).unwrap_or(u8::MAX);
                Request::Restore(Restore { config, memory_files })
            }
            None => Request::Start(config),
        };
        let sent = ours.send(&request, &files);
        // If it did not come so far as to receive, the jail knows why.
        let process = starting.finish()?;
        drop(theirs);
        let record = process.record().map_err(|error| MachineError::System("the VMM", error))?;
        write_jail(directory, VMM_JAIL, &record)?;
        // That it is gone already, and how it ended, is for those to say who watch it.
        match sent {
            Err(ControlError::Closed) => {}
            sent => sent?,
        }
        Ok(Self { process, control: Arc::new(ours), gone: Arc::default() })
    }

    /// Parts of the jail that are missing, each with the reason.
    pub(super) fn unenforced(&self) -> &[(Part, String)] {
        self.process.unenforced()
    }

    /// Calls `then` for each event, and once with the error that ended them, on a thread of its own.
    pub(crate) fn watch(
        &self,
        mut then: impl FnMut(Result<Event, ControlError>) + Send + 'static,
    ) -> Result<(), MachineError> {
        let control = Arc::clone(&self.control);
        let gone = Arc::clone(&self.gone);
        let receive = move || control.receive::<Event>().map(|(event, _)| event);
        let watch = move || loop {
            // A VMM that ends before it has read all that we sent is reported as a reset, ahead of its last
            // words: these are still there.
            let event = match receive() {
                Err(ControlError::Closed) => receive(),
                other => other,
            };
            // Before anyone is told, so that nobody dials a machine that is known to be gone.
            let last = matches!(event, Err(_) | Ok(Event::Stopped { .. } | Event::Refused { .. }));
            gone.fetch_or(last, Ordering::Release);
            let end = event.is_err();
            then(event);
            if end {
                return;
            }
        };
        std::thread::Builder::new()
            .name("vmm".into())
            .spawn(watch)
            .map_err(|error| MachineError::System("thread", error))?;
        Ok(())
    }

    /// Where the kernel tells which pages of its memory there are.
    pub(super) fn page_map(&self) -> Pagemap {
        Pagemap(self.process.jailed.pid())
    }

    /// The memory limit of its cgroup, if it has one.
    pub(super) fn memory_limit(&self, machine: &Machine) -> io::Result<Option<MemoryLimit>> {
        self.process.memory_limit(machine)
    }

    /// What connects to the guest.
    pub(crate) fn dialler(&self) -> Arc<dyn Dial> {
        Arc::new(Dialler { control: Arc::clone(&self.control), gone: Arc::clone(&self.gone) })
    }

    /// Where requests go.
    pub(crate) fn control(&self) -> Arc<ControlSocket> {
        Arc::clone(&self.control)
    }

    /// Asks the VMM to end. Whether it does is seen in its events.
    pub(crate) fn ask_to_stop(&self) -> Result<(), ControlError> {
        self.control.send(&Request::Stop, &[])
    }

    /// Waits for the VMM's process, kills it when `patience` is over, and says how it ended.
    pub(crate) fn reap(&mut self, patience: Duration) -> String {
        let how = reap(&mut self.process.jailed, patience);
        if self.ran_out_of_memory() { OUT_OF_MEMORY_IS.to_owned() } else { how }
    }

    /// Whether its process has ended.
    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(self.process.jailed.try_wait(), Ok(None))
    }

    /// Whether the kernel killed it because it reached its memory limit.
    pub(super) fn ran_out_of_memory(&self) -> bool {
        self.process.ran_out_of_memory()
    }
}

/// Waits for a process, kills it when `patience` is over, and says how it ended.
pub(super) fn reap(process: &mut Jailed, patience: Duration) -> String {
    let deadline = Instant::now().checked_add(patience);
    let words =
        |ended: io::Result<_>| ended.map_or_else(|error| error.to_string(), |ended: jailer::Ended| ended.to_string());
    loop {
        match process.try_wait() {
            Ok(Some(ended)) => return ended.to_string(),
            Ok(None) if deadline.is_some_and(|deadline| Instant::now() < deadline) => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(None) => {
                // It may end by itself just now: then this fails, and the wait below tells.
                let _ = process.kill();
                return words(process.wait());
            }
            Err(error) => return error.to_string(),
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Release);
        self.reap(Duration::ZERO);
    }
}

/// Makes connections to the guest: one end of a socket pair goes to the VMM.
struct Dialler {
    control: Arc<ControlSocket>,
    gone: Arc<AtomicBool>,
}

impl Dial for Dialler {
    fn dial(&self, port: u32) -> io::Result<UnixStream> {
        if self.gone.load(Ordering::Acquire) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let (ours, theirs) = UnixStream::pair()?;
        match self.control.send(&Request::Connect { port }, &[theirs.as_fd()]) {
            Ok(()) => Ok(ours),
            Err(ControlError::Closed) => Err(io::ErrorKind::ConnectionAborted.into()),
            Err(error) => Err(io::Error::other(error)),
        }
    }
}

/// The machine, as the VMM is told.
fn config(machine: &Machine, layers: &Layers) -> Result<Config, MachineError> {
    let cmdline = cmdline(machine.console, machine.modules.is_some(), &machine.cmdline_extra);
    if cmdline.len() > MAX_CMDLINE {
        return Err(MachineError::Cmdline { length: cmdline.len() });
    }
    let root = Disk {
        serial: "root".to_owned(),
        read_only: false,
        raw_base: true,
        layers: u8::try_from(layers.number().saturating_add(1)).unwrap_or(u8::MAX),
        // A queue for each vCPU, up to where more do not help.
        queues: machine.cpus.min(4),
    };
    let modules = Disk { serial: "modules".to_owned(), read_only: true, raw_base: true, layers: 1, queues: 1 };
    let modules = machine.modules.as_ref().map(|_| modules);
    Ok(Config {
        vcpus: machine.cpus,
        memory: machine.memory,
        cmdline,
        initrds: u8::try_from(machine.initrds.len()).unwrap_or(u8::MAX),
        disks: [root].into_iter().chain(modules).collect(),
        console: machine.console,
        net: None,
    })
}

/// The threads of a VMM that the configuration asks for: its vCPUs, and one for each queue of a disk.
fn threads(config: &Config) -> u64 {
    let queues = config.disks.iter().map(|disk| u64::from(disk.queues));
    queues.fold(config.vcpus.into(), u64::saturating_add)
}

/// The kernel's command line. Nothing of the user's environment is in it: that goes to the agent.
fn cmdline(console: bool, modules: bool, extra: &str) -> String {
    let mut words = vec![
        // Without a UART the driver would probe four addresses.
        if console { "console=ttyS0 8250.nr_uarts=1" } else { "8250.nr_uarts=0" },
        // With a console, what precedes a panic; without one, nothing is formatted.
        if console { "loglevel=6" } else { "quiet loglevel=0" },
        // A reset is a triple fault: the one exit that needs no device. A panic resets at once.
        "reboot=t panic=-1",
        // A kernel that has found itself at fault is not trusted to go on, or the run would hang with nothing said.
        "oops=panic",
        // There is no PCI: not to look for it saves hundreds of exits.
        "pci=off",
        // Self-tests of the crypto code cost a noticeable part of the boot.
        "cryptomgr.notests",
        // The agent credits entropy of the host's before anything of the user's runs.
        "random.trust_cpu=on",
        // The TSC is the one clock here: no watchdog against a clock that is not there.
        "tsc=reliable",
    ];
    if modules {
        // No parameter of the kernel's, so it becomes a variable of its first process, which is the agent.
        words.push("BULKHEAD_MODULES=/dev/vdb");
    }
    words.extend(Some(extra).filter(|extra| !extra.is_empty()));
    words.join(" ")
}

fn open(path: &Path) -> Result<OwnedFd, MachineError> {
    open_plainly(path, OFlags::RDONLY).map_err(|error| MachineError::File { path: path.to_owned(), error })
}

pub(super) fn create(path: &Path) -> Result<File, MachineError> {
    open_plainly(path, OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC)
        .map(File::from)
        .map_err(|error| MachineError::File { path: path.to_owned(), error })
}

/// Opens what a path names, and nothing that a symbolic link leads to: the path was resolved when the run was made, and whoever
/// puts a link there now has it followed with our rights.
pub(super) fn open_plainly(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let mode = if flags.contains(OFlags::CREATE) { Mode::RUSR | Mode::WUSR } else { Mode::empty() };
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    openat2(CWD, path, flags | OFlags::CLOEXEC, mode, resolve).map_err(|error| match error {
        Errno::LOOP => io::Error::other("a symbolic link on the way to it is not followed"),
        error => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_a_path_is_refused_by_name() {
        let place = tempfile::tempdir().unwrap();
        let real = place.path().canonicalize().unwrap().join("real");
        std::fs::create_dir(&real).unwrap();
        let link = real.with_file_name("link");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        create(&real.join("file")).unwrap();
        open(&real.join("file")).unwrap();
        for error in [create(&link.join("new")).unwrap_err(), open(&link.join("file")).unwrap_err()] {
            let error = error.to_string();
            assert!(
                error.contains("/link/") && error.ends_with("a symbolic link on the way to it is not followed"),
                "{error}"
            );
        }
        assert!(!real.join("new").exists());
    }

    #[test]
    fn the_command_line_names_a_console_only_if_there_is_one() {
        assert!(cmdline(true, false, "").contains("console=ttyS0"));
        let without = cmdline(false, false, "debug initcall_debug");
        assert!(!without.contains("console=") && without.ends_with(" debug initcall_debug"));
        assert!(!cmdline(false, false, "").ends_with(' '));
        assert!(cmdline(false, true, "").ends_with(" BULKHEAD_MODULES=/dev/vdb"));
    }
}
