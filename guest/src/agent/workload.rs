//! The place that all workloads share: namespaces made once, the disk as their root, a process of ours as PID 1 that
//! reaps what they orphan, and a cgroup that leaves the agent room to breathe.
//!
//! The agent itself stays outside, in the initramfs. It takes on the cgroup and uts namespaces, and unshares the pid
//! namespace for its children: each fork of it is then a process of the workload's and yet its own child, so it can
//! wait for it. Only the mount namespace has to be entered.

use super::{cgroup::Cgroup, modprobe, network};
use crate::sys;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags, inotify, open, openat},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags,
        fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount, mount_bind_recursive,
        mount_change, mount_move, mount_remount, move_mount, unmount,
    },
    thread::{ThreadNameSpaceType, UnshareFlags},
};
use std::{
    ffi::{CStr, CString},
    fs,
    io::{self, Seek},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How long a disk may take to appear after its driver was loaded. It is there at once unless the kernel probes it
/// in the background.
const DISK_WAIT: Duration = Duration::from_secs(10);

/// What becomes the workload's root.
#[derive(Debug, Clone)]
pub(super) enum Root {
    /// A block device with ext4. It is ours alone: it is unmounted at the end.
    Disk {
        /// The device.
        device: PathBuf,
        /// A device with the kernel's modules, which appear read-only in `/lib/modules`.
        modules: Option<PathBuf>,
    },
    /// A block device with an empty ext4 that becomes an image. Nothing but the builder's own work runs there, and
    /// nothing is put into it.
    Builder(PathBuf),
    /// A directory, for running the agent without a machine. At the end nothing is done to it.
    Directory(PathBuf),
}

/// Why there is no place to run in.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {error}")]
pub(super) struct WorkloadError {
    what: String,
    #[source]
    error: io::Error,
}

fn failed<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> WorkloadError {
    move |error| WorkloadError { what: what.into(), error: error.into() }
}

/// The agent's hold on the workload.
#[derive(Debug)]
pub(super) struct Workload {
    pidfd: OwnedFd,
    /// The workload's instance of devpts, from which terminals are made.
    terminals: OwnedFd,
    pub(super) cgroup: Option<Cgroup>,
    pub(super) state: State,
    root: Root,
}

#[derive(Debug)]
pub(super) enum State {
    /// PID 1 mounts; this pipe says how it ended: nothing for well, or why not.
    Preparing(OwnedFd),
    Ready,
    Failed(String),
}

impl Workload {
    /// Begins to make it. Mounting goes on in PID 1 while the agent serves.
    pub(super) fn start(root: &Root, cgroups: Option<&Path>) -> Result<Workload, WorkloadError> {
        let cgroup = cgroups.map(Cgroup::make).transpose().map_err(failed("workload cgroup"))?;
        let mut birthplace = None;
        if let Some(cgroup) = &cgroup {
            cgroup.enter_namespace().map_err(failed("workload cgroup"))?;
            birthplace = Some(cgroup.open("init").map_err(failed("workload cgroup"))?);
        }
        sys::unshare(UnshareFlags::NEWPID | UnshareFlags::NEWUTS).map_err(failed("unshare"))?;
        let terminals = terminals().map_err(failed("devpts"))?;
        let (report, status) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(failed("pipe"))?;
        let forked = sys::fork_numbered(birthplace.as_ref().map(AsFd::as_fd)).map_err(failed("fork"))?;
        let Some((pidfd, number)) = forked else { init(root, cgroup.is_some(), &terminals, &status) };
        if matches!(root, Root::Disk { modules: Some(_), .. }) {
            modprobe::answer(number).map_err(failed("modprobe"))?;
        }
        drop(status);
        rustix::io::ioctl_fionbio(&report, true).map_err(failed("pipe"))?;
        Ok(Workload { pidfd, terminals, cgroup, state: State::Preparing(report), root: root.clone() })
    }

    pub(super) fn namespaces(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub(super) fn is_builder(&self) -> bool {
        matches!(self.root, Root::Builder(_))
    }

    /// Reads PID 1's report, when there is one.
    pub(super) fn progress(&mut self) {
        let State::Preparing(report) = &self.state else { return };
        let mut text = [0; 1024];
        self.state = match rustix::io::read(report, &mut text) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            Ok(0) => State::Ready,
            Ok(count) => State::Failed(String::from_utf8_lossy(text.get(..count).unwrap_or_default()).into_owned()),
            Err(error) => State::Failed(error.to_string()),
        };
    }

    /// A new terminal: the agent's end, and the path of the other in the workload's file system.
    pub(super) fn open_terminal(&self) -> rustix::io::Result<(OwnedFd, CString)> {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let master = openat(&self.terminals, "ptmx", flags, Mode::empty())?;
        rustix::pty::unlockpt(&master)?;
        let path = rustix::pty::ptsname(&master, Vec::new())?;
        Ok((master, path))
    }

    /// Unmounts what can be and leaves the disk clean. The workload's processes are dead.
    pub(super) fn unmount(&self) {
        rustix::fs::sync();
        if matches!(self.root, Root::Directory(_)) {
            return;
        }
        let child = match sys::fork(None) {
            Ok(Some(child)) => child,
            Ok(None) => {
                if rustix::thread::move_into_thread_name_spaces(self.namespaces(), ThreadNameSpaceType::MOUNT).is_ok() {
                    leave_clean();
                }
                sys::exit_now(0);
            }
            Err(_) => return,
        };
        // Bounded: a disk that hangs must not keep the machine from powering off.
        let _ = wait_for(&child, Duration::from_secs(10));
    }
}

/// Read-only means that the file system's superblock is written as clean; it needs every writer gone, among them
/// mounts on top that hold files of it open.
fn leave_clean() {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let points: Vec<&str> = mounts.lines().filter_map(|line| line.split(' ').nth(1)).filter(|p| *p != "/").collect();
    for point in points.iter().rev() {
        let _ = unmount(*point, UnmountFlags::DETACH);
    }
    let _ = mount_remount("/", MountFlags::RDONLY, "");
}

pub(super) fn wait_for(fd: &OwnedFd, time: Duration) -> bool {
    let limit =
        Timespec { tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(time.subsec_nanos()) };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&limit)).is_ok_and(|ready| ready > 0)
}

