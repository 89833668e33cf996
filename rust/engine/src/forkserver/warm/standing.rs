//! Limits and the like that a process inherits. Imports may read them, and may change them for the workers.

use std::io;

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::kernel_file;
use crate::procfs::status_value;

const RESOURCES: [(Resource, &str); 16] = [
    (Resource::As, "as"),
    (Resource::Core, "core"),
    (Resource::Cpu, "cpu"),
    (Resource::Data, "data"),
    (Resource::Fsize, "fsize"),
    (Resource::Locks, "locks"),
    (Resource::Memlock, "memlock"),
    (Resource::Msgqueue, "msgqueue"),
    (Resource::Nice, "nice"),
    (Resource::Nofile, "nofile"),
    (Resource::Nproc, "nproc"),
    (Resource::Rss, "rss"),
    (Resource::Rtprio, "rtprio"),
    (Resource::Rttime, "rttime"),
    (Resource::Sigpending, "sigpending"),
    (Resource::Stack, "stack"),
];
const DUMP_FILTER: &str = "/proc/self/coredump_filter";

/// Hard limits, which only root can raise.
pub(super) fn hard_limits() -> impl Iterator<Item = (&'static str, String)> {
    RESOURCES
        .iter()
        .map(|(resource, name)| (*name, format!("{:?}", getrlimit(*resource).maximum)))
}

/// Soft limits, umask, timer slack and the filter of core dumps.
#[derive(Debug)]
pub(super) struct Standing {
    umask: u32,
    soft_limits: Vec<Option<u64>>,
    timer_slack_ns: u64,
    dump_filter: Vec<u8>,
}

impl Standing {
    /// That of this process.
    pub(super) fn own() -> Self {
        let status = kernel_file::read("/proc/self/status").unwrap_or_default();
        let umask = String::from_utf8_lossy(status_value(&status, "Umask").unwrap_or_default()).into_owned();
        Self {
            umask: u32::from_str_radix(&umask, 8).unwrap_or(0o022),
            soft_limits: RESOURCES
                .iter()
                .map(|(resource, _)| getrlimit(*resource).current)
                .collect(),
            timer_slack_ns: rustix::thread::current_timer_slack().unwrap_or_default(),
            dump_filter: kernel_file::read(DUMP_FILTER)
                .unwrap_or_default()
                .trim_ascii()
                .to_vec(),
        }
    }

    /// Gives it to this process.
    pub(super) fn take(&self) -> io::Result<()> {
        rustix::process::umask(Mode::from_raw_mode(self.umask));
        for ((resource, _), &soft) in RESOURCES.iter().zip(&self.soft_limits) {
            let limit = getrlimit(*resource);
            if limit.current != soft {
                let limit = Rlimit {
                    current: soft,
                    maximum: limit.maximum,
                };
                setrlimit(*resource, limit)?;
            }
        }
        if self.timer_slack_ns > 0 {
            rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(self.timer_slack_ns))?;
        }
        if kernel_file::read(DUMP_FILTER).unwrap_or_default().trim_ascii() != self.dump_filter {
            std::fs::write(DUMP_FILTER, [b"0x", &self.dump_filter[..]].concat())?;
        }
        Ok(())
    }
}
