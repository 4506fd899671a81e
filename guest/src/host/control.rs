//! The control connection: requests, replies and exit records, kept alive by one thread.
//!
//! Every request that has no reply yet is sent again on a new connection; the agent takes repeats without harm.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use super::{
    AgentError, Dial, Welcome,
    link::{Backoff, Incoming, Link},
};
use crate::{
    frame::{self, MAX_REQUEST},
    message::{
        About, Action, Epoch, ExitRecord, FromAgent, Opening, Refusal, RefusalKind, Request, Stream, VERSIONS,
        printable,
    },
};
use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    fmt,
    io::Write,
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant, SystemTime},
};

/// Between two attempts to reach an agent that is still booting.
const FIRST_RETRY: Duration = Duration::from_millis(100);

/// The handle; dropping it ends the thread.
pub(super) struct Control(Arc<Inner>);

struct Inner {
    dial: Arc<dyn Dial>,
    version: u32,
    state: Mutex<State>,
    changed: Condvar,
    /// The connection's writing half. Held while writing, which ends by the link's write timeout at the latest.
    writer: Mutex<Option<UnixStream>>,
}

#[derive(Default)]
struct State {
    /// Why there will be no further connection.
    over: Option<Over>,
    next_id: u64,
    requests: BTreeMap<u64, Pending>,
    /// Execs that a record is awaited for, and those that came.
    records: HashMap<String, Option<ExitRecord>>,
}

#[derive(Debug, Clone)]
enum Over {
    Gone,
    Broken(String),
}

struct Pending {
    frame: Vec<u8>,
    /// Whether a caller waits for the answer.
    awaited: bool,
    /// `Some(None)`: it was done.
    answer: Option<Option<Refusal>>,
}

impl Control {
    pub(super) fn connect(dial: Arc<dyn Dial>, deadline: Instant) -> Result<(Arc<Control>, About), AgentError> {
        let (link, about) = loop {
            match greet(&*dial, deadline) {
                Ok(greeted) => break greeted,
                Err(error @ (AgentError::Dial(_) | AgentError::Connection(_) | AgentError::Late(_))) => {
                    if deadline.saturating_duration_since(Instant::now()) <= FIRST_RETRY {
                        return Err(AgentError::Late(error.to_string()));
                    }
                    thread::sleep(FIRST_RETRY);
                }
                Err(error) => return Err(error),
            }
        };
        let inner = Arc::new(Inner {
            dial,
            version: about.version,
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
            writer: Mutex::new(None),
        });
        let control = Arc::new(Control(Arc::clone(&inner)));
        inner.adopt(&link)?;
        thread::Builder::new()
            .name("agent-control".into())
            .spawn(move || inner.run(link))
            .map_err(AgentError::Thread)?;
        Ok((control, about))
    }

    pub(super) fn dial(&self) -> &dyn Dial {
        &*self.0.dial
    }

    pub(super) fn opening(&self, exec: &str, stream: Stream, have: u64) -> Opening {
        Opening::Stream { version: self.0.version, exec: exec.to_owned(), stream, have }
    }

    /// Sends a request and waits for its answer, over as many connections as it takes.
    pub(super) fn call(&self, action: Action) -> Result<(), AgentError> {
        self.call_until(action, None)
    }

    /// The same, for an answer that must come in time. One that does not may have been acted upon.
    pub(super) fn call_within(&self, action: Action, patience: Duration) -> Result<(), AgentError> {
        self.call_until(action, Instant::now().checked_add(patience))
    }

