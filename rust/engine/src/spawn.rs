//! Turns a [`WorkerSpec`] into a prepared plan for the child, and starts it.
//!
//! Everything that can be prepared is prepared here, before the child exists: paths are resolved, files opened,
//! tables built. The steps of the child itself are in `sys::clone`.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};

use rustix::process::{Rlimit, getpid};

use crate::cgroup::AttemptCgroup;
use crate::event::StartFailure;
use crate::features::Features;
use crate::poller::Poller;
use crate::spec::{LaunchSpec, MemoryMode, WorkerSpec};
use crate::sys;
use crate::sys::clone::{
    self, ChildPlan, ChildStack, Descriptors, Entry, Failure, Interfaces, MemoryPolicy, PointerArray,
    ProcessGroup, Step,
};
use crate::sys::signal::SignalSet;

mod descriptors;
mod environment;
mod fork;
mod program;
mod streams;

use descriptors::inheritable_descriptors;
pub(crate) use descriptors::{all_descriptors, fill_standard_streams, open_files_limit};
pub(crate) use environment::EnvTable;
pub(crate) use fork::{Prepared, Unordered};
use program::Programs;
use streams::{Ends, Slots};

/// A started worker.
pub(crate) struct Started {
    pub(crate) pid: i32,
    /// Its pidfd, which the poller watches; `None` if there is none or it cannot be watched.
    pub(crate) pidfd: Option<OwnedFd>,
    /// Whether it was born in the attempt's cgroup, so that its children are born there as well.
    pub(crate) in_cgroup: bool,
    /// Read ends of stdout and stderr, if the spec asks for pipes or logs.
    pub(crate) pipes: [Option<OwnedFd>; 2],
    /// Log files of stdout and stderr.
    pub(crate) files: [Option<OwnedFd>; 2],
    /// Why the worker is not bound as its spec says; `None` if it is.
    pub(crate) unbound: Option<Failure>,
}

/// Starts workers, always from the same thread: the kernel sends the parent-death signal when that thread ends.
pub(crate) struct Spawner {
    stack: ChildStack,
    slots: Slots,
    interfaces: Interfaces,
    close_range: bool,
    mask: SignalSet,
    open_files: (u64, u64),
    programs: Programs,
    inheritable: Vec<RawFd>,
}

/// Facts that all workers of one attempt share.
pub(crate) struct AttemptContext<'a> {
    pub(crate) env: &'a EnvTable,
    pub(crate) cgroup: Option<&'a AttemptCgroup>,
    /// Process group of a foreground worker.
    pub(crate) foreground_group: Option<i32>,
    /// The poller that reports deaths.
    pub(crate) poller: &'a Poller,
}

impl AttemptContext<'_> {
    /// The process group of a foreground worker; 0 if it has no number in our pid namespace.
    pub(crate) fn own_foreground_group(&self) -> i32 {
        let named = self.foreground_group.filter(|&group| group != 0);
        named.unwrap_or_else(sys::process_group)
    }
}

impl Spawner {
    /// `mask` and `open_files` are the values for the workers, usually those that this process started with.
    pub(crate) fn new(features: Features, mask: SignalSet, open_files: Rlimit) -> io::Result<Self> {
        fill_standard_streams()?;
        let unlimited = |limit: Option<u64>| limit.unwrap_or(libc::RLIM_INFINITY);
        Ok(Self {
            stack: ChildStack::new()?,
            slots: Slots::new()?,
            interfaces: Interfaces {
                clone3: features.clone3,
                pidfd: features.pidfd,
            },
            close_range: features.close_range,
            mask,
            open_files: (unlimited(open_files.current), unlimited(open_files.maximum)),
            programs: Programs::default(),
            inheritable: Vec::new(),
        })
    }

    /// Whether this kernel can start a worker inside a cgroup.
    pub(crate) fn can_enter_cgroups(&self) -> bool {
        self.interfaces.clone3
    }

    /// Changes the signal mask that workers get.
    pub(crate) fn set_mask(&mut self, mask: SignalSet) {
        self.mask = mask;
    }

    /// Our terminal may have another size, which workers ask their stdin for.
    pub(crate) fn resize(&self) {
        self.slots.resize();
    }

    /// Call this once before each group.
    pub(crate) fn prepare(&mut self) -> io::Result<()> {
        self.programs.clear();
        if !self.close_range {
            self.inheritable = inheritable_descriptors()?;
        }
        Ok(())
    }

