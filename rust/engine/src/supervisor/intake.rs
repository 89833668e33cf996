//! Signals of the job: what each means now, and what is done about it.

use std::time::{Duration, Instant};

use crate::error::Error;
use crate::event::{Event, SignalAction, StopReason};
use crate::group::Input;
use crate::signals::{Verdict, is_reopening};
use crate::supervisor::{ORPHAN_DELAY, Supervisor};
use crate::sys::signal::Received;

impl Supervisor {
    pub(super) fn take_signals(&mut self, inputs: &mut Vec<Input>) -> Result<(), Error> {
        loop {
            let Some(host) = &self.host else { return Ok(()) };
            let Some(received) = host.receive()? else {
                return Ok(());
            };
            if received.signal == libc::SIGCHLD {
                self.orphans_due.get_or_insert(Instant::now() + ORPHAN_DELAY);
                self.check_if_clearing();
            } else {
                // What has died by now has not died of this signal.
                for input in std::mem::take(inputs) {
                    self.step(input);
                }
                self.take_signal(received);
            }
        }
    }

    fn take_signal(&mut self, received: Received) {
        let Some(host) = &mut self.host else { return };
        let ending = self.job.as_ref().is_some_and(|job| job.group.is_ending());
        if is_reopening(received) && !ending && self.job.as_ref().is_some_and(|job| job.spec.has_log_files())
        {
            self.reopen_logs(received);
            return;
        }
        let verdict = host.decide(received.signal, ending);
        if verdict != Verdict::Ignore {
            self.events.push(Event::SignalReceived {
                signal: received.signal,
                action: verdict.action(),
                from_terminal: received.from_terminal,
            });
        }
        let grace = match verdict {
            Verdict::Forward => {
                self.forward(received);
                return;
            }
            Verdict::Stop => self.job.as_ref().map_or(Duration::ZERO, |job| job.spec.grace),
            Verdict::Hurry => {
                if let Some(mux) = &self.mux {
                    mux.hurry();
                }
                Duration::ZERO
            }
            Verdict::Note | Verdict::Ignore => return,
        };
        if self.job.is_none() {
            self.early_stop.get_or_insert(received.signal);
        }
        self.from_terminal = received.from_terminal;
        self.step(Input::Stop {
            reason: StopReason::Signal(received.signal),
            signal: received.signal,
            grace,
        });
        self.from_terminal = false;
    }

    /// Files that workers write themselves are theirs.
    fn reopen_logs(&mut self, received: Received) {
        if let Some(mux) = &self.mux {
            mux.reopen();
        }
        self.events.push(Event::SignalReceived {
            signal: received.signal,
            action: SignalAction::Reopen,
            from_terminal: false,
        });
    }

    fn forward(&self, received: Received) {
        if let Some(mux) = self.mux.as_ref().filter(|_| received.signal == libc::SIGWINCH) {
            mux.resize();
        }
        if let Some(job) = &self.job {
            job.broadcast(received.signal, received.from_terminal);
        }
    }

    pub(super) fn guard_lost(&mut self) {
        if let Some(host) = &mut self.host {
            host.drop_guard(&self.poller);
        }
        self.step(Input::Kill {
            reason: StopReason::GuardLost,
        });
    }
}
