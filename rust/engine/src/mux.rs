//! Output of the workers on its way to files and to the console.
//!
//! A thread of its own reads the streams, so that neither a disk nor a console can hold up exits and signals.
//! Each stream's bytes go to its file unchanged, and line by line to the console ([`compose`]), which yet
//! another thread writes ([`writer`]). What is kept in a file may be left out on a console that nobody reads;
//! what is shown only there waits for it, unless it is a terminal.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::bell::Bell;
use crate::error::Error;
use crate::event::LogNotice;
use crate::poller::Poller;
use crate::spec::{Console, LogOptions};

mod cap;
mod compose;
mod consoles;
mod file;
mod fold;
mod reader;
mod ring;
mod screen;
mod search;
mod side;
mod terminal;
mod text;
mod whole;
mod writer;

pub(crate) use consoles::Consoles;
pub use consoles::Flushed;
pub(crate) use file::{open_log, open_output};
pub(crate) use terminal::open_terminal;

/// The longest time that consoles hold up a job that a signal has ended. Its guard knows it, too.
pub(crate) const LAST_OUTPUT: Duration = Duration::from_secs(30);
/// Token of the bell in the poller; streams have small numbers.
const BELL: u64 = u64::MAX;

/// One stream to read.
pub(crate) struct Stream {
    pub(crate) fd: OwnedFd,
    /// Index of the worker.
    pub(crate) worker: usize,
    /// What it is to the worker.
    pub(crate) kind: Console,
    /// Where the bytes go.
    pub(crate) file: Option<(CString, OwnedFd)>,
    /// Where the lines are shown.
    pub(crate) console: Option<Console>,
    /// Put before each line.
    pub(crate) prefix: Vec<u8>,
    /// The worker reads our terminal.
    pub(crate) interactive: bool,
    /// Its last bytes are what the worker would complain with.
    pub(crate) keeps_tail: bool,
}

/// What is left to say once all streams have been read.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Last bytes of the worker that was asked for.
    pub(crate) tail: Vec<u8>,
    /// How many lines a terminal has shown since the last one of that stream; `None`: it has shown none of it.
    pub(crate) shown_since: Option<u64>,
}

enum Order {
    Reopen,
    Interrupt,
    Resize {
        from_terminal: bool,
    },
    Finish(Finish),
    #[cfg(test)]
    Panic,
}

/// What is to be done at the end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Finish {
    /// The worker whose last bytes are wanted.
    pub(crate) tail_of: Option<usize>,
    /// A signal has ended the job, so its sender waits.
    pub(crate) is_stopped: bool,
}

#[derive(Default)]
struct Mailbox {
    streams: Vec<Stream>,
    orders: Vec<Order>,
    notices: Vec<LogNotice>,
    /// The workers' terminals have a new size, and whether it is our terminal that said so.
    resized: Option<bool>,
    outcome: Option<Outcome>,
}

/// What the owner and the reading thread share.
struct Link {
    poller: Poller,
    mailbox: Mutex<Mailbox>,
    /// Wakes the reading thread.
    bell: Arc<Bell>,
    /// Wakes the owner.
    wake: Arc<Bell>,
    consoles: Arc<Consoles>,
    hurry: AtomicBool,
}

impl Link {
    fn mailbox(&self) -> MutexGuard<'_, Mailbox> {
        // The mailbox is whole between any two statements that hold the lock.
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reading thread of one group.
pub(crate) struct Mux {
    link: Arc<Link>,
    thread: Option<JoinHandle<()>>,
    streams: u64,
    is_finishing: bool,
}

impl Mux {
    /// Starts the thread. `wake` is rung when there are notices or the outcome; `expected` is how many streams
    /// will be shown on stdout and on stderr; `consoles` has what earlier groups have left to write.
    pub(crate) fn new(
        options: LogOptions,
        expected: [usize; 2],
        wake: Arc<Bell>,
        consoles: Arc<Consoles>,
    ) -> Result<Self, Error> {
        let link = Arc::new(Link {
            poller: Poller::new()?,
            mailbox: Mutex::default(),
            bell: Arc::new(Bell::new()?),
            wake,
            consoles,
            hurry: AtomicBool::new(false),
        });
        link.poller.watch(&link.bell, BELL)?;
        let theirs = Arc::clone(&link);
        let thread = std::thread::Builder::new()
            .name("dsl-mux".into())
            .stack_size(512 * 1024)
            .spawn(move || reader::serve(&theirs, options, expected))
            .map_err(Error::thread("start the log thread"))?;
        Ok(Self {
            link,
            thread: Some(thread),
            streams: 0,
            is_finishing: false,
        })
    }

