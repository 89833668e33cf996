//! Deaths of workers: they are collected in the kernel's order, each when nothing more will become known about it.

use std::time::{Instant, SystemTime};

use crate::error::Error;
use crate::event::{Ending, Event, Exit};
use crate::group::Input;
use crate::supervisor::Supervisor;
use crate::supervisor::death_queue::{Overdue, Seen};
use crate::supervisor::job::Job;
use crate::sys::wait::{Target, try_wait};

impl Supervisor {
    /// Notes that a worker has died.
    pub(super) fn note_death(&mut self, worker: usize, time: SystemTime) {
        if let Some(job) = &mut self.job {
            job.note_death(worker, time);
        }
    }

    /// Collects deaths in order, up to the first that a fork server still has to report.
    pub(super) fn collect_deaths(&mut self, inputs: &mut Vec<Input>) -> Result<(), Error> {
        while let Some(seen) = self.first_death_to_collect() {
            // The worker may have died of a key, and the signal of that key comes only now.
            if let Some(job) = &mut self.job {
                job.set_dead(seen.worker, false);
            }
            self.await_key(seen.worker, inputs)?;
            match self.reap(seen.worker, seen.time) {
                Some(input) => inputs.push(input),
                None => self.wait_for_tracer(seen),
            }
        }
        Ok(())
    }

    /// Collects a worker if it is dead and the kernel already shows us its death.
    pub(super) fn reap(&mut self, index: usize, now: SystemTime) -> Option<Input> {
        let job = self.job.as_mut()?;
        job.end_helpers_of(index);
        let reaped = job.reap(index, now, &self.poller);
        let (exit, input) = reaped.or_else(|| self.collect_forked(index, now))?;
        self.events.push(Event::Exited(exit));
        Some(input)
    }

    /// Sets aside a death that the kernel does not show us yet. We try again later, and do not watch the worker until
    /// then.
    fn wait_for_tracer(&mut self, seen: Seen) {
        let Some(job) = self.job.as_mut().filter(|job| job.is_running(seen.worker)) else {
            return;
        };
        if let Some(pidfd) = job.pidfd_of(seen.worker) {
            self.poller.forget(pidfd);
        }
        job.deaths_mut().wait_for_tracer(seen, Instant::now());
        job.set_dead(seen.worker, true);
    }

    /// Puts the deaths of traced workers back into the queue, before later deaths.
    pub(super) fn retry_traced(&mut self) {
        if let Some(job) = &mut self.job {
            job.deaths_mut().retry_traced(Instant::now());
        }
    }

    fn first_death_to_collect(&mut self) -> Option<Seen> {
        loop {
            let job = self.job.as_mut()?;
            let seen = job.deaths().first()?;
            if let Some(origin) = job.origin_of(seen.worker)
                && let Some(server) = self.servers.get_mut(origin.server).and_then(Option::as_mut)
                && !server.has_told(origin.order, &self.poller)
            {
                match job.look_at_first_death(Instant::now())? {
                    Overdue::NotYet => return None,
                    // The kernel does not show it to the server, either.
                    Overdue::Traced(seen) => {
                        self.wait_for_tracer(seen);
                        continue;
                    }
                    Overdue::Late => server.is_late(),
                }
            }
            return job.deaths_mut().pop();
        }
    }

    /// Stops watching workers whose deaths are noted but not collected, so that the poller does not report them again
    /// and again.
    pub(super) fn let_the_dead_wait(&self) {
        let Some(job) = &self.job else { return };
        for worker in job.deaths().workers() {
            if let Some(pidfd) = job.pidfd_of(worker) {
                self.poller.forget(pidfd);
            }
        }
    }

    /// Collects a worker that a fork server has forked; `None` if it is alive, or was not forked.
    fn collect_forked(&mut self, index: usize, now: SystemTime) -> Option<(Exit, Input)> {
        let (origin, pidfd) = self.job.as_ref()?.dead_forked(index)?;
        let server = self.servers.get(origin.server)?.as_ref()?;
        let is_gone = server.link().is_none();
        let death = server.death_of(origin.order).or_else(|| {
            // An agent adopts the children of a dead server. Dead children of a living server are zombies.
            if is_gone {
                try_wait(Target::PidFd(pidfd), true).ok().flatten()
            } else {
                self.job.as_ref()?.death_in_procfs(index)
            }
        });
        let ending = match &death {
            Some(death) => Ending::from(death),
            // The kernel killed it when its parent died.
            None if is_gone => Ending::Signal {
                number: libc::SIGKILL,
                core: false,
            },
            None => Ending::Lost,
        };
        self.tell_of_server(origin.server);
        self.job.as_mut()?.bury(index, ending, death, now, &self.poller)
    }

    /// Lets all workers that have died of a signal count as running, so that they die of it when we hear of it.
    pub(super) fn raise_the_dead(&mut self, signal: i32) {
        let count = self.job.as_ref().map_or(0, Job::size);
        for index in 0..count {
            if self.deadly_signal(index) == Some(signal)
                && let Some(job) = &mut self.job
            {
                job.set_dead(index, false);
            }
        }
    }

    /// Whether a worker is in the terminal's process group.
    pub(super) fn is_foreground(&self, index: usize) -> bool {
        let spec = self.job.as_ref().and_then(|job| job.spec().workers.get(index));
        spec.is_some_and(|spec| spec.foreground)
    }

    /// The signal that has ended a worker, by the kernel's report or by the worker's exit code (128 + signal).
    pub(super) fn deadly_signal(&mut self, index: usize) -> Option<i32> {
        let job = self.job.as_ref()?;
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
