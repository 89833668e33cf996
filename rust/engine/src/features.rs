//! Kernel interfaces that the engine uses if it can. Each has an older substitute, which tests can force.

use rustix::process::{PidfdFlags, getpid, pidfd_open};

use crate::{cgroup, sys};

/// Environment variable that disables interfaces, for tests and for debugging kernel problems.
const DISABLE_VARIABLE: &str = "DSL_ENGINE_DISABLE";

/// Environment variable with the number of threads that start workers and read their output, for tests.
const THREADS_VARIABLE: &str = "DSL_ENGINE_THREADS";

/// The interfaces that the engine may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about the kernel")]
pub struct Features {
    /// `clone3(2)` (Linux 5.3; some seccomp profiles refuse it). Without it: `clone(2)`.
    pub clone3: bool,
    /// pidfds with `waitid(P_PIDFD)` (Linux 5.4). Without them: SIGCHLD, or a timer inside a user's program; and no
    /// fork servers.
    pub pidfd: bool,
    /// `close_range(2)` (Linux 5.9). Without it: a list of descriptors to close.
    pub close_range: bool,
    /// cgroup v2 with `cgroup.kill` (Linux 5.14), if this process may make a cgroup. Without it: the process table.
    pub cgroup: bool,
    /// So many threads start each group of two workers and more, and as many read its output beside the log thread;
    /// `None`: as many as are of use.
    pub threads: Option<usize>,
}

impl Features {
    /// The interfaces of this kernel, without those named in `DSL_ENGINE_DISABLE` (comma separated: `clone3`,
    /// `pidfd`, `close_range`, `cgroup`).
    pub fn from_environment() -> Self {
        let variable = |name| std::env::var(name).unwrap_or_default();
        Self {
            threads: variable(THREADS_VARIABLE).parse().ok(),
            ..Self::probe(&variable(DISABLE_VARIABLE))
        }
    }

    fn probe(disabled: &str) -> Self {
        let allowed = |name: &str| !disabled.split(',').any(|word| word.trim() == name);
        Self {
            clone3: allowed("clone3") && sys::has_clone3(),
            pidfd: allowed("pidfd")
                && pidfd_open(getpid(), PidfdFlags::empty()).is_ok_and(|own| {
                    sys::wait::can_wait_for_pidfd(&own) && sys::signal::can_signal_pidfd(&own)
                }),
            close_range: allowed("close_range") && sys::has_close_range(),
            cgroup: allowed("cgroup"),
            threads: None,
        }
    }

    /// Each interface with the reason why it is not used; the reason is empty if it is used. To find out, a cgroup is
    /// made and removed.
    pub fn account(self) -> [(&'static str, String); 4] {
        let why = |used: bool| {
            let refused = "not used: this kernel, a filter of system calls or DSL_ENGINE_DISABLE refuses it";
            if used { String::new() } else { refused.to_owned() }
        };
        let cgroup = if self.cgroup { cgroup::trial() } else { why(false) };
        [
            ("clone3", why(self.clone3)),
            ("pidfd", why(self.pidfd)),
            ("close_range", why(self.close_range)),
            ("cgroup", cgroup),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_is_done_without() {
        let features = Features::probe(" clone3, cgroup,nonsense");
        assert!(!features.clone3 && !features.cgroup);
        let all = Features::probe("");
        assert_eq!(features.pidfd, all.pidfd);
        assert_eq!(features.close_range, all.close_range);
        assert!(!Features::probe("pidfd,close_range").pidfd);
    }

    #[test]
    fn the_account_says_why_an_interface_is_not_used() {
        let none = Features::probe("clone3,pidfd,close_range,cgroup").account();
        assert_eq!(
            none.each_ref().map(|(name, _)| *name),
            ["clone3", "pidfd", "close_range", "cgroup"]
        );
        assert!(none.iter().all(|(_, why)| why.contains("refuses it")));
        let all = Features::probe("").account();
        assert_eq!(all[0].1.is_empty(), Features::probe("").clone3);
    }
}
