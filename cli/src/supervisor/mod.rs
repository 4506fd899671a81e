//! The supervisor: the process that owns one run, from its first instant to its last.
//!
//! It holds the run's lock and is the parent of its VMM and its network filter. The main thread decides; it starts both (which
//! are killed when that thread ends), and waits for what the other threads report. What comes from them
//! and from the guest is hostile: it is bounded, it never blocks the main thread, and the machine is ended
//! without its help.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod artifacts;
pub(crate) mod begin;
pub(crate) mod canary;
mod connection;
mod console;
mod ending;
mod epochs;
pub(crate) mod jail;
mod journal;
pub(crate) mod layers;
mod machine;
mod network;
mod ports;
mod resolvers;
mod room;
mod saving;
mod serve;
mod surroundings;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use guest::host::{Agent, AgentError, Dial, Exec, Frozen, Welcome};
use guest::message::{ExitRecord, printable};
use jailer::launch;
use serde_json::json;
use vmm_control::{ControlError, Event, Stats};

use self::begin::{Beginning, Streams};
use self::connection::Connection;
pub(crate) use self::console::tail;
use self::ending::Ending;
use self::epochs::{Epochs, THAW_PATIENCE};
pub(crate) use self::jail::Ground;
pub(crate) use self::machine::{MachineError, Vmm};
use self::network::Filter;
use self::serve::{Shared, command_id, own_command, serve};
use crate::clock;
use crate::events::{Events, LOG as EVENT_LOG};
use crate::frame::{Frame, Request, Size};
use crate::home::HomeError;
use crate::spec::{Phase, SetPolicy, Spec, State};
use crate::store::RunDirectory;
use crate::upstream;

/// How long we wait for the VMM to say why the machine ended, after its connections broke.
const WHY_PATIENCE: Duration = Duration::from_secs(2);
/// How long a VMM may take to stop when asked.
const STOP_PATIENCE: Duration = Duration::from_secs(5);
/// How long a VMM's process may take to end after its last event.
const REAP_PATIENCE: Duration = Duration::from_secs(1);
/// How long a workload has between SIGTERM and SIGKILL when the guest powers off.
const POWER_OFF_GRACE: Duration = Duration::from_secs(2);
/// How long a machine's process may still be there when its network filter, which ends when the machine has, is known to have
/// ended.
const AFTER_MACHINE: Duration = Duration::from_secs(1);
/// How long an orderly power-off may take, writing back everything included.
const POWER_OFF_PATIENCE: Duration = Duration::from_secs(30);
/// How long a save that is under way may take when its machine has ended.
const SAVER_PATIENCE: Duration = Duration::from_secs(60);
/// How long the client of a run that was saved may take to take the last output.
const STREAMS_PATIENCE: Duration = Duration::from_secs(10);
/// How long other clients have to take their last frames.
const CLIENT_PATIENCE: Duration = Duration::from_secs(1);
/// How much later than the agent's client the main thread gives up on a boot: the former knows more.
const BOOT_SLACK: Duration = Duration::from_millis(500);
/// Happenings that wait for the main thread. A VMM that talks without end waits as well.
const HAPPENINGS: usize = 64;
/// Most notes for the client. Each is bounded by itself.
const MAX_NOTES: usize = 16;
/// Bytes of entropy that a guest gets.
const ENTROPY: usize = 64;

/// What the main thread is told.
#[derive(Debug)]
enum Happening {
    /// From the VMM.
    Vmm(Event),
    /// The VMM closed its control socket, or broke its protocol.
    VmmGone(ControlError),
    /// The guest has booted.
    Booted(Agent),
    /// The guest has not booted.
    NotBooted(AgentError),
    /// The command was started.
    Started(Arc<Exec>),
    /// The command ended, or the machine did before it.
    Ended(Result<ExitRecord, AgentError>),
    /// The client went away.
    ClientGone,
    /// Someone wants the run to end.
    Asked {
        /// Whether in good order, or at once.
        orderly: bool,
        /// Why, for the record.
        why: String,
    },
    /// The network filter has ended.
    NetworkEnded,
    /// The machine was stopped.
    Paused {
        /// Hears when it is written down.
        done: SyncSender<()>,
    },
    /// The machine was saved, and its run's processes are to end.
    Saved {
        /// As which snapshot.
        snapshot: String,
        /// Hears when it is written down.
        done: SyncSender<()>,
    },
    /// The machine goes on.
    Resumed {
        /// In which epoch.
        epoch: u64,
        /// Hears when it is written down.
        done: SyncSender<()>,
    },
    /// The artifacts were copied, or not.
    Collected(artifacts::Collected),
}

