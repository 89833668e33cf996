//! Passes the workers' output on to files and to the console.
//!
//! A separate thread reads the streams, so that neither a slow disk nor a slow console can delay exits and signals.
//! Other threads help it while the workers of a large group write fast ([`source`]).
//! Each stream's bytes go to its file unchanged. They also go to the console line by line ([`compose`]), which
//! another thread writes ([`writer`]). If a console takes no output, lines that a file keeps are left out. Lines that
//! only the console shows wait for the console, unless it is a terminal.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::Error;
use crate::event::LogNotice;
use crate::poller::Bell;
use crate::poller::Poller;
use crate::spec::{Console, LogOptions};

mod compose;
mod consoles;
mod display;
mod file;
mod fold;
mod reader;
mod ring;
mod screen;
mod search;
mod side;
mod source;
mod stamp;
mod tee;
mod terminal;
mod writer;

pub use compose::relayed;
pub(crate) use consoles::Consoles;
pub use consoles::Flushed;
pub use display::{Display, Progress, Recent};
pub(crate) use file::{open_log, open_output};
pub(crate) use source::{MOST_READERS, Parallel};
pub use tee::Tee;
pub use terminal::can_move_cursor;
pub(crate) use terminal::{Unreadable, open_terminal};

/// The longest time that consoles delay the end of a job that was ended by a signal. The guard uses it, too.
pub(crate) const LAST_OUTPUT: Duration = Duration::from_secs(30);
/// Token of the bell in the poller; the tokens of streams count up from 0.
const BELL: u64 = u64::MAX;

/// One stream to read.
pub(crate) struct Stream {
    pub(crate) fd: OwnedFd,
    /// Index of the worker.
    pub(crate) worker: usize,
    /// Which of the worker's streams it is.
    pub(crate) kind: Console,
    /// The file that gets the bytes, and its path.
    pub(crate) file: Option<(CString, OwnedFd)>,
    /// Where the lines are shown; `None` if they are not.
    pub(crate) console: Option<Console>,
    /// Put before each line.
    pub(crate) prefix: Vec<u8>,
    /// Whether the worker reads our terminal.
    pub(crate) interactive: bool,
    /// Whether error messages of the worker appear here: tracebacks stay together, and the last bytes are kept.
    pub(crate) has_errors: bool,
}

/// The result once all streams have been read.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Last bytes of the worker named by [`Finish::tail_of`].
    pub(crate) tail: Vec<u8>,
    /// How many lines a terminal has shown since the last line of that stream; `None` if it has shown no line of the
    /// stream.
    pub(crate) shown_since: Option<u64>,
}

/// The last line of each worker that has written one, with the index of the worker.
pub(crate) type LastLines = Vec<(usize, Vec<u8>)>;

/// What the thread is to do.
pub(crate) enum Order {
    /// Reopen the log files.
    Reopen,
    /// Note that the workers were interrupted.
    Interrupt,
    /// Note that the size of our terminal has changed.
    Resize { from_terminal: bool },
    /// Send the last lines of the workers. Of a stream whose end is not kept, they are known from the first order on.
    LastLines(Sender<LastLines>),
    /// See [`Mux::finish`].
    Finish(Finish),
    #[cfg(test)]
    Panic,
}

/// How to finish.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Finish {
    /// The worker whose last bytes are wanted.
    pub(crate) tail_of: Option<usize>,
    /// A signal has ended the job, and its sender is waiting.
    pub(crate) is_stopped: bool,
}

#[derive(Default)]
struct Mailbox {
    streams: Vec<Stream>,
    orders: Vec<Order>,
    notices: Vec<LogNotice>,
    /// Set once the workers' terminals have a new size; true if our terminal reported the change.
    resized: Option<bool>,
    outcome: Option<Outcome>,
}

