//! A run's event log: `events.jsonl`, append-only, written on the host alone. `docs/formats/events.md`.
//!
//! Each line has a number and the hash of the line before, so that a line that is missing, changed or moved shows.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use serde_json::Value;

use crate::clock;
use crate::image::Digest;

/// The log's name in a run's directory.
pub(crate) const LOG: &str = "events.jsonl";
/// Most bytes that are read back: far more than a run of today writes.
const MAX_LOG: u64 = 64 << 20;

/// One line.
#[derive(Debug, Serialize)]
struct Event<'a> {
    version: u32,
    seq: u64,
    time: String,
    event: &'a str,
    /// How many events before this one could not be written.
    #[serde(skip_serializing_if = "is_zero")]
    lost: u64,
    previous: Option<&'a str>,
    data: Value,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A run's log, open at its end. The holder of the run's lock is its only writer.
#[derive(Debug)]
pub(crate) struct Events(Mutex<Writer>);

#[derive(Debug)]
struct Writer {
    file: File,
    /// Whether each line is on the medium before it counts as written.
    durable: bool,
    seq: u64,
    previous: Option<String>,
    lost: u64,
}

impl Events {
    /// Opens a run's log, and makes it if there is none. What a crash left of a last line is cut off.
    pub(crate) fn open(directory: &Path, durable: bool) -> io::Result<Self> {
        let path = directory.join(LOG);
        let mut file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
        let mut text = Vec::new();
        (&mut file).take(MAX_LOG).read_to_end(&mut text)?;
        if u64::try_from(text.len()).is_ok_and(|length| length == MAX_LOG) {
            return Err(io::Error::other("over 64 MiB, which no such log has"));
        }
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at.saturating_add(1));
        if whole < text.len() {
            file.set_len(u64::try_from(whole).unwrap_or(0))?;
            text.truncate(whole);
        }
        let lines: Vec<&[u8]> = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).collect();
        let seq = u64::try_from(lines.len()).unwrap_or(u64::MAX);
        let previous = lines.last().map(|line| hash(line));
        Ok(Self(Mutex::new(Writer { file, durable, seq, previous, lost: 0 })))
    }

    /// Adds an event. One that cannot be written is counted in the next that can: where the log lies there may be no room,
    /// and the run goes on all the same.
    pub(crate) fn add(&self, event: &str, data: Value) {
        let mut writer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if writer.add(event, data).is_err() {
            writer.lost = writer.lost.saturating_add(1);
        }
    }
}

impl Writer {
    fn add(&mut self, event: &str, data: Value) -> io::Result<()> {
        let previous = self.previous.as_deref();
        let event = Event { version: 1, seq: self.seq, time: clock::now(), event, lost: self.lost, previous, data };
        let mut line = serde_json::to_vec(&event)?;
        let hash = hash(&line);
        line.push(b'\n');
        let length = self.file.metadata()?.len();
        if let Err(error) = self.file.write_all(&line) {
            // Half a line is none.
            let _ = self.file.set_len(length);
            return Err(error);
        }
        self.seq = self.seq.saturating_add(1);
        self.previous = Some(hash);
        self.lost = 0;
        if self.durable { self.file.sync_data() } else { Ok(()) }
    }
}

fn hash(line: &[u8]) -> String {
    Digest::of(line).hex().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lines(directory: &Path) -> Vec<String> {
        std::fs::read_to_string(directory.join(LOG)).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn each_line_holds_the_hash_of_the_one_before() {
        let directory = tempfile::tempdir().unwrap();
        Events::open(directory.path(), false).unwrap().add("run.created", json!({"image": "x\ny"}));
        // Another process goes on where the first stopped, in the middle of a line, as a crash leaves it.
        let mut file = OpenOptions::new().append(true).open(directory.path().join(LOG)).unwrap();
        file.write_all(b"{\"version\":1,\"seq\":1,\"ti").unwrap();
        let events = Events::open(directory.path(), true).unwrap();
        events.add("run.started", json!({}));
        events.add("run.ended", json!({"exit_code": 0}));
        let lines = lines(directory.path());
        assert_eq!(lines.len(), 3);
        let mut previous = Value::Null;
        for (n, line) in lines.iter().enumerate() {
            let event: Value = serde_json::from_str(line).unwrap();
            assert_eq!((&event["seq"], &event["previous"]), (&json!(n), &previous), "{line}");
            assert!(clock::read(event["time"].as_str().unwrap()).is_some());
            previous = json!(hash(line.as_bytes()));
        }
    }

    #[test]
    fn what_could_not_be_written_is_counted() {
        let directory = tempfile::tempdir().unwrap();
        let events = Events::open(directory.path(), false).unwrap();
        let good = std::mem::replace(&mut events.0.lock().unwrap().file, File::open("/dev/null").unwrap());
        events.add("a", json!({}));
        events.add("b", json!({}));
        events.0.lock().unwrap().file = good;
        events.add("c", json!({}));
        events.add("d", json!({}));
        let lines = lines(directory.path());
        assert!(lines[0].contains("\"seq\":0") && lines[0].contains("\"lost\":2"), "{lines:?}");
        assert!(lines[1].contains("\"seq\":1") && !lines[1].contains("lost"), "{lines:?}");
    }
}
