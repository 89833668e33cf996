//! One connection of a hub, as the hub's thread serves it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime};

use dsl_engine::Display;
use rustix::time::{ClockId, clock_gettime};

use crate::count::{Count, Counted};
use crate::credit::{FIRST_WINDOW, Leave, OUTPUT_BYTES, PIECE_COST, Treasury};
use crate::face::{Face, Sample};
use crate::frame::{Damaged, Frame, Parser, Ping, Pong};
use crate::inbox::News;
use crate::loss::{Fault, Loss};
use crate::shared::Shared;
use crate::stream::{Scratch, Stream, Taken};

/// Heartbeats that follow one another at the beginning, to measure the clock.
const FIRST_PINGS: usize = 4;

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

    /// Queues output for the head.
    pub(crate) fn queue_output(&mut self, frame: &Frame<'_>, count: usize) {
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
                self.chunk = self.face.outbox().next_chunk(now);
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
                display.put(self.face.id, *console, data.to_vec(), *goes_on);
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
