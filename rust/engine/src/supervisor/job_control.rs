//! Whether the job is suspended. While it is, no worker is started.

/// What has suspended the job.
#[derive(Debug, Default)]
pub(super) struct JobControl {
    /// A signal to the job, such as by Ctrl-Z. The suspension holds for the next attempts, too.
    by_signal: bool,
    /// The owner of this group.
    by_owner: bool,
}

impl JobControl {
    /// Notes a signal to the job, whatever else it means now.
    pub(super) fn hear(&mut self, signal: i32) {
        self.by_signal = stands_after(signal).unwrap_or(self.by_signal);
    }

    /// Notes a signal that the owner sends to all workers of the group.
    pub(super) fn send(&mut self, signal: i32) {
        self.by_owner = stands_after(signal).unwrap_or(self.by_owner);
    }

    /// Notes that another group begins.
    pub(super) fn begin(&mut self) {
        self.by_owner = false;
    }

    pub(super) fn stands_still(&self) -> bool {
        self.by_signal || self.by_owner
    }
}

/// Whether the job is suspended after this signal; `None` if the signal changes nothing.
fn stands_after(signal: i32) -> Option<bool> {
    match signal {
        libc::SIGTSTP => Some(true),
        libc::SIGCONT => Some(false),
        _ => None,
    }
}
