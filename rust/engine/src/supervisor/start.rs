//! Starts a group: its preparations, and the start of each worker.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::affinity::Allowed;
use crate::cgroup::Cgroup;
use crate::error::Error;
use crate::event::{Ending, Event};
use crate::group::Input;
use crate::limits::{Limit, Need, OWN_FDS, preflight};
use crate::mux::{Consoles, MOST_READERS, Mux, Parallel, Stream};
use crate::poller::Bell;
use crate::spawn::{EnvTable, Helpers, MOST_THREADS, Started, all_descriptors, open_files_limit};
use crate::spec::{Console, EnvEntry, LaunchSpec, Stdio, WorkerSpec};
use crate::starting::Next;
use crate::supervisor::job::{Job, Origin};
use crate::supervisor::{Supervisor, Watched};
use crate::sys::signal;
use crate::tree::TOKEN_VARIABLE;

/// Workers that are started before the next look at other events.
const SPAWN_SLICE: usize = 16;
/// Of [`OWN_FDS`], those that they open when a group has been accepted: for the group, for views, or for a moment.
const LATER_FDS: usize = 14;
/// Those of the orders that a fork server has not taken yet.
const ORDER_FDS: usize = 12;
/// Workers that each thread starts before the next look at other events.
const TOGETHER: usize = 16;

impl Supervisor {
    /// Checks the spec and the limits, and accepts the group. The following turns start the workers.
    pub fn start(&mut self, spec: LaunchSpec) -> Result<(), Error> {
        if self.is_running() {
            return Err(Error::Busy);
        }
        if self.link.is_none() && signal::is_ignored(libc::SIGCHLD) {
            return Err(Error::ChildSignalIgnored);
        }
        spec.validate()?;
        self.helpers = Helpers::default();
        self.check(&spec, spec.workers.len())?;
        let env = EnvTable::new(&spec.env, &spec.odd, token_entry(&spec, &self.token)?);
        // New threads have what this one has by now: its CPUs, priorities and limits.
        let workers = spec.workers.len();
        let has_helpers = self.spawner.may_have_helpers(workers) && has_room_for_helpers(&spec);
        let parallel = if has_helpers {
            Parallel::of_large_group(self.spawner.features.threads)
        } else {
            Parallel::NEVER
        };
        self.mux = log_thread(&spec, parallel, &self.wake, &self.consoles)?;
        self.tell_servers(&spec);
        if spec.at_once.is_none() && has_helpers {
            self.helpers.prepare(&self.spawner, workers);
        }
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
        let Some(mut job) = self.job.take_if(|job| job.group.may_add()) else {
            return Err(Error::Ending);
        };
        let left = job.group.left();
        let added = job.add(worker, |spec| {
            spec.validate_worker(spec.workers.len() - 1)?;
            self.check(spec, left + 1)?;
            if self.mux.is_none() {
                self.mux = log_thread(spec, Parallel::NEVER, &self.wake, &self.consoles)?;
            }
            self.has_log_files |= spec.has_log_files();
            Ok(())
        });
        self.job = Some(job);
        added
    }

    /// Checks what depends on this machine. `left`: how many workers have not ended.
    fn check(&mut self, spec: &LaunchSpec, left: usize) -> Result<(), Error> {
        self.check_servers(spec)?;
        check_binding(spec)?;
        raise_limits(spec, spec.at_once.map_or(left, |most| most.min(left)))?;
        self.spawner.prepare().map_err(Error::os("list descriptors"))
    }

