//! Writes to our own stdout or stderr without blocking the caller.
//!
//! The descriptor is shared with the process that started us, so we cannot make it non-blocking. A separate thread
//! writes. If a pager or Ctrl-S blocks the console, only this thread waits. Where no thread can be started, because
//! there are as many as there may be, the next caller writes what the console takes at once.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use rustix::termios::isatty;

use crate::poller::Bell;
use crate::poller::poll_once;

/// Bytes that may wait for the console.
pub(super) const LIMIT_BYTES: usize = 8 << 20;
/// Bytes of one write; progress is noted after each.
const CHUNK: usize = 64 * 1024;
/// Bytes of one write that must not block: what is ready has room for so many.
const SMALL_CHUNK: usize = 256;
/// How often a waiting thread looks at the time.
const WAIT_POLL: Duration = Duration::from_millis(20);
/// The longest wait of somebody in a hurry, long enough for a console that is read: workers that ended with the same
/// Ctrl-C have just written their last lines.
const HURRIED: Duration = Duration::from_millis(200);
/// Buffers that are kept for reuse.
const SPARE_BUFFERS: usize = 4;

struct State {
    blocks: VecDeque<Vec<u8>>,
    /// The block that is being written, and how many of its bytes are written.
    current: Option<(Arc<Vec<u8>>, usize)>,
    /// How many bytes are not written yet.
    bytes: usize,
    /// When bytes were last written, or when the oldest waiting bytes came.
    progress: Instant,
    closed: bool,
    failure: Failure,
    lost: Lost,
    over: bool,
    given_up: bool,
    spare: Vec<Vec<u8>>,
    owner: Owner,
}

/// Why the console could not be written at first, and whether somebody knows.
#[derive(Debug, Clone, Copy)]
enum Failure {
    None,
    New(Errno),
    Told,
}

/// Output that a file did not take.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lost {
    pub(super) bytes: u64,
    pub(super) lines: u64,
}

/// The bell that is rung, and when.
struct Owner {
    bell: Arc<Bell>,
    wants: Wants,
}

/// When the owner's bell is rung, besides when the console is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wants {
    /// When there is room again, half of [`LIMIT_BYTES`], or the console has failed.
    Room,
    /// When everything is written.
    End,
    /// When everything is written, when fewer bytes than this are left, or the console has failed.
    Below(usize),
}

/// Whether a write may wait for the console.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Patience {
    Waits,
    None,
}

struct Backlog {
    state: Mutex<State>,
    /// The rest of a line is lost. Only the writer uses it.
    is_torn: AtomicBool,
    changed: Condvar,
}

/// The thread that writes to one console.
pub(super) struct Writer {
    backlog: Arc<Backlog>,
    outlet: Arc<Outlet>,
    /// Empty as long as it cannot be started.
    thread: OnceLock<JoinHandle<()>>,
}

impl Writer {
    /// Starts the thread. `bell` is rung whenever the queue falls below half its limit, or the console fails.
    pub(super) fn new(fd: OwnedFd, bell: Arc<Bell>) -> Self {
        let state = State {
            blocks: VecDeque::new(),
            current: None,
            bytes: 0,
            progress: Instant::now(),
            closed: false,
            failure: Failure::None,
            lost: Lost::default(),
            over: false,
            given_up: false,
            spare: Vec::new(),
            owner: Owner {
                bell,
                wants: Wants::Room,
            },
        };
        let backlog = Arc::new(Backlog {
            state: Mutex::new(state),
            is_torn: AtomicBool::new(false),
            changed: Condvar::new(),
        });
        let writer = Self {
            backlog,
            outlet: Arc::new(Outlet::new(fd)),
            thread: OnceLock::new(),
        };
        writer.start_thread();
        writer
    }

    fn start_thread(&self) {
        #[cfg(test)]
        if tests::HAS_NO_THREAD.get() {
            return;
        }
        let (backlog, outlet) = (Arc::clone(&self.backlog), Arc::clone(&self.outlet));
        let spawned = std::thread::Builder::new()
            .name("dsl-console".into())
            .stack_size(128 * 1024)
            .spawn(move || backlog.serve(&outlet, Patience::Waits));
        if let Ok(thread) = spawned {
            // Only the owner starts it, so there is none.
            let _ = self.thread.set(thread);
        }
    }

    /// Whether there is no thread that writes what is left.
    pub(super) fn is_behind(&self) -> bool {
        self.thread.get().is_none() && !self.backlog.lock().is_done()
    }

