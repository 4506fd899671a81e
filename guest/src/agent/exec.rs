//! One exec as the agent holds it: its process, its ends of the pipes or the terminal, and what is kept of its
//! streams. The streams' arithmetic is in [`crate::window`].

use super::{
    cgroup,
    child::{self, Ends, Failure, Place, Stdio},
    connection::{Connection, Role},
    workload::{self, Workload},
};
use crate::{
    message::{ExecKind, ExecSpec, ExitRecord, FromAgent, MAX_TEXT, StartFailure, Stream},
    sys,
    window::{CREDIT, Receiver, Sender, WindowError},
};
use rustix::{
    fd::OwnedFd,
    io::Errno,
    pipe::{PipeFlags, pipe_with},
    process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid},
    termios::{Winsize, tcsetwinsize},
};
use std::{
    collections::VecDeque,
    os::fd::AsFd,
    path::PathBuf,
    time::{Duration, Instant},
};

/// How long the rest of a terminal's output is waited for after its command ended. The kernel hangs the terminal up
/// then, so the end usually comes at once.
const TERMINAL_GRACE: Duration = Duration::from_millis(200);

/// Signals kept for a command that waits for the workload's root; more of them say nothing new.
const MAX_EARLY_SIGNALS: usize = 32;

/// Size of the pipe to a process of ours that unpacks, in bytes.
const COPY_PIPE: usize = 1 << 20;

/// What ends a terminal's input: control-D.
const END_OF_INPUT: u8 = 4;

#[derive(Debug)]
pub(super) struct Exec {
    pub(super) spec: ExecSpec,
    pub(super) state: State,
    pub(super) stdin: Option<Input>,
    pub(super) stdout: Output,
    pub(super) stderr: Output,
    /// The host wants to hear no more of it.
    pub(super) released: bool,
    /// Its record was sent to the control connections that there are.
    pub(super) announced: bool,
    /// Signals that came before it ran.
    early: Vec<(Signal, bool)>,
    cgroup: Option<PathBuf>,
}

#[derive(Debug)]
pub(super) enum State {
    /// For the workload's root to be ready.
    Waiting,
    Running(Process),
    Ended(ExitRecord),
}

#[derive(Debug)]
pub(super) struct Process {
    pub(super) pidfd: OwnedFd,
    /// Where a [`Failure`] comes from.
    status: OwnedFd,
}

impl Exec {
    pub(super) fn new(spec: ExecSpec) -> Exec {
        let stdin = spec.stdin.then(Input::default);
        Exec {
            spec,
            state: State::Waiting,
            stdin,
            stdout: Output::default(),
            stderr: Output::default(),
            released: false,
            announced: false,
            early: Vec::new(),
            cgroup: None,
        }
    }

    /// Starts it, if the workload is ready to take it or will never be.
    pub(super) fn start(&mut self, workload: &Workload) {
        let outcome = match &workload.state {
            workload::State::Preparing(_) => return,
            workload::State::Failed(why) => Err(Failure::new(StartFailure::NoRoot, why.as_str())),
            workload::State::Ready => self.launch(workload),
        };
        match outcome {
            Ok(process) => {
                self.state = State::Running(process);
                for (signal, whole) in std::mem::take(&mut self.early) {
                    let _ = self.signal(signal, whole);
                }
            }
            Err(failure) => self.never_started(&failure),
        }
    }

    fn never_started(&mut self, failure: &Failure) {
        let message = failure.message.chars().take(MAX_TEXT).collect();
        self.state = State::Ended(ExitRecord::FailedToStart { kind: failure.kind, message });
        self.stdout.finish();
        self.stderr.finish();
        if let Some(stdin) = &mut self.stdin {
            stdin.close();
        }
    }

