//! What waits to be sent on a link. Pure.

use std::collections::VecDeque;

use crate::frame::{Frame, Ping, Pong};

/// Frames that are longer together are sent one by one: to copy them costs more than to send them.
const CHUNK: usize = 16 << 10;

/// Several short frames, or one.
#[derive(Debug)]
pub struct Chunk {
    /// The frames.
    pub bytes: Vec<u8>,
    /// Whether they are frames of output, and none of another kind.
    pub is_output: bool,
}

/// Messages go before output. However often the other side asks, it is owed one answer and one sum of leave: a peer
/// that reads nothing cannot pile them up here.
#[derive(Debug, Default)]
pub struct Outbox {
    messages: VecDeque<Vec<u8>>,
    /// Bytes of messages that wait.
    pub message_bytes: usize,
    output: VecDeque<Vec<u8>>,
    /// Bytes of output that wait.
    pub output_bytes: usize,
    pong: Option<Pong>,
    is_ping_due: bool,
    owed: u64,
    is_shut: bool,
}

impl Outbox {
    /// Queues a message.
    pub fn message(&mut self, payload: &[u8]) {
        if !self.is_shut {
            let bytes = Frame::Message(payload).to_bytes();
            self.message_bytes += bytes.len();
            self.messages.push_back(bytes);
        }
    }

    /// Queues a frame of output.
    pub fn output(&mut self, bytes: Vec<u8>) {
        if !self.is_shut {
            self.output_bytes += bytes.len();
            self.output.push_back(bytes);
        }
    }

    /// Answers the last heartbeat.
    pub fn pong(&mut self, pong: Pong) {
        self.pong = Some(pong);
    }

    /// Sends a heartbeat as soon as the connection takes it.
    pub fn ping(&mut self) {
        self.is_ping_due = true;
    }

    /// Gives leave to send more output.
    pub fn owe(&mut self, count: usize) {
        self.owed += count as u64;
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        let beats = self.pong.is_some() || self.is_ping_due || self.owed > 0;
        self.messages.is_empty() && self.output.is_empty() && !beats
    }

    /// Forgets everything, and takes nothing any more: the other side is gone.
    pub fn shut(&mut self) {
        *self = Self {
            is_shut: true,
            ..Self::default()
        };
    }

    /// Frames to write at once; without bytes: nothing waits. `now` is asked for the times of a heartbeat.
    pub fn next_chunk(&mut self, now: impl FnOnce() -> Ping) -> Chunk {
        let mut chunk = Vec::new();
        if let Some(pong) = self.pong.take() {
            chunk.extend(Frame::Pong(pong).to_bytes());
        }
        if std::mem::take(&mut self.is_ping_due) {
            chunk.extend(Frame::Ping(now()).to_bytes());
        }
        if self.owed > 0 {
            chunk.extend(Frame::Credit(std::mem::take(&mut self.owed)).to_bytes());
        }
        self.message_bytes -= append(&mut chunk, &mut self.messages);
        let is_output = chunk.is_empty();
        if is_output {
            self.output_bytes -= append(&mut chunk, &mut self.output);
        }
        Chunk {
            bytes: chunk,
            is_output,
        }
    }
}

/// Moves frames to a chunk, as many as it takes; returns how many bytes.
fn append(chunk: &mut Vec<u8>, frames: &mut VecDeque<Vec<u8>>) -> usize {
    let before = chunk.len();
    if chunk.is_empty() {
        *chunk = frames.pop_front().unwrap_or_default();
    }
    while frames
        .front()
        .is_some_and(|frame| chunk.len() + frame.len() <= CHUNK)
        && let Some(frame) = frames.pop_front()
    {
        chunk.extend_from_slice(&frame);
    }
    chunk.len() - before
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Damaged, LONGEST, Parser};
    use dsl_engine::spec::Console;

    fn frames(outbox: &mut Outbox) -> Vec<String> {
        let mut found = Vec::new();
        loop {
            let chunk = outbox.next_chunk(|| Ping { sent: 1, real: 2 }).bytes;
            if chunk.is_empty() {
                return found;
            }
            let hear = |frame: Frame<'_>| -> Result<(), Damaged> {
                found.push(format!("{frame:?}"));
                Ok(())
            };
            Parser::new(LONGEST).feed(&chunk, hear).unwrap();
        }
    }

    #[test]
    fn one_answer_and_one_sum_are_owed_however_often_the_other_side_asks() {
        let mut outbox = Outbox::default();
        for at in 0..10_000 {
            let ping = Ping { sent: at, real: at };
            outbox.pong(Pong {
                ping,
                heard: 0,
                now: 0,
            });
            outbox.ping();
            outbox.owe(2);
        }
        let found = frames(&mut outbox);
        assert_eq!(found.len(), 3);
        assert!(found[0].contains("sent: 9999"));
        assert_eq!(found[2], "Credit(20000)");
        assert!(outbox.is_empty());
    }

    #[test]
    fn messages_go_before_output_in_their_order() {
        let mut outbox = Outbox::default();
        let output = Frame::Output {
            console: Console::Stdout,
            data: b"x",
            goes_on: false,
        };
        outbox.output(output.to_bytes());
        outbox.message(b"one");
        outbox.message(b"three");
        assert_eq!(outbox.message_bytes, 5 + 3 + 5 + 5);
        let found = frames(&mut outbox);
        let expected = [
            format!("{:?}", Frame::Message(b"one")),
            format!("{:?}", Frame::Message(b"three")),
            format!("{output:?}"),
        ];
        assert_eq!(found, expected);
        assert_eq!((outbox.message_bytes, outbox.output_bytes), (0, 0));
    }

    #[test]
    fn short_frames_go_together_and_a_long_frame_goes_as_it_stands() {
        let data = vec![b'x'; 40_000];
        let mut outbox = Outbox::default();
        let output = |length: usize| Frame::Output {
            console: Console::Stdout,
            data: &data[..length],
            goes_on: false,
        };
        outbox.message(b"one");
        outbox.output(output(10).to_bytes());
        outbox.output(output(20).to_bytes());
        outbox.output(output(40_000).to_bytes());
        outbox.output(output(30).to_bytes());
        let mut next = || {
            let chunk = outbox.next_chunk(|| Ping { sent: 1, real: 2 });
            (chunk.bytes.len(), chunk.is_output)
        };
        assert_eq!(next(), (8, false));
        assert_eq!(
            [next(), next(), next()],
            [(16 + 26, true), (40_006, true), (36, true)]
        );
        assert_eq!(next().0, 0);
        assert_eq!(outbox.output_bytes, 0);
    }

    #[test]
    fn nothing_is_kept_for_a_side_that_is_gone() {
        let mut outbox = Outbox::default();
        outbox.message(b"one");
        outbox.shut();
        outbox.message(b"two");
        assert!(outbox.is_empty());
    }
}
