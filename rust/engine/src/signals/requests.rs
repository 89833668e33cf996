//! Tells a request from further copies of it: who sends a signal to every process of a job asks once.

use std::time::{Duration, Instant};

use crate::signals::{JOB_CONTROL, Meaning, Table};
use crate::sys::signal::Received;

/// Signals of one process within this time are one request: `timeout` signals its child and then the group
/// that both are in, and systemd sends SIGHUP behind SIGTERM. Nobody insists so quickly.
const SAME_REQUEST: Duration = Duration::from_millis(50);
/// An agent may hear one request both from its guard, which may be slow on a busy machine, and from the sender,
/// or from the terminal, where both are in its group. The kernel may make one of the two, so both must count.
const TWINS: Duration = Duration::from_secs(3);
/// A terminal hangs up once. A job hears of it from the shell, and from the kernel when the shell is gone.
const HANG_UP: Duration = Duration::from_secs(5);

/// The signals that have come lately.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    last: Option<(Received, Instant)>,
    hang_up: Option<Instant>,
    /// Those that have come one way, and may come the other way, too.
    singles: Vec<(Received, Instant)>,
}

impl Requests {
    /// Takes note of a signal; whether it is only a copy of a request that was heard before.
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

    /// Whether the same signal has just come the other way: each can be one other's twin.
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

/// Without a sender it may be another's, and what is forwarded may be meant twice.
fn is_same_request(table: &Table, last: Received, received: Received) -> bool {
    let ends = |received: Received| table.meaning(received.signal) == Some(Meaning::Stop);
    let is_forwarded = table.meaning(received.signal) == Some(Meaning::Forward);
    let is_alike = last.signal == received.signal || (ends(last) && ends(received));
    last.sender == received.sender && received.sender != 0 && is_alike && !is_forwarded
}

#[cfg(test)]
mod tests;
