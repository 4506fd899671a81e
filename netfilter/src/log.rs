//! Records, and counters that lose nothing when records are too many.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use netfilter_control::{Counters, Reason, Record};

use crate::bucket::Bucket;
use crate::gate::Dropped;

/// Records of one kind that are written one by one in a second. More are counted.
const RECORDS_A_SECOND: u64 = 20;
/// Most records that wait for the supervisor. More are counted.
const MAX_WAITING: usize = 1024;
/// How often what was only counted is written down.
const SUMMARY: Duration = Duration::from_secs(1);

/// What happened, on its way to the supervisor.
#[derive(Debug)]
pub struct Log {
    /// Totals since the start.
    pub counters: Counters,
    waiting: VecDeque<Record>,
    buckets: BTreeMap<&'static str, Bucket>,
    /// By kind and reason: both come from fixed lists, so a guest cannot make this grow.
    suppressed: BTreeMap<(&'static str, Option<Reason>), u64>,
    dropped: BTreeMap<Dropped, u64>,
    next_summary: Duration,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            counters: Counters::default(),
            waiting: VecDeque::new(),
            buckets: BTreeMap::new(),
            suppressed: BTreeMap::new(),
            dropped: BTreeMap::new(),
            next_summary: SUMMARY,
        }
    }
}

impl Log {
    /// Writes a record, or counts it if there are too many of its kind.
    pub fn record(&mut self, record: Record, now: Duration) {
        self.count(&record);
        let kind = record.kind();
        let bucket = self.buckets.entry(kind).or_insert_with(|| Bucket::new(RECORDS_A_SECOND, RECORDS_A_SECOND));
        if self.waiting.len() < MAX_WAITING && bucket.take(now) {
            self.waiting.push_back(record);
        } else {
            increase(&mut self.counters.suppressed, 1);
            increase(self.suppressed.entry((kind, record.reason())).or_default(), 1);
        }
    }

    /// Writes a record that is never only counted: there is one for each request of the supervisor's.
    pub fn answer(&mut self, record: Record) {
        self.waiting.push_back(record);
    }

    /// Counts a frame that nothing is there for.
    pub fn dropped(&mut self, class: Dropped) {
        increase(&mut self.counters.frames_dropped, 1);
        increase(self.dropped.entry(class).or_default(), 1);
    }

    fn count(&mut self, record: &Record) {
        let counters = &mut self.counters;
        let counter = match record {
            Record::DnsAnswered { .. } => return,
            Record::DnsDenied { .. } => &mut counters.dns_denied,
            Record::FlowOpened { .. } => &mut counters.flows_opened,
            Record::FlowDenied { .. } => &mut counters.flows_denied,
            Record::FlowClosed { up, down, .. } => {
                increase(&mut counters.bytes_up, *up);
                increase(&mut counters.bytes_down, *down);
                &mut counters.flows_closed
            }
            Record::HttpRequest { .. } => &mut counters.http_requests,
            _ => return,
        };
        increase(counter, 1);
    }

    /// Writes down what was only counted, once a second or, at the end, at once.
    pub fn summarise(&mut self, now: Duration, last: bool) {
        if now < self.next_summary && !last || self.waiting.len() >= MAX_WAITING {
            return;
        }
        self.next_summary = now.saturating_add(SUMMARY);
        for ((kind, reason), count) in std::mem::take(&mut self.suppressed) {
            self.waiting.push_back(Record::Suppressed { of: kind.to_owned(), reason, count });
        }
        for (class, count) in std::mem::take(&mut self.dropped) {
            self.waiting.push_back(Record::FramesDropped { class: class.word().to_owned(), count });
        }
    }

    /// When [`Self::summarise`] has something to do.
    pub fn due(&self) -> Option<Duration> {
        let some = !self.suppressed.is_empty() || !self.dropped.is_empty();
        (some && self.waiting.len() < MAX_WAITING).then_some(self.next_summary)
    }

    /// The oldest record that waits. It stays until [`Self::sent`].
    pub fn front(&self) -> Option<&Record> {
        self.waiting.front()
    }

    /// The record at the front has been sent.
    pub fn sent(&mut self) {
        self.waiting.pop_front();
    }
}

/// Adds without ever turning over.
pub(crate) fn increase(counter: &mut u64, by: u64) {
    *counter = counter.saturating_add(by);
}

#[cfg(test)]
mod tests {
    use netfilter_control::Stage;

    use super::*;

    fn denied(subject: &str) -> Record {
        Record::FlowDenied {
            flow: None,
            subject: subject.into(),
            port: 443,
            stage: Stage::Syn,
            reason: Reason::NoRule,
            detail: String::new(),
            rule: None,
            hint: String::new(),
        }
    }

    fn drain(log: &mut Log) -> Vec<Record> {
        std::iter::from_fn(|| log.front().cloned().inspect(|_| log.sent())).collect()
    }

    /// Row 127: a flood neither pushes evidence out nor fills the disk, and every verdict is counted.
    #[test]
    fn a_flood_is_counted_without_loss() {
        let mut log = Log::default();
        for n in 0..100_000u64 {
            log.record(denied(&format!("h{n}")), Duration::from_micros(n));
        }
        log.record(Record::FlowsReset { count: 1 }, Duration::ZERO);
        log.summarise(Duration::from_secs(2), false);
        let records = drain(&mut log);
        assert!(records.len() < 30, "{}", records.len());
        assert!(records.contains(&Record::FlowsReset { count: 1 }), "a flood of one kind hides no other");
        let single = records.iter().filter(|record| record.kind() == "net.flow.denied").count() as u64;
        let summed: u64 = records
            .iter()
            .map(|record| match record {
                Record::Suppressed { count, reason: Some(Reason::NoRule), .. } => *count,
                _ => 0,
            })
            .sum();
        assert_eq!(single + summed, 100_000);
        assert_eq!(log.counters.flows_denied, 100_000);
        assert_eq!(log.counters.suppressed, summed);
    }

    #[test]
    fn a_supervisor_that_does_not_read_loses_no_count() {
        let mut log = Log::default();
        for second in 0..1000u64 {
            for _ in 0..30 {
                log.record(denied("x"), Duration::from_secs(second));
            }
            log.summarise(Duration::from_secs(second), false);
        }
        assert!(log.waiting.len() <= MAX_WAITING + 2);
        let mut seen = 0;
        for _ in 0..2 {
            for record in drain(&mut log) {
                seen += match record {
                    Record::Suppressed { count, .. } => count,
                    _ => 1,
                };
            }
            log.summarise(Duration::from_secs(2000), true);
        }
        assert_eq!(seen, 30_000);
    }
}
