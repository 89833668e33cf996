//! Ends a group: finds and kills the remaining processes, and makes the last event.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant, SystemTime};

use crate::event::{Event, Leftover};
use crate::group::{Action, Input};
use crate::mux::{Finish, LastLines, Order, Outcome};
use crate::signals::Reach;
use crate::supervisor::Supervisor;
use crate::supervisor::job::Job;
use crate::supervisor::remains::{Group, Remains};

impl Supervisor {
    pub(super) fn cgroup_changed(&mut self) {
        let cgroup = self.job.as_ref().and_then(|job| job.cgroup.as_ref());
        if let Some(cgroup) = cgroup {
            // Rearms the event; otherwise it would come again at once.
            let _ = cgroup.populated();
        }
        self.check_if_clearing();
    }

    pub(super) fn check_if_clearing(&mut self) {
        if self.job.as_ref().is_some_and(|job| job.group.is_clearing()) {
            self.act(Action::CheckTree);
        }
    }

    /// Pids of running workers: the roots of the job's process tree if we are not the subreaper.
    pub(super) fn running_pids(&self) -> Vec<i32> {
        let running = self.job.iter().flat_map(Job::running);
        running.map(|(_, pid)| pid).collect()
    }

    /// Pids of the group's workers, by index; 0 for a worker that does not run.
    pub(crate) fn pids(&self) -> Vec<i32> {
        let mut pids = vec![0; self.job.as_ref().map_or(0, |job| job.workers.len())];
        for (index, pid) in self.job.iter().flat_map(Job::running) {
            pids[index] = pid;
        }
        pids
    }

    /// Sends the last line of each worker whose output we pass on, from another thread.
    pub(crate) fn last_lines(&self, report: Sender<LastLines>) {
        // Without a mux the dropped sender says so.
        if let Some(mux) = &self.mux {
            mux.order(Order::LastLines(report));
        }
    }

    /// Calls `work` with the facts by which the group's remaining processes are found.
    pub(super) fn with_remains<T>(&mut self, work: impl FnOnce(&mut Remains, Group<'_>) -> T) -> Option<T> {
        let workers = self.running_pids();
        let servers = self.server_pids();
        let branches = self.living_branches();
        let job = self.job.as_ref()?;
        let group = Group {
            cgroup: job.cgroup.as_deref(),
            workers: &workers,
            leaders: &job.leaders,
            servers: &servers,
            branches: &branches,
            heirs: self.estate(),
        };
        Some(work(&mut self.remains, group))
    }

    /// Sends the signal that stops the group.
    pub(super) fn tell_to_end(&mut self, signal: i32) {
        self.with_remains(Remains::remember);
        self.resume_servers();
        if let Some(mux) = self.mux.as_ref().filter(|_| signal == libc::SIGINT) {
            mux.order(Order::Interrupt);
        }
        let Some(job) = &mut self.job else { return };
        job.mark_ending();
        job.broadcast(signal, self.reach);
        job.resume_stopped();
    }

    pub(super) fn check_tree(&mut self) {
        if let Some(empty) = self.with_remains(Remains::are_none) {
            self.step(Input::Tree { empty });
        }
    }

    pub(super) fn report_leftovers(&mut self, grace: Duration) {
        let seen = self.with_remains(Remains::leftovers).unwrap_or_default();
        let Some(job) = self.job.as_ref().filter(|_| !seen.is_empty()) else {
            return;
        };
        let processes = seen.into_iter().map(|(stat, command, environ)| Leftover {
            pid: stat.pid,
            command,
            worker: job.worker_of(&stat, &environ),
        });
        let processes = processes.collect();
        self.events.push(Event::Leftovers { processes, grace });
    }

    pub(super) fn terminate_tree(&mut self) {
        self.resume_servers();
        let asked = self.with_remains(Remains::terminate).unwrap_or(0);
        if let Some(job) = &mut self.job {
            job.stragglers = job.stragglers.max(asked);
        }
        self.orphans_due = Some(Instant::now());
    }

    pub(super) fn kill_tree(&mut self, first: bool) {
        self.with_remains(Remains::kill_below);
        self.resume_servers();
        let Some(job) = &mut self.job else { return };
        job.mark_ending();
        job.broadcast(libc::SIGKILL, Reach::Nobody);
        let workers = job.running().map(|(index, _)| index).collect();
        let tier = self.with_remains(|remains, group| remains.kill(group, !first));
        if let Some(tier) = tier.filter(|_| first) {
            self.events.push(Event::Killing { workers, tier });
        }
        self.orphans_due = Some(Instant::now());
    }

    pub(super) fn end(&mut self, leftovers: bool) {
        let survivors = self.with_remains(|remains, group| remains.survivors(group, leftovers));
        self.survivors = survivors.unwrap_or_default();
        let count = self.job.as_ref().map_or(0, |job| job.workers.len());
        for index in 0..count {
            self.close_pipes(index);
        }
        if let Some(job) = &mut self.job {
            job.count_oom_kills(self.oom.kills());
        }
        self.drop_cgroup();
        self.reap_forked();
        let Some(job) = &mut self.job else { return };
        let abandoned = job.abandon(SystemTime::now(), &self.poller);
        self.events.extend(abandoned.into_iter().map(Event::Exited));
        let is_stopped = job.group.wanted_end().or(self.early_stop).is_some();
        match &mut self.mux {
            Some(mux) => mux.finish(Finish {
                tail_of: job.first_failure.as_ref().map(|exit| exit.worker),
                is_stopped,
            }),
            None => self.ended(Outcome::default()),
        }
    }

    pub(super) fn listen_to_mux(&mut self) {
        let Some(mux) = &mut self.mux else { return };
        // The reading thread sets the outcome last, so after the outcome no more notices come.
        let outcome = mux.take_outcome();
        if let (Some(from_terminal), Some(job)) = (mux.take_resized(), &self.job) {
            let reach = if from_terminal {
                Reach::Foreground
            } else {
                Reach::Nobody
            };
            job.broadcast(libc::SIGWINCH, reach);
        }
        let notices = mux.take_notices();
        self.events.extend(notices.into_iter().map(Event::Log));
        if let Some(outcome) = outcome {
            self.mux = None;
            self.ended(outcome);
        }
    }

    fn ended(&mut self, output: Outcome) {
        let Some(job) = self.job.take() else { return };
        let wanted_end = job.group.wanted_end().or(self.early_stop);
        if wanted_end.is_some() {
            self.consoles.end_waiting(wanted_end);
        }
        let survivors = std::mem::take(&mut self.survivors);
        self.events.push(job.into_ended(survivors, output));
    }
}