/// A devpts of the workload's own, not mounted anywhere yet.
fn terminals() -> rustix::io::Result<OwnedFd> {
    let context = fsopen("devpts", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "mode", "0620")?;
    fsconfig_set_string(&context, "gid", "5")?;
    fsconfig_set_string(&context, "ptmxmode", "0666")?;
    // Without effect since every mount is one, but harmless; older kernels need it.
    let _ = fsconfig_set_flag(&context, "newinstance");
    fsconfig_create(&context)?;
    fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )
}

/// PID 1 of the workload: makes its file system, reports, and then only exists. Orphans are reaped by the kernel,
/// since it ignores SIGCHLD.
fn init(root: &Root, cgroups: bool, terminals: &OwnedFd, status: &OwnedFd) -> ! {
    let _ = rustix::thread::set_name(c"bulkhead-init");
    // In a machine the agent's end is a kernel panic; without one the workload must not outlive it either.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    sys::ignore(libc::SIGCHLD);
    sys::close_all_but(&[terminals.as_raw_fd(), status.as_raw_fd()]);
    if let Err(error) = furnish(root, cgroups, terminals) {
        let _ = rustix::io::write(status, error.to_string().as_bytes());
    }
    // Not worth killing for its memory, and all of the workload dies with it.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    sys::close_all_but(&[]);
    loop {
        let _ = poll(&mut [], None);
    }
}

fn furnish(root: &Root, cgroups: bool, terminals: &OwnedFd) -> Result<(), WorkloadError> {
    sys::unshare(UnshareFlags::NEWNS).map_err(failed("unshare"))?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).map_err(failed("mount /"))?;
    let at = mount_root(root)?;
    // Before the root is the image's, in which the device has no name yet.
    let modules = match root {
        Root::Disk { modules: Some(device), .. } => Some(modules_disk(device)?),
        _ => None,
    };
    std::env::set_current_dir(&at).map_err(failed("new root"))?;
    mount_move(".", "/").map_err(failed("move the root"))?;
    rustix::process::chroot(".").map_err(failed("chroot"))?;
    std::env::set_current_dir("/").map_err(failed("new root"))?;

    if matches!(root, Root::Builder(_)) {
        return Ok(());
    }
    // From here on paths are the image's. A symbolic link in it leads to somewhere in it.
    let sealed = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    put("proc", "/proc", sealed, c"")?;
    put("sysfs", "/sys", sealed, c"")?;
    if cgroups {
        put("cgroup2", "/sys/fs/cgroup", sealed, c"")?;
    }
    put("devtmpfs", "/dev", MountFlags::NOSUID, c"mode=0755")?;
    make_dir("/dev/pts")?;
    move_mount(terminals, "", rustix::fs::CWD, "/dev/pts", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(failed("mount /dev/pts"))?;
    put("tmpfs", "/dev/shm", MountFlags::NOSUID | MountFlags::NODEV, c"mode=1777")?;
    if let Some(modules) = modules {
        // Most images have `/lib` as a link to `usr/lib`; some have none.
        make_dir("/lib")?;
        make_dir("/lib/modules")?;
        move_mount(&modules, "", rustix::fs::CWD, "/lib/modules", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .map_err(failed("mount /lib/modules"))?;
    }
    if matches!(root, Root::Disk { .. }) {
        // An image whose /etc is something else cannot be helped, and may not need names.
        let _ = network::name_server();
    }
    for (link, target) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")] {
        // Another workload's life may have made them: devtmpfs is one for the whole machine.
        let _ = std::os::unix::fs::symlink(target, Path::new("/dev").join(link));
    }
    Ok(())
}