    fn launch(&mut self, workload: &Workload) -> Result<Process, Failure> {
        let failed = |what: &'static str| {
            move |e: Errno| Failure::new(StartFailure::NoResources, format!("cannot start: {what}: {e}"))
        };
        if let Some(cgroup) = &workload.cgroup {
            let made = cgroup.exec(&self.spec.id);
            self.cgroup = Some(made.map_err(|e| Failure::new(StartFailure::NoResources, format!("cgroup: {e}")))?);
        }
        let (status, child_status) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("pipe"))?;
        let stdio = match &self.spec.terminal {
            Some(terminal) => {
                let (master, path) = workload.open_terminal().map_err(failed("terminal"))?;
                tcsetwinsize(&master, window_size(terminal.rows, terminal.cols)).map_err(failed("terminal"))?;
                if let Some(stdin) = &mut self.stdin {
                    stdin.fd = Some(master.try_clone().map_err(|_| failed("terminal")(Errno::MFILE))?);
                    stdin.terminal = true;
                }
                self.stdout.fd = Some(master);
                self.stdout.terminal = true;
                self.stderr.finish();
                Stdio::Terminal(path)
            }
            None => {
                let (stdout, child_stdout) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("pipe"))?;
                let (stderr, child_stderr) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("pipe"))?;
                let mut child_stdin = None;
                if let Some(stdin) = &mut self.stdin {
                    let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("pipe"))?;
                    rustix::io::ioctl_fionbio(&ours, true).map_err(failed("pipe"))?;
                    if matches!(self.spec.kind, ExecKind::TarExtract { .. } | ExecKind::BuildImage { .. }) {
                        // Fewer changes between us and the process. Where it is refused, the pipe is as large as others.
                        let _ = rustix::pipe::fcntl_setpipe_size(&ours, COPY_PIPE);
                    }
                    stdin.fd = Some(ours);
                    child_stdin = Some(theirs);
                }
                for ours in [&stdout, &stderr] {
                    rustix::io::ioctl_fionbio(ours, true).map_err(failed("pipe"))?;
                }
                self.stdout.fd = Some(stdout);
                self.stderr.fd = Some(stderr);
                Stdio::Pipes { stdin: child_stdin, stdout: child_stdout, stderr: child_stderr }
            }
        };
        let place = Place {
            namespaces: workload.namespaces(),
            hostname: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            is_builder: workload.is_builder(),
        };
        let ends = Ends { stdio, status: child_status };
        let no_process = |e| Failure::new(StartFailure::NoResources, format!("cannot make a process: {e}"));
        let birthplace = self.cgroup.as_deref().map(cgroup::open_directory).transpose().map_err(no_process)?;
        let forked = sys::fork(birthplace.as_ref().map(AsFd::as_fd)).map_err(no_process)?;
        let Some(pidfd) = forked else { child::run(&self.spec, &ends, &place) };
        Ok(Process { pidfd, status })
    }

    /// Takes the record of a process that has ended.
    pub(super) fn collect(&mut self) {
        let State::Running(process) = &self.state else { return };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let Ok(Some(status)) = waitid(WaitId::PidFd(process.pidfd.as_fd()), options) else { return };
        let mut text = [0; 4096];
        let count = rustix::io::read(&process.status, &mut text).unwrap_or(0);
        if count > 0 {
            let failure = serde_json::from_slice(text.get(..count).unwrap_or_default())
                .unwrap_or_else(|_| Failure::new(StartFailure::Other, "it does not say why"));
            self.never_started(&failure);
            return;
        }
        let signal = status.terminating_signal();
        self.state = State::Ended(match (status.exit_status(), signal) {
            (Some(code), _) => ExitRecord::Exited { code: u8::try_from(code & 0xff).unwrap_or(255) },
            (None, Some(9)) if self.cgroup.as_ref().is_some_and(|c| cgroup::oom_kills(c) > 0) => ExitRecord::KilledOom,
            (None, signal) => ExitRecord::Signaled { signal: signal.unwrap_or(0), core: status.dumped() },
        });
        self.stdout.command_ended();
        self.stderr.command_ended();
        if let Some(stdin) = &mut self.stdin {
            stdin.close();
        }
    }

    /// Sends a signal; to a command that has ended it is no error, and one that has not begun gets it when it does.
    pub(super) fn signal(&mut self, signal: Signal, whole: bool) -> Result<(), Errno> {
        match (&self.cgroup, &self.state) {
            (_, State::Waiting) if self.early.len() < MAX_EARLY_SIGNALS => self.early.push((signal, whole)),
            (Some(cgroup), _) if whole && signal == Signal::KILL => cgroup::kill(cgroup),
            (Some(cgroup), _) if whole => cgroup::signal_tree(cgroup, signal),
            (_, State::Running(process)) => match pidfd_send_signal(&process.pidfd, signal) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => return Err(error),
            },
            _ => {}
        }
        Ok(())
    }

    /// Sets the terminal's size; false if there is none.
    pub(super) fn resize(&self, rows: u16, cols: u16) -> bool {
        match &self.stdout.fd {
            Some(master) if self.stdout.terminal => _ = tcsetwinsize(master, window_size(rows, cols)),
            // It had one, and is over.
            _ => return self.spec.terminal.is_some(),
        }
        true
    }

    pub(super) fn output(&mut self, stream: Stream) -> &mut Output {
        if stream == Stream::Stderr { &mut self.stderr } else { &mut self.stdout }
    }

    /// Its record, once.
    pub(super) fn take_announcement(&mut self) -> Option<ExitRecord> {
        match &self.state {
            State::Ended(record) if !std::mem::replace(&mut self.announced, true) => Some(record.clone()),
            _ => None,
        }
    }

    /// The host wants to hear no more of it. Until it ends, what it prints is read and dropped, so that it can end.
    pub(super) fn release(&mut self) {
        self.released = true;
        for output in [&mut self.stdout, &mut self.stderr] {
            let _ = output.sender.acknowledge(output.sender.produced());
        }
    }

    /// Whether nothing of it is needed any more.
    pub(super) fn forgotten(&self) -> bool {
        self.released && matches!(self.state, State::Ended(_))
    }

    /// Its cgroup, to remove once it is empty.
    pub(super) fn take_cgroup(&mut self) -> Option<PathBuf> {
        self.cgroup.take()
    }

    pub(super) fn held(&self) -> usize {
        self.stdout.sender.held().saturating_add(self.stderr.sender.held())
    }
}

