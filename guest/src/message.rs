//! What the two ends say to each other, in JSON. `docs/formats/agent-protocol.md` is the specification.
//!
//! Unknown fields are refused on both sides: an option that is accepted is honoured, and one that is not known is an
//! error, never silently dropped. New fields therefore come with a capability or a new protocol version.

use serde::{Deserialize, Serialize};
use std::net::SocketAddrV4;

/// The vsock port that the agent listens on.
pub const AGENT_PORT: u32 = 1024;

/// The protocol versions that this build speaks, newest first.
pub const VERSIONS: &[u32] = &[1];

/// What this agent can do beyond the bare protocol version. A host checks here before it uses one.
pub const CAPABILITIES: &[&str] =
    &["exec", "pty", "tar", "tar-glob", "stat", "sync", "poweroff", "build-image", "connect", "freeze", "reach"];

/// Execs that exist at once, running or not yet released. More are refused.
pub const MAX_EXECS: usize = 64;

/// Longest id of an exec.
pub const MAX_ID: usize = 64;

/// Entropy bytes in a welcome. The kernel's pool takes 32; more than this is a mistake.
pub const MAX_ENTROPY: usize = 512;

/// Longest host name that Linux takes.
pub const MAX_HOSTNAME: usize = 64;

/// Longest text in an error or a record. Longer ones are cut by their sender and refused by their receiver.
pub const MAX_TEXT: usize = 1024;

/// Most addresses of a [`ExecKind::Reach`]: each may take a while.
pub const MAX_ADDRESSES: usize = 16;

/// The first frame of a connection, from the host: it says what the connection is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Opening {
    /// Requests and replies.
    Control {
        /// Versions that the host speaks, any order.
        versions: Vec<u32>,
    },
    /// The bytes of one stream of one exec.
    Stream {
        /// The version agreed on the control connection.
        version: u32,
        /// The exec's id.
        exec: String,
        /// Which of its streams.
        stream: Stream,
        /// Output: how many bytes the host has; the agent continues there. Input: ignored, 0.
        have: u64,
    },
}

/// A stream of an exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stream {
    /// From the host to the process.
    Stdin,
    /// From the process; with a PTY, everything that it prints.
    Stdout,
    /// From the process; empty with a PTY.
    Stderr,
}

/// Any JSON frame from the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum FromAgent {
    /// The answer to [`Opening::Control`].
    Hello(About),
    /// The answer to [`Opening::Stream`]. Output: data follows from here. Input: the host sends from here.
    Attached {
        /// Byte offset in the stream.
        offset: u64,
    },
    /// Input only: nobody will read any more of it. Bytes up to the offset were accepted.
    Closed {
        /// Byte offset in the stream.
        offset: u64,
    },
    /// The answer to one [`Request`].
    Reply {
        /// The request's id.
        id: u64,
        /// Absent when it was done.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        refused: Option<Refusal>,
    },
    /// An exec ended. Sent when it does, and again on each new control connection until it is released.
    Exited {
        /// The exec's id.
        exec: String,
        /// How it ended.
        record: ExitRecord,
    },
    /// The opening was refused; the connection closes.
    Refused(Refusal),
}

/// What the agent says about itself and its machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct About {
    /// The version that this connection speaks from here on.
    pub version: u32,
    /// The agent's own release.
    pub agent: String,
    /// What it can do: see [`CAPABILITIES`].
    pub capabilities: Vec<String>,
    /// The guest kernel's release, as `uname -r`.
    pub kernel: String,
    /// Memory that the guest kernel has, in bytes.
    pub memory: u64,
}

/// A request on the control connection. Ids are the host's own; a request may be sent again on a new connection and
/// is then done at most once more: all of them can be repeated without harm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Returned in the reply.
    pub id: u64,
    /// What to do.
    pub action: Action,
}