/// Owns a run until its end. The process was given the client's connection and the run's lock.
pub(crate) fn supervise(directory: &Path, artifacts: bool) -> Result<(), String> {
    let number = if artifacts { 3 } else { 2 };
    let inherited = launch::inherited(number).map_err(|error| format!("not started by bulkhead run: {error}"))?;
    let mut inherited = inherited.into_iter();
    let (Some(stream), Some(lock)) = (inherited.next(), inherited.next()) else {
        return Err("not started by bulkhead run".to_owned());
    };
    let artifacts = inherited.next();
    // Links in it are the user's, and lead to where the runs are. From here on there are none.
    let run = RunDirectory::at(directory.to_owned()).resolved();
    let run = run.map_err(|error| format!("{}: {error}", directory.display()))?;
    let spec = run.spec().map_err(|error| error.to_string())?;
    let before = run.state().map_err(|error| error.to_string())?;
    let events = Events::open(run.path(), !spec.ephemeral).map_err(|error| format!("{EVENT_LOG}: {error}"))?;
    let events = Arc::new(events);
    surroundings::raise_descriptor_limit().map_err(|error| format!("descriptor limit: {error}"))?;

    let (sender, happenings) = sync_channel(HAPPENINGS);
    surroundings::watch_signals(sender.clone()).map_err(|error| format!("signals: {error}"))?;
    let mut stream = UnixStream::from(stream);
    // The client asked before it started us. If it is gone already, the reader finds out.
    let (size, hold, cold) = match Frame::read(&mut stream) {
        Ok(Some(Frame::Request(Request::Primary { size, hold, cold }))) => (size, hold, cold),
        _ => (None, false, false),
    };
    let told = sender.clone();
    let client = Connection::start(stream, move || drop(told.send(Happening::ClientGone)));
    let client = Arc::new(client.map_err(|error| error.to_string())?);

    let mut notes = Vec::new();
    let (mut command_started, mut epoch) = (None, 1);
    let started = Supervision::start(
        &run,
        &spec,
        sender,
        happenings,
        &client,
        Start {
            size,
            hold,
            cold,
            before: Some(&before).filter(|before| before.saved.is_some() && !cold),
            events: &events,
        },
    );
    let (ending, supervision) = match started {
        Err(error) => (Ending::not_started(&spec.id, error), None),
        Ok(mut supervision) => {
            let (mut ending, orderly) = supervision.until_the_end();
            // One that was saved has not ended: they are copied when it has.
            if let (Some(wanted), Some(to), None) = (&spec.artifacts, artifacts, ending.snapshot()) {
                notes = supervision.collect(wanted, to, &mut ending, orderly);
            }
            supervision.end_machine(orderly);
            supervision.await_saver();
            if ending.snapshot().is_some() {
                supervision.note_streams(ending.snapshot());
            }
            notes.append(&mut supervision.notes);
            (command_started, epoch) = (supervision.started.take(), supervision.epoch);
            (ending, Some(supervision))
        }
    };

    let mut exit = ending.exit(console::tail(&run.path().join("console.log")));
    exit.notes = bounded(notes);
    let mut state = ending.state(command_started, epoch);
    let left = supervision.as_ref().and_then(|supervision| supervision.left).filter(|_| state.saved.is_some());
    state.left_ms = left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
    if before.saved.is_some() && supervision.as_ref().is_none_or(|supervision| supervision.agent.is_none()) {
        // It did not come to go on: it still can.
        state = State { reason: state.reason, ..before };
    }
    let ended = json!({ "state": state.state, "reason": state.reason, "exit_code": state.exit_code });
    events.add("run.ended", ended);
    // The record first, then the lock, then the client: who hears of the end finds it so.
    let recorded = match state.saved {
        Some(_) => run.keep().and_then(|()| run.end(&state)),
        None if spec.ephemeral => run.remove(),
        None => run.end(&state),
    };
    if let Err(error) = recorded {
        exit.error.get_or_insert_with(|| format!("run {}: {error}", spec.id));
    }
    drop(lock);
    if let Some(supervision) = supervision {
        if let Some(who) = &supervision.told_when_saved {
            let _ = who.send(());
        }
        // So that no thread waits for us to hear it.
        drop(supervision.happenings);
        drop(supervision.exec);
        exit.stats = supervision.stats.map(Box::new);
        supervision.shared.drain(CLIENT_PATIENCE);
        // The machine is gone, so this ends when the client has taken what there is, or is gone too.
        let _ = supervision.command.join();
        let _ = supervision.collector.map(JoinHandle::join);
    }
    if let Some(client) = Arc::into_inner(client) {
        client.finish(Frame::Exit(exit));
    }
    Ok(())
}

