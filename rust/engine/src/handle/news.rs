//! Events on their way from the engine's thread to its owner.
//!
//! One lock guards everything that decides whether to tell the owner. So no event can slip in between the owner's
//! last look and its sleep.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::event::Event;
use crate::poller::Bell;
use crate::poller::Poller;
use crate::sys::signal::{self, SignalSet, Wake};

/// Output bytes that may wait for the owner before the workers' pipes are left unread.
const BACKLOG_BYTES: usize = 8 << 20;
/// While workers are being started the owner is told at most once in this time: waking it costs processor time.
const PATIENCE: Duration = Duration::from_millis(20);

/// Why [`crate::Handle::wait`] came back.
#[derive(Debug)]
pub enum Waited {
    /// Events, in order; empty when the supervisor was closed meanwhile.
    Events(Vec<Event>),
    /// The time is over.
    TimedOut,
    /// A signal handler of this process ran on the calling thread.
    Interrupted,
    /// [`crate::Handle::wake`] was called.
    Woken,
}

/// Whether the thread can still send events.
enum Life {
    Running,
    /// The owner is ending it.
    Closing,
    Closed,
    /// The thread has ended by itself. Holds the error until a wait returns it.
    Failed(Option<Error>),
}

struct Queue {
    events: VecDeque<Event>,
    /// Bytes of output in these events.
    bytes: usize,
    /// At least one event is of a kind that the owner always wants at once.
    urgent: bool,
    /// The owner wants starts and clean exits at once, too.
    routine: bool,
    /// The owner was told of the events in the queue.
    told: bool,
    last_told: Instant,
    /// Started groups whose end the owner has not taken yet.
    groups: usize,
    life: Life,
}

pub(super) struct News {
    queue: Mutex<Queue>,
    /// Readable while there is something to take that the owner wants to hear of.
    ready: Bell,
    /// Ends the present wait, or the next.
    wake: Bell,
    /// Both bells.
    bells: Poller,
}

impl News {
    pub(super) fn new() -> Result<Self, Error> {
        let news = Self {
            queue: Mutex::new(Queue {
                events: VecDeque::new(),
                bytes: 0,
                urgent: false,
                routine: true,
                told: false,
                last_told: Instant::now(),
                groups: 0,
                life: Life::Running,
            }),
            ready: Bell::new()?,
            wake: Bell::new()?,
            bells: Poller::new()?,
        };
        news.bells.watch(&news.ready, 0)?;
        news.bells.watch(&news.wake, 1)?;
        Ok(news)
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // The queue is whole between any two statements that hold the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A group runs from now on.
    pub(super) fn begin(&self) {
        self.lock().groups += 1;
    }

    /// Hands events over. Returns whether there is room for more output.
    pub(super) fn publish(&self, events: Vec<Event>, is_starting: bool) -> bool {
        let mut queue = self.lock();
        queue.bytes += output_bytes(&events);
        queue.urgent |= events.iter().any(Event::is_urgent);
        queue.events.extend(events);
        let patient = is_starting && queue.routine && queue.last_told.elapsed() < PATIENCE;
        if !patient {
            self.tell(&mut queue);
        }
        queue.bytes <= BACKLOG_BYTES
    }

    fn tell(&self, queue: &mut Queue) {
        let wanted = queue.urgent || (queue.routine && !queue.events.is_empty());
        if wanted && !queue.told {
            queue.told = true;
            queue.last_told = Instant::now();
            self.ready.ring();
        }
    }

    /// See [`crate::Handle::wait`].
    pub(super) fn wait(
        &self,
        timeout: Option<Duration>,
        routine: bool,
        mut pending: impl FnMut() -> bool,
    ) -> Result<Waited, Error> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut queue = self.lock();
        queue.routine = routine;
        self.tell(&mut queue);
        drop(queue);
        let mut mask = signal::set_mask(SignalSet::ALL);
        let result = loop {
            // Handlers may start children, which inherit the mask, so handlers run under the caller's mask. The
            // second look finds a signal that came after the first look and before all signals were blocked again.
            signal::set_mask(mask);
            let is_pending = pending();
            mask = signal::set_mask(SignalSet::ALL);
            if is_pending || pending() {
                break Ok(Waited::Interrupted);
            }
            if deadline.is_none() && self.is_in_vain() {
                break Err(Error::Idle);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match signal::wait_readable(self.bells.as_fd(), left, mask) {
                Ok(Wake::Readable) => {
                    if let Some(waited) = self.take() {
                        break waited;
                    }
                }
                Ok(Wake::TimedOut) => break Ok(Waited::TimedOut),
                Ok(Wake::Interrupted) => {}
                Err(error) => break Err(Error::os("poll")(error)),
            }
        };
        signal::set_mask(mask);
        result
    }

    /// Whether a wait might never end: there is no group, and no event of one.
    fn is_in_vain(&self) -> bool {
        let queue = self.lock();
        let is_idle = queue.groups == 0 && queue.events.is_empty() && matches!(queue.life, Life::Running);
        is_idle && !self.wake.is_rung()
    }

    /// Why a bell was rung; `None` if another thread was faster.
    fn take(&self) -> Option<Result<Waited, Error>> {
        if self.wake.silence() {
            return Some(Ok(Waited::Woken));
        }
        let mut queue = self.lock();
        if matches!(queue.life, Life::Running | Life::Closing) {
            self.ready.silence();
        }
        queue.told = false;
        queue.urgent = false;
        queue.bytes = 0;
        let events: Vec<Event> = queue.events.drain(..).collect();
        let ends = events.iter().filter(|event| matches!(event, Event::Ended { .. }));
        queue.groups = queue.groups.saturating_sub(ends.count());
        match &mut queue.life {
            Life::Running | Life::Closing if events.is_empty() => None,
            Life::Failed(why) if events.is_empty() => Some(Err(why.take().unwrap_or(Error::Closed))),
            _ => Some(Ok(Waited::Events(events))),
        }
    }

    /// Ends the present wait, or the next.
    pub(super) fn wake(&self) {
        self.wake.ring();
    }

    /// The owner ends the thread.
    pub(super) fn close(&self) {
        let mut queue = self.lock();
        queue.life = match queue.life {
            Life::Running | Life::Closing => Life::Closing,
            Life::Closed | Life::Failed(_) => Life::Closed,
        };
    }

    /// The thread has ended. What is in the queue can still be taken.
    pub(super) fn end(&self, failure: Option<Error>) {
        let mut queue = self.lock();
        queue.life = match queue.life {
            Life::Closing | Life::Closed => Life::Closed,
            Life::Running | Life::Failed(_) => Life::Failed(failure),
        };
        self.ready.ring();
    }
}

/// Readable when a wait with the `routine` of the last wait would return something.
impl AsFd for News {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

/// Whether the pipes were left unread until these events were taken.
pub(super) fn held_up_pipes(events: &[Event]) -> bool {
    output_bytes(events) > BACKLOG_BYTES
}

fn output_bytes(events: &[Event]) -> usize {
    let bytes = |event: &Event| match event {
        Event::Output { data, .. } => data.len(),
        _ => 0,
    };
    events.iter().map(bytes).sum()
}

#[cfg(test)]
mod tests;
