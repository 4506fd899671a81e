//! The supervisor's end of the agent's protocol. Everything that arrives here comes from a hostile machine: every
//! frame is bounded, nothing is allocated by a number that the guest chose, and nothing it sends can panic.
//!
//! [`Agent`] keeps one control connection and makes it anew when it breaks; [`Exec`] moves the bytes of one command
//! over connections of their own, which resume at the byte where the last one broke.
//!
//! ```no_run
//! use guest::{host::{Agent, Dial, Welcome}, message::ExecSpec};
//! use std::{sync::Arc, time::{Duration, Instant}};
//! fn run(dial: Arc<dyn Dial>) -> Result<u8, guest::host::AgentError> {
//!     let welcome = Welcome { epoch: 1, renew_identity: false, entropy: vec![0; 32], hostname: "box".into() };
//!     let agent = Agent::connect(dial, &welcome, Instant::now() + Duration::from_secs(60))?;
//!     let exec = agent.exec(ExecSpec::command("main", vec!["uname".into(), "-a".into()]))?;
//!     exec.copy_stdout(&mut std::io::stdout())?;
//!     Ok(exec.wait()?.status())
//! }
//! ```

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod control;
mod error;
mod input;
mod link;
mod output;

pub use error::AgentError;

use crate::message::{About, Action, ExecSpec, ExitRecord, Stream, valid_id};
use control::Control;
use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// How long an agent may take to answer, beyond the time that what it was asked for may take.
const ANSWER: Duration = Duration::from_secs(5);

/// Makes connections to the guest.
pub trait Dial: Send + Sync {
    /// A fresh connection to a port of the guest, in blocking mode; called again after every reset. An error of kind
    /// [`io::ErrorKind::ConnectionAborted`] says that the machine is gone for good; after any other it is tried again.
    ///
    /// # Errors
    /// There is no connection to be had now, or ever.
    fn dial(&self, port: u32) -> io::Result<UnixStream>;
}

/// What a machine is told before anything runs in it, or goes on. The wall clock is read when it is sent.
#[derive(Clone)]
pub struct Welcome {
    /// The number of the epoch that begins, greater than those before.
    pub epoch: u64,
    /// Whether the machine is a copy of another one, and gets a machine-id and SSH host keys of its own.
    pub renew_identity: bool,
    /// Fresh random bytes for the guest's pool, 32 to [`MAX_ENTROPY`](crate::message::MAX_ENTROPY).
    pub entropy: Vec<u8>,
    /// Host name of the workload.
    pub hostname: String,
}

impl std::fmt::Debug for Welcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Welcome").field("epoch", &self.epoch).field("hostname", &self.hostname).finish_non_exhaustive()
    }
}

/// The agent of one machine. Clones are handles to the same; the last one's end closes the control connection.
#[derive(Debug, Clone)]
pub struct Agent {
    control: Arc<Control>,
    about: Arc<About>,
}

impl Agent {
    /// Connects for the first time, trying every 100 ms until the agent answers, and welcomes the machine.
    ///
    /// # Errors
    /// The deadline passed ([`AgentError::Late`], with what the last attempt met), the machine is gone, there is no
    /// version in common, or the welcome was refused.
    pub fn connect(dial: Arc<dyn Dial>, welcome: &Welcome, deadline: Instant) -> Result<Agent, AgentError> {
        let (control, about) = Control::connect(dial, deadline)?;
        let agent = Agent { control, about: Arc::new(about) };
        agent.control.call(Action::Welcome(control::epoch(welcome)))?;
        Ok(agent)
    }

    /// Stops every process of the workload. If one does not stop within `patience`, the workload goes on, and the
    /// error names it.
    ///
    /// # Errors
    /// A process did not stop, the agent cannot do it, it did not answer ([`AgentError::Late`]: the workload may be
    /// stopped), or the machine is gone.
    pub fn freeze(&self, patience: Duration) -> Result<Frozen, AgentError> {
        let action = Action::Freeze { patience_ms: u64::try_from(patience.as_millis()).unwrap_or(u64::MAX) };
        self.control.call_within(action, patience.saturating_add(ANSWER))?;
        Ok(Frozen(self.clone()))
    }

    /// Versions, capabilities, kernel, memory: as the agent said at the first connection.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Starts something. That it could not be started (no such command, no such user…) is an exit record, not an
    /// error.
    ///
    /// # Errors
    /// The spec breaks a rule, the agent refused it, or the machine is gone.
    pub fn exec(&self, spec: ExecSpec) -> Result<Exec, AgentError> {
        spec.check()?;
        let id = spec.id.clone();
        self.control.expect_record(&id)?;
        if let Err(error) = self.control.call(Action::Exec(Box::new(spec))) {
            self.control.drop_record(&id);
            return Err(error);
        }
        Ok(Exec::new(&self.control, id, false))
    }

    /// An exec that another client of the agent started, by its id. Its streams begin at the oldest byte that nobody
    /// acknowledged, so a caller that has some already must say how many: see [`Exec::copy_stdout_from`].
    ///
    /// # Errors
    /// There is no such exec, there is a handle of it already, or the machine is gone.
    pub fn attach(&self, id: &str) -> Result<Exec, AgentError> {
        if !valid_id(id) {
            return Err(crate::message::SpecError::Id(id.to_owned()).into());
        }
        self.control.expect_record(id)?;
        if let Err(error) = self.control.call(Action::Recall { exec: id.to_owned() }) {
            self.control.drop_record(id);
            return Err(error);
        }
        Ok(Exec::new(&self.control, id.to_owned(), true))
    }

