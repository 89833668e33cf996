//! Binds the child to CPUs and memory, and looks whether the kernel has done what it was told.
//!
//! A cpuset cuts what it is given without a word, and so does a seccomp profile that answers in the kernel's
//! place. All of this runs in the child, under the rules of [`super`].

use super::child::call;
use super::{Stage, written};

/// Words of the largest CPU mask that is read back; a kernel with more CPUs than these refuses.
const CPU_WORDS: usize = 1024;
/// The same for NUMA nodes.
const NODE_WORDS: usize = 64;

/// NUMA memory policy of the child: kernel mode and a bit mask of nodes.
#[derive(Debug, Clone)]
pub(crate) struct MemoryPolicy {
    pub(crate) mode: i32,
    pub(crate) nodes: Vec<u64>,
}

/// The step that failed, and the negative errno.
pub(super) type Refused = (Stage, isize);

/// Applies a CPU mask (none if empty), then a memory policy.
pub(super) fn bind(cpus: &[u64], memory: Option<&MemoryPolicy>) -> Result<(), Refused> {
    if !cpus.is_empty() {
        bind_cpus(cpus)?;
    }
    memory.map_or(Ok(()), bind_memory)
}

/// [sched_setaffinity(2)](https://man7.org/linux/man-pages/man2/sched_setaffinity.2.html)
fn bind_cpus(cpus: &[u64]) -> Result<(), Refused> {
    let set = [0, size_of_val(cpus), cpus.as_ptr() as usize, 0, 0, 0];
    done(Stage::Affinity, call(libc::SYS_sched_setaffinity, set))?;
    let mut kept = [0u64; CPU_WORDS];
    let get = [0, size_of_val(&kept), (&raw mut kept) as usize, 0, 0, 0];
    done(Stage::Affinity, call(libc::SYS_sched_getaffinity, get))?;
    let is_kept = pairs(&kept, cpus).all(|(kept, asked)| kept == asked);
    check(Stage::AffinityCheck, is_kept)
}

/// [set_mempolicy(2)](https://man7.org/linux/man-pages/man2/set_mempolicy.2.html)
fn bind_memory(policy: &MemoryPolicy) -> Result<(), Refused> {
    let asked = policy.nodes.as_slice();
    let (pointer, bits) = if asked.is_empty() {
        (0, 0)
    } else {
        // The kernel reads one bit less than it is told.
        (asked.as_ptr() as usize, asked.len() * 64 + 1)
    };
    let set = [policy.mode as usize, pointer, bits, 0, 0, 0];
    done(Stage::MemoryPolicy, call(libc::SYS_set_mempolicy, set))?;
    if asked.is_empty() {
        return Ok(()); // kernels differ in what they call the local policy
    }
    let mut mode = 0i32;
    let mut kept = [0u64; NODE_WORDS];
    let (mode_pointer, pointer) = ((&raw mut mode) as usize, (&raw mut kept) as usize);
    let get = [mode_pointer, pointer, NODE_WORDS * 64, 0, 0, 0];
    done(Stage::MemoryPolicy, call(libc::SYS_get_mempolicy, get))?;
    let mut nodes = pairs(&kept, asked);
    let is_kept = if policy.mode == libc::MPOL_PREFERRED {
        // Of several preferred nodes the kernel keeps one.
        let some = pairs(&kept, asked).any(|(kept, _)| kept != 0);
        some && nodes.all(|(kept, asked)| kept & !asked == 0)
    } else {
        nodes.all(|(kept, asked)| kept == asked)
    };
    check(Stage::MemoryPolicyCheck, is_kept && written(&mode) == policy.mode)
}

/// Words of a mask that the kernel has written, each with that of the mask that was asked for.
fn pairs<'a>(kept: &'a [u64], asked: &'a [u64]) -> impl Iterator<Item = (u64, u64)> + 'a {
    let asked = asked.iter().copied().chain(core::iter::repeat(0));
    kept.iter().map(written).zip(asked)
}

fn done(stage: Stage, result: isize) -> Result<(), Refused> {
    if result < 0 { Err((stage, result)) } else { Ok(()) }
}

fn check(stage: Stage, is_kept: bool) -> Result<(), Refused> {
    if is_kept {
        Ok(())
    } else {
        Err((stage, -(libc::EINVAL as isize)))
    }
}
