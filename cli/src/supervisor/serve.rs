//! The run's socket: other commands, and questions.

use std::collections::BTreeSet;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, SyncSender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use guest::host::{Agent, AgentError};
use guest::message::{ExecKind, ExecSpec, Terminal, printable};
use netfilter_control::Policy;
use serde_json::json;
use vmm_control::Stats;

use super::Happening;
use super::begin::Saved;
use super::connection::Connection;
use super::ending::exit_of;
use super::epochs::Epochs;
use super::network::Orders;
use super::saving::Manner;
use crate::environment::merge;
use crate::events::Events;
use crate::frame::{Copy, Exec, Exit, Frame, Request, Size};
use crate::spec::{Process, SetPolicy, Spec};
use crate::store::RunDirectory;

/// Most clients at once.
const MAX_CLIENTS: usize = 64;
/// How long a client may take to say what it wants, and the VMM to answer a question.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the threads that serve clients share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) run: RunDirectory,
    pub(super) spec: Spec,
    pub(super) network: Arc<Orders>,
    pub(super) events: Arc<Events>,
    /// Where the main thread listens.
    main: SyncSender<Happening>,
    pub(super) epochs: Epochs,
    main_exec: OnceLock<Arc<guest::host::Exec>>,
    execs: AtomicU64,
    /// Execs that clients have started, and that have not ended.
    opened: Mutex<BTreeSet<String>>,
    asking: Mutex<Vec<Sender<Stats>>>,
    clients: Mutex<usize>,
    left: Condvar,
}

impl Shared {
    /// For a run whose network filter takes these orders.
    pub(super) fn new(
        run: &RunDirectory,
        spec: Spec,
        network: Arc<Orders>,
        events: Arc<Events>,
        main: SyncSender<Happening>,
        epochs: Epochs,
    ) -> Self {
        Self {
            run: run.clone(),
            spec,
            epochs,
            main_exec: OnceLock::new(),
            network,
            events,
            main,
            execs: AtomicU64::new(0),
            opened: Mutex::default(),
            asking: Mutex::default(),
            clients: Mutex::default(),
            left: Condvar::new(),
        }
    }

    /// Where the main thread listens.
    pub(super) fn main(&self) -> SyncSender<Happening> {
        self.main.clone()
    }

    /// The agent, and the id of another exec.
    pub(super) fn agent_and_id(&self, kind: &str) -> Result<(Agent, String), AgentError> {
        let agent = self.epochs.agent().map_err(|_| AgentError::Gone)?;
        Ok((agent, self.exec_id(kind)))
    }

    /// An id that no exec of this machine has had, in whichever epoch.
    fn exec_id(&self, kind: &str) -> String {
        format!("{kind}-{}-{}", self.epochs.number(), self.execs.fetch_add(1, Ordering::Relaxed))
    }

    /// The run's own command was started, or goes on.
    pub(super) fn set_main_exec(&self, exec: Arc<guest::host::Exec>) {
        // There is one.
        let _ = self.main_exec.set(exec);
    }

    /// The run's own command, once it runs.
    pub(super) fn main_exec(&self) -> Option<&Arc<guest::host::Exec>> {
        self.main_exec.get()
    }

    /// Notes that a client has an exec, until what comes back is dropped.
    pub(super) fn open<'a>(&'a self, exec: &'a str) -> impl Drop + 'a {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner).insert(exec.to_owned());
        Opened(self, exec)
    }

    /// Execs of clients that have not ended.
    pub(super) fn opened(&self) -> Vec<String> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// The VMM answered: so does everyone's question.
    pub(super) fn answer(&self, stats: &Stats) {
        for who in std::mem::take(&mut *self.asking.lock().unwrap_or_else(PoisonError::into_inner)) {
            // Someone who has stopped waiting is no loss.
            let _ = who.send(stats.clone());
        }
    }

    /// Waits a moment for clients to get their last frames.
    pub(super) fn drain(&self, patience: Duration) {
        let clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.left.wait_timeout_while(clients, patience, |clients| *clients > 0);
    }

    fn enter(&self) -> bool {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let room = *clients < MAX_CLIENTS;
        *clients = clients.saturating_add(usize::from(room));
        room
    }

    fn leave(&self) {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        *clients = clients.saturating_sub(1);
        self.left.notify_all();
    }
}

/// An exec that a client has.
struct Opened<'a>(&'a Shared, &'a str);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.opened.lock().unwrap_or_else(PoisonError::into_inner).remove(self.1);
    }
}

/// Serves clients for the rest of the process's life.
pub(super) fn serve(listener: &UnixListener, shared: &Arc<Shared>) {
    loop {
        let Ok((stream, _)) = listener.accept() else {
            // Out of descriptors, for now: what is open will be closed.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        if !shared.enter() {
            // Dropped: the client says that the supervisor closed the connection.
            continue;
        }
        let theirs = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("client".into()).spawn(move || {
            client(stream, &theirs);
            theirs.leave();
        });
        if thread.is_err() {
            shared.leave();
        }
    }
}

