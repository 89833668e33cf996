//! A number that threads wait for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How often a waiting thread looks for signals.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// A number that threads wait for to become zero.
#[derive(Debug, Default)]
pub(crate) struct Count {
    number: Mutex<usize>,
    zero: Condvar,
}

impl Count {
    fn lock(&self) -> MutexGuard<'_, usize> {
        // Each statement under the lock leaves the number true, so a panic does no harm.
        self.number.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self) {
        *self.lock() += 1;
    }

    pub(crate) fn take(&self) {
        let mut number = self.lock();
        *number -= 1;
        if *number == 0 {
            self.zero.notify_all();
        }
    }

    /// Waits until the number is zero; false: the time was over first, or `pending` has returned true.
    pub(crate) fn wait(&self, timeout: Option<Duration>, mut pending: impl FnMut() -> bool) -> bool {
        let begin = Instant::now();
        loop {
            let left = timeout.map_or(SLICE, |timeout| timeout.saturating_sub(begin.elapsed()));
            let waited = self
                .zero
                .wait_timeout_while(self.lock(), left.min(SLICE), |number| *number > 0);
            let (number, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if *number == 0 {
                return true;
            }
            drop(number); // `pending` may call anything
            if left.is_zero() || pending() {
                return false;
            }
        }
    }
}

/// One of the things that a [`Count`] counts, until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Arc<Count>);

impl Counted {
    pub(crate) fn new(count: &Arc<Count>) -> Self {
        count.add();
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.take();
    }
}
