//! What the new process takes from itself. The order is the point: each step leaves just what the next ones need.

use std::convert::Infallible;
use std::os::fd::{BorrowedFd, OwnedFd};

use jailer::report::{Step, send_failed};
use jailer::{Part, Request, Target};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount};
use rustix::process::{
    Resource, Rlimit, Signal, chdir, getgid, getuid, pivot_root, set_parent_process_death_signal, setrlimit,
};
use rustix::thread::{CapabilitySet, CapabilitySets, Gid, Uid};

use crate::{Failure, In, landlock, sys};

/// What the process has.
pub(crate) struct Child<'a> {
    pub(crate) request: &'a Request,
    /// Stays.
    pub(crate) control: BorrowedFd<'a>,
    pub(crate) status: BorrowedFd<'a>,
    pub(crate) program: BorrowedFd<'a>,
    /// Where the jailer says that the map of users is written.
    pub(crate) go: OwnedFd,
}

/// Becomes the target, or reports why not and ends.
pub(crate) fn become_target(child: &Child<'_>) -> ! {
    let Err((step, error)) = confine(child);
    send_failed(child.status, step, error);
    sys::exit(step as i32)
}

fn confine(child: &Child<'_>) -> Result<Infallible, Failure> {
    let Child { request, control, status, program, go } = child;
    let namespaces = !request.without.contains(&Part::Namespaces);
    // Nothing comes if the jailer failed: it has said why.
    if rustix::io::retry_on_intr(|| rustix::io::read(go, &mut [0])).during(Step::Map)? != 1 {
        sys::exit(1);
    }
    if namespaces {
        empty_root()?;
    }
    limit(request, namespaces)?;
    let own = (getuid().as_raw(), getgid().as_raw()) == (request.uid, request.gid);
    // An ordinary user without a namespace has nothing to take away. Root has, but only as long as it is root.
    if !own || namespaces {
        sys::empty_bounding_set().during(Step::Capabilities)?;
    }
    if !own {
        become_user(request).during(Step::Identity)?;
    }
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, none).during(Step::Capabilities)?;
    // After the change of user, which clears it.
    set_parent_process_death_signal(Some(Signal::KILL)).during(Step::Parent)?;
    check_parent(*status).during(Step::Parent)?;
    rustix::thread::set_no_new_privs(true).during(Step::NoNewPrivileges)?;
    if !request.without.contains(&Part::Landlock) {
        landlock::only_execute(*program, request.target.needs_network()).during(Step::Landlock)?;
    }
    sys::leave_only(*control).during(Step::Exec)?;
    let list = match request.target {
        Target::Vmm => &seccomp_lists::VMM_EXEC,
        Target::Netfilter => &seccomp_lists::NETFILTER_EXEC,
    };
    list.install().map_err(|error| sys::errno(&error)).during(Step::Seccomp)?;
    Err((Step::Exec, sys::execute(*program, request.target.name())))
}

/// An empty, read-only root that nobody else sees, and nothing else mounted.
fn empty_root() -> Result<(), Failure> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).during(Step::PrivateMounts)?;
    // Any directory would do; this one is there, or the map could not have been written.
    const PLACE: &str = "/proc";
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("none", PLACE, "tmpfs", flags, Some(c"size=4k,nr_inodes=1,mode=555")).during(Step::EmptyRoot)?;
    chdir(PLACE).during(Step::EmptyRoot)?;
    // The old root comes to lie over the new one, and is then taken off.
    pivot_root(".", ".").during(Step::Pivot)?;
    unmount(".", UnmountFlags::DETACH).during(Step::Pivot)?;
    chdir("/").during(Step::Pivot)
}

fn limit(request: &Request, namespaces: bool) -> Result<(), Failure> {
    let limits = request.limits;
    let mut all = vec![
        (Resource::Nofile, limits.descriptors),
        (Resource::Data, limits.memory),
        (Resource::Fsize, limits.file_size),
        (Resource::Core, 0),
    ];
    if namespaces {
        // The kernel counts a user's threads in each user namespace. Outside of one, the user's others would count too.
        all.push((Resource::Nproc, limits.threads));
    }
    for (resource, most) in all {
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) }).during(Step::Limits)?;
    }
    Ok(())
}

/// From root to the run's user.
fn become_user(request: &Request) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(request.uid), Gid::from_raw(request.gid));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)
}

/// A supervisor that died before we asked for its death is noticed by its end of the socket. Its process id tells nothing:
/// from inside a pid namespace a parent outside is always 0.
fn check_parent(status: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut sockets = [PollFd::new(&status, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut sockets, Some(&now))? == 0 { Ok(()) } else { Err(Errno::SRCH) }
}
