//! One connection of a hub, as the hub's thread serves it, and what all connections share.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use dsl_engine::poller::{Interest, Poller, poll_once};
use dsl_engine::{Bell, Display, Error, Recent, Tee};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::credit::{FIRST_WINDOW, Leave, OUTPUT_BYTES, PIECE_COST, Treasury};
use crate::face::{Count, Counted, Face, Sample};
use crate::frame::{Damaged, Frame, LONGEST, OUTPUT_HEAD_LEN, Parser, Ping, Pong, each_unpacked};
use crate::inbox::{Inbox, News};
use crate::loss::{Fault, Loss};
use crate::pack::{Packer, unpack};
use crate::stream::{Scratch, Stream, Taken};

/// Heartbeats that follow one another at the beginning, to measure the clock.
const FIRST_PINGS: usize = 4;
/// Readings of a link that cannot be written any more.
const LAST_READS: usize = 256;
/// How long we wait for the other side's end after ours.
const LINGER: Duration = Duration::from_secs(5);
/// Most bytes of messages that wait for a peer that reads nothing.
const QUEUE_BYTES: usize = 2 * LONGEST;
/// Number of agents that share the memory for output, unless the head says another.
const USUAL_AGENTS: usize = 16;

/// What a token of the poller stands for, in its lowest bits.
pub(crate) const CALLER: u64 = 0;
pub(crate) const LISTENER: u64 = 1;
pub(crate) const LINK: u64 = 2;
pub(crate) const WRITER: u64 = 3;
pub(crate) const PIPE: u64 = 4;
pub(crate) const BELL: u64 = u64::MAX;

pub(crate) fn token(id: u64, role: u64) -> u64 {
    id << 3 | role
}

/// What the thread of a hub and its owner share.
pub(crate) struct Shared {
    pub(crate) inbox: Inbox,
    /// Wakes the thread.
    pub(crate) bell: Arc<Bell>,
    /// A head: number of agents that share the memory for output.
    pub(crate) agents: AtomicUsize,
    /// Pieces of output that have arrived and are not written.
    pub(crate) unshown: Count,
    /// A head: the last output that was shown.
    pub(crate) recent: OnceLock<Recent>,
    /// A head: copies what is shown.
    pub(crate) tee: OnceLock<Arc<Tee>>,
    /// Links that have not ended.
    pub(crate) links: Arc<Count>,
    ids: AtomicU64,
}

impl Shared {
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(Self {
            inbox: Inbox::new(Bell::new()?),
            bell: Arc::new(Bell::new()?),
            agents: AtomicUsize::new(USUAL_AGENTS),
            unshown: Count::default(),
            recent: OnceLock::new(),
            tee: OnceLock::new(),
            links: Arc::default(),
            ids: AtomicU64::new(1),
        })
    }

    pub(crate) fn new_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }
}

/// Nanoseconds of a clock that never steps.
pub(crate) fn steady_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Nanoseconds of the time of day.
pub(crate) fn real_ns() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}

/// What the links of a hub have in common.
pub(crate) struct House {
    pub(crate) is_head: bool,
    pub(crate) shared: Arc<Shared>,
    pub(crate) scratch: Scratch,
    /// Frames of packed output, while they are read.
    unpacked: Vec<u8>,
    pub(crate) treasury: Treasury,
    pub(crate) display: Option<Display>,
    /// Number of links.
    pub(crate) members: usize,
}

impl House {
    pub(crate) fn new(is_head: bool, shared: Arc<Shared>) -> Self {
        Self {
            is_head,
            shared,
            scratch: Scratch::new(),
            unpacked: Vec::new(),
            treasury: Treasury::new(OUTPUT_BYTES),
            display: None,
            members: 0,
        }
    }

    /// Lets an agent send more output, as far as there is room for it.
    fn grant(&mut self, link: &mut Link, most: usize) {
        let agents = self.shared.agents.load(Ordering::Relaxed).max(self.members);
        let more = self.treasury.grant(&mut link.leave, most, agents);
        if more > 0 {
            link.face.outbox().owe(more);
        }
    }

    /// Notes that a piece of output is written. `link`: that of its agent, if the agent is still there.
    pub(crate) fn written(&mut self, link: Option<&mut Link>, count: usize) {
        match link {
            Some(link) => {
                self.treasury.written(Some(&mut link.leave), count);
                self.grant(link, OUTPUT_BYTES);
            }
            None => self.treasury.written(None, count),
        }
        self.shared.unshown.take();
    }
}