/// What a host can ask for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Action {
    /// Begins the first epoch of a machine that was booted. Its first request.
    Welcome(Epoch),
    /// Stops every process of the workload, until [`Action::Thaw`]. Answered when all have stopped; refused, with the
    /// workload as it was, if one does not in time.
    Freeze {
        /// Milliseconds that they have.
        patience_ms: u64,
    },
    /// Begins another epoch, then lets the workload go on. If a step fails it stays frozen.
    Thaw(Epoch),
    /// Starts something. Refused if the id is in use for another spec; done already if it is for the same.
    Exec(Box<ExecSpec>),
    /// Sends a signal.
    Signal {
        /// The exec's id.
        exec: String,
        /// The signal's number, 1 to 64.
        signal: i32,
        /// To every process of the exec's cgroup, not to its main process alone.
        whole: bool,
    },
    /// Sets the size of an exec's terminal.
    Resize {
        /// The exec's id.
        exec: String,
        /// Rows.
        rows: u16,
        /// Columns.
        cols: u16,
    },
    /// Has the record of an exec sent again, if it has ended; refused if there is no such exec.
    Recall {
        /// The exec's id.
        exec: String,
    },
    /// Forgets an exec, its record and what is left of its streams; once it has ended, if it has not yet.
    Release {
        /// The exec's id.
        exec: String,
    },
    /// Writes everything to disk; answered when it is done.
    Sync,
    /// Ends the workload, unmounts, powers off. Answered before it begins.
    Poweroff {
        /// Milliseconds between SIGTERM and SIGKILL. 0: SIGKILL at once.
        grace_ms: u64,
    },
}

/// One stretch of a machine's life that nobody interrupted: from a boot, a resume, a restore or a fork on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Epoch {
    /// Its number, greater than those before. The workload reads it in `/dev/bulkhead/epoch`.
    pub number: u64,
    /// Wall clock, nanoseconds since 1970 UTC, read just before sending.
    pub wall_clock: u64,
    /// Fresh random bytes in hexadecimal, credited to the kernel's pool.
    pub entropy: String,
    /// Host name of the workload.
    pub hostname: String,
    /// Whether this is a copy of another machine, and gets a machine-id and SSH host keys of its own.
    pub renew_identity: bool,
}

/// Something to run in the workload's namespaces.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExecSpec {
    /// Chosen by the host, unique in the machine's life: 1 to 64 of `a-z`, `0-9`, `-`.
    pub id: String,
    /// What to run.
    pub kind: ExecKind,
    /// The whole environment, `NAME=value`; of two with one name the later counts. The agent adds PATH, HOME,
    /// HOSTNAME, and TERM with a terminal, where they are absent.
    pub env: Vec<String>,
    /// `name|uid[:group|gid]`, looked up in the image's /etc/passwd and /etc/group. Absent: root.
    pub user: Option<String>,
    /// Working directory, made if it is not there. Absent: `/`.
    pub cwd: Option<String>,
    /// Limits other than the defaults.
    pub rlimits: Vec<Rlimit>,
    /// A terminal of this size; absent: pipes.
    pub terminal: Option<Terminal>,
    /// Whether stdin is a stream; if not it is /dev/null (with a terminal: the terminal, without a source).
    pub stdin: bool,
}

impl ExecSpec {
    /// A command, with everything else at its default.
    #[must_use]
    pub fn command(id: impl Into<String>, args: Vec<String>) -> ExecSpec {
        ExecSpec { id: id.into(), kind: ExecKind::Command { args }, ..ExecSpec::default() }
    }

    /// Unpacks a tar archive that comes on stdin into a directory, which is made if it is not there.
    #[must_use]
    pub fn tar_extract(id: impl Into<String>, dir: impl Into<String>) -> ExecSpec {
        let kind = ExecKind::TarExtract { dir: dir.into() };
        ExecSpec { id: id.into(), kind, stdin: true, ..ExecSpec::default() }
    }

    /// Writes a file, or a directory with all below it, to stdout as a tar archive. Names in it begin with the
    /// path's last part; for `/` and for paths that end in `/.` they are relative to the directory.
    #[must_use]
    pub fn tar_create(id: impl Into<String>, path: impl Into<String>) -> ExecSpec {
        ExecSpec { id: id.into(), kind: ExecKind::TarCreate { path: path.into() }, ..ExecSpec::default() }
    }

