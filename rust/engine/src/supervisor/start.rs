//! Starts a group: its preparations, and the start of each worker.

use std::sync::Arc;
use std::time::SystemTime;

use crate::cgroup::AttemptCgroup;
use crate::error::Error;
use crate::event::{Ending, Event};
use crate::group::Input;
use crate::spawn::{EnvTable, Started};
use crate::spec::{LaunchSpec, Stdio, WorkerSpec};
use crate::starting::Next;
use crate::supervisor::job::{Job, Origin};
use crate::supervisor::prepare::{check_binding, log_stream, log_thread, raise_limits, token_entry};
use crate::supervisor::{Supervisor, Watched};
use crate::sys::signal;

/// Workers that are started before the next look at other events.
const SPAWN_SLICE: usize = 16;

impl Supervisor {
    /// Checks the spec and the limits, and accepts the group. The following turns start the workers.
    pub fn start(&mut self, spec: Arc<LaunchSpec>) -> Result<(), Error> {
        if self.is_running() {
            return Err(Error::Busy);
        }
        if self.link.is_none() && signal::is_ignored(libc::SIGCHLD) {
            return Err(Error::ChildSignalIgnored);
        }
        self.check(&spec, spec.workers.len())?;
        let env = EnvTable::new(&spec.env, &spec.odd, token_entry(&spec, &self.token)?);
        self.mux = log_thread(&spec, &self.wake, &self.consoles)?;
        self.tell_servers(&spec);
        let cgroup = self.attempt_cgroup();
        self.remains.forget();
        self.job_control.begin();
        self.has_log_files = spec.has_log_files();
        // Nobody waits in silence for what cannot be named.
        let lingers = spec.lingers && self.remains.can_be_seen();
        self.job = Some(Job::new(spec, lingers, env, cgroup, self.oom.kills()));
        self.catch_up();
        Ok(())
    }

    /// Adds a worker to the running group, and returns its index. The following turns start it.
    pub fn add(&mut self, worker: WorkerSpec) -> Result<usize, Error> {
        let Some(mut job) = self.job.take_if(|job| job.group().may_add()) else {
            return Err(Error::Ending);
        };
        let left = job.group().left();
        let added = job.add(worker, |spec| {
            self.check(spec, left + 1)?;
            if self.mux.is_none() {
                self.mux = log_thread(spec, &self.wake, &self.consoles)?;
            }
            self.has_log_files = spec.has_log_files();
            Ok(())
        });
        self.job = Some(job);
        added
    }

    /// Checks what can be known before a start. `left`: how many workers have not ended.
    fn check(&mut self, spec: &LaunchSpec, left: usize) -> Result<(), Error> {
        spec.validate()?;
        self.check_servers(spec)?;
        check_binding(spec)?;
        raise_limits(spec, spec.at_once.map_or(left, |most| most.min(left)))?;
        self.spawner.prepare().map_err(Error::os("list descriptors"))
    }

    /// The cgroup of a new attempt. Every worker is born in it, or joins it before any code of the user runs:
    /// processes that a worker forks before it is moved would stay outside.
    fn attempt_cgroup(&mut self) -> Option<AttemptCgroup> {
        let job = self
            .cgroup
            .as_ref()
            .filter(|_| self.spawner.can_enter_cgroups())?;
        let number = self.attempts;
        self.attempts += 1;
        let cgroup = job.attempt(number).ok()?;
        // An agent needs no such watch: SIGCHLD tells it of the last process.
        if self.link.is_none()
            && self
                .poller
                .watch_changes(cgroup.events(), Watched::Cgroup.encode())
                .is_err()
        {
            cgroup.remove();
            return None;
        }
        Some(cgroup)
    }

    /// Gives up the attempt's cgroup; from now on the process table is searched.
    pub(super) fn drop_cgroup(&mut self) {
        let cgroup = self.job.as_mut().and_then(Job::take_cgroup);
        if let Some(cgroup) = cgroup {
            self.poller.forget(cgroup.events());
            cgroup.remove();
        }
    }

    /// Starts workers that may start now.
    pub(super) fn start_some(&mut self) {
        let mut has_ordered = false;
        for _ in 0..SPAWN_SLICE {
            match self.next_start() {
                Next::Nothing | Next::Later(_) => break,
                Next::Execute(index) => self.execute_next(index),
                Next::Order { worker, server } => {
                    self.order_next(worker, server);
                    has_ordered = true;
                }
            }
        }
        if has_ordered {
            // An order that has failed already needs no answer from a server.
            self.take_delivered(false);
        }
    }

    /// What may start now.
    pub(super) fn next_start(&self) -> Next {
        match &self.job {
            Some(job)
                if job.group().may_start()
                    && job.group().has_room(job.starting().orders())
                    && !self.job_control.stands_still() =>
            {
                job.starting().next(&self.server_states())
            }
            _ => Next::Nothing,
        }
    }

    fn execute_next(&mut self, index: usize) {
        let Some(job) = &mut self.job else { return };
        job.starting_mut().execute();
        let context = job.context(&self.poller, self.link.as_ref());
        let token = Watched::Worker(index).encode();
        let result = self.spawner.start(job.spec(), index, token, &context);
        let now = SystemTime::now();
        match result {
            Ok(started) => self.worker_started(index, started, None, now),
            Err(failure) => self.never_ran(index, Ending::NotStarted(failure), now),
        }
    }

    pub(super) fn worker_started(
        &mut self,
        index: usize,
        started: Started,
        origin: Option<Origin>,
        now: SystemTime,
    ) {
        if !started.in_cgroup {
            self.drop_cgroup();
        }
        let Some(job) = &mut self.job else { return };
        self.sweeps |= started.pidfd.is_none();
        for (stream, (pipe, file)) in started.pipes.into_iter().zip(started.files).enumerate() {
            let Some(pipe) = pipe else { continue };
            let spec = &job.spec().workers[index];
            if let (Stdio::Log { path, console, .. }, Some(mux)) = (&spec.stdio[stream + 1], &mut self.mux) {
                // Fails only when memory is short. Then the stream is closed, and writes of the worker to it fail.
                let _ = mux.add(log_stream(
                    spec,
                    index,
                    stream,
                    pipe,
                    path.clone().zip(file),
                    *console,
                ));
            } else {
                if self.reading {
                    let _ = self.poller.watch(&pipe, Watched::Pipe(index, stream).encode());
                }
                job.keep_pipe(index, stream, pipe);
            }
        }
        job.began(index, started.pid, started.pidfd, origin, now);
        if self.job_control.stands_still() {
            // It waited at its gate while the others were stopped.
            job.signal(libc::SIGTSTP, index);
        }
        self.events.push(Event::Started {
            worker: index,
            pid: started.pid,
            time: now,
        });
        if let Some(refused) = started.unbound {
            self.events.push(Event::Unbound {
                worker: index,
                stage: refused.step.into(),
                errno: refused.errno,
            });
        }
        self.step(Input::Started);
    }

    pub(super) fn never_ran(&mut self, index: usize, ending: Ending, now: SystemTime) {
        let Some(job) = &mut self.job else { return };
        let (exit, input) = job.never_ran(index, ending, now);
        self.events.push(Event::Exited(exit));
        self.step(input);
    }

    pub(super) fn cancel_pending(&mut self) {
        let now = SystemTime::now();
        self.cancel_orders();
        let Some(job) = &mut self.job else { return };
        for index in job.starting_mut().cancel() {
            self.never_ran(index, Ending::Cancelled, now);
        }
    }
}
