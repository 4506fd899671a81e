//! How many requests are done before the guest hears of them.
//!
//! Pure: what happened comes in, how many to wait for goes out. An interrupt costs the guest more than a request costs us,
//! so a guest that has many requests under way should hear of several at once; one that waits for its only request must
//! hear at once. What it has under way cannot be seen, so it is learned: the number doubles while the guest offers more
//! although it was told nothing, and falls back to what came when it does not. How long to wait for that follows from how
//! fast requests come.

use std::time::Duration;

/// Most requests that are held back. A guest with 16 under way then reaps one half while we serve the other.
const MOST: u16 = 8;
/// Batches between two attempts to make them larger, after one that failed: an attempt in vain costs a wait. After several
/// that failed there are more, up to [`MOST_PATIENCE`].
const PATIENCE: u16 = 64;
const MOST_PATIENCE: u16 = 1024;
/// What a request is taken to need at most, with all that the guest does about it: so nothing is held back for longer than
/// four times this.
const MOST_PACE: Duration = Duration::from_millis(2);
/// Shortest sleep that is worth its system call.
const SHORTEST: Duration = Duration::from_micros(50);

/// What was learned of one guest's queue.
#[derive(Debug)]
pub(super) struct Batch {
    target: u16,
    /// Batches until the next attempt.
    patience: u16,
    /// What that was after the last one that failed.
    next_patience: u16,
    /// Time for each request while they come, averaged over some batches.
    pace: Duration,
}

impl Batch {
    /// Longest that anything is held back.
    pub(super) const LONGEST: Duration = MOST_PACE.saturating_mul(4);

    /// Nothing is known.
    pub(super) fn new() -> Self {
        Self { target: 1, patience: 0, next_patience: PATIENCE, pace: MOST_PACE }
    }

    /// Requests to have done before the guest is told.
    pub(super) fn target(&self) -> u16 {
        self.target
    }

    /// How long the guest is waited for while it was not told of something.
    pub(super) fn wait(&self) -> Duration {
        self.pace.saturating_mul(4)
    }

    /// How long to sleep between two looks.
    pub(super) fn nap(&self) -> Duration {
        (self.pace / 4).max(SHORTEST)
    }

    /// So many were done, and the guest was told, so long after it was told the last time; whether `more` wait already, which
    /// shows that it has more under way.
    pub(super) fn reached(&mut self, done: u16, took: Duration, more: bool) {
        self.learn_pace(done, took);
        if self.patience == 0 || more {
            if self.target > 1 {
                self.next_patience = PATIENCE;
            }
            self.target = self.target.saturating_mul(2).min(MOST);
        } else {
            self.patience = self.patience.saturating_sub(1);
        }
    }

    /// Only so many were done, and the guest offered no more.
    pub(super) fn fell_short(&mut self, done: u16, took: Duration) {
        self.learn_pace(done, took);
        self.target = done.clamp(1, MOST);
        self.patience = self.next_patience;
        self.next_patience = self.next_patience.saturating_mul(2).min(MOST_PATIENCE);
    }

    fn learn_pace(&mut self, done: u16, took: Duration) {
        let each = took.checked_div(u32::from(done)).unwrap_or(MOST_PACE).min(MOST_PACE);
        self.pace = self.pace.saturating_mul(3).saturating_add(each) / 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EACH: Duration = Duration::from_micros(20);

    /// Plays a guest with so many requests under way, which offers a new one for each that it is told of. Says what each
    /// of the last interrupts told, and how many looks were in vain in all.
    fn play(under_way: u16) -> (Vec<u16>, u32) {
        let (mut batch, mut told, mut in_vain) = (Batch::new(), Vec::new(), 0);
        for _ in 0..200 {
            let done = batch.target().min(under_way);
            if done < batch.target() {
                in_vain += 1;
                batch.fell_short(done, EACH * u32::from(done));
            } else {
                batch.reached(done, EACH * u32::from(done), false);
            }
            told.push(done);
        }
        (told.split_off(190), in_vain)
    }

    #[test]
    fn a_guest_with_one_request_hears_at_once() {
        let (told, in_vain) = play(1);
        assert_eq!(told, [1; 10]);
        assert!(in_vain <= 4, "{in_vain}");
    }

    #[test]
    fn a_guest_with_many_hears_of_half_of_them() {
        assert_eq!(play(16), (vec![8; 10], 0));
    }

    #[test]
    fn a_guest_with_a_few_hears_of_all() {
        let (told, in_vain) = play(3);
        assert_eq!(told, [3; 10]);
        assert!(in_vain <= 4, "{in_vain}");
    }

    #[test]
    fn the_wait_follows_the_pace_and_is_bounded() {
        let mut batch = Batch::new();
        for _ in 0..40 {
            batch.reached(8, EACH * 8, false);
        }
        let wait = batch.wait();
        assert!(wait >= EACH * 4 && wait <= EACH * 5, "{wait:?}");
        for _ in 0..40 {
            batch.fell_short(1, Duration::from_secs(3600));
        }
        assert!(batch.wait() <= Duration::from_millis(8), "{:?}", batch.wait());
        batch.reached(0, Duration::MAX, false);
    }

    #[test]
    fn a_guest_that_takes_up_more_is_noticed_at_once() {
        let mut batch = Batch::new();
        for _ in 0..10 {
            batch.fell_short(1, EACH);
        }
        batch.reached(1, EACH, false);
        assert_eq!(batch.target(), 1);
        (0..3).for_each(|_| batch.reached(1, EACH, true));
        assert_eq!(batch.target(), 8);
    }
}
