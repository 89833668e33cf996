//! A number that threads wait for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a waiting thread looks for signals.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// A number that threads wait for to become zero.
#[derive(Debug, Default)]
pub(crate) struct Count {
    number: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Count {
    pub(crate) fn add(&self, count: isize) {
        let before = self.number.fetch_add(count as usize, Ordering::SeqCst);
        if before.wrapping_add(count as usize) == 0 {
            drop(self.lock.lock());
            self.changed.notify_all();
        }
    }

    /// Waits until the number is zero; false: the time was over first, or `pending` has returned true.
    pub(crate) fn wait(&self, timeout: Option<Duration>, mut pending: impl FnMut() -> bool) -> bool {
        let begin = Instant::now();
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if self.number.load(Ordering::SeqCst) == 0 {
                return true;
            }
            let left = timeout.map_or(SLICE, |timeout| timeout.saturating_sub(begin.elapsed()));
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(guard, left.min(SLICE));
            let (again, _) = waited.unwrap_or_else(PoisonError::into_inner);
            drop(again);
            if pending() {
                return false;
            }
            guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        }
    }
}