    /// Reads a stream from now on.
    pub(crate) fn add(&mut self, stream: Stream) -> Result<(), Error> {
        // The thread looks into the mailbox for a stream that it does not know.
        let mut mailbox = self.link.mailbox();
        self.link.poller.watch(&stream.fd, self.streams)?;
        self.streams += 1;
        mailbox.streams.push(stream);
        Ok(())
    }

    /// Opens the log files anew.
    pub(crate) fn reopen(&self) {
        self.order(Order::Reopen);
    }

    /// Somebody has interrupted the workers.
    pub(crate) fn interrupt(&self) {
        self.order(Order::Interrupt);
    }

    /// The size of our terminal has changed.
    pub(crate) fn resize(&self, from_terminal: bool) {
        self.order(Order::Resize { from_terminal });
    }

    /// What was said to [`Mux::resize`], once the workers' terminals have the new size.
    pub(crate) fn take_resized(&self) -> Option<bool> {
        self.link.mailbox().resized.take()
    }

    /// Takes what the streams hold still, shows and writes it, and ends. The outcome says when that is done.
    pub(crate) fn finish(&mut self, finish: Finish) {
        self.is_finishing = true;
        self.order(Order::Finish(finish));
        // A thread that has ended of itself tells nobody any more.
        self.link.wake.ring();
    }

    /// All that is left to do is to write and to show what the workers have said.
    pub(crate) fn is_finishing(&self) -> bool {
        self.is_finishing
    }

    /// Stops waiting for a slow console.
    pub(crate) fn hurry(&self) {
        self.link.hurry.store(true, Ordering::SeqCst);
    }

    fn order(&self, order: Order) {
        self.link.mailbox().orders.push(order);
        self.link.bell.ring();
    }

    pub(crate) fn take_notices(&self) -> Vec<LogNotice> {
        std::mem::take(&mut self.link.mailbox().notices)
    }

    /// What became of the streams, once [`Mux::finish`] has been carried out; the thread is gone by then.
    pub(crate) fn take_outcome(&mut self) -> Option<Outcome> {
        if !self.is_finishing {
            return None;
        }
        let outcome = self.link.mailbox().outcome.take()?;
        if let Some(thread) = self.thread.take() {
            // All that it had left to do was to close its files. A panic in it has been told by its hook.
            let _ = thread.join();
        }
        Some(outcome)
    }
}

impl Drop for Mux {
    fn drop(&mut self) {
        // The thread may stand in a write to a disk, so it is not joined.
        self.hurry();
        self.finish(Finish {
            tail_of: None,
            is_stopped: true,
        });
    }
}

/// The reading thread's last word, also when it unwinds: a group whose outcome never came would never end.
struct LastWord<'a> {
    link: &'a Link,
    outcome: Outcome,
}

impl Drop for LastWord<'_> {
    fn drop(&mut self) {
        self.link.mailbox().outcome = Some(std::mem::take(&mut self.outcome));
        self.link.wake.ring();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_thread_that_fails_lets_go_of_the_streams_and_still_gives_an_outcome() {
        let wake = Arc::new(Bell::new().unwrap());
        let consoles = Arc::new(Consoles::new().unwrap());
        let mut mux = Mux::new(LogOptions::default(), [0, 0], wake, consoles).unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        let stream = Stream {
            fd: read,
            worker: 0,
            kind: Console::Stdout,
            file: None,
            console: None,
            prefix: Vec::new(),
            interactive: false,
            keeps_tail: true,
        };
        mux.add(stream).unwrap();
        mux.order(Order::Panic);
        let until = Instant::now() + Duration::from_secs(20);
        while !mux.thread.as_ref().unwrap().is_finished() {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
        assert_eq!(rustix::io::write(&write, b"x"), Err(rustix::io::Errno::PIPE));
        assert!(mux.take_outcome().is_none(), "the workers have not ended");
        mux.finish(Finish {
            tail_of: None,
            is_stopped: false,
        });
        assert!(mux.take_outcome().is_some());
    }
}