    /// Writes all that matches a pattern to stdout as a tar archive, directories with all below them. Names in it are
    /// relative to the pattern's part before the first one with a wildcard, or to the parent if there is none. What
    /// matches nothing gives an archive without entries.
    #[must_use]
    pub fn tar_glob(id: impl Into<String>, pattern: impl Into<String>) -> ExecSpec {
        ExecSpec { id: id.into(), kind: ExecKind::TarGlob { pattern: pattern.into() }, ..ExecSpec::default() }
    }

    /// Writes one [`FileStat`] in JSON to stdout.
    #[must_use]
    pub fn stat(id: impl Into<String>, path: impl Into<String>, follow: bool) -> ExecSpec {
        ExecSpec { id: id.into(), kind: ExecKind::Stat { path: path.into(), follow }, ..ExecSpec::default() }
    }

    /// Writes what the machine reaches, one [`Reached`] in JSON, to stdout.
    #[must_use]
    pub fn reach(id: impl Into<String>, name: impl Into<String>, addresses: Vec<SocketAddrV4>) -> ExecSpec {
        ExecSpec { id: id.into(), kind: ExecKind::Reach { name: name.into(), addresses }, ..ExecSpec::default() }
    }
}

/// What a machine reaches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reached {
    /// What its name server says of the name, if anything.
    pub name: Option<Answered>,
    /// The addresses that took a connection.
    pub connected: Vec<SocketAddrV4>,
}

/// A name server's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answered {
    /// Its code: 0 if the name exists, 3 if it does not.
    pub code: u8,
    /// How many records came.
    pub records: u16,
}

/// What stands at a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileStat {
    /// What it is.
    pub kind: FileKind,
    /// Where it is once all links are followed, if that was asked for, it is there and its name is UTF-8.
    pub path: Option<String>,
    /// The user who asked, by number.
    pub uid: u32,
    /// The group of the user who asked, by number.
    pub gid: u32,
}

/// Kinds of file, as far as a copy cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum FileKind {
    Absent,
    Directory,
    File,
    Link,
    Other,
}

/// Checks a pattern of [`ExecKind::TarGlob`].
///
/// # Errors
/// Where it is wrong, in words.
pub fn check_pattern(pattern: &str) -> Result<(), SpecError> {
    match glob::Pattern::new(pattern) {
        Ok(_) => Ok(()),
        Err(error) => Err(SpecError::Pattern { pattern: pattern.to_owned(), why: error.msg }),
    }
}

/// What an exec runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum ExecKind {
    /// A program of the image; the first argument is looked up in PATH.
    Command {
        /// The program and its arguments, at least one.
        args: Vec<String>,
    },
    /// The agent's own tar reader.
    TarExtract {
        /// Where to, in the workload's file system.
        dir: String,
    },
    /// The agent's own tar writer.
    TarCreate {
        /// What from, in the workload's file system.
        path: String,
    },
    /// Unpacks the layers that come on stdin into the empty root of a builder machine: see [`build`](crate::build).
    BuildImage {
        /// Whether names may be whiteouts; if not, there is one archive, and its names are names.
        layered: bool,
    },
    /// The agent's own tar writer, for what matches a pattern (`*`, `?`, `[…]`; `**` for any number of directories).
    TarGlob {
        /// What from, in the workload's file system.
        pattern: String,
    },
    /// Connects to a TCP port of the machine's loopback, and passes on what comes from there and from stdin.
    Connect {
        /// Which.
        port: u16,
    },
    /// Looks whether a name resolves, and which addresses take a connection.
    Reach {
        /// What to ask the machine's name server for: labels of letters, digits and `-`.
        name: String,
        /// Which, [`MAX_ADDRESSES`] at most.
        addresses: Vec<SocketAddrV4>,
    },
    /// Looks what stands at a path.
    Stat {
        /// Where, in the workload's file system.
        path: String,
        /// Whether a link stands for what it leads to.
        follow: bool,
    },
}

impl Default for ExecKind {
    fn default() -> Self {
        ExecKind::Command { args: Vec::new() }
    }
}