fn mount_root(root: &Root) -> Result<PathBuf, WorkloadError> {
    match root {
        Root::Builder(device) => {
            let flags = MountFlags::NOATIME | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            Ok(mount_disk(device, flags)?.to_owned())
        }
        Root::Disk { device, .. } => {
            let at = mount_disk(device, MountFlags::NOATIME)?;
            grow(device, at).map_err(failed(format!("grow the file system of {}", device.display())))?;
            Ok(at.to_owned())
        }
        Root::Directory(directory) => {
            let what = || format!("root directory {}", directory.display());
            mount_bind_recursive(directory, directory).map_err(failed(what()))?;
            // As with a disk, nothing that is mounted in it comes along from the outside.
            mount_change(directory, MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
                .map_err(failed(what()))?;
            Ok(directory.clone())
        }
    }
}

fn mount_disk(device: &Path, flags: MountFlags) -> Result<&'static Path, WorkloadError> {
    const AT: &str = "/newroot";
    wait_for_disk(device).map_err(failed(format!("root disk {}", device.display())))?;
    make_dir(AT)?;
    // noinit_itable: zeroing inode tables that the image left for later would write into every new disk.
    // discard: what is deleted is given back to the host.
    mount(device, AT, "ext4", flags, c"discard,noinit_itable")
        .map_err(failed(format!("mount root disk {} as ext4", device.display())))?;
    Ok(Path::new(AT))
}

/// The file system of the kernel's modules, not mounted anywhere yet.
fn modules_disk(device: &Path) -> Result<OwnedFd, WorkloadError> {
    let what = || format!("modules disk {}", device.display());
    wait_for_disk(device).map_err(failed(what()))?;
    let mount = || {
        let context = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&context, "source", device)?;
        fsconfig_set_flag(&context, "ro")?;
        fsconfig_create(&context)?;
        let sealed = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, sealed | MountAttrFlags::MOUNT_ATTR_RDONLY)
    };
    mount().map_err(failed::<rustix::io::Errno>(what()))
}

/// Gives the file system all of its disk, which `--disk` may have made larger than the image. With nothing to do it
/// is one call.
fn grow(device: &Path, at: &Path) -> io::Result<()> {
    let bytes = fs::File::open(device)?.seek(io::SeekFrom::End(0))?;
    let root = fs::File::open(at)?;
    let block = rustix::fs::fstatvfs(&root)?.f_bsize.max(1);
    sys::ext4_resize(&root, bytes / block)
}

fn put(kind: &str, at: &str, flags: MountFlags, options: &CStr) -> Result<(), WorkloadError> {
    make_dir(at)?;
    mount(kind, at, kind, flags, options).map_err(failed(format!("mount {at}")))
}

fn make_dir(path: &str) -> Result<(), WorkloadError> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(format!("make {path}"))(error)),
        _ => Ok(()),
    }
}

/// Waits until a device node is there, woken by its creation.
fn wait_for_disk(device: &Path) -> io::Result<()> {
    if device.exists() {
        return Ok(());
    }
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
    inotify::add_watch(&watch, device.parent().unwrap_or(Path::new("/")), inotify::WatchFlags::CREATE)?;
    let deadline = Instant::now() + DISK_WAIT;
    let mut events = [0; 4096];
    while !device.exists() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || !wait_for(&watch, left) {
            let message = format!("it did not appear within {} s", DISK_WAIT.as_secs());
            return Err(io::Error::new(io::ErrorKind::NotFound, message));
        }
        let _ = rustix::io::read(&watch, &mut events);
    }
    Ok(())
}

/// Makes descriptors 0 to 2 /dev/null, whatever the kernel or nobody opened there: commands inherit them where they have
/// no stream of their own, and a read of a console that nobody types on never ends.
pub(super) fn standard_descriptors() -> rustix::io::Result<()> {
    let null = open("/dev/null", OFlags::RDWR, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    if null.as_raw_fd() <= 2 {
        std::mem::forget(null);
    }
    Ok(())
}
