//! An archive's way over a supervisor's connection, in one thread: bytes in as far as there is credit, bytes out as they
//! are asked for.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use guest::message::{FileStat, printable};

use crate::client::{ClientError, unexpected};
use crate::frame::{Copy, Exit, Frame, Request, STDIN_WINDOW};

/// Most bytes of one frame.
const CHUNK: usize = 64 << 10;
/// Most bytes of the guest's words that are kept.
const MAX_WORDS: usize = 4096;
/// Most bytes of a [`FileStat`]: the longest path, and every character of it escaped.
const MAX_STAT: u64 = 32 << 10;

/// A copy on its way.
#[derive(Debug)]
pub(crate) struct Channel {
    connection: UnixStream,
    credit: usize,
    pending: Vec<u8>,
    /// Bytes of `pending` that were taken.
    taken: usize,
    words: Vec<u8>,
    exit: Option<Exit>,
}

impl Channel {
    /// Asks for a copy on a fresh connection.
    pub(crate) fn open(mut connection: UnixStream, copy: Copy) -> Result<Self, ClientError> {
        Frame::Request(Request::Copy(copy)).write(&mut connection)?;
        Ok(Self { connection, credit: STDIN_WINDOW, pending: Vec::new(), taken: 0, words: Vec::new(), exit: None })
    }

    /// Asks what stands at a path.
    pub(crate) fn stat(
        connection: UnixStream,
        path: &str,
        follow: bool,
        user: Option<&str>,
    ) -> Result<FileStat, String> {
        let stat = Copy::Stat { path: path.to_owned(), follow, user: user.map(str::to_owned) };
        let mut channel = Self::open(connection, stat).map_err(|error| error.to_string())?;
        let mut text = Vec::new();
        let read = (&mut channel).take(MAX_STAT).read_to_end(&mut text);
        channel.finish()?;
        read.map_err(|error| error.to_string())?;
        serde_json::from_slice(&text).map_err(|error| format!("the guest's answer: {}", printable(&error.to_string())))
    }

    /// Takes one frame.
    fn receive(&mut self) -> Result<(), ClientError> {
        match Frame::read(&mut self.connection)?.ok_or(ClientError::Lost)? {
            Frame::Started => {}
            Frame::Stdout(bytes) => (self.pending, self.taken) = (bytes, 0),
            Frame::Stderr(bytes) => {
                let room = MAX_WORDS.saturating_sub(self.words.len());
                self.words.extend(bytes.iter().take(room));
            }
            Frame::StdinRoom(bytes) => {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                self.credit = self.credit.saturating_add(bytes).min(STDIN_WINDOW);
            }
            Frame::Exit(exit) => self.exit = Some(exit),
            other => return Err(unexpected(&other)),
        }
        Ok(())
    }

    /// Says that the input has ended.
    pub(crate) fn end_input(&mut self) -> Result<(), ClientError> {
        Ok(Frame::StdinEof.write(&mut self.connection)?)
    }

    /// Waits for the end, and says what went wrong in the guest.
    pub(crate) fn finish(mut self) -> Result<(), String> {
        while self.exit.is_none() {
            self.receive().map_err(|error| error.to_string())?;
            // Nobody asked for more.
            self.pending.clear();
        }
        let words: Vec<String> = String::from_utf8_lossy(&self.words).lines().map(printable).collect();
        match self.exit {
            Some(Exit { code: 0, error: None, .. }) => Ok(()),
            Some(Exit { error: Some(error), .. }) => Err(error),
            _ if words.is_empty() => Err("the guest's end of the copy was killed".to_owned()),
            _ => Err(words.join("; ")),
        }
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        while self.credit == 0 && self.exit.is_none() {
            self.receive().map_err(io::Error::other)?;
        }
        if self.exit.is_some() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let now = bytes.get(..self.credit.min(CHUNK)).unwrap_or(bytes);
        if !now.is_empty() {
            if Frame::Stdin(now.to_vec()).write(&mut self.connection).is_err() {
                // The other end has closed: what it said before is still there.
                while self.exit.is_none() {
                    self.receive().map_err(io::Error::other)?;
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
            self.receive().map_err(io::Error::other)?;
        }
        let n = self.pending.get(self.taken..).unwrap_or_default().read(buffer)?;
        self.taken = self.taken.saturating_add(n);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut channel = Channel::open(ours, Copy::In { directory: "/x".into() }).unwrap();
        let error = io::copy(&mut io::repeat(1), &mut channel).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(channel.finish().unwrap_err(), "no \u{fffd} room");
        supervisor.join().unwrap();
    }

    #[test]
    fn output_comes_whole_and_in_order() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut channel = Channel::open(ours, Copy::Out { path: "/x".into() }).unwrap();
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
        let mut channel = Channel::open(ours, Copy::Out { path: "/x".into() }).unwrap();
        drop(theirs);
        assert!(channel.read(&mut [0]).is_err());
        assert!(channel.finish().unwrap_err().contains("supervisor"));
    }
}
