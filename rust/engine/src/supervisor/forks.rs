//! Fork servers: their start, the workers that they fork, and their end.

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Instant, SystemTime};

use crate::error::Error;
use crate::event::{Ending, Event, Stage, StartFailure};
use crate::forkserver::{self, Delivered, Delivery, Estate, News, Ordered, Patience, Server, State};
use crate::peer::{Peer, Stranger};
use crate::spawn::{AttemptContext, EnvTable, Prepared, Started, Unordered};
use crate::spec::{LaunchSpec, SpecError, Stdio};
use crate::supervisor::job::{Awaited, Origin};
use crate::supervisor::remains::Heirs;
use crate::supervisor::start::token_entry;
use crate::supervisor::{Supervisor, Watched};
use crate::sys::clone::Failure;

/// A watched worker that waits at its gate, where it came from, and its order.
type Ready = (Started, Origin, Ordered);

impl Supervisor {
    /// Executes a fork server: the only worker of a spec, whose command gets the descriptor of its link as an
    /// additional word. Does not wait for it. Returns its number. A server that cannot be started is reported as
    /// lost, and so is a server whose imports take longer than `patience` allows.
    pub fn start_fork_server(&mut self, spec: LaunchSpec, patience: Patience) -> Result<usize, Error> {
        spec.validate()?;
        let env = EnvTable::new(&spec.env, &spec.odd, token_entry(&spec, &self.token)?);
        self.spawner.prepare().map_err(Error::os("list descriptors"))?;
        let server = self.execute_server(spec, &env, patience);
        Ok(self.add_server(server))
    }

    /// Takes the branch of a warm server as fork server. `link`: the connection over which it was asked for;
    /// `is_prepared`: the server has imported. Returns its number. A branch that cannot be watched is reported as lost, and
    /// so is that of a server which is no process of this user here.
    pub fn join_fork_server(&mut self, link: OwnedFd, is_prepared: bool) -> Result<usize, Error> {
        let token = Watched::ForkServer(self.servers.len()).encode();
        let is_usable = !self.sweeps && self.remains.can_be_seen();
        let server = Peer::of(&link)
            .map_err(|stranger| match stranger {
                // The command has met it before.
                Stranger::Gone => forkserver::refusal(&link).unwrap_or_else(|| stranger.to_string()),
                _ => stranger.to_string(),
            })
            .and_then(|warm| {
                if is_usable && self.poller.watch(&link, token).is_ok() {
                    Ok(Server::branch(link, warm, token, is_prepared))
                } else {
                    Err("cannot be watched here".to_owned())
                }
            });
        Ok(self.add_server(server))
    }

    /// Adds a fork server, or reports why there is none. Returns its number.
    fn add_server(&mut self, server: Result<Server, String>) -> usize {
        let number = self.servers.len();
        if let Err(text) = &server {
            self.events.push(Event::ForkServerLost {
                server: number,
                pid: 0,
                signal: None,
                text: text.clone(),
                workers: Vec::new(),
            });
        }
        self.servers.push(server.ok());
        number
    }

    fn execute_server(
        &mut self,
        mut spec: LaunchSpec,
        env: &EnvTable,
        patience: Patience,
    ) -> Result<Server, String> {
        if self.sweeps {
            return Err("cannot be watched: this kernel has no pidfds".to_owned());
        }
        if !self.remains.can_be_seen() {
            return Err("cannot be told from what workers leave: /proc cannot be read".to_owned());
        }
        let ends = forkserver::new_link();
        let (link, theirs) = ends.map_err(|error| format!("could not be started: {error}"))?;
        let worker = &mut spec.workers[0];
        worker.argv.extend(CString::new(theirs.as_raw_fd().to_string()));
        worker.keep_fds = vec![theirs.as_raw_fd()];
        worker.stdio = [Stdio::Null, Stdio::Pipe, Stdio::Stdout];
        let context = AttemptContext {
            env,
            cgroup: None,
            foreground_group: None,
            poller: &self.poller,
        };
        let token = Watched::ForkServer(self.servers.len()).encode();
        let started = self.spawner.start(&spec, 0, token, &context);
        let started = started.map_err(|failure| failure_text(&failure))?;
        let [output, _] = started.ends.pipes;
        let is_watched = started.pidfd.is_some()
            && self.poller.watch(&link, token).is_ok()
            && output.iter().all(|pipe| self.poller.watch(pipe, token).is_ok());
        let server = Server::new(started.pid, started.pidfd, link, output, patience);
        if is_watched {
            return Ok(server);
        }
        server.give_up(&self.poller);
        Err("cannot be watched: memory is short".to_owned())
    }

