//! A run's event log: `events.jsonl`, append-only, written on the host alone. `docs/formats/events.md`.
//!
//! Each line has a number and the hash of the line before, so that a line that is missing, changed or moved shows.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::clock;
use crate::image::Digest;

/// The log's name in a run's directory.
pub(crate) const LOG: &str = "events.jsonl";
/// Bytes of its end that are read back: many times the longest line, so that the last whole one is among them.
const MAX_TAIL: u64 = 1 << 20;

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

/// What is read back of the last line.
#[derive(Debug, Deserialize)]
struct Line {
    seq: u64,
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
    /// Whether an event is on the medium before it counts as written.
    durable: bool,
    seq: u64,
    previous: Option<String>,
    lost: u64,
}

impl Events {
    /// Opens a run's log, and makes it if there is none. What a crash left of a last line is cut off.
    pub(crate) fn open(directory: &Path, durable: bool) -> io::Result<Self> {
        let path = directory.join(LOG);
        let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
        let length = file.metadata()?.len();
        let from = length.saturating_sub(MAX_TAIL);
        let mut tail = vec![0; usize::try_from(length.saturating_sub(from)).unwrap_or(0)];
        file.read_exact_at(&mut tail, from)?;
        let whole = tail.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at.saturating_add(1));
        if whole < tail.len() {
            if whole == 0 && from > 0 {
                return Err(io::Error::other("its last line is over 1 MiB, which no such line is"));
            }
            file.set_len(from.saturating_add(u64::try_from(whole).unwrap_or(0)))?;
            tail.truncate(whole);
        }
        let last = tail.split(|byte| *byte == b'\n').rfind(|line| !line.is_empty());
        let last: Option<(&[u8], Line)> =
            last.map(|line| Ok::<_, io::Error>((line, serde_json::from_slice(line)?))).transpose()?;
        let seq = last.as_ref().map_or(0, |(_, line)| line.seq.saturating_add(1));
        let previous = last.map(|(line, _)| hash(line));
        Ok(Self(Mutex::new(Writer { file, durable, seq, previous, lost: 0 })))
    }

    /// Adds an event. One that cannot be written is counted in the next that can: where the log lies there may be no room,
    /// and the run goes on all the same.
    pub(crate) fn add(&self, event: &str, data: Value) {
        self.write(event, data, true);
    }

    /// Adds a record of the network filter's, which is on the medium with the next event: a guest makes so many that whoever
    /// writes an event would wait for the medium behind them.
    pub(crate) fn add_record(&self, event: &str, data: Value) {
        self.write(event, data, false);
    }

    fn write(&self, event: &str, data: Value, sync: bool) {
        let mut writer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sync = sync && writer.durable;
        let added = writer.add(event, data).and_then(|()| if sync { writer.file.sync_data() } else { Ok(()) });
        if added.is_err() {
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
        Ok(())
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
    fn records_wait_for_the_medium_with_the_next_event() {
        let directory = tempfile::tempdir().unwrap();
        let events = Events::open(directory.path(), true).unwrap();
        // It can be written to, and not be brought to any medium: whoever tries fails, and counts.
        let (_reader, writer) = std::io::pipe().unwrap();
        events.0.lock().unwrap().file = File::from(std::os::fd::OwnedFd::from(writer));
        events.add_record("net.dns.denied", json!({}));
        assert_eq!(events.0.lock().unwrap().lost, 0);
        events.add("run.ended", json!({}));
        assert_eq!(events.0.lock().unwrap().lost, 1);
    }

    #[test]
    fn a_log_of_any_length_goes_on_where_it_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let file = File::create(directory.path().join(LOG)).unwrap();
        // As sparse as it can be: all before the last line is of no interest.
        file.set_len(100 << 20).unwrap();
        let last = "{\"version\":1,\"seq\":8999,\"event\":\"x\"}";
        file.write_all_at(format!("\n{last}\n").as_bytes(), 100 << 20).unwrap();
        Events::open(directory.path(), false).unwrap().add("y", json!({}));
        let text = std::fs::read(directory.path().join(LOG)).unwrap();
        let line: Value = serde_json::from_slice(text.split(|byte| *byte == b'\n').rev().nth(1).unwrap()).unwrap();
        assert_eq!((&line["seq"], &line["previous"]), (&json!(9000), &json!(hash(last.as_bytes()))));
        // A line without an end is none of ours.
        file.set_len(0).unwrap();
        file.set_len(2 << 20).unwrap();
        assert!(Events::open(directory.path(), false).is_err());
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
