//! Which callers to refuse: connections that have not shown yet that they know a key. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Connections of strangers that may be open besides one for each expected agent.
pub const SPARE: usize = 64;

#[derive(Debug)]
struct Caller {
    host: IpAddr,
    deadline: Instant,
    /// Its first bytes were made with the key. They may be a copy, so this is no proof yet.
    has_answered: bool,
}

/// The callers, by numbers that grow in the order in which they came.
#[derive(Debug)]
pub struct Strangers {
    patience: Duration,
    callers: BTreeMap<u64, Caller>,
    of_host: BTreeMap<IpAddr, BTreeSet<u64>>,
    answered: BTreeSet<u64>,
}

impl Strangers {
    /// `patience`: how long a caller has to show that it knows a key.
    pub fn new(patience: Duration) -> Self {
        Self {
            patience,
            callers: BTreeMap::new(),
            of_host: BTreeMap::new(),
            answered: BTreeSet::new(),
        }
    }

    /// Notes a caller.
    pub fn arrive(&mut self, caller: u64, host: IpAddr, now: Instant) {
        let deadline = now + self.patience;
        self.of_host.entry(host).or_default().insert(caller);
        self.callers.insert(
            caller,
            Caller {
                host,
                deadline,
                has_answered: false,
            },
        );
    }

    /// Notes that the first bytes of a caller were made with a key.
    pub fn answer(&mut self, caller: u64) {
        if let Some(one) = self.callers.get_mut(&caller)
            && !std::mem::replace(&mut one.has_answered, true)
        {
            let host = one.host;
            self.forget_host(caller, host);
            self.answered.insert(caller);
        }
    }

    /// Forgets a caller.
    pub fn leave(&mut self, caller: u64) {
        if let Some(one) = self.callers.remove(&caller)
            && !self.answered.remove(&caller)
        {
            self.forget_host(caller, one.host);
        }
    }

    fn forget_host(&mut self, caller: u64, host: IpAddr) {
        if let Some(callers) = self.of_host.get_mut(&host) {
            callers.remove(&caller);
            if callers.is_empty() {
                self.of_host.remove(&host);
            }
        }
    }

    /// The caller to refuse because there are more than `most` of its kind.
    pub fn too_many(&self, most: usize) -> Option<u64> {
        if self.callers.len() - self.answered.len() > most {
            return self.least_welcome();
        }
        (self.answered.len() > most)
            .then(|| self.answered.first().copied())
            .flatten()
    }

    /// The caller to refuse first: the oldest one of the address with the most connections, or of several such
    /// addresses. So a host that floods us hurts itself first. Callers whose first bytes were made with a key, now or
    /// at another time, are refused only if there are no others.
    pub fn least_welcome(&self) -> Option<u64> {
        let most = self
            .of_host
            .values()
            .max_by_key(|callers| (callers.len(), Reverse(callers.first())));
        most.unwrap_or(&self.answered).first().copied()
    }

    /// When the time of the oldest caller is over.
    pub fn due(&self) -> Option<Instant> {
        self.callers.values().next().map(|caller| caller.deadline)
    }

    /// The oldest caller, if its time is over.
    pub fn expired(&self, now: Instant) -> Option<u64> {
        let (caller, one) = self.callers.iter().next()?;
        (one.deadline <= now).then_some(*caller)
    }
}

/// How many callers may be connected at a time: never as many as we have descriptors. `soft_limit`: of descriptors.
pub fn most_callers(expected: usize, soft_limit: Option<u64>) -> usize {
    let wanted = SPARE + expected;
    soft_limit.map_or(wanted, |limit| wanted.min((limit as usize / 2).max(SPARE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(number: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, number])
    }

    #[test]
    fn a_host_that_floods_hurts_itself_first() {
        let (mut strangers, now) = (Strangers::new(Duration::from_secs(10)), Instant::now());
        strangers.arrive(1, host(1), now);
        for caller in 2..=11 {
            strangers.arrive(caller, host(2), now);
        }
        assert_eq!(strangers.too_many(11), None);
        assert_eq!(strangers.too_many(10), Some(2));
        strangers.leave(2);
        assert_eq!(strangers.too_many(9), Some(3));
    }

    #[test]
    fn among_hosts_with_equally_many_callers_the_oldest_goes() {
        let (mut strangers, now) = (Strangers::new(Duration::from_secs(10)), Instant::now());
        for (caller, address) in [(1, 9), (2, 3), (3, 5), (4, 3), (5, 9), (6, 5)] {
            strangers.arrive(caller, host(address), now);
        }
        for oldest in [1, 2, 3, 4, 5, 6] {
            assert_eq!(strangers.least_welcome(), Some(oldest));
            strangers.leave(oldest);
        }
    }

    #[test]
    fn a_flood_does_not_push_out_a_caller_that_has_begun_with_the_key() {
        let (mut strangers, now) = (Strangers::new(Duration::from_secs(10)), Instant::now());
        for caller in 1..=6 {
            strangers.arrive(caller, host(1), now);
        }
        strangers.answer(1);
        assert_eq!(strangers.too_many(4), Some(2));
        for caller in 2..=6 {
            strangers.answer(caller);
        }
        assert_eq!(strangers.too_many(6), None);
        assert_eq!(
            strangers.too_many(5),
            Some(1),
            "copies push out the oldest of themselves"
        );
        assert_eq!(strangers.least_welcome(), Some(1));
    }

    #[test]
    fn a_caller_that_says_nothing_is_refused_in_time() {
        let (mut strangers, now) = (Strangers::new(Duration::from_secs(10)), Instant::now());
        assert_eq!(strangers.due(), None);
        strangers.arrive(1, host(1), now);
        strangers.arrive(2, host(1), now + Duration::from_secs(1));
        let due = now + Duration::from_secs(10);
        assert_eq!(strangers.due(), Some(due));
        assert_eq!(strangers.expired(now + Duration::from_millis(9999)), None);
        assert_eq!(strangers.expired(due), Some(1));
        strangers.leave(1);
        assert_eq!(strangers.expired(due), None);
    }

    #[test]
    fn half_of_the_descriptors_stay_free() {
        assert_eq!(most_callers(2, Some(1024)), SPARE + 2);
        assert_eq!(most_callers(10_000, Some(1024)), 512);
        assert_eq!(most_callers(10_000, Some(16)), SPARE);
        assert_eq!(most_callers(10_000, None), SPARE + 10_000);
    }
}
