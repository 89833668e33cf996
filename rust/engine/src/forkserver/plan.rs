//! The plan of one worker, as the file that comes with its order.

use std::ffi::CString;

use super::message::{Reader, Writer};
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

impl Plan {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        strings(&mut out, &self.argv);
        out.u32(self.entry);
        strings(&mut out, &self.environ);
        out.flag(self.cwd.is_some());
        if let Some(cwd) = &self.cwd {
            out.bytes(cwd.as_bytes());
        }
        out.flag(self.stderr == Stderr::Stdout).flag(self.has_cgroup);
        out.u64(self.kept.len() as u64);
        for fd in &self.kept {
            out.i32(*fd);
        }
        out.i32(self.group);
        out.u64(self.open_files.0).u64(self.open_files.1);
        words(&mut out, &self.cpus);
        out.flag(self.memory.is_some());
        if let Some(memory) = &self.memory {
            out.i32(memory.mode);
            words(&mut out, &memory.nodes);
        }
        out.flag(self.requires_cpus)
            .flag(self.requires_memory)
            .u64(self.mask.0);
        out.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = Reader(bytes);
        let plan = Self {
            argv: list(&mut input, string)?,
            entry: input.u32()?,
            environ: list(&mut input, string)?,
            cwd: if input.flag()? {
                Some(string(&mut input)?)
            } else {
                None
            },
            stderr: if input.flag()? {
                Stderr::Stdout
            } else {
                Stderr::Own
            },
            has_cgroup: input.flag()?,
            kept: list(&mut input, Reader::i32)?,
            group: input.i32()?,
            open_files: (input.u64()?, input.u64()?),
            cpus: list(&mut input, Reader::u64)?,
            memory: if input.flag()? {
                Some(MemoryPolicy {
                    mode: input.i32()?,
                    nodes: list(&mut input, Reader::u64)?,
                })
            } else {
                None
            },
            requires_cpus: input.flag()?,
            requires_memory: input.flag()?,
            mask: SignalSet(input.u64()?),
        };
        input.at_end(plan)
    }
}

fn strings(out: &mut Writer, list: &[CString]) {
    out.u64(list.len() as u64);
    for text in list {
        out.bytes(text.as_bytes());
    }
}

fn words(out: &mut Writer, list: &[u64]) {
    out.u64(list.len() as u64);
    for word in list {
        out.u64(*word);
    }
}

fn list<'a, T>(input: &mut Reader<'a>, item: impl Fn(&mut Reader<'a>) -> Option<T>) -> Option<Vec<T>> {
    let count = input.u64()?;
    // Memory is not reserved in advance, because a wrong count could ask for any amount.
    let mut items = Vec::new();
    for _ in 0..count {
        items.push(item(input)?);
    }
    Some(items)
}

fn string(input: &mut Reader<'_>) -> Option<CString> {
    CString::new(input.bytes()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

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
