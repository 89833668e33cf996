//! The messages between engine and fork server, as bytes, and the plan of a worker, which goes along as a file.
//!
//! Both are the same build of this extension; otherwise the version in the first message differs. A process is named
//! by a pidfd and never by its pid, because a pid means another process in another pid namespace.

use std::ffi::CString;

use super::wire::{Wire, wire};
use crate::event::Stage;
use crate::sys::clone::{Failure, MemoryPolicy};
use crate::sys::signal::SignalSet;
use crate::sys::wait::Death;

/// Version of the messages and of the plan.
pub(crate) const VERSION: u32 = 8;

/// From the server to the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Report {
    /// The first message, with a pidfd of the process that sends it.
    Hello { version: u32 },
    /// The server takes orders.
    Ready,
    /// The server takes no orders; `text` says why.
    Refused { text: Vec<u8> },
    /// The child for this order was forked. Its pidfd comes with the message.
    Forked { order: u64 },
    /// No child could be forked for this order.
    NotForked { order: u64, errno: i32 },
    /// The child of this order is a zombie.
    Ended { order: u64, death: Death },
    /// A warm server that was ready begins to import anew.
    Importing,
    /// The branch of a warm server has ended.
    Died { death: Death },
    /// Nothing is left below the branch of a warm server, or of what it has left, if the branch is dead.
    Cleared,
}

/// From the engine to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    /// Fork a worker. Its plan and its descriptors come with the message.
    Start { order: u64 },
    /// This many workers will be ordered.
    Expect { workers: u64 },
    /// Reap the workers of all orders up to this one, each as soon as it is dead.
    Reap { through: u64 },
}

/// The message that a child writes into its gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entered {
    /// Whether it is in the attempt's cgroup.
    pub(crate) in_cgroup: bool,
    /// `Ok`: why it is not bound as its plan says, if it is not. `Err`: why it does not run.
    pub(crate) result: Result<Option<Failure>, Failure>,
}

wire!(Report {
    0 => Hello { version },
    1 => Ready {},
    2 => Refused { text },
    3 => Forked { order },
    4 => NotForked { order, errno },
    5 => Ended { order, death },
    6 => Importing {},
    7 => Died { death },
    8 => Cleared {},
});
wire!(Command {
    0 => Start { order },
    1 => Reap { through },
    2 => Expect { workers },
});
wire!(Entered { in_cgroup, result });
wire!(Failure { step, errno });
wire!(Death {
    status,
    signaled,
    core,
    user,
    system,
    max_rss,
});

impl Wire for Stage {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(*self as u8);
    }

    fn read(input: &mut &[u8]) -> Option<Self> {
        Some(Self::ALL.get(usize::from(u8::read(input)?))?.0)
    }
}

/// Where the worker's stderr comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stderr {
    /// A descriptor of its own.
    Own,
    /// Its stdout.
    Stdout,
}

/// What the child of an order must do. Its descriptors come separately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The command that would be executed without a fork server.
    pub(crate) argv: Vec<CString>,
    /// Index of the first word after the interpreter and its flags.
    pub(crate) entry: u32,
    /// The environment block.
    pub(crate) environ: Vec<CString>,
    /// Working directory, relative to the engine's.
    pub(crate) cwd: Option<CString>,
    pub(crate) stderr: Stderr,
    /// Whether the process list of the attempt's cgroup is among the descriptors.
    pub(crate) has_cgroup: bool,
    /// Numbers under which the worker keeps the last descriptors of the order, ascending and without repetition.
    pub(crate) kept: Vec<i32>,
    /// Process group that it joins; 0 for its own group.
    pub(crate) group: i32,
    /// Soft and hard limit of open files.
    pub(crate) open_files: (u64, u64),
    /// Mask of the CPUs; empty: as inherited.
    pub(crate) cpus: Vec<u64>,
    pub(crate) memory: Option<MemoryPolicy>,
    pub(crate) requires_cpus: bool,
    pub(crate) requires_memory: bool,
    pub(crate) mask: SignalSet,
}

