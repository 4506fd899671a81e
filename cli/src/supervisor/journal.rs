//! The records of a run's network filter on their way to the event log.
//!
//! What may be written of each kind is bounded, kind by kind, so that a guest that makes one kind without end, such as denied
//! questions, leaves room for all others. What a budget has no room for is counted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use guest::message::printable;
use netfilter_control::Record;
use serde_json::{Value, json};

use crate::events::Events;

/// Bytes of the records that tell what was reached: at once, and what comes back each second. It is some 20,000 records, then
/// more than one a second.
const EVIDENCE: (u64, u64) = (8 << 20, 512);
/// The same for each other kind. A guest makes these without end, and there is little to learn from many.
const OTHERS: (u64, u64) = (4 << 20, 64);
/// What an empty budget waits for: so each gap in the log is told of once, and not line by line.
const WORTH_IT: u64 = 16 << 10;
/// What stands around a record in its line, at most.
const AROUND: usize = 256;

/// Where the records go.
#[derive(Debug)]
pub(super) struct Journal {
    events: Arc<Events>,
    began: Instant,
    /// By kind, of which there are few.
    budgets: BTreeMap<&'static str, Budget>,
}

/// What may still be written of a kind.
#[derive(Debug)]
struct Budget {
    most: u64,
    a_second: u64,
    room: u64,
    second: u64,
    empty: bool,
    /// Records that were only counted, and that the log does not tell of yet.
    lost: u64,
}

impl Journal {
    pub(super) fn new(events: Arc<Events>) -> Self {
        Self { events, began: Instant::now(), budgets: BTreeMap::new() }
    }

    pub(super) fn write(&mut self, record: &Record) {
        self.write_at(record, self.began.elapsed().as_secs());
    }

    fn write_at(&mut self, record: &Record, second: u64) {
        let (kind, data) = (record.kind(), fields(record));
        let length = u64::try_from(data.to_string().len().saturating_add(AROUND)).unwrap_or(u64::MAX);
        let budget = self.budgets.entry(kind).or_insert_with(|| Budget::of(record, second));
        let was_empty = budget.empty;
        if budget.take(length, second) {
            budget.tell(kind, &self.events);
            self.events.add_record(kind, data);
        } else {
            budget.lost = budget.lost.saturating_add(1);
            if !was_empty {
                budget.tell(kind, &self.events);
            }
        }
    }

    /// Writes down how many were only counted.
    pub(super) fn end(&mut self) {
        for (kind, budget) in &mut self.budgets {
            budget.tell(kind, &self.events);
        }
    }
}

impl Budget {
    fn of(record: &Record, second: u64) -> Self {
        let (most, a_second) = match record {
            Record::FlowOpened { .. }
            | Record::FlowClosed { .. }
            | Record::HttpRequest { .. }
            | Record::PolicySet { .. } => EVIDENCE,
            _ => OTHERS,
        };
        Self { most, a_second, room: most, second, empty: false, lost: 0 }
    }

    /// Whether there is room for so many bytes, which are taken.
    fn take(&mut self, length: u64, second: u64) -> bool {
        let back = second.saturating_sub(self.second).saturating_mul(self.a_second);
        self.room = self.room.saturating_add(back).min(self.most);
        self.second = second;
        let left = self.room.checked_sub(length).filter(|_| !self.empty || self.room >= WORTH_IT);
        self.empty = left.is_none();
        self.room = left.unwrap_or(self.room);
        !self.empty
    }

    fn tell(&mut self, kind: &str, events: &Events) {
        if self.lost > 0 {
            events.add_record("net.lost", json!({ "of": kind, "count": std::mem::take(&mut self.lost) }));
        }
    }
}

/// A record without its type, which is the event's name, and fit to print: it may be somebody's who took over the filter.
fn fields(record: &Record) -> Value {
    let mut data = serde_json::to_value(record).unwrap_or_default();
    if let Some(data) = data.as_object_mut() {
        data.remove("type");
        data.values_mut().for_each(fit_to_print);
    }
    data
}

