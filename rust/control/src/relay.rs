//! Reads the output of a node's workers from two pipes and sends it to the head, as fast as the head allows.
//!
//! The engine writes to the pipes. If a worker is silent in the middle of a line, the engine shows the line before it
//! is finished, and says so with a mark in the pipe ([`relayed`]). The rest of every other line follows, however long
//! that takes: the engine may wait for room in the pipe, or for a processor.

use std::os::fd::OwnedFd;

use dsl_engine::relayed::{self, SIGN};
use dsl_engine::spec::Console;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, ioctl_fionread};

use crate::credit::PIECE_COST;
use crate::frame::Frame;
use crate::link::Link;

/// Most bytes that are read at once.
const READ: usize = 64 << 10;
/// A longer line is sent in pieces of this size, or smaller ones if the head allows less.
const PIECE: usize = 16 << 10;
/// Bytes of frames that may wait for the connection. The rest waits in the pipe, and then the workers wait.
const BACKLOG: usize = 256 << 10;

/// Credit to keep back: the cost of the frames of one reading, and of the tails of both pipes.
fn reserve(credit: usize) -> usize {
    (4 + credit.min(READ) / PIECE) * PIECE_COST
}

/// One stream of the workers, and the part of an incomplete line that has been read.
pub(crate) struct Pipe {
    pub(crate) fd: OwnedFd,
    console: Console,
    tail: Vec<u8>,
    /// Bytes in the pipe that a drain waits for.
    pub(crate) owed: usize,
    /// Whether its last write end is closed.
    pub(crate) is_ended: bool,
    /// Whether the head has the start of this pipe's line, and shows nothing else before its end.
    is_begun: bool,
    pub(crate) is_watched: bool,
}

impl Pipe {
    fn new(fd: OwnedFd, console: Console) -> Result<Self, Errno> {
        let flags = fcntl_getfl(&fd)?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        Ok(Self {
            fd,
            console,
            tail: Vec::new(),
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

    /// `begins`: the rest of the line follows in the next frames.
    fn send(&mut self, link: &mut Link, data: &[u8], begins: bool) {
        let plain;
        let data = if data.contains(&SIGN) {
            plain = relayed::unmarked(data);
            &plain[..]
        } else {
            data
        };
        if !data.is_empty() || self.is_begun {
            let frame = Frame::Output {
                console: self.console,
                data,
                goes_on: begins,
            };
            link.queue_output(&frame, data.len());
            self.is_begun = begins;
        }
    }

    /// Sends an incomplete line as it is: its rest never comes, or we do not wait for the rest.
    pub(crate) fn flush(&mut self, link: Option<&mut Link>) {
        let tail = std::mem::take(&mut self.tail);
        if let Some(link) = link {
            self.send(link, &tail, false);
        }
    }

    /// Queues the whole lines of what has come, and long pieces of a line that is not finished.
    fn pass(&mut self, link: &mut Link, read: &[u8]) {
        let mut data = std::mem::take(&mut self.tail);
        data.extend_from_slice(read);
        let lines = data
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |end| end + 1);
        let cut = lines + relayed::last_unfinished(&data[lines..]).unwrap_or(0);
        if cut > 0 {
            self.send(link, &data[..cut], false);
        }
        let mut rest = &data[cut..];
        // Leave bytes for a last piece, which tells the head that it is the last.
        while rest.len() > PIECE {
            let end = PIECE - usize::from(cuts_mark(rest, PIECE));
            self.send(link, &rest[..end], true);
            rest = &rest[end..];
        }
        self.tail = rest.to_vec();
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
    buffer: Vec<u8>,
}

impl Relay {
    pub(crate) fn new(link: u64, stdout: OwnedFd, stderr: OwnedFd) -> Result<Self, Errno> {
        Ok(Self {
            link,
            pipes: [
                Pipe::new(stdout, Console::Stdout)?,
                Pipe::new(stderr, Console::Stderr)?,
            ],
            buffer: vec![0; READ],
        })
    }

    /// Bytes that may be read now; 0 while the head waits for the rest of a line of the other pipe. `link`: `None` if
    /// the head is gone.
    pub(crate) fn room(&self, at: usize, link: Option<&Link>) -> usize {
        let Some(link) = link else { return READ };
        if self.is_behind(at) {
            return 0;
        }
        let room = link
            .credit
            .saturating_sub(self.held())
            .saturating_sub(reserve(link.credit));
        room.min(BACKLOG.saturating_sub(link.face.outbox().output_bytes()))
    }

    fn held(&self) -> usize {
        self.pipes.iter().map(|pipe| pipe.tail.len()).sum()
    }

    /// Whether the head waits for the rest of a line of the other pipe.
    fn is_behind(&self, at: usize) -> bool {
        let other = &self.pipes[1 - at];
        other.is_begun && !other.is_ended
    }

    /// Whether incomplete lines use up the leave: the head gives no more until it gets one of them.
    pub(crate) fn is_full(&self, at: usize, link: Option<&Link>) -> bool {
        let tail = &self.pipes[at].tail;
        let is_empty = tail.is_empty() || tail[..] == [SIGN];
        match link {
            Some(one) if !is_empty => {
                self.room(at, link) == 0 && !self.is_behind(at) && 4 * self.held() >= one.credit
            }
            _ => false,
        }
    }

    /// Reads once and queues the whole lines, or queues the start of a line that uses up the leave.
    pub(crate) fn pump(&mut self, at: usize, mut link: Option<&mut Link>) {
        let is_full = self.is_full(at, link.as_deref());
        let room = self.room(at, link.as_deref()).min(READ);
        let pipe = &mut self.pipes[at];
        if is_full {
            let mut tail = std::mem::take(&mut pipe.tail);
            let end = tail.len() - usize::from(tail.ends_with(&[SIGN]));
            if let Some(link) = link {
                pipe.send(link, &tail[..end], true);
            }
            tail.drain(..end);
            pipe.tail = tail;
            return;
        }
        if room == 0 {
            return;
        }
        match rustix::io::read(&pipe.fd, &mut self.buffer[..room]) {
            Ok(0) => {
                (pipe.owed, pipe.is_ended) = (0, true);
                pipe.flush(link.as_deref_mut());
            }
            Ok(count) => {
                pipe.owed = pipe.owed.saturating_sub(count);
                if let Some(link) = link {
                    pipe.pass(link, &self.buffer[..count]);
                }
            }
            Err(_) => pipe.owed = 0,
        }
    }

    /// Whether all bytes that a drain waits for are sent, or the head is gone.
    pub(crate) fn is_done(&self, link: Option<&Link>) -> bool {
        link.is_none_or(|link| {
            let is_empty = self
                .pipes
                .iter()
                .all(|pipe| pipe.owed == 0 && pipe.tail.is_empty());
            is_empty && link.is_idle() && !link.waits_to_write
        })
    }
}
