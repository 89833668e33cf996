//! Import tokens: they limit how many workers import at the same time.
//!
//! We cannot see what a worker does, only whether it waits. First a worker imports, which uses a processor or a disk.
//! Then it waits for the other workers, or for its first data.

use std::time::{Duration, Instant};

use crate::procfs::Activity;

/// How often we look at the token holders while other workers wait for a token.
const LOOK: Duration = Duration::from_millis(50);
/// A worker that has waited this long, without using a processor or a disk, has done its imports.
const REST: Duration = Duration::from_millis(100);
/// A token expires after this time, in case its holder computes and never waits.
const LONGEST: Duration = Duration::from_secs(60);

/// The tokens of a group.
pub(super) struct Tokens {
    count: usize,
    held: Vec<Held>,
    /// When to look at the holders next.
    due: Instant,
}

struct Held {
    worker: usize,
    pid: i32,
    begin: Instant,
    /// The oldest observation that equals the latest one, and its time.
    seen: Option<(Activity, Instant)>,
}

impl Tokens {
    pub(super) fn new(count: usize) -> Self {
        Self {
            count,
            held: Vec::new(),
            due: Instant::now(),
        }
    }

    pub(super) fn are_taken(&self) -> bool {
        self.held.len() >= self.count
    }

    /// When to look at the holders next.
    pub(super) fn due(&self) -> Instant {
        self.due
    }

    /// Gives a token to a worker that has just started.
    pub(super) fn give(&mut self, worker: usize, pid: i32, now: Instant) {
        self.held.push(Held {
            worker,
            pid,
            begin: now,
            seen: None,
        });
        if self.held.len() == self.count {
            self.due = now + LOOK;
        }
    }

    /// Takes back the token of a worker that has ended.
    pub(super) fn take_back(&mut self, worker: usize) {
        self.held.retain(|held| held.worker != worker);
    }

    /// Takes back the tokens of workers that seem to have done their imports. `see` returns `None` for a process that
    /// has ended or is hidden; its token is taken back, too.
    pub(super) fn look(&mut self, now: Instant, see: impl Fn(i32) -> Option<Activity>) {
        self.held.retain_mut(|held| held.holds_on(now, see(held.pid)));
        self.due = now + LOOK;
    }
}

impl Held {
    fn holds_on(&mut self, now: Instant, activity: Option<Activity>) -> bool {
        let Some(activity) = activity.filter(|_| now.saturating_duration_since(self.begin) < LONGEST) else {
            return false;
        };
        let since = match self.seen {
            Some((before, since)) if before == activity => since,
            _ => now,
        };
        self.seen = Some((activity, since));
        !(activity.waits && now.saturating_duration_since(since) >= REST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64, begin: Instant) -> Instant {
        begin + Duration::from_millis(ms)
    }

    #[test]
    fn a_token_is_held_until_its_worker_waits_for_a_while() {
        let waits = |ticks| Some(Activity { waits: true, ticks });
        let runs = |ticks| Some(Activity { waits: false, ticks });
        for (looks, is_held) in [
            (vec![], true),
            (vec![(50, runs(5)), (100, runs(10)), (150, runs(15))], true),
            // It waits for a disk, or for a processor.
            (vec![(50, runs(5)), (150, runs(5)), (950, runs(5))], true),
            (vec![(50, waits(5)), (100, waits(5))], true),
            (vec![(50, waits(5)), (100, waits(5)), (150, waits(5))], false),
            // Looked at between two imports, or while another thread works.
            (vec![(50, waits(5)), (100, waits(6)), (150, waits(7))], true),
            (vec![(50, waits(5)), (100, runs(5)), (150, waits(5))], true),
            (vec![(59_950, runs(5)), (60_000, runs(9))], false),
            (vec![(50, None)], false),
        ] {
            let begin = Instant::now();
            let mut tokens = Tokens::new(1);
            tokens.give(7, 4711, begin);
            for (ms, activity) in looks.clone() {
                tokens.look(at(ms, begin), |pid| activity.filter(|_| pid == 4711));
            }
            assert_eq!(tokens.are_taken(), is_held, "{looks:?}");
        }
    }

    #[test]
    fn the_token_of_a_worker_that_has_ended_is_free_at_once() {
        let begin = Instant::now();
        let mut tokens = Tokens::new(2);
        tokens.give(0, 11, begin);
        assert!(!tokens.are_taken());
        tokens.give(1, 12, at(30, begin));
        assert!(tokens.are_taken() && tokens.due == at(80, begin));
        tokens.take_back(5);
        assert!(tokens.are_taken());
        tokens.take_back(0);
        assert!(!tokens.are_taken());
    }
}
