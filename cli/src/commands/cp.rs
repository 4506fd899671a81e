//! `bulkhead cp`: files between the host and a running run.

use std::io;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU8, Ordering};

use std::time::{Duration, Instant};

use clap::Args;
use rustix::fs::{FileType, fstat};
use rustix::stdio::{stdin, stdout};
use rustix::termios::isatty;

use super::running;
use crate::files::copy::{Guest, Inwards, Outwards};
use crate::files::pack::Owner;
use crate::image::progress::{Counted, Progress};
use crate::units::parse_size;
use crate::{say, signals};

/// A copy that takes less than this says nothing of how far it is.
const QUIET: Duration = Duration::from_secs(1);
/// How long a copy of an archive has to end by itself when a signal says so. It may be held up by whoever is at the other end
/// of the pipe, and there is nothing here to tidy up.
const GRACE: Duration = Duration::from_millis(800);

/// `bulkhead cp`
#[derive(Debug, Args)]
#[command(
    override_usage = "bulkhead cp [OPTIONS] RUN:PATH DST|-\n       bulkhead cp [OPTIONS] SRC|- RUN:PATH",
    after_help = "The rules are docker's. A file goes to DST, or into DST if that is a directory. A directory goes to DST if \
                  there is\nnone yet, else into it; one that ends in /. goes without its own name. - is a tar archive. A \
                  path here with a colon\nin it begins with / or ./ . Links are copied as links; those that lead out of \
                  what is copied, devices and pipes\nare left out on the way out of a run."
)]
pub(crate) struct Cp {
    /// Keep numeric owners; without it, files belong to root in the run and to you here
    #[arg(short, long)]
    archive: bool,
    /// Copy what a link at SRC leads to, not the link
    #[arg(short = 'L', long)]
    follow_link: bool,
    /// Say nothing of what was left out, nor of how far it is
    #[arg(short, long)]
    quiet: bool,
    /// Most bytes that come out of the run [default: what its disk and memory hold]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    limit: Option<u64>,
    /// What to copy: a path here, RUN:PATH, or - for an archive on standard input
    #[arg(value_name = "SRC")]
    source: String,
    /// Where to: a path here, RUN:PATH, or - for an archive on standard output
    #[arg(value_name = "DST", allow_hyphen_values = true)]
    destination: String,
}

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Side<'a> {
    Stream,
    Here(&'a str),
    There { run: &'a str, path: &'a str },
}

/// `bulkhead cp`: returns the exit status.
pub(crate) fn cp(args: &Cp) -> Result<u8, String> {
    let (source, destination) = (side(&args.source), side(&args.destination));
    let run = match (&source, &destination) {
        (Side::There { .. }, Side::There { .. }) => {
            return Err("cp: both sides are in runs; copy to a place here first".to_owned());
        }
        (Side::There { run, .. }, _) | (_, Side::There { run, .. }) => *run,
        _ => return Err("cp: neither side is in a run; write RUN:PATH for one of them".to_owned()),
    };
    for side in [&source, &destination] {
        if let Side::There { path: "", .. } | Side::Here("") = side {
            return Err("cp: an empty path; write RUN:/ for the root of a run".to_owned());
        }
    }
    match (&source, &destination) {
        (Side::Stream, _) if isatty(stdin()) => {
            return Err("cp: - reads an archive, and standard input is a terminal".to_owned());
        }
        (_, Side::Stream) if isatty(stdout()) => {
            return Err("cp: - writes an archive, and standard output is a terminal".to_owned());
        }
        _ => {}
    }
    let run = running(run)?;
    let piped = source == Side::Stream || destination == Side::Stream;
    let interrupt = Interrupt::watch(piped).map_err(|error| format!("cp: signals: {error}"))?;
    let dial = || {
        let connection = run.directory.dial().map_err(|error| error.to_string())?;
        interrupt.ends(&connection).map_err(|error| error.to_string())?;
        Ok(connection)
    };
    let guest = Guest { dial: &dial };
    let machine = &run.spec.machine;
    let limit = args.limit.unwrap_or_else(|| machine.disk.saturating_add(machine.memory));
    let (archive, follow) = (args.archive, args.follow_link);
    let mut progress = Progress::new("copying", None, args.quiet).after(QUIET);
    let copied = match (&source, &destination) {
        (Side::Here(source), Side::There { path, .. }) => {
            let owner = if archive { Owner::Same } else { Owner::Numbers(0, 0) };
            let how = Inwards { owner, follow, make_parents: false, into: false };
            guest.copy_in_telling(source, path, how, &mut progress).map(|packed| packed.left_out)
        }
        (Side::There { path, .. }, Side::Here(destination)) => {
            let how = Outwards { owners: archive, follow, limit };
            guest.copy_out(path, destination, how, &mut progress).map(|summary| summary.notes())
        }
        (Side::Stream, Side::There { path, .. }) => {
            if let Some(length) = length_of_input() {
                progress.expect(length);
            }
            guest.archive_in(&mut Counted(io::stdin().lock(), &mut progress), path).map(|()| Vec::new())
        }
        (Side::There { path, .. }, _) => {
            let mut to = Counted(io::stdout().lock(), &mut progress);
            guest.archive_out(path, follow, limit, &mut to).map(|()| Vec::new())
        }
        // Checked above.
        _ => Ok(Vec::new()),
    };
    drop(progress);
    match (copied, interrupt.code()) {
        (Ok(notes), _) => {
            if !args.quiet {
                notes.iter().for_each(|note| say(&format!("cp: {note}")));
            }
            Ok(0)
        }
        (Err(_), Some(code)) => Ok(code),
        (Err(error), None) => Err(format!("cp: {error}")),
    }
}

