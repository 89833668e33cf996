//! What a signal to the job means: one table.

use crate::event::SignalAction;
use crate::sys::signal::Received;

/// Signals that an agent and its guard take.
pub(crate) const TAKEN: [i32; 9] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGTSTP,
    libc::SIGCONT,
    libc::SIGWINCH,
];

/// Meaning of a signal to the job.
pub(crate) fn meaning(signal: i32) -> SignalAction {
    match signal {
        libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT => SignalAction::Stop,
        libc::SIGUSR1 | libc::SIGUSR2 | libc::SIGTSTP | libc::SIGCONT | libc::SIGWINCH => {
            SignalAction::Forward
        }
        _ => SignalAction::Ignore,
    }
}

/// A SIGHUP that no terminal is behind: log rotation asks for new files by it.
pub(crate) fn is_reopening(received: Received) -> bool {
    received.signal == libc::SIGHUP && !received.from_terminal
}

/// What to do about a signal, given what came before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Pass it on.
    Forward,
    /// Pass it on and stop the group.
    Stop,
    /// The user insists: no more grace.
    Hurry,
    /// The group is ending already; a second one would hurry it.
    Note,
    /// Nothing.
    Ignore,
}

/// Decides about one signal. `stops`: signals of the stopping kind that came before; `ending`: the group is being
/// stopped already.
pub(crate) fn decide(signal: i32, stops: usize, ending: bool) -> Verdict {
    match (meaning(signal), stops, ending) {
        (SignalAction::Forward, _, false) => Verdict::Forward,
        (SignalAction::Stop, 0, false) => Verdict::Stop,
        (SignalAction::Stop, 0, true) => Verdict::Note,
        (SignalAction::Stop, _, _) => Verdict::Hurry,
        // A group that is being stopped must be able to run, and needs nothing else any more.
        (SignalAction::Forward | SignalAction::Reopen | SignalAction::Ignore, _, _) => Verdict::Ignore,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_stop_signal_stops_and_a_second_hurries() {
        assert_eq!(decide(libc::SIGINT, 0, false), Verdict::Stop);
        assert_eq!(decide(libc::SIGTERM, 1, true), Verdict::Hurry);
    }

    #[test]
    fn a_stop_signal_during_a_stop_for_failure_leaves_the_grace() {
        assert_eq!(decide(libc::SIGTERM, 0, true), Verdict::Note);
        assert_eq!(decide(libc::SIGTERM, 1, true), Verdict::Hurry);
    }

    #[test]
    fn user_signals_are_forwarded_while_the_group_runs() {
        for signal in [libc::SIGUSR1, libc::SIGUSR2, libc::SIGTSTP, libc::SIGCONT] {
            assert_eq!(decide(signal, 0, false), Verdict::Forward);
            assert_eq!(decide(signal, 1, true), Verdict::Ignore);
        }
    }

    #[test]
    fn every_signal_that_is_taken_has_a_meaning() {
        assert!(
            TAKEN
                .iter()
                .all(|signal| meaning(*signal) != SignalAction::Ignore)
        );
    }
}
