//! The jails of a run's VMM and network filter: who they become, what they may have, and what of that this host cannot give.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use jailer::cgroup::{self, Cgroup, Controller, MemoryLimit, Place};
use jailer::users::{self, Lease, Users, UsersError};
use jailer::{Jail, JailError, Jailed, Limits, Part, Request, Seen, Starting, Target};
use rustix::fs::OFlags;
use rustix::process::{getegid, geteuid};

use super::machine::open_plainly;
use crate::spec::{self, Machine};

/// Descriptors of a VMM: a socket for each of 1,024 connections; files, eventfds and epoll sets are far fewer than the rest.
const DESCRIPTORS: u64 = 2048;
/// Memory of the VMM itself, beside the guest's: buffers of the sockets, 256 KiB for each connection that a client can
/// have us make; stacks; the index of the disk.
const VMM_MEMORY: u64 = 128 << 20;
/// What the kernel keeps for each byte of guest memory: page tables, ours and those of the guest's addresses.
const PAGE_TABLES: u64 = 256;
/// Page cache of the disk. Without it every write waits for the disk: half the speed.
const BLOCK_CACHE: u64 = 64 << 20;
/// Threads beside vCPUs and disk queues: the event loop, KVM's own that recovers huge pages (Linux 6.13), and the process that
/// writes the memory of a machine that goes on.
const OTHER_THREADS: u64 = 3;

/// Descriptors of a network filter: a socket for each of 256 flows, for questions to name servers, and some.
const FILTER_DESCRIPTORS: u64 = 1024;
/// Memory of a network filter: two buffers of 256 KiB for each of 256 flows, and what they hold on their way.
const FILTER_MEMORY: u64 = 192 << 20;
/// What the kernel holds of its connections' bytes.
const FILTER_SOCKETS: u64 = 64 << 20;
/// Longest file that a network filter writes: what a snapshot keeps of it, or its log.
const FILTER_FILE: u64 = 4 << 20;

const FILTER_LIMITS: Limits =
    Limits { descriptors: FILTER_DESCRIPTORS, threads: 1, memory: FILTER_MEMORY, file_size: FILTER_FILE };

