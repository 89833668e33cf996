//! The reading thread.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ffi::CString;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::stdio::{stderr, stdout};
use rustix::termios::isatty;

use crate::event::LogNotice;
use crate::mux::compose::Style;
use crate::mux::consoles::place;
use crate::mux::file::LogFile;
use crate::mux::ring::Ring;
use crate::mux::search::{Lines, Search};
use crate::mux::side::{Fate, LastWait, Side};
use crate::mux::source::{READ_BYTES, Readers, Reading, Source};
use crate::mux::stamp::{self, Clock};
use crate::mux::{
    BELL, Finish, LAST_OUTPUT, LastLines, LastWord, Link, Order, Outcome, Parallel, Stream, terminal,
};
use crate::poller::{is_readable, poll_once};
use crate::spec::{Console, LogOptions};

/// Bytes of a stream that are kept for the report of a failure.
const TAIL_BYTES: usize = 16 * 1024;
/// Bytes of any other stream that are kept for its last line, once somebody looks.
const LINE_BYTES: usize = 1024;
/// How long we gather ends of streams before we look again.
const FLOCK: Duration = Duration::from_millis(5);
/// How often we look at paused streams when the bell does not ring.
const PAUSE_POLL: Duration = Duration::from_millis(100);
/// No pipe holds more. If more bytes come at the end, a process outside the job is still writing.
const LAST_BYTES: usize = (1 << 20) + READ_BYTES;

/// Reads until the order to finish.
pub(super) fn serve(link: &Arc<Link>, options: LogOptions, expected: [usize; 2], parallel: Parallel) {
    let mut word = LastWord {
        link,
        outcome: Outcome::default(),
    };
    // Dropped before `word`, together with the streams: a process that still writes to one gets an error.
    let mut reader = Reader::new(Arc::clone(link), options, expected, parallel);
    loop {
        let timeout = reader.timeout();
        let Ok(mut ready) = reader.link.poller.wait(timeout) else {
            return;
        };
        let rung = ready.contains(&BELL);
        ready.retain(|token| *token != BELL);
        let bytes = reader.read(&ready);
        let next = if rung { reader.obey() } else { Next::GoOn };
        reader.turn();
        if let Next::Finish(finish) = next {
            word.outcome = reader.finish(finish);
            return;
        }
        if bytes == 0 && !rung {
            reader.nap();
        }
    }
}

/// A stream, and the destinations of its bytes.
struct Feed {
    source: Source,
    /// Whether its last bytes are kept for the report of a failure.
    has_errors: bool,
    worker: usize,
    kind: Console,
    prefix: Vec<u8>,
    /// Where its prefix has the time.
    times: Vec<usize>,
    /// When it was last read, as a count of reads.
    read_at: u64,
    /// Index of the side and the stream's number there.
    shown: Option<(usize, usize)>,
    lines: Lines,
    paused: bool,
}

/// What to do after the orders.
enum Next {
    GoOn,
    /// Read the rest, and end.
    Finish(Finish),
}

struct Reader {
    link: Arc<Link>,
    options: LogOptions,
    feeds: Vec<Feed>,
    sides: Vec<Side>,
    /// Side of stdout and of stderr.
    side_of: [Option<usize>; 2],
    /// Streams that will be shown on stdout and on stderr.
    expected: [usize; 2],
    searches: Vec<Search>,
    /// Workers whose first output was reported.
    heard: HashSet<usize>,
    clock: Clock,
    paused: Vec<usize>,
    parallel: Parallel,
    /// Bytes that the last turn has read.
    flow: usize,
    /// Empty buffers.
    buffers: Vec<Vec<u8>>,
    next: Option<Instant>,
    /// Reads so far.
    reads: u64,
    /// Somebody has asked for the last lines.
    is_watched: bool,
}

impl Reader {
    fn new(link: Arc<Link>, mut options: LogOptions, expected: [usize; 2], parallel: Parallel) -> Self {
        let mut searches = Vec::new();
        for line_file in std::mem::take(&mut options.line_files) {
            let path = line_file.path.clone();
            match Search::open(line_file, options.max_bytes) {
                Ok(search) => searches.push(search),
                Err(errno) => notify(&link, file_failed(None, &path, errno)),
            }
        }
        Self {
            link,
            options,
            feeds: Vec::new(),
            sides: Vec::new(),
            side_of: [None; 2],
            expected,
            searches,
            heard: HashSet::new(),
            clock: Clock::default(),
            paused: Vec::new(),
            parallel,
            flow: 0,
            buffers: Vec::new(),
            next: None,
            reads: 0,
            is_watched: false,
        }
    }

