//! Turns a [`WorkerSpec`] into a prepared plan for the child, and starts it.
//!
//! Everything that can be prepared is prepared here, before the child exists: paths are resolved, files opened,
//! tables built. The steps of the child itself are in `sys::clone`.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, Rlimit, getpid, setrlimit};
use rustix::stdio::stdin;

use crate::cgroup::Cgroup;
use crate::event::{Stage, StartFailure};
use crate::features::Features;
use crate::forkserver::{Plan, Stderr};
use crate::poller::Poller;
use crate::spec::{LaunchSpec, MemoryMode, WorkerSpec};
use crate::sys;
use crate::sys::clone::{
    self, ChildPlan, ChildStack, Descriptors, Entry, Failure, MemoryPolicy, PointerArray, ProcessGroup,
    StdioSource,
};
use crate::sys::signal::SignalSet;

mod environment;
mod helpers;
mod streams;

pub(crate) use environment::EnvTable;
use environment::Programs;
pub(crate) use helpers::{Helpers, MOST_THREADS, Shared};
use streams::{Ends, Slots, borrow};

/// From so many workers on, several threads start a group.
const LARGE: usize = 32;

/// A started worker.
pub(crate) struct Started {
    pub(crate) pid: i32,
    /// Its pidfd, which the poller watches; `None` if there is none or it cannot be watched.
    pub(crate) pidfd: Option<OwnedFd>,
    /// Whether it was born in the attempt's cgroup, so that its children are born there as well.
    pub(crate) in_cgroup: bool,
    pub(crate) ends: Ends,
    /// Why the worker is not bound as its spec says; `None` if it is.
    pub(crate) unbound: Option<Failure>,
}

/// An order for a fork server, and our ends of the worker's output.
pub(crate) struct Prepared {
    pub(crate) plan: Plan,
    /// Sent with the order: the engine's directory, the streams, the cgroup's list of processes, the descriptors
    /// that the worker keeps.
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) ends: Ends,
}

/// Why there is no order.
pub(crate) enum Unordered {
    /// The worker cannot be started in any way.
    Failed(StartFailure),
    /// We may not search our working directory, so we cannot hand it to a fork server. A program that we execute
    /// ourselves is there already.
    NoDirectory(io::Error),
}

/// Starts workers, always from the same thread: the kernel sends the parent-death signal when that thread ends.
pub(crate) struct Spawner {
    stack: ChildStack,
    slots: Slots,
    pub(crate) features: Features,
    /// The signal mask that workers get.
    pub(crate) mask: SignalSet,
    open_files: (u64, u64),
    programs: Programs,
    inheritable: Vec<RawFd>,
}

/// Facts that all workers of one attempt share.
pub(crate) struct AttemptContext<'a> {
    pub(crate) env: &'a EnvTable,
    pub(crate) cgroup: Option<&'a Cgroup>,
    /// Process group of a foreground worker.
    pub(crate) foreground_group: Option<i32>,
    /// The poller that reports deaths.
    pub(crate) poller: &'a Poller,
}

impl Spawner {
    /// `mask` and `open_files` are the values for the workers, usually those that this process started with.
    pub(crate) fn new(features: Features, mask: SignalSet, open_files: Rlimit) -> io::Result<Self> {
        fill_standard_streams()?;
        let unlimited = |limit: Option<u64>| limit.unwrap_or(libc::RLIM_INFINITY);
        Ok(Self {
            stack: ChildStack::new()?,
            slots: Slots::new()?,
            features,
            mask,
            open_files: (unlimited(open_files.current), unlimited(open_files.maximum)),
            programs: Programs::default(),
            inheritable: Vec::new(),
        })
    }

    /// Whether other threads shall help to start so many workers.
    pub(crate) fn may_have_helpers(&self, workers: usize) -> bool {
        // Else a child has a copy of our whole table until its program runs, with ends of other workers' pipes.
        let leaves_table = self.features.clone3 && self.features.close_range;
        leaves_table && workers >= if self.features.threads.is_some() { 2 } else { LARGE }
    }

