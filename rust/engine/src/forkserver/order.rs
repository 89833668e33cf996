//! An order: one worker that the fork server must fork.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, fchdir, getrlimit, setrlimit};

use super::message::{Entered, Plan, Stderr};
use super::socket;
use super::wire::Wire as _;
use crate::error::Error;
use crate::event::Stage;
use crate::features::Features;
use crate::spawn::all_descriptors;
use crate::sys::clone::{self, Entry, Failure, ProcessGroup, Rest, StdioSource};
use crate::sys::signal::{self, Action};
use crate::sys::{ForkedChild, exit, exit_now, face};

/// The shell's exit code for a program that could not be started.
const NOT_STARTED: i32 = 127;

/// What imports have changed in the process besides its memory.
#[derive(Default)]
pub(super) struct Trace {
    pub(super) actions: Vec<Action>,
    /// The limit of open files, if imports have changed it.
    pub(super) open_files: Option<Rlimit>,
}

impl Trace {
    /// Notes what imports have left in this process, which had this limit of open files before. Then changes the settings
    /// of this process to those that a server needs.
    pub(super) fn note(before: &Rlimit) -> Result<Arc<Self>, Error> {
        let open_files = getrlimit(Resource::Nofile);
        let trace = Self {
            actions: signal::own_actions(),
            open_files: (open_files != *before).then_some(open_files),
        };
        exit::write_free_streams();
        // A process that ignores SIGCHLD cannot learn how its children end.
        signal::reset(libc::SIGCHLD).map_err(Error::os("listen for deaths"))?;
        // It needs a descriptor for each worker. A worker gets its own limit when it enters. If this fails, the server
        // can serve fewer workers.
        let most = Rlimit {
            current: open_files.maximum,
            maximum: open_files.maximum,
        };
        let _ = setrlimit(Resource::Nofile, most);
        Ok(Arc::new(trace))
    }
}

/// An order of the engine, in the server and in the child that it forks.
pub struct Order {
    pub(super) number: u64,
    server: i32,
    /// The process that may look into the worker, and whose descendants may; 0 if it is gone.
    observer: i32,
    trace: Arc<Trace>,
    plan: Plan,
    fds: Option<Descriptors>,
}

/// The descriptors of an order. They arrive in this sequence: plan, gate, the engine's directory, streams, the
/// process list of the attempt's cgroup, and the descriptors that the worker keeps.
struct Descriptors {
    gate: OwnedFd,
    directory: OwnedFd,
    streams: Vec<OwnedFd>,
    cgroup: Option<OwnedFd>,
    kept: Vec<OwnedFd>,
}

impl Order {
    pub(super) fn new(
        number: u64,
        server: i32,
        observer: i32,
        trace: Arc<Trace>,
        fds: Vec<OwnedFd>,
    ) -> io::Result<Self> {
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or(io::ErrorKind::InvalidData);
        let plan = read_plan(&File::from(next()?))?;
        let streams = match plan.stderr {
            Stderr::Own => 3,
            Stderr::Stdout => 2,
        };
        let descriptors = Descriptors {
            gate: next()?,
            directory: next()?,
            streams: (0..streams).map(|_| next()).collect::<Result<_, _>>()?,
            cgroup: plan.has_cgroup.then(&mut next).transpose()?,
            kept: plan.kept.iter().map(|_| next()).collect::<Result<_, _>>()?,
        };
        Ok(Self {
            number,
            server,
            observer,
            trace,
            plan,
            fds: Some(descriptors),
        })
    }

    /// Closes this process's copies of the worker's descriptors.
    pub(super) fn let_go(&mut self) {
        self.fds = None;
    }

    /// The command that would be executed without a fork server.
    pub fn argv(&self) -> &[CString] {
        &self.plan.argv
    }

    /// Index of the first word of the command after the interpreter and its flags.
    pub fn entry(&self) -> usize {
        self.plan.entry as usize
    }

    /// Whether the worker ignores SIGQUIT, because it reads the terminal.
    pub fn ignores_quit(&self) -> bool {
        self.plan.group != 0
    }

    /// The worker's environment, entry by entry.
    pub fn environ(&self) -> &[CString] {
        &self.plan.environ
    }

