//! The steps of a worker's start.

/// A step of a start. Its number stands for it between processes.
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
    /// Each step at the index of its number, with its name as shown to users.
    pub(crate) const ALL: [(Self, &'static str); 12] = [
        (Self::Spawn, "spawn"),
        (Self::Descriptors, "descriptors"),
        (Self::Group, "group"),
        (Self::Stdio, "stdio"),
        (Self::Chdir, "chdir"),
        (Self::ParentDeath, "parent-death"),
        (Self::Limit, "limit"),
        (Self::Affinity, "affinity"),
        (Self::AffinityCheck, "affinity-check"),
        (Self::MemoryPolicy, "mempolicy"),
        (Self::MemoryPolicyCheck, "mempolicy-check"),
        (Self::Exec, "exec"),
    ];

    /// Name of the step, as shown to users.
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}
