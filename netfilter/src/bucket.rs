//! A token bucket.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::time::Duration;

/// Lets some things pass in some time, and a burst at once after a rest. Time is monotonic and comes from outside.
#[derive(Debug, Clone)]
pub struct Bucket {
    /// What a nanosecond adds to `level`.
    rate: u64,
    /// What a token takes from it.
    cost: u64,
    level: u64,
    full: u64,
    last: Duration,
}

impl Bucket {
    /// A full bucket that gets `rate` tokens a second and holds `burst`.
    pub fn new(rate: u64, burst: u64) -> Self {
        Self::per(Duration::from_secs(1), rate, burst)
    }

    /// A full bucket that gets `rate` tokens in each `period` and holds `burst`.
    pub fn per(period: Duration, rate: u64, burst: u64) -> Self {
        let cost = u64::try_from(period.as_nanos()).unwrap_or(u64::MAX).max(1);
        let full = burst.saturating_mul(cost);
        Self { rate, cost, level: full, full, last: Duration::ZERO }
    }

    /// Takes one token, if there is one.
    pub fn take(&mut self, now: Duration) -> bool {
        self.take_up_to(1, now) == 1
    }

    /// Takes at most `wanted` tokens, and says how many.
    pub fn take_up_to(&mut self, wanted: u64, now: Duration) -> u64 {
        let taken = self.available(now).min(wanted);
        self.level = self.level.saturating_sub(taken.saturating_mul(self.cost));
        taken
    }

    /// How many tokens there are.
    pub fn available(&mut self, now: Duration) -> u64 {
        let passed = u64::try_from(now.saturating_sub(self.last).as_nanos()).unwrap_or(u64::MAX);
        self.last = self.last.max(now);
        self.level = self.level.saturating_add(passed.saturating_mul(self.rate)).min(self.full);
        self.level.checked_div(self.cost).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row 99: a clock that stands still or goes back gives nothing.
    #[test]
    fn tokens_come_with_time_alone() {
        let mut bucket = Bucket::new(10, 5);
        let at = Duration::from_millis;
        assert_eq!((0..10).filter(|_| bucket.take(at(1000))).count(), 5);
        assert!(!bucket.take(at(1099)));
        assert!(bucket.take(at(1100)));
        assert!(!bucket.take(at(1100)));
        assert!(!bucket.take(at(500)), "back in time");
        assert!(!bucket.take(at(1100)), "and forth again");
        assert_eq!((0..10).filter(|_| bucket.take(at(60_000))).count(), 5);
        assert_eq!(bucket.take_up_to(3, at(60_200)), 2);
    }

    #[test]
    fn a_large_rate_does_not_overflow() {
        let mut bucket = Bucket::new(u64::MAX, u64::MAX);
        assert!(bucket.available(Duration::MAX) > 0);
        assert!(bucket.take_up_to(u64::MAX, Duration::MAX) > 0);
    }
}