    /// Checks that this supervisor knows the fork server of each worker.
    pub(super) fn check_servers(&self, spec: &LaunchSpec) -> Result<(), Error> {
        for (index, worker) in spec.workers.iter().enumerate() {
            if let Some(fork) = worker.fork.filter(|fork| fork.server >= self.servers.len()) {
                return Err(SpecError::NoForkServer(index, fork.server).into());
            }
        }
        Ok(())
    }

    /// Tells each fork server how many workers will be ordered from it.
    pub(super) fn tell_servers(&self, spec: &LaunchSpec) {
        for (number, server) in self.servers.iter().enumerate() {
            let forks = spec.workers.iter().filter_map(|worker| worker.fork);
            let workers = forks.filter(|fork| fork.server == number).count();
            if let Some(server) = server {
                server.expect(workers);
            }
        }
    }

    /// The states of the fork servers, by their numbers.
    pub(super) fn server_states(&self) -> Vec<State> {
        let state = |server: &Option<Server>| server.as_ref().map_or(State::Closed, |server| server.state);
        self.servers.iter().map(state).collect()
    }

    /// When to look next at the fork servers that still import.
    pub(super) fn imports_due(&self) -> Option<Instant> {
        self.servers.iter().flatten().filter_map(Server::due).min()
    }

    /// Reports fork servers that import for long, and gives up those that take too long.
    pub(super) fn look_at_imports(&mut self, now: Instant) {
        for number in 0..self.servers.len() {
            if let Some(server) = &mut self.servers[number] {
                server.look_at_imports(now);
            }
            self.tell_of_server(number);
        }
    }

    /// Pids of the fork servers that are alive, as far as we know, without branches of warm servers.
    pub(super) fn server_pids(&self) -> Vec<i32> {
        let executed = self.living().filter(|server| !server.is_branch());
        executed.map(|server| server.pid).collect()
    }

    /// Pids and start times of the branches of warm servers that are alive, as far as we know.
    pub(super) fn living_branches(&self) -> Vec<(i32, u64)> {
        let branches = self.living().filter(|server| server.is_branch());
        branches.filter_map(Server::identity).collect()
    }

    fn living(&self) -> impl Iterator<Item = &Server> {
        self.servers
            .iter()
            .flatten()
            .filter(|server| server.link.is_some())
    }

    /// What is known about the processes that dead branches have left.
    pub(super) fn estate(&self) -> Heirs {
        let estates = || self.servers.iter().flatten().map(|server| &server.estate);
        if estates().any(|estate| matches!(estate, Estate::Open(_))) {
            Heirs::Busy
        } else if estates().any(|estate| matches!(estate, Estate::Unknown)) {
            Heirs::Gone
        } else {
            Heirs::None
        }
    }

    /// Reads what a fork server has sent, and reports it.
    pub(super) fn listen_to_server(&mut self, number: usize) {
        if let Some(Some(server)) = self.servers.get_mut(number) {
            server.listen(&self.poller);
        }
        self.tell_of_server(number);
        self.take_delivered(false);
    }