/// One client, from its request to its last frame.
fn client(mut stream: UnixStream, shared: &Shared) {
    if stream.set_read_timeout(Some(PATIENCE)).is_err() {
        return;
    }
    let Ok(Some(Frame::Request(request))) = Frame::read(&mut stream) else { return };
    if stream.set_read_timeout(None).is_err() {
        return;
    }
    let Ok(connection) = Connection::start(stream, || ()) else { return };
    match request {
        Request::Exec(exec) => {
            let own = &shared.spec.process;
            run(connection, shared, "exec", |id| another_command(id, exec, own));
        }
        Request::Reach { name, addresses } => {
            run(connection, shared, "reach", |id| ExecSpec::reach(id, name, addresses));
        }
        Request::Copy(copy) => run(connection, shared, "copy", |id| copying(id, copy, &shared.spec.process)),
        Request::Stop { orderly, why } => {
            // The main thread may be ending the run already.
            let _ = shared.main.try_send(Happening::Asked { orderly, why: printable(&why) });
            connection.finish(Frame::Exit(Exit::default()));
        }
        Request::Stats => match stats(shared) {
            Some(stats) => connection.finish(Frame::Stats(Box::new(stats))),
            None => connection.refuse(format!("run {}: its VMM does not answer", shared.spec.id)),
        },
        Request::Pause { save: false, .. } => {
            answer(connection, shared, shared.pause().map(|()| format!("run {}: paused", shared.spec.id)));
        }
        Request::Pause { save: true, name } => {
            let note = |id| format!("run {}: paused, and saved as snapshot {id}", shared.spec.id);
            let saved = shared.save_and_end(name.as_deref(), &|stage| connection.tell(stage));
            answer(connection, shared, saved.map(note));
        }
        Request::Snapshot { name, stop } => {
            let manner = if stop { Manner::Still } else { Manner::Live };
            match shared.save(name.as_deref(), manner, &|stage| connection.tell(stage)) {
                Ok(id) => connection.result(format!("{id}\n").into_bytes()),
                Err(error) => connection.refuse(format!("run {}: {error}", shared.spec.id)),
            }
        }
        Request::Resume => {
            answer(connection, shared, shared.resume().map(|()| format!("run {}: running", shared.spec.id)));
        }
        Request::SetPolicy { policy } => answer(connection, shared, set_policy(shared, &policy)),
        Request::Primary { .. } => connection.refuse(format!("run {}: its command has its client", shared.spec.id)),
    }
}

/// Tells a client what came of its order.
fn answer(connection: Connection, shared: &Shared, outcome: Result<String, String>) {
    match outcome {
        Ok(note) => connection.finish(Frame::Exit(Exit { notes: vec![note], ..Exit::default() })),
        Err(error) => connection.refuse(format!("run {}: {error}", shared.spec.id)),
    }
}

fn run(connection: Connection, shared: &Shared, kind: &str, spec: impl FnOnce(String) -> ExecSpec) {
    let id = &shared.spec.id;
    let agent = match shared.epochs.agent() {
        Ok(agent) => agent,
        Err(why) => return connection.refuse(why.words(id)),
    };
    let spec = spec(shared.exec_id(kind));
    let command = command_of(&spec).to_owned();
    let exec = spec.id.clone();
    let open = shared.open(&exec);
    shared.events.add("exec.started", json!({ "exec": exec, "command": command }));
    let record = agent.exec(spec).and_then(|exec| connection.relay(&Arc::new(exec), (0, 0)));
    let ended = match &record {
        Ok(record) => json!({ "exec": exec, "exit_code": record.status() }),
        Err(error) => json!({ "exec": exec, "error": printable(&error.to_string()) }),
    };
    drop(open);
    shared.events.add("exec.ended", ended);
    match record {
        Ok(record) => connection.finish(Frame::Exit(exit_of(&record, &command))),
        Err(AgentError::Gone) => connection.refuse(format!("run {id}: it ended before the command did")),
        Err(error) => connection.refuse(format!("run {id}: {error}")),
    }
}

fn stats(shared: &Shared) -> Option<Stats> {
    let (sender, answer) = channel();
    shared.asking.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
    shared.epochs.send(&vmm_control::Request::Stats).ok()?;
    answer.recv_timeout(PATIENCE).ok()
}

/// Puts a policy in force, and says what came of it.
fn set_policy(shared: &Shared, policy: &Policy) -> Result<String, String> {
    let mut set = SetPolicy { generation: 0, policy: policy.clone() };
    let record = |generation| {
        set.generation = generation;
        let written = shared.run.write_policy(&set, !shared.spec.ephemeral);
        written.map_err(|error| format!("the policy is in force, but inspect does not show it: {error}"))
    };
    let (generation, revoked) = shared.network.set_policy(policy, record)?;
    let connections = if revoked == 1 { "connection" } else { "connections" };
    Ok(format!("run {}: policy {generation} is in force; {revoked} {connections} reset", shared.spec.id))
}

