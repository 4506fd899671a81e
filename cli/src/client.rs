//! The client's side of a command: standard streams and signals over a supervisor's connection.
//!
//! The main thread takes frames and writes output. One thread reads standard input, as far as there is
//! credit; one takes signals. Both send frames under one lock: the supervisor always reads, so it is never
//! held for long.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::stdio::{stderr, stdin, stdout};

use crate::frame::{Exit, Frame, FrameError, STDIN_WINDOW};
use crate::signals::{self, Reaction, Stance};
use crate::terminal;

/// Exit status of a client whose output nobody reads: as if SIGPIPE had ended it.
const BROKEN_PIPE: u8 = 141;
/// Bytes that are read from standard input at once.
const CHUNK: usize = 32 << 10;

/// Why a connection did not come to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// Frames.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The supervisor is gone, without a last frame.
    #[error("its supervisor ended unexpectedly")]
    Lost,
    /// What comes before the command.
    #[error("{0}")]
    Prepare(String),
    /// A guest that keeps a copy busy.
    #[error("the guest goes on talking, and of nothing that was asked")]
    Talks,
    /// A guest that keeps it waiting.
    #[error("the guest does not answer; try again, or end the run (bulkhead rm -f)")]
    Silent,
    /// The user's output.
    #[error("cannot write standard {0}: {1}")]
    Output(&'static str, io::Error),
    /// Signals, threads, the terminal.
    #[error("{0}: {1}")]
    System(&'static str, io::Error),
}

/// How a client takes part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mode {
    /// Standard input is passed on.
    pub(crate) stdin: bool,
    /// The command has a terminal.
    pub(crate) tty: bool,
}

/// What the client's threads share.
struct Shared {
    connection: Mutex<UnixStream>,
    stance: Mutex<Stance>,
    credit: Mutex<usize>,
    more_credit: Condvar,
}

impl Shared {
    /// Sends a frame. A supervisor that is gone is noticed where frames are read.
    fn send(&self, frame: &Frame) {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = frame.write(&mut *connection);
    }
}

/// Takes part until the command's end. Returns what the supervisor says of it.
/// `prepare` is called when the guest has booted, if the command was to wait for that.
pub(crate) fn attach(
    connection: &UnixStream,
    mode: Mode,
    prepare: &mut dyn FnMut() -> Result<(), String>,
) -> Result<Exit, ClientError> {
    let system = |what| move |error| ClientError::System(what, error);
    let shared = Arc::new(Shared {
        connection: Mutex::new(connection.try_clone().map_err(system("connection"))?),
        stance: Mutex::default(),
        credit: Mutex::new(STDIN_WINDOW),
        more_credit: Condvar::new(),
    });
    let mut caught = signals::catch().map_err(system("signals"))?;
    let theirs = Arc::clone(&shared);
    let on_signal = move || {
        for signal in caught.forever() {
            let reaction = theirs.stance.lock().unwrap_or_else(PoisonError::into_inner).react(signal);
            match reaction {
                Some(Reaction::Resize) if mode.tty => theirs.send(&Frame::Resize(terminal::size())),
                Some(Reaction::Forward(number)) => theirs.send(&Frame::Signal(number)),
                Some(Reaction::End(code)) => terminal::exit(code),
                _ => {}
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(on_signal).map_err(system("thread"))?;

    let mut from = connection;
    loop {
        match Frame::read(&mut from)?.ok_or(ClientError::Lost)? {
            Frame::Ready => {
                prepare().map_err(ClientError::Prepare)?;
                shared.send(&Frame::Go);
            }
            Frame::Started => {
                let raw = mode.tty && mode.stdin;
                if raw {
                    terminal::make_raw().map_err(system("terminal"))?;
                }
                {
                    let mut stance = shared.stance.lock().unwrap_or_else(PoisonError::into_inner);
                    stance.started = true;
                    stance.raw = raw;
                }
                if mode.tty {
                    // It may have changed while the guest booted.
                    shared.send(&Frame::Resize(terminal::size()));
                }
                if mode.stdin {
                    let theirs = Arc::clone(&shared);
                    let pump = move || pump_stdin(&theirs);
                    std::thread::Builder::new().name("stdin".into()).spawn(pump).map_err(system("thread"))?;
                }
            }
            Frame::Stdout(bytes) => put(stdout(), "output", &bytes)?,
            Frame::Stderr(bytes) => put(stderr(), "error", &bytes)?,
            Frame::StdinRoom(bytes) => {
                let mut credit = shared.credit.lock().unwrap_or_else(PoisonError::into_inner);
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                *credit = credit.saturating_add(bytes).min(STDIN_WINDOW);
                shared.more_credit.notify_one();
            }
            Frame::Exit(exit) => return Ok(exit),
            other => return Err(unexpected(&other)),
        }
    }
}

/// A frame that does not belong here.
pub(crate) fn unexpected(frame: &Frame) -> ClientError {
    let text = format!("{frame:?}").chars().take(40).collect::<String>();
    ClientError::System("connection", io::Error::other(format!("unexpected frame {text}")))
}

/// Passes standard input on, as far as there is credit.
fn pump_stdin(shared: &Shared) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let allowed = {
            let credit = shared.credit.lock().unwrap_or_else(PoisonError::into_inner);
            let mut credit =
                shared.more_credit.wait_while(credit, |credit| *credit == 0).unwrap_or_else(PoisonError::into_inner);
            let allowed = CHUNK.min(*credit);
            *credit -= allowed;
            allowed
        };
        let n = match read_stdin(buffer.get_mut(..allowed).unwrap_or_default()) {
            Ok(0) | Err(_) => break,
            Ok(n) => n,
        };
        *shared.credit.lock().unwrap_or_else(PoisonError::into_inner) += allowed.saturating_sub(n);
        shared.send(&Frame::Stdin(buffer.get(..n).unwrap_or_default().to_vec()));
    }
    shared.send(&Frame::StdinEof);
}

/// One read of standard input, which may be set to non-blocking by whoever shares it.
fn read_stdin(buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::io::read(stdin(), &mut *buffer) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_for(stdin(), PollFlags::IN)?,
            other => return Ok(other?),
        }
    }
}

/// Writes all of `bytes`. When nobody reads our output any more, the client ends quietly.
fn put(to: BorrowedFd<'_>, name: &'static str, mut bytes: &[u8]) -> Result<(), ClientError> {
    let failed = |error: io::Error| ClientError::Output(name, error);
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_for(to, PollFlags::OUT).map_err(failed)?,
            Err(Errno::PIPE) => terminal::exit(BROKEN_PIPE),
            Err(error) => return Err(failed(error.into())),
        }
    }
    Ok(())
}

fn wait_for(descriptor: BorrowedFd<'_>, what: PollFlags) -> io::Result<()> {
    match poll(&mut [PollFd::new(&descriptor, what)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
