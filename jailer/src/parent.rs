//! What the jailer does itself: checks what it was given, makes the process, tells who it is.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};

use jailer::report::{Step, send_started};
use jailer::{CGROUP, CONTROL, PROGRAM, Part, Request, STATUS};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{getgid, getuid};

use crate::child::Child;
use crate::sys::Namespaces;
use crate::{Failure, In, child, elf, sys};

/// Makes the process and returns in the jailer alone.
pub(crate) fn run() -> Result<(), Failure> {
    let given = |number| sys::given(number).during(Step::Descriptors);
    for stream in 0..CONTROL {
        given(stream)?;
    }
    let (control, status, program) = (given(CONTROL)?, given(STATUS)?, given(PROGRAM)?);
    if std::env::vars_os().next().is_some() {
        return Err((Step::Environment, Errno::INVAL));
    }
    let arguments: Option<Vec<String>> = std::env::args_os().skip(1).map(|word| word.into_string().ok()).collect();
    let request = Request::from_arguments(&arguments.unwrap_or_default()).map_err(|_| Errno::INVAL);
    let request = request.during(Step::Arguments)?;
    elf::check_static(program).during(Step::Program)?;
    let cgroup = if request.cgroup { Some(given(CGROUP)?) } else { None };
    let namespaces = match (request.without.contains(&Part::Namespaces), request.target.needs_network()) {
        (true, _) => Namespaces::None,
        (false, true) => Namespaces::ButNetwork,
        (false, false) => Namespaces::All,
    };
    let (go, told) = pipe_with(PipeFlags::CLOEXEC).during(Step::Clone)?;

    match sys::clone3(namespaces, cgroup).during(Step::Clone)? {
        sys::Cloned::Child => {
            drop(told);
            child::become_target(&Child { request: &request, control, status, program, go })
        }
        sys::Cloned::Parent { pid, pidfd } => {
            drop(go);
            if namespaces != Namespaces::None {
                write_maps(&request, pid)?;
            }
            send_started(status, pid, pidfd.as_fd()).during(Step::Map)?;
            go_on(told)
        }
    }
}

/// The child waits for this byte.
fn go_on(told: OwnedFd) -> Result<(), Failure> {
    rustix::io::write(told, &[1]).map(drop).during(Step::Map)
}

/// Lets exactly one user and one group exist in the namespace: those that the target becomes, under their own numbers.
/// There is no user 0 in it.
fn write_maps(request: &Request, pid: i32) -> Result<(), Failure> {
    let Request { uid, gid, .. } = request;
    let directory = format!("/proc/{pid}");
    let write = |name: &str, text: &str| -> Result<(), Errno> {
        let path = format!("{directory}/{name}");
        let file = rustix::fs::open(path, rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC, 0.into())?;
        // The kernel takes it in one piece or not at all.
        std::fs::File::from(file).write_all(text.as_bytes()).map_err(|error| sys::errno(&error))
    };
    let own = (getuid().as_raw(), getgid().as_raw()) == (*uid, *gid);
    if own {
        // Without it an ordinary user may not map a group: leaving one can give rights.
        write("setgroups", "deny").during(Step::Map)?;
    }
    write("uid_map", &format!("{uid} {uid} 1")).during(Step::Map)?;
    write("gid_map", &format!("{gid} {gid} 1")).during(Step::Map)
}