    fn call_until(&self, action: Action, deadline: Option<Instant>) -> Result<(), AgentError> {
        let id = self.0.submit(action, true)?;
        let mut state = locked(&self.0.state);
        loop {
            if state.requests.get(&id).is_some_and(|pending| pending.answer.is_some()) {
                return match state.requests.remove(&id).and_then(|pending| pending.answer).flatten() {
                    Some(refusal) => Err(AgentError::refused(&refusal)),
                    None => Ok(()),
                };
            }
            if let Some(over) = &state.over {
                let error = over.error();
                state.requests.remove(&id);
                return Err(error);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                state.requests.remove(&id);
                return Err(AgentError::Late("it was asked, and does not answer".into()));
            }
            state = match left {
                Some(left) => {
                    let waited = self.0.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.0.wait(state),
            };
        }
    }

    /// A record of this exec will be kept when it comes. There is one handle for each.
    pub(super) fn expect_record(&self, exec: &str) -> Result<(), AgentError> {
        match locked(&self.0.state).records.entry(exec.to_owned()) {
            Entry::Occupied(_) => {
                let message = format!("there is a handle of exec {exec:?} already");
                Err(AgentError::Refused { kind: RefusalKind::IdInUse, message })
            }
            Entry::Vacant(slot) => {
                slot.insert(None);
                Ok(())
            }
        }
    }

    pub(super) fn drop_record(&self, exec: &str) {
        locked(&self.0.state).records.remove(exec);
    }

    /// Waits for an exec's record.
    pub(super) fn record(&self, exec: &str) -> Result<ExitRecord, AgentError> {
        let mut state = locked(&self.0.state);
        loop {
            if let Some(Some(record)) = state.records.get(exec) {
                return Ok(record.clone());
            }
            if let Some(over) = &state.over {
                return Err(over.error());
            }
            state = self.0.wait(state);
        }
    }

    /// Drops the record and tells the agent that it may forget the exec. Nobody waits for the answer.
    pub(super) fn forget(&self, exec: &str) {
        self.drop_record(exec);
        let _ = self.0.submit(Action::Release { exec: exec.to_owned() }, false);
    }

    /// Whether a new connection may mend this. The guest's breaches of protocol are final: a cut connection looks
    /// different.
    pub(super) fn worth_retrying(&self, error: &AgentError) -> bool {
        let passing = match error {
            AgentError::Dial(_) | AgentError::Connection(_) | AgentError::Late(_) => true,
            AgentError::Refused { kind, .. } => *kind == RefusalKind::TooMany,
            _ => false,
        };
        passing && locked(&self.0.state).over.is_none()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.0.end(Over::Gone);
        self.0.hang_up();
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("version", &self.0.version).finish_non_exhaustive()
    }
}

impl Inner {
    fn submit(&self, action: Action, awaited: bool) -> Result<u64, AgentError> {
        let mut state = locked(&self.state);
        if let Some(over) = &state.over {
            return Err(over.error());
        }
        let id = state.next_id;
        state.next_id = id.wrapping_add(1);
        let mut frame = Vec::new();
        frame::put_json(&mut frame, &Request { id, action }, MAX_REQUEST).map_err(AgentError::TooLong)?;
        state.requests.insert(id, Pending { frame: frame.clone(), awaited, answer: None });
        drop(state);
        // A failure here is the connection's, and the request goes out again on the next one.
        self.write(&frame);
        Ok(id)
    }

