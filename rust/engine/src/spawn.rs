//! Turns a [`WorkerSpec`] into a prepared plan for the child, and starts it.
//!
//! Everything that can be prepared is prepared here, before the child exists: paths are resolved, files opened,
//! tables built. What the child itself does stands in `sys::clone`.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};

use crate::cgroup::Attempt;
use crate::event::{Stage, StartFailure};
use crate::features::Features;
use crate::mux::{open_log, open_terminal};
use crate::poller::Poller;
use crate::spec::{EnvEntry, LaunchSpec, MemoryMode, Stdio, WorkerSpec};
use crate::sys::clone::{
    self, ChildPlan, ChildStack, Descriptors, Failure, Interfaces, MemoryPolicy, PointerArray, ProcessGroup,
    StdioSource, Step,
};
use crate::sys::signal::SignalSet;
use crate::tree::TOKEN_VARIABLE;

/// The group's environment with an index, so that a worker's few own entries cost what they are and no more.
pub(crate) struct EnvTable {
    entries: Vec<EnvEntry>,
    index: HashMap<Box<[u8]>, usize>,
}

impl EnvTable {
    pub(crate) fn new(base: &[EnvEntry], extra: EnvEntry) -> Self {
        let mut table = Self {
            entries: Vec::with_capacity(base.len() + 1),
            index: HashMap::new(),
        };
        for entry in base.iter().cloned().chain([extra]) {
            if let Some(&at) = table.index.get(entry.key()) {
                table.entries[at] = entry;
            } else {
                table.index.insert(entry.key().into(), table.entries.len());
                table.entries.push(entry);
            }
        }
        table
    }

    /// The environment of a worker with entries of its own. None of them replaces the job's mark.
    fn pointers<'a>(&'a self, own: &'a [EnvEntry]) -> PointerArray<'a> {
        let mut strings: Vec<&CStr> = self.entries.iter().map(EnvEntry::text).collect();
        let mut new: Vec<&EnvEntry> = Vec::new();
        for entry in own
            .iter()
            .filter(|entry| entry.key() != TOKEN_VARIABLE.as_bytes())
        {
            if let Some(&at) = self.index.get(entry.key()) {
                strings[at] = entry.text();
            } else if let Some(known) = new.iter_mut().find(|known| known.key() == entry.key()) {
                *known = entry;
            } else {
                new.push(entry);
            }
        }
        PointerArray::new(strings.into_iter().chain(new.into_iter().map(EnvEntry::text)))
    }

    fn value<'a>(&'a self, own: &'a [EnvEntry], key: &[u8]) -> Option<&'a [u8]> {
        let own = own.iter().rev().find(|entry| entry.key() == key);
        own.or_else(|| self.index.get(key).map(|&at| &self.entries[at]))
            .map(EnvEntry::value)
    }
}

/// A started worker.
pub(crate) struct Started {
    pub(crate) pid: i32,
    /// Known to the poller.
    pub(crate) pidfd: Option<OwnedFd>,
    /// It was born in the attempt's cgroup, and so is all that it starts.
    pub(crate) in_cgroup: bool,
    /// What to read of stdout and stderr, where the spec asks for pipes or logs.
    pub(crate) pipes: [Option<OwnedFd>; 2],
    /// Their log files.
    pub(crate) files: [Option<OwnedFd>; 2],
    /// Why it is not bound as its spec says.
    pub(crate) unbound: Option<Failure>,
}

/// Our ends of a worker's output.
#[derive(Default)]
struct Ends {
    pipes: [Option<OwnedFd>; 2],
    files: [Option<OwnedFd>; 2],
}

/// Starts workers, always from the same thread: the parent-death signal follows the thread.
pub(crate) struct Spawner {
    stack: ChildStack,
    null: OwnedFd,
    slots: [OwnedFd; 3],
    slot_busy: [bool; 3],
    interfaces: Interfaces,
    close_range: bool,
    mask: SignalSet,
    open_files: (u64, u64),
    programs: HashMap<(CString, Vec<u8>, CString), Result<CString, Errno>>,
    inheritable: Vec<RawFd>,
}

/// What all workers of one attempt share.
pub(crate) struct Shared<'a> {
    pub(crate) env: &'a EnvTable,
    pub(crate) attempt: Option<&'a Attempt>,
    /// Process group of a foreground worker.
    pub(crate) foreground_group: Option<i32>,
    /// The set that hears of deaths.
    pub(crate) poller: &'a Poller,
}

impl Spawner {
    /// `mask` and `open_files` are what workers get, usually what this process started with.
    pub(crate) fn new(features: Features, mask: SignalSet, open_files: Rlimit) -> io::Result<Self> {
        fill_standard_streams()?;
        let null = rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let park = || rustix::io::fcntl_dupfd_cloexec(&null, 3);
        let slots = [park()?, park()?, park()?];
        let unlimited = |limit: Option<u64>| limit.unwrap_or(libc::RLIM_INFINITY);
        Ok(Self {
            stack: ChildStack::new()?,
            slots,
            null,
            slot_busy: [false; 3],
            interfaces: Interfaces {
                clone3: features.clone3,
                pidfd: features.pidfd,
            },
            close_range: features.close_range,
            mask,
            open_files: (unlimited(open_files.current), unlimited(open_files.maximum)),
            programs: HashMap::new(),
            inheritable: Vec::new(),
        })
    }

