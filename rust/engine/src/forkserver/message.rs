//! The messages between engine and fork server, as bytes.
//!
//! Both are the same build of this extension; otherwise the version in the first message differs. Numbers are in the
//! machine's byte order. A process is named by a pidfd and never by its pid, because a pid means another process in
//! another pid namespace.

use std::time::Duration;

use crate::sys::clone::{Failure, Step};
use crate::sys::wait::Death;

/// Version of the messages and of the plan.
pub(crate) const VERSION: u32 = 7;

/// From the server to the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Report {
    /// The first message, with a pidfd of the process that sends it.
    Hello { version: u32 },
    /// The server takes orders.
    Ready,
    /// The server takes no orders; `text` says why.
    Refused { text: Vec<u8> },
    /// The child for this order was forked. Its pidfd comes with the message.
    Forked { order: u64 },
    /// No child could be forked for this order.
    NotForked { order: u64, errno: i32 },
    /// The child of this order is a zombie.
    Ended { order: u64, death: Death },
    /// A warm server that was ready begins to import anew.
    Importing,
    /// The branch of a warm server has ended.
    Died { death: Death },
    /// Nothing is left below the branch of a warm server, or of what it has left, if the branch is dead.
    Cleared,
}

/// From the engine to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    /// Fork a worker. Its plan and its descriptors come with the message.
    Start { order: u64 },
    /// This many workers will be ordered.
    Expect { workers: u64 },
    /// Reap the workers of all orders up to this one, each as soon as it is dead.
    Reap { through: u64 },
}

/// The message that a child writes into its gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entered {
    /// Whether it is in the attempt's cgroup.
    pub(crate) in_cgroup: bool,
    /// `Ok`: why it is not bound as its plan says, if it is not. `Err`: why it does not run.
    pub(crate) result: Result<Option<Failure>, Failure>,
}

impl Report {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Self::Hello { version } => out.byte(0).u32(*version),
            Self::Ready => out.byte(1),
            Self::Refused { text } => out.byte(2).bytes(text),
            Self::Forked { order } => out.byte(3).u64(*order),
            Self::NotForked { order, errno } => out.byte(4).u64(*order).i32(*errno),
            Self::Ended { order, death } => out.byte(5).u64(*order).death(death),
            Self::Importing => out.byte(6),
            Self::Died { death } => out.byte(7).death(death),
            Self::Cleared => out.byte(8),
        };
        out.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = Reader(bytes);
        let report = match input.byte()? {
            0 => Self::Hello {
                version: input.u32()?,
            },
            1 => Self::Ready,
            2 => Self::Refused {
                text: input.bytes()?.to_vec(),
            },
            3 => Self::Forked { order: input.u64()? },
            4 => Self::NotForked {
                order: input.u64()?,
                errno: input.i32()?,
            },
            5 => Self::Ended {
                order: input.u64()?,
                death: input.death()?,
            },
            6 => Self::Importing,
            7 => Self::Died {
                death: input.death()?,
            },
            8 => Self::Cleared,
            _ => return None,
        };
        input.at_end(report)
    }
}

impl Command {
    pub(crate) fn encode(self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Self::Start { order } => out.byte(0).u64(order),
            Self::Reap { through } => out.byte(1).u64(through),
            Self::Expect { workers } => out.byte(2).u64(workers),
        };
        out.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = Reader(bytes);
        let command = match input.byte()? {
            0 => Self::Start { order: input.u64()? },
            1 => Self::Reap {
                through: input.u64()?,
            },
            2 => Self::Expect {
                workers: input.u64()?,
            },
            _ => return None,
        };
        input.at_end(command)
    }
}

impl Entered {
    pub(crate) fn encode(self) -> Vec<u8> {
        let mut out = Writer::default();
        let (kind, failure) = match self.result {
            Ok(None) => (0, None),
            Ok(Some(unbound)) => (1, Some(unbound)),
            Err(failure) => (2, Some(failure)),
        };
        out.flag(self.in_cgroup).byte(kind);
        if let Some(failure) = failure {
            out.byte(failure.step as u8).i32(failure.errno);
        }
        out.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = Reader(bytes);
        let in_cgroup = input.flag()?;
        let kind = input.byte()?;
        let mut failure = || {
            let step = *Step::ALL.get(usize::from(input.byte()?))?;
            let errno = input.i32()?;
            Some(Failure { step, errno })
        };
        let result = match kind {
            0 => Ok(None),
            1 => Ok(Some(failure()?)),
            2 => Err(failure()?),
            _ => return None,
        };
        input.at_end(Self { in_cgroup, result })
    }
}