    /// Ends the workload (SIGTERM, then SIGKILL after `grace`; at once if it is zero), unmounts and powers off.
    /// Returns when the agent has said that it will; the machine's end is seen where the machine is.
    ///
    /// # Errors
    /// The machine is gone already.
    pub fn poweroff(&self, grace: Duration) -> Result<(), AgentError> {
        self.control.call(Action::Poweroff { grace_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX) })
    }

    /// Writes all that the guest's kernel holds to its disk.
    ///
    /// # Errors
    /// The agent refused, or the machine is gone.
    pub fn sync(&self) -> Result<(), AgentError> {
        self.control.call(Action::Sync)
    }
}

/// A machine whose workload is stopped: after [`Agent::freeze`], or because it was restored. Nothing can be done with it
/// before it has begun another epoch.
#[derive(Debug)]
pub struct Frozen(Agent);

impl Frozen {
    /// Connects to a machine that was restored with its workload stopped, trying every 100 ms until the agent answers.
    ///
    /// # Errors
    /// As [`Agent::connect`].
    pub fn connect(dial: Arc<dyn Dial>, deadline: Instant) -> Result<Frozen, AgentError> {
        let (control, about) = Control::connect(dial, deadline)?;
        Ok(Frozen(Agent { control, about: Arc::new(about) }))
    }

    /// Takes a machine for stopped, whose answer to [`Agent::freeze`] did not come.
    #[must_use]
    pub fn of(agent: &Agent) -> Frozen {
        Frozen(agent.clone())
    }

    /// Begins another epoch, and lets the workload go on in it.
    ///
    /// # Errors
    /// A step failed, and the workload is still stopped; the agent did not answer within `patience`; the machine is gone.
    pub fn thaw(&self, welcome: &Welcome, patience: Duration) -> Result<Agent, AgentError> {
        self.0.control.call_within(Action::Thaw(control::epoch(welcome)), patience)?;
        Ok(self.0.clone())
    }
}

/// One command in the machine. Dropping it tells the agent to forget it, which a command that still runs survives:
/// signal it first, and wait. The pumps block, and are meant to be called each from a thread of its own; they outlive
/// connection resets without losing or doubling a byte.
#[derive(Debug)]
pub struct Exec {
    control: Arc<Control>,
    id: String,
    /// Whether another client started it.
    attached: bool,
    /// Bytes of its output that were passed on.
    stdout: AtomicU64,
    stderr: AtomicU64,
}

impl Exec {
    fn new(control: &Arc<Control>, id: String, attached: bool) -> Exec {
        let (stdout, stderr) = (AtomicU64::new(0), AtomicU64::new(0));
        Exec { control: Arc::clone(control), id, attached, stdout, stderr }
    }

    /// Bytes of output and of error output that were passed on: where another client is to go on.
    #[must_use]
    pub fn passed(&self) -> (u64, u64) {
        (self.stdout.load(Ordering::Acquire), self.stderr.load(Ordering::Acquire))
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Copies input to the command until `from` ends, then announces the end; returns the bytes that the command's
    /// side accepted. Returns early, without error, when the command has closed its input or ended.
    ///
    /// It cannot interrupt `from.read`: whoever owns `from` must make it return (shut the socket down, close the
    /// pipe) after [`Exec::wait`] has returned; what that last read gave is dropped.
    ///
    /// # Errors
    /// `from` failed, the exec has no input stream, or the machine is gone.
    pub fn copy_stdin(&self, from: &mut dyn Read) -> Result<u64, AgentError> {
        input::copy(&self.control, &self.id, self.attached, from)
    }

    /// Copies the command's output until its announced end; returns its length.
    ///
    /// # Errors
    /// `to` failed, or the machine is gone.
    pub fn copy_stdout(&self, to: &mut dyn Write) -> Result<u64, AgentError> {
        output::copy(&self.control, &self.id, Stream::Stdout, 0, to, &self.stdout)
    }

    /// As [`Exec::copy_stdout`], for a caller that has the first `have` bytes from an earlier connection.
    ///
    /// # Errors
    /// As there, or the agent does not hold the bytes that follow.
    pub fn copy_stdout_from(&self, have: u64, to: &mut dyn Write) -> Result<u64, AgentError> {
        output::copy(&self.control, &self.id, Stream::Stdout, have, to, &self.stdout)
    }

    /// Copies the command's error output until its announced end, which comes at once with a terminal.
    ///
    /// # Errors
    /// As [`Exec::copy_stdout`].
    pub fn copy_stderr(&self, to: &mut dyn Write) -> Result<u64, AgentError> {
        output::copy(&self.control, &self.id, Stream::Stderr, 0, to, &self.stderr)
    }

    /// As [`Exec::copy_stdout_from`], of the error output.
    ///
    /// # Errors
    /// As there.
    pub fn copy_stderr_from(&self, have: u64, to: &mut dyn Write) -> Result<u64, AgentError> {
        output::copy(&self.control, &self.id, Stream::Stderr, have, to, &self.stderr)
    }

    /// Waits for the command to end.
    ///
    /// # Errors
    /// The machine is gone without a record: that is a failure, never a success.
    pub fn wait(&self) -> Result<ExitRecord, AgentError> {
        self.control.record(&self.id)
    }

    /// Sends a signal to the command's main process, or to every process of its cgroup.
    ///
    /// # Errors
    /// The agent refused, or the machine is gone. A command that has ended already is no error.
    pub fn signal(&self, signal: i32, whole: bool) -> Result<(), AgentError> {
        self.control.call(Action::Signal { exec: self.id.clone(), signal, whole })
    }

    /// Sets the size of the command's terminal.
    ///
    /// # Errors
    /// It has none, or the machine is gone.
    pub fn resize(&self, rows: u16, cols: u16) -> Result<(), AgentError> {
        self.control.call(Action::Resize { exec: self.id.clone(), rows, cols })
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        self.control.forget(&self.id);
    }
}
