//! The workers' streams: their bytes are read, written to their files, and kept for reports. Several threads do that if
//! the workers write more than one thread reads.

use std::mem;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, available_parallelism, scope};

use rustix::buffer::spare_capacity;
use rustix::io::{Errno, read, retry_on_intr};

use crate::mux::file::LogFile;
use crate::mux::ring::Ring;

/// Bytes read from one stream before the next gets its turn.
pub(super) const READ_BYTES: usize = 64 * 1024;
/// Threads that help to read. More gain nothing: one thread composes what is shown.
pub(crate) const MOST_READERS: usize = 4;
/// Of so many processors, one may help.
const PROCESSORS_EACH: usize = 4;
/// Threads help after a turn in which so many bytes were read.
const FAST_BYTES: usize = 1 << 20;
/// Readings that each thread may be ahead of the thread that takes them.
const AHEAD: usize = 4;
const STACK_BYTES: usize = 128 * 1024;

/// When how many threads help to read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parallel {
    /// `None`: as many as are of use. They are counted when they are first needed.
    threads: Option<usize>,
    /// Bytes of the turn before.
    from_bytes: usize,
}

impl Parallel {
    pub(crate) const NEVER: Self = Self {
        threads: Some(0),
        from_bytes: 0,
    };

    /// For a large group. `forced`: this number of threads always reads ([`Features::threads`]).
    ///
    /// [`Features::threads`]: crate::features::Features::threads
    pub(crate) fn of_large_group(forced: Option<usize>) -> Self {
        Self {
            threads: forced,
            from_bytes: if forced.is_some() { 0 } else { FAST_BYTES },
        }
    }

    /// How many threads help, after a turn that has read so many bytes.
    pub(super) fn threads_after(&mut self, bytes: usize) -> usize {
        if bytes < self.from_bytes {
            return 0;
        }
        let useful = || available_parallelism().map_or(1, usize::from) / PROCESSORS_EACH;
        *self.threads.get_or_insert_with(|| useful().min(MOST_READERS))
    }
}

/// A stream, and what happens to its bytes before anybody looks at them.
#[derive(Default)]
pub(super) struct Source {
    /// `None` once it has ended.
    pub(super) fd: Option<OwnedFd>,
    pub(super) file: Option<LogFile>,
    /// Gets the last bytes.
    pub(super) end: Option<Ring>,
}

/// What a read has brought.
#[derive(Default)]
pub(super) struct Reading {
    pub(super) bytes: Vec<u8>,
    /// The stream has ended.
    pub(super) is_over: bool,
    /// The first failure of the file.
    pub(super) failure: Option<Errno>,
}

impl Source {
    /// Reads once. `buffer` is empty and gets the bytes.
    pub(super) fn read(&mut self, mut buffer: Vec<u8>) -> Reading {
        buffer.reserve_exact(READ_BYTES);
        let Some(fd) = &self.fd else {
            return Reading {
                bytes: buffer,
                ..Reading::default()
            };
        };
        let count = retry_on_intr(|| read(fd, spare_capacity(&mut buffer)));
        let file = self.file.as_mut().filter(|_| !buffer.is_empty());
        let failure = file.and_then(|file| file.write(&buffer));
        if let Some(end) = &mut self.end {
            end.push(&buffer);
        }
        Reading {
            bytes: buffer,
            // A terminal whose other side is closed returns EIO.
            is_over: !matches!(count, Ok(1..) | Err(Errno::AGAIN)),
            failure,
        }
    }
}

/// A source that one of [`Readers`] reads, with a buffer.
struct Task {
    source: Source,
    buffer: Vec<u8>,
    answer: SyncSender<(Source, Reading)>,
}

impl Task {
    fn run(mut self) {
        let reading = self.source.read(self.buffer);
        // Fails if the thread that takes the readings has panicked.
        let _ = self.answer.send((self.source, reading));
    }
}

/// Threads that read. Without any, the caller reads.
#[derive(Default)]
pub(super) struct Readers {
    /// Where the threads get their tasks; `None` if there are none.
    tasks: Option<Sender<Task>>,
    count: usize,
}

/// A reading that is done or under way.
pub(super) enum Pending {
    Done(Reading),
    UnderWay(Receiver<(Source, Reading)>),
}