    fn timeout(&self) -> Option<Duration> {
        let next = self
            .next
            .map(|next| next.saturating_duration_since(Instant::now()));
        if self.paused.is_empty() && !self.sides.iter().any(Side::is_behind) {
            next
        } else {
            Some(next.map_or(PAUSE_POLL, |next| next.min(PAUSE_POLL)))
        }
    }

    /// Carries out orders.
    fn obey(&mut self) -> Next {
        self.link.bell.silence();
        self.welcome();
        let orders = std::mem::take(&mut self.link.mailbox().orders);
        let mut next = Next::GoOn;
        for order in orders {
            match order {
                Order::Reopen => self.reopen(),
                Order::Interrupt => self.sides.iter_mut().for_each(|side| side.composer.interrupt()),
                Order::Resize { from_terminal } => {
                    self.resize();
                    self.link.mailbox().resized = Some(from_terminal);
                    self.link.wake.ring();
                }
                Order::LastLines(report) => {
                    // Fails if the caller no longer waits.
                    let _ = report.send(self.last_lines());
                }
                Order::Finish(finish) => next = Next::Finish(finish),
                #[cfg(test)]
                Order::Panic => panic!("as a test wants it"),
            }
        }
        next
    }

    fn reopen(&mut self) {
        let of_workers = self.feeds.iter_mut().filter_map(|feed| {
            let worker = feed.worker;
            feed.source.file.as_mut().map(|file| (Some(worker), file))
        });
        let of_all = self.searches.iter_mut().map(|search| (None, &mut search.file));
        for (worker, file) in of_workers.chain(of_all) {
            if let Err(errno) = file.reopen() {
                let notice = LogNotice::ReopenFailed {
                    worker,
                    path: Some(file.path.clone()),
                    errno: errno.raw_os_error(),
                };
                notify(&self.link, notice);
            }
        }
    }

    /// Takes new streams from the mailbox.
    fn welcome(&mut self) {
        let streams = std::mem::take(&mut self.link.mailbox().streams);
        for stream in streams {
            let feed = self.feed(stream);
            if let Some((side, _)) = feed.shown {
                self.sides[side].tokens.push(self.feeds.len());
            }
            self.feeds.push(feed);
        }
    }

    fn feed(&mut self, stream: Stream) -> Feed {
        let style = Style {
            prefix: stream.prefix.clone(),
            interactive: stream.interactive,
            grouped: stream.has_errors,
        };
        let shown = stream.console.and_then(|console| {
            let side = self.side(console)?;
            if stream.file.is_none() {
                self.sides[side].show_all();
            }
            Some((side, self.sides[side].composer.add(style)))
        });
        let max_bytes = self.options.max_bytes;
        let has_errors = stream.has_errors;
        let end_bytes = if has_errors { TAIL_BYTES } else { LINE_BYTES };
        Feed {
            source: Source {
                fd: Some(stream.fd),
                file: stream
                    .file
                    .map(|(path, file)| LogFile::new(path, file, max_bytes)),
                end: (self.is_watched || has_errors).then(|| Ring::new(end_bytes)),
            },
            has_errors,
            worker: stream.worker,
            kind: stream.kind,
            times: stamp::places(&stream.prefix),
            prefix: stream.prefix,
            read_at: 0,
            shown,
            lines: Lines::default(),
            paused: false,
        }
    }

    /// The side of a console, made when it is first needed; `None` if the console is not open or has failed.
    fn side(&mut self, kind: Console) -> Option<usize> {
        let index = usize::from(kind == Console::Stderr);
        if self.side_of[index].is_none() {
            let side = match self.side_of[1 - index] {
                Some(other) if same_file() => other,
                _ => {
                    let bell = Arc::clone(&self.link.bell);
                    let side = Side::open(kind, &self.link.consoles, bell, self.options.collapse)?;
                    self.sides.push(side);
                    self.sides.len() - 1
                }
            };
            let composer = &mut self.sides[side].composer;
            composer.expect(self.expected[index]);
            composer.show_partial_after(self.options.partial_after);
            if self.options.relayed {
                composer.tell_unfinished();
            }
            self.side_of[index] = Some(side);
        }
        self.side_of[index]
    }

    fn resize(&mut self) {
        self.sides.iter_mut().for_each(Side::resize);
        let Some(size) = terminal::own_size() else { return };
        for feed in &self.feeds {
            if let Some(fd) = feed.source.fd.as_ref().filter(|fd| isatty(fd)) {
                terminal::set_size(fd.as_fd(), size, &feed.prefix);
            }
        }
    }

    /// Waits a moment, to handle the ends of several streams together. Many streams end at the same time, and a
    /// wake-up for each would take processor time from workers that start.
    fn nap(&self) {
        let timeout = self.timeout().map_or(FLOCK, |timeout| timeout.min(FLOCK));
        // Interrupted or not, the reader looks again.
        let _ = poll_once(&[self.link.bell.as_fd()], PollFlags::IN, Some(timeout));
    }

