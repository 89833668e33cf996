//! A supervisor on a thread of its own, for callers that must not block.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::Error;
use crate::event::Event;
use crate::guard::Agent;
use crate::spec::LaunchSpec;
use crate::supervisor::Supervisor;
use crate::sys::signal::{self, SignalSet, Wake};

/// Output bytes that may wait for the owner before the workers' pipes are left unread.
const BACKLOG_BYTES: usize = 8 << 20;

enum Command {
    Start(Arc<LaunchSpec>, Sender<Result<(), Error>>),
    Signal { number: i32, worker: Option<usize> },
    Stop { signal: i32, grace: Option<Duration> },
    Kill,
    Close,
}

#[derive(Default)]
struct Queue {
    events: VecDeque<Event>,
    bytes: usize,
    /// The owner has been told of what is in the queue.
    told: bool,
    /// The thread has ended; nothing more comes.
    over: bool,
}

struct Channel {
    queue: Mutex<Queue>,
    ready: OwnedFd,
    /// The owner wants to hear of starts and clean exits at once.
    routine: AtomicBool,
}

/// Why [`Handle::wait`] came back.
#[derive(Debug)]
pub enum Waited {
    /// Events, in order; none when the supervisor is closed.
    Events(Vec<Event>),
    /// The time is over.
    TimedOut,
    /// A signal handler of this process ran on the calling thread.
    Interrupted,
}

/// Owns a supervisor thread. Closing it ends the group.
pub struct Handle {
    channel: Arc<Channel>,
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Handle {
    /// Starts the thread, with all signals blocked in it.
    pub fn new(agent: Option<Agent>) -> Result<Self, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let ready = eventfd(0, flags)
            .map_err(io::Error::from)
            .map_err(Error::os("eventfd"))?;
        let channel = Arc::new(Channel {
            queue: Mutex::new(Queue::default()),
            ready,
            routine: AtomicBool::new(true),
        });
        let (commands, receiver) = channel_pair();
        let (report, made) = std::sync::mpsc::channel();
        let theirs = Arc::clone(&channel);
        // The new thread inherits this mask: no signal of the host program may land on it.
        let mask = signal::set_mask(SignalSet::ALL);
        let spawned = std::thread::Builder::new()
            .name("dsl-engine".into())
            .stack_size(512 * 1024)
            .spawn(move || serve(agent, mask, &theirs, &receiver, &report));
        signal::set_mask(mask);
        let thread = spawned.map_err(Error::os("start the engine thread"))?;
        let wake = made.recv().map_err(|_| Error::Closed)??;
        Ok(Self {
            channel,
            commands,
            wake,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Checks the spec and the limits and begins to start the group.
    pub fn start(&self, spec: Arc<LaunchSpec>) -> Result<(), Error> {
        let (report, answer) = std::sync::mpsc::channel();
        self.send(Command::Start(spec, report))?;
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
        ring(&self.wake);
        Ok(())
    }

    /// Waits for events. With `routine` false it sleeps through starts and clean exits.
    ///
    /// Signals that the calling thread lets through interrupt it without a race: they are blocked from before
    /// `pending` is asked (return true to stop waiting) until the kernel waits.
    pub fn wait(
        &self,
        timeout: Option<Duration>,
        routine: bool,
        mut pending: impl FnMut() -> bool,
    ) -> Result<Waited, Error> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        self.channel.routine.store(routine, Ordering::SeqCst);
        if routine {
            self.tell_of_waiting();
        }
        let mask = signal::set_mask(SignalSet::ALL);
        let result = loop {
            if pending() {
                break Ok(Waited::Interrupted);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match signal::wait_readable(self.channel.ready.as_fd(), left, mask) {
                Ok(Wake::Readable) => break Ok(Waited::Events(self.take())),
                Ok(Wake::TimedOut) => break Ok(Waited::TimedOut),
                Ok(Wake::Interrupted) => {}
                Err(error) => break Err(Error::os("poll")(error)),
            }
        };
        signal::set_mask(mask);
        result
    }

    /// Routine events may be waiting that nobody was told of.
    fn tell_of_waiting(&self) {
        let mut queue = lock(&self.channel.queue);
        if !queue.events.is_empty() && !queue.told {
            queue.told = true;
            ring(&self.channel.ready);
        }
    }

    fn take(&self) -> Vec<Event> {
        let mut queue = lock(&self.channel.queue);
        if !queue.over {
            let mut counter = [0u8; 8];
            let _ = rustix::io::read(&self.channel.ready, &mut counter);
        }
        queue.told = false;
        let full = queue.bytes > BACKLOG_BYTES;
        queue.bytes = 0;
        let events = queue.events.drain(..).collect();
        drop(queue);
        if full {
            ring(&self.wake);
        }
        events
    }

    /// Kills what is left, waits for it and ends the thread. Whoever waits for events gets none.
    pub fn close(&self) {
        let mut slot = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = slot.take() {
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

fn channel_pair() -> (Sender<Command>, Receiver<Command>) {
    channel()
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    // The queue is whole between any two statements that hold the lock.
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ring(bell: &OwnedFd) {
    // The counter cannot overflow in any number of events that fits in memory.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

/// Tells the owner that nothing more comes, also when the thread unwinds.
struct Over<'a>(&'a Channel);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        lock(&self.0.queue).over = true;
        ring(&self.0.ready);
    }
}

fn serve(
    agent: Option<Agent>,
    mask: SignalSet,
    channel: &Channel,
    commands: &Receiver<Command>,
    report: &Sender<Result<Arc<OwnedFd>, Error>>,
) {
    let _over = Over(channel);
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
    if report.send(Ok(supervisor.waker())).is_err() {
        return;
    }
    let mut last_told = Instant::now();
    loop {
        if !obey(&mut supervisor, commands) {
            return;
        }
        if supervisor.turn().is_err() {
            return;
        }
        publish(&mut supervisor, channel, &mut last_told);
    }
}

/// Carries out what the owner has asked for; false when it is time to go.
fn obey(supervisor: &mut Supervisor, commands: &Receiver<Command>) -> bool {
    loop {
        match commands.try_recv() {
            Ok(Command::Start(spec, report)) => {
                let _ = report.send(supervisor.start(spec));
            }
            Ok(Command::Signal { number, worker }) => supervisor.signal(number, worker),
            Ok(Command::Stop { signal, grace }) => supervisor.stop(signal, grace),
            Ok(Command::Kill) => supervisor.kill(),
            Ok(Command::Close) | Err(TryRecvError::Disconnected) => return false,
            Err(TryRecvError::Empty) => return true,
        }
    }
}

fn publish(supervisor: &mut Supervisor, channel: &Channel, last_told: &mut Instant) {
    let events = supervisor.take_events();
    let routine = channel.routine.load(Ordering::SeqCst);
    let urgent = events.iter().any(|event| routine || event.is_urgent());
    let mut queue = lock(&channel.queue);
    for event in &events {
        if let Event::Output { data, .. } = event {
            queue.bytes += data.len();
        }
    }
    let fresh = !events.is_empty();
    queue.events.extend(events);
    supervisor.set_reading(queue.bytes <= BACKLOG_BYTES);
    // While workers are being started the owner is told now and then only: waking it costs a processor.
    let patient = supervisor.is_starting() && routine && last_told.elapsed() < Duration::from_millis(20);
    if ((fresh && urgent) || (routine && !queue.events.is_empty())) && !queue.told && !patient {
        queue.told = true;
        *last_told = Instant::now();
        ring(&channel.ready);
    }
}
