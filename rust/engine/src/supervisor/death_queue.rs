//! Deaths of a group that are not collected yet, in the kernel's order.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime};

use crate::forkserver::DEATH_PATIENCE;

/// How often we look at a dead worker with a tracer: no event says when its tracer is done.
const TRACED_POLL: Duration = Duration::from_millis(10);

/// A noted death. It is collected once it is known how the worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) worker: usize,
    pub(super) time: SystemTime,
    /// When we stop waiting for the fork server's report.
    due: Instant,
    /// Whether the worker was still traced at that time.
    is_traced: bool,
}

/// What to do about the first death.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// Its fork server may still report it.
    NotYet,
    /// Its tracer has to see it first.
    Traced(Seen),
    /// Its fork server has not reported it in time.
    Late,
}

#[derive(Debug, Default)]
pub(super) struct DeathQueue {
    pub(super) seen: VecDeque<Seen>,
    /// Deaths of traced workers: the kernel shows them to the tracer first.
    traced: Vec<Seen>,
    /// When to try these again.
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

    /// What to do about the first death, which a fork server has not reported. The death of a traced worker leaves
    /// the queue. Once the tracer is done, the server gets its full time again.
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
            return self.seen.pop_front().map(Overdue::Traced);
        }
        if first.is_traced {
            first.due = now + DEATH_PATIENCE;
            first.is_traced = false;
            return Some(Overdue::NotYet);
        }
        Some(Overdue::Late)
    }

    /// Keeps a death that the kernel does not show us yet, to try it again.
    pub(super) fn wait_for_tracer(&mut self, seen: Seen, now: Instant) {
        self.traced.push(seen);
        self.traced_due = Some(now + TRACED_POLL);
    }

    /// Puts the deaths of traced workers back into the queue, before later deaths.
    pub(super) fn retry_traced(&mut self, now: Instant) {
        if self.traced_due.is_some_and(|due| due <= now) {
            self.traced_due = None;
            for seen in self.traced.drain(..).rev() {
                self.seen.push_front(seen);
            }
        }
    }

    /// When the queue must be looked at again, even without a new event.
    pub(super) fn due(&self) -> Option<Instant> {
        let first = self.seen.front().map(|seen| seen.due);
        [first, self.traced_due].into_iter().flatten().min()
    }

    /// Workers in the queue.
    pub(super) fn workers(&self) -> impl Iterator<Item = usize> {
        self.seen.iter().map(|seen| seen.worker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workers(queue: &mut DeathQueue) -> Vec<usize> {
        std::iter::from_fn(|| queue.seen.pop_front())
            .map(|seen| seen.worker)
            .collect()
    }

    #[test]
    fn what_a_tracer_holds_up_comes_before_what_died_later() {
        let (now, time) = (Instant::now(), SystemTime::now());
        let mut queue = DeathQueue::default();
        for worker in [3, 1] {
            queue.push(worker, time, now);
            let seen = queue.seen.pop_front().unwrap();
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