    /// Reacts to messages of fork servers that were read while we asked for something else. The poller does not
    /// report them again.
    pub(super) fn act_on_heard(&mut self) {
        let mut has_heard = false;
        for number in 0..self.servers.len() {
            if self.servers[number]
                .as_mut()
                .is_some_and(|server| std::mem::take(&mut server.has_heard))
            {
                self.tell_of_server(number);
                has_heard = true;
            }
        }
        if has_heard {
            self.take_delivered(false);
        }
    }

    pub(super) fn tell_of_server(&mut self, number: usize) {
        let Some(Some(server)) = self.servers.get_mut(number) else {
            return;
        };
        let (pid, signal) = (server.shown_pid(), server.fatal_signal);
        if server.is_branch() && server.link.is_none() {
            self.remains.has_lost_branch = true;
        }
        let forked = || self.job.iter().flat_map(|job| job.forked_by(number));
        let workers: Vec<usize> = if server.link.is_none() {
            forked().collect()
        } else {
            Vec::new()
        };
        let events = std::mem::take(&mut server.news)
            .into_iter()
            .map(|news| match news {
                News::Slow(after) => Event::ForkServerSlow {
                    server: number,
                    pid,
                    after,
                },
                News::Ready => Event::ForkServerReady { server: number },
                News::Lost(text) => Event::ForkServerLost {
                    server: number,
                    pid,
                    signal,
                    text,
                    workers: workers.clone(),
                },
            });
        self.events.extend(events);
        if server.is_distrusted() {
            self.end_these_servers(&[number]);
        }
    }

    /// Orders the next worker from its fork server. A server that takes no orders is closed, and that is reported.
    pub(super) fn order_next(&mut self, index: usize, server: usize) {
        match self.order(index, server) {
            Some(awaited) => {
                if let Some(job) = &mut self.job {
                    job.starting.ordered(awaited, Instant::now());
                }
            }
            None => self.tell_of_server(server),
        }
    }

    /// Lets workers at their gates run, in the order of their orders, up to the first that is not at its gate yet.
    /// `is_late`: we no longer wait for the first order.
    pub(super) fn take_delivered(&mut self, mut is_late: bool) {
        while let Some((index, outcome)) = self.next_delivered(std::mem::take(&mut is_late)) {
            match outcome {
                Ok((started, origin, gate)) => {
                    gate.open();
                    self.worker_started(index, started, Some(origin), SystemTime::now());
                }
                Err(failure) => self.never_ran(index, Ending::NotStarted(failure), SystemTime::now()),
            }
        }
    }

    fn next_delivered(&mut self, is_late: bool) -> Option<(usize, Result<Ready, StartFailure>)> {
        let awaited = self.job.as_mut()?.starting.orders.front_mut()?;
        let number = awaited.server;
        let delivery = match &awaited.outcome {
            Err(_) => None,
            Ok((ordered, _)) => {
                let server = self.servers.get_mut(number)?.as_mut()?;
                match server.deliver(ordered, is_late, &self.poller) {
                    Delivered::Ordered => return None,
                    Delivered::Forked => {
                        if !awaited.is_watched {
                            let token = Watched::ForkServer(number).encode();
                            // If this fails, the gate is looked at again when the order is late.
                            awaited.is_watched = self.poller.watch(&ordered.gate, token).is_ok();
                        }
                        return None;
                    }
                    Delivered::Nothing => {
                        self.cancel_orders();
                        self.tell_of_server(number);
                        return None;
                    }
                    Delivered::Worker(delivery) => Some(delivery),
                }
            }
        };
        let (index, awaited) = self.job.as_mut()?.starting.delivered(Instant::now())?;
        let outcome = match (awaited.outcome, delivery) {
            (Err(failure), _) => Err(failure),
            (Ok((ordered, prepared)), Some(delivery)) => {
                if awaited.is_watched {
                    self.poller.forget(&ordered.gate);
                }
                self.admit(index, number, ordered, prepared, delivery)
            }
            (Ok(_), None) => return None,
        };
        Some((index, outcome))
    }