/// How a run starts, beside its spec.
#[derive(Clone, Copy)]
struct Start<'a> {
    size: Option<Size>,
    hold: bool,
    cold: bool,
    /// How it was when it was saved, if it goes on from there.
    before: Option<&'a State>,
    events: &'a Arc<Events>,
}

/// A run with a VMM.
struct Supervision<'a> {
    run: &'a RunDirectory,
    spec: &'a Spec,
    happenings: Receiver<Happening>,
    vmm: Vmm,
    /// Until it has ended.
    network: Option<Filter>,
    /// What is said of the run's state for the rest of its life.
    lasting: Option<String>,
    shared: Arc<Shared>,
    /// What there is to tell the client beside the end.
    notes: Vec<String>,
    /// The thread that boots the guest, then runs the command.
    command: JoinHandle<()>,
    agent: Option<Agent>,
    /// The thread that copies artifacts out.
    collector: Option<JoinHandle<()>>,
    /// The command, and when it started.
    exec: Option<Arc<Exec>>,
    started: Option<String>,
    /// Whether the command waits for the client's word.
    hold: bool,
    events: Arc<Events>,
    /// Whether the VMM has said that the machine ended.
    stopped: bool,
    stats: Option<Stats>,
    boot_deadline: Option<Instant>,
    /// Whether the machine stands still.
    paused: bool,
    epoch: u64,
    /// Hears when it is written down that the run was saved.
    told_when_saved: Option<SyncSender<()>>,
    /// What the command has of its time, as far as it does not run.
    left: Option<Duration>,
}

impl<'a> Supervision<'a> {
    fn start(
        run: &'a RunDirectory,
        spec: &'a Spec,
        sender: SyncSender<Happening>,
        happenings: Receiver<Happening>,
        client: &Arc<Connection>,
        how: Start<'_>,
    ) -> Result<Self, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let ports = ports::listen(&spec.ports)?;
        let (machine, ground) = (&spec.machine, Ground::find(&spec.machine.jail));
        let beginning = Beginning::of(run, spec, how.cold).map_err(|error| text(&error))?;
        let Beginning { epoch, layers, saved } = beginning;
        let policy = run.policy().map_err(|error| text(&error))?;
        let policy = policy.unwrap_or_else(|| SetPolicy { generation: 1, policy: spec.network.policy.clone() });
        let known = saved.as_ref().and_then(|saved| saved.network.as_deref());
        // The owner's word of today, also for a machine that was saved before it.
        let proxy = upstream::proxy(run.home()).map_err(|error| text(&error))?;
        run.write_proxy(proxy).map_err(|error| text(&error))?;
        let (policy, filter) = ((&policy, proxy), &spec.network.netfilter);
        let starting = network::start(&ground, run.path(), &machine.jail, filter, policy, known);
        let (starting, link) = starting.map_err(|error| text(&error))?;
        let from = saved.as_ref().map(|saved| &saved.machine);
        let vmm = Vmm::start(&ground, run.path(), machine, &layers, from, Some(&link));
        let vmm = vmm.map_err(|error| text(&error))?;
        // The machine's is the only one from here on: who reads at the other end sees it end.
        drop(link);
        let mut network = starting.finish(run.path()).map_err(|error| text(&error))?;
        for (program, unenforced) in [("bulkhead-vmm", vmm.unenforced()), ("bulkhead-netfilter", network.unenforced())]
        {
            for (part, why) in unenforced {
                let missing = json!({ "program": program, "part": part.name(), "why": why });
                how.events.add("jail.unenforced", missing);
            }
        }
        if let Some(proxy) = proxy {
            how.events.add("net.proxied", json!({ "proxy": proxy }));
        }
        let told = sender.clone();
        // Nobody listens once the run has ended.
        network
            .watch(Arc::clone(how.events), move || drop(told.send(Happening::NetworkEnded)))
            .map_err(|error| text(&error))?;
        let listener = run.listen().map_err(|error| error.to_string())?;
        // What follows happens while the guest boots.
        let start_timeout = Duration::from_millis(spec.start_timeout_ms);
        let deadline = Instant::now().checked_add(start_timeout).ok_or("the start timeout is too long")?;
        let told = sender.clone();
        vmm.watch(move |event| {
            // Nobody listens once the run has ended.
            let _ = told.send(match event {
                Ok(event) => Happening::Vmm(event),
                Err(error) => Happening::VmmGone(error),
            });
        })
        .map_err(|error| error.to_string())?;