    /// The state, after what the thread would have done if there is none.
    fn state(&self) -> MutexGuard<'_, State> {
        if self.is_behind() {
            self.start_thread();
            if self.thread.get().is_none() {
                self.backlog.serve(&self.outlet, Patience::None);
            }
        }
        self.backlog.lock()
    }

    /// From now on rings this bell instead.
    pub(super) fn adopt(&self, bell: Arc<Bell>, wants: Wants) {
        self.backlog.lock().owner = Owner { bell, wants };
    }

    /// Hands a block over and gives back an empty buffer.
    pub(super) fn write(&self, block: Vec<u8>) -> Vec<u8> {
        if block.is_empty() {
            return block; // a stalled console would collect empty blocks without a limit
        }
        let mut state = self.backlog.lock();
        let mut spare = state.spare.pop().unwrap_or_default();
        spare.clear();
        if state.closed {
            return spare;
        }
        if state.bytes == 0 {
            state.progress = Instant::now();
        }
        state.bytes += block.len();
        state.blocks.push_back(block);
        drop(state);
        self.backlog.changed.notify_all();
        if self.thread.get().is_none() {
            drop(self.state());
        }
        spare
    }

    /// How many bytes wait, and how long no byte was written.
    pub(super) fn backlog(&self) -> (usize, Duration) {
        let state = self.state();
        let idle = if state.bytes == 0 {
            Duration::ZERO
        } else {
            state.progress.elapsed()
        };
        (state.bytes, idle)
    }

    /// Whether the reader has closed the console.
    pub(super) fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Why the console could not be written at first; once. A file that is not closed gets later output all the same.
    pub(super) fn take_failure(&self) -> Option<Errno> {
        let mut state = self.backlog.lock();
        let Failure::New(error) = state.failure else {
            return None;
        };
        state.failure = Failure::Told;
        Some(error)
    }

    /// What a file did not take since the last call.
    pub(super) fn take_lost(&self) -> Lost {
        std::mem::take(&mut self.backlog.lock().lost)
    }

    /// Whether everything is written, or the console is closed.
    pub(super) fn is_done(&self) -> bool {
        self.state().is_done()
    }

    /// Waits until the writer is done. Stops waiting if the console has taken nothing for `patience`, at the time
    /// `until`, or after a moment if `is_hurried` returns true. Returns whether the writer is done.
    pub(super) fn wait(&self, patience: Duration, until: Instant, is_hurried: impl Fn() -> bool) -> bool {
        let begun = Instant::now();
        let given_up = || begun.elapsed() >= HURRIED && is_hurried();
        let mut state = self.state();
        while !state.is_done() {
            if state.progress.elapsed() >= patience || Instant::now() >= until || given_up() {
                return false;
            }
            let waited = self.backlog.changed.wait_timeout(state, WAIT_POLL);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            state = self.state();
        }
        true
    }

    /// Drops everything that is not written. Returns how many lines that is.
    pub(super) fn give_up(&self) -> usize {
        let mut state = self.backlog.lock();
        let current = state.current.take();
        let begun = current.map_or(0, |(block, written)| lines_of(&block[written..]));
        let lines = begun + state.blocks.iter().map(|block| lines_of(block)).sum::<usize>();
        state.blocks.clear();
        state.bytes = 0;
        state.given_up = true;
        state.over = true;
        drop(state);
        self.backlog.changed.notify_all();
        lines
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let mut state = self.state();
        state.over = true;
        let is_idle = state.bytes == 0 && !state.given_up;
        drop(state);
        self.backlog.changed.notify_all();
        // If output is left, the thread may be blocked in a write for as long as the console is blocked, so it is not
        // joined.
        if let (true, Some(thread)) = (is_idle, self.thread.take()) {
            // A panic in the thread was reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl State {
    fn is_done(&self) -> bool {
        self.bytes == 0 || self.closed
    }

    fn note_failure(&mut self, error: Errno) {
        if matches!(self.failure, Failure::None) {
            self.failure = Failure::New(error);
        }
    }
}

fn lines_of(bytes: &[u8]) -> usize {
    memchr::memchr_iter(b'\n', bytes).count()
}

impl Backlog {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each statement under the lock leaves the state consistent, so a panic does no harm.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes until the owner has gone; with [`Patience::None`], what the console takes at once.
    fn serve(&self, outlet: &Outlet, patience: Patience) {
        loop {
            let mut state = self.lock();
            let (block, written) = loop {
                if let Some(begun) = state.current.clone() {
                    break begun;
                }
                if let Some(block) = state.blocks.pop_front() {
                    state.current = Some((Arc::new(block), 0));
                } else if state.over || patience == Patience::None {
                    return;
                } else {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            };
            drop(state);
            if !self.write_block(outlet, &block, written, patience) {
                return;
            }
            let mut state = self.lock();
            state.current = None;
            if let Ok(block) = Arc::try_unwrap(block)
                && state.spare.len() < SPARE_BUFFERS
            {
                state.spare.push(block);
            }
        }
    }

    /// Writes a block from the byte `written` on, or what a file takes of it; false if the console is closed, the rest
    /// was given up, or the console takes no more without a wait that is not wanted.
    fn write_block(&self, outlet: &Outlet, block: &[u8], written: usize, patience: Patience) -> bool {
        let mut rest = &block[written..];
        let most = match patience {
            Patience::Waits => CHUNK,
            Patience::None => SMALL_CHUNK,
        };
        while !rest.is_empty() {
            if patience == Patience::None && !outlet.is_ready() {
                return false;
            }
            let is_torn = self.is_torn.swap(false, Ordering::Relaxed);
            let written = match is_torn.then(|| outlet.write(b"\n")) {
                Some(Err(error)) => {
                    self.is_torn.store(true, Ordering::Relaxed);
                    Err(error)
                }
                _ => outlet.write(&rest[..rest.len().min(most)]),
            };
            match written {
                Ok(count) => {
                    rest = &rest[count..];
                    if !self.note_progress(count) {
                        return false;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if patience == Patience::None => return false,
                Err(Errno::AGAIN) => {
                    let _ = poll_once(&[outlet.fd.as_fd()], PollFlags::OUT, None);
                    if self.lock().given_up {
                        return false;
                    }
                }
                Err(error) if outlet.is_file => {
                    let done = &block[..block.len() - rest.len()];
                    if done.last().is_some_and(|last| *last != b'\n') {
                        self.is_torn.store(true, Ordering::Relaxed);
                    }
                    let mut state = self.lock();
                    state.note_failure(error);
                    state.lost.bytes += rest.len() as u64;
                    state.lost.lines += lines_of(rest) as u64;
                    drop(state);
                    return self.note_progress(rest.len());
                }
                Err(error) => {
                    self.close(error);
                    return false;
                }
            }
        }
        true
    }

    /// Notes that nobody can read the console any more.
    fn close(&self, error: Errno) {
        let mut state = self.lock();
        state.closed = true;
        state.note_failure(error);
        state.bytes = 0;
        state.blocks.clear();
        state.current = None;
        let bell = Arc::clone(&state.owner.bell);
        drop(state);
        self.changed.notify_all();
        bell.ring();
    }

    /// Notes that `count` more bytes are written or lost; false if the rest was given up.
    fn note_progress(&self, count: usize) -> bool {
        let mut state = self.lock();
        if state.given_up {
            return false;
        }
        if let Some((_, written)) = &mut state.current {
            *written += count;
        }
        let before = state.bytes;
        state.bytes -= count;
        state.progress = Instant::now();
        let falls_below = |mark: usize| before >= mark && state.bytes < mark;
        let is_empty = state.bytes == 0;
        let has_failed = matches!(state.failure, Failure::New(_));
        let is_wanted = match state.owner.wants {
            Wants::Room => falls_below(LIMIT_BYTES / 2) || has_failed,
            Wants::End => is_empty,
            Wants::Below(mark) => falls_below(mark) || is_empty || has_failed,
        };
        let rung = is_wanted.then(|| Arc::clone(&state.owner.bell));
        drop(state);
        if is_empty {
            self.changed.notify_all();
        }
        if let Some(bell) = rung {
            bell.ring();
        }
        true
    }
}

/// The console's descriptor. A pipe is reopened as non-blocking, and a socket is written without blocking. So we know
/// exactly which bytes they have taken when they are given up.
struct Outlet {
    fd: OwnedFd,
    is_socket: bool,
    /// A full disk may have room again. What ends a pipe, a socket or a terminal ends it for good.
    is_file: bool,
}

impl Outlet {
    fn new(fd: OwnedFd) -> Self {
        let kind = fstat(&fd).map(|stat| FileType::from_raw_mode(stat.st_mode));
        let reopened = (kind == Ok(FileType::Fifo))
            .then(|| {
                let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
                open(
                    path,
                    OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
                    Mode::empty(),
                )
                .ok()
            })
            .flatten();
        Self {
            is_file: !matches!(kind, Ok(FileType::Fifo | FileType::Socket)) && !isatty(&fd),
            fd: reopened.unwrap_or(fd),
            is_socket: kind == Ok(FileType::Socket),
        }
    }

    /// Whether a write of [`SMALL_CHUNK`] bytes would not wait.
    fn is_ready(&self) -> bool {
        poll_once(&[self.fd.as_fd()], PollFlags::OUT, Some(Duration::ZERO)) != Ok(false)
    }

    fn write(&self, data: &[u8]) -> Result<usize, Errno> {
        if self.is_socket {
            send(&self.fd, data, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
        } else {
            rustix::io::write(&self.fd, data)
        }
    }
}

#[cfg(test)]
mod tests;
