//! Our own stdout or stderr as a place to write to without ever waiting for it.
//!
//! The descriptor is shared with whoever started us, so it cannot be made non-blocking. A thread of its own
//! writes what it is handed; when a pager or Ctrl-S holds it up, only this thread stands still.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::bell::Bell;

/// Bytes that may wait for the console.
pub(super) const LIMIT_BYTES: usize = 8 << 20;
/// Bytes written at once: progress is seen after each.
const CHUNK: usize = 64 * 1024;
/// How often a waiting flush looks at the time.
const FLUSH_POLL: Duration = Duration::from_millis(20);
/// Buffers that are kept for reuse.
const SPARE_BUFFERS: usize = 4;

struct State {
    blocks: VecDeque<Vec<u8>>,
    /// Bytes not written yet.
    bytes: usize,
    /// When something was last written, or began to wait.
    progress: Instant,
    closed: bool,
    over: bool,
    spare: Vec<Vec<u8>>,
}

struct Backlog {
    state: Mutex<State>,
    changed: Condvar,
}

/// The thread that writes to one console.
pub(super) struct Writer {
    backlog: Arc<Backlog>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the thread. `bell` is rung whenever the queue falls below half its limit, or the console closes.
    pub(super) fn new(fd: OwnedFd, bell: Arc<Bell>) -> std::io::Result<Self> {
        let state = State {
            blocks: VecDeque::new(),
            bytes: 0,
            progress: Instant::now(),
            closed: false,
            over: false,
            spare: Vec::new(),
        };
        let backlog = Arc::new(Backlog {
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let theirs = Arc::clone(&backlog);
        let thread = std::thread::Builder::new()
            .name("dsl-console".into())
            .stack_size(128 * 1024)
            .spawn(move || theirs.serve(&fd, &bell))?;
        Ok(Self {
            backlog,
            thread: Some(thread),
        })
    }

    /// Hands a block over and gives back an empty buffer.
    pub(super) fn write(&self, block: Vec<u8>) -> Vec<u8> {
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
        spare
    }

    /// Bytes that wait, and for how long none has been written.
    pub(super) fn backlog(&self) -> (usize, Duration) {
        let state = self.backlog.lock();
        let idle = if state.bytes == 0 {
            Duration::ZERO
        } else {
            state.progress.elapsed()
        };
        (state.bytes, idle)
    }

    /// Nobody reads it any more.
    pub(super) fn is_closed(&self) -> bool {
        self.backlog.lock().closed
    }

    /// Waits until all is written, the console is closed, it has taken nothing for `patience`, it is not done
    /// within `longest`, or `given_up` says so. What is left then is thrown away; how many lines that is.
    pub(super) fn flush(&self, patience: Duration, longest: Duration, given_up: impl Fn() -> bool) -> usize {
        let begin = Instant::now();
        let mut state = self.backlog.lock();
        while state.bytes > 0 && !state.closed && !state.over {
            if state.progress.elapsed() >= patience || begin.elapsed() >= longest || given_up() {
                break;
            }
            let waited = self.backlog.changed.wait_timeout(state, FLUSH_POLL);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.closed {
            return 0;
        }
        let lines = state
            .blocks
            .iter()
            .map(|block| memchr::memchr_iter(b'\n', block).count());
        let left = lines.sum();
        if left > 0 {
            state.blocks.clear();
            state.over = true;
        }
        left
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let mut state = self.backlog.lock();
        state.over = true;
        let is_idle = state.bytes == 0;
        drop(state);
        self.backlog.changed.notify_all();
        // With something left to write it may stand in that for as long as somebody holds the console up.
        if let (true, Some(thread)) = (is_idle, self.thread.take()) {
            // A panic in it has been told by its hook.
            let _ = thread.join();
        }
    }
}

impl Backlog {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is whole between any two statements that hold the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, fd: &OwnedFd, bell: &Bell) {
        loop {
            let mut state = self.lock();
            let block = loop {
                if let Some(block) = state.blocks.pop_front() {
                    break block;
                }
                if state.over {
                    return;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            if !self.write_block(fd, bell, &block) {
                return;
            }
            let mut state = self.lock();
            if state.spare.len() < SPARE_BUFFERS {
                state.spare.push(block);
            }
        }
    }

    /// False when the console is no more.
    fn write_block(&self, fd: &OwnedFd, bell: &Bell, block: &[u8]) -> bool {
        let mut rest = block;
        while !rest.is_empty() {
            match rustix::io::write(fd, &rest[..rest.len().min(CHUNK)]) {
                Ok(count) => {
                    rest = &rest[count..];
                    let mut state = self.lock();
                    let before = state.bytes;
                    state.bytes -= count;
                    state.progress = Instant::now();
                    let room = before >= LIMIT_BYTES / 2 && state.bytes < LIMIT_BYTES / 2;
                    let empty = state.bytes == 0;
                    drop(state);
                    if empty {
                        self.changed.notify_all();
                    }
                    if room {
                        bell.ring();
                    }
                }
                Err(Errno::INTR) => {}
                // Whoever shares the descriptor has made it non-blocking.
                Err(Errno::AGAIN) => {
                    let _ = poll(&mut [PollFd::new(fd, PollFlags::OUT)], None);
                }
                Err(_) => {
                    let mut state = self.lock();
                    state.closed = true;
                    state.bytes = 0;
                    state.blocks.clear();
                    drop(state);
                    self.changed.notify_all();
                    bell.ring();
                    return false;
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn writer() -> (Writer, std::fs::File) {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let bell = Arc::new(Bell::new().unwrap());
        (Writer::new(write, bell).unwrap(), std::fs::File::from(read))
    }

    fn flush(writer: &Writer, patience_ms: u64) -> usize {
        writer.flush(
            Duration::from_millis(patience_ms),
            Duration::from_secs(10),
            || false,
        )
    }

    #[test]
    fn blocks_come_out_in_order_and_whole() {
        let (writer, mut reader) = writer();
        writer.write(b"one\n".to_vec());
        writer.write(b"two\n".to_vec());
        assert_eq!(flush(&writer, 5000), 0);
        let mut text = [0; 8];
        reader.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"one\ntwo\n");
    }

    #[test]
    fn a_console_that_takes_nothing_is_given_up_with_a_count() {
        let (writer, _reader) = writer();
        // More than any pipe holds.
        writer.write(vec![b'x'; 4 << 20]);
        writer.write(b"a\nb\nc\n".to_vec());
        assert_eq!(flush(&writer, 50), 3);
    }

    #[test]
    fn a_closed_console_swallows_the_rest() {
        let (writer, reader) = writer();
        drop(reader);
        writer.write(b"one\n".to_vec());
        assert_eq!(flush(&writer, 5000), 0);
        assert!(writer.is_closed());
        writer.write(b"two\n".to_vec());
        assert_eq!(writer.backlog().0, 0);
    }
}