fn window_size(rows: u16, cols: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 }
}

/// An output stream.
#[derive(Debug, Default)]
pub(super) struct Output {
    pub(super) fd: Option<OwnedFd>,
    terminal: bool,
    pub(super) sender: Sender,
    /// The connection that it goes to.
    pub(super) connection: Option<u64>,
    /// Set when the command has ended: bytes that were in the pipe then. What a child that it left behind writes
    /// later does not count, or it could keep the stream open for ever.
    left: Option<u64>,
    /// The same for a terminal, where the kernel cannot say how much is on its way.
    pub(super) until: Option<Instant>,
    /// A pipe that others may still write to, after the stream's end.
    pub(super) abandoned: Option<OwnedFd>,
}

impl Output {
    /// Reads once.
    pub(super) fn pull(&mut self, buffer: &mut [u8], limit: usize, discard: bool) {
        let Some(fd) = &self.fd else { return };
        let left = self.left.and_then(|left| usize::try_from(left).ok()).unwrap_or(usize::MAX);
        let want = buffer.len().min(self.sender.room(limit)).min(left);
        let Some(buffer) = buffer.get_mut(..want).filter(|b| !b.is_empty()) else { return };
        match rustix::io::read(fd, &mut *buffer) {
            Ok(0) => self.finish(),
            Ok(count) => {
                self.sender.push(buffer.get(..count).unwrap_or_default());
                if discard {
                    let _ = self.sender.acknowledge(self.sender.produced());
                }
                if let Some(left) = &mut self.left {
                    *left = left.saturating_sub(u64::try_from(count).unwrap_or(u64::MAX));
                    if *left == 0 {
                        self.finish_early();
                    }
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            // A terminal whose other end is closed says EIO.
            Err(_) => self.finish(),
        }
    }

    /// A new connection, whose host has the first `have` bytes. Returns the one that it replaces.
    pub(super) fn open(
        &mut self,
        id: u64,
        connection: &mut Connection,
        exec: String,
        stream: Stream,
        have: u64,
    ) -> Result<Option<u64>, WindowError> {
        let cursor = self.sender.attach(have)?;
        connection.send(&FromAgent::Attached { offset: have });
        connection.role = Role::Output { exec, stream, cursor };
        Ok(self.connection.replace(id))
    }

    pub(super) fn wants(&self, limit: usize) -> bool {
        self.fd.is_some() && self.sender.room(limit) > 0
    }

    fn command_ended(&mut self) {
        let Some(fd) = &self.fd else { return };
        if self.terminal {
            self.until = Instant::now().checked_add(TERMINAL_GRACE);
            return;
        }
        let left = rustix::io::ioctl_fionread(fd).unwrap_or(0);
        self.left = Some(left);
        if left == 0 {
            self.finish_early();
        }
    }

    /// Ends a terminal's output whose time is over, unless the host is what holds it up.
    pub(super) fn expire(&mut self, now: Instant, limit: usize) {
        if self.until.is_some_and(|until| until <= now) && self.wants(limit) {
            self.finish();
        }
    }

    /// Ends the stream of a command that has ended, though its pipe may be open: what it left behind must not be
    /// killed by SIGPIPE for it.
    fn finish_early(&mut self) {
        self.abandoned = self.fd.take();
        self.finish();
    }

    fn finish(&mut self) {
        self.fd = None;
        self.until = None;
        self.sender.finish();
    }
}

/// The input stream.
#[derive(Debug, Default)]
pub(super) struct Input {
    pub(super) fd: Option<OwnedFd>,
    terminal: bool,
    pub(super) receiver: Receiver,
    /// Received and not yet written; on a new connection the host sends it again.
    pending: VecDeque<u8>,
    /// Bytes that the process's pipe took.
    pub(super) written: u64,
    /// No more will be read.
    pub(super) closed: bool,
    pub(super) connection: Option<u64>,
}

impl Input {
    /// A new connection. What is not written yet comes again. Returns the one that it replaces.
    pub(super) fn open(&mut self, id: u64, connection: &mut Connection, exec: String) -> Option<u64> {
        if !self.closed && !self.complete() {
            self.pending.clear();
            self.receiver.rewind(self.written);
            connection.send(&FromAgent::Attached { offset: self.written });
        } else if self.complete() {
            // The host did not hear that all of it was written.
            connection.send(&FromAgent::Closed { offset: self.written });
            connection.close();
        }
        connection.role = Role::Input { exec, acked: self.written };
        self.connection.replace(id)
    }

    /// Takes a data frame's bytes; false if the host breaks the rules.
    pub(super) fn take(&mut self, offset: u64, bytes: &[u8]) -> bool {
        if self.closed {
            return true;
        }
        let fits = self.pending.len().saturating_add(bytes.len()) <= CREDIT.saturating_add(crate::frame::MAX_DATA);
        fits && self.receiver.data(offset, bytes).is_ok() && {
            self.pending.extend(bytes);
            true
        }
    }

    /// Takes the end of the stream.
    pub(super) fn end(&mut self, total: u64) -> bool {
        if self.closed {
            return true;
        }
        let sound = self.receiver.end(total).is_ok();
        if sound && self.terminal {
            self.pending.push_back(END_OF_INPUT);
        }
        sound
    }

    /// Writes what the process takes.
    pub(super) fn push(&mut self) {
        let Some(fd) = &self.fd else { return };
        let (front, _) = self.pending.as_slices();
        if !front.is_empty() {
            match rustix::io::write(fd, front) {
                Ok(count) => {
                    self.pending.drain(..count);
                    let count = u64::try_from(count).unwrap_or(u64::MAX);
                    // The control-D that ends a terminal's input is not a byte of the stream.
                    self.written = self.written.saturating_add(count).min(self.receiver.have());
                }
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(_) => return self.close(),
            }
        }
        if self.pending.is_empty() && self.receiver.ended() {
            self.fd = None;
        }
    }

    /// Everything was written and the end announced, and the process's pipe is closed.
    pub(super) fn complete(&self) -> bool {
        self.receiver.ended() && self.fd.is_none() && self.pending.is_empty()
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The process will read no more.
    pub(super) fn close(&mut self) {
        if !self.complete() {
            self.closed = true;
        }
        self.fd = None;
        self.pending.clear();
    }
}
