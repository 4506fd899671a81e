//! The agent's loop: one thread, one poll over everything that can happen. What it waits for is computed anew from
//! the state each time round, so there is no registration that could be forgotten.

use super::{
    connection::{Connection, Role},
    exec::{Exec, Output, State},
    gate::Gate,
    requests::Received,
    workload::{self, Workload},
};
use crate::{
    frame::MAX_FRAME,
    message::{FromAgent, MAX_EXECS, RefusalKind, Stream},
    sys,
    window::WINDOW,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    net::{SocketFlags, accept_with},
    process::{WaitId, WaitIdOptions, waitid},
};
use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

/// Connections at once. More wait in the listener's queue.
const MAX_CONNECTIONS: usize = 256;

/// Pipes that are read for the sake of what commands left behind. Beyond these they break, as pipes do.
const MAX_DRAINS: usize = 256;

/// Output kept for all execs together, above which each stream keeps no more than [`SMALL_WINDOW`]: the agent's
/// memory is bounded by about twice this.
const TOTAL_WINDOW: usize = 8 * 1024 * 1024;
const SMALL_WINDOW: usize = TOTAL_WINDOW / (2 * MAX_EXECS);

/// Between two looks at whether a workload that was asked to end, or to stop, has.
const STOP_TICK: Duration = Duration::from_millis(5);

/// The agent, once its machine is set up.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) listener: OwnedFd,
    pub(super) workload: Workload,
    pub(super) connections: BTreeMap<u64, Connection>,
    pub(super) execs: BTreeMap<String, Exec>,
    /// Syncs under way.
    pub(super) jobs: Vec<Job>,
    /// Pipes of commands that have ended, read and dropped until nothing can write to them any more.
    pub(super) drains: Vec<OwnedFd>,
    /// Cgroups of released execs that still had processes.
    pub(super) leftovers: Vec<PathBuf>,
    pub(super) next_connection: u64,
    /// When the workload's time to end by itself is over.
    pub(super) stopping: Option<Instant>,
    pub(super) gate: Gate,
    pub(super) marks: Marks,
}

#[derive(Debug)]
pub(super) struct Job {
    pub(super) pidfd: OwnedFd,
    pub(super) connection: u64,
    pub(super) request: u64,
}

/// Which marks for tests of the boot were made: see [`sys::mark`].
#[derive(Debug, Default)]
pub(super) struct Marks {
    pub(super) enabled: bool,
    pub(super) greeted: bool,
    pub(super) printed: bool,
}

/// What a descriptor that became ready belongs to.
#[derive(Debug, Clone)]
enum Source {
    Listener,
    Workload,
    Renewal,
    Connection(u64),
    Process(String),
    Stream(String, Stream),
    Job(usize),
    Drain(usize),
}

impl Server {
    pub(super) fn new(listener: OwnedFd, workload: Workload, marks: bool) -> Server {
        Server {
            listener,
            workload,
            connections: BTreeMap::new(),
            execs: BTreeMap::new(),
            jobs: Vec::new(),
            drains: Vec::new(),
            leftovers: Vec::new(),
            next_connection: 0,
            stopping: None,
            gate: Gate::default(),
            marks: Marks { enabled: marks, ..Marks::default() },
        }
    }

    /// Serves until a power-off was asked for and the workload is dead and unmounted.
    pub(super) fn run(&mut self) -> rustix::io::Result<()> {
        let mut buffer = vec![0; MAX_FRAME];
        while !self.stopped() {
            for (source, flags) in self.wait()? {
                self.handle(&source, flags, &mut buffer);
            }
            self.settle();
        }
        if let Some(cgroup) = &self.workload.cgroup {
            cgroup.kill_all();
            let deadline = Instant::now() + Duration::from_secs(2);
            while cgroup.populated() && Instant::now() < deadline {
                std::thread::sleep(STOP_TICK);
            }
        }
        self.workload.unmount();
        Ok(())
    }

    /// Bytes that a stream may keep now.
    fn window(&self) -> usize {
        let held = self.execs.values().fold(0usize, |sum, exec| sum.saturating_add(exec.held()));
        if held > TOTAL_WINDOW { SMALL_WINDOW } else { WINDOW }
    }

    fn wait(&self) -> rustix::io::Result<Vec<(Source, PollFlags)>> {
        let mut sources = Vec::new();
        let mut fds = Vec::new();
        for (fd, flags, source) in self.watched() {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
            sources.push(source);
        }
        let timeout = self.next_deadline().map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
        let ready = sources.into_iter().zip(&fds).map(|(source, fd)| (source, fd.revents()));
        Ok(ready.filter(|(_, flags)| !flags.is_empty()).collect())
    }