/// A terminal to make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terminal {
    /// Rows.
    pub rows: u16,
    /// Columns.
    pub cols: u16,
    /// The value of TERM unless the environment has one.
    pub term: String,
}

/// One resource limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rlimit {
    /// Which one.
    pub resource: Resource,
    /// The soft limit; absent: unlimited.
    pub soft: Option<u64>,
    /// The hard limit; absent: unlimited.
    pub hard: Option<u64>,
}

/// Resources that can be limited, as in setrlimit(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Resource {
    As,
    Core,
    Cpu,
    Data,
    Fsize,
    Memlock,
    Nofile,
    Nproc,
    Stack,
}

/// How an exec ended. There is no default: a record that is missing is a failure of ours, never a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum ExitRecord {
    /// It returned.
    Exited {
        /// Its status, 0 to 255.
        code: u8,
    },
    /// A signal ended it.
    Signaled {
        /// The signal's number.
        signal: i32,
        /// Whether it dumped core.
        core: bool,
    },
    /// SIGKILL ended it, and the kernel counted an out-of-memory kill in its cgroup.
    KilledOom,
    /// It never ran.
    FailedToStart {
        /// Why, for programs.
        kind: StartFailure,
        /// Why, for people.
        message: String,
    },
}

impl ExitRecord {
    /// The exit status that a shell would show: the code, 128 + the signal, 137 out of memory, 126 and 127 for a
    /// command that cannot be executed or found, 125 for every other failure to start.
    #[must_use]
    pub fn status(&self) -> u8 {
        match self {
            ExitRecord::Exited { code } => *code,
            ExitRecord::Signaled { signal, .. } => u8::try_from(*signal).map_or(255, |s| s.saturating_add(128)),
            ExitRecord::KilledOom => 137,
            ExitRecord::FailedToStart { kind: StartFailure::NotFound, .. } => 127,
            ExitRecord::FailedToStart { kind: StartFailure::NotExecutable, .. } => 126,
            ExitRecord::FailedToStart { .. } => 125,
        }
    }
}

/// Why something did not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StartFailure {
    /// No such command (127).
    NotFound,
    /// It is there but cannot be executed (126).
    NotExecutable,
    /// The user is not in the image.
    NoSuchUser,
    /// The group is not in the image.
    NoSuchGroup,
    /// The working directory cannot be made or entered.
    BadCwd,
    /// A limit was refused by the kernel.
    BadLimit,
    /// There is no root disk, or it could not be mounted.
    NoRoot,
    /// No process could be made: out of memory or process ids.
    NoResources,
    /// Anything else.
    Other,
}

/// Why a request or an opening was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refusal {
    /// For programs.
    pub kind: RefusalKind,
    /// For people.
    pub message: String,
}

/// Kinds of refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalKind {
    /// No version in common.
    Version,
    /// The frame is not one, or its content breaks a rule.
    Malformed,
    /// There is no exec of that id.
    UnknownExec,
    /// The id is in use for a different spec.
    IdInUse,
    /// A bound was reached: execs or connections.
    TooMany,
    /// The exec has no such stream, or no terminal.
    NoSuchStream,
    /// The offset is not held any more, or not reached yet.
    BadOffset,
    /// The machine is powering off.
    Stopping,
    /// The workload is stopped: nothing is started before it goes on.
    Frozen,
    /// The kernel refused.
    Failed,
}