    /// Cancels all open orders: their workers end at their gates.
    pub(super) fn cancel_orders(&mut self) {
        let Some(job) = &mut self.job else { return };
        for awaited in job.starting.take_orders() {
            if let Ok((ordered, _)) = &awaited.outcome {
                ordered.cancel();
                if awaited.is_watched {
                    self.poller.forget(&ordered.gate);
                }
            }
        }
    }

    /// Orders a worker; `None` if the server takes no orders.
    fn order(&mut self, index: usize, number: usize) -> Option<Awaited> {
        let job = self.job.as_ref()?;
        let fork = job.spec.workers[index].fork?;
        let context = job.context(&self.poller, self.link.as_ref());
        let outcome = match self.spawner.order(&job.spec, index, fork.entry, &context) {
            Err(Unordered::NoDirectory(error)) => {
                let server = self.servers.get_mut(number)?.as_mut()?;
                server.close(format!("cannot be told the working directory: {error}"));
                return None;
            }
            Err(Unordered::Failed(failure)) => Err(failure),
            Ok(mut prepared) => {
                let server = self.servers.get_mut(number)?.as_mut()?;
                let ordered = server.order(&prepared.plan, &prepared.fds, &self.poller)?;
                prepared.fds.clear();
                Ok((ordered, prepared))
            }
        };
        Some(Awaited {
            server: number,
            outcome,
            is_watched: false,
        })
    }

    /// Watches a worker that waits at its gate.
    fn admit(
        &self,
        index: usize,
        number: usize,
        ordered: Ordered,
        prepared: Prepared,
        delivery: Delivery,
    ) -> Result<Ready, StartFailure> {
        let token = Watched::Worker(index).encode();
        let failed = |stage, errno, path| Err(StartFailure { stage, errno, path });
        match delivery.entered.result {
            Err(Failure { step, errno }) => {
                ordered.cancel();
                let cwd = (step == Stage::Chdir).then_some(prepared.plan.cwd);
                failed(step, errno, cwd.flatten())
            }
            // A worker that cannot be watched must not run. At its gate it does not.
            Ok(_) if self.poller.watch(&delivery.pidfd, token).is_err() => {
                ordered.cancel();
                failed(Stage::Spawn, libc::ENOMEM, None)
            }
            Ok(unbound) => {
                let started = Started {
                    pid: delivery.pid,
                    pidfd: Some(delivery.pidfd),
                    in_cgroup: delivery.entered.in_cgroup,
                    ends: prepared.ends,
                    unbound,
                };
                let order = ordered.order;
                Ok((
                    started,
                    Origin {
                        server: number,
                        order,
                    },
                    ordered,
                ))
            }
        }
    }

    /// Continues fork servers that are stopped.
    pub(super) fn resume_servers(&mut self) {
        for server in self.servers.iter_mut().flatten() {
            server.resume();
        }
    }

    /// Lets fork servers reap the group's zombies, which until now have reserved its process groups.
    pub(super) fn reap_forked(&mut self) {
        for server in self.servers.iter_mut().flatten() {
            server.reap_all();
        }
    }

    /// Ends all fork servers, and their child processes that are not workers.
    pub(super) fn end_servers(&mut self) {
        let all: Vec<usize> = (0..self.servers.len()).collect();
        self.end_these_servers(&all);
    }

    fn end_these_servers(&mut self, numbers: &[usize]) {
        let mut living: Vec<&mut Server> = self
            .servers
            .iter_mut()
            .enumerate()
            .filter(|(number, _)| numbers.contains(number))
            .filter_map(|(_, server)| server.as_mut().filter(|server| server.link.is_some()))
            .collect();
        if living.is_empty() {
            return;
        }
        let executed = living.iter().filter(|server| !server.is_branch());
        let pids: Vec<i32> = executed.map(|server| server.pid).collect();
        let helpers = self.remains.helpers_of(&pids);
        for server in &mut living {
            server.hang_up(&self.poller);
        }
        for server in &mut living {
            server.end(&self.poller);
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