    /// A spawner for another thread.
    fn twin(&self) -> io::Result<Self> {
        Ok(Self {
            stack: ChildStack::new()?,
            slots: self.slots.twin()?,
            programs: Programs::default(),
            inheritable: Vec::new(),
            ..*self
        })
    }

    /// Our terminal may have another size, which workers ask their stdin for.
    pub(crate) fn resize(&self) {
        self.slots.resize();
    }

    /// Call this once before each group.
    pub(crate) fn prepare(&mut self) -> io::Result<()> {
        self.programs.clear();
        if !self.features.close_range {
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
            descriptors: if self.features.close_range {
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
            watch: self.features.close_range.then(|| (context.poller.as_fd(), token)),
        };
        let result = run(&plan, &mut self.stack, &mut self.features, context.cgroup);
        self.slots.release();
        match result {
            Ok((spawned, in_cgroup)) => Ok(Started {
                pid: spawned.pid,
                pidfd: spawned
                    .pidfd
                    .filter(|pidfd| spawned.watched || context.poller.watch(pidfd, token).is_ok()),
                in_cgroup,
                ends,
                unbound: spawned.unbound,
            }),
            Err(failure) => Err(refused(failure, spec, path)),
        }
    }

    /// Prepares the order for one worker. Opens its descriptors as if we started the worker ourselves.
    pub(crate) fn order(
        &mut self,
        launch: &LaunchSpec,
        worker: usize,
        entry: usize,
        context: &AttemptContext<'_>,
    ) -> Result<Prepared, Unordered> {
        let of_streams = |errno| Unordered::Failed(of_streams(errno));
        let spec = &launch.workers[worker];
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, c".", flags, Mode::empty());
        let directory = directory.map_err(|errno| Unordered::NoDirectory(errno.into()))?;
        let mut ends = Ends::default();
        let placed = self.slots.place(spec, &mut ends);
        let placed = placed.map_err(Unordered::Failed);
        let gathered = placed.and_then(|stdio| gather(directory, stdio).map_err(of_streams));
        self.slots.release();
        let (mut fds, stderr) = gathered?;
        let cgroup = context.cgroup.and_then(|cgroup| cgroup.list().ok());
        let has_cgroup = cgroup.is_some();
        fds.extend(cgroup);
        let mut kept = spec.keep_fds.clone();
        kept.sort_unstable();
        for fd in &kept {
            fds.push(borrow(*fd).map_err(of_streams)?);
        }
        let memory = spec.memory.as_ref();
        let plan = Plan {
            argv: spec.argv.clone(),
            entry: entry as u32,
            environ: context.env.block(&spec.env).map(CStr::to_owned).collect(),
            cwd: spec.cwd.clone(),
            stderr,
            has_cgroup,
            kept,
            group: if spec.foreground {
                // 0: it has no number in our pid namespace.
                let named = context.foreground_group.filter(|&group| group != 0);
                named.unwrap_or_else(sys::process_group)
            } else {
                0
            },
            open_files: self.open_files,
            cpus: bit_mask(&spec.cpus),
            memory: memory.map(|(mode, nodes)| memory_policy(*mode, nodes)),
            requires_cpus: launch.binding.requires_cpus(),
            requires_memory: launch.binding.requires_memory(),
            mask: self.mask,
        };
        Ok(Prepared { plan, fds, ends })
    }
}

fn refused(failure: Failure, spec: &WorkerSpec, program: CString) -> StartFailure {
    StartFailure {
        stage: failure.step,
        errno: failure.errno,
        path: match failure.step {
            Stage::Exec => Some(program),
            Stage::Chdir => spec.cwd.clone(),
            _ => None,
        },
    }
}