#[expect(clippy::struct_excessive_bools, reason = "independent facts about a link")]
pub(crate) struct Link {
    pub(crate) face: Arc<Face>,
    pub(crate) stream: Stream,
    parser: Parser,
    chunk: Vec<u8>,
    begun: usize,
    /// Packs output; `None`: it goes as it is.
    packer: Option<Packer>,
    pub(crate) leave: Leave,
    /// Agent: bytes of output that we may still send, with the cost of each piece.
    pub(crate) credit: usize,
    /// Whether the other side has said anything.
    pub(crate) is_heard: bool,
    /// Whether we do not read because too many of its messages are unread.
    pub(crate) is_deaf: bool,
    pub(crate) waits_to_write: bool,
    /// Whether we have ended our half.
    pub(crate) is_finished: bool,
    pub(crate) stuck_since: Option<Instant>,
    pub(crate) last_heard: Instant,
    pub(crate) last_sent: Instant,
    pub(crate) last_measured: Instant,
    pub(crate) linger_until: Instant,
    pongs: usize,
    counted: Counted,
}

impl Link {
    /// `links`: see [`Shared`].
    pub(crate) fn new(face: Arc<Face>, stream: Stream, longest: usize, links: &Arc<Count>) -> Self {
        let now = Instant::now();
        Self {
            face,
            packer: stream.is_carried().then(Packer::default),
            stream,
            parser: Parser::new(longest),
            chunk: Vec::new(),
            begun: 0,
            leave: Leave::default(),
            credit: 0,
            is_heard: false,
            is_deaf: false,
            waits_to_write: false,
            is_finished: false,
            stuck_since: None,
            last_heard: now,
            last_sent: now,
            last_measured: now,
            linger_until: now,
            pongs: 0,
            counted: Counted::new(links),
        }
    }

    /// Whether nothing waits to be sent.
    pub(crate) fn is_idle(&self) -> bool {
        self.begun == self.chunk.len() && self.face.outbox().is_empty()
    }

    /// Closes the connection. The link counts until the result is dropped.
    pub(crate) fn close(self) -> Counted {
        self.counted
    }

    /// Sends a heartbeat as soon as the connection takes it.
    pub(crate) fn ping(&mut self) {
        self.last_measured = Instant::now();
        self.face.outbox().ping();
    }

    /// Queues a frame of output for the head.
    pub(crate) fn queue_output(&mut self, frame: Vec<u8>) {
        let count = frame.len() - OUTPUT_HEAD_LEN;
        self.face.outbox().output(frame);
        self.credit = self.credit.saturating_sub(count + PIECE_COST);
    }

    /// Writes what the connection takes; returns whether to wait for room.
    pub(crate) fn flush(&mut self) -> Result<bool, Fault> {
        loop {
            if self.begun == self.chunk.len() {
                let now = || Ping {
                    sent: steady_ns(),
                    real: real_ns(),
                };
                let chunk = self.face.outbox().next_chunk(now);
                self.chunk = match &mut self.packer {
                    Some(packer) if chunk.is_output => packer.pack(chunk.bytes),
                    _ => chunk.bytes,
                };
                self.begun = 0;
                if self.chunk.is_empty() {
                    let is_done = self.stream.is_written()?;
                    self.note_stuck(!is_done);
                    return Ok(!is_done);
                }
            }
            let count = self.stream.write(&self.chunk[self.begun..])?;
            if count == 0 {
                self.note_stuck(true);
                return Ok(true);
            }
            self.begun += count;
            self.last_sent = Instant::now();
            self.stuck_since = None;
        }
    }

    fn note_stuck(&mut self, is_stuck: bool) {
        let since = self.stuck_since.unwrap_or_else(Instant::now);
        self.stuck_since = is_stuck.then_some(since);
    }

    /// Reads once and handles the frames; returns whether there was data.
    pub(crate) fn take(&mut self, house: &mut House) -> Result<bool, Fault> {
        let mut scratch = std::mem::replace(&mut house.scratch, Scratch::empty());
        let result = match self.stream.read(&mut scratch) {
            Ok(Taken::Nothing) => Ok(false),
            Ok(Taken::End) => Err(Fault::Said(Loss::closed())),
            Ok(Taken::Bytes) => self.handle(&scratch.plain, house).map(|()| true),
            Err(fault) => Err(fault),
        };
        house.scratch = scratch;
        result
    }

    /// Handles bytes that have arrived.
    pub(crate) fn handle(&mut self, data: &[u8], house: &mut House) -> Result<(), Fault> {
        self.last_heard = Instant::now();
        let mut parser = std::mem::replace(&mut self.parser, Parser::new(0));
        let result = parser.feed(data, |frame| self.hear(&frame, house));
        self.parser = parser;
        result
    }