/// What the run's own command is called in the guest: one that goes on keeps its name, and so do the machine's others.
pub(super) fn command_id(spec: &Spec, epoch: u64, there: Option<&Saved>) -> String {
    match there {
        // In a copy there is none of its own yet. Saved and resumed, there is.
        Some(saved) if spec.another_command && saved.copy => format!("main-{epoch}"),
        Some(saved) => saved.streams.main.clone(),
        None => "main".to_owned(),
    }
}

/// The run's own command, as the agent is told.
pub(super) fn own_command(process: &Process, id: String, size: Option<Size>) -> ExecSpec {
    ExecSpec {
        env: process.env.clone(),
        user: process.user.clone(),
        cwd: process.workdir.clone(),
        stdin: process.stdin,
        terminal: process.tty.then(|| terminal(size, &process.term)),
        ..ExecSpec::command(id, process.command.clone())
    }
}

/// Another command: what it does not say is as in the run's own.
fn another_command(id: String, exec: Exec, own: &Process) -> ExecSpec {
    ExecSpec {
        env: merge(&own.env, &exec.env),
        user: exec.user.or_else(|| own.user.clone()),
        cwd: exec.workdir.or_else(|| own.workdir.clone()),
        stdin: exec.stdin,
        terminal: exec.tty.map(|size| terminal(Some(size), &exec.term)),
        ..ExecSpec::command(id, exec.command)
    }
}

/// Files on their way. As root, unless it says otherwise.
fn copying(id: String, copy: Copy, own: &Process) -> ExecSpec {
    match copy {
        Copy::In { directory } => ExecSpec::tar_extract(id, directory),
        Copy::Out { path } => ExecSpec::tar_create(id, path),
        Copy::Stat { path, follow, user } => {
            let user = user.and_then(|user| if user.is_empty() { own.user.clone() } else { Some(user) });
            ExecSpec { user, ..ExecSpec::stat(id, path, follow) }
        }
    }
}

fn terminal(size: Option<Size>, term: &str) -> Terminal {
    let size = size.unwrap_or(Size { rows: 24, columns: 80 });
    Terminal { rows: size.rows, cols: size.columns, term: term.to_owned() }
}

/// What the command is called.
pub(super) fn command_of(spec: &ExecSpec) -> &str {
    match &spec.kind {
        ExecKind::Command { args } => args.first().map_or("", String::as_str),
        ExecKind::TarExtract { .. } => "copy in",
        ExecKind::TarCreate { .. } | ExecKind::TarGlob { .. } => "copy out",
        ExecKind::Connect { .. } => "port",
        ExecKind::Stat { .. } | ExecKind::Reach { .. } => "look",
        ExecKind::BuildImage { .. } => "build image",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::begin::Streams;

    fn own() -> Process {
        Process {
            command: vec!["sh".into()],
            env: vec!["A=1".into(), "B=1".into()],
            workdir: Some("/work".into()),
            user: Some("1000".into()),
            stdin: false,
            tty: false,
            term: "xterm".into(),
        }
    }

    #[test]
    fn another_command_inherits_what_it_does_not_say() {
        let exec = Exec {
            command: vec!["id".into()],
            env: vec!["B=2".into()],
            workdir: None,
            user: Some("root".into()),
            stdin: true,
            tty: Some(Size { rows: 50, columns: 132 }),
            term: "screen".into(),
        };
        let spec = another_command("exec-0".into(), exec, &own());
        assert_eq!(spec.env, ["A=1", "B=2"]);
        assert_eq!((spec.user.as_deref(), spec.cwd.as_deref()), (Some("root"), Some("/work")));
        assert_eq!(spec.terminal, Some(Terminal { rows: 50, cols: 132, term: "screen".into() }));
        assert!(spec.check().is_ok() && command_of(&spec) == "id");
    }

    #[test]
    fn a_command_of_its_own_begins_once() {
        let spec = |another_command| Spec { another_command, ..crate::spec::test::spec() };
        let machine = crate::supervisor::machine::SavedMachine { state: "/s".into(), memory: vec![] };
        let streams = Streams { main: "main-2".into(), ..Streams::default() };
        let mut saved = Saved { machine, network: None, streams, copy: true };
        assert_eq!(command_id(&spec(true), 3, Some(&saved)), "main-3");
        assert_eq!(command_id(&spec(false), 3, Some(&saved)), "main-2");
        saved.copy = false;
        assert_eq!(command_id(&spec(true), 3, Some(&saved)), "main-2", "it runs there already");
        assert_eq!(command_id(&spec(true), 3, None), "main");
    }

    #[test]
    fn a_terminal_only_if_it_was_asked_for() {
        assert_eq!(own_command(&own(), "main".into(), Some(Size { rows: 1, columns: 1 })).terminal, None);
        let terminal = own_command(&Process { tty: true, ..own() }, "main".into(), None).terminal.unwrap();
        assert_eq!((terminal.rows, terminal.cols), (24, 80));
    }
}