/// Starts the child. If the kernel refuses an interface, the next older one is used from then on. Also returns
/// whether the child is in the attempt's cgroup.
fn run(
    plan: &ChildPlan<'_>,
    stack: &mut ChildStack,
    features: &mut Features,
    cgroup: Option<&Cgroup>,
) -> Result<(clone::Spawned, bool), Failure> {
    let mut cgroup = cgroup.map(Cgroup::dir);
    loop {
        cgroup = cgroup.filter(|_| features.clone3);
        let failure = match clone::spawn(plan, stack, *features, cgroup) {
            Ok(spawned) => return Ok((spawned, cgroup.is_some())),
            Err(failure) => failure,
        };
        match (failure.step, failure.errno) {
            (Stage::Spawn, errno) if cgroup.is_some() && errno != libc::EAGAIN => cgroup = None,
            (Stage::Spawn, libc::ENOSYS | libc::EPERM | libc::EINVAL | libc::E2BIG) if features.clone3 => {
                features.clone3 = false;
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

/// Opens /dev/null in place of every closed standard stream. Otherwise the next file opened would get the stream's
/// number, and workers would inherit it.
pub(crate) fn fill_standard_streams() -> io::Result<()> {
    loop {
        let flags = OFlags::RDWR | OFlags::NOCTTY;
        let fd = rustix::fs::open(c"/dev/null", flags, Mode::empty())?;
        if fd.as_raw_fd() > 2 {
            return Ok(());
        }
        std::mem::forget(fd);
    }
}

/// Descriptors above the standard streams that would stay open in a worker.
fn inheritable_descriptors() -> io::Result<Vec<RawFd>> {
    let all = all_descriptors()?.into_iter();
    Ok(all.filter(|fd| !sys::is_close_on_exec(*fd)).collect())
}

/// All descriptors above the standard streams.
pub(crate) fn all_descriptors() -> io::Result<Vec<RawFd>> {
    let directory = File::open("/proc/self/fd")?;
    let own = directory.as_raw_fd();
    let mut found = Vec::new();
    for entry in rustix::fs::Dir::read_from(&directory)? {
        let name = entry?.file_name().to_str().ok().map(str::parse);
        found.extend(
            name.and_then(Result::ok)
                .filter(|fd: &RawFd| *fd > 2 && *fd != own),
        );
    }
    Ok(found)
}

/// Makes room for so many descriptors, as far as the hard limit allows.
///
/// The kernel's table of descriptors grows by doubling. In a process with threads the kernel waits some ten
/// milliseconds each time (`synchronize_rcu`), in a process with one thread it does not wait.
pub(crate) fn reserve_descriptors(count: usize) {
    let limit = open_files_limit();
    let most = limit
        .maximum
        .map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
    let Ok(last) = RawFd::try_from(count.min(most).saturating_sub(1)) else {
        return;
    };
    let needed = last as u64 + 1;
    let is_raised = limit.current.is_some_and(|soft| soft < needed)
        && setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(needed),
                ..limit
            },
        )
        .is_ok();
    drop(fcntl_dupfd_cloexec(stdin(), last));
    if is_raised {
        let _ = setrlimit(Resource::Nofile, limit);
    }
}

/// The soft and hard limit of open files.
pub(crate) fn open_files_limit() -> Rlimit {
    rustix::process::getrlimit(Resource::Nofile)
}

/// Our directory, and copies of the worker's placed streams.
fn gather(directory: OwnedFd, stdio: [StdioSource; 3]) -> Result<(Vec<OwnedFd>, Stderr), Errno> {
    let mut fds = vec![directory];
    let mut stderr = Stderr::Own;
    for (stream, source) in (0i32..).zip(stdio) {
        let fd = match source {
            StdioSource::Same => stream,
            StdioSource::Slot(fd) => fd,
            StdioSource::Stdout => {
                stderr = Stderr::Stdout;
                continue;
            }
        };
        fds.push(borrow(fd)?);
    }
    Ok((fds, stderr))
}

fn of_streams(errno: Errno) -> StartFailure {
    StartFailure {
        stage: Stage::Stdio,
        errno: errno.raw_os_error(),
        path: None,
    }
}

#[cfg(test)]
mod tests;
