//! Reads the output of a node's workers from two pipes and sends it to the head, as fast as the head allows.
//!
//! The engine writes to the pipes. If a worker is silent in the middle of a line, the engine shows the line before it
//! is finished, and says so with a mark in the pipe ([`relayed`]). The rest of every other line follows, however long
//! that takes: the engine may wait for room in the pipe, or for a processor.

use std::os::fd::OwnedFd;

use dsl_engine::relayed::{self, SIGN};
use dsl_engine::spec::Console;
use memchr::{memchr, memrchr};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, ioctl_fionread};
use rustix::pipe::fcntl_setpipe_size;

use crate::credit::PIECE_COST;
use crate::frame::{OUTPUT_HEAD_LEN, output_frame};
use crate::link::Link;
use crate::stream::PIPE_BYTES;

/// Most bytes that are read at once.
const READ: usize = 64 << 10;
/// A longer line is sent in pieces of this size, or smaller ones if the head allows less.
const PIECE: usize = 16 << 10;
/// We read nothing while frames of this size wait for the connection. The rest waits in the pipe, and then the workers
/// wait.
const BACKLOG: usize = 128 << 10;

/// Credit to keep back: the cost of the frames of one reading, and of the tails of both pipes.
fn reserve(credit: usize) -> usize {
    (4 + credit.min(READ) / PIECE) * PIECE_COST
}

/// One stream of the workers, and the part of an incomplete line that has been read.
pub(crate) struct Pipe {
    pub(crate) fd: OwnedFd,
    console: Console,
    /// The incomplete line, behind room for the head of a frame: what is read comes behind it and is sent as it stands.
    held: Vec<u8>,
    /// Bytes in the pipe that a drain waits for.
    pub(crate) owed: usize,
    /// Whether its last write end is closed.
    pub(crate) is_ended: bool,
    /// Whether the head has the start of this pipe's line, and shows nothing else before its end.
    is_begun: bool,
    pub(crate) is_watched: bool,
}

/// A frame that has got no data yet: room for its head, and these bytes.
fn begun(data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(OUTPUT_HEAD_LEN + data.len());
    bytes.resize(OUTPUT_HEAD_LEN, 0);
    bytes.extend_from_slice(data);
    bytes
}

impl Pipe {
    fn new(fd: OwnedFd, console: Console) -> Result<Self, Errno> {
        let flags = fcntl_getfl(&fd)?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        // A user who has many pipes may get no more.
        let _ = fcntl_setpipe_size(&fd, PIPE_BYTES);
        Ok(Self {
            fd,
            console,
            held: begun(&[]),
            owed: 0,
            is_ended: false,
            is_begun: false,
            is_watched: false,
        })
    }

    /// Notes how many bytes are in the pipe now: a drain waits for these.
    pub(crate) fn owe(&mut self) {
        self.owed = ioctl_fionread(&self.fd).unwrap_or(0) as usize;
    }

    /// The incomplete line.
    fn tail(&self) -> &[u8] {
        &self.held[OUTPUT_HEAD_LEN..]
    }

    /// Reads up to `room` bytes behind the incomplete line; returns how many, and where they begin.
    fn read(&mut self, room: usize) -> Result<(usize, usize), Errno> {
        let begin = self.held.len();
        self.held.resize(begin + room, 0);
        let result = rustix::io::read(&self.fd, &mut self.held[begin..]);
        self.held.truncate(begin + *result.as_ref().unwrap_or(&0));
        Ok((result?, begin))
    }

    /// `bytes`: data behind room for the head of a frame. `begins`: the rest of the line follows in the next frames.
    fn send(&mut self, link: &mut Link, bytes: Vec<u8>, begins: bool) {
        let data = &bytes[OUTPUT_HEAD_LEN..];
        let bytes = match memchr(SIGN, data) {
            Some(_) => begun(&relayed::unmarked(data)),
            None => bytes,
        };
        if bytes.len() > OUTPUT_HEAD_LEN || self.is_begun {
            link.queue_output(output_frame(bytes, self.console, begins));
            self.is_begun = begins;
        }
    }

    /// Sends an incomplete line as it is: its rest never comes, or we do not wait for the rest.
    pub(crate) fn flush(&mut self, link: Option<&mut Link>) {
        let tail = std::mem::replace(&mut self.held, begun(&[]));
        if let Some(link) = link {
            self.send(link, tail, false);
        }
    }

