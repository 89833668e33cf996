//! Measures how long a fork server imports, and decides when it takes too long.

use std::time::{Duration, Instant};

use crate::procfs;

/// The reason for a server that takes too long before it is ready.
pub(super) const OUT_OF_TIME: &str = "ran out of time";
/// The reason for a server that was stopped meanwhile, perhaps by itself.
const STOPPED: &str = "was stopped and did not go on";

/// The least time between two looks.
const LEAST_PAUSE: Duration = Duration::from_millis(50);

/// How long a server may import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// After this time a line says that the server is still importing. A server that is stopped by a signal at this
    /// moment, and again after the same time, is given up.
    pub slow: Duration,
    /// After this time the server is given up. Its own timer (`IMPORT_S` in `dsl.forkserver.become`) rings earlier,
    /// unless the server hangs in the kernel.
    pub lost: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            slow: Duration::from_secs(30),
            lost: Duration::from_secs(630),
        }
    }
}

/// The time that a warm server which has imported gets to fork a branch. It is looked at in case it is stopped; that it
/// is slow is not worth a line.
pub(super) const PREPARED: Patience = Patience {
    slow: Duration::from_millis(1500),
    lost: Duration::from_secs(15),
};

/// The time in which a server imports.
pub(super) struct Imports {
    /// When it was executed.
    begin: Instant,
    patience: Patience,
    /// When to look next; `None` for never.
    next_look: Option<Instant>,
    was_slow: bool,
    was_stopped: bool,
}

/// The result of a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    Nothing,
    /// The server takes long, and this is reported for the first time. It has imported for this long.
    Slow(Duration),
    /// The server is given up, for this reason.
    Lost(&'static str),
}

impl Imports {
    pub(super) fn begin(begin: Instant, patience: Patience) -> Self {
        Self {
            begin,
            patience,
            next_look: begin.checked_add(patience.slow),
            was_slow: false,
            was_stopped: false,
        }
    }

    /// When to look.
    pub(super) fn due(&self) -> Instant {
        let last = self.begin + self.patience.lost;
        self.next_look.map_or(last, |look| look.min(last))
    }

    /// Looks at the process, if that is due.
    pub(super) fn look(&mut self, pid: i32, now: Instant) -> Look {
        if now < self.due() {
            return Look::Nothing;
        }
        let passed = now.saturating_duration_since(self.begin);
        if passed >= self.patience.lost {
            return Look::Lost(OUT_OF_TIME);
        }
        self.next_look = now.checked_add(self.patience.slow.max(LEAST_PAUSE));
        // By a signal, not by a debugger.
        let is_stopped = procfs::state(pid) == Some(b'T');
        if std::mem::replace(&mut self.was_stopped, is_stopped) && is_stopped {
            return Look::Lost(STOPPED);
        }
        if std::mem::replace(&mut self.was_slow, true) || self.patience == PREPARED {
            return Look::Nothing;
        }
        Look::Slow(passed)
    }
}
