//! Fork servers: their start, the workers that they fork, and their end.

use std::collections::VecDeque;
use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::time::SystemTime;

use crate::error::Error;
use crate::event::{Ending, Event, Exit, Stage, StartFailure};
use crate::forkserver::{Ends, Gate, News, Ordered, Server, State};
use crate::group::Input;
use crate::spawn::{AttemptContext, EnvTable, Prepared, Started};
use crate::spec::{LaunchSpec, SpecError, Stdio};
use crate::supervisor::job::Origin;
use crate::supervisor::prepare::token_entry;
use crate::supervisor::{Supervisor, Watched};
use crate::sys::clone::{Failure, Step};
use crate::sys::signal;
use crate::sys::wait::{Target, try_wait};

/// A worker that was ordered, or cannot be.
type Awaited = Result<(Ordered, Prepared), StartFailure>;
/// A worker that is watched and waits at its gate, or did not start.
type Delivered = Result<(Started, Origin, Gate), StartFailure>;

impl Supervisor {
    /// Executes a fork server: the one worker of a spec, whose command gets the number of its link as a further
    /// word. Does not wait for it. Returns its number; one that cannot be had is reported as lost.
    pub fn start_fork_server(&mut self, spec: LaunchSpec) -> Result<usize, Error> {
        spec.validate()?;
        let env = EnvTable::new(&spec.env, &spec.odd, token_entry(&spec, &self.token)?);
        self.spawner.prepare().map_err(Error::os("list descriptors"))?;
        let number = self.servers.len();
        let server = self.execute_server(number, spec, &env);
        if let Err(text) = &server {
            self.events.push(Event::ForkServerLost {
                server: number,
                text: text.clone(),
            });
        }
        self.servers.push(server.ok());
        Ok(number)
    }

    fn execute_server(
        &mut self,
        number: usize,
        mut spec: LaunchSpec,
        env: &EnvTable,
    ) -> Result<Server, String> {
        if self.sweeps {
            return Err("cannot be watched: this kernel has no pidfds".to_owned());
        }
        if !self.remains.can_spare_servers() {
            return Err("cannot be told from what workers leave: /proc cannot be read".to_owned());
        }
        let ends = Ends::new().map_err(|error| format!("could not be started: {error}"))?;
        let link = ends.theirs.as_raw_fd();
        let worker = &mut spec.workers[0];
        worker.argv.extend(CString::new(link.to_string()));
        worker.keep_fds = vec![link];
        worker.stdio = [Stdio::Null, Stdio::Fd(ends.words.as_raw_fd()), Stdio::Stdout];
        let context = AttemptContext {
            env,
            cgroup: None,
            foreground_group: None,
            poller: &self.poller,
        };
        let token = Watched::ForkServer(number).encode();
        let started = self.spawner.start(&spec, 0, token, &context);
        let started = started.map_err(|failure| failure_text(&failure))?;
        let watched = self.poller.watch(&ends.ours, token);
        let Some(pidfd) = started.pidfd.filter(|_| watched.is_ok()) else {
            // It is a child of ours that nobody has reaped.
            let _ = signal::send(started.pid, libc::SIGKILL);
            return Err("cannot be watched: memory is short".to_owned());
        };
        Ok(Server::new(started.pid, pidfd, ends))
    }

    /// Whether each worker's fork server is known here.
    pub(super) fn check_servers(&self, spec: &LaunchSpec) -> Result<(), Error> {
        for (index, worker) in spec.workers.iter().enumerate() {
            if let Some(fork) = worker.fork.filter(|fork| fork.server >= self.servers.len()) {
                return Err(SpecError::NoForkServer(index, fork.server).into());
            }
        }
        Ok(())
    }

    /// Whether a worker that is to be started has a fork server that is importing still.
    pub(super) fn awaits_server(&self) -> bool {
        let Some(job) = self.job.as_ref().filter(|_| !self.servers.is_empty()) else {
            return false;
        };
        let mut servers = job.spec.workers[job.next..]
            .iter()
            .filter_map(|worker| worker.fork);
        servers.any(|fork| self.state_of(fork.server) == State::Preparing)
    }

    fn state_of(&self, number: usize) -> State {
        let server = self.servers.get(number).and_then(Option::as_ref);
        server.map_or(State::Closed, Server::state)
    }

    /// Pids of the fork servers that live, as far as is known.
    pub(super) fn server_pids(&self) -> Vec<i32> {
        let servers = self.servers.iter().flatten();
        let living = servers.filter(|server| server.link().is_some());
        living.map(|server| server.pid).collect()
    }

    /// Hears what a fork server says, and tells of it.
    pub(super) fn listen_to_server(&mut self, number: usize) {
        if let Some(Some(server)) = self.servers.get_mut(number) {
            server.listen(&self.poller);
        }
        self.tell_of_server(number);
    }

    fn tell_of_server(&mut self, number: usize) {
        let Some(Some(server)) = self.servers.get_mut(number) else {
            return;
        };
        let events = server.take_news().into_iter().map(|news| match news {
            News::Ready => Event::ForkServerReady { server: number },
            News::Lost(text) => Event::ForkServerLost { server: number, text },
        });
        self.events.extend(events);
    }