        let welcome = Welcome {
            epoch,
            // The disk alone is as good as a machine for what must not be there twice.
            renew_identity: spec.from.is_some() && saved.as_ref().is_none_or(|saved| saved.copy),
            entropy: entropy().map_err(|error| format!("getrandom: {error}"))?,
            hostname: spec.hostname().to_owned(),
        };
        let events = Arc::clone(how.events);
        let limit = vmm.memory_limit(machine).map_err(|error| format!("the VMM's cgroup: {error}"))?;
        let epochs = Epochs::new(&vmm, limit, epoch);
        let shared = Shared::new(run, spec.clone(), network.orders(), Arc::clone(&events), sender.clone(), epochs);
        let shared = Arc::new(shared);
        let command = {
            let id = command_id(spec, epoch, saved.as_ref());
            let command = Command { id, streams: saved.map(|saved| saved.streams), hold: how.hold };
            let process = own_command(&spec.process, command.id.clone(), how.size);
            let (dialler, client, shared) = (vmm.dialler(), Arc::clone(client), Arc::clone(&shared));
            let body =
                move || begin_and_run(dialler, &welcome, deadline, process, &client, (&shared, &sender), &command);
            Builder::new().name("command".into()).spawn(body).map_err(|error| format!("thread: {error}"))?
        };
        ports::serve(ports, &shared).map_err(|error| format!("thread: {error}"))?;
        let serving = Arc::clone(&shared);
        Builder::new()
            .name("serve".into())
            .spawn(move || serve(&listener, &serving))
            .map_err(|error| format!("thread: {error}"))?;
        Ok(Self {
            run,
            spec,
            happenings,
            vmm,
            network: Some(network),
            lasting: None,
            shared,
            notes: Vec::new(),
            command,
            agent: None,
            collector: None,
            exec: None,
            started: how.before.and_then(|before| before.started.clone()),
            hold: how.hold,
            events,
            stopped: false,
            stats: None,
            boot_deadline: deadline.checked_add(BOOT_SLACK),
            paused: false,
            epoch,
            told_when_saved: None,
            left: how.before.and_then(|before| before.left_ms).or(spec.timeout_ms).map(Duration::from_millis),
        })
    }

    /// Waits for what ends the run, and says whether it may end in good order.
    fn until_the_end(&mut self) -> (Ending, bool) {
        let mut orderly = true;
        let ending = self.watch(&mut orderly);
        orderly &= ending.is_orderly();
        (ending, orderly)
    }

    fn watch(&mut self, in_good_order: &mut bool) -> Ending {
        let id = self.spec.id.as_str();
        let start_timeout = Duration::from_millis(self.spec.start_timeout_ms);
        let mut deadline = self.boot_deadline;
        let mut started = false;
        // What was left of its time when it was paused.
        let mut left = None;
        loop {
            let Some(happening) = self.next(deadline) else {
                return match self.spec.timeout_ms.filter(|_| started) {
                    Some(timeout) => Ending::timed_out(id, Duration::from_millis(timeout)),
                    None => Ending::late(id, start_timeout, ""),
                };
            };
            let noted = match happening {
                Happening::Vmm(Event::Refused { error }) => return Ending::not_started(id, printable(&error)),
                Happening::Vmm(Event::Stopped { reason, .. }) => {
                    return Ending::machine(id, &reason, self.agent.is_some());
                }
                Happening::VmmGone(error) => return self.vmm_died(&error),
                Happening::Vmm(Event::DiskFull { disk }) => {
                    // Where the state lies there may be no room either. The run waits all the same.
                    let _ = self.note(started, Some(format!("host-disk-full: disk {disk} waits for room")));
                    self.events.add("disk.full", json!({ "disk": disk }));
                    Ok(())
                }
                Happening::Vmm(Event::DiskRoom { disk }) => {
                    self.events.add("disk.room", json!({ "disk": disk }));
                    self.note(started, None)
                }
                // Whoever asked for the others hears of them.
                Happening::Vmm(
                    Event::Running
                    | Event::Stats(_)
                    | Event::Paused
                    | Event::Resumed
                    | Event::Taken(_)
                    | Event::Saved(_)
                    | Event::SaveFailed { .. },
                ) => Ok(()),
                Happening::Paused { done } => {
                    self.paused = true;
                    left = deadline.take().map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    let noted = self.note(started, None);
                    let _ = done.send(());
                    noted
                }
                Happening::Saved { snapshot, done } => {
                    self.told_when_saved = Some(done);
                    let now = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    self.left = left.or(now);
                    return Ending::saved(id, snapshot);
                }
                Happening::Resumed { epoch, done } => {
                    (self.paused, self.epoch) = (false, epoch);
                    deadline = left.take().and_then(|left| Instant::now().checked_add(left));
                    let noted = self.note(started, None);
                    let _ = done.send(());
                    noted
                }
                Happening::Booted(agent) => {
                    self.events.add("run.booted", json!({ "kernel": printable(&agent.about().kernel) }));
                    // What the client does before the command takes its time.
                    deadline = if self.hold { None } else { deadline };
                    self.agent = Some(agent);
                    Ok(())
                }
                Happening::NotBooted(AgentError::Late(detail)) => return Ending::late(id, start_timeout, &detail),
                Happening::NotBooted(AgentError::Gone) | Happening::Ended(Err(AgentError::Gone)) => return self.why(),
                Happening::NotBooted(error) | Happening::Ended(Err(error)) => return Ending::agent(id, &error),
                Happening::Started(exec) => {
                    started = true;
                    self.shared.set_main_exec(Arc::clone(&exec));
                    if let Some(time) = self.spec.snapshot_every_ms.map(Duration::from_millis) {
                        let shared = Arc::clone(&self.shared);
                        let saver = Builder::new().name("saver".into()).spawn(move || shared.save_every(time));
                        if let Err(error) = saver {
                            return Ending::ours(id, format!("thread: {error}"));
                        }
                    }
                    self.exec = Some(exec);
                    self.started.get_or_insert_with(clock::now);
                    self.events.add("run.started", json!({}));
                    deadline = self.left.take().and_then(|left| Instant::now().checked_add(left));
                    self.note(started, None)
                }
                Happening::Ended(Ok(record)) => {
                    return Ending::command(&record, self.spec.process.command.first().map_or("", String::as_str));
                }
                Happening::ClientGone => return Ending::client_gone(),
                Happening::Asked { orderly, why } => {
                    *in_good_order = orderly;
                    return Ending::asked(id, &why);
                }
                Happening::NetworkEnded | Happening::Collected(_) => Ok(()),
            };
            if let Err(error) = noted {
                return Ending::ours(id, error);
            }
        }
    }

    /// The next happening; nothing when the deadline passes first.
    fn next(&mut self, deadline: Option<Instant>) -> Option<Happening> {
        let happening = match deadline {
            None => self.happenings.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(deadline) => self.happenings.recv_timeout(deadline.saturating_duration_since(Instant::now())),
        };
        let happening = match happening {
            Ok(happening) => happening,
            Err(RecvTimeoutError::Timeout) => return None,
            // The threads that report are gone, the VMM's among them.
            Err(RecvTimeoutError::Disconnected) => Happening::VmmGone(ControlError::Closed),
        };
        match &happening {
            Happening::Vmm(Event::Stats(stats)) => self.shared.answer(stats),
            Happening::Vmm(
                event @ (Event::Paused | Event::Resumed | Event::Taken(_) | Event::Saved(_) | Event::SaveFailed { .. }),
            ) => self.shared.epochs.answer(event.clone()),
            Happening::Vmm(Event::Stopped { stats, .. }) => {
                self.stopped = true;
                self.shared.epochs.ended();
                self.stats = Some(stats.clone());
            }
            Happening::Vmm(Event::Refused { .. }) | Happening::VmmGone(_) => {
                self.stopped = true;
                self.shared.epochs.ended();
            }
            // Whatever the run is doing: also while artifacts are copied, or it powers off.
            Happening::NetworkEnded => self.network_ended(),
            _ => {}
        }
        Some(happening)
    }

    /// The agent's connections are gone for good: the VMM says why, or is dead.
    fn why(&mut self) -> Ending {
        let deadline = Instant::now().checked_add(WHY_PATIENCE);
        loop {
            match self.next(deadline) {
                Some(Happening::Vmm(Event::Stopped { reason, .. })) => {
                    return Ending::machine(&self.spec.id, &reason, self.agent.is_some());
                }
                Some(Happening::Vmm(Event::Refused { error })) => {
                    return Ending::not_started(&self.spec.id, printable(&error));
                }
                Some(Happening::VmmGone(error)) => return self.vmm_died(&error),
                Some(_) => {}
                None => return Ending::agent(&self.spec.id, &AgentError::Gone),
            }
        }
    }

    fn vmm_died(&mut self, error: &ControlError) -> Ending {
        let how = self.vmm.reap(REAP_PATIENCE);
        if self.vmm.ran_out_of_memory() {
            return Ending::out_of_memory(&self.spec.id);
        }
        match error {
            // What it said before it died is the only cause that there is to know, and may go with the directory.
            ControlError::Closed => match console::tail(&self.run.path().join("vmm.log")) {
                Some(words) => Ending::vmm_died(&self.spec.id, &format!("{how}; it said: {words}")),
                None => Ending::vmm_died(&self.spec.id, &how),
            },
            broken => Ending::vmm_died(&self.spec.id, &printable(&broken.to_string())),
        }
    }

    /// The filter is gone, and the network with it: nothing else leads out of the machine. The run goes on.
    fn network_ended(&mut self) {
        // It ends after its machine, too, which is then on its way to say so.
        let deadline = Instant::now().checked_add(AFTER_MACHINE);
        while deadline.is_some_and(|deadline| Instant::now() < deadline) {
            if self.stopped || self.vmm.has_ended() {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let Some(mut network) = self.network.take() else { return };
        let how = network.reap();
        let why = match console::last_words(&self.run.path().join("netfilter.log")) {
            Some(words) => format!("{how}; it said: {words}"),
            None => how,
        };
        self.events.add("net.ended", json!({ "why": why }));
        self.notes.push(format!("run {}: its network ended before it did: bulkhead-netfilter: {why}", self.spec.id));
        self.lasting = Some(format!("network-ended: bulkhead-netfilter: {why}"));
        // Where the state lies there may be no room. The event and the note tell of it all the same.
        let _ = self.note(self.started.is_some(), None);
    }

    /// Writes down that the run goes on.
    fn note(&self, started: bool, reason: Option<String>) -> Result<(), HomeError> {
        let state = match (self.paused, started) {
            (true, _) => Phase::Paused,
            (false, true) => Phase::Running,
            (false, false) => Phase::Starting,
        };
        let reason = reason.or_else(|| self.lasting.clone());
        let state = State {
            state,
            reason,
            exit_code: None,
            started: self.started.clone(),
            ended: None,
            epoch: self.epoch,
            saved: None,
            left_ms: None,
        };
        self.run.write_state(&state, !self.spec.ephemeral)
    }

    /// Ends the machine, in whatever way is left, and its VMM. A disk that is kept is written back first.
    fn end_machine(&mut self, orderly: bool) {
        if !self.spec.ephemeral
            && orderly
            && let Some(agent) = self.agent.clone().filter(|_| !self.stopped)
        {
            if self.paused {
                // Its workload stays as it is, and is killed so; what the disk is owed is written.
                self.shared.epochs.let_machine_run();
            }
            // The answer may never come; whether the machine ended is what counts.
            let asked = Builder::new().name("power-off".into()).spawn(move || agent.poweroff(POWER_OFF_GRACE));
            if asked.is_ok() {
                self.await_stop(POWER_OFF_PATIENCE);
            }
        }
        if !self.stopped && self.vmm.ask_to_stop().is_ok() {
            self.await_stop(STOP_PATIENCE);
        }
        self.vmm.reap(if self.stopped { REAP_PATIENCE } else { Duration::ZERO });
        if let Some(counters) = self.network.take().and_then(Filter::end) {
            self.events.add("net.stopped", json!(counters));
        }
    }

    /// Writes down what the client has of the command's output. The machine is gone, so that what was on its way arrives.
    fn note_streams(&self, snapshot: Option<&str>) {
        let deadline = Instant::now().checked_add(STREAMS_PATIENCE);
        while !self.command.is_finished() && deadline.is_some_and(|deadline| Instant::now() < deadline) {
            std::thread::sleep(Duration::from_millis(2));
        }
        // Without it, what the snapshot knows counts: the client may then see again what it saw last.
        let streams = Streams { snapshot: snapshot.map(str::to_owned), ..self.shared.streams() };
        let _ = self.run.write_streams(&streams);
    }

    /// Waits for who is still saving the run, which now ends soon: what it has of the disk is in order then.
    fn await_saver(&mut self) {
        let deadline = Instant::now().checked_add(SAVER_PATIENCE);
        // One that waits for us to end the run hears that we do, or that we do not.
        while self.told_when_saved.is_none()
            && self.shared.epochs.is_busy()
            && deadline.is_some_and(|deadline| Instant::now() < deadline)
        {
            drop(self.next(Instant::now().checked_add(Duration::from_millis(20))));
        }
    }

    fn await_stop(&mut self, patience: Duration) {
        let deadline = Instant::now().checked_add(patience);
        while !self.stopped && self.next(deadline).is_some() {}
    }
}

/// The run's own command.
struct Command {
    /// Its id in the guest.
    id: String,
    /// In a machine that was saved: what ran there.
    streams: Option<Streams>,
    /// Whether it waits for the client's word.
    hold: bool,
}

/// Has the guest boot or go on, runs the command, and reports each step.
fn begin_and_run(
    dialler: Arc<dyn Dial>,
    welcome: &Welcome,
    deadline: Instant,
    process: guest::message::ExecSpec,
    client: &Connection,
    (shared, sender): (&Shared, &SyncSender<Happening>),
    command: &Command,
) {
    // Nobody listens once the run has ended.
    let tell = |happening| drop(sender.send(happening));
    let began = match command.streams {
        None => Agent::connect(dialler, welcome, deadline),
        Some(_) => Frozen::connect(dialler, deadline).and_then(|frozen| frozen.thaw(welcome, THAW_PATIENCE)),
    };
    let agent = match began {
        Ok(agent) => agent,
        Err(error) => return tell(Happening::NotBooted(error)),
    };
    // Before anyone hears of it: who does may ask for something at once.
    shared.epochs.runs(agent.clone());
    tell(Happening::Booted(agent.clone()));
    // A client that goes away instead of giving its word ends the run where that is noticed.
    if command.hold && !client.hold() {
        return;
    }
    for exec in command.streams.iter().flat_map(|streams| &streams.others) {
        // Nobody reads what it prints any more. Dropped, its handle says so; one that is not there is gone already.
        let _ = agent.attach(exec);
    }
    let (exec, from) = match command.streams.as_ref().filter(|streams| streams.main == command.id) {
        Some(streams) => (agent.attach(&command.id), (streams.stdout, streams.stderr)),
        None => (agent.exec(process), (0, 0)),
    };
    tell(Happening::Ended(exec.and_then(|exec| {
        let exec = Arc::new(exec);
        tell(Happening::Started(Arc::clone(&exec)));
        client.relay(&exec, from)
    })));
}

/// As many notes as surely fit in a frame.
fn bounded(mut notes: Vec<String>) -> Vec<String> {
    let dropped = notes.len().saturating_sub(MAX_NOTES);
    notes.truncate(MAX_NOTES);
    notes.extend((dropped > 0).then(|| format!("and {dropped} more notes")));
    notes
}

fn entropy() -> Result<Vec<u8>, rustix::io::Errno> {
    let mut bytes = vec![0; ENTROPY];
    // So few bytes come whole.
    let n = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if n == bytes.len() { Ok(bytes) } else { Err(rustix::io::Errno::AGAIN) }
}