    /// The cgroup of a new attempt. Every worker is born in it, or joins it before any code of the user runs:
    /// processes that a worker forks before it is moved would stay outside.
    fn attempt_cgroup(&mut self) -> Option<Cgroup> {
        let job = self.cgroup.as_ref().filter(|_| self.spawner.features.clone3)?;
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
        let cgroup = self.job.as_mut().and_then(|job| job.cgroup.take());
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
                // If the first one fails, no other shall start.
                Next::Execute(index) if index > 0 && self.helpers.count() > 0 => {
                    return self.start_together(index);
                }
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
                if job.group.may_start()
                    && job.group.has_room(job.starting.orders.len())
                    && !self.job_control.stands_still() =>
            {
                job.starting.next(&self.server_states())
            }
            _ => Next::Nothing,
        }
    }

    /// Starts workers from this one on, on several threads.
    fn start_together(&mut self, first: usize) {
        let mut workers = first..first;
        while workers.len() < TOGETHER * (self.helpers.count() + 1)
            && self.next_start() == Next::Execute(workers.end)
            && let Some(job) = &mut self.job
        {
            job.starting.execute();
            workers.end += 1;
        }
        let Some(job) = &self.job else { return };
        let token = |index| Watched::Worker(index).encode();
        let shared = job.shared(&self.poller, self.link.as_ref(), token);
        let mut batch = self.helpers.begin(&self.spawner, shared, workers);
        let mut failures = Vec::new();
        while let Some(outcome) = batch.next(&mut self.spawner) {
            match outcome.result {
                Ok(started) => self.worker_started(outcome.worker, started, None, outcome.time),
                Err(failure) => failures.push((outcome.worker, failure, outcome.time)),
            }
        }
        let untried = batch.first;
        if let Some(job) = &mut self.job {
            job.starting.take_back(untried);
        }
        // A failure stops the group, which has to reach all that have started.
        for (index, failure, time) in failures {
            self.never_ran(index, Ending::NotStarted(failure), time);
        }
    }

    fn execute_next(&mut self, index: usize) {
        let Some(job) = &mut self.job else { return };
        job.starting.execute();
        let context = job.context(&self.poller, self.link.as_ref());
        let token = Watched::Worker(index).encode();
        let result = self.spawner.start(&job.spec, index, token, &context);
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
        for (stream, (pipe, file)) in started.ends.pipes.into_iter().zip(started.ends.files).enumerate() {
            let Some(pipe) = pipe else { continue };
            let spec = &job.spec.workers[index];
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
                job.workers[index].pipes[stream] = Some(pipe);
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
                stage: refused.step,
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
        for index in job.starting.cancel() {
            self.never_ran(index, Ending::Cancelled, now);
        }
    }
}

/// The variable with the job's token, after the tokens of the jobs in which this job runs.
pub(super) fn token_entry(spec: &LaunchSpec, token: &str) -> Result<EnvEntry, Error> {
    let key = TOKEN_VARIABLE.as_bytes();
    let outer = spec.env.iter().rev().find(|entry| entry.key() == key);
    let tokens = match outer {
        Some(outer) if !outer.value().is_empty() => [outer.value(), b":", token.as_bytes()].concat(),
        _ => token.as_bytes().to_vec(),
    };
    Ok(EnvEntry::new(key, &tokens)?)
}

/// The thread that reads the workers' output; `None` if none is passed on.
fn log_thread(
    spec: &LaunchSpec,
    parallel: Parallel,
    wake: &Arc<Bell>,
    consoles: &Arc<Consoles>,
) -> Result<Option<Mux>, Error> {
    let (any, expected) = streams_of(spec);
    consoles.begin();
    any.then(|| {
        Mux::new(
            spec.logs.clone(),
            expected,
            parallel,
            Arc::clone(wake),
            Arc::clone(consoles),
        )
    })
    .transpose()
}

/// Whether the engine reads any stream of the workers, and how many are shown on stdout and on stderr.
fn streams_of(spec: &LaunchSpec) -> (bool, [usize; 2]) {
    let mut expected = [0, 0];
    let mut any = false;
    for stdio in spec.workers.iter().flat_map(|worker| &worker.stdio) {
        if let Stdio::Log { console, .. } = stdio {
            any = true;
            if let Some(console) = console {
                expected[usize::from(*console == Console::Stderr)] += 1;
            }
        }
    }
    (any, expected)
}

