//! Runs a supervisor on a separate thread, for callers that must not block.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::Error;
use crate::forkserver::Patience;
use crate::guard::Agent;
use crate::mux::{Consoles, Flushed};
use crate::os::spawn_quiet_with;
use crate::poller::Bell;
use crate::spec::{Console, LaunchSpec, WorkerSpec};
use crate::supervisor::{Callers, Supervisor};
use crate::sys::signal::SignalSet;

mod news;

pub use news::Waited;
use news::{News, held_up_pipes};

/// How long a caller waits for the last lines.
const LINES_WAIT: Duration = Duration::from_secs(1);

/// Something that the thread does for its owner; `None`: it ends.
type Command = Option<Box<dyn FnOnce(&mut Supervisor, &News) + Send>>;

/// Owns a supervisor thread. Closing the handle ends the group.
pub struct Handle {
    /// Pid of the process that has the thread.
    pid: u32,
    news: Arc<News>,
    commands: Sender<Command>,
    /// Wakes the thread.
    bell: Arc<Bell>,
    consoles: Arc<Consoles>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Handle {
    /// Starts the thread, with all signals blocked in it.
    pub fn new(agent: Option<Agent>) -> Result<Self, Error> {
        let news = Arc::new(News::new()?);
        let (commands, receiver) = channel();
        let (report, made) = channel();
        let theirs = Arc::clone(&news);
        let spawned = spawn_quiet_with("dsl-engine", move |mask| {
            serve(agent, mask, &theirs, &receiver, &report);
        });
        let thread = spawned.map_err(Error::thread("start the engine thread"))?;
        let (bell, consoles) = made.recv().map_err(|_| Error::Closed)??;
        Ok(Self {
            pid: std::process::id(),
            news,
            commands,
            bell,
            consoles,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Whether this is a copy of the handle in a forked child. The thread stayed with the parent, a lock may stay
    /// locked for ever, and the descriptors are shared with the parent. Call no other method on the copy, and do not
    /// drop it.
    pub fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    /// Checks the spec and the limits and begins to start the group.
    pub fn start(&self, spec: LaunchSpec) -> Result<(), Error> {
        self.ask(|supervisor, news| supervisor.start(spec).inspect(|()| news.begin()))?
    }

    /// Adds a worker to the running group, see [`Supervisor::add`]. Returns its index.
    pub fn add(&self, worker: WorkerSpec) -> Result<usize, Error> {
        self.ask(|supervisor, _| supervisor.add(worker))?
    }

    /// Executes a fork server, see [`Supervisor::start_fork_server`]. Returns its number.
    pub fn start_fork_server(&self, spec: LaunchSpec, patience: Patience) -> Result<usize, Error> {
        self.ask(move |supervisor, _| supervisor.start_fork_server(spec, patience))?
    }

    /// Takes the branch of a warm server, see [`Supervisor::join_fork_server`]. Returns its number.
    pub fn join_fork_server(&self, link: OwnedFd, is_prepared: bool) -> Result<usize, Error> {
        self.ask(move |supervisor, _| supervisor.join_fork_server(link, is_prepared))?
    }

    /// Sends a signal to one worker, or to all.
    pub fn signal(&self, number: i32, worker: Option<usize>) -> Result<(), Error> {
        self.send(move |supervisor, _| supervisor.signal(number, worker))
    }

    /// Begins to stop the group. A second call can only shorten the grace period.
    pub fn stop(&self, signal: i32, grace: Option<Duration>) -> Result<(), Error> {
        self.send(move |supervisor, _| supervisor.stop(signal, grace))
    }

    /// Kills the group.
    pub fn kill(&self) -> Result<(), Error> {
        self.send(|supervisor, _| supervisor.kill())
    }

    /// Lets views into the job call at a socket of this name, in a folder of this user, and reports
    /// [`crate::event::Event::Called`].
    pub fn listen(&self, folder: &Path, name: &str) -> Result<(), Error> {
        let callers = Callers::new(folder, name)?;
        self.ask(|supervisor, _| supervisor.listen(callers))?
    }

    /// Takes those who have called.
    pub fn take_callers(&self) -> Result<Vec<OwnedFd>, Error> {
        self.ask(|supervisor, _| supervisor.take_callers())?
    }

    /// Removes the socket.
    pub fn unlisten(&self) -> Result<(), Error> {
        self.ask(|supervisor, _| supervisor.unlisten())
    }

    /// Pids of the group's workers, by index; 0 for a worker that does not run.
    pub fn pids(&self) -> Result<Vec<i32>, Error> {
        self.ask(|supervisor, _| supervisor.pids())
    }

    /// The last line of each worker whose output we pass on, with the worker's index.
    ///
    /// Lines of some streams are kept only from the first call on. Empty if a disk holds up the reading thread.
    pub fn last_lines(&self) -> Result<Vec<(usize, Vec<u8>)>, Error> {
        let (report, answer) = channel();
        self.send(|supervisor, _| supervisor.last_lines(report))?;
        Ok(answer.recv_timeout(LINES_WAIT).unwrap_or_default())
    }

    fn ask<T: Send + 'static>(
        &self,
        task: impl FnOnce(&mut Supervisor, &News) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let (report, answer) = channel();
        self.send(move |supervisor, news| {
            // Fails if the caller no longer waits.
            let _ = report.send(task(supervisor, news));
        })?;
        answer.recv().map_err(|_| Error::Closed)
    }

    fn send(&self, task: impl FnOnce(&mut Supervisor, &News) + Send + 'static) -> Result<(), Error> {
        self.command(Some(Box::new(task)))
    }

    fn command(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).map_err(|_| Error::Closed)?;
        self.bell.ring();
        Ok(())
    }

    /// Waits for events. With `routine` false, starts and clean exits do not end the wait.
    ///
    /// Signals that the calling thread does not block interrupt the wait without a race: they are blocked from before
    /// the call of `pending` (return true to stop waiting) until the kernel waits. `pending` is first called under
    /// the caller's mask. Fails if the thread has failed. Without a time limit it also fails if the end of every
    /// group was already taken.
    pub fn wait(
        &self,
        timeout: Option<Duration>,
        routine: bool,
        mut pending: impl FnMut() -> bool,
    ) -> Result<Waited, Error> {
        // A signal handler may fork.
        let waited = self
            .news
            .wait(timeout, routine, || pending() || self.is_forked())?;
        if matches!(&waited, Waited::Events(events) if held_up_pipes(events)) {
            self.bell.ring();
        }
        Ok(waited)
    }

    /// Waits until a console (`None`: both) has taken the remaining output of ended groups, or a signal to the job
    /// ends the wait. `pending` is called before each sleep. If it returns true, the rest of the output is dropped,
    /// and the result is `None`.
    pub fn flush(&self, console: Option<Console>, pending: impl FnMut() -> bool) -> Option<Flushed> {
        self.consoles.flush(console, pending)
    }

    /// From now on a socket, pipe or file gets what the consoles show, too; see [`Tee::add`].
    pub fn tee(&self, fd: OwnedFd) -> Result<(), Error> {
        self.consoles.tee.add(fd)
    }

    /// Stops waiting for the consoles to take the remaining output of ended groups.
    pub fn give_up_output(&self) {
        self.consoles.end_waiting(None);
    }

    /// Ends the present wait of one thread, or else the next wait. Events are kept.
    pub fn wake(&self) {
        self.news.wake();
    }

    /// Kills the processes that are left, waits for them and ends the thread. A thread that waits for events gets
    /// none.
    pub fn close(&self) {
        let mut slot = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = slot.take() {
            self.news.close();
            // Fails only if the thread has ended.
            let _ = self.command(None);
            let _ = thread.join();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}

/// Readable when a wait with timeout zero, and with the `routine` of the last wait (true at first), would return a
/// result. While workers are being started it can be 20 ms late.
impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }
}

/// Tells the owner that no more events come, even when the thread panics.
struct Ending<'a> {
    news: &'a News,
    failure: Option<Error>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.news.end(self.failure.take());
    }
}

