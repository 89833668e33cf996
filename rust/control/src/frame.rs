//! The form of messages, heartbeats and output on a connection. Pure.
//!
//! A frame is 4 bytes of length (big-endian), 1 byte of kind, and the payload. The length is that of the payload.

use dsl_engine::spec::Console;

/// Most bytes of payload from a head. The environment of a job fits into it.
pub const LONGEST: usize = 64 << 20;
/// Most bytes of payload from an agent. An agent sends short messages, and there may be many agents.
pub const LONGEST_OF_AGENTS: usize = 1 << 20;
/// Most bytes of payload before the other side has shown that it knows the key.
pub const LONGEST_OF_STRANGERS: usize = 64 << 10;

const MESSAGE: u8 = 1;
const PING: u8 = 2;
const PONG: u8 = 3;
const OUTPUT: u8 = 4;
const CREDIT: u8 = 5;
const PACKED: u8 = 6;

/// Bytes before the payload of a frame.
pub const HEAD_LEN: usize = 5;
/// Bytes before the data of an output frame.
pub const OUTPUT_HEAD_LEN: usize = HEAD_LEN + 1;
/// In the first byte of output: the rest of the last line follows at once.
const GOES_ON: u8 = 0x80;
/// A longer buffer is not kept while it is empty.
const KEPT_BYTES: usize = 4 << 10;
/// Most memory that the other side gets for a frame before its bytes have come.
const RESERVED_BYTES: usize = 64 << 10;

/// Nothing more can be read from a connection; why, in words that follow the name of the other side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damaged(pub String);

/// The times of a heartbeat in nanoseconds: when it was sent, by a clock that never steps and by the clock of the
/// day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ping {
    /// By a clock that never steps.
    pub sent: u64,
    /// By the clock of the day.
    pub real: u64,
}

/// The answer to a heartbeat, with the times of day of its arrival and of the answer in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pong {
    /// The heartbeat.
    pub ping: Ping,
    /// When it arrived.
    pub heard: u64,
    /// When it was answered.
    pub now: u64,
}

/// What a frame says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame<'data> {
    /// A message, which this crate does not read.
    Message(&'data [u8]),
    /// A heartbeat.
    Ping(Ping),
    /// Its answer.
    Pong(Pong),
    /// Bytes that workers have written.
    Output {
        /// The stream.
        console: Console,
        /// The bytes.
        data: &'data [u8],
        /// Whether the rest of the last line follows at once.
        goes_on: bool,
    },
    /// Leave to send this many more bytes of output.
    Credit(u64),
    /// Frames of output that [`crate::pack`] has made smaller.
    Packed(&'data [u8]),
}

impl Frame<'_> {
    /// The bytes of the frame.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![0; HEAD_LEN];
        let kind = match self {
            Self::Message(payload) => {
                out.extend_from_slice(payload);
                MESSAGE
            }
            Self::Ping(ping) => {
                put(&mut out, &[ping.sent, ping.real]);
                PING
            }
            Self::Pong(pong) => {
                put(&mut out, &[pong.ping.sent, pong.ping.real, pong.heard, pong.now]);
                PONG
            }
            Self::Output {
                console,
                data,
                goes_on,
            } => {
                out.push(0);
                out.extend_from_slice(data);
                return output_frame(out, *console, *goes_on);
            }
            Self::Credit(count) => {
                put(&mut out, &[*count]);
                CREDIT
            }
            Self::Packed(payload) => {
                out.extend_from_slice(payload);
                PACKED
            }
        };
        finish(&mut out, kind);
        out
    }

    fn read(kind: u8, payload: &[u8]) -> Result<Frame<'_>, Damaged> {
        Ok(match kind {
            MESSAGE => Frame::Message(payload),
            PING => {
                let [sent, real] = numbers(payload)?;
                Frame::Ping(Ping { sent, real })
            }
            PONG => {
                let [sent, real, heard, now] = numbers(payload)?;
                let ping = Ping { sent, real };
                Frame::Pong(Pong { ping, heard, now })
            }
            OUTPUT => read_output(payload)?,
            CREDIT => {
                let [count] = numbers(payload)?;
                Frame::Credit(count)
            }
            PACKED => Frame::Packed(payload),
            _ => return Err(no_kind(kind)),
        })
    }
}

/// The frame of output whose data are already behind [`OUTPUT_HEAD_LEN`] bytes of any value.
pub fn output_frame(mut bytes: Vec<u8>, console: Console, goes_on: bool) -> Vec<u8> {
    let stream = if console == Console::Stderr { 2 } else { 1 };
    bytes[HEAD_LEN] = stream | if goes_on { GOES_ON } else { 0 };
    finish(&mut bytes, OUTPUT);
    bytes
}

/// The frame of packed output whose payload is already behind [`HEAD_LEN`] bytes of any value.
pub fn packed_frame(mut bytes: Vec<u8>) -> Vec<u8> {
    finish(&mut bytes, PACKED);
    bytes
}

fn finish(bytes: &mut [u8], kind: u8) {
    let length = (bytes.len() - HEAD_LEN) as u32;
    bytes[..4].copy_from_slice(&length.to_be_bytes());
    bytes[4] = kind;
}