/// Number of threads: the reading thread, and one for each of stdout and stderr that shows output.
fn threads_for(spec: &LaunchSpec) -> usize {
    let (any, expected) = streams_of(spec);
    usize::from(any) + expected.iter().filter(|streams| **streams > 0).count()
}

fn log_stream(
    spec: &WorkerSpec,
    worker: usize,
    stream: usize,
    fd: OwnedFd,
    file: Option<(CString, OwnedFd)>,
    console: Option<Console>,
) -> Stream {
    let kind = if stream == 0 {
        Console::Stdout
    } else {
        Console::Stderr
    };
    let own_prefix = match &spec.stdio[stream + 1] {
        Stdio::Log { prefix, .. } => prefix.as_ref(),
        _ => None,
    };
    Stream {
        fd,
        worker,
        kind,
        file,
        console,
        prefix: own_prefix.unwrap_or(&spec.prefix).clone(),
        interactive: spec.foreground,
        has_errors: kind == Console::Stderr || spec.stdio[2] == Stdio::Stdout,
    }
}

/// Whether threads that help take no place of a worker, nor of a thread that each worker may start.
fn has_room_for_helpers(spec: &LaunchSpec) -> bool {
    let mut need = need_of(spec, spec.workers.len());
    need.threads += need.workers + MOST_THREADS + MOST_READERS;
    preflight(&need).is_ok()
}

/// What so many workers of this group need.
fn need_of(spec: &LaunchSpec, workers: usize) -> Need {
    // A log file with a limit has its end in two more files.
    let file = if spec.logs.max_bytes.is_some() { 3 } else { 1 };
    let fds = |stdio: &Stdio| match stdio {
        Stdio::Pipe | Stdio::Log { path: None, .. } => 1,
        Stdio::Log { path: Some(_), .. } => 1 + file,
        _ => 0,
    };
    let of_worker = |worker: &WorkerSpec| worker.stdio.iter().map(fds).sum::<usize>();
    Need {
        workers,
        threads: threads_for(spec),
        fds_per_worker: 1 + spec.workers.iter().map(of_worker).max().unwrap_or(0),
        fds_base: OWN_FDS,
    }
}

/// Raises the limit of open files for so many workers of this group.
fn raise_limits(spec: &LaunchSpec, workers: usize) -> Result<(), Error> {
    let mut need = need_of(spec, workers);
    let checked = preflight(&need).or_else(|shortage| {
        if !matches!(shortage.limit, Limit::OpenFiles(_) | Limit::NrOpen(_)) {
            return Err(shortage);
        }
        let is_forked = spec.workers.iter().any(|worker| worker.fork.is_some());
        let later = LATER_FDS + if is_forked { ORDER_FDS } else { 0 };
        let all = all_descriptors().map_or(OWN_FDS, |others| 3 + others.len() + later);
        need.fds_base = need.fds_base.min(all);
        preflight(&need)
    });
    let Some(files) = checked? else {
        return Ok(());
    };
    let limit = Rlimit {
        current: Some(files),
        maximum: open_files_limit().maximum,
    };
    setrlimit(Resource::Nofile, limit).map_err(Error::os("raise the limit of open files"))
}

fn check_binding(spec: &LaunchSpec) -> Result<(), Error> {
    let (cpus, memory) = (spec.binding.requires_cpus(), spec.binding.requires_memory());
    let is_checked =
        |worker: &WorkerSpec| (cpus && !worker.cpus.is_empty()) || (memory && worker.memory.is_some());
    if !spec.workers.iter().any(is_checked) {
        return Ok(());
    }
    let allowed = Allowed::read(Path::new("/")).map_err(Error::os("read the CPU topology"))?;
    for (index, worker) in spec.workers.iter().enumerate() {
        let asked = if cpus { &worker.cpus[..] } else { &[] };
        let nodes = worker.memory.as_ref().filter(|_| memory);
        let nodes = nodes.map_or(&[][..], |(_, nodes)| nodes);
        if let Some(why) = allowed.refuses(asked, nodes) {
            return Err(Error::Binding(format!("worker {index}: {why}")));
        }
    }
    Ok(())
}
