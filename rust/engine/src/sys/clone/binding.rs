//! Binds the child to CPUs and memory, and checks that the kernel did what we asked.
//!
//! A cpuset silently narrows what we ask for, and so does a seccomp profile that answers in the kernel's place. All
//! of this runs in the child, under the rules of [`super`].

use super::calls;
use super::{Failure, Stage};

/// Words of the largest CPU mask that we read back; a kernel with more CPUs refuses the call.
const CPU_WORDS: usize = 1024;
/// The same for NUMA nodes.
const NODE_WORDS: usize = 64;

/// NUMA memory policy of the child: kernel mode and a bit mask of nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemoryPolicy {
    pub(crate) mode: i32,
    pub(crate) nodes: Vec<u64>,
}

/// Applies a CPU mask (none if empty), then a memory policy.
pub(super) fn bind(cpus: &[u64], memory: Option<&MemoryPolicy>) -> Result<(), Failure> {
    if !cpus.is_empty() {
        bind_cpus(cpus)?;
    }
    memory.map_or(Ok(()), bind_memory)
}

fn bind_cpus(cpus: &[u64]) -> Result<(), Failure> {
    calls::set_cpus(cpus).map_err(Failure::at(Stage::Affinity))?;
    let mut kept = [0u64; CPU_WORDS];
    calls::read_cpus(&mut kept).map_err(Failure::at(Stage::Affinity))?;
    let is_kept = pairs(&kept, cpus).all(|(kept, asked)| kept == asked);
    check(Stage::AffinityCheck, is_kept)
}

fn bind_memory(policy: &MemoryPolicy) -> Result<(), Failure> {
    let asked = policy.nodes.as_slice();
    calls::set_memory_policy(policy.mode, asked).map_err(Failure::at(Stage::MemoryPolicy))?;
    if asked.is_empty() {
        return Ok(()); // kernels differ in what they call the local policy
    }
    let mut kept = [0u64; NODE_WORDS];
    let mode = calls::read_memory_policy(&mut kept).map_err(Failure::at(Stage::MemoryPolicy))?;
    let mut nodes = pairs(&kept, asked);
    let is_kept = if policy.mode == libc::MPOL_PREFERRED {
        // Of several preferred nodes the kernel keeps one.
        let some = pairs(&kept, asked).any(|(kept, _)| kept != 0);
        some && nodes.all(|(kept, asked)| kept & !asked == 0)
    } else {
        nodes.all(|(kept, asked)| kept == asked)
    };
    check(Stage::MemoryPolicyCheck, is_kept && mode == policy.mode)
}

/// Each word of the mask that the kernel keeps, paired with the word that we asked for.
fn pairs<'a>(kept: &'a [u64], asked: &'a [u64]) -> impl Iterator<Item = (u64, u64)> + 'a {
    let asked = asked.iter().copied().chain(core::iter::repeat(0));
    kept.iter().copied().zip(asked)
}

fn check(step: Stage, is_kept: bool) -> Result<(), Failure> {
    if is_kept {
        Ok(())
    } else {
        Err(Failure::at(step)(libc::EINVAL))
    }
}
