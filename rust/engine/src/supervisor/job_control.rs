//! Whether the job stands still: then nobody is started who is still to be.

/// Who has stopped the job for a while.
#[derive(Debug, Default)]
pub(super) struct JobControl {
    /// A signal to the job, such as by Ctrl-Z. It holds for the next attempts, too.
    by_signal: bool,
    /// Whoever runs this group.
    by_owner: bool,
}

impl JobControl {
    /// Takes note of a signal to the job, whatever else it means now.
    pub(super) fn hear(&mut self, signal: i32) {
        self.by_signal = stands_after(signal).unwrap_or(self.by_signal);
    }

    /// Takes note of a signal that all workers of the group are sent.
    pub(super) fn send(&mut self, signal: i32) {
        self.by_owner = stands_after(signal).unwrap_or(self.by_owner);
    }

    /// Another group begins.
    pub(super) fn begin(&mut self) {
        self.by_owner = false;
    }

    pub(super) fn stands_still(&self) -> bool {
        self.by_signal || self.by_owner
    }
}

/// `None`: as before.
fn stands_after(signal: i32) -> Option<bool> {
    match signal {
        libc::SIGTSTP => Some(true),
        libc::SIGCONT => Some(false),
        _ => None,
    }
}
