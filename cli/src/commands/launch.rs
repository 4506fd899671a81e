//! A run's supervisor is started, and its client takes part until the run's end.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use guest::message::printable;
use jailer::launch::{self, Lifetime};
use serde::Serialize;

use super::Format;
use super::scope::{self, Start};
use crate::client::{ClientError, Mode, attach};
use crate::files::copy::{Guest, Inwards};
use crate::files::pack::Owner;
use crate::frame::{Exit, Frame, Request};
use crate::spec::{Artifacts, Machine, Phase, Spec};
use crate::store::{RunDirectory, Store};
use crate::{say, terminal};

/// Most bytes of a dead supervisor's words.
const MAX_WORDS: u64 = 4096;

/// What came of a run.
#[derive(Debug, Default, Serialize)]
pub(super) struct Outcome {
    pub(super) id: Option<String>,
    pub(super) name: Option<String>,
    pub(super) exit_code: u8,
    pub(super) reason: Option<String>,
    pub(super) error: Option<String>,
    pub(super) notes: Vec<String>,
}

impl Outcome {
    /// Tells the user, and gives the exit status.
    pub(super) fn tell(&self, format: Format, quiet: bool) -> Result<u8, String> {
        terminal::restore();
        match format {
            Format::Json => {
                let text = serde_json::to_string(self).map_err(|error| error.to_string())?;
                // As the last line: what the command itself wrote there comes before.
                let _ = writeln!(io::stderr(), "{text}");
            }
            Format::Table => {
                self.error.iter().chain(self.notes.iter().filter(|_| !quiet)).for_each(|text| say(text));
            }
        }
        Ok(self.exit_code)
    }
}

/// Starts the supervisor of a run whose lock is held, and takes part until the run's end. With `cold` its machine boots,
/// also where one was saved.
pub(super) fn take_part(
    store: &Store,
    directory: &RunDirectory,
    spec: &Spec,
    lock: File,
    cold: bool,
    outcome: &mut Outcome,
) -> Result<Exit, String> {
    outcome.id = Some(spec.id.clone());
    let (size, hold) = (spec.process.tty.then(terminal::size), !spec.inputs.is_empty());
    let launched = launch(directory, spec, Request::Primary { size, hold, cold }, &lock);
    // From here on the supervisor's copy of the lock is the only one.
    drop(lock);
    let (connection, mut log) = match launched {
        Ok(launched) => launched,
        Err(error) => {
            if directory.state().is_ok_and(|state| state.state == Phase::Starting) {
                // It never ran: what remains of it says nothing to anyone.
                let _ = directory.remove();
            }
            return Err(format!("cannot start run {}: {error}", spec.id));
        }
    };
    let mode = Mode { stdin: spec.process.stdin, tty: spec.process.tty };
    let notes = &mut outcome.notes;
    let exit = attach(&connection, mode, &mut || copy_inputs(directory, spec, notes));
    terminal::restore();
    if let Some(artifacts) = spec.artifacts.as_ref().filter(|artifacts| artifacts.own) {
        // Only if it is empty.
        let _ = std::fs::remove_dir(&artifacts.directory);
    }
    match exit {
        Ok(exit) => {
            (outcome.exit_code, outcome.error, outcome.reason) = (exit.code, exit.error.clone(), exit.reason.clone());
            outcome.notes.extend(exit.notes.clone());
            Ok(exit)
        }
        Err(error) => {
            // The supervisor takes a closed connection for the end of the run.
            drop(connection);
            let words =
                if matches!(error, ClientError::Lost | ClientError::Frame(_)) { last_words(&mut log) } else { None };
            clean_up(store, directory);
            match words {
                Some(words) => Err(format!("run {}: {error}; it said: {words}", spec.id)),
                None => Err(format!("run {}: {error}", spec.id)),
            }
        }
    }
}

