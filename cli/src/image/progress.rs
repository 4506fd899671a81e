//! How far something long is, on a terminal.

use std::io::{IsTerminal, Read, Write};
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
    /// What takes less than this is not shown.
    delay: Duration,
    shown: Option<Instant>,
    enabled: bool,
}

impl Progress {
    /// For something of so many bytes, if that is known.
    pub(crate) fn new(what: &'static str, total: Option<u64>, quiet: bool) -> Self {
        let enabled = !quiet && std::io::stderr().is_terminal();
        Self { what, total, done: 0, started: Instant::now(), delay: Duration::ZERO, shown: None, enabled }
    }

    /// Shows nothing before so long.
    pub(crate) fn after(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// So many bytes will it be.
    pub(crate) fn expect(&mut self, total: u64) {
        self.total = Some(total);
    }

    /// So many bytes more are done.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.at(self.done.saturating_add(bytes));
    }

    /// So many bytes are done in all.
    pub(crate) fn at(&mut self, done: u64) {
        self.done = done;
        if self.is_due() {
            self.shown = Some(Instant::now());
            self.put(&line(self.what, self.done, self.total, self.started.elapsed()));
        }
    }

    fn is_due(&self) -> bool {
        self.enabled
            && self.started.elapsed() >= self.delay
            && self.shown.is_none_or(|shown| shown.elapsed() >= INTERVAL)
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
    // What goes around a content, such as an archive's headers, is no part of the total.
    let done = done.min(total);
    let percent = u128::from(done) * 100 / u128::from(total);
    let left = total.saturating_sub(done).checked_div(rate).unwrap_or(0);
    let left = if left >= 60 { format!("{}m{:02}s", left / 60, left % 60) } else { format!("{left}s") };
    format!("{what}: {} of {} ({percent}%), {}/s, {left} left", show_size(done), show_size(total), show_size(rate))
}

/// What goes through it is told.
#[derive(Debug)]
pub(crate) struct Counted<'a, T>(pub(crate) T, pub(crate) &'a mut Progress);

impl<T: Read> Read for Counted<'_, T> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.0.read(buffer)?;
        self.1.add(u64::try_from(n).unwrap_or(0));
        Ok(n)
    }
}

impl<T: Write> Write for Counted<'_, T> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = self.0.write(bytes)?;
        self.1.add(u64::try_from(n).unwrap_or(0));
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_no_time_is_not_shown() {
        let mut progress = Progress::new("x", None, true).after(Duration::from_secs(60));
        progress.enabled = true;
        progress.add(1);
        assert!(!progress.is_due() && progress.shown.is_none());
        progress.delay = Duration::ZERO;
        assert!(progress.is_due());
        let mut through = Counted(&b"abc"[..], &mut progress);
        std::io::copy(&mut through, &mut std::io::sink()).unwrap();
        assert_eq!(progress.done, 4);
    }

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
        assert!(line("x", 7000, Some(5000), second).contains("(100%)"));
    }
}