/// What is wrong with a spec or another request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// exec id {0:?}: must be 1 to 64 of a-z, 0-9 and -
    #[error("exec id {0:?}: must be 1 to 64 of a-z, 0-9 and -")]
    Id(String),
    /// the command is empty
    #[error("the command is empty")]
    NoCommand,
    /// {0} contains a NUL byte
    #[error("{0} contains a NUL byte")]
    Nul(&'static str),
    /// environment entry {0:?}: must be NAME=value with a name
    #[error("environment entry {0:?}: must be NAME=value with a name")]
    Env(String),
    /// working directory {0:?}: must be absolute
    #[error("working directory {0:?}: must be absolute")]
    Cwd(String),
    /// {what} {path:?}: must be absolute
    #[error("{what} {path:?}: must be absolute")]
    Path {
        /// Which path.
        what: &'static str,
        /// Its value.
        path: String,
    },
    /// limit {0:?}: soft is above hard
    #[error("limit {0:?}: soft is above hard")]
    Limit(Resource),
    /// pattern {pattern:?}: {why}
    #[error("pattern {pattern:?}: {why}")]
    Pattern {
        /// Its text.
        pattern: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// reach: not a name, or over 16 addresses
    #[error("reach: not a name, or over {MAX_ADDRESSES} addresses")]
    Reach,
    /// tar and build execs have no terminal
    #[error("tar and build execs have no terminal")]
    TarTerminal,
    /// tar-extract and build-image need stdin
    #[error("tar-extract and build-image need stdin")]
    TarStdin,
}

impl ExecSpec {
    /// Checks everything that can be checked without the guest's file system. Both ends do.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check(&self) -> Result<(), SpecError> {
        if !valid_id(&self.id) {
            return Err(SpecError::Id(self.id.chars().take(MAX_ID).collect()));
        }
        match &self.kind {
            ExecKind::Command { args } => {
                if args.first().is_none_or(String::is_empty) {
                    return Err(SpecError::NoCommand);
                }
                no_nul("an argument", args)?;
            }
            ExecKind::BuildImage { .. } | ExecKind::Connect { .. } if self.terminal.is_some() => {
                return Err(SpecError::TarTerminal);
            }
            ExecKind::BuildImage { .. } | ExecKind::Connect { .. } if !self.stdin => return Err(SpecError::TarStdin),
            ExecKind::BuildImage { .. } | ExecKind::Connect { .. } => {}
            ExecKind::Reach { .. } if self.terminal.is_some() => return Err(SpecError::TarTerminal),
            ExecKind::Reach { name, addresses } => {
                let label = |label: &str| {
                    (1..=63).contains(&label.len()) && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
                };
                if addresses.len() > MAX_ADDRESSES || name.len() > 253 || !name.split('.').all(label) {
                    return Err(SpecError::Reach);
                }
            }
            ExecKind::TarExtract { dir: path }
            | ExecKind::TarCreate { path }
            | ExecKind::TarGlob { pattern: path }
            | ExecKind::Stat { path, .. } => {
                no_nul("the tar path", [path])?;
                if !path.starts_with('/') {
                    return Err(SpecError::Path { what: "tar path", path: path.clone() });
                }
                if self.terminal.is_some() {
                    return Err(SpecError::TarTerminal);
                }
                if matches!(self.kind, ExecKind::TarExtract { .. }) && !self.stdin {
                    return Err(SpecError::TarStdin);
                }
                if let ExecKind::TarGlob { pattern } = &self.kind {
                    check_pattern(pattern)?;
                }
            }
        }
        no_nul("the environment", &self.env)?;
        if let Some(entry) = self.env.iter().find(|e| e.find('=').is_none_or(|at| at == 0)) {
            return Err(SpecError::Env(entry.clone()));
        }
        no_nul("the user", &self.user)?;
        no_nul("the working directory", &self.cwd)?;
        if let Some(cwd) = self.cwd.as_ref().filter(|c| !c.starts_with('/')) {
            return Err(SpecError::Cwd(cwd.clone()));
        }
        no_nul("TERM", self.terminal.as_ref().map(|t| &t.term))?;
        match self.rlimits.iter().find(|l| l.soft.unwrap_or(u64::MAX) > l.hard.unwrap_or(u64::MAX)) {
            Some(limit) => Err(SpecError::Limit(limit.resource)),
            None => Ok(()),
        }
    }
}

/// Whether an exec id keeps the rule: it becomes the name of a cgroup.
#[must_use]
pub fn valid_id(id: &str) -> bool {
    !id.is_empty() && id.len() <= MAX_ID && id.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'))
}

fn no_nul<'a>(what: &'static str, texts: impl IntoIterator<Item = &'a String>) -> Result<(), SpecError> {
    if texts.into_iter().any(|t| t.contains('\0')) { Err(SpecError::Nul(what)) } else { Ok(()) }
}

