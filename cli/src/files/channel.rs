//! An archive's way over a supervisor's connection, in one thread: bytes in as far as there is credit, bytes out as they
//! are asked for.
//!
//! What a guest says beside that is bounded, and so is the time for an answer that takes none. A copy that only is slow goes
//! on as long as its user wants it to: silence says nothing of a guest.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use guest::message::{FileStat, printable};
use serde::de::DeserializeOwned;

use crate::client::{ClientError, unexpected};
use crate::frame::{Copy, Exit, Frame, FrameError, Request, STDIN_WINDOW};

/// Most bytes of one frame.
const CHUNK: usize = 64 << 10;
/// Most bytes of the guest's words that are kept.
const MAX_WORDS: usize = 4096;
/// Most bytes that nobody asked for: words, and output where there is none.
const MAX_UNASKED: usize = 1 << 20;
/// Most bytes of an answer: a [`FileStat`] with the longest path, every character of it escaped.
const MAX_ANSWER: u64 = 32 << 10;
/// How long a guest may take to look at a path. It waits for its disk at most.
const STAT_PATIENCE: Duration = Duration::from_secs(10);
/// How long what has to arrive before a command starts may stand still.
pub(crate) const INPUT_PATIENCE: Duration = Duration::from_secs(120);

/// A copy on its way.
#[derive(Debug)]
pub(crate) struct Channel {
    connection: UnixStream,
    credit: usize,
    pending: Vec<u8>,
    /// Bytes of `pending` that were taken.
    taken: usize,
    words: Vec<u8>,
    /// Bytes that nobody asked for, so far.
    unasked: usize,
    /// How long it may stand still.
    patience: Option<Duration>,
    /// Until when, if it may not for ever.
    deadline: Option<Instant>,
    exit: Option<Exit>,
}

/// Whose output counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Output,
    Nothing,
}

impl Channel {
    /// Asks for a copy on a fresh connection. With a patience, it fails when nothing has moved for so long.
    pub(crate) fn open(
        mut connection: UnixStream,
        request: Request,
        patience: Option<Duration>,
    ) -> Result<Self, ClientError> {
        Frame::Request(request).write(&mut connection)?;
        let mut channel = Self {
            connection,
            credit: STDIN_WINDOW,
            pending: Vec::new(),
            taken: 0,
            words: Vec::new(),
            unasked: 0,
            patience,
            deadline: None,
            exit: None,
        };
        channel.has_moved();
        Ok(channel)
    }

    /// Asks what stands at a path.
    pub(crate) fn stat(
        connection: UnixStream,
        path: &str,
        follow: bool,
        user: Option<&str>,
    ) -> Result<FileStat, String> {
        Self::stat_within(STAT_PATIENCE, connection, path, follow, user)
    }

    fn stat_within(
        patience: Duration,
        connection: UnixStream,
        path: &str,
        follow: bool,
        user: Option<&str>,
    ) -> Result<FileStat, String> {
        let stat = Copy::Stat { path: path.to_owned(), follow, user: user.map(str::to_owned) };
        Self::answer(patience, connection, Request::Copy(stat))
    }

    /// Asks what is answered in one piece of JSON.
    pub(crate) fn answer<T: DeserializeOwned>(
        patience: Duration,
        connection: UnixStream,
        request: Request,
    ) -> Result<T, String> {
        let mut channel = Self::open(connection, request, Some(patience)).map_err(|error| error.to_string())?;
        // The whole of it is to come by then.
        channel.patience = None;
        let mut text = Vec::new();
        let read = (&mut channel).take(MAX_ANSWER.saturating_add(1)).read_to_end(&mut text);
        if u64::try_from(text.len()).unwrap_or(u64::MAX) > MAX_ANSWER {
            return Err(format!("the guest's answer: over {MAX_ANSWER} bytes, which none has"));
        }
        // If it has failed, it says why.
        channel.finish()?;
        read.map_err(|error| error.to_string())?;
        serde_json::from_slice(&text).map_err(|error| format!("the guest's answer: {}", printable(&error.to_string())))
    }

    /// Something has moved: from now on it may stand still anew.
    fn has_moved(&mut self) {
        if let Some(patience) = self.patience {
            self.deadline = Instant::now().checked_add(patience);
        }
    }