/// Starts the supervisor of a run that is one of several, and shows what it prints, until its end.
pub(super) fn watch(
    store: &Store,
    directory: &RunDirectory,
    spec: &Spec,
    lock: File,
    cold: bool,
) -> Result<Exit, String> {
    let failed = |error: &dyn std::fmt::Display| format!("run {}: {error}", spec.id);
    let hold = !spec.inputs.is_empty();
    let launched = launch(directory, spec, Request::Primary { size: None, hold, cold }, &lock);
    drop(lock);
    let (connection, _log) = launched.map_err(|error| {
        let _ = directory.remove();
        failed(&error)
    })?;
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let ended = loop {
        match Frame::read(&mut &connection) {
            Ok(Some(Frame::Stdout(bytes))) => lines(&spec.id, &mut out, &bytes, &mut io::stdout()),
            Ok(Some(Frame::Stderr(bytes))) => lines(&spec.id, &mut err, &bytes, &mut io::stderr()),
            Ok(Some(Frame::Exit(exit))) => break Ok(exit),
            // Of several, none has the client's input. A supervisor that is gone is noticed where frames are read.
            Ok(Some(Frame::Started)) if spec.process.stdin => drop(Frame::StdinEof.write(&mut &connection)),
            Ok(Some(_)) => {}
            Ok(None) => break Err(failed(&ClientError::Lost)),
            Err(error) => break Err(failed(&error)),
        }
    };
    for (rest, to) in [(out, &mut io::stdout() as &mut dyn Write), (err, &mut io::stderr())] {
        if !rest.is_empty() {
            lines(&spec.id, &mut { rest }, b"\n", to);
        }
    }
    if ended.is_err() {
        drop(connection);
        clean_up(store, directory);
    }
    ended
}

/// Starts a run, has somebody look at it when its guest has booted, and ends it. Its command is never started.
pub(super) fn look_at<T>(
    store: &Store,
    directory: &RunDirectory,
    spec: &Spec,
    lock: File,
    look: impl FnOnce() -> Result<T, String>,
) -> Result<T, String> {
    let launched = launch(directory, spec, Request::Primary { size: None, hold: true, cold: false }, &lock);
    drop(lock);
    let (connection, mut log) = launched.inspect_err(|_| drop(directory.remove()))?;
    let booted = loop {
        match Frame::read(&mut &connection) {
            Ok(Some(Frame::Ready)) => break Ok(()),
            Ok(Some(Frame::Exit(exit))) => {
                break Err(exit.error.unwrap_or_else(|| "it ended before its guest had booted".to_owned()));
            }
            Ok(Some(_)) => {}
            Ok(None) => break Err(last_words(&mut log).unwrap_or_else(|| ClientError::Lost.to_string())),
            Err(error) => break Err(error.to_string()),
        }
    };
    let seen = booted.and_then(|()| look());
    // Its supervisor takes that for the end of the run.
    drop(connection);
    clean_up(store, directory);
    seen
}

/// Longest part of a line that is held until the rest comes.
const MAX_LINE: usize = 64 << 10;

/// Prints whole lines, each with the run's id before it, and keeps what follows the last one.
fn lines(id: &str, held: &mut Vec<u8>, bytes: &[u8], to: &mut dyn Write) {
    held.extend_from_slice(bytes);
    let mut text = Vec::new();
    while let Some(end) = held.iter().position(|byte| *byte == b'\n').or(held.get(MAX_LINE).map(|_| MAX_LINE)) {
        let rest = held.split_off(end.saturating_add(1).min(held.len()));
        let line = std::mem::replace(held, rest);
        text.extend_from_slice(id.as_bytes());
        text.extend_from_slice(b" | ");
        text.extend_from_slice(&line);
    }
    // Output that nobody reads is no error.
    let _ = to.write_all(&text).and_then(|()| to.flush());
}

/// Copies the inputs in, as files of the user who the command runs as.
fn copy_inputs(directory: &RunDirectory, spec: &Spec, notes: &mut Vec<String>) -> Result<(), String> {
    let dial = || directory.dial().map_err(|error| error.to_string());
    let guest = Guest { dial: &dial };
    let owner = match &spec.process.user {
        Some(_) => guest.stat("/", false, Some("")).map(|user| Owner::Numbers(user.uid, user.gid))?,
        None => Owner::Numbers(0, 0),
    };
    for input in &spec.inputs {
        let source = input.source.to_str().ok_or_else(|| format!("--input {}: not UTF-8", input.source.display()))?;
        let workdir = format!("{}/", spec.process.workdir.as_deref().unwrap_or("/").trim_end_matches('/'));
        // Without a destination it goes into the working directory under its own name.
        let (destination, into) = match input.destination.as_str() {
            "" => (workdir.as_str(), true),
            destination => (destination, false),
        };
        let how = Inwards { owner, follow: false, make_parents: true, into };
        let packed = guest.copy_in(source, destination, how).map_err(|error| format!("--input: {error}"))?;
        notes.extend(packed.left_out.into_iter().map(|note| format!("--input: {note}")));
    }
    Ok(())
}