/// State that the owner and the reading thread share.
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
        // Each statement under the lock leaves the mailbox consistent, so a panic does no harm.
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
    /// Starts the thread. `wake` is rung when there are notices or the outcome. `expected` counts the streams that
    /// will be shown on stdout and on stderr. `parallel` tells when other threads help to read. `consoles` holds output
    /// of earlier groups that is still to be written.
    pub(crate) fn new(
        options: LogOptions,
        expected: [usize; 2],
        parallel: Parallel,
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
            .spawn(move || reader::serve(&theirs, options, expected, parallel))
            .map_err(Error::thread("start the log thread"))?;
        Ok(Self {
            link,
            thread: Some(thread),
            streams: 0,
            is_finishing: false,
        })
    }

    /// Adds a stream to read.
    pub(crate) fn add(&mut self, stream: Stream) -> Result<(), Error> {
        // When a stream that the thread does not know is ready, the thread looks into the mailbox. So keep the lock
        // until the stream is there.
        let mut mailbox = self.link.mailbox();
        self.link.poller.watch(&stream.fd, self.streams)?;
        self.streams += 1;
        mailbox.streams.push(stream);
        Ok(())
    }

    /// Whether our terminal reported [`Order::Resize`], once the workers' terminals have the new size.
    pub(crate) fn take_resized(&self) -> Option<bool> {
        self.link.mailbox().resized.take()
    }

    /// Reads what the streams still hold, shows and writes it, and ends the thread. The outcome appears when that is
    /// done.
    pub(crate) fn finish(&mut self, finish: Finish) {
        self.is_finishing = true;
        self.order(Order::Finish(finish));
        // A thread that has already ended does not wake the owner any more.
        self.link.wake.ring();
    }

    /// Whether nothing is left to do but to write and show the workers' output.
    pub(crate) fn is_finishing(&self) -> bool {
        self.is_finishing
    }

    /// Stops waiting for a slow console.
    pub(crate) fn hurry(&self) {
        self.link.hurry.store(true, Ordering::SeqCst);
    }

    /// Gives the thread something to do.
    pub(crate) fn order(&self, order: Order) {
        self.link.mailbox().orders.push(order);
        self.link.bell.ring();
    }

    pub(crate) fn take_notices(&self) -> Vec<LogNotice> {
        std::mem::take(&mut self.link.mailbox().notices)
    }

    /// The outcome, once [`Mux::finish`] is done; the thread has ended by then.
    pub(crate) fn take_outcome(&mut self) -> Option<Outcome> {
        if !self.is_finishing {
            return None;
        }
        let outcome = self.link.mailbox().outcome.take()?;
        if let Some(thread) = self.thread.take() {
            // The thread only had to close its files. A panic in it was reported by the panic hook.
            let _ = thread.join();
        }
        Some(outcome)
    }
}

impl Drop for Mux {
    fn drop(&mut self) {
        // The thread may be blocked in a write to a disk, so it is not joined.
        self.hurry();
        self.finish(Finish {
            tail_of: None,
            is_stopped: true,
        });
    }
}

/// Delivers the outcome when the reading thread ends, even by a panic: without an outcome the group would never end.
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
    use crate::mux::file::tests::Scratch;
    use crate::spec::LineFile;

    fn mux(options: LogOptions, parallel: Parallel) -> Mux {
        let wake = Arc::new(Bell::new().unwrap());
        let consoles = Arc::new(Consoles::new().unwrap());
        Mux::new(options, [0, 0], parallel, wake, consoles).unwrap()
    }

    fn stream(worker: usize, fd: OwnedFd) -> Stream {
        Stream {
            fd,
            worker,
            kind: Console::Stdout,
            file: None,
            console: None,
            prefix: format!("{worker} ").into_bytes(),
            interactive: false,
            has_errors: true,
        }
    }

    const FINISH: Finish = Finish {
        tail_of: None,
        is_stopped: false,
    };

    fn until(is_so: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !is_so() {
            assert!(Instant::now() < end);
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_that_fails_lets_go_of_the_streams_and_still_gives_an_outcome() {
        let mut mux = mux(LogOptions::default(), Parallel::NEVER);
        let (read, write) = rustix::pipe::pipe().unwrap();
        mux.add(stream(0, read)).unwrap();
        mux.order(Order::Panic);
        until(|| mux.thread.as_ref().unwrap().is_finished());
        assert_eq!(rustix::io::write(&write, b"x"), Err(rustix::io::Errno::PIPE));
        assert!(mux.take_outcome().is_none(), "the workers have not ended");
        mux.finish(FINISH);
        assert!(mux.take_outcome().is_some());
    }

    #[test]
    fn several_threads_give_lines_in_the_order_in_which_they_could_be_read() {
        const WORKERS: usize = 200;
        let scratch = Scratch::new();
        let mut options = LogOptions::default();
        options.line_files.push(LineFile {
            stream: Console::Stdout,
            path: scratch.file(None).path,
            words: vec![b"line".to_vec()],
        });
        let mut mux = mux(options, Parallel::of_large_group(Some(3)));
        let mut writers = Vec::new();
        for worker in 0..WORKERS {
            let (read, write) = rustix::pipe::pipe().unwrap();
            // Every other line is long, so that the next one is read before it.
            let text = [&vec![b'.'; worker % 2 * 60_000][..], b"line\n"].concat();
            assert_eq!(rustix::io::write(&write, &text), Ok(text.len()));
            mux.add(stream(worker, read)).unwrap();
            writers.push(write);
        }
        let lines = || memchr::memchr_iter(b'\n', &scratch.read()).count();
        until(|| lines() == WORKERS);
        mux.finish(FINISH);
        let text = String::from_utf8(scratch.read()).unwrap();
        let worker = |line: &str| line.split(' ').next().unwrap().parse::<usize>().unwrap();
        let order: Vec<_> = text.lines().map(worker).collect();
        assert!(order.iter().copied().eq(0..WORKERS), "{order:?}");
    }
}
