//! One look at the process table, and the tree below a process in it.

use rustix::param::{clock_ticks_per_second, page_size};

use super::number;

/// One process of a snapshot. Snapshots include dead processes that are not reaped yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// Process id.
    pub pid: i32,
    /// Parent process id; 0 for a parent outside this pid namespace.
    pub ppid: i32,
    /// Process group id.
    pub pgrp: i32,
    /// Session id.
    pub session: i32,
    /// State letter: `R S D T t Z X I` and older ones.
    pub state: u8,
    /// Threads; a main thread that has ended still counts.
    pub threads: u32,
    /// Clock ticks from boot to the start of the process: with the pid, its identity.
    pub start_time: u64,
}

impl Stat {
    /// Whether the process no longer runs: it is a zombie, or on its way out of the table.
    ///
    /// A process whose main thread has ended shows state `Z` too, but lives for as long as another thread does.
    pub fn is_dead(&self) -> bool {
        matches!(self.state, b'X' | b'x') || self.state == b'Z' && self.threads <= 1
    }

    /// Whether a signal or a tracer has stopped it.
    pub fn is_stopped(&self) -> bool {
        matches!(self.state, b'T' | b't')
    }
}

/// Reads the text of `/proc/<pid>/stat`; `None` for text of another form.
///
/// The command name is the process's own choice and may hold anything, parentheses and newlines too:
/// it ends at the last `)`, because only numbers and a letter follow.
pub fn parse_stat(text: &[u8]) -> Option<Stat> {
    let open = text.iter().position(|&byte| byte == b'(')?;
    let close = text.iter().rposition(|&byte| byte == b')')?;
    let pid = number(text.get(..open)?.strip_suffix(b" ")?).filter(|&pid| pid > 0)?;
    let rest = text.get(close + 1..).filter(|_| close > open)?;
    let mut fields = rest.trim_ascii().split(|&byte| byte == b' ');
    let &[state] = fields.next()? else {
        return None;
    };
    let parent = number(fields.next()?)?;
    let pgrp = number(fields.next()?)?;
    let session = number(fields.next()?)?;
    // Fields 20 and 22 of the line; `session` was field 6.
    let threads = number(fields.nth(13)?)?;
    let start_time = number(fields.nth(1)?)?;
    state.is_ascii_alphabetic().then_some(Stat {
        pid,
        ppid: parent,
        pgrp,
        session,
        state,
        threads,
        start_time,
    })
}

/// What a process uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vitals {
    /// State letter, as in [`Stat`].
    pub state: u8,
    /// Milliseconds of processor time, with that of children that were waited for.
    pub cpu_ms: u64,
    /// Number of threads.
    pub threads: u32,
    /// Bytes of resident memory.
    pub rss_bytes: u64,
}

/// What a process uses, from a line of `stat`: its fields 3, 14 to 17, 20 and 24.
pub(super) fn parse_vitals(text: &[u8]) -> Option<Vitals> {
    let stat = parse_stat(text)?;
    let close = text.iter().rposition(|&byte| byte == b')')?;
    let mut fields = text[close..].split(|&byte| byte == b' ').skip(12);
    let mut ticks = 0;
    for _ in 0..4 {
        ticks += number::<u64>(fields.next()?).filter(|&one| one < 1 << 60)?;
    }
    let pages: u64 = number(fields.nth(6)?)?;
    Some(Vitals {
        state: stat.state,
        cpu_ms: ticks.saturating_mul(1000) / clock_ticks_per_second(),
        threads: stat.threads,
        rss_bytes: pages.saturating_mul(page_size() as u64),
    })
}

/// The status of a zombie: field 52 of a line of `stat`. The kernel shows 0 to a process that may not see it.
pub(super) fn parse_exit_status(text: &[u8]) -> Option<i32> {
    parse_stat(text).filter(|stat| stat.state == b'Z')?;
    let close = text.iter().rposition(|&byte| byte == b')')?;
    number(text[close..].trim_ascii().split(|&byte| byte == b' ').nth(50)?)
}

/// The pids in the text of a list of children.
pub(super) fn parse_children(text: &[u8]) -> Vec<i32> {
    text.split(u8::is_ascii_whitespace).filter_map(number).collect()
}

/// Whether a line of `stat` is that of a kernel thread or of a process that is ending: neither has memory.
pub(super) fn has_no_memory(text: &[u8]) -> bool {
    const EXITING: u32 = 0x4;
    const KERNEL_THREAD: u32 = 0x0020_0000;
    let flags = || {
        let close = text.iter().rposition(|&byte| byte == b')')?;
        number::<u32>(text[close..].split(|&byte| byte == b' ').nth(7)?)
    };
    flags().is_none_or(|flags| flags & (EXITING | KERNEL_THREAD) != 0)
}

/// Every process below `roots` in a snapshot, with zombies and without the roots themselves.
///
/// Parents come before their children. Roots that are not positive are ignored, so that "no parent"
/// never stands for the whole machine. A snapshot is not atomic: cycles and doubles in it do no harm.
pub fn descendants(all: &[Stat], roots: &[i32]) -> Vec<Stat> {
    let mut by_parent: Vec<usize> = (0..all.len()).collect();
    by_parent.sort_unstable_by_key(|&index| all[index].ppid);
    let mut pending: Vec<i32> = roots.iter().copied().filter(|&pid| pid > 0).collect();
    pending.sort_unstable();
    pending.dedup();
    let roots = pending.clone();
    let mut seen = vec![false; all.len()];
    let mut found = Vec::new();
    while let Some(parent) = pending.pop() {
        let first = by_parent.partition_point(|&index| all[index].ppid < parent);
        for &index in by_parent[first..]
            .iter()
            .take_while(|&&index| all[index].ppid == parent)
        {
            let child = all[index];
            if !std::mem::replace(&mut seen[index], true) && roots.binary_search(&child.pid).is_err() {
                found.push(child);
                pending.push(child.pid);
            }
        }
    }
    found
}
