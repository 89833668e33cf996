//! The deaths of a group that are to be collected, in the kernel's order.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime};

use crate::forkserver::DEATH_PATIENCE;

/// How often a dead worker is looked at that somebody traces: nothing tells that its tracer is done with it.
const TRACED_POLL: Duration = Duration::from_millis(10);

/// A death that is collected once it is known how the worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) worker: usize,
    pub(super) time: SystemTime,
    /// The fork server that could tell is not waited for after this time.
    due: Instant,
    /// A tracer had still to see it when that was over.
    is_traced: bool,
}

/// What to do about the first death.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// Its fork server may still tell.
    NotYet,
    /// Its tracer has to see it first.
    Traced(Seen),
    /// Its fork server does not tell in time.
    Late,
}

#[derive(Debug, Default)]
pub(super) struct DeathQueue {
    seen: VecDeque<Seen>,
    /// Deaths that somebody traces: the kernel shows them to the tracer first.
    traced: Vec<Seen>,
    /// When these are tried again.
    traced_due: Option<Instant>,
}

impl DeathQueue {
    pub(super) fn push(&mut self, worker: usize, time: SystemTime, now: Instant) {
        self.seen.push_back(Seen {
            worker,
            time,
            due: now + DEATH_PATIENCE,
            is_traced: false,
        });
    }

    pub(super) fn first(&self) -> Option<Seen> {
        self.seen.front().copied()
    }

    pub(super) fn pop(&mut self) -> Option<Seen> {
        self.seen.pop_front()
    }

    /// What to do about the first death, of which a fork server has not told. A traced one leaves the queue, and its
    /// server has time again once the tracer is done with it.
    pub(super) fn look_at_first(
        &mut self,
        now: Instant,
        is_traced: impl Fn(usize) -> bool,
    ) -> Option<Overdue> {
        let first = self.seen.front_mut()?;
        if now < first.due {
            return Some(Overdue::NotYet);
        }
        if is_traced(first.worker) {
            first.is_traced = true;
            return self.pop().map(Overdue::Traced);
        }
        if first.is_traced {
            first.due = now + DEATH_PATIENCE;
            first.is_traced = false;
            return Some(Overdue::NotYet);
        }
        Some(Overdue::Late)
    }

    /// A death that is not shown to us yet is tried again.
    pub(super) fn wait_for_tracer(&mut self, seen: Seen, now: Instant) {
        self.traced.push(seen);
        self.traced_due = Some(now + TRACED_POLL);
    }

    /// Has traced workers looked at again, before those that died later.
    pub(super) fn retry_traced(&mut self, now: Instant) {
        if self.traced_due.is_some_and(|due| due <= now) {
            self.traced_due = None;
            for seen in self.traced.drain(..).rev() {
                self.seen.push_front(seen);
            }
        }
    }

    /// When something is to be done about it though nothing has happened.
    pub(super) fn due(&self) -> Option<Instant> {
        let first = self.seen.front().map(|seen| seen.due);
        [first, self.traced_due].into_iter().flatten().min()
    }

    /// Workers whose deaths are not collected.
    pub(super) fn workers(&self) -> impl Iterator<Item = usize> {
        self.seen.iter().map(|seen| seen.worker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workers(queue: &mut DeathQueue) -> Vec<usize> {
        std::iter::from_fn(|| queue.pop())
            .map(|seen| seen.worker)
            .collect()
    }

    #[test]
    fn what_a_tracer_holds_up_comes_before_what_died_later() {
        let (now, time) = (Instant::now(), SystemTime::now());
        let mut queue = DeathQueue::default();
        for worker in [3, 1] {
            queue.push(worker, time, now);
            let seen = queue.pop().unwrap();
            queue.wait_for_tracer(seen, now);
        }
        queue.push(2, time, now);
        assert_eq!(queue.due(), Some(now + TRACED_POLL));
        queue.retry_traced(now);
        assert_eq!(queue.workers().collect::<Vec<_>>(), [2]);
        queue.retry_traced(now + TRACED_POLL);
        assert_eq!(queue.due(), Some(now + DEATH_PATIENCE));
        assert_eq!(workers(&mut queue), [3, 1, 2]);
        assert_eq!(queue.due(), None);
    }

    #[test]
    fn a_server_has_its_time_again_when_a_tracer_is_done() {
        let (now, time) = (Instant::now(), SystemTime::now());
        let mut queue = DeathQueue::default();
        assert_eq!(queue.look_at_first(now, |_| true), None);
        queue.push(7, time, now);
        let late = now + DEATH_PATIENCE;
        assert_eq!(queue.look_at_first(now, |_| true), Some(Overdue::NotYet));
        let Some(Overdue::Traced(seen)) = queue.look_at_first(late, |worker| worker == 7) else {
            panic!("it is traced");
        };
        queue.wait_for_tracer(seen, late);
        queue.retry_traced(late + TRACED_POLL);
        assert_eq!(queue.look_at_first(late, |_| false), Some(Overdue::NotYet));
        assert_eq!(queue.look_at_first(late, |_| false), Some(Overdue::NotYet));
        assert_eq!(
            queue.look_at_first(late + DEATH_PATIENCE, |_| false),
            Some(Overdue::Late)
        );
        assert_eq!(workers(&mut queue), [7]);
    }
}
