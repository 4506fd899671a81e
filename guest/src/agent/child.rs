//! What a forked copy of the agent does on its way to become a command: into the workload's namespaces (the cgroup it
//! was born in), user, limits, terminal, directory, and then the program itself.

use super::{connect, image, reach, tarball, user};
use crate::{
    message::{ExecKind, ExecSpec, Resource, Rlimit, StartFailure},
    sys,
};
use rustix::{
    fs::{Mode, OFlags, open},
    process::{Gid, Uid},
    thread::ThreadNameSpaceType,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    ffi::CString,
    fs::{self, File},
    io::{self, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};

/// PATH where the environment has none: what the usual container tools give.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Open files of a command unless it asks otherwise: the kernel's own hard limit for PID 1, 4096, is too low for much
/// that runs in images, and a high soft limit breaks programs that close or count them all.
const NOFILE: Rlimit = Rlimit { resource: Resource::Nofile, soft: Some(1024), hard: Some(524_288) };

/// Why a command did not start; goes through the status pipe to the agent.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    pub(super) kind: StartFailure,
    pub(super) message: String,
}

impl Failure {
    pub(super) fn new(kind: StartFailure, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into() }
    }

    fn io(kind: StartFailure, what: &str) -> impl Fn(io::Error) -> Failure {
        move |error| Failure::new(kind, format!("{what}: {error}"))
    }

    fn other(what: &str) -> impl Fn(rustix::io::Errno) -> Failure {
        move |error| Failure::new(StartFailure::Other, format!("{what}: {error}"))
    }
}

/// The child's ends of everything.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) stdio: Stdio,
    /// Takes one [`Failure`] in JSON; closes when the program runs.
    pub(super) status: OwnedFd,
}

#[derive(Debug)]
pub(super) enum Stdio {
    /// Input may be absent: /dev/null, which the agent's own descriptor 0 is.
    Pipes { stdin: Option<OwnedFd>, stdout: OwnedFd, stderr: OwnedFd },
    /// Path of the terminal in the workload's file system.
    Terminal(CString),
}

/// Where to run it.
#[derive(Debug)]
pub(super) struct Place<'a> {
    /// A pidfd of a process in the namespaces to enter.
    pub(super) namespaces: BorrowedFd<'a>,
    pub(super) hostname: String,
    /// Whether the root is an image that is being made.
    pub(super) is_builder: bool,
}

/// Becomes the command.
pub(super) fn run(spec: &ExecSpec, ends: &Ends, place: &Place<'_>) -> ! {
    let Err(failure) = start(spec, ends, place);
    let text = serde_json::to_vec(&failure).unwrap_or_default();
    let _ =
        File::from(ends.status.as_fd().try_clone_to_owned().unwrap_or_else(|_| sys::exit_now(127))).write_all(&text);
    sys::exit_now(127)
}