/// Writes values as bytes.
#[derive(Debug, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn byte(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    pub(super) fn flag(&mut self, value: bool) -> &mut Self {
        self.byte(u8::from(value))
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub(super) fn i32(&mut self, value: i32) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn duration(&mut self, value: Duration) -> &mut Self {
        self.u64(value.as_secs()).u32(value.subsec_nanos())
    }

    fn death(&mut self, death: &Death) -> &mut Self {
        self.i32(death.status).flag(death.signaled).flag(death.core);
        self.duration(death.user)
            .duration(death.system)
            .u64(death.max_rss)
    }

    pub(super) fn bytes(&mut self, value: &[u8]) -> &mut Self {
        self.u64(value.len() as u64);
        self.0.extend(value);
        self
    }
}

/// Reads values from bytes; holds the bytes that are left.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    pub(super) fn byte(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    pub(super) fn flag(&mut self) -> Option<bool> {
        match self.byte()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_ne_bytes(self.take(4)?.try_into().ok()?))
    }

    pub(super) fn i32(&mut self) -> Option<i32> {
        Some(i32::from_ne_bytes(self.take(4)?.try_into().ok()?))
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_ne_bytes(self.take(8)?.try_into().ok()?))
    }

    fn duration(&mut self) -> Option<Duration> {
        let seconds = self.u64()?;
        let nanoseconds = self.u32().filter(|&count| count < 1_000_000_000)?;
        Some(Duration::new(seconds, nanoseconds))
    }

    fn death(&mut self) -> Option<Death> {
        Some(Death {
            status: self.i32()?,
            signaled: self.flag()?,
            core: self.flag()?,
            user: self.duration()?,
            system: self.duration()?,
            max_rss: self.u64()?,
        })
    }

    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.u64()?).ok()?;
        self.take(length)
    }

    /// The value, if no bytes are left after it.
    pub(super) fn at_end<T>(&self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read_as_they_were_written_and_never_in_part() {
        let death = Death {
            status: 9,
            signaled: true,
            core: false,
            user: Duration::new(3, 999_999_000),
            system: Duration::from_micros(1),
            max_rss: u64::MAX,
        };
        for report in [
            Report::Hello { version: VERSION },
            Report::Ready,
            Report::Refused { text: Vec::new() },
            Report::Refused {
                text: b"no\xff module".to_vec(),
            },
            Report::Forked { order: 0 },
            Report::NotForked {
                order: u64::MAX,
                errno: 11,
            },
            Report::Ended { order: 7, death },
            Report::Importing,
            Report::Died { death },
            Report::Cleared,
        ] {
            let bytes = report.encode();
            assert_eq!(Report::decode(&bytes), Some(report));
            for end in 0..bytes.len() {
                assert_eq!(Report::decode(&bytes[..end]), None);
            }
            assert_eq!(Report::decode(&[&bytes[..], &[0]].concat()), None);
        }
        assert_eq!(Report::decode(&[9]), None);
    }

    #[test]
    fn commands_are_read_as_they_were_written_and_never_in_part() {
        for command in [
            Command::Start { order: 3 },
            Command::Reap { through: 1 << 40 },
            Command::Expect { workers: 1 << 33 },
        ] {
            let bytes = command.encode();
            assert_eq!(Command::decode(&bytes), Some(command));
            for end in 0..bytes.len() {
                assert_eq!(Command::decode(&bytes[..end]), None);
            }
        }
        assert_eq!(Command::decode(&[3; 9]), None);
    }

    #[test]
    fn an_entry_tells_each_step_that_can_fail() {
        let failures = Step::ALL.map(|step| Failure { step, errno: 22 });
        let results = failures
            .into_iter()
            .flat_map(|failure| [Ok(Some(failure)), Err(failure)]);
        for result in results.chain([Ok(None)]) {
            for in_cgroup in [false, true] {
                let entered = Entered { in_cgroup, result };
                let bytes = entered.encode();
                assert_eq!(Entered::decode(&bytes), Some(entered));
                for end in 0..bytes.len() {
                    assert_eq!(Entered::decode(&bytes[..end]), None);
                }
            }
        }
        assert_eq!(Entered::decode(&[0, 3]), None);
        assert_eq!(Entered::decode(&[0, 2, Step::ALL.len() as u8, 0, 0, 0, 0]), None);
    }
}
