//! What waits to be sent on a link. Pure.

use std::collections::VecDeque;

use crate::frame::{Frame, Ping, Pong};

/// Bytes that are sent at once.
const CHUNK: usize = 128 << 10;

/// Messages go before output. However often the other side asks, it is owed one answer and one sum of leave: a peer
/// that reads nothing cannot pile them up here.
#[derive(Debug, Default)]
pub struct Outbox {
    messages: VecDeque<Vec<u8>>,
    message_bytes: usize,
    output: VecDeque<Vec<u8>>,
    output_bytes: usize,
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

    /// Bytes of messages that wait.
    pub fn message_bytes(&self) -> usize {
        self.message_bytes
    }

    /// Queues output.
    pub fn output(&mut self, frame: &Frame<'_>) {
        if !self.is_shut {
            let bytes = frame.to_bytes();
            self.output_bytes += bytes.len();
            self.output.push_back(bytes);
        }
    }

    /// Bytes of output that wait.
    pub fn output_bytes(&self) -> usize {
        self.output_bytes
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

    /// Frames to write at once; empty: nothing waits. `now` is asked for the times of a heartbeat.
    pub fn next_chunk(&mut self, now: impl FnOnce() -> Ping) -> Vec<u8> {
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
        while chunk.len() < CHUNK
            && let Some(frame) = self.messages.pop_front()
        {
            self.message_bytes -= frame.len();
            append(&mut chunk, frame);
        }
        while chunk.len() < CHUNK
            && let Some(frame) = self.output.pop_front()
        {
            self.output_bytes -= frame.len();
            append(&mut chunk, frame);
        }
        chunk
    }
}

fn append(chunk: &mut Vec<u8>, frame: Vec<u8>) {
    if chunk.is_empty() {
        *chunk = frame;
    } else {
        chunk.extend_from_slice(&frame);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Damaged, LONGEST, Parser};
    use dsl_engine::spec::Console;

    fn frames(outbox: &mut Outbox) -> Vec<String> {
        let mut found = Vec::new();
        loop {
            let chunk = outbox.next_chunk(|| Ping { sent: 1, real: 2 });
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
        outbox.output(&output);
        outbox.message(b"one");
        outbox.message(b"three");
        assert_eq!(outbox.message_bytes(), 5 + 3 + 5 + 5);
        let found = frames(&mut outbox);
        let expected = [
            format!("{:?}", Frame::Message(b"one")),
            format!("{:?}", Frame::Message(b"three")),
            format!("{output:?}"),
        ];
        assert_eq!(found, expected);
        assert_eq!((outbox.message_bytes(), outbox.output_bytes()), (0, 0));
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