    /// Starts one worker. The poller will report its death with this token.
    pub(crate) fn start(
        &mut self,
        launch: &LaunchSpec,
        worker: usize,
        token: u64,
        context: &AttemptContext<'_>,
    ) -> Result<Started, StartFailure> {
        let spec = &launch.workers[worker];
        let path = self.programs.find(spec, context.env)?;
        let mut ends = Ends::default();
        let stdio = self
            .slots
            .place(spec, &mut ends)
            .inspect_err(|_| self.slots.release())?;
        let argv = PointerArray::new(spec.argv.iter().map(CString::as_c_str));
        let envp = context.env.pointers(&spec.env);
        let cpus = bit_mask(&spec.cpus);
        let memory = spec.memory.as_ref();
        let memory = memory.map(|(mode, nodes)| memory_policy(*mode, nodes));
        let mut kept = spec.keep_fds.clone();
        kept.sort_unstable();
        let plan = ChildPlan {
            path: &path,
            argv: &argv,
            envp: &envp,
            descriptors: if self.close_range {
                let highest = kept.last().map_or(0, |fd| *fd as u32 + 1);
                Descriptors::Unshare(self.slots.first_unkept().max(highest))
            } else {
                Descriptors::CloseListed(&self.inheritable)
            },
            entry: Entry {
                cwd: spec.cwd.as_deref(),
                stdio,
                kept: &kept,
                group: match context.foreground_group {
                    // A foreground group without a number is still the agent's own group, so the worker inherits it.
                    Some(0) | None if spec.foreground => ProcessGroup::Inherit,
                    Some(group) if spec.foreground => ProcessGroup::Join(group),
                    _ => ProcessGroup::Own,
                },
                parent_death_signal: Some(libc::SIGKILL),
                ignores_quit: spec.foreground,
                observer: getpid().as_raw_nonzero().get(),
                open_files: Some(self.open_files),
                cpus: &cpus,
                memory: memory.as_ref(),
                requires_cpus: launch.binding.requires_cpus(),
                requires_memory: launch.binding.requires_memory(),
                mask: self.mask,
            },
            // Without `close_range` the child has a copy of our descriptor table, in which another file may have the
            // pidfd's number.
            watch: self.close_range.then(|| (context.poller.as_fd(), token)),
        };
        let result = run(&plan, &mut self.stack, &mut self.interfaces, context.cgroup);
        self.slots.release();
        match result {
            Ok((spawned, in_cgroup)) => Ok(Started {
                pid: spawned.pid,
                pidfd: spawned
                    .pidfd
                    .filter(|pidfd| spawned.watched || context.poller.watch(pidfd, token).is_ok()),
                in_cgroup,
                pipes: ends.pipes,
                files: ends.files,
                unbound: spawned.unbound,
            }),
            Err(failure) => Err(refused(failure, spec, path)),
        }
    }
}

fn refused(failure: Failure, spec: &WorkerSpec, program: CString) -> StartFailure {
    StartFailure {
        stage: failure.step.into(),
        errno: failure.errno,
        path: match failure.step {
            Step::Exec => Some(program),
            Step::Chdir => spec.cwd.clone(),
            _ => None,
        },
    }
}

/// Starts the child. If the kernel refuses an interface, the next older one is used from then on. Also returns
/// whether the child is in the attempt's cgroup.
fn run(
    plan: &ChildPlan<'_>,
    stack: &mut ChildStack,
    interfaces: &mut Interfaces,
    cgroup: Option<&AttemptCgroup>,
) -> Result<(clone::Spawned, bool), Failure> {
    let mut cgroup = cgroup.map(AttemptCgroup::dir);
    loop {
        cgroup = cgroup.filter(|_| interfaces.clone3);
        let failure = match clone::spawn(plan, stack, *interfaces, cgroup) {
            Ok(spawned) => return Ok((spawned, cgroup.is_some())),
            Err(failure) => failure,
        };
        match (failure.step, failure.errno) {
            (Step::Clone, errno) if cgroup.is_some() && errno != libc::EAGAIN => cgroup = None,
            (Step::Clone, libc::ENOSYS | libc::EPERM | libc::EINVAL | libc::E2BIG) if interfaces.clone3 => {
                interfaces.clone3 = false;
            }
            _ => return Err(failure),
        }
    }
}

fn bit_mask(bits: &[u32]) -> Vec<u64> {
    let words = bits.iter().max().map_or(0, |highest| *highest as usize / 64 + 1);
    let mut mask = vec![0u64; words];
    for bit in bits {
        mask[*bit as usize / 64] |= 1 << (bit % 64);
    }
    mask
}

fn memory_policy(mode: MemoryMode, nodes: &[u32]) -> MemoryPolicy {
    let mode = match mode {
        MemoryMode::Bind => libc::MPOL_BIND,
        MemoryMode::Preferred => libc::MPOL_PREFERRED,
        MemoryMode::Interleave => libc::MPOL_INTERLEAVE,
        MemoryMode::Local => libc::MPOL_LOCAL,
    };
    MemoryPolicy {
        mode,
        nodes: bit_mask(nodes),
    }
}

#[cfg(test)]
mod tests;
