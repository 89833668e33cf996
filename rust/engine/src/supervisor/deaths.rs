//! Deaths of workers: each is collected in the kernel's order, once all is known of it that will be.

use std::time::{Duration, Instant, SystemTime};

use crate::error::Error;
use crate::event::{Ending, Event, Exit};
use crate::forkserver::DEATH_PATIENCE;
use crate::group::Input;
use crate::supervisor::Supervisor;
use crate::supervisor::job::Seen;
use crate::sys::wait::{Target, try_wait};

/// How often a dead worker is looked at that somebody traces: nothing tells that its tracer is done with it.
const TRACED_POLL: Duration = Duration::from_millis(10);

impl Supervisor {
    /// Notes that a worker has died.
    pub(super) fn note_death(&mut self, worker: usize, time: SystemTime) {
        let Some(job) = &mut self.job else { return };
        if let Some(state) = job.workers.get_mut(worker).filter(|state| !state.is_dead) {
            state.is_dead = true;
            let due = Instant::now() + DEATH_PATIENCE;
            job.deaths_seen.push_back(Seen {
                worker,
                time,
                due,
                is_traced: false,
            });
        }
    }

    /// Collects the dead, from the first to one of whom a fork server has still to tell how it ended.
    pub(super) fn collect_deaths(&mut self, inputs: &mut Vec<Input>) -> Result<(), Error> {
        while let Some(seen) = self.first_death_to_collect() {
            // It may have died of a key that is heard of only now.
            self.set_dead(seen.worker, false);
            self.await_key(seen.worker, inputs)?;
            match self.reap(seen.worker, seen.time) {
                Some(input) => inputs.push(input),
                None => self.wait_for_tracer(seen),
            }
        }
        Ok(())
    }

    /// Collects a worker, if it is dead and that is shown to us.
    pub(super) fn reap(&mut self, index: usize, now: SystemTime) -> Option<Input> {
        let reaped = self.job.as_mut()?.reap(index, now, &self.poller);
        let (exit, input) = reaped.or_else(|| self.collect_forked(index, now))?;
        if let Some(tokens) = self.job.as_mut().and_then(|job| job.tokens.as_mut()) {
            tokens.take_back(index);
        }
        self.events.push(Event::Exited(exit));
        Some(input)
    }

    /// A death that is not shown to us yet is tried again, and not heard of until then.
    fn wait_for_tracer(&mut self, seen: Seen) {
        let Some(job) = self.job.as_mut().filter(|job| job.is_running(seen.worker)) else {
            return;
        };
        if let Some(pidfd) = job.pidfd_of(seen.worker) {
            self.poller.forget(pidfd);
        }
        job.deaths_traced.push(seen);
        job.traced_due = Some(Instant::now() + TRACED_POLL);
        self.set_dead(seen.worker, true);
    }

    fn set_dead(&mut self, worker: usize, is_dead: bool) {
        let job = self.job.as_mut();
        if let Some(state) = job.and_then(|job| job.workers.get_mut(worker)) {
            state.is_dead = is_dead;
        }
    }

    /// Has traced workers looked at again, before those that died later.
    pub(super) fn retry_traced(&mut self) {
        let Some(job) = &mut self.job else { return };
        if job.traced_due.is_some_and(|due| due <= Instant::now()) {
            job.traced_due = None;
            for seen in job.deaths_traced.drain(..).rev() {
                job.deaths_seen.push_front(seen);
            }
        }
    }

    fn first_death_to_collect(&mut self) -> Option<Seen> {
        loop {
            let job = self.job.as_mut()?;
            let seen = *job.deaths_seen.front()?;
            if let Some(origin) = job.origin_of(seen.worker)
                && let Some(server) = self.servers.get_mut(origin.server).and_then(Option::as_mut)
                && !server.has_told(origin.order, &self.poller)
            {
                let now = Instant::now();
                if now < seen.due {
                    return None;
                }
                if job.is_traced(seen.worker) {
                    // The server is not shown it, either.
                    job.deaths_seen.pop_front();
                    self.wait_for_tracer(Seen {
                        is_traced: true,
                        ..seen
                    });
                    continue;
                }
                if seen.is_traced {
                    // It may tell now.
                    job.deaths_seen.front_mut()?.due = now + DEATH_PATIENCE;
                    job.deaths_seen.front_mut()?.is_traced = false;
                    return None;
                }
                server.is_late();
            }
            return job.deaths_seen.pop_front();
        }
    }

    /// The deaths that are not collected yet are not to be heard of again and again.
    pub(super) fn let_the_dead_wait(&self) {
        let Some(job) = &self.job else { return };
        for seen in &job.deaths_seen {
            if let Some(pidfd) = job.pidfd_of(seen.worker) {
                self.poller.forget(pidfd);
            }
        }
    }

    /// Collects a worker that a fork server has forked; `None` when it is alive, or not of that kind.
    fn collect_forked(&mut self, index: usize, now: SystemTime) -> Option<(Exit, Input)> {
        let (origin, pidfd) = self.job.as_ref()?.dead_forked(index)?;
        let server = self.servers.get(origin.server)?.as_ref()?;
        let is_gone = server.link().is_none();
        let death = server.death_of(origin.order).or_else(|| {
            // An agent adopts the children of a dead server; those of a living one are zombies.
            if is_gone {
                try_wait(Target::PidFd(pidfd), true).ok().flatten()
            } else {
                self.job.as_ref()?.death_in_procfs(index)
            }
        });
        let ending = match &death {
            Some(death) => Ending::from(death),
            // It was killed with its parent.
            None if is_gone => Ending::Signal {
                number: libc::SIGKILL,
                core: false,
            },
            None => Ending::Lost,
        };
        self.tell_of_server(origin.server);
        self.job.as_mut()?.bury(index, ending, death, now, &self.poller)
    }

    /// The signal of which a worker in the terminal's group has died, as it or the kernel says.
    pub(super) fn signal_of_foreground(&mut self, index: usize) -> Option<i32> {
        let job = self.job.as_ref()?;
        job.spec.workers.get(index).filter(|spec| spec.foreground)?;
        let death = match job.origin_of(index) {
            Some(origin) => self
                .servers
                .get(origin.server)?
                .as_ref()?
                .death_of(origin.order)?,
            None => job.death_of(index)?,
        };
        let number = if death.signaled {
            death.status
        } else {
            death.status - 128
        };
        (number > 0).then_some(number)
    }
}