/// Starts the run's supervisor, which outlives us, with our connection to it. Its last words, if it dies, are in the file.
fn launch(directory: &RunDirectory, spec: &Spec, request: Request, lock: &File) -> Result<(UnixStream, File), String> {
    let text = |error: io::Error| error.to_string();
    let artifacts = spec.artifacts.as_ref().map(open_artifacts).transpose()?;
    let (connection, theirs) = UnixStream::pair().map_err(text)?;
    Frame::Request(request).write(&mut &connection).map_err(|error| error.to_string())?;
    let mut descriptors = vec![theirs.as_fd(), lock.as_fd()];
    descriptors.extend(artifacts.as_ref().map(AsFd::as_fd));
    let log = directory.path().join("supervisor.log");
    let log =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(log).map_err(text)?;
    let started = start_supervisor(directory, &spec.machine, &descriptors, log.try_clone().map_err(text)?);
    if let (Err(_), Some(artifacts)) = (&started, spec.artifacts.as_ref().filter(|artifacts| artifacts.own)) {
        let _ = std::fs::remove_dir(&artifacts.directory);
    }
    started.map_err(text)?;
    Ok((connection, log))
}

/// Opens the directory that artifacts go to, and makes it.
fn open_artifacts(artifacts: &Artifacts) -> Result<OwnedFd, String> {
    let path = &artifacts.directory;
    let failed = |error: io::Error| format!("--artifact-dir {}: {error}", path.display());
    match std::fs::create_dir(path) {
        Err(error) if artifacts.own || error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    File::open(path).map(OwnedFd::from).map_err(failed)
}

/// What a supervisor that died wrote before.
fn last_words(log: &mut File) -> Option<String> {
    log.rewind().ok()?;
    let mut text = Vec::new();
    log.take(MAX_WORDS).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text).lines().map(printable).collect::<Vec<_>>().join("\n  ");
    Some(text).filter(|text| !text.is_empty())
}

fn start_supervisor(
    directory: &RunDirectory,
    machine: &Machine,
    descriptors: &[BorrowedFd<'_>],
    log: File,
) -> io::Result<()> {
    let own = Path::new("/proc/self/exe").canonicalize()?;
    let Start { program, mut arguments, environment } = scope::supervisor(&own, directory.path(), machine);
    if descriptors.len() > 2 {
        arguments.push("--artifacts".into());
    }
    let arguments: Vec<&OsStr> = arguments.iter().map(OsString::as_os_str).collect();
    // Nothing is written to its log but the last words of a supervisor that panics.
    launch::start(&program, &arguments, &environment, descriptors, log, Lifetime::Own)?;
    Ok(())
}

/// Waits for the end of a supervisor that is dead or on its way, and removes what it left. Its connection ends before its
/// lock does. What cannot be removed now is left to the next command.
fn clean_up(store: &Store, directory: &RunDirectory) {
    for _ in 0..500 {
        if !directory.is_alive() {
            let _ = store.sweep();
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_supervisor_is_quoted_and_cannot_drive_a_terminal() {
        let mut log = tempfile::tempfile().unwrap();
        assert_eq!(last_words(&mut log), None);
        log.write_all(b"thread 'main' panicked at x:1:\n\x1b[2Jwhy\n").unwrap();
        assert_eq!(last_words(&mut log).unwrap(), "thread 'main' panicked at x:1:\n  \u{fffd}[2Jwhy");
        log.write_all(&vec![b'x'; 1 << 20]).unwrap();
        assert!(last_words(&mut log).unwrap().len() < 2 * 4096);
    }
}