    /// Takes one frame.
    fn receive(&mut self, wanted: Wanted) -> Result<(), ClientError> {
        let mut from = Timed { connection: &self.connection, deadline: self.deadline };
        let frame = match Frame::read(&mut from) {
            Err(FrameError::Io(error)) if error.kind() == io::ErrorKind::TimedOut => return Err(ClientError::Silent),
            other => other?.ok_or(ClientError::Lost)?,
        };
        match frame {
            Frame::Started => {}
            Frame::Stdout(bytes) if wanted == Wanted::Output => {
                (self.pending, self.taken) = (bytes, 0);
                self.has_moved();
            }
            Frame::Stdout(bytes) => self.count_unasked(bytes.len())?,
            Frame::Stderr(bytes) => {
                let room = MAX_WORDS.saturating_sub(self.words.len());
                self.words.extend(bytes.iter().take(room));
                self.count_unasked(bytes.len())?;
            }
            Frame::StdinRoom(bytes) => {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                self.credit = self.credit.saturating_add(bytes).min(STDIN_WINDOW);
                self.has_moved();
            }
            Frame::Exit(exit) => self.exit = Some(exit),
            other => return Err(unexpected(&other)),
        }
        Ok(())
    }

    fn count_unasked(&mut self, bytes: usize) -> Result<(), ClientError> {
        self.unasked = self.unasked.saturating_add(bytes);
        if self.unasked > MAX_UNASKED { Err(ClientError::Talks) } else { Ok(()) }
    }

    /// Says that the input has ended.
    pub(crate) fn end_input(&mut self) -> Result<(), ClientError> {
        Ok(Frame::StdinEof.write(&mut self.connection)?)
    }

