//! Artifacts: what is copied out of a guest before its machine ends, however the command ended.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use guest::host::{Agent, AgentError};
use guest::message::{ExecSpec, ExitRecord, printable};
use serde_json::json;

use super::ending::Ending;
use super::{Happening, Supervision};
use crate::files;
use crate::files::archive::Budget;
use crate::files::extract::{Destination, Rules, Shape};
use crate::spec::Artifacts;

/// How long it may take. A guest that sends for ever, and never much, ends here.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long it may take when the machine has ended meanwhile: what came before is written.
const LAST_PATIENCE: Duration = Duration::from_secs(2);
/// Most bytes of the guest's words that are kept.
const MAX_WORDS: usize = 1024;
/// SIGKILL.
const KILL: i32 = 9;

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct Collected {
    files: u64,
    bytes: u64,
    /// What the user is told.
    notes: Vec<String>,
    /// Why it is not complete.
    error: Option<String>,
}

impl Supervision<'_> {
    /// Copies the artifacts out. What is wrong with them spoils a success; the notes are for the user.
    pub(super) fn collect(
        &mut self,
        wanted: &Artifacts,
        to: OwnedFd,
        ending: &mut Ending,
        orderly: bool,
    ) -> Vec<String> {
        let Some(agent) = self.agent.clone().filter(|_| orderly && !self.stopped) else {
            let notes = vec!["artifacts: none were copied, since the guest does not run any more".to_owned()];
            return if self.started.is_some() { notes } else { Vec::new() };
        };
        let collected = self.await_collected(agent, wanted.clone(), to);
        self.events.add(
            "artifacts.copied",
            json!({ "files": collected.files, "bytes": collected.bytes, "error": collected.error }),
        );
        let mut notes = collected.notes;
        if let Some(error) = collected.error {
            let error = format!("artifacts: {error}");
            ending.spoil(&self.spec.id, &error);
            if !ending.says(&error) {
                notes.push(error);
            }
        }
        notes
    }

    fn await_collected(&mut self, agent: Agent, wanted: Artifacts, to: OwnedFd) -> Collected {
        let failed = |error: &str| Collected { error: Some(error.to_owned()), ..Collected::default() };
        let (told, command) = (self.shared.main(), self.exec.clone());
        let body = move || {
            // What still writes would change them under our hands. Not on the main thread: the guest may not answer.
            if let Some(command) = command {
                let _ = command.signal(KILL, true);
            }
            let _ = told.send(Happening::Collected(collect(&agent, &wanted, &to)));
        };
        match Builder::new().name("artifacts".into()).spawn(body) {
            Ok(thread) => self.collector = Some(thread),
            Err(error) => return failed(&error.to_string()),
        }
        let mut deadline = Instant::now().checked_add(PATIENCE);
        let mut was_stopped = false;
        loop {
            match self.next(deadline) {
                Some(Happening::Collected(collected)) => return collected,
                Some(Happening::Asked { orderly: false, .. }) => {
                    return failed("the run was ended before they were all copied");
                }
                None if was_stopped => return failed("the machine ended before they were all copied"),
                None => return failed("they were not all copied within ten minutes"),
                Some(_) => {}
            }
            if self.stopped && !was_stopped {
                was_stopped = true;
                deadline = Instant::now().checked_add(LAST_PATIENCE);
            }
        }
    }
}

fn collect(agent: &Agent, wanted: &Artifacts, to: &OwnedFd) -> Collected {
    let mut all = Collected::default();
    let mut budget = Budget::new(wanted.limit);
    let mut destination = Destination::new(to.as_fd(), Rules { umask: files::umask(), owners: false }, false).shared();
    for (number, pattern) in wanted.patterns.iter().enumerate() {
        match one(agent, number, pattern, &mut destination, &mut budget, &mut all) {
            Ok(0) => all.notes.push(format!("artifact {pattern:?}: nothing in the guest matches it")),
            Ok(_) => {}
            Err(error) => {
                all.error = Some(format!("{pattern:?}: {error}"));
                break;
            }
        }
    }
    // Once, after all of them: two patterns may share a directory that nobody may write in.
    if let Err(error) = destination.finish() {
        all.error.get_or_insert(error.to_string());
    }
    all
}

/// One pattern: how many files matched it, those that were left out included.
fn one(
    agent: &Agent,
    number: usize,
    pattern: &str,
    destination: &mut Destination<'_>,
    budget: &mut Budget,
    all: &mut Collected,
) -> Result<u64, String> {
    let text = |error: AgentError| printable(&error.to_string());
    let exec = agent.exec(ExecSpec::tar_glob(format!("artifact-{number}"), pattern)).map_err(text)?;
    let exec = Arc::new(exec);
    let (mut from, mut to) = io::pipe().map_err(|error| error.to_string())?;
    let (output, errors) = (Arc::clone(&exec), Arc::clone(&exec));
    let spawn = |name: &str, body: Box<dyn FnOnce() -> Result<u64, AgentError> + Send>| {
        Builder::new().name(name.to_owned()).spawn(body).map_err(|error| error.to_string())
    };
    let pump = spawn("artifact", Box::new(move || output.copy_stdout(&mut to)))?;
    let words = Arc::new(std::sync::Mutex::new(Words::default()));
    let mut heard = Listener(Arc::clone(&words));
    let listener = spawn("artifact-errors", Box::new(move || errors.copy_stderr(&mut heard)))?;

    let extracted = destination.extract(&mut from, &Shape::Tree, budget);
    // A guest that still sends hears that nobody reads.
    drop(from);
    if extracted.is_err() {
        let _ = exec.signal(KILL, true);
    }
    let record = exec.wait();
    let pumped = pump.join();
    let _ = listener.join();
    let summary = extracted.map_err(|error| error.to_string())?;
    if let Ok(Err(error)) = pumped {
        return Err(text(error));
    }
    match record.map_err(text)? {
        ExitRecord::Exited { code: 0 } => {}
        _ => return Err(words.lock().map(|words| words.text()).unwrap_or_default()),
    }
    all.files = all.files.saturating_add(summary.files);
    all.bytes = all.bytes.saturating_add(summary.bytes);
    let notes = summary.notes();
    let seen = u64::try_from(notes.len()).unwrap_or(u64::MAX);
    all.notes.extend(notes.into_iter().map(|note| format!("artifact {note}")));
    Ok(summary.files.saturating_add(summary.directories).saturating_add(seen))
}

/// What the guest says of its troubles; the beginning.
#[derive(Debug, Default)]
struct Words(Vec<u8>);

impl Words {
    fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.0);
        let text = printable(text.trim_end());
        if text.is_empty() { "the guest's end of the copy was killed".to_owned() } else { text }
    }
}

struct Listener(Arc<std::sync::Mutex<Words>>);

impl Write for Listener {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Ok(mut words) = self.0.lock() {
            let room = MAX_WORDS.saturating_sub(words.0.len());
            words.0.extend(bytes.iter().take(room));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