    /// Reads once from each of these streams, and takes their bytes in this order. Returns the number of bytes.
    fn read(&mut self, ready: &[u64]) -> usize {
        let threads = self.parallel.threads_after(self.flow).min(ready.len());
        let bytes = Readers::within(threads, |readers| self.read_with(readers, ready));
        self.flow = bytes;
        bytes
    }

    fn read_with(&mut self, readers: &Readers, ready: &[u64]) -> usize {
        let mut ready = ready.iter();
        let mut bytes = 0;
        let mut pending = VecDeque::new();
        loop {
            while pending.len() < readers.room()
                && let Some(&token) = ready.next()
            {
                let token = token as usize;
                if let Some(fate) = self.fate(token) {
                    let buffer = self.buffers.pop().unwrap_or_default();
                    let source = &mut self.feeds[token].source;
                    pending.push_back((token, fate, readers.begin(source, buffer)));
                }
            }
            let Some((token, fate, reading)) = pending.pop_front() else {
                return bytes;
            };
            let Some(reading) = reading.wait(&mut self.feeds[token].source) else {
                return bytes;
            };
            bytes += reading.bytes.len();
            self.take(token, reading, fate);
        }
    }

    /// What to do with the next bytes of a stream; `None` if they are not read now.
    fn fate(&mut self, token: usize) -> Option<Fate> {
        if token >= self.feeds.len() {
            self.welcome();
        }
        let feed = self.feeds.get_mut(token)?;
        let fd = feed.source.fd.as_ref()?;
        let fate = match feed.shown {
            Some((side, _)) => self.sides[side].fate(feed.source.file.is_some()),
            None => Fate::Show,
        };
        if fate == Fate::Wait {
            self.link.poller.forget(fd);
            feed.paused = true;
            self.paused.push(token);
            return None;
        }
        Some(fate)
    }

    /// Takes what a read has brought.
    fn take(&mut self, token: usize, mut reading: Reading, fate: Fate) {
        if !reading.bytes.is_empty() {
            self.consume(token, &reading, fate);
        }
        if reading.is_over {
            self.close(token);
        }
        reading.bytes.clear();
        self.buffers.push(reading.bytes);
    }

    fn consume(&mut self, token: usize, reading: &Reading, fate: Fate) {
        let feed = &mut self.feeds[token];
        let worker = feed.worker;
        if self.options.tells_first && self.heard.insert(worker) {
            notify(&self.link, LogNotice::FirstOutput { worker });
        }
        if let (Some(errno), Some(file)) = (reading.failure, &feed.source.file) {
            notify(&self.link, file_failed(Some(worker), &file.path, errno));
        }
        self.reads += 1;
        feed.read_at = self.reads;
        if !feed.times.is_empty() {
            let time = self.clock.now();
            stamp::put(time, &mut feed.prefix, &feed.times);
            if let Some((side, stream)) = feed.shown {
                self.sides[side].composer.stamp(stream, &feed.prefix, time);
            }
        }
        feed.lines
            .search(&mut self.searches, feed.kind, &feed.prefix, &reading.bytes);
        if let Some((side, stream)) = feed.shown {
            self.sides[side].take(stream, &reading.bytes, fate);
        }
    }

    fn close(&mut self, token: usize) {
        let feed = &mut self.feeds[token];
        let Some(fd) = feed.source.fd.take() else { return };
        self.link.poller.forget(&fd);
        feed.lines.finish(&mut self.searches, feed.kind, &feed.prefix);
        if let Some((side, stream)) = feed.shown {
            self.sides[side].composer.close(stream, Instant::now());
        }
        if let Some(mut file) = feed.source.file.take() {
            complete(&self.link, Some(feed.worker), &mut file);
        }
    }

    /// Tells of files for lines with certain words that could not be written.
    fn tell_failed_searches(&mut self) {
        for search in &mut self.searches {
            if let Some(errno) = search.failure.take() {
                notify(&self.link, file_failed(None, &search.file.path, errno));
            }
        }
    }

