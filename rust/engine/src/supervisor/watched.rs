//! The meaning of each descriptor that a supervisor watches.

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Watched {
    /// This worker has died.
    Worker(usize),
    /// This worker's stdout (0) or stderr (1) is readable.
    Pipe(usize, usize),
    /// A signal has come.
    Intake,
    /// The guard is gone.
    Guard,
    /// Another thread has rung the bell.
    Wake,
    /// The attempt's cgroup has become empty, or was removed.
    Cgroup,
    /// This fork server has sent or written something, or has died.
    ForkServer(usize),
    /// Somebody calls at the job's socket.
    Caller,
}

impl Watched {
    pub(super) fn encode(self) -> u64 {
        let (kind, number) = match self {
            Self::Worker(worker) => (0, worker),
            Self::Pipe(worker, stream) => (1, worker << 1 | stream),
            Self::Intake => (2, 0),
            Self::Guard => (3, 0),
            Self::Wake => (4, 0),
            Self::Cgroup => (5, 0),
            Self::ForkServer(server) => (6, server),
            Self::Caller => (7, 0),
        };
        (number as u64) << 3 | kind
    }

    pub(super) fn decode(data: u64) -> Self {
        let number = (data >> 3) as usize;
        match data & 7 {
            0 => Self::Worker(number),
            1 => Self::Pipe(number >> 1, number & 1),
            2 => Self::Intake,
            3 => Self::Guard,
            4 => Self::Wake,
            5 => Self::Cgroup,
            6 => Self::ForkServer(number),
            _ => Self::Caller,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_watched_survives_the_kernel() {
        let all = [
            Watched::Worker(0),
            Watched::Worker(100_000),
            Watched::Pipe(0, 1),
            Watched::Pipe(100_000, 0),
            Watched::Intake,
            Watched::Guard,
            Watched::Wake,
            Watched::Cgroup,
            Watched::ForkServer(3),
            Watched::Caller,
        ];
        for watched in all {
            assert_eq!(Watched::decode(watched.encode()), watched);
        }
    }
}