    /// Queues the whole lines of what has come, and long pieces of a line that is not finished. `begin`: where the
    /// bytes begin that are new.
    fn pass(&mut self, link: &mut Link, begin: usize) {
        let mut bytes = std::mem::take(&mut self.held);
        let lines = memrchr(b'\n', &bytes[begin..]).map_or(OUTPUT_HEAD_LEN, |end| begin + end + 1);
        let cut = lines + relayed::last_unfinished(&bytes[lines..]).unwrap_or(0);
        let mut rest = begun(&bytes[cut..]);
        if cut > OUTPUT_HEAD_LEN {
            bytes.truncate(cut);
            self.send(link, bytes, false);
        }
        // Leave bytes for a last piece, which tells the head that it is the last.
        while rest.len() > OUTPUT_HEAD_LEN + PIECE {
            let end = OUTPUT_HEAD_LEN + PIECE;
            let end = end - usize::from(cuts_mark(&rest, end));
            let after = begun(&rest[end..]);
            rest.truncate(end);
            self.send(link, rest, true);
            rest = after;
        }
        self.held = rest;
    }

    /// Sends the start of a line whose rest is not there, and keeps what may be the first byte of a mark.
    fn begin_line(&mut self, link: &mut Link) {
        let end = self.held.len() - usize::from(self.tail().ends_with(&[SIGN]));
        let mut bytes = std::mem::take(&mut self.held);
        self.held = begun(&bytes[end..]);
        bytes.truncate(end);
        self.send(link, bytes, true);
    }
}

/// Whether a mark begins just before `at`.
fn cuts_mark(data: &[u8], at: usize) -> bool {
    data[at - 1] == SIGN
}

/// The two pipes of a node and the number of the link that takes what comes out of them.
pub(crate) struct Relay {
    pub(crate) link: u64,
    pub(crate) pipes: [Pipe; 2],
}

impl Relay {
    pub(crate) fn new(link: u64, stdout: OwnedFd, stderr: OwnedFd) -> Result<Self, Errno> {
        Ok(Self {
            link,
            pipes: [
                Pipe::new(stdout, Console::Stdout)?,
                Pipe::new(stderr, Console::Stderr)?,
            ],
        })
    }

    /// Bytes that may be read now: 0 while enough waits for the connection. `link`: `None` if the head is gone.
    pub(crate) fn room(&self, at: usize, link: Option<&Link>) -> usize {
        match link {
            Some(link) if link.face.outbox().output_bytes >= BACKLOG => 0,
            Some(link) => self.leave(at, link),
            None => READ,
        }
    }

    /// Bytes that the head lets us read; 0 while it waits for the rest of a line of the other pipe.
    fn leave(&self, at: usize, link: &Link) -> usize {
        if self.is_behind(at) {
            return 0;
        }
        let leave = link
            .credit
            .saturating_sub(self.held())
            .saturating_sub(reserve(link.credit));
        leave.min(READ)
    }

    fn held(&self) -> usize {
        self.pipes.iter().map(|pipe| pipe.tail().len()).sum()
    }

    /// Whether the head waits for the rest of a line of the other pipe.
    fn is_behind(&self, at: usize) -> bool {
        let other = &self.pipes[1 - at];
        other.is_begun && !other.is_ended
    }

    /// Whether incomplete lines use up the leave: the head gives no more until it gets one of them.
    pub(crate) fn is_full(&self, at: usize, link: Option<&Link>) -> bool {
        let tail = self.pipes[at].tail();
        let is_empty = tail.is_empty() || tail == [SIGN];
        match link {
            Some(link) if !is_empty => {
                self.leave(at, link) == 0 && !self.is_behind(at) && 4 * self.held() >= link.credit
            }
            _ => false,
        }
    }

    /// Reads once and queues the whole lines, or queues the start of a line that uses up the leave. Returns how many
    /// bytes were read.
    pub(crate) fn pump(&mut self, at: usize, link: Option<&mut Link>) -> usize {
        let is_full = self.is_full(at, link.as_deref());
        let room = self.room(at, link.as_deref());
        let pipe = &mut self.pipes[at];
        if is_full {
            if let Some(link) = link {
                pipe.begin_line(link);
            }
            return 0;
        }
        if room == 0 {
            return 0;
        }
        match pipe.read(room) {
            Ok((0, _)) => {
                (pipe.owed, pipe.is_ended) = (0, true);
                pipe.flush(link);
                0
            }
            Ok((count, begin)) => {
                pipe.owed = pipe.owed.saturating_sub(count);
                match link {
                    Some(link) => pipe.pass(link, begin),
                    None => pipe.held = begun(&[]),
                }
                count
            }
            Err(_) => {
                pipe.owed = 0;
                0
            }
        }
    }

    /// Whether all bytes that a drain waits for are sent, or the head is gone.
    pub(crate) fn is_done(&self, link: Option<&Link>) -> bool {
        link.is_none_or(|link| {
            let is_empty = self
                .pipes
                .iter()
                .all(|pipe| pipe.owed == 0 && pipe.tail().is_empty());
            is_empty && link.is_idle() && !link.waits_to_write
        })
    }
}