wire!(Plan {
    argv,
    entry,
    environ,
    cwd,
    stderr,
    has_cgroup,
    kept,
    group,
    open_files,
    cpus,
    memory,
    requires_cpus,
    requires_memory,
    mask,
});
wire!(Stderr {
    0 => Own {},
    1 => Stdout {},
});
wire!(MemoryPolicy { mode, nodes });
wire!(SignalSet { 0 });

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn reports_are_read_as_they_were_written_and_never_in_part() {
        let death = Death {
            status: 9,
            signaled: true,
            core: false,
            user: Duration::new(3, 999_999_000),
            system: Duration::from_micros(1),
            max_rss: u64::MAX,
        };
        for report in [
            Report::Hello { version: VERSION },
            Report::Ready,
            Report::Refused { text: Vec::new() },
            Report::Refused {
                text: b"no\xff module".to_vec(),
            },
            Report::Forked { order: 0 },
            Report::NotForked {
                order: u64::MAX,
                errno: 11,
            },
            Report::Ended { order: 7, death },
            Report::Importing,
            Report::Died { death },
            Report::Cleared,
        ] {
            let bytes = report.encode();
            assert_eq!(Report::decode(&bytes), Some(report));
            for end in 0..bytes.len() {
                assert_eq!(Report::decode(&bytes[..end]), None);
            }
            assert_eq!(Report::decode(&[&bytes[..], &[0]].concat()), None);
        }
        assert_eq!(Report::decode(&[9]), None);
    }

    #[test]
    fn commands_are_read_as_they_were_written_and_never_in_part() {
        for command in [
            Command::Start { order: 3 },
            Command::Reap { through: 1 << 40 },
            Command::Expect { workers: 1 << 33 },
        ] {
            let bytes = command.encode();
            assert_eq!(Command::decode(&bytes), Some(command));
            for end in 0..bytes.len() {
                assert_eq!(Command::decode(&bytes[..end]), None);
            }
        }
        assert_eq!(Command::decode(&[3; 9]), None);
    }

    #[test]
    fn an_entry_tells_each_step_that_can_fail() {
        let failures = Stage::ALL.map(|(step, _)| Failure { step, errno: 22 });
        let results = failures
            .into_iter()
            .flat_map(|failure| [Ok(Some(failure)), Err(failure)]);
        for result in results.chain([Ok(None)]) {
            for in_cgroup in [false, true] {
                let entered = Entered { in_cgroup, result };
                let bytes = entered.encode();
                assert_eq!(Entered::decode(&bytes), Some(entered));
                for end in 0..bytes.len() {
                    assert_eq!(Entered::decode(&bytes[..end]), None);
                }
            }
        }
        assert_eq!(Entered::decode(&[0, 3]), None);
        assert_eq!(Entered::decode(&[0, 1, Stage::ALL.len() as u8, 0, 0, 0, 0]), None);
    }

    fn small() -> Plan {
        Plan {
            argv: vec![c"python".into()],
            entry: 1,
            environ: Vec::new(),
            cwd: None,
            stderr: Stderr::Own,
            has_cgroup: false,
            kept: Vec::new(),
            group: 0,
            open_files: (1024, 4096),
            cpus: Vec::new(),
            memory: None,
            requires_cpus: false,
            requires_memory: false,
            mask: SignalSet::default(),
        }
    }

    fn full() -> Plan {
        Plan {
            argv: vec![c"python".into(), c"".into(), c"-m".into(), c"\xff x".into()],
            entry: 2,
            environ: vec![
                c"A=1".into(),
                c"=odd".into(),
                c"bare".into(),
                c"".into(),
                c"A=2".into(),
            ],
            cwd: Some(c"a b".into()),
            stderr: Stderr::Stdout,
            has_cgroup: true,
            kept: vec![3, 900],
            group: 4711,
            open_files: (u64::MAX, u64::MAX),
            cpus: vec![0, 1 << 63],
            memory: Some(MemoryPolicy {
                mode: libc::MPOL_BIND,
                nodes: vec![3],
            }),
            requires_cpus: true,
            requires_memory: true,
            mask: SignalSet(0x8000_0000_0000_0001),
        }
    }

    #[test]
    fn a_plan_is_read_as_it_was_written_and_never_in_part() {
        for plan in [small(), full()] {
            let bytes = plan.encode();
            assert_eq!(Plan::decode(&bytes), Some(plan));
            for end in 0..bytes.len() {
                assert_eq!(Plan::decode(&bytes[..end]), None);
            }
            assert_eq!(Plan::decode(&[&bytes[..], &[0]].concat()), None);
        }
    }

    #[test]
    fn a_count_beyond_all_memory_is_refused() {
        assert_eq!(Plan::decode(&[0xff; 64]), None);
    }
}