    /// Whether a worker can be born in a cgroup here.
    pub(crate) fn can_enter_cgroups(&self) -> bool {
        self.interfaces.clone3
    }

    /// Changes the signal mask that workers get.
    pub(crate) fn set_mask(&mut self, mask: SignalSet) {
        self.mask = mask;
    }

    /// To be called once before a group is started.
    pub(crate) fn prepare(&mut self) -> io::Result<()> {
        self.programs.clear();
        if !self.close_range {
            self.inheritable = inheritable_descriptors()?;
        }
        Ok(())
    }

    /// Starts one worker, whose death has this token.
    pub(crate) fn start(
        &mut self,
        launch: &LaunchSpec,
        worker: usize,
        token: u64,
        shared: &Shared<'_>,
    ) -> Result<Started, StartFailure> {
        let spec = &launch.workers[worker];
        let path = self.program(spec, shared.env)?;
        let mut ends = Ends::default();
        let stdio = self
            .place_streams(spec, &mut ends)
            .inspect_err(|_| self.release_slots())?;
        let argv = PointerArray::new(spec.argv.iter().map(CString::as_c_str));
        let envp = shared.env.pointers(&spec.env);
        let cpus = bit_mask(&spec.cpus);
        let memory = spec
            .memory
            .as_ref()
            .map(|(mode, nodes)| memory_policy(*mode, nodes));
        let plan = ChildPlan {
            path: &path,
            argv: &argv,
            envp: &envp,
            cwd: spec.cwd.as_deref(),
            stdio,
            descriptors: if self.close_range {
                Descriptors::Unshare(self.first_unkept())
            } else {
                Descriptors::CloseListed(&self.inheritable)
            },
            group: match shared.foreground_group {
                Some(group) if spec.foreground => ProcessGroup::Join(group),
                None if spec.foreground => ProcessGroup::Inherit,
                _ => ProcessGroup::Own,
            },
            parent_death_signal: Some(libc::SIGKILL),
            open_files: Some(self.open_files),
            cpus: &cpus,
            memory: memory.as_ref(),
            requires_cpus: launch.binding.requires_cpus(),
            requires_memory: launch.binding.requires_memory(),
            mask: self.mask,
            // In a copy of our table another file may have the pidfd's number by chance.
            watch: self.close_range.then(|| (shared.poller.as_fd(), token)),
        };
        let result = run(&plan, &mut self.stack, &mut self.interfaces, shared.attempt);
        self.release_slots();
        match result {
            Ok((spawned, in_cgroup)) => Ok(Started {
                pid: spawned.pid,
                pidfd: spawned
                    .pidfd
                    .filter(|pidfd| spawned.watched || shared.poller.watch(pidfd, token).is_ok()),
                in_cgroup,
                pipes: ends.pipes,
                files: ends.files,
                unbound: spawned.unbound,
            }),
            Err(failure) => Err(refused(failure, spec, path)),
        }
    }

    /// The child keeps descriptors below this number when it leaves our table.
    fn first_unkept(&self) -> u32 {
        self.slots
            .iter()
            .map(|slot| slot.as_raw_fd() as u32 + 1)
            .max()
            .unwrap_or(3)
    }

    fn program(&mut self, spec: &WorkerSpec, env: &EnvTable) -> Result<CString, StartFailure> {
        let program = &spec.argv[0];
        if program.as_bytes().contains(&b'/') {
            return Ok(program.clone());
        }
        let search = env
            .value(&spec.env, b"PATH")
            .unwrap_or(b"/usr/local/bin:/usr/bin:/bin");
        // The worker looks from the directory that it is in.
        let base = spec.cwd.as_deref().unwrap_or(c".");
        let key = (base.to_owned(), search.to_vec(), program.clone());
        let found = self
            .programs
            .entry(key)
            .or_insert_with(|| find_program(program, search, base));
        found.clone().map_err(|errno| StartFailure {
            stage: Stage::Exec,
            errno: errno.raw_os_error(),
            path: Some(program.clone()),
        })
    }

    fn place_streams(
        &mut self,
        spec: &WorkerSpec,
        ends: &mut Ends,
    ) -> Result<[StdioSource; 3], StartFailure> {
        let mut sources = [StdioSource::Same; 3];
        for (stream, stdio) in spec.stdio.iter().enumerate() {
            sources[stream] = self
                .place_stream(stream, stdio, spec, ends)
                .map_err(|errno| StartFailure {
                    stage: Stage::Stdio,
                    errno: errno.raw_os_error(),
                    path: match stdio {
                        Stdio::File { path, .. } => Some(path.clone()),
                        Stdio::Log { path, .. } => path.clone(),
                        _ => None,
                    },
                })?;
        }
        Ok(sources)
    }

