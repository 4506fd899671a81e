//! Flushes that arrive while one runs wait for it and then share one.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How far flushes have come. They are numbered from 1, and one runs at a time.
#[derive(Debug, Default)]
struct Progress {
    running: bool,
    started: u64,
    finished: u64,
    /// The last one that succeeded. It made everything durable that any earlier one should have.
    succeeded: u64,
}

/// The meeting point.
#[derive(Debug, Default)]
pub(super) struct Joined {
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// How a joined flush ended.
pub(super) enum Outcome<E> {
    /// A flush that began after this one was asked for has succeeded.
    Done,
    /// This thread ran the flush, and it failed.
    Failed(E),
    /// Another thread ran it, and it failed there.
    FailedElsewhere,
}

impl Joined {
    /// Returns when a flush that began after this call has ended; runs it if no other thread does.
    pub(super) fn run<E>(&self, flush: impl FnOnce() -> Result<(), E>) -> Outcome<E> {
        let mut progress = self.lock();
        // One that runs already may have begun before the caller's last write returned, so it does not count.
        let wanted = progress.started.saturating_add(1);
        loop {
            if progress.succeeded >= wanted {
                return Outcome::Done;
            }
            if progress.finished >= wanted {
                return Outcome::FailedElsewhere;
            }
            if !progress.running {
                break;
            }
            progress = self.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
        progress.running = true;
        progress.started = wanted;
        drop(progress);
        let result = flush();
        let mut progress = self.lock();
        progress.running = false;
        progress.finished = wanted;
        if result.is_ok() {
            progress.succeeded = wanted;
        }
        drop(progress);
        self.changed.notify_all();
        result.map_or_else(Outcome::Failed, |()| Outcome::Done)
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