/// What a new thread shares with its owner: the bell that wakes the thread, and the output that is still to be
/// written.
type Made = (Arc<Bell>, Arc<Consoles>);

fn serve(
    agent: Option<Agent>,
    mask: SignalSet,
    news: &News,
    commands: &Receiver<Command>,
    report: &Sender<Result<Made, Error>>,
) {
    // Dropped after the supervisor, whose drop ends the rest of the group.
    let mut ending = Ending { news, failure: None };
    let embedded = agent.is_none();
    let mut supervisor = match Supervisor::new(agent) {
        Ok(supervisor) => supervisor,
        Err(error) => {
            let _ = report.send(Err(error));
            return;
        }
    };
    if embedded {
        supervisor.spawner.mask = mask;
    }
    if report
        .send(Ok((supervisor.waker(), Arc::clone(&supervisor.consoles))))
        .is_err()
    {
        return;
    }
    while obey(&mut supervisor, news, commands) {
        let turned = supervisor.turn();
        let has_room = news.publish(supervisor.take_events(), supervisor.is_starting());
        if let Err(error) = turned {
            ending.failure = Some(error);
            return;
        }
        supervisor.set_reading(has_room);
    }
}

/// Carries out the owner's commands; false when the thread must end.
fn obey(supervisor: &mut Supervisor, news: &News, commands: &Receiver<Command>) -> bool {
    loop {
        match commands.try_recv() {
            Ok(Some(task)) => task(supervisor, news),
            Ok(None) | Err(TryRecvError::Disconnected) => return false,
            Err(TryRecvError::Empty) => return true,
        }
    }
}