    fn place_stream(
        &mut self,
        stream: usize,
        stdio: &Stdio,
        spec: &WorkerSpec,
        ends: &mut Ends,
    ) -> Result<StdioSource, Errno> {
        match stdio {
            Stdio::Inherit => return Ok(StdioSource::Same),
            Stdio::Stdout => return Ok(StdioSource::Stdout),
            Stdio::Null => {}
            Stdio::File { path, append } => {
                let file = open_stream(path, stream == 0, *append)?;
                self.fill_slot(stream, file.as_fd())?;
            }
            Stdio::Fd(fd) => {
                let source = borrow(*fd)?;
                self.fill_slot(stream, source.as_fd())?;
            }
            Stdio::Pipe | Stdio::Log { .. } => {
                let mut pair = None;
                if let Stdio::Log { path, terminal, .. } = stdio {
                    ends.files[stream - 1] = path.as_deref().map(open_log).transpose()?;
                    // Terminals are few; a worker is better off with a pipe than not at all.
                    pair = terminal.then(|| open_terminal(&spec.prefix).ok()).flatten();
                }
                let (read, write) = match pair {
                    Some(pair) => pair,
                    None => rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?,
                };
                rustix::io::ioctl_fionbio(&read, true)?;
                self.fill_slot(stream, write.as_fd())?;
                ends.pipes[stream - 1] = Some(read);
            }
        }
        Ok(StdioSource::Slot(self.slots[stream].as_raw_fd()))
    }

    fn fill_slot(&mut self, stream: usize, source: BorrowedFd<'_>) -> Result<(), Errno> {
        self.slot_busy[stream] = true;
        rustix::io::dup3(source, &mut self.slots[stream], rustix::io::DupFlags::CLOEXEC)
    }

    /// A slot that kept a pipe's write end would hide the end of that stream.
    fn release_slots(&mut self) {
        for (slot, busy) in self.slots.iter_mut().zip(&mut self.slot_busy) {
            if std::mem::take(busy) {
                // Replacing a descriptor by /dev/null cannot fail short of a kernel bug.
                let _ = rustix::io::dup3(&self.null, slot, rustix::io::DupFlags::CLOEXEC);
            }
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

/// Starts the child; where the kernel refuses an interface, uses the next older one from then on. Says also
/// whether the child is in the attempt's cgroup.
fn run(
    plan: &ChildPlan<'_>,
    stack: &mut ChildStack,
    interfaces: &mut Interfaces,
    attempt: Option<&Attempt>,
) -> Result<(clone::Spawned, bool), Failure> {
    let mut cgroup = attempt.map(Attempt::dir);
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

/// Looks for an executable on a search path, as a shell does. A match that may not be executed is told apart
/// from none at all. Relative items of the path are below `base`, and so is the result.
fn find_program(program: &CStr, search: &[u8], base: &CStr) -> Result<CString, Errno> {
    let mut error = Errno::NOENT;
    for directory in search.split(|byte| *byte == b':') {
        let directory = if directory.is_empty() { b"." } else { directory };
        let Ok(path) = CString::new([directory, b"/", program.to_bytes()].concat()) else {
            continue;
        };
        let seen = if directory.starts_with(b"/") {
            path.clone()
        } else {
            let seen = [base.to_bytes(), b"/", path.as_bytes()].concat();
            CString::new(seen).map_err(|_| Errno::INVAL)?
        };
        match rustix::fs::accessat(CWD, seen.as_c_str(), Access::EXEC_OK, AtFlags::EACCESS) {
            Ok(()) if is_directory(&seen) => error = Errno::ACCESS,
            Ok(()) => return Ok(path),
            Err(Errno::ACCESS) => error = Errno::ACCESS,
            Err(_) => {}
        }
    }
    Err(error)
}

fn is_directory(path: &CStr) -> bool {
    rustix::fs::stat(path).is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir())
}

fn open_stream(path: &CStr, input: bool, append: bool) -> Result<OwnedFd, Errno> {
    let flags = if input {
        OFlags::RDONLY
    } else if append {
        OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND
    } else {
        // Append mode also without history: a worker's children may open the file a second time.
        OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::APPEND
    };
    rustix::fs::open(
        path,
        flags | OFlags::CLOEXEC | OFlags::NOCTTY,
        Mode::from_raw_mode(0o640),
    )
}

/// A copy of a descriptor that the caller named by number.
fn borrow(fd: RawFd) -> Result<OwnedFd, Errno> {
    crate::sys::duplicate(fd).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::BADF))
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

/// A closed standard stream would be handed to the next file that anybody opens, and workers would inherit it.
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
    let directory = File::open("/proc/self/fd")?;
    let own = directory.as_raw_fd();
    let mut found = Vec::new();
    for entry in rustix::fs::Dir::read_from(&directory)? {
        let entry = entry?;
        let Some(fd) = entry
            .file_name()
            .to_str()
            .ok()
            .and_then(|name| name.parse::<RawFd>().ok())
        else {
            continue;
        };
        if fd > 2 && fd != own && !crate::sys::is_close_on_exec(fd) {
            found.push(fd);
        }
    }
    Ok(found)
}

/// The soft and hard limit of open files.
pub(crate) fn open_files_limit() -> Rlimit {
    rustix::process::getrlimit(Resource::Nofile)
}

#[cfg(test)]
mod tests;
