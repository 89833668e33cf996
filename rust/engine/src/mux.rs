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

use crate::bell::Bell;
use crate::error::Error;
use crate::event::LogNotice;
use crate::poller::Poller;
use crate::spec::{Console, LogOptions};

mod cap;
mod compose;
mod file;
mod fold;
mod reader;
mod ring;
mod screen;
mod search;
mod side;
mod terminal;
mod text;
mod writer;

pub(crate) use file::{open_log, open_output};
pub(crate) use terminal::open_terminal;

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
    /// The worker reads our stdin.
    pub(crate) interactive: bool,
    /// Its last bytes are what the worker would complain with.
    pub(crate) keeps_tail: bool,
}

/// What is left to say once all streams have been read.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Last bytes of the worker that was asked for.
    pub(crate) tail: Vec<u8>,
}

enum Order {
    Reopen,
    Resize { from_terminal: bool },
    Finish { tail_of: Option<usize> },
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
}

impl Mux {
    /// Starts the thread. `wake` is rung when there are notices or the outcome; `expected` is how many streams
    /// will be shown on stdout and on stderr.
    pub(crate) fn new(options: LogOptions, expected: [usize; 2], wake: Arc<Bell>) -> Result<Self, Error> {
        let link = Arc::new(Link {
            poller: Poller::new()?,
            mailbox: Mutex::default(),
            bell: Arc::new(Bell::new()?),
            wake,
            hurry: AtomicBool::new(false),
        });
        link.poller.watch(&link.bell, BELL)?;
        let theirs = Arc::clone(&link);
        let thread = std::thread::Builder::new()
            .name("dsl-mux".into())
            .stack_size(512 * 1024)
            .spawn(move || reader::serve(theirs, options, expected))
            .map_err(Error::os("start the log thread"))?;
        Ok(Self {
            link,
            thread: Some(thread),
            streams: 0,
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

    /// The size of our terminal has changed.
    pub(crate) fn resize(&self, from_terminal: bool) {
        self.order(Order::Resize { from_terminal });
    }

    /// What was said to [`Mux::resize`], once the workers' terminals have the new size.
    pub(crate) fn take_resized(&self) -> Option<bool> {
        self.link.mailbox().resized.take()
    }

    /// Takes what the streams hold still, shows and writes it, and ends. The outcome says when that is done.
    pub(crate) fn finish(&self, tail_of: Option<usize>) {
        self.order(Order::Finish { tail_of });
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
        self.finish(None);
    }
}
