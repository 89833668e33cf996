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

/// A list that does not parse. The error names the part that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Neither a number nor two numbers joined by a dash.
    #[error("\"{0}\" is neither a number nor a range such as 0-3")]
    NotARange(String),
    /// The end of a range is below its start.
    #[error("the range \"{0}\" ends before it starts")]
    Backwards(String),
    /// A part does not lie above the one before it.
    #[error("\"{0}\" overlaps or precedes the part before it: the list must ascend")]
    NotAscending(String),
    /// A number is above [`NUMBER_MAX`].
    #[error("\"{0}\" is above {NUMBER_MAX}, the highest number possible")]
    TooLarge(String),
}

/// A binding that this machine or this process's limits do not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// An empty set binds nothing.
    #[error("a binding needs at least one {0}")]
    Empty(&'static str),
    /// The CPU does not exist, is offline, or is outside the inherited mask.
    #[error("cpu {cpu} is not among the cpus this process may use ({allowed})")]
    Cpu {
        /// The first that is not allowed.
        cpu: u32,
        /// The allowed numbers, as a list.
        allowed: String,
    },
    /// The NUMA node does not exist, has no memory, or is outside the inherited set.
    #[error("NUMA node {node} is not among those whose memory this process may use ({allowed})")]
    Node {
        /// The first that is not allowed.
        node: u32,
        /// The allowed numbers, as a list.
        allowed: String,
    },
}

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
        let (first, last) = bounds(part).ok_or_else(|| ParseError::NotARange(shown()))?;
        if last.max(first) > u64::from(NUMBER_MAX) {
            return Err(ParseError::TooLarge(shown()));
        }
        if last < first {
            return Err(ParseError::Backwards(shown()));
        }
        let (first, last) = (first as u32, last as u32);
        if cpus.last().is_some_and(|&before| first <= before) {
            return Err(ParseError::NotAscending(shown()));
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

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// The number of the node.
    pub id: u32,
    /// Its online CPUs; empty for a node with memory only.
    pub cpus: Vec<u32>,
    /// Whether the node has memory. A memory policy cannot name a node without memory.
    pub has_memory: bool,
}

/// The online NUMA nodes, ascending. `root` is the directory with the machine's files, usually `/`.
///
/// A kernel without NUMA support counts as one node 0 with all CPUs.
pub fn numa_nodes(root: &Path) -> io::Result<Vec<NumaNode>> {
    let dir = root.join("sys/devices/system/node");
    let online = match read_list(&dir.join("online")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let cpus = read_list(&root.join("sys/devices/system/cpu/online"))?;
            return Ok(vec![NumaNode {
                id: 0,
                cpus,
                has_memory: true,
            }]);
        }
        other => other?,
    };
    let with_memory = read_list(&dir.join("has_memory"))?;
    let node = |id: u32| {
        let cpus = read_list(&dir.join(format!("node{id}/cpulist")))?;
        Ok(NumaNode {
            id,
            cpus,
            has_memory: with_memory.binary_search(&id).is_ok(),
        })
    };
    online.into_iter().map(node).collect()
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
    /// Reads both from the files below `root`, usually `/`.
    pub fn read(root: &Path) -> io::Result<Self> {
        let status = crate::kernel_file::read(root.join("proc/thread-self/status"))?;
        let list = |key| parse(status_value(&status, key).unwrap_or_default());
        let online = read_list(&root.join("sys/devices/system/cpu/online"))?;
        let nodes: Vec<u32> = numa_nodes(root)?
            .iter()
            .filter(|node| node.has_memory)
            .map(|node| node.id)
            .collect();
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
}

/// Checks that a worker can be bound to `cpus`; the error names the first CPU that is not allowed. `allowed` must
/// ascend.
pub fn validate(cpus: &[u32], allowed: &[u32]) -> Result<(), Unusable> {
    let refused = |cpu| Unusable::Cpu {
        cpu,
        allowed: format_cpulist(allowed),
    };
    first_outside(cpus, allowed, "cpu")?.map_or(Ok(()), |cpu| Err(refused(cpu)))
}

/// Checks that a memory policy can name `nodes`; the error names the first node that is not allowed. `allowed` must
/// ascend.
pub fn validate_nodes(nodes: &[u32], allowed: &[u32]) -> Result<(), Unusable> {
    let refused = |node| Unusable::Node {
        node,
        allowed: format_cpulist(allowed),
    };
    first_outside(nodes, allowed, "NUMA node")?.map_or(Ok(()), |node| Err(refused(node)))
}

fn first_outside(asked: &[u32], allowed: &[u32], what: &'static str) -> Result<Option<u32>, Unusable> {
    if asked.is_empty() {
        return Err(Unusable::Empty(what));
    }
    Ok(asked
        .iter()
        .copied()
        .find(|number| allowed.binary_search(number).is_err()))
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