    /// Waits for the end, and says what went wrong in the guest.
    pub(crate) fn finish(mut self) -> Result<(), String> {
        while self.exit.is_none() {
            self.receive(Wanted::Nothing).map_err(|error| error.to_string())?;
        }
        let words: Vec<String> = String::from_utf8_lossy(&self.words).lines().map(printable).collect();
        match self.exit {
            Some(Exit { code: 0, error: None, .. }) => Ok(()),
            Some(Exit { error: Some(error), .. }) => Err(printable(&error)),
            _ if words.is_empty() => Err("the guest's end of the copy was killed".to_owned()),
            // Bounded as a whole, too.
            _ => Err(printable(&words.join("; "))),
        }
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        while self.credit == 0 && self.exit.is_none() {
            self.receive(Wanted::Nothing).map_err(io::Error::other)?;
        }
        if self.exit.is_some() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let now = bytes.get(..self.credit.min(CHUNK)).unwrap_or(bytes);
        if !now.is_empty() {
            if Frame::Stdin(now.to_vec()).write(&mut self.connection).is_err() {
                // The other end has closed: what it said before is still there.
                while self.exit.is_none() {
                    self.receive(Wanted::Nothing).map_err(io::Error::other)?;
                }
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            self.credit = self.credit.saturating_sub(now.len());
        }
        Ok(now.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Channel {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.taken >= self.pending.len() {
            if self.exit.is_some() {
                return Ok(0);
            }
            self.receive(Wanted::Output).map_err(io::Error::other)?;
        }
        let n = self.pending.get(self.taken..).unwrap_or_default().read(buffer)?;
        self.taken = self.taken.saturating_add(n);
        Ok(n)
    }
}

/// A connection of which no read goes on after a deadline.
struct Timed<'a> {
    connection: &'a UnixStream,
    deadline: Option<Instant>,
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let late = || io::Error::from(io::ErrorKind::TimedOut);
        if let Some(deadline) = self.deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late());
            }
            self.connection.set_read_timeout(Some(left))?;
        }
        match self.connection.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(late()),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENT: &str = "the guest does not answer; try again, or end the run (bulkhead rm -f)";

    /// What the client says of a guest that does this with the connection, and whether it says so in time.
    fn told(client: impl FnOnce(UnixStream) -> String, guest: impl FnOnce(UnixStream) + Send + 'static) -> String {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let supervisor = std::thread::spawn(move || guest(theirs));
        let started = Instant::now();
        let said = client(ours);
        assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
        supervisor.join().unwrap();
        assert!(said.len() < 2000 && !said.contains('\x1b'), "{said}");
        said
    }

    /// Takes whatever comes, as a supervisor always does.
    fn listen(connection: &UnixStream) -> std::thread::JoinHandle<()> {
        let mut from = connection.try_clone().unwrap();
        std::thread::spawn(move || drop(io::copy(&mut from, &mut io::sink())))
    }

    /// Until nobody listens any more.
    fn for_ever(frame: Frame, pause: Duration) -> impl FnOnce(UnixStream) + Send {
        move |mut connection| {
            let listener = listen(&connection);
            while frame.write(&mut connection).is_ok() {
                std::thread::sleep(pause);
            }
            listener.join().unwrap();
        }
    }

    #[test]
    fn a_guest_that_does_not_answer_is_not_waited_for_for_ever() {
        let stat = |connection| {
            let patience = Duration::from_millis(300);
            Channel::stat_within(patience, connection, "/x", false, None).unwrap_err()
        };
        let silent = |connection: UnixStream| drop((&connection).read_to_end(&mut Vec::new()));
        assert_eq!(told(stat, silent), SILENT);
        let slowly = Duration::from_millis(20);
        for drop in [Frame::Stdout(b" ".to_vec()), Frame::Stderr(b"\x1bx".to_vec())] {
            assert_eq!(told(stat, for_ever(drop, slowly)), SILENT);
        }
        // An answer that is longer than any.
        let long = told(stat, for_ever(Frame::Stdout(vec![b' '; 1000]), Duration::ZERO));
        assert_eq!(long, "the guest's answer: over 32768 bytes, which none has");
    }

    #[test]
    fn a_guest_that_talks_without_end_fails_the_copy() {
        let into = |connection| {
            let mut channel =
                Channel::open(connection, Request::Copy(Copy::In { directory: "/x".into() }), None).unwrap();
            let sent = io::copy(&mut io::repeat(1), &mut channel).unwrap_err();
            format!("{sent}, {}", channel.finish().unwrap_err())
        };
        for noise in [Frame::Stdout(vec![7; 1000]), Frame::Stderr(b"\x1b[2J\n".repeat(200))] {
            let said = told(into, for_ever(noise, Duration::ZERO));
            assert!(said.starts_with("the guest goes on talking"), "{said}");
        }
        let out = |connection| {
            let channel = Channel::open(connection, Request::Copy(Copy::Out { path: "/x".into() }), None).unwrap();
            channel.finish().unwrap_err()
        };
        assert!(told(out, for_ever(Frame::Stdout(vec![7; 1000]), Duration::ZERO)).contains("goes on talking"));
        // Words that are all kept are still bounded when they are shown.
        let exit = Exit { code: 1, ..Exit::default() };
        let said = told(out, move |mut connection| {
            Frame::Stderr(b"a\n".repeat(5000)).write(&mut connection).unwrap();
            Frame::Exit(exit).write(&mut connection).unwrap();
        });
        assert!(said.starts_with("a; a; "), "{said}");
    }

    #[test]
    fn patience_is_for_standing_still_alone() {
        // A guest that takes a little every now and then is slow, and well.
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let patience = Duration::from_millis(400);
        let supervisor = std::thread::spawn(move || {
            let listener = listen(&theirs);
            for _ in 0..8 {
                std::thread::sleep(Duration::from_millis(150));
                Frame::StdinRoom(1).write(&mut theirs).unwrap();
            }
            // Now nothing more comes.
            listener.join().unwrap();
        });
        let mut channel =
            Channel::open(ours, Request::Copy(Copy::In { directory: "/x".into() }), Some(patience)).unwrap();
        let started = Instant::now();
        let error = io::copy(&mut io::repeat(1), &mut channel).unwrap_err();
        assert!(started.elapsed() > Duration::from_millis(1200), "{:?}", started.elapsed());
        assert_eq!(error.to_string(), SILENT);
        drop(channel);
        supervisor.join().unwrap();
    }

    #[test]
    fn input_waits_for_credit_and_ends_with_the_command() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let supervisor = std::thread::spawn(move || {
            let mut seen = 0;
            while seen < 2 * STDIN_WINDOW {
                match Frame::read(&mut theirs).unwrap().unwrap() {
                    Frame::Request(request) => assert_eq!(request, Request::Copy(Copy::In { directory: "/x".into() })),
                    Frame::Stdin(bytes) => {
                        seen += bytes.len();
                        Frame::StdinRoom(u32::try_from(bytes.len()).unwrap()).write(&mut theirs).unwrap();
                    }
                    other => panic!("{other:?}"),
                }
            }
            Frame::Stderr(b"no \x1b room\n".to_vec()).write(&mut theirs).unwrap();
            Frame::Exit(Exit { code: 1, ..Exit::default() }).write(&mut theirs).unwrap();
            theirs.shutdown(std::net::Shutdown::Both).unwrap();
        });
        let mut channel = Channel::open(ours, Request::Copy(Copy::In { directory: "/x".into() }), None).unwrap();
        let error = io::copy(&mut io::repeat(1), &mut channel).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(channel.finish().unwrap_err(), "no \u{fffd} room");
        supervisor.join().unwrap();
    }

    #[test]
    fn output_comes_whole_and_in_order() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut channel = Channel::open(ours, Request::Copy(Copy::Out { path: "/x".into() }), None).unwrap();
        for part in ["one ", "two ", "three"] {
            Frame::Stdout(part.into()).write(&mut theirs).unwrap();
        }
        Frame::Exit(Exit::default()).write(&mut theirs).unwrap();
        let mut text = String::new();
        channel.read_to_string(&mut text).unwrap();
        assert_eq!(text, "one two three");
        channel.finish().unwrap();
    }

    #[test]
    fn a_supervisor_that_goes_is_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut channel = Channel::open(ours, Request::Copy(Copy::Out { path: "/x".into() }), None).unwrap();
        drop(theirs);
        assert!(channel.read(&mut [0]).is_err());
        assert!(channel.finish().unwrap_err().contains("supervisor"));
    }
}
