//! Groups of small programs, run turn by turn with a limit on the time of every wait.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use dsl_engine::event::{Exit, Survivor};
use dsl_engine::spec::{EnvEntry, LaunchSpec, OnFailure, Stdio, WorkerSpec};
use dsl_engine::{Event, Supervisor};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

/// Longer than any test needs on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
pub(crate) const GRACE: Duration = Duration::from_secs(10);
pub(crate) const QUIET: [Stdio; 3] = [Stdio::Null, Stdio::Null, Stdio::Null];
pub(crate) const PIPED: [Stdio; 3] = [Stdio::Null, Stdio::Pipe, Stdio::Pipe];

pub(crate) fn c_string(text: impl AsRef<OsStr>) -> CString {
    CString::new(text.as_ref().as_bytes()).unwrap()
}

pub(crate) fn program<T: AsRef<OsStr>>(argv: &[T], stdio: [Stdio; 3]) -> WorkerSpec {
    WorkerSpec {
        argv: argv.iter().map(c_string).collect(),
        stdio,
        ..WorkerSpec::default()
    }
}

pub(crate) fn sh(script: &str, stdio: [Stdio; 3]) -> WorkerSpec {
    program(&["/bin/sh", "-c", script], stdio)
}

pub(crate) fn sleeper() -> WorkerSpec {
    program(&["/bin/sleep", "600"], QUIET)
}

pub(crate) fn env(key: &str, value: &[u8]) -> EnvEntry {
    EnvEntry::new(key.as_bytes(), value).unwrap()
}

pub(crate) fn group(workers: Vec<WorkerSpec>) -> LaunchSpec {
    LaunchSpec {
        workers,
        env: vec![env("PATH", b"/usr/bin:/bin")],
        grace: GRACE,
        ..LaunchSpec::default()
    }
}

/// A group whose workers do not matter to each other.
pub(crate) fn report_group(workers: Vec<WorkerSpec>) -> LaunchSpec {
    LaunchSpec {
        on_failure: OnFailure::Report,
        ..group(workers)
    }
}

/// What the last event says.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) first_failure: Option<Exit>,
    pub(crate) stop_signal: Option<i32>,
    pub(crate) stragglers: usize,
    pub(crate) survivors: Vec<Survivor>,
    pub(crate) oom_kills: u64,
}

/// A supervisor with everything that it has reported.
pub(crate) struct Scene {
    pub(crate) supervisor: Supervisor,
    pub(crate) events: Vec<Event>,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self {
            supervisor: Supervisor::new(None).unwrap(),
            events: Vec::new(),
        }
    }

    pub(crate) fn started(spec: LaunchSpec) -> Self {
        let mut scene = Self::new();
        scene.start(spec);
        scene
    }

    /// Starts the group and runs it to its end.
    pub(crate) fn run(spec: LaunchSpec) -> (Self, Ended) {
        let mut scene = Self::started(spec);
        let ended = scene.end();
        (scene, ended)
    }

    pub(crate) fn start(&mut self, spec: LaunchSpec) {
        self.events.clear();
        self.supervisor.start(spec).unwrap();
    }

    /// Turns until the events show it.
    #[track_caller]
    pub(crate) fn until(&mut self, is_so: impl Fn(&[Event]) -> bool) {
        let start = Instant::now();
        let _watchdog = self.watchdog();
        loop {
            self.events.extend(self.supervisor.take_events());
            if is_so(&self.events) {
                return;
            }
            assert!(start.elapsed() < LIMIT, "too late: {:?}", self.events);
            self.supervisor.turn().unwrap();
        }
    }

    /// Wakes the supervisor when the time is over, unless it is dropped before.
    fn watchdog(&self) -> Sender<()> {
        let waker = self.supervisor.waker();
        let (alive, over) = channel();
        std::thread::spawn(move || {
            if over.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                waker.ring();
            }
        });
        alive
    }

    #[track_caller]
    pub(crate) fn end(&mut self) -> Ended {
        self.until(|events| matches!(events.last(), Some(Event::Ended { .. })));
        assert!(!self.supervisor.is_running());
        let ends = self
            .events
            .iter()
            .filter(|event| matches!(event, Event::Ended { .. }));
        assert_eq!(ends.count(), 1);
        ended(&self.events)
    }

    /// Turns until this worker has written something that ends like this to its piped stdout.
    #[track_caller]
    pub(crate) fn until_says(&mut self, worker: usize, text: &str) {
        self.until(|events| output(events, worker, 1).ends_with(text.as_bytes()));
    }

    pub(crate) fn output(&self, worker: usize, stream: u8) -> Vec<u8> {
        output(&self.events, worker, stream)
    }

    /// The exit of each worker, which must have been reported once.
    #[track_caller]
    pub(crate) fn exits(&self) -> Vec<Exit> {
        let mut exits = self.exits_in_order();
        exits.sort_by_key(|exit| exit.worker);
        assert!(
            exits.iter().enumerate().all(|(index, exit)| exit.worker == index),
            "{exits:?}"
        );
        exits
    }

    pub(crate) fn exits_in_order(&self) -> Vec<Exit> {
        let exit = |event: &Event| match event {
            Event::Exited(exit) => Some(exit.clone()),
            _ => None,
        };
        self.events.iter().filter_map(exit).collect()
    }

    pub(crate) fn pid(&self, wanted: usize) -> i32 {
        let pid = |event: &Event| match event {
            Event::Started { worker, pid, .. } if *worker == wanted => Some(*pid),
            _ => None,
        };
        self.events.iter().find_map(pid).unwrap()
    }

    pub(crate) fn has_killed(&self) -> bool {
        self.events
            .iter()
            .any(|event| matches!(event, Event::Killing { .. }))
    }
}

