//! Deaths of workers: they are collected in the kernel's order, each when nothing more will become known about it.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant, SystemTime};

use crate::error::Error;
use crate::event::{Ending, Event, Exit};
use crate::group::Input;
use crate::poller::{Poller, is_readable};
use crate::procfs;
use crate::supervisor::Supervisor;
use crate::supervisor::death_queue::{Overdue, Seen};
use crate::supervisor::job::{Job, Origin, State, Worker, without_process};
use crate::sys::wait::{Death, Target, try_wait};

impl Supervisor {
    /// Collects deaths in order, up to the first that a fork server still has to report.
    pub(super) fn collect_deaths(&mut self, inputs: &mut Vec<Input>) -> Result<(), Error> {
        while let Some(seen) = self.first_death_to_collect() {
            // The worker may have died of a key, and the signal of that key comes only now.
            if let Some(job) = &mut self.job {
                job.workers[seen.worker].is_dead = false;
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
        job.deaths.wait_for_tracer(seen, Instant::now());
        job.workers[seen.worker].is_dead = true;
    }

    fn first_death_to_collect(&mut self) -> Option<Seen> {
        loop {
            let job = self.job.as_mut()?;
            let seen = job.deaths.seen.front().copied()?;
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
            return job.deaths.seen.pop_front();
        }
    }

    /// Stops watching workers whose deaths are noted but not collected, so that the poller does not report them again
    /// and again.
    pub(super) fn let_the_dead_wait(&self) {
        let Some(job) = &self.job else { return };
        for worker in job.deaths.workers() {
            if let Some(pidfd) = job.pidfd_of(worker) {
                self.poller.forget(pidfd);
            }
        }
    }

    /// Collects a worker that a fork server has forked; `None` if it is alive, or was not forked.
    fn collect_forked(&mut self, index: usize, now: SystemTime) -> Option<(Exit, Input)> {
        let (origin, pidfd) = self.job.as_ref()?.dead_forked(index)?;
        let server = self.servers.get(origin.server)?.as_ref()?;
        let is_gone = server.link.is_none();
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
        let count = self.job.as_ref().map_or(0, |job| job.workers.len());
        for index in 0..count {
            if self.deadly_signal(index) == Some(signal)
                && let Some(job) = &mut self.job
            {
                job.workers[index].is_dead = false;
            }
        }
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

impl Job {
    /// Notes that a worker has died. Further calls for the same worker do nothing.
    pub(super) fn note_death(&mut self, worker: usize, time: SystemTime) {
        if let Some(state) = self.workers.get_mut(worker).filter(|state| !state.is_dead) {
            state.is_dead = true;
            self.deaths.push(worker, time, Instant::now());
        }
    }

    /// What to do about the first death, which a fork server has not reported.
    pub(super) fn look_at_first_death(&mut self, now: Instant) -> Option<Overdue> {
        let workers = &self.workers;
        let is_traced = |index: usize| workers.get(index).is_some_and(Worker::is_traced);
        self.deaths.look_at_first(now, is_traced)
    }

    /// How a child of ours has ended that is not collected yet.
    pub(super) fn death_of(&self, index: usize) -> Option<Death> {
        let State::Running {
            pid, origin: None, ..
        } = self.workers.get(index)?.state
        else {
            return None;
        };
        try_wait(Target::Pid(pid), false).ok()?
    }

    /// Collects a dead child; `None` if it is alive, was collected before, or is not our child.
    pub(super) fn reap(&mut self, index: usize, now: SystemTime, poller: &Poller) -> Option<(Exit, Input)> {
        let State::Running {
            pid,
            pidfd,
            origin: None,
            ..
        } = &self.workers.get(index)?.state
        else {
            return None;
        };
        let target = pidfd
            .as_ref()
            .map_or(Target::Pid(*pid), |pidfd| Target::PidFd(pidfd.as_fd()));
        match try_wait(target, true) {
            Ok(None) => None,
            Ok(Some(death)) => self.bury(index, Ending::from(&death), Some(death), now, poller),
            // Other code in this program has already waited for the child, so its status is lost.
            Err(_) => self.bury(index, Ending::Lost, None, now, poller),
        }
    }

    /// The fork server of a worker that has died, with its pidfd.
    pub(super) fn dead_forked(&self, index: usize) -> Option<(Origin, BorrowedFd<'_>)> {
        let State::Running {
            pidfd: Some(pidfd),
            origin: Some(origin),
            ..
        } = &self.workers.get(index)?.state
        else {
            return None;
        };
        is_readable(pidfd).then(|| (*origin, pidfd.as_fd()))
    }

    /// How a zombie has ended whose parent is alive, from `/proc`. Without resource usage.
    pub(super) fn death_in_procfs(&self, index: usize) -> Option<Death> {
        let pid = self.workers.get(index)?.pid()?;
        let status = procfs::exit_status(pid)?;
        // Its parent may have reaped it meanwhile, and the pid may belong to another process.
        self.workers[index].is_pinned().then(|| Death::of(status))
    }

    /// Notes how a worker has ended.
    pub(super) fn bury(
        &mut self,
        index: usize,
        ending: Ending,
        death: Option<Death>,
        now: SystemTime,
        poller: &Poller,
    ) -> Option<(Exit, Input)> {
        let worker = self.workers.get(index)?;
        let State::Running {
            pid, pidfd, started, ..
        } = &worker.state
        else {
            return None;
        };
        if let Some(pidfd) = pidfd {
            poller.forget(pidfd);
        }
        let exit = Exit {
            pid: *pid,
            caused_by_stop: worker.ending,
            user: death.map_or(Duration::ZERO, |death| death.user),
            system: death.map_or(Duration::ZERO, |death| death.system),
            max_rss: death.map_or(0, |death| death.max_rss),
            started: Some(*started),
            ..without_process(index, ending, now)
        };
        Some(self.record(exit, true))
    }
}

impl From<&Death> for Ending {
    fn from(death: &Death) -> Self {
        if death.signaled {
            Self::Signal {
                number: death.status,
                core: death.core,
            }
        } else {
            Self::Code(death.status as u8)
        }
    }
}
