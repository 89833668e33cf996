//! CPU lists and NUMA nodes: reads and writes the lists, and checks whether a binding is possible on this machine.
//!
//! The caller decides bindings and the child applies them; this module only knows what the machine has and
//! what the process may use. Contract of the texts: "List format" in [cpuset(7)], and [sysfs(5)].
//!
//! [cpuset(7)]: https://man7.org/linux/man-pages/man7/cpuset.7.html
//! [sysfs(5)]: https://man7.org/linux/man-pages/man5/sysfs.5.html

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use crate::procfs::{number, status_value};

/// Highest CPU or node number that is accepted: well above any kernel's limit, and low enough to keep lists small.
pub const NUMBER_MAX: u32 = 65_535;

/// Why a list does not parse: names the part that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseError(String);

/// Reads a list such as `0-3,8`. The numbers must strictly ascend, and white space may only stand around the list. An
/// empty text is an empty list.
pub fn parse_cpulist(text: &[u8]) -> Result<Vec<u32>, ParseError> {
    // The files of Linux 5.15-rc1 end in a zero byte.
    let text = text.strip_suffix(b"\0").unwrap_or(text).trim_ascii();
    let mut cpus: Vec<u32> = Vec::new();
    if text.is_empty() {
        return Ok(cpus);
    }
    for part in text.split(|&byte| byte == b',') {
        let shown = || String::from_utf8_lossy(part).escape_debug().to_string();
        let Some((first, last)) = bounds(part) else {
            let what = "is neither a number nor a range such as 0-3";
            return Err(ParseError(format!("\"{}\" {what}", shown())));
        };
        if last.max(first) > u64::from(NUMBER_MAX) {
            let what = format!("is above {NUMBER_MAX}, the highest number possible");
            return Err(ParseError(format!("\"{}\" {what}", shown())));
        }
        if last < first {
            return Err(ParseError(format!(
                "the range \"{}\" ends before it starts",
                shown()
            )));
        }
        let (first, last) = (first as u32, last as u32);
        if cpus.last().is_some_and(|&before| first <= before) {
            let what = "overlaps or precedes the part before it: the list must ascend";
            return Err(ParseError(format!("\"{}\" {what}", shown())));
        }
        cpus.extend(first..=last);
    }
    Ok(cpus)
}

fn bounds(part: &[u8]) -> Option<(u64, u64)> {
    let mut ends = part.splitn(2, |&byte| byte == b'-');
    let digits = |text: &[u8]| {
        // A number too long for u64 is reported as too large, which is clearer than "not a number".
        let valid = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
        valid.then(|| number(text).unwrap_or(u64::MAX))
    };
    let first = digits(ends.next()?)?;
    Some((first, ends.next().map_or(Some(first), digits)?))
}

/// Writes a list in the kernel's shortest form: `[0, 1, 2, 8]` is `0-2,8`. Expects ascending numbers.
pub fn format_cpulist(cpus: &[u32]) -> String {
    let mut text = String::new();
    for run in cpus.chunk_by(|&left, &right| left.checked_add(1) == Some(right)) {
        let comma = if text.is_empty() { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = match run {
            [first, .., last] => write!(text, "{comma}{first}-{last}"),
            [only] => write!(text, "{comma}{only}"),
            [] => Ok(()),
        };
    }
    text
}

/// The NUMA nodes with memory, ascending: a memory policy can name no others. A kernel without NUMA support has node 0.
fn nodes_with_memory(root: &Path) -> io::Result<Vec<u32>> {
    match read_list(&root.join("sys/devices/system/node/has_memory")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(vec![0]),
        nodes => nodes,
    }
}

/// CPUs and memory nodes that the calling thread may use, and so may the children it spawns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowed {
    /// Online CPUs of the inherited mask, ascending.
    pub cpus: Vec<u32>,
    /// NUMA nodes with memory that the cpuset grants, ascending.
    pub nodes: Vec<u32>,
}

impl Allowed {
    /// Reads both from the files below `root`, which is `/` but in tests.
    pub fn read(root: &Path) -> io::Result<Self> {
        let status = crate::kernel_file::read(root.join("proc/thread-self/status"))?;
        let list = |key| parse(status_value(&status, key).unwrap_or_default());
        let online = read_list(&root.join("sys/devices/system/cpu/online"))?;
        let nodes = nodes_with_memory(root)?;
        let both = |left: Vec<u32>, right: &[u32]| {
            left.into_iter()
                .filter(|number| right.binary_search(number).is_ok())
                .collect()
        };
        Ok(Self {
            cpus: both(list("Cpus_allowed_list")?, &online),
            nodes: both(list("Mems_allowed_list")?, &nodes),
        })
    }

    /// Why a worker cannot be bound to these CPUs and to memory of these nodes; `None` if it can. Names the first that is
    /// not allowed.
    pub fn refuses(&self, cpus: &[u32], nodes: &[u32]) -> Option<String> {
        let outside = |asked: &[u32], allowed: &[u32]| {
            let mut asked = asked.iter().copied();
            asked.find(|number| allowed.binary_search(number).is_err())
        };
        if let Some(cpu) = outside(cpus, &self.cpus) {
            let allowed = format_cpulist(&self.cpus);
            return Some(format!(
                "cpu {cpu} is not among the cpus this process may use ({allowed})"
            ));
        }
        let node = outside(nodes, &self.nodes)?;
        let allowed = format_cpulist(&self.nodes);
        let what = "is not among those whose memory this process may use";
        Some(format!("NUMA node {node} {what} ({allowed})"))
    }
}

fn read_list(file: &Path) -> io::Result<Vec<u32>> {
    let text = crate::kernel_file::read(file)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot read {}: {error}", file.display())))?;
    parse(&text)
}

fn parse(text: &[u8]) -> io::Result<Vec<u32>> {
    parse_cpulist(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests;