pub(crate) fn ended(events: &[Event]) -> Ended {
    let Some(Event::Ended {
        first_failure,
        stop_signal,
        stragglers,
        survivors,
        oom_kills,
        ..
    }) = events.last().cloned()
    else {
        panic!("not ended: {events:?}");
    };
    Ended {
        first_failure,
        stop_signal,
        stragglers,
        survivors,
        oom_kills,
    }
}

pub(crate) fn output(events: &[Event], worker: usize, stream: u8) -> Vec<u8> {
    let data = |event: &Event| match event {
        Event::Output {
            worker: from,
            stream: through,
            data,
        } if (*from, *through) == (worker, stream) => Some(data.clone()),
        _ => None,
    };
    events.iter().filter_map(data).flatten().collect()
}

pub(crate) fn started_count(events: &[Event]) -> usize {
    let is_start = |event: &&Event| matches!(event, Event::Started { .. });
    events.iter().filter(is_start).count()
}

pub(crate) fn exited_count(events: &[Event]) -> usize {
    events
        .iter()
        .filter(|event| matches!(event, Event::Exited(_)))
        .count()
}

/// Waits until a child has changed like this, and leaves the report of it to the supervisor.
pub(crate) fn wait_until_child(pid: i32, change: WaitIdOptions) {
    let pid = Pid::from_raw(pid).unwrap();
    waitid(WaitId::Pid(pid), change | WaitIdOptions::NOWAIT).unwrap();
}

/// A script whose last words come from a process in a session of its own, whose parent has gone.
pub(crate) fn leaves_behind(scratch: &Scratch, stray: &str) -> String {
    let fifo = scratch.path().join("up");
    let fifo = fifo.display();
    format!("mkfifo {fifo}; (setsid sh -c '{stray} echo >{fifo}; exec sleep 600' &); read line <{fifo}")
}

/// A pipe whose write end is a worker's stdout and, with it, its descendants': at its end none of them is alive.
pub(crate) struct Witness {
    read: OwnedFd,
    write: OwnedFd,
}

impl Witness {
    pub(crate) fn new() -> Self {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        rustix::io::ioctl_fionbio(&read, true).unwrap();
        Self { read, write }
    }

    /// For a worker that also takes its orders from stdin, or needs none.
    pub(crate) fn stdio(&self) -> [Stdio; 3] {
        [Stdio::Null, Stdio::Fd(self.write.as_raw_fd()), Stdio::Null]
    }

    /// Whether nobody is left, now.
    pub(crate) fn no_one_holds(self) -> bool {
        drop(self.write);
        let mut bytes = [0; 4096];
        loop {
            match rustix::io::read(&self.read, &mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(_) => return false,
            }
        }
    }
}

/// A pipe to a worker's stdin.
pub(crate) struct Leash {
    read: OwnedFd,
    write: OwnedFd,
}

impl Leash {
    pub(crate) fn new() -> Self {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        Self { read, write }
    }

    pub(crate) fn stdin(&self) -> Stdio {
        Stdio::Fd(self.read.as_raw_fd())
    }

    /// The worker sees the end of its input.
    pub(crate) fn let_go(self) {
        drop(self.write);
    }
}

/// A directory that is removed at the end.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dsl-supervisor-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file with this mode; its path.
    pub(crate) fn file(&self, name: &str, text: &[u8], mode: u32) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(&path, mode).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