    fn watched(&self) -> Vec<(BorrowedFd<'_>, PollFlags, Source)> {
        let mut list = Vec::new();
        if self.connections.len() < MAX_CONNECTIONS {
            list.push((self.listener.as_fd(), PollFlags::IN, Source::Listener));
        }
        if let workload::State::Preparing(report) = &self.workload.state {
            list.push((report.as_fd(), PollFlags::IN, Source::Workload));
        }
        if let Some(renewal) = self.gate.renewal() {
            list.push((renewal.report(), PollFlags::IN, Source::Renewal));
        }
        for (at, job) in self.jobs.iter().enumerate() {
            list.push((job.pidfd.as_fd(), PollFlags::IN, Source::Job(at)));
        }
        for (at, drain) in self.drains.iter().enumerate() {
            list.push((drain.as_fd(), PollFlags::IN, Source::Drain(at)));
        }
        for (id, connection) in &self.connections {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, connection.reads());
            flags.set(PollFlags::OUT, !connection.idle());
            list.push((connection.fd.as_fd(), flags, Source::Connection(*id)));
        }
        let window = self.window();
        for (id, exec) in &self.execs {
            if let State::Running(process) = &exec.state {
                list.push((process.pidfd.as_fd(), PollFlags::IN, Source::Process(id.clone())));
            }
            if let Some((input, fd)) = exec.stdin.as_ref().and_then(|input| Some((input, input.fd.as_ref()?))) {
                // Without anything to write it is watched for its reader's end.
                let flags = if input.has_pending() { PollFlags::OUT } else { PollFlags::empty() };
                list.push((fd.as_fd(), flags, Source::Stream(id.clone(), Stream::Stdin)));
            }
            for (output, stream) in [(&exec.stdout, Stream::Stdout), (&exec.stderr, Stream::Stderr)] {
                if let Some(fd) = output.fd.as_ref().filter(|_| output.wants(window)) {
                    list.push((fd.as_fd(), PollFlags::IN, Source::Stream(id.clone(), stream)));
                }
            }
        }
        list
    }

    fn next_deadline(&self) -> Option<Instant> {
        let window = self.window();
        let outputs = self.execs.values().flat_map(|exec| [&exec.stdout, &exec.stderr]);
        let streams = outputs.filter(|output| output.wants(window)).filter_map(|output| output.until);
        let ticks = self.stopping.is_some() || self.gate.is_freezing();
        streams.chain(ticks.then(|| Instant::now().checked_add(STOP_TICK)).flatten()).min()
    }

    fn handle(&mut self, source: &Source, flags: PollFlags, buffer: &mut [u8]) {
        match source {
            Source::Listener => self.accept(),
            Source::Workload => self.workload.progress(),
            // Looked at when all is settled.
            Source::Renewal => {}
            Source::Connection(id) => self.serve(*id, flags, buffer),
            Source::Process(id) => {
                if let Some(exec) = self.execs.get_mut(id) {
                    exec.collect();
                }
            }
            Source::Stream(id, stream) => self.move_stream(id, *stream, flags, buffer),
            Source::Job(at) => self.finish_job(*at),
            Source::Drain(at) => {
                if self.drains.get(*at).is_some_and(|pipe| matches!(rustix::io::read(pipe, &mut *buffer), Ok(0))) {
                    self.drains.swap_remove(*at);
                }
            }
        }
    }

    fn move_stream(&mut self, id: &str, stream: Stream, flags: PollFlags, buffer: &mut [u8]) {
        let window = self.window();
        let Some(exec) = self.execs.get_mut(id) else { return };
        match stream {
            Stream::Stdout => exec.stdout.pull(buffer, window, exec.released),
            Stream::Stderr => exec.stderr.pull(buffer, window, exec.released),
            Stream::Stdin => {
                if let Some(input) = &mut exec.stdin {
                    if !input.has_pending() && flags.intersects(PollFlags::ERR | PollFlags::HUP) {
                        input.close();
                    }
                    input.push();
                }
            }
        }
    }

    fn accept(&mut self) {
        while self.connections.len() < MAX_CONNECTIONS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let Ok(fd) = accept_with(&self.listener, flags) else { return };
            self.connections.insert(self.next_connection, Connection::new(fd));
            self.next_connection += 1;
        }
    }

    /// Reads from a connection and does what it says. It is out of the map meanwhile.
    fn serve(&mut self, id: u64, flags: PollFlags, buffer: &mut [u8]) {
        let Some(mut connection) = self.connections.remove(&id) else { return };
        if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            if connection.reads() {
                connection.fill(buffer);
            } else if flags.intersects(PollFlags::HUP | PollFlags::ERR) {
                connection.dead = true;
            }
        }
        if matches!(connection.role, Role::Unopened)
            && let Some(opening) = connection.opening()
        {
            self.open(id, &mut connection, opening);
        }
        while !connection.dead && connection.reads() && !matches!(connection.role, Role::Unopened) {
            match Received::next(&mut connection) {
                Ok(Some(received)) => self.obey(id, &mut connection, received),
                Ok(None) => break,
                Err(why) => {
                    connection.refuse(RefusalKind::Malformed, why);
                    break;
                }
            }
        }
        self.connections.insert(id, connection);
    }

    /// Whether a power-off may go on: the time is over, or every process has ended and its last words were taken.
    fn stopped(&self) -> bool {
        let Some(deadline) = self.stopping else { return false };
        let alive = self.workload.cgroup.as_ref().is_some_and(super::cgroup::Cgroup::populated);
        let running = self.execs.values().any(|exec| matches!(exec.state, State::Running(_)));
        let unread = |output: &Output| {
            let connected = output.connection.is_some_and(|id| self.connections.contains_key(&id));
            connected && (output.fd.is_some() || output.sender.held() > 0)
        };
        let unread = self.execs.values().any(|exec| unread(&exec.stdout) || unread(&exec.stderr));
        deadline <= Instant::now() || !(alive || running || unread)
    }

    fn finish_job(&mut self, at: usize) {
        let Some(job) = self.jobs.get(at) else { return };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        if let Ok(Some(_)) = waitid(WaitId::PidFd(job.pidfd.as_fd()), options) {
            let job = self.jobs.swap_remove(at);
            if let Some(connection) = self.connections.get_mut(&job.connection) {
                connection.send(&FromAgent::Reply { id: job.request, refused: None });
            }
        }
    }

    /// Brings everything that follows from what has happened: starts, ends, frames on their way.
    fn settle(&mut self) {
        self.settle_gate();
        let window = self.window();
        let now = Instant::now();
        let mut ended = Vec::new();
        for (id, exec) in &mut self.execs {
            if matches!(exec.state, State::Waiting) {
                exec.start(&self.workload);
            }
            exec.stdout.expire(now, window);
            exec.stderr.expire(now, window);
            self.drains.extend([&mut exec.stdout, &mut exec.stderr].into_iter().filter_map(|o| o.abandoned.take()));
            if let Some(record) = exec.take_announcement() {
                ended.push(FromAgent::Exited { exec: id.clone(), record });
            }
        }
        for connection in self.connections.values_mut() {
            match &mut connection.role {
                Role::Unopened => {}
                Role::Control => ended.iter().for_each(|message| connection.send(message)),
                Role::Output { exec, stream, .. } => match self.execs.get_mut(exec.as_str()) {
                    Some(exec) if !exec.forgotten() => {
                        let output = exec.output(*stream);
                        send_output(connection, output, &mut self.marks);
                    }
                    _ => connection.dead = true,
                },
                Role::Input { exec, acked } => {
                    let input = self.execs.get(exec.as_str()).and_then(|exec| exec.stdin.as_ref());
                    match input {
                        Some(input) => {
                            let before = std::mem::replace(acked, input.written);
                            connection.report(input, before);
                        }
                        None => connection.dead = true,
                    }
                }
            }
            connection.flush();
        }
        self.connections.retain(|_, connection| !connection.dead);
        self.drains.truncate(MAX_DRAINS);
        self.forget();
    }

    /// Drops execs that were released and have ended, and cgroups that have become empty.
    fn forget(&mut self) {
        let gone: Vec<String> = self.execs.iter().filter(|(_, e)| e.forgotten()).map(|(id, _)| id.clone()).collect();
        if gone.is_empty() {
            return;
        }
        for id in gone {
            self.leftovers.extend(self.execs.remove(&id).and_then(|mut exec| exec.take_cgroup()));
        }
        self.leftovers.retain(|path| fs::remove_dir(path).is_err() && path.exists());
    }
}

/// Fills a connection with its stream's next frames, for as long as it takes them.
fn send_output(connection: &mut Connection, output: &Output, marks: &mut Marks) {
    while connection.flush() {
        let Role::Output { cursor, .. } = &mut connection.role else { return };
        if !output.sender.has_next(cursor) {
            return;
        }
        if marks.enabled && !marks.printed && output.sender.held() > 0 {
            marks.printed = true;
            sys::mark(3);
        }
        connection.queue_next(&output.sender);
    }
}
