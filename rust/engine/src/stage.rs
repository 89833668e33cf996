//! The steps of a worker's start, as they are reported.

use crate::sys::clone::Step;

/// The step of a start that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// No process could be made.
    Spawn,
    /// The descriptor table could not be separated or cleaned.
    Descriptors,
    /// Process group.
    Group,
    /// A standard stream could not be opened or put in place.
    Stdio,
    /// Working directory.
    Chdir,
    /// Parent-death signal.
    ParentDeath,
    /// Open-files limit.
    Limit,
    /// CPU affinity.
    Affinity,
    /// The CPUs that were set differ from those in the spec.
    AffinityCheck,
    /// NUMA memory policy.
    MemoryPolicy,
    /// The memory policy that was set differs from the one in the spec.
    MemoryPolicyCheck,
    /// The program itself.
    Exec,
}

impl Stage {
    /// Name of the step, as shown to users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spawn => "spawn",
            Self::Descriptors => "descriptors",
            Self::Group => "group",
            Self::Stdio => "stdio",
            Self::Chdir => "chdir",
            Self::ParentDeath => "parent-death",
            Self::Limit => "limit",
            Self::Affinity => "affinity",
            Self::AffinityCheck => "affinity-check",
            Self::MemoryPolicy => "mempolicy",
            Self::MemoryPolicyCheck => "mempolicy-check",
            Self::Exec => "exec",
        }
    }
}

impl From<Step> for Stage {
    fn from(step: Step) -> Self {
        match step {
            Step::Clone => Self::Spawn,
            Step::Descriptors => Self::Descriptors,
            Step::Group => Self::Group,
            Step::Stdio => Self::Stdio,
            Step::Chdir => Self::Chdir,
            Step::ParentDeath => Self::ParentDeath,
            Step::OpenFiles => Self::Limit,
            Step::Cpus => Self::Affinity,
            Step::CpusCheck => Self::AffinityCheck,
            Step::Memory => Self::MemoryPolicy,
            Step::MemoryCheck => Self::MemoryPolicyCheck,
            Step::Exec => Self::Exec,
        }
    }
}