    fn write(&self, frame: &[u8]) {
        let writer = locked(&self.writer);
        if let Some(mut stream) = writer.as_ref()
            && stream.write_all(frame).is_err()
        {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn hang_up(&self) {
        if let Some(stream) = locked(&self.writer).take() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn end(&self, over: Over) {
        locked(&self.state).over.get_or_insert(over);
        self.changed.notify_all();
    }

    fn is_over(&self) -> bool {
        locked(&self.state).over.is_some()
    }

    /// Makes a connection the one that requests go to, and sends those that have no answer. The order matters: what
    /// is submitted in between goes out twice, never not at all.
    fn adopt(&self, link: &Link) -> Result<(), AgentError> {
        let stream = link.stream().try_clone().map_err(AgentError::Connection)?;
        *locked(&self.writer) = Some(stream);
        let frames: Vec<_> =
            locked(&self.state).requests.values().filter(|p| p.answer.is_none()).map(|p| p.frame.clone()).collect();
        for frame in frames {
            self.write(&frame);
        }
        Ok(())
    }

    /// The thread: reads, and connects again, until the machine is gone or the handle is.
    fn run(&self, link: Link) {
        let mut backoff = Backoff::new();
        let mut next = Some(link);
        while !self.is_over() {
            let outcome = match next.take() {
                Some(link) => self.read(link, &mut backoff),
                None => self.reconnect().map(|link| next = Some(link)),
            };
            match outcome {
                Ok(()) => {}
                Err(AgentError::Dial(_) | AgentError::Connection(_) | AgentError::Late(_)) => backoff.wait(),
                Err(AgentError::Gone) => self.end(Over::Gone),
                Err(error) => self.end(Over::Broken(error.to_string())),
            }
        }
        self.hang_up();
    }

    fn reconnect(&self) -> Result<Link, AgentError> {
        let deadline = Instant::now().checked_add(Duration::from_secs(30)).unwrap_or_else(Instant::now);
        let (link, about) = greet(&*self.dial, deadline)?;
        if about.version != self.version {
            return Err(AgentError::protocol(format_args!("version {} became {}", self.version, about.version)));
        }
        self.adopt(&link)?;
        // A handle that was dropped meanwhile found no connection to end.
        if self.is_over() { Err(AgentError::Gone) } else { Ok(link) }
    }

    fn read(&self, mut link: Link, backoff: &mut Backoff) -> Result<(), AgentError> {
        loop {
            match link.receive()? {
                Incoming::Message(FromAgent::Reply { id, refused }) => {
                    let mut state = locked(&self.state);
                    match state.requests.get_mut(&id) {
                        Some(pending) if pending.awaited => pending.answer = Some(refused),
                        Some(_) => _ = state.requests.remove(&id),
                        None => {}
                    }
                }
                Incoming::Message(FromAgent::Exited { exec, record }) => {
                    if let Some(slot) = locked(&self.state).records.get_mut(&exec) {
                        slot.get_or_insert(cleaned(record));
                    }
                }
                other => return Err(AgentError::protocol(format_args!("{other:?} on the control connection"))),
            }
            backoff.reset();
            self.changed.notify_all();
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Over {
    fn error(&self) -> AgentError {
        match self {
            Over::Gone => AgentError::Gone,
            Over::Broken(why) => AgentError::Protocol(why.clone()),
        }
    }
}

/// Dials, opens, and reads the agent's hello.
fn greet(dial: &dyn Dial, deadline: Instant) -> Result<(Link, About), AgentError> {
    let mut link = Link::open(dial, &Opening::Control { versions: VERSIONS.to_vec() })?;
    match link.first(Some(deadline))? {
        FromAgent::Hello(about) if VERSIONS.contains(&about.version) => {
            let text = |text: &String| printable(text);
            let about = About {
                agent: text(&about.agent),
                kernel: text(&about.kernel),
                capabilities: about.capabilities.iter().map(text).collect(),
                ..about
            };
            Ok((link, about))
        }
        FromAgent::Refused(refusal) => Err(AgentError::refused(&refusal)),
        other => Err(AgentError::protocol(format_args!("{other:?} in answer to the opening"))),
    }
}

pub(super) fn epoch(welcome: &Welcome) -> Epoch {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Epoch {
        number: welcome.epoch,
        wall_clock: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
        entropy: welcome.entropy.iter().map(|byte| format!("{byte:02x}")).collect(),
        hostname: welcome.hostname.clone(),
        renew_identity: welcome.renew_identity,
    }
}

fn cleaned(record: ExitRecord) -> ExitRecord {
    match record {
        ExitRecord::FailedToStart { kind, message } => ExitRecord::FailedToStart { kind, message: printable(&message) },
        other => other,
    }
}

/// A panic elsewhere does not make the state behind a lock wrong: every change to it is one assignment.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
