//! Tells a request from its copies: a sender that signals every process of a job makes one request.

use std::time::{Duration, Instant};

use crate::signals::{JOB_CONTROL, Meaning, Table};
use crate::sys::signal::Received;

/// Signals of one process within this time are one request: `timeout` signals its child and then the group that
/// both are in, and systemd sends SIGHUP behind SIGTERM. No user repeats a request so quickly.
const SAME_REQUEST: Duration = Duration::from_millis(50);
/// An agent may hear one request twice: from its guard, which may be slow on a busy machine, and from the sender
/// (or from the terminal, if guard and agent are both in its group). The kernel may merge the two signals into one,
/// so each must count as the request.
const TWINS: Duration = Duration::from_secs(3);
/// A terminal hangs up once. A job hears of it from the shell, and from the kernel when the shell is gone.
const HANG_UP: Duration = Duration::from_secs(5);

/// After the first Ctrl-\ a second one within this time ends the job.
const INSISTS: Duration = Duration::from_secs(5);

/// The signals that have come lately.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    last: Option<(Received, Instant)>,
    hang_up: Option<Instant>,
    /// Signals that have come one way, directly or through the guard, and may still come the other way.
    singles: Vec<(Received, Instant)>,
    explained: Option<Instant>,
}

impl Requests {
    /// Notes a signal. Returns whether it is only a copy of an earlier request.
    pub(crate) fn is_copy(&mut self, table: &Table, received: Received, now: Instant) -> bool {
        if JOB_CONTROL.contains(&received.signal) {
            return false;
        }
        let has_twin = self.has_twin(received, now);
        let last = self.last.replace((received, now));
        let is_repeated =
            last.is_some_and(|(last, at)| now - at < SAME_REQUEST && is_same_request(table, last, received));
        let is_hang_up = received.signal == libc::SIGHUP && received.from_terminal;
        let hung_up = if is_hang_up {
            self.hang_up.replace(now)
        } else {
            None
        };
        has_twin || is_repeated || hung_up.is_some_and(|at| now - at < HANG_UP)
    }

    /// Whether a signal, which is no copy, only asks what the workers do: it is the first Ctrl-\ of a terminal, where
    /// that would stop the job.
    pub(crate) fn asks(&mut self, table: &Table, received: Received, now: Instant) -> bool {
        let is_key = received.signal == libc::SIGQUIT && received.from_terminal;
        if !is_key || table.meaning(libc::SIGQUIT) != Some(Meaning::Stop) {
            return false;
        }
        let insists = self.explained.is_some_and(|at| now - at < INSISTS);
        self.explained = if insists { None } else { Some(now) };
        !insists
    }

    /// Whether the same signal has just come the other way. Each signal can be the twin of one other signal.
    fn has_twin(&mut self, received: Received, now: Instant) -> bool {
        self.singles.retain(|(_, at)| now - *at < TWINS);
        let is_twin = |(other, _): &(Received, Instant)| {
            let may_be_one_senders =
                other.sender == received.sender || [other.sender, received.sender].contains(&0);
            other.signal == received.signal && other.passed_on != received.passed_on && may_be_one_senders
        };
        if let Some(place) = self.singles.iter().position(is_twin) {
            self.singles.remove(place);
            return true;
        }
        self.singles.push((received, now));
        false
    }
}

/// Whether two signals are one request. A signal without a known sender may come from another process, and a
/// forwarded signal may be meant twice.
fn is_same_request(table: &Table, last: Received, received: Received) -> bool {
    let ends = |received: Received| table.meaning(received.signal) == Some(Meaning::Stop);
    let is_forwarded = table.meaning(received.signal) == Some(Meaning::Forward);
    let is_alike = last.signal == received.signal || (ends(last) && ends(received));
    last.sender == received.sender && received.sender != 0 && is_alike && !is_forwarded
}

#[cfg(test)]
mod tests;