/// Text that came from the other side, made fit to show: cut to [`MAX_TEXT`], control characters replaced.
#[must_use]
pub fn printable(text: &str) -> String {
    text.chars().take(MAX_TEXT).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_those_of_a_shell() {
        assert_eq!(ExitRecord::Exited { code: 7 }.status(), 7);
        assert_eq!(ExitRecord::Signaled { signal: 15, core: false }.status(), 143);
        assert_eq!(ExitRecord::Signaled { signal: -4, core: false }.status(), 255);
        assert_eq!(ExitRecord::Signaled { signal: 4000, core: false }.status(), 255);
        assert_eq!(ExitRecord::KilledOom.status(), 137);
        let failed = |kind| ExitRecord::FailedToStart { kind, message: String::new() }.status();
        assert_eq!(failed(StartFailure::NotFound), 127);
        assert_eq!(failed(StartFailure::NotExecutable), 126);
        assert_eq!(failed(StartFailure::BadCwd), 125);
    }

    #[test]
    fn specs_are_checked() {
        let good = ExecSpec::command("main", vec!["true".into()]);
        assert_eq!(good.check(), Ok(()));
        for id in ["", "Main", "a/b", "..", &"a".repeat(65)] {
            assert!(matches!(ExecSpec { id: id.into(), ..good.clone() }.check(), Err(SpecError::Id(_))), "{id}");
        }
        assert_eq!(ExecSpec::command("a", vec![]).check(), Err(SpecError::NoCommand));
        assert_eq!(ExecSpec::command("a", vec!["x\0y".into()]).check(), Err(SpecError::Nul("an argument")));
        for env in ["A", "=b", ""] {
            assert_eq!(ExecSpec { env: vec![env.into()], ..good.clone() }.check(), Err(SpecError::Env(env.into())));
        }
        assert_eq!(ExecSpec { cwd: Some("x".into()), ..good.clone() }.check(), Err(SpecError::Cwd("x".into())));
        let limit = Rlimit { resource: Resource::Nofile, soft: None, hard: Some(5) };
        assert_eq!(ExecSpec { rlimits: vec![limit], ..good }.check(), Err(SpecError::Limit(Resource::Nofile)));
        assert!(ExecSpec::tar_extract("a", "x").check().is_err());
        assert_eq!(ExecSpec::tar_extract("a", "/x").check(), Ok(()));
        assert_eq!(ExecSpec::tar_glob("a", "/x/**/*.[ch]").check(), Ok(()));
        assert!(matches!(ExecSpec::tar_glob("a", "/x/[").check(), Err(SpecError::Pattern { .. })));
        assert!(matches!(ExecSpec::stat("a", "x", true).check(), Err(SpecError::Path { .. })));
        assert_eq!(ExecSpec { stdin: false, ..ExecSpec::tar_extract("a", "/x") }.check(), Err(SpecError::TarStdin));
        let address: SocketAddrV4 = "192.0.2.1:80".parse().unwrap();
        assert_eq!(ExecSpec::reach("a", "canary.example.com", vec![address; MAX_ADDRESSES]).check(), Ok(()));
        assert_eq!(ExecSpec::reach("a", "x", vec![address; MAX_ADDRESSES + 1]).check(), Err(SpecError::Reach));
        for name in ["", "a..b", "a.", "a b", "a\0", &"a".repeat(64), &"a.".repeat(127)] {
            assert_eq!(ExecSpec::reach("a", name, vec![]).check(), Err(SpecError::Reach), "{name}");
        }
    }

    #[test]
    fn unknown_fields_are_refused() {
        let known = serde_json::to_string(&ExecSpec::command("a", vec!["b".into()])).unwrap();
        assert!(serde_json::from_str::<ExecSpec>(&known).is_ok());
        let unknown = known.replacen('{', "{\"privileged\":true,", 1);
        assert!(serde_json::from_str::<ExecSpec>(&unknown).is_err());
    }

    #[test]
    fn foreign_text_cannot_drive_a_terminal() {
        assert_eq!(printable("a\x1b[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(printable(&"x".repeat(5000)).len(), MAX_TEXT);
    }
}