fn start(spec: &ExecSpec, ends: &Ends, place: &Place<'_>) -> Result<std::convert::Infallible, Failure> {
    if let Stdio::Pipes { stdin, stdout, stderr } = &ends.stdio {
        if let Some(stdin) = stdin {
            rustix::stdio::dup2_stdin(stdin).map_err(Failure::other("stdin"))?;
        }
        rustix::stdio::dup2_stdout(stdout).map_err(Failure::other("stdout"))?;
        rustix::stdio::dup2_stderr(stderr).map_err(Failure::other("stderr"))?;
    }
    // From here on the image may hold this process up for as long as it likes (a file of its own FUSE, say), so it
    // must not keep other commands' pipes open.
    sys::close_all_but(&[ends.status.as_raw_fd(), place.namespaces.as_raw_fd()]);

    rustix::thread::move_into_thread_name_spaces(place.namespaces, ThreadNameSpaceType::MOUNT)
        .map_err(|e| Failure::new(StartFailure::NoRoot, format!("the workload's namespaces: {e}")))?;

    let identity = user::look_up(spec.user.as_deref())?;
    limits(&spec.rlimits)?;
    rustix::process::setsid().map_err(Failure::other("setsid"))?;
    if let Stdio::Terminal(path) = &ends.stdio {
        terminal(path, identity.uid)?;
    }
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let cwd = spec.cwd.as_deref().unwrap_or("/");
    let what = format!("working directory {cwd:?}");
    let bad_cwd = Failure::io(StartFailure::BadCwd, &what);
    fs::create_dir_all(cwd).map_err(&bad_cwd)?;
    become_user(&identity)?;
    std::env::set_current_dir(cwd).map_err(&bad_cwd)?;

    match &spec.kind {
        ExecKind::Command { args } => execute(args, &environment(spec, &identity.home, &place.hostname)),
        // Nothing else may run in a builder: the root is only whole at the end.
        ExecKind::BuildImage { layered } if !place.is_builder => {
            let message = format!("build-image (layered: {layered}): this machine is no builder");
            Err(Failure::new(StartFailure::Other, message))
        }
        ExecKind::BuildImage { layered } => {
            work_as("bulkhead-build", ends);
            sys::exit_now(image::build(*layered).into())
        }
        ExecKind::TarExtract { dir } => finish("bulkhead-untar", ends, || tarball::extract(Path::new(dir))),
        ExecKind::TarCreate { path } => finish("bulkhead-tar", ends, || tarball::create(path)),
        ExecKind::TarGlob { pattern } => finish("bulkhead-tar", ends, || tarball::create_matching(pattern)),
        ExecKind::Connect { port } => finish("bulkhead-port", ends, || connect::relay(*port)),
        ExecKind::Reach { name, addresses } => finish("bulkhead-reach", ends, || reach::look(name, addresses)),
        ExecKind::Stat { path, follow } => finish("bulkhead-stat", ends, || tarball::stat(Path::new(path), *follow)),
    }
}

/// Begins work of our own in place of a program. The status pipe is closed, so the agent sees the work as started.
fn work_as(name: &str, ends: &Ends) {
    if let Ok(name) = CString::new(name) {
        let _ = rustix::thread::set_name(&name);
    }
    sys::close_all_but(&[]);
    let _ = ends;
}

fn finish(name: &str, ends: &Ends, work: impl FnOnce() -> io::Result<()>) -> ! {
    work_as(name, ends);
    match work() {
        Ok(()) => sys::exit_now(0),
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            sys::exit_now(1)
        }
    }
}

fn terminal(path: &CString, uid: u32) -> Result<(), Failure> {
    let name = path.to_string_lossy();
    let what = format!("terminal {name:?}");
    let slave = open(path, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).map_err(Failure::other(&what))?;
    rustix::fs::fchown(&slave, Some(Uid::from_raw(uid)), None).map_err(Failure::other(&what))?;
    rustix::process::ioctl_tiocsctty(&slave).map_err(Failure::other(&what))?;
    rustix::stdio::dup2_stdin(&slave).map_err(Failure::other(&what))?;
    rustix::stdio::dup2_stdout(&slave).map_err(Failure::other(&what))?;
    rustix::stdio::dup2_stderr(&slave).map_err(Failure::other(&what))
}

fn become_user(identity: &user::Identity) -> Result<(), Failure> {
    let groups: Vec<Gid> = identity.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    let gid = Gid::from_raw(identity.gid);
    let uid = Uid::from_raw(identity.uid);
    rustix::thread::set_thread_groups(&groups).map_err(Failure::other("supplementary groups"))?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(Failure::other("group"))?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(Failure::other("user"))
}

fn limits(asked: &[Rlimit]) -> Result<(), Failure> {
    // Where the agent may not raise it, the kernel's default stays: nobody asked.
    if !asked.iter().any(|l| l.resource == Resource::Nofile) {
        let _ = set_limit(&NOFILE);
    }
    for limit in asked {
        set_limit(limit)
            .map_err(|e| Failure::new(StartFailure::BadLimit, format!("limit {:?}: {e}", limit.resource)))?;
    }
    Ok(())
}

fn set_limit(limit: &Rlimit) -> rustix::io::Result<()> {
    use rustix::process::Resource as Kernel;
    let resource = match limit.resource {
        Resource::As => Kernel::As,
        Resource::Core => Kernel::Core,
        Resource::Cpu => Kernel::Cpu,
        Resource::Data => Kernel::Data,
        Resource::Fsize => Kernel::Fsize,
        Resource::Memlock => Kernel::Memlock,
        Resource::Nofile => Kernel::Nofile,
        Resource::Nproc => Kernel::Nproc,
        Resource::Stack => Kernel::Stack,
    };
    rustix::process::setrlimit(resource, rustix::process::Rlimit { current: limit.soft, maximum: limit.hard })
}

