//! The record of a guest's serial console: bounded, since a guest may print without end.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Most bytes of `console.log`. When it is full it becomes `console.log.1`, in place of the one before.
const MAX_LOG: u64 = 1 << 20;
/// Most bytes of the console in which the lines to quote are looked for: more than a kernel's last words.
const MAX_TAIL: u64 = 16 << 10;
/// How a kernel begins its last words. What comes after, registers and a trace, says less.
const PANIC: &str = "Kernel panic - not syncing";
/// Most lines of the console that an error quotes.
const MAX_TAIL_LINES: usize = 12;
/// Most bytes of a log that a run's state quotes: as JSON they take twice as much, of the 4 KiB that the spare state has.
const MAX_WORDS: usize = 512;

/// Gives the end of a pipe, and writes to `console.log` what comes through it. The pipe is always read,
/// so that the guest never waits for the host's disk.
pub(super) fn record(directory: &Path) -> io::Result<OwnedFd> {
    let (from, to) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let mut log = Log { directory: directory.to_owned(), file: new_log(directory)?, length: 0 };
    std::thread::Builder::new().name("console".into()).spawn(move || {
        let mut from = File::from(from);
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            // A log that cannot be written loses its bytes; the run does not depend on it.
            let _ = log.append(buffer.get(..n).unwrap_or_default());
        }
    })?;
    Ok(to)
}

struct Log {
    directory: std::path::PathBuf,
    file: File,
    length: u64,
}

impl Log {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.length >= MAX_LOG {
            std::fs::rename(self.directory.join("console.log"), self.directory.join("console.log.1"))?;
            self.file = new_log(&self.directory)?;
            self.length = 0;
        }
        self.length = self.length.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        self.file.write_all(bytes)
    }
}

fn new_log(directory: &Path) -> io::Result<File> {
    let path = directory.join("console.log");
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
}

/// The last lines of a log, the console's or the VMM's own, or the first of a panic, fit to print; nothing if there are
/// none.
pub(crate) fn tail(log: &Path) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MAX_TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.take(MAX_TAIL).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<String> = text.lines().map(guest::message::printable).filter(|line| !line.is_empty()).collect();
    let panic = lines.iter().rposition(|line| line.contains(PANIC));
    let first = panic.unwrap_or_else(|| lines.len().saturating_sub(MAX_TAIL_LINES));
    let lines: Vec<String> = lines.into_iter().skip(first).take(MAX_TAIL_LINES).collect();
    (!lines.is_empty()).then(|| lines.join("\n  "))
}

/// The end of the last lines of a log, in so few bytes that a run's state has room for it.
pub(super) fn last_words(log: &Path) -> Option<String> {
    let mut words = tail(log)?;
    let start = words.ceil_char_boundary(words.len().saturating_sub(MAX_WORDS));
    words.drain(..start);
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_stays_bounded_and_keeps_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let mut log =
            Log { directory: directory.path().to_owned(), file: new_log(directory.path()).unwrap(), length: 0 };
        let line = [b'x'; 1023].into_iter().chain([b'\n']).collect::<Vec<u8>>();
        for _ in 0..5000 {
            log.append(&line).unwrap();
        }
        log.append(b"the \x1b[31mlast\r\n").unwrap();
        let total: u64 =
            std::fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        assert!(total <= 2 * (MAX_LOG + 4096), "{total}");
        let tail = tail(&directory.path().join("console.log")).unwrap();
        assert!(tail.ends_with("the \u{fffd}[31mlast"), "{tail:?}");
    }

    #[test]
    fn a_panic_is_quoted_from_its_beginning() {
        let directory = tempfile::tempdir().unwrap();
        let trace = "[ 1.0]  ? some_function+0x1/0x2\n".repeat(100);
        let text = format!("{trace}[ 1.0] Kernel panic - not syncing: why\n{trace}[ 1.0] Kernel Offset: disabled\n");
        let log = directory.path().join("console.log");
        std::fs::write(&log, text).unwrap();
        let tail = tail(&log).unwrap();
        assert!(tail.starts_with("[ 1.0] Kernel panic - not syncing: why\n"), "{tail}");
        assert_eq!(tail.lines().count(), MAX_TAIL_LINES);
    }

    #[test]
    fn last_words_are_few() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("netfilter.log");
        std::fs::write(&log, format!("{}\nthe end\n", "€".repeat(1000))).unwrap();
        let words = last_words(&log).unwrap();
        assert!(words.len() <= MAX_WORDS && words.ends_with("€\n  the end"), "{words}");
        std::fs::write(&log, "why\n").unwrap();
        assert_eq!(last_words(&log).as_deref(), Some("why"));
    }

    #[test]
    fn no_console_has_no_tail() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(tail(&directory.path().join("console.log")), None);
        new_log(directory.path()).unwrap();
        assert_eq!(tail(&directory.path().join("console.log")), None);
    }
}