    fn hear(&mut self, frame: &Frame<'_>, house: &mut House) -> Result<(), Fault> {
        if self.face.is_closing() {
            return Ok(());
        }
        if !std::mem::replace(&mut self.is_heard, true) && house.is_head {
            house.grant(self, FIRST_WINDOW);
            self.ping();
        }
        match frame {
            Frame::Message(payload) => {
                let news = News::Message(Arc::clone(&self.face), payload.to_vec());
                house.shared.inbox.put(news);
            }
            Frame::Ping(ping) => {
                let heard = real_ns();
                let now = real_ns();
                self.face.outbox().pong(Pong {
                    ping: *ping,
                    heard,
                    now,
                });
            }
            Frame::Pong(pong) => self.measure(*pong),
            Frame::Credit(count) => self.credit = self.credit.saturating_add(*count as usize),
            Frame::Packed(payload) => {
                let mut frames = std::mem::take(&mut house.unpacked);
                unpack(payload, &mut frames)?;
                each_unpacked(&frames, |frame| self.hear(&frame, house))?;
                house.unpacked = frames;
            }
            Frame::Output {
                console,
                data,
                goes_on,
            } => {
                let Some(display) = &mut house.display else {
                    return Err(Damaged("has sent output to an agent".into()).into());
                };
                if !Treasury::take(&mut self.leave, data.len()) {
                    return Err(Damaged("has sent more output than it has leave for".into()).into());
                }
                house.shared.unshown.add();
                display.put(self.face.id, *console, data, *goes_on);
            }
        }
        Ok(())
    }

    fn measure(&mut self, pong: Pong) {
        self.face.note(Sample {
            pong,
            back_real: real_ns(),
            back: steady_ns(),
        });
        self.pongs += 1;
        if self.pongs < FIRST_PINGS {
            self.ping();
        }
    }
}

/// Sends what is queued; false: the link has ended.
pub(crate) fn flush(link: &mut Link, poller: &Poller) -> Result<bool, Fault> {
    if link.is_finished {
        return Ok(true);
    }
    let waits = link.flush()?;
    if waits && link.face.outbox().message_bytes > QUEUE_BYTES {
        return Err(Fault::Said(Loss::new("stuck", "does not read what it is sent")));
    }
    aim(link, waits, poller)?;
    if link.face.is_closing() && link.is_idle() && !waits {
        link.is_finished = true;
        link.linger_until = Instant::now() + LINGER;
        if let Some(fd) = link.stream.write_fd() {
            poller.forget(fd);
        }
        return Ok(link.stream.finish());
    }
    Ok(true)
}

/// Waits for what a link needs: bytes, unless it is paused, and room if something has to be written.
fn aim(link: &mut Link, waits: bool, poller: &Poller) -> Result<(), Fault> {
    let is_paused = link.face.is_paused();
    if (waits, is_paused) == (link.waits_to_write, link.is_deaf) {
        return Ok(());
    }
    if link.is_deaf && !is_paused {
        link.last_heard = Instant::now(); // we did not listen
    }
    (link.waits_to_write, link.is_deaf) = (waits, is_paused);
    let id = link.face.id;
    let interest = Interest {
        read: !is_paused,
        write: waits,
    };
    let mut reading = interest;
    if let Some(fd) = link.stream.write_fd() {
        reading.write = false;
        let writing = Interest {
            read: false,
            write: waits,
        };
        poller
            .change(fd, token(id, WRITER), writing)
            .map_err(|_| Errno::BADF)?;
    }
    let changed = poller.change(link.stream.read_fd(), token(id, LINK), reading);
    changed.map_err(|_| Errno::BADF.into())
}

/// Reads what has arrived on a link that cannot be written; returns why no more comes, if known.
pub(crate) fn last_words(link: &mut Link, house: &mut House) -> Option<Loss> {
    for _ in 0..LAST_READS {
        if !is_ready(link.stream.read_fd(), PollFlags::IN) {
            return None;
        }
        match link.take(house) {
            Ok(_) => {}
            Err(Fault::Os(_)) => return None,
            Err(fault) => return Some(fault.into()),
        }
    }
    None
}

pub(crate) fn is_write_end_broken(link: &Link) -> bool {
    link.stream
        .write_fd()
        .is_some_and(|fd| is_ready(fd, PollFlags::empty()))
}

/// Whether something can be done with a descriptor now, or it is broken.
fn is_ready(fd: BorrowedFd<'_>, flags: PollFlags) -> bool {
    poll_once(&[fd], flags, Some(Duration::ZERO)) == Ok(true)
}
