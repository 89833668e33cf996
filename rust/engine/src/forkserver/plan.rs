//! The plan of one worker, as the file that comes with its order.

use std::ffi::CString;

use super::wire::wire;
use crate::sys::clone::MemoryPolicy;
use crate::sys::signal::SignalSet;

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
    use super::*;
    use crate::forkserver::wire::Wire;

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