/// Records are flat but for lists of text.
fn fit_to_print(value: &mut Value) {
    match value {
        Value::String(text) => *text = printable(text),
        Value::Array(values) => values.iter_mut().for_each(fit_to_print),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use netfilter_control::Reason;

    use super::*;

    fn denied(name: &str) -> Record {
        Record::DnsDenied { name: name.into(), qtype: 1, reason: Reason::NoRule, rule: None, hint: String::new() }
    }

    fn request() -> Record {
        Record::HttpRequest { flow: 1, method: "GET".into(), path: "/".into(), status: 200 }
    }

    fn journal() -> (tempfile::TempDir, Journal) {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::new(Arc::new(Events::open(directory.path(), false).unwrap()));
        (directory, journal)
    }

    /// Each line's event and data.
    fn log(directory: &tempfile::TempDir) -> Vec<(String, Value)> {
        let text = std::fs::read_to_string(directory.path().join("events.jsonl")).unwrap();
        let line = |line| {
            let mut event: Value = serde_json::from_str(line).unwrap();
            (event["event"].as_str().unwrap().to_owned(), event["data"].take())
        };
        text.lines().map(line).collect()
    }

    #[test]
    fn a_guest_that_is_denied_without_end_hides_nothing_else() {
        let (directory, mut journal) = journal();
        // As fast as an honest filter lets through, for half an hour.
        for second in 0..1800 {
            for _ in 0..20 {
                journal.write_at(&denied(&"x".repeat(250)), second);
            }
        }
        journal.write_at(&request(), 1800);
        journal.write_at(&Record::PolicySet { generation: 2, revoked: 0 }, 1800);
        journal.end();
        let log = log(&directory);
        let of = |kind: &str| log.iter().filter(|(event, _)| event == kind).count();
        assert_eq!((of("net.http.request"), of("net.policy.set")), (1, 1));
        // No more than its budget, and each record is there or counted.
        let denied = of("net.dns.denied");
        assert!((7_000..8_500).contains(&denied), "{denied}");
        let lost: Vec<&Value> = log.iter().filter(|(event, _)| event == "net.lost").map(|(_, data)| data).collect();
        assert_eq!(lost[0], &json!({ "of": "net.dns.denied", "count": 1 }), "at once");
        assert!(lost.len() < 100, "{}", lost.len());
        let lost: u64 = lost.iter().filter_map(|data| data["count"].as_u64()).sum();
        assert_eq!(lost + u64::try_from(denied).unwrap(), 1800 * 20);
        let size = std::fs::metadata(directory.path().join("events.jsonl")).unwrap().len();
        assert!(size < 5 << 20, "{size}");
    }

    #[test]
    fn room_for_what_was_reached_comes_back() {
        let (directory, mut journal) = journal();
        let mut written = 0;
        while !journal.budgets.values().any(|budget| budget.empty) {
            journal.write_at(&request(), 0);
            written += 1;
        }
        journal.write_at(&request(), 30);
        journal.write_at(&request(), 60);
        let log = log(&directory);
        let tail: Vec<&str> = log[written - 2..].iter().map(|(event, _)| event.as_str()).collect();
        assert_eq!(tail, ["net.http.request", "net.lost", "net.lost", "net.http.request"]);
        assert_eq!(log[written].1["count"], 1);
    }

    #[test]
    fn what_a_filter_says_cannot_drive_a_terminal() {
        let (directory, mut journal) = journal();
        journal.write(&denied("a\u{1b}[2J\u{9b}2J\u{7f}"));
        let tls = Record::FlowTls { flow: 1, server_name: None, alpn: vec!["\u{9d}x".into()] };
        journal.write(&tls);
        let text = std::fs::read_to_string(directory.path().join("events.jsonl")).unwrap();
        assert!(!text.chars().any(|c| c.is_control() && c != '\n') && !text.contains("\"type\""), "{text:?}");
        assert!(!text.contains("\\u00"), "{text:?}");
    }
}