    /// Has the next workers forked, `most` of them, if they have a fork server that is ready; false if not.
    ///
    /// All are ordered before the first is waited for, so that a server forks while its children enter.
    pub(super) fn start_forked(&mut self, most: usize) -> bool {
        let Some(job) = &self.job else { return false };
        let first = job.next;
        let Some(number) = self.server_for(first) else {
            return false;
        };
        let last = job.workers.len().min(first + most);
        let mut awaited = VecDeque::new();
        for index in first..last {
            let Some(ordered) = (self.server_for(index) == Some(number))
                .then(|| self.order(index))
                .flatten()
            else {
                break;
            };
            awaited.push_back(ordered);
        }
        // Whom no input to the state machine may find between ordered and running.
        let mut failures = Vec::new();
        let mut index = first;
        while let Some(one) = awaited.pop_front() {
            match one.map(|(ordered, prepared)| self.deliver(index, number, ordered, prepared)) {
                Ok(None) => break,
                Ok(Some(Ok((started, origin, gate)))) => {
                    gate.open();
                    self.set_next(index + 1);
                    self.worker_started(index, started, Some(origin), SystemTime::now());
                }
                Ok(Some(Err(failure))) | Err(failure) => failures.push((index, failure)),
            }
            index += 1;
        }
        self.set_next(index);
        self.tell_of_server(number);
        for (index, failure) in failures {
            self.never_ran(index, Ending::NotStarted(failure), SystemTime::now());
        }
        index > first
    }

    fn set_next(&mut self, next: usize) {
        if let Some(job) = &mut self.job {
            job.next = next;
        }
    }

    /// The ready fork server of a worker.
    fn server_for(&self, index: usize) -> Option<usize> {
        let fork = self.job.as_ref()?.spec.workers.get(index)?.fork?;
        (self.state_of(fork.server) == State::Ready).then_some(fork.server)
    }

    /// Orders a worker. `None`: the server takes no orders.
    fn order(&mut self, index: usize) -> Option<Awaited> {
        let job = self.job.as_ref()?;
        let fork = job.spec.workers[index].fork?;
        let context = AttemptContext {
            env: &job.env,
            cgroup: job.cgroup.as_ref(),
            foreground_group: self.link.as_ref().map(|link| link.foreground_group),
            poller: &self.poller,
        };
        let mut prepared = match self.spawner.order(&job.spec, index, fork.entry, &context) {
            Ok(prepared) => prepared,
            Err(failure) => return Some(Err(failure)),
        };
        let server = self.servers.get_mut(fork.server)?.as_mut()?;
        let ordered = server.order(&prepared.plan, &prepared.fds, &self.poller)?;
        prepared.fds.clear();
        Some(Ok((ordered, prepared)))
    }

    /// Waits for a worker that was ordered, which is watched then and waits at its gate. `None`: there is none.
    fn deliver(
        &mut self,
        index: usize,
        number: usize,
        ordered: Ordered,
        prepared: Prepared,
    ) -> Option<Delivered> {
        let server = self.servers.get_mut(number)?.as_mut()?;
        let origin = Origin {
            server: number,
            order: ordered.order(),
        };
        let delivery = server.deliver(ordered, &self.poller)?;
        let token = Watched::Worker(index).encode();
        let failed = |stage, errno, path| Some(Err(StartFailure { stage, errno, path }));
        match delivery.entered.result {
            Err(Failure { step, errno }) => {
                let cwd = (step == Step::Chdir).then_some(prepared.plan.cwd);
                failed(step.into(), errno, cwd.flatten())
            }
            // Unheard of it may not run, and at its gate it does not.
            Ok(_) if self.poller.watch(&delivery.pidfd, token).is_err() => {
                failed(Stage::Spawn, libc::ENOMEM, None)
            }
            Ok(unbound) => {
                let started = Started {
                    pid: delivery.pid,
                    pidfd: Some(delivery.pidfd),
                    in_cgroup: delivery.entered.in_cgroup,
                    pipes: prepared.pipes,
                    files: prepared.files,
                    unbound,
                };
                Some(Ok((started, origin, delivery.gate)))
            }
        }
    }

    /// Collects a worker that a fork server has forked; `None` when it is alive, or not of that kind.
    pub(super) fn collect_forked(&mut self, index: usize, now: SystemTime) -> Option<(Exit, Input)> {
        let (origin, pidfd) = self.job.as_ref()?.dead_forked(index)?;
        let server = self.servers.get_mut(origin.server)?.as_mut()?;
        let mut death = server.death_of(origin.order, &self.poller);
        let is_gone = server.link().is_none();
        if death.is_none() && is_gone {
            // An agent adopts the children of a dead server.
            death = try_wait(Target::PidFd(pidfd), true).ok().flatten();
        }
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
        let death = if let Some((origin, _)) = job.dead_forked(index) {
            let server = self.servers.get_mut(origin.server)?.as_mut()?;
            server.death_of(origin.order, &self.poller)?
        } else {
            job.death_of(index)?
        };
        let number = if death.signaled {
            death.status
        } else {
            death.status - 128
        };
        (number > 0).then_some(number)
    }

    /// Has the group's zombies reaped, which have pinned its process groups.
    pub(super) fn reap_forked(&mut self) {
        for server in self.servers.iter_mut().flatten() {
            server.reap_all();
        }
    }

    /// Ends all fork servers, and what they have started for themselves.
    pub(super) fn end_servers(&mut self) {
        let pids = self.server_pids();
        if pids.is_empty() {
            return;
        }
        let helpers = self.remains.helpers_of(&pids);
        for server in self.servers.iter_mut().flatten() {
            server.hang_up(&self.poller);
        }
        for server in self.servers.iter_mut().flatten() {
            server.end();
        }
        self.remains.kill_known(&helpers);
    }
}

fn failure_text(failure: &StartFailure) -> String {
    let error = std::io::Error::from_raw_os_error(failure.errno);
    let path = failure.path.as_ref().map(|path| path.to_string_lossy());
    match path {
        Some(path) => format!("could not be started: {path}: {error}"),
        None => format!("could not be started: {}: {error}", failure.stage.name()),
    }
}