/// The environment with what every program may expect. Later entries win, as in the spec.
fn environment(spec: &ExecSpec, home: &str, hostname: &str) -> Vec<(String, String)> {
    let mut env = vec![("PATH".to_owned(), DEFAULT_PATH.to_owned()), ("HOME".to_owned(), home.to_owned())];
    env.push(("HOSTNAME".to_owned(), hostname.to_owned()));
    if let Some(terminal) = &spec.terminal {
        env.push(("TERM".to_owned(), terminal.term.clone()));
    }
    let given = spec.env.iter().filter_map(|entry| entry.split_once('='));
    env.extend(given.map(|(name, value)| (name.to_owned(), value.to_owned())));
    env
}

/// Executes the program, found as a shell finds it; returns only if that fails.
fn execute(args: &[String], env: &[(String, String)]) -> Result<std::convert::Infallible, Failure> {
    let Some(program) = args.first() else {
        return Err(Failure::new(StartFailure::Other, "the command is empty"));
    };
    let arguments = c_strings(args.iter().cloned())?;
    // Of two entries with one name the later counts, and only that is handed on.
    let last: BTreeMap<_, _> = env.iter().map(|(name, value)| (name, value)).collect();
    let variables = c_strings(last.iter().map(|(name, value)| format!("{name}={value}")))?;
    let mut denied = None;
    let path = env.iter().rev().find(|(name, _)| name == "PATH").map_or("", |(_, value)| value.as_str());
    let directories = if program.contains('/') { "" } else { path };
    for directory in directories.split(':') {
        // An empty part of PATH means the current directory.
        let candidate = Path::new(directory).join(program);
        let path = c_strings([candidate.to_string_lossy().into_owned()])?;
        let Some(path) = path.first() else { continue };
        let error = sys::execute(path, &arguments, &variables);
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) if !candidate.exists() => {}
            Some(libc::EACCES) if program.contains('/') || candidate.is_file() => {
                denied = denied.or(Some(cannot_execute(&candidate, &error)));
            }
            Some(libc::EACCES) => {}
            _ => return Err(cannot_execute(&candidate, &error)),
        }
    }
    Err(denied.unwrap_or_else(|| {
        let message = if program.contains('/') {
            format!("command {program:?}: no such file")
        } else {
            format!("command {program:?}: not found in PATH ({path})")
        };
        Failure::new(StartFailure::NotFound, message)
    }))
}

fn c_strings(texts: impl IntoIterator<Item = String>) -> Result<Vec<CString>, Failure> {
    let strings: Result<_, _> = texts.into_iter().map(CString::new).collect();
    strings.map_err(|_| Failure::new(StartFailure::Other, "a NUL byte in the command or its environment"))
}

fn cannot_execute(path: &Path, error: &io::Error) -> Failure {
    let (kind, hint) = match error.raw_os_error() {
        Some(libc::ENOENT) => (StartFailure::NotFound, " (it is there, but its interpreter or loader is not)"),
        Some(libc::ENOMEM | libc::EAGAIN) => (StartFailure::NoResources, ""),
        Some(libc::E2BIG) => (StartFailure::Other, " (arguments and environment together)"),
        _ => (StartFailure::NotExecutable, ""),
    };
    Failure::new(kind, format!("command {}: {error}{hint}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Terminal;

    #[test]
    fn the_environment_is_minimal_and_given_values_win() {
        let mut spec = ExecSpec::command("a", vec!["x".into()]);
        spec.env = vec!["A=1".into(), "A=2=3".into(), "HOME=/elsewhere".into()];
        spec.terminal = Some(Terminal { rows: 1, cols: 1, term: "xterm".into() });
        let env: std::collections::BTreeMap<_, _> = environment(&spec, "/root", "box").into_iter().collect();
        let want =
            [("A", "2=3"), ("HOME", "/elsewhere"), ("HOSTNAME", "box"), ("PATH", DEFAULT_PATH), ("TERM", "xterm")];
        assert_eq!(env.into_iter().collect::<Vec<_>>(), want.map(|(n, v)| (n.to_owned(), v.to_owned())));
    }
}