/// Why a process could not be confined.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfineError {
    /// The users of root's runs.
    #[error(transparent)]
    Users(#[from] UsersError),
    /// A cgroup that something asked for depends on.
    #[error("{error} (needed for {why}; --allow-unenforced cgroup starts without)")]
    Cgroup {
        /// What is wrong.
        error: String,
        /// What depends on it.
        why: &'static str,
    },
    /// The program file.
    #[error("{path}: {error}", path = path.display())]
    Program {
        /// Where.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A part that is not known.
    #[error("--allow-unenforced {0:?}: no such part")]
    Part(String),
    /// The jail itself.
    #[error(transparent)]
    Jail(#[from] JailError),
}

/// Where cgroups for a run's processes are made, or why there is no such place. Found once for all of them: to find it may move
/// this process.
#[derive(Debug)]
pub(crate) struct Ground(Result<Place, String>);

impl Ground {
    /// Finds it, with the controllers that a machine's limits need.
    pub(crate) fn find(jail: &spec::Jail) -> Self {
        let wanted = [
            Some(Controller::Memory),
            Some(Controller::Pids),
            jail.cpu.map(|_| Controller::Cpu),
            jail.io_max.as_ref().map(|_| Controller::Io),
        ];
        let controllers: Vec<Controller> = wanted.into_iter().flatten().collect();
        Self(Place::find(geteuid().is_root(), &controllers).map_err(|error| error.to_string()))
    }
}

/// What is confined, and what it may have.
#[derive(Debug)]
struct Subject<'a> {
    target: Target,
    program: &'a Path,
    limits: Limits,
    cgroup: Result<cgroup::Limits, String>,
    /// Ends the name of its cgroup.
    suffix: &'static str,
    /// What depends on the cgroup.
    needs_cgroup: Option<&'static str>,
}

/// A process in its jail, and what it holds on the host.
#[derive(Debug)]
pub(super) struct Confined {
    // In this order: the cgroup is empty and the user free when the process is gone.
    pub(super) jailed: Jailed,
    cgroup: Option<Cgroup>,
    _user: Option<Lease>,
    /// Parts of the jail that are missing, and why.
    unenforced: Vec<(Part, String)>,
}

impl Confined {
    /// For the record.
    pub(super) fn record(&self) -> io::Result<spec::Jailed> {
        let pid = self.jailed.pid();
        Ok(spec::Jailed {
            pid,
            started: jailer::started(pid)?,
            cgroup: self.cgroup.as_ref().map(|cgroup| cgroup.path().to_owned()),
            unenforced: self.unenforced.iter().map(|(part, why)| (part.to_string(), why.clone())).collect(),
        })
    }

    /// Parts of the jail that are missing, each with the reason.
    pub(super) fn unenforced(&self) -> &[(Part, String)] {
        &self.unenforced
    }

    /// The memory limit of a VMM of such a machine, where a cgroup has it.
    pub(super) fn memory_limit(&self, machine: &Machine) -> io::Result<Option<MemoryLimit>> {
        self.cgroup.as_ref().map(|cgroup| cgroup.memory_limit(memory_limit(machine))).transpose()
    }

    /// Whether the kernel killed it because it reached its memory limit.
    pub(super) fn ran_out_of_memory(&self) -> bool {
        self.cgroup.as_ref().is_some_and(|cgroup| cgroup.killed_for_memory() > 0)
    }
}

/// A jail that is being built.
#[derive(Debug)]
pub(super) struct Confining {
    plan: Plan,
    starting: Starting,
}

/// Everything that a start needs. A second try, without a part that the user can do without, needs it again.
#[derive(Debug)]
struct Plan {
    jailer: PathBuf,
    request: Request,
    program: OwnedFd,
    control: OwnedFd,
    errors: File,
    cgroup: Option<Cgroup>,
    user: Option<Lease>,
    allowed: Vec<Part>,
    unenforced: Vec<(Part, String)>,
}

/// Starts a machine's VMM in its jail, with `control` as its one descriptor and `threads` for vCPUs and disks. Call it on the
/// main thread: the VMM is killed when the thread that started it ends.
pub(super) fn start_vmm(
    ground: &Ground,
    machine: &Machine,
    threads: u64,
    directory: &Path,
    control: BorrowedFd<'_>,
    errors: File,
) -> Result<Confining, ConfineError> {
    let threads = threads.saturating_add(OTHER_THREADS);
    let (memory, jail) = (memory_limit(machine), &machine.jail);
    let io = jail.io_max.as_ref().map(|limits| cgroup::device_of(directory).map(|device| format!("{device} {limits}")));
    let subject = Subject {
        target: Target::Vmm,
        program: &machine.vmm,
        limits: limits(machine, threads),
        cgroup: match io.transpose() {
            Ok(io) => Ok(cgroup::Limits { memory, pids: threads, cpu: jail.cpu, io }),
            Err(error) => Err(error.to_string()),
        },
        suffix: "",
        needs_cgroup: needs_cgroup(machine),
    };
    start(ground, &subject, jail, directory, control, errors)
}

/// What a VMM's cgroup may hold.
fn memory_limit(machine: &Machine) -> u64 {
    [with_page_tables(machine.memory), VMM_MEMORY, BLOCK_CACHE].into_iter().fold(0, u64::saturating_add)
}

/// So much guest memory, with what the kernel keeps for it.
pub(super) fn with_page_tables(memory: u64) -> u64 {
    memory.saturating_add(memory / PAGE_TABLES)
}

/// Starts a network filter in its jail, likewise.
pub(super) fn start_filter(
    ground: &Ground,
    program: &Path,
    jail: &spec::Jail,
    directory: &Path,
    control: BorrowedFd<'_>,
    errors: File,
) -> Result<Confining, ConfineError> {
    let subject = Subject {
        target: Target::Netfilter,
        program,
        limits: FILTER_LIMITS,
        cgroup: Ok(filter_cgroup(jail)),
        suffix: "-net",
        needs_cgroup: jail.require_cgroup.then_some(REQUIRED),
    };
    start(ground, &subject, jail, directory, control, errors)
}

fn start(
    ground: &Ground,
    subject: &Subject<'_>,
    jail: &spec::Jail,
    directory: &Path,
    control: BorrowedFd<'_>,
    errors: File,
) -> Result<Confining, ConfineError> {
    let user = if geteuid().is_root() { Some(lease(jail.users.parse()?)?) } else { None };
    let (uid, gid) = identity(user.as_ref());
    let allowed = jail.allow_unenforced.iter();
    let allowed: Result<Vec<Part>, _> =
        allowed.map(|name| Part::from_name(name).ok_or_else(|| ConfineError::Part(name.clone()))).collect();
    let request =
        Request { target: subject.target, uid, gid, limits: subject.limits, cgroup: false, without: Vec::new() };
    let mut plan = Plan {
        jailer: jail.jailer.clone(),
        request,
        program: open_program(subject.program)?,
        control: control.try_clone_to_owned().map_err(JailError::Report)?,
        errors,
        cgroup: None,
        user,
        allowed: allowed?,
        unenforced: Vec::new(),
    };
    match make_cgroup(ground, subject, directory) {
        Ok(cgroup) => plan.cgroup = Some(cgroup),
        Err(error) => match subject.needs_cgroup.filter(|_| !plan.allowed.contains(&Part::Cgroup)) {
            Some(why) => return Err(ConfineError::Cgroup { error, why }),
            None => plan.unenforced.push((Part::Cgroup, error)),
        },
    }
    plan.request.cgroup = plan.cgroup.is_some();
    Ok(Confining { starting: plan.start()?, plan })
}

impl Plan {
    fn start(&self) -> Result<Starting, ConfineError> {
        let errors = self.errors.try_clone().map_err(JailError::Report)?;
        let jail = Jail {
            jailer: &self.jailer,
            request: &self.request,
            program: self.program.as_fd(),
            control: self.control.as_fd(),
            errors,
            cgroup: self.cgroup.as_ref().map(Cgroup::descriptor),
        };
        Ok(jail.start()?)
    }
}

impl Confining {
    /// Waits until the process runs, or until it is known why it does not.
    ///
    /// Where this host cannot give a part that the user can do without, it starts again without it.
    pub(super) fn finish(self) -> Result<Confined, ConfineError> {
        let Self { mut plan, mut starting } = self;
        let jailed = loop {
            let error = match starting.finish() {
                Ok(jailed) => break jailed,
                Err(error) => error,
            };
            let left_out = |part: &Part| plan.unenforced.iter().any(|(other, _)| other == part);
            match error.part().filter(|part| plan.allowed.contains(part) && !left_out(part)) {
                Some(part) => {
                    plan.unenforced.push((part, error.to_string()));
                    plan.request.without.push(part);
                    plan.cgroup.take_if(|_| part == Part::Cgroup);
                    plan.request.cgroup = plan.cgroup.is_some();
                    starting = plan.start()?;
                }
                None => return Err(error.into()),
            }
        };
        Ok(Confined { jailed, cgroup: plan.cgroup, _user: plan.user, unenforced: plan.unenforced })
    }
}

/// Starts a VMM in the jail to see what the kernel says of it, and ends it: it is given no machine.
pub(crate) fn try_out(jailer: &Path, vmm: &Path) -> Result<Seen, ConfineError> {
    // It waits for a machine on its end until ours is closed.
    let (_ours, theirs) = UnixStream::pair().map_err(JailError::Report)?;
    let limits = Limits { descriptors: DESCRIPTORS, threads: 4, memory: VMM_MEMORY, file_size: 0 };
    let (_user, jailed) = start_bare(jailer, Target::Vmm, vmm, limits, theirs.as_fd())?;
    Seen::of(jailed.pid()).map_err(|error| JailError::Report(error).into())
}

/// Starts a network filter in the jail, to be tried out.
pub(super) fn start_bare_filter(
    jailer: &Path,
    filter: &Path,
    control: BorrowedFd<'_>,
) -> Result<(Option<Lease>, Jailed), ConfineError> {
    start_bare(jailer, Target::Netfilter, filter, FILTER_LIMITS, control)
}

/// Starts a process in the jail without a cgroup, since one for a run may be made elsewhere. Keep the order of what comes back: the
/// user is free again after the process, which is dropped first.
fn start_bare(
    jailer: &Path,
    target: Target,
    program: &Path,
    limits: Limits,
    control: BorrowedFd<'_>,
) -> Result<(Option<Lease>, Jailed), ConfineError> {
    let user = if geteuid().is_root() { Some(lease(users::DEFAULT)?) } else { None };
    let (uid, gid) = identity(user.as_ref());
    let request = Request { target, uid, gid, limits, cgroup: false, without: Vec::new() };
    let program = open_program(program)?;
    let errors = File::options().write(true).open("/dev/null").map_err(JailError::Report)?;
    let jail = Jail { jailer, request: &request, program: program.as_fd(), control, errors, cgroup: None };
    let jailed = jail.start()?.finish()?;
    Ok((user, jailed))
}

/// The user and group of a process.
fn identity(user: Option<&Lease>) -> (u32, u32) {
    match user {
        Some(user) => (user.id(), user.id()),
        None => (geteuid().as_raw(), getegid().as_raw()),
    }
}

fn lease(users: Users) -> Result<Lease, UsersError> {
    Lease::take(users::LEASES.as_ref(), users, std::process::id())
}

/// What a network filter may take of the host. A guest can keep it as busy as its VMM, so it gets no more of the CPUs.
fn filter_cgroup(jail: &spec::Jail) -> cgroup::Limits {
    let memory = FILTER_MEMORY.saturating_add(FILTER_SOCKETS);
    cgroup::Limits { memory, pids: 1, cpu: jail.cpu, io: None }
}

/// What a machine's VMM can need at most.
fn limits(machine: &Machine, threads: u64) -> Limits {
    Limits {
        descriptors: DESCRIPTORS,
        threads,
        memory: machine.memory.saturating_add(VMM_MEMORY),
        // The data of a layer is as long as the disk, and an image of its memory as the memory; nothing that it writes is longer.
        file_size: machine.disk.max(machine.memory),
    }
}

const REQUIRED: &str = "--require-cgroup, which root's runs have";

/// What depends on a VMM's cgroup.
fn needs_cgroup(machine: &Machine) -> Option<&'static str> {
    let jail = &machine.jail;
    [
        (jail.io_max.is_some(), "--io-max"),
        (jail.cpu.is_some(), "--cpus with a part of a CPU"),
        (jail.require_cgroup, REQUIRED),
    ]
    .into_iter()
    .find_map(|(needed, why)| needed.then_some(why))
}

fn make_cgroup(ground: &Ground, subject: &Subject<'_>, directory: &Path) -> Result<Cgroup, String> {
    let (place, limits) = (ground.0.as_ref().map_err(Clone::clone)?, subject.cgroup.as_ref().map_err(Clone::clone)?);
    // The run's id, or what stands in its place.
    let name = directory.file_name().and_then(OsStr::to_str).unwrap_or("other");
    let name = format!("{}{name}{}", cgroup::PREFIX, subject.suffix);
    Cgroup::create(place, &name, limits).map_err(|error| error.to_string())
}

fn open_program(path: &Path) -> Result<OwnedFd, ConfineError> {
    open_plainly(path, OFlags::RDONLY).map_err(|error| ConfineError::Program { path: path.to_owned(), error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_has_no_more_of_the_cpus_than_its_vmm() {
        let mut jail = crate::spec::test::spec().machine.jail;
        assert_eq!(filter_cgroup(&jail).cpu, None);
        jail.cpu = Some(500);
        assert_eq!(filter_cgroup(&jail).cpu, Some(500));
    }
}