/// Takes an argument apart as docker does: what begins with `/` or `.` is a path here, whatever colons it has.
fn side(argument: &str) -> Side<'_> {
    if argument == "-" {
        return Side::Stream;
    }
    match argument.split_once(':') {
        Some((run, path)) if !run.is_empty() && !run.starts_with(['/', '.']) => Side::There { run, path },
        _ => Side::Here(argument),
    }
}

/// How long standard input is, if it is a file.
fn length_of_input() -> Option<u64> {
    let found = fstat(stdin()).ok().filter(|found| FileType::from_raw_mode(found.st_mode) == FileType::RegularFile)?;
    u64::try_from(found.st_size).ok()
}

/// Ends a copy when a signal says so, by ending its connections: the copy then fails, and cleans up as it does. One that reads
/// or writes a pipe may never come to that, and is ended a little later; a second signal ends any at once.
struct Interrupt {
    signal: Arc<AtomicU8>,
    connections: Arc<Mutex<Vec<std::os::unix::net::UnixStream>>>,
}

impl Interrupt {
    fn watch(piped: bool) -> io::Result<Self> {
        let mut caught = signals::catch_ends()?;
        let interrupt = Self { signal: Arc::default(), connections: Arc::default() };
        let (signal, connections) = (Arc::clone(&interrupt.signal), Arc::clone(&interrupt.connections));
        let end = move || {
            let Some(first) = caught.forever().next() else { return };
            signal.store(u8::try_from(first).unwrap_or(u8::MAX), Ordering::Relaxed);
            for connection in connections.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                let _ = connection.shutdown(std::net::Shutdown::Both);
            }
            let first_at = Instant::now();
            loop {
                let late = piped && first_at.elapsed() > GRACE;
                if let Some(last) = caught.pending().next().or(late.then_some(first)) {
                    std::process::exit(last.saturating_add(128));
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(end)?;
        Ok(interrupt)
    }

    fn ends(&self, connection: &std::os::unix::net::UnixStream) -> io::Result<()> {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.push(connection.try_clone()?);
        // One that came before this connection did.
        if self.code().is_some() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }

    fn code(&self) -> Option<u8> {
        match self.signal.load(Ordering::Relaxed) {
            0 => None,
            number => Some(number.saturating_add(128)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_told_apart_as_docker_does() {
        assert_eq!(side("-"), Side::Stream);
        assert_eq!(side("box:/etc"), Side::There { run: "box", path: "/etc" });
        assert_eq!(side("box:a:b"), Side::There { run: "box", path: "a:b" });
        for here in ["file", "/a:b", "./a:b", "../a:b", ":x", "."] {
            assert_eq!(side(here), Side::Here(here));
        }
    }
}