    /// Does what is due by time, hands composed output to the consoles, and resumes paused streams.
    fn turn(&mut self) {
        let now = Instant::now();
        self.next = None;
        self.tell_failed_searches();
        for token in &self.paused {
            if let Some((side, stream)) = self.feeds[*token].shown {
                self.sides[side].composer.hold(stream, now);
            }
        }
        for side in &mut self.sides {
            let has_more = |stream: usize| {
                self.feeds[side.tokens[stream]]
                    .source
                    .fd
                    .as_ref()
                    .is_some_and(is_readable)
            };
            if let Some(next) = side.composer.tick(now, has_more) {
                self.next = Some(self.next.map_or(next, |known| known.min(next)));
            }
            side.hand_over(now);
            if let Some(notice) = side.failure() {
                notify(&self.link, notice);
            }
        }
        for token in std::mem::take(&mut self.paused) {
            let feed = &mut self.feeds[token];
            let (Some(fd), Some((side, _))) = (&feed.source.fd, feed.shown) else {
                continue;
            };
            if self.sides[side].may_resume(feed.source.file.is_some()) {
                feed.paused = false;
                // Fails only when memory is short. Then the stream is read at the end.
                let _ = self.link.poller.watch(fd, token as u64);
            } else {
                self.paused.push(token);
            }
        }
    }

    /// Reads the rest of all streams, and waits for the consoles.
    fn finish(&mut self, finish: Finish) -> Outcome {
        self.welcome();
        for token in 0..self.feeds.len() {
            self.drain(token);
            self.close(token);
        }
        // Complete the files before we wait for a console. If that fails, the end of a file stays in its segments.
        self.tell_failed_searches();
        for search in &mut self.searches {
            complete(&self.link, None, &mut search.file);
        }
        let wait = LastWait {
            until: Instant::now() + LAST_OUTPUT,
            is_stopped: finish.is_stopped,
        };
        let now = Instant::now();
        self.sides.iter_mut().for_each(|side| side.composer.finish(now));
        let is_asked_for = |feed: &&Feed| feed.has_errors && Some(feed.worker) == finish.tail_of;
        let last = self.feeds.iter().rfind(is_asked_for);
        let shown = last.and_then(|feed| feed.shown);
        let shown_since = shown.and_then(|(side, stream)| self.sides[side].composer.shown_since(stream));
        let end = last.and_then(|feed| feed.source.end.as_ref());
        let tail = end.map(Ring::to_vec).unwrap_or_default();
        let consoles = &self.link.consoles;
        let is_hurried = || consoles.is_over() || self.link.hurry.load(Ordering::SeqCst);
        for side in self.sides.drain(..) {
            for notice in side.settle(&wait, consoles, is_hurried) {
                notify(&self.link, notice);
            }
        }
        Outcome { tail, shown_since }
    }

    fn drain(&mut self, token: usize) {
        let mut bytes = 0;
        while bytes < LAST_BYTES {
            let feed = &mut self.feeds[token];
            let is_kept = feed.source.file.is_some();
            let stalled = feed
                .shown
                .is_some_and(|(side, _)| self.sides[side].fate(is_kept) == Fate::Drop);
            let buffer = self.buffers.pop().unwrap_or_default();
            let reading = feed.source.read(buffer);
            let count = reading.bytes.len();
            self.take(token, reading, if stalled { Fate::Drop } else { Fate::Show });
            if count == 0 {
                return;
            }
            bytes += count;
        }
    }

    /// The last line of each worker, from the stream that it wrote to last.
    fn last_lines(&mut self) -> LastLines {
        if !std::mem::replace(&mut self.is_watched, true) {
            for feed in &mut self.feeds {
                feed.source.end.get_or_insert_with(|| Ring::new(LINE_BYTES));
            }
        }
        let mut latest: BTreeMap<usize, (u64, Vec<u8>)> = BTreeMap::new();
        for feed in &self.feeds {
            let Some(end) = &feed.source.end else {
                continue;
            };
            let known = latest.get(&feed.worker).map_or(0, |&(read_at, _)| read_at);
            if feed.read_at > known {
                let line = end.last_line(LINE_BYTES);
                if !line.is_empty() {
                    latest.insert(feed.worker, (feed.read_at, line));
                }
            }
        }
        latest
            .into_iter()
            .map(|(worker, (_, line))| (worker, line))
            .collect()
    }
}

fn notify(link: &Link, notice: LogNotice) {
    link.mailbox().notices.push(notice);
    link.wake.ring();
}

/// Completes a file, and tells how many bytes are missing in it.
fn complete(link: &Link, worker: Option<usize>, file: &mut LogFile) {
    if file.lost > 0 {
        let (path, count) = (Some(file.path.clone()), file.lost);
        notify(link, LogNotice::BytesLost { worker, path, count });
    }
    if let Err(errno) = file.finish() {
        notify(link, file_failed(worker, &file.path, errno));
    }
}

fn file_failed(worker: Option<usize>, path: &CString, errno: Errno) -> LogNotice {
    LogNotice::FileFailed {
        worker,
        path: Some(path.clone()),
        errno: errno.raw_os_error(),
    }
}

/// Whether our stdout and stderr lead to the same place.
fn same_file() -> bool {
    matches!((place(stdout()), place(stderr())), (Some(stdout), Some(stderr)) if stdout == stderr)
}