fn read_output(payload: &[u8]) -> Result<Frame<'_>, Damaged> {
    let first = payload.first().copied().unwrap_or_default();
    let console = match first & !GOES_ON {
        1 => Console::Stdout,
        2 => Console::Stderr,
        _ => return Err(Damaged("has sent output of an unknown stream".into())),
    };
    Ok(Frame::Output {
        console,
        data: &payload[1..],
        goes_on: first & GOES_ON != 0,
    })
}

fn no_kind(kind: u8) -> Damaged {
    Damaged(format!("has sent a message of an unknown kind ({kind})"))
}

fn put(out: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        out.extend_from_slice(&number.to_be_bytes());
    }
}

fn numbers<const COUNT: usize>(payload: &[u8]) -> Result<[u64; COUNT], Damaged> {
    let (chunks, rest) = payload.as_chunks::<8>();
    let chunks: &[[u8; 8]; COUNT] = chunks
        .try_into()
        .ok()
        .filter(|_| rest.is_empty())
        .ok_or_else(|| Damaged("has sent a damaged message".into()))?;
    Ok(chunks.map(u64::from_be_bytes))
}

/// Takes the bytes of a connection as they come, and gives its frames.
#[derive(Debug)]
pub struct Parser {
    longest: usize,
    /// The beginning of a frame that is not complete yet.
    held: Vec<u8>,
}

impl Parser {
    /// `longest`: most bytes of payload that a frame may have.
    pub fn new(longest: usize) -> Self {
        Self {
            longest,
            held: Vec::new(),
        }
    }

    /// Takes bytes, and calls `hear` with each frame that they complete. After an error nothing can be read any more.
    pub fn feed<E: From<Damaged>>(
        &mut self,
        data: &[u8],
        mut hear: impl FnMut(Frame<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut data = data;
        if !self.held.is_empty() {
            let mut held = std::mem::take(&mut self.held);
            // Only the frame that has begun is put together here; the others are read where they are.
            while !data.is_empty() {
                let (piece, rest) = data.split_at(self.missing(&held).min(data.len()));
                held.extend_from_slice(piece);
                data = rest;
                let (at, result) = self.parse(&held, &mut hear);
                result?;
                if at > 0 {
                    held.clear();
                    break;
                }
            }
            if !held.is_empty() || held.capacity() <= KEPT_BYTES {
                self.held = held;
            }
        }
        let (at, result) = self.parse(data, &mut hear);
        let begun = &data[at..];
        if !begun.is_empty() {
            // Nothing is held here: so the frame is put together without growing step by step.
            let missing = self.missing(begun).min(RESERVED_BYTES);
            self.held.reserve_exact(begun.len() + missing);
            self.held.extend_from_slice(begun);
        }
        result
    }

    /// How many bytes the head of a frame needs, or else the rest of the frame. At least one.
    fn missing(&self, held: &[u8]) -> usize {
        let whole = match held.first_chunk::<4>() {
            Some(length) if held.len() >= HEAD_LEN => {
                HEAD_LEN + (u32::from_be_bytes(*length) as usize).min(self.longest)
            }
            _ => HEAD_LEN,
        };
        whole.saturating_sub(held.len()).max(1)
    }

    /// Returns how many bytes were read.
    fn parse<E: From<Damaged>>(
        &self,
        data: &[u8],
        hear: &mut impl FnMut(Frame<'_>) -> Result<(), E>,
    ) -> (usize, Result<(), E>) {
        let mut rest = data;
        let result = loop {
            match self.next(rest) {
                Ok(Some((frame, after))) => {
                    rest = after;
                    if let Err(error) = hear(frame) {
                        break Err(error);
                    }
                }
                Ok(None) => break Ok(()),
                Err(damaged) => break Err(damaged.into()),
            }
        };
        (data.len() - rest.len(), result)
    }

    pub(crate) fn next<'data>(
        &self,
        data: &'data [u8],
    ) -> Result<Option<(Frame<'data>, &'data [u8])>, Damaged> {
        let Some((head, rest)) = data.split_first_chunk::<HEAD_LEN>() else {
            return Ok(None);
        };
        let [a, b, c, d, kind] = *head;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if !(MESSAGE..=PACKED).contains(&kind) {
            return Err(no_kind(kind));
        }
        if length > self.longest {
            let longest = self.longest;
            return Err(Damaged(format!(
                "has sent a message of {length} bytes, more than the {longest} allowed"
            )));
        }
        let Some((payload, after)) = rest.split_at_checked(length) else {
            return Ok(None);
        };
        Ok(Some((Frame::read(kind, payload)?, after)))
    }
}

/// Calls `hear` with each frame of packed output: whole frames of output, and nothing else.
pub fn each_unpacked<E: From<Damaged>>(
    frames: &[u8],
    mut hear: impl FnMut(Frame<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let damaged = || E::from(Damaged("has sent damaged output".into()));
    let (at, result) = Parser::new(frames.len()).parse(frames, &mut |frame| match frame {
        Frame::Output { .. } => hear(frame),
        _ => Err(damaged()),
    });
    result?;
    if at == frames.len() {
        Ok(())
    } else {
        Err(damaged())
    }
}

#[cfg(test)]
mod tests;