impl Readers {
    /// Starts so many threads, calls `body`, and ends them. Fewer are fine. A panic in a thread goes on in the caller.
    pub(super) fn within<T>(count: usize, body: impl FnOnce(&Self) -> T) -> T {
        if count == 0 {
            return body(&Self::default());
        }
        let (tasks, queue) = channel::<Task>();
        let queue = Mutex::new(queue);
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
        let work = || {
            while let Some(task) = next() {
                task.run();
            }
        };
        scope(|scope| {
            let start = |_: &usize| {
                let thread = Builder::new().name("dsl-read".into()).stack_size(STACK_BYTES);
                thread.spawn_scoped(scope, work).is_ok()
            };
            let count = (0..count).filter(start).count();
            let tasks = (count > 0).then_some(tasks);
            body(&Self { tasks, count })
        })
    }

    /// How many readings may be under way.
    pub(super) fn room(&self) -> usize {
        (AHEAD * self.count).max(1)
    }

    /// Reads once from a source, which is empty until [`Pending::wait`] gives it back.
    pub(super) fn begin(&self, source: &mut Source, buffer: Vec<u8>) -> Pending {
        let Some(tasks) = &self.tasks else {
            return Pending::Done(source.read(buffer));
        };
        let (answer, reading) = sync_channel(1);
        let source = mem::take(source);
        // Does not fail: the queue is there as long as the threads.
        let _ = tasks.send(Task {
            source,
            buffer,
            answer,
        });
        Pending::UnderWay(reading)
    }
}

impl Pending {
    /// Waits for the reading, and gives the source back; `None` if its thread has panicked.
    pub(super) fn wait(self, source: &mut Source) -> Option<Reading> {
        match self {
            Self::Done(reading) => Some(reading),
            Self::UnderWay(reading) => {
                let (back, reading) = reading.recv().ok()?;
                *source = back;
                Some(reading)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use rustix::io::write;
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    const STREAMS: usize = 40;

    fn pipes() -> (Vec<Source>, Vec<OwnedFd>) {
        let pipe = |_| pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let source = |(fd, writer)| {
            let source = Source {
                fd: Some(fd),
                file: None,
                end: Some(Ring::new(8)),
            };
            (source, writer)
        };
        (0..STREAMS).map(pipe).map(source).unzip()
    }

    #[test]
    fn readings_come_in_the_order_in_which_they_were_begun() {
        for threads in [0, 1, 3] {
            let (mut sources, mut writers) = pipes();
            for (number, writer) in writers.iter().enumerate() {
                // Large and small ones in turns, so that later ones are read first.
                let bytes = vec![number as u8; if number % 2 == 0 { READ_BYTES } else { 1 }];
                assert_eq!(write(writer, &bytes), Ok(bytes.len()));
            }
            writers.truncate(STREAMS - 1);
            let mut round = || {
                Readers::within(threads, |readers| {
                    assert_eq!(readers.count, threads);
                    let begin = |source| readers.begin(source, Vec::new());
                    let pending: Vec<_> = sources.iter_mut().map(begin).collect();
                    let wait = |(pending, source): (Pending, &mut Source)| pending.wait(source).unwrap();
                    pending
                        .into_iter()
                        .zip(&mut sources)
                        .map(wait)
                        .collect::<Vec<_>>()
                })
            };
            for (number, reading) in round().iter().enumerate() {
                let length = if number % 2 == 0 { READ_BYTES } else { 1 };
                assert!(
                    reading.bytes.len() == length && reading.bytes.iter().all(|byte| *byte == number as u8)
                );
                assert!(!reading.is_over && reading.failure.is_none());
            }
            let over: Vec<_> = round().iter().map(|reading| reading.is_over).collect();
            assert_eq!(over.iter().position(|is_over| *is_over), Some(STREAMS - 1));
            let ends = sources.iter().map(|source| source.end.as_ref().unwrap().to_vec());
            assert!(ends.enumerate().all(|(number, end)| end[0] == number as u8));
        }
    }

    #[test]
    fn threads_end_when_their_caller_panics() {
        let (mut sources, _writers) = pipes();
        let body = |readers: &Readers| {
            for source in &mut sources {
                readers.begin(source, Vec::new());
            }
            panic!("as a test wants it");
        };
        assert!(catch_unwind(AssertUnwindSafe(|| Readers::within(2, body))).is_err());
    }

    #[test]
    fn threads_help_a_large_group_that_writes_fast() {
        let mut forced = Parallel::of_large_group(Some(3));
        assert_eq!(
            [forced.threads_after(0), forced.threads_after(FAST_BYTES)],
            [3, 3]
        );
        let mut usual = Parallel::of_large_group(None);
        assert_eq!(usual.threads_after(FAST_BYTES - 1), 0);
        assert!(usual.threads_after(FAST_BYTES) <= MOST_READERS);
        let mut never = Parallel::NEVER;
        assert_eq!(never.threads_after(usize::MAX), 0);
    }
}
