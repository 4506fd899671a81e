//! How far something long is, on a terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::units::show_size;

/// Between two lines.
const INTERVAL: Duration = Duration::from_millis(200);

/// A line that is written over until it ends. Without a terminal there is none.
#[derive(Debug)]
pub(crate) struct Progress {
    what: &'static str,
    total: Option<u64>,
    done: u64,
    started: Instant,
    shown: Option<Instant>,
    enabled: bool,
}

impl Progress {
    /// For something of so many bytes, if that is known.
    pub(crate) fn new(what: &'static str, total: Option<u64>, quiet: bool) -> Self {
        let enabled = !quiet && std::io::stderr().is_terminal();
        Self { what, total, done: 0, started: Instant::now(), shown: None, enabled }
    }

    /// So many bytes more are done.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.done = self.done.saturating_add(bytes);
        if self.enabled && self.shown.is_none_or(|shown| shown.elapsed() >= INTERVAL) {
            self.shown = Some(Instant::now());
            self.put(&line(self.what, self.done, self.total, self.started.elapsed()));
        }
    }

    /// What is done now has no length.
    pub(crate) fn say(&mut self, what: &str) {
        if self.enabled {
            self.shown = Some(Instant::now());
            self.put(what);
        }
    }

    /// A terminal that is gone misses nothing.
    fn put(&self, text: &str) {
        let _ = write!(std::io::stderr(), "\r{text}\x1b[K");
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown.is_some() {
            self.put("");
        }
    }
}

fn line(what: &str, done: u64, total: Option<u64>, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(0.001);
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let rate = (done as f64 / seconds) as u64;
    let Some(total) = total.filter(|total| *total > 0) else {
        return format!("{what}: {}, {}/s", show_size(done), show_size(rate));
    };
    let percent = u128::from(done) * 100 / u128::from(total);
    let left = total.saturating_sub(done).checked_div(rate).unwrap_or(0);
    let left = if left >= 60 { format!("{}m{:02}s", left / 60, left % 60) } else { format!("{left}s") };
    format!("{what}: {} of {} ({percent}%), {}/s, {left} left", show_size(done), show_size(total), show_size(rate))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_rate_and_rest() {
        let second = Duration::from_secs(1);
        assert_eq!(
            line("unpacking", 1 << 20, Some(4 << 20), second),
            "unpacking: 1.0 MiB of 4.0 MiB (25%), 1.0 MiB/s, 3s left"
        );
        assert!(line("x", 1 << 20, Some(121 << 20), second).ends_with("2m00s left"));
        assert_eq!(line("x", 1 << 20, None, second), "x: 1.0 MiB, 1.0 MiB/s");
        assert!(line("x", 0, Some(5), Duration::ZERO).contains("0%"));
    }
}