    /// Turns this process, a child that the server has forked, into the worker, and returns when the engine watches
    /// it. Ends the process if that fails. Does nothing in the server itself, and nothing in a second call.
    pub fn enter(&mut self) {
        let Some(child) = ForkedChild::of(self.server) else {
            return;
        };
        let Some(fds) = self.fds.take() else { return };
        // Move the gate above all numbers that the worker keeps, so that it does not occupy one of them.
        let highest = self.plan.kept.last().map_or(2, |fd| *fd);
        let Ok(gate) = fcntl_dupfd_cloexec(&fds.gate, highest + 1) else {
            exit_now(NOT_STARTED);
        };
        let in_cgroup = fds
            .cgroup
            .as_ref()
            .is_some_and(|list| rustix::io::write(list, b"0").is_ok());
        let result = self.take_steps(child, fds, &gate, highest);
        let entered = Entered { in_cgroup, result };
        let told = socket::send(&gate, &entered.encode(), &[], true);
        // After a failure do not wait: another process may hold the gate open, so the wait might never end.
        let is_let_in = result.is_ok()
            && told.is_ok()
            && rustix::io::retry_on_intr(|| rustix::io::read(&gate, &mut [0; 1])) == Ok(1);
        if !is_let_in {
            exit_now(NOT_STARTED);
        }
    }

    fn take_steps(
        &self,
        child: ForkedChild,
        fds: Descriptors,
        gate: &OwnedFd,
        highest: i32,
    ) -> Result<Option<Failure>, Failure> {
        let at = |step| {
            move |errno: rustix::io::Errno| Failure {
                step,
                errno: errno.raw_os_error(),
            }
        };
        let aside = |fd: &OwnedFd| fcntl_dupfd_cloexec(fd, highest + 1).map_err(at(Stage::Stdio));
        fchdir(&fds.directory).map_err(at(Stage::Chdir))?;
        let streams: Vec<OwnedFd> = fds.streams.iter().map(aside).collect::<Result<_, _>>()?;
        let kept: Vec<OwnedFd> = fds.kept.iter().map(aside).collect::<Result<_, _>>()?;
        let numbers = self.plan.kept.iter();
        let places: Vec<(i32, i32)> = numbers
            .copied()
            .zip(kept.iter().map(AsRawFd::as_raw_fd))
            .collect();
        let listed = if Features::from_environment().close_range {
            Vec::new()
        } else {
            all_descriptors().map_err(|_| Failure {
                step: Stage::Descriptors,
                errno: libc::EMFILE,
            })?
        };
        let mut left: Vec<i32> = self.plan.kept.clone();
        left.push(gate.as_raw_fd());
        let slot = |stream: usize| {
            streams
                .get(stream)
                .map_or(StdioSource::Stdout, |fd| StdioSource::Slot(fd.as_raw_fd()))
        };
        let entry = Entry {
            cwd: self.plan.cwd.as_deref(),
            stdio: [slot(0), slot(1), slot(2)],
            kept: &left,
            group: match self.plan.group {
                0 => ProcessGroup::Own,
                group => ProcessGroup::Join(group),
            },
            parent_death_signal: Some(libc::SIGKILL),
            ignores_quit: self.ignores_quit(),
            observer: self.observer,
            // Not set if imports have changed the limit: only root could raise a limit that an import has lowered.
            open_files: self.trace.open_files.is_none().then_some(self.plan.open_files),
            cpus: &self.plan.cpus,
            memory: self.plan.memory.as_ref(),
            requires_cpus: self.plan.requires_cpus,
            requires_memory: self.plan.requires_memory,
            mask: self.plan.mask,
        };
        let rest = if listed.is_empty() {
            Rest::All
        } else {
            Rest::Listed(&listed)
        };
        let result = clone::enter(child, &entry, &places, rest);
        // `clone::enter` has closed them, and their numbers may belong to other files by now: do not close them
        // again.
        std::mem::forget((fds, streams, kept));
        result
    }

    /// Restores what imports have changed in the server: the actions for signals and the limit of open files. Until
    /// this call, signals have their default actions. Does nothing in the server itself.
    pub fn take_trace(&self) {
        let Some(child) = ForkedChild::of(self.server) else {
            return;
        };
        signal::take_actions(child, &self.trace.actions);
        if let Some(limit) = self.trace.open_files {
            // The server was allowed this limit, so this process is, too.
            let _ = setrlimit(Resource::Nofile, limit);
        }
    }

    /// Makes C's `exit` forget the functions that the server has registered. Functions that this process registers
    /// from now on are called. Does nothing in the server itself.
    pub fn forget_exit_functions(&self) {
        if let Some(child) = ForkedChild::of(self.server) {
            exit::forget_exit_functions(child);
        }
    }

    /// Ends this process as C's `exit` does. Does nothing in the server itself.
    pub fn exit(&self, code: i32) {
        if let Some(child) = ForkedChild::of(self.server) {
            exit::exit(child, code);
        }
    }

    /// Shows the worker's command and environment as those of this process, to the process itself and to other
    /// processes. `words`: how many words the server was started with. Does nothing in the server itself.
    pub fn show_command(&self, words: usize) {
        if let Some(child) = ForkedChild::of(self.server) {
            face::show(child, &self.plan.argv, &self.plan.environ, words);
        }
    }
}

fn read_plan(file: &File) -> io::Result<Plan> {
    Plan::decode(&socket::unpack(file)?).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
