//! A supervisor on a thread of its own, for callers that must not block.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::bell::Bell;
use crate::error::Error;
use crate::forkserver::Patience;
use crate::guard::Agent;
use crate::mux::{Consoles, Flushed};
use crate::spec::{Console, LaunchSpec};
use crate::supervisor::Supervisor;
use crate::sys::signal::{self, SignalSet};

mod news;

pub use news::Waited;
use news::{News, held_up_pipes};

enum Command {
    Start(Arc<LaunchSpec>, Sender<Result<(), Error>>),
    StartForkServer(Box<LaunchSpec>, Patience, Sender<Result<usize, Error>>),
    Signal { number: i32, worker: Option<usize> },
    Stop { signal: i32, grace: Option<Duration> },
    Kill,
    Close,
}

/// Owns a supervisor thread. Closing it ends the group.
pub struct Handle {
    /// The process that has the thread.
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
        // The new thread inherits this mask: no signal of the host program may land on it.
        let mask = signal::set_mask(SignalSet::ALL);
        let spawned = std::thread::Builder::new()
            .name("dsl-engine".into())
            .stack_size(512 * 1024)
            .spawn(move || serve(agent, mask, &theirs, &receiver, &report));
        signal::set_mask(mask);
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

    /// Whether this is a copy of the handle in a forked child: the thread, and who holds which lock, stayed with
    /// the parent, and descriptors are shared with it. Nothing may be called, and the copy is not to be dropped.
    pub fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    /// Checks the spec and the limits and begins to start the group.
    pub fn start(&self, spec: Arc<LaunchSpec>) -> Result<(), Error> {
        let (report, answer) = channel();
        self.send(Command::Start(spec, report))?;
        answer.recv().map_err(|_| Error::Closed)?
    }

    /// Executes a fork server, see [`Supervisor::start_fork_server`]; its number.
    pub fn start_fork_server(&self, spec: LaunchSpec, patience: Patience) -> Result<usize, Error> {
        let (report, answer) = channel();
        self.send(Command::StartForkServer(Box::new(spec), patience, report))?;
        answer.recv().map_err(|_| Error::Closed)?
    }

    /// Sends a signal to one worker, or to all.
    pub fn signal(&self, number: i32, worker: Option<usize>) -> Result<(), Error> {
        self.send(Command::Signal { number, worker })
    }

    /// Begins to stop the group; again, it can only shorten the grace.
    pub fn stop(&self, signal: i32, grace: Option<Duration>) -> Result<(), Error> {
        self.send(Command::Stop { signal, grace })
    }

    /// Kills the group.
    pub fn kill(&self) -> Result<(), Error> {
        self.send(Command::Kill)
    }

    fn send(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).map_err(|_| Error::Closed)?;
        self.bell.ring();
        Ok(())
    }

    /// Waits for events. With `routine` false it sleeps through starts and clean exits.
    ///
    /// Signals that the calling thread lets through interrupt it without a race: they are blocked from before
    /// `pending` is asked (return true to stop waiting) until the kernel waits. First it is asked under the
    /// caller's mask. Fails when the thread has ended of itself, and without a time limit when there is no group
    /// whose end was not taken yet.
    pub fn wait(
        &self,
        timeout: Option<Duration>,
        routine: bool,
        mut pending: impl FnMut() -> bool,
    ) -> Result<Waited, Error> {
        // A handler may fork.
        let waited = self
            .news
            .wait(timeout, routine, || pending() || self.is_forked())?;
        if matches!(&waited, Waited::Events(events) if held_up_pipes(events)) {
            self.bell.ring();
        }
        Ok(waited)
    }

    /// Waits until a console (`None`: both) has taken what groups that have ended left to it, or a signal of the
    /// job ends the waiting. `pending` is asked before each sleep; `None` if it says true: then the rest is given
    /// up.
    pub fn flush(&self, console: Option<Console>, pending: impl FnMut() -> bool) -> Option<Flushed> {
        self.consoles.flush(console, pending)
    }

    /// What groups that have ended left to the consoles is not waited for any more.
    pub fn give_up_output(&self) {
        self.consoles.end_waiting(None);
    }

    /// Ends the present wait of one thread, or else the next. Events keep.
    pub fn wake(&self) {
        self.news.wake();
    }

    /// Kills what is left, waits for it and ends the thread. Whoever waits for events gets none.
    pub fn close(&self) {
        let mut slot = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = slot.take() {
            self.news.close();
            // Fails only if the thread has ended.
            let _ = self.send(Command::Close);
            let _ = thread.join();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}

/// Readable when a wait for no time, with the `routine` of the last wait (true at first), would not be in vain.
/// While workers are being started it can be 20 ms late.
impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }
}

/// Tells the owner that nothing more comes, also when the thread unwinds.
struct Ending<'a> {
    news: &'a News,
    failure: Option<Error>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.news.end(self.failure.take());
    }
}

/// What a new thread shares with its owner: a bell that wakes it, and what it leaves to write.
type Made = (Arc<Bell>, Arc<Consoles>);

fn serve(
    agent: Option<Agent>,
    mask: SignalSet,
    news: &News,
    commands: &Receiver<Command>,
    report: &Sender<Result<Made, Error>>,
) {
    // Dropped after the supervisor, which ends what is left of the group.
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
        supervisor.set_worker_mask(mask.0);
    }
    if report
        .send(Ok((supervisor.waker(), supervisor.consoles())))
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

/// Carries out what the owner has asked for; false when it is time to go.
fn obey(supervisor: &mut Supervisor, news: &News, commands: &Receiver<Command>) -> bool {
    loop {
        match commands.try_recv() {
            Ok(Command::Start(spec, report)) => {
                let result = supervisor.start(spec).inspect(|()| news.begin());
                let _ = report.send(result);
            }
            Ok(Command::StartForkServer(spec, patience, report)) => {
                let _ = report.send(supervisor.start_fork_server(*spec, patience));
            }
            Ok(Command::Signal { number, worker }) => supervisor.signal(number, worker),
            Ok(Command::Stop { signal, grace }) => supervisor.stop(signal, grace),
            Ok(Command::Kill) => supervisor.kill(),
            Ok(Command::Close) | Err(TryRecvError::Disconnected) => return false,
            Err(TryRecvError::Empty) => return true,
        }
    }
}
