use std::any::Any;
use std::ffi::CString;
use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::io::FdFlags;
use rustix::process::{Pid, WaitOptions, waitpid};

use super::*;
use crate::event::Stage;
use crate::orphans::sharing;
use crate::procfs::fake_root::FakeRoot;
use crate::spec::{EnvEntry, Stdio};
use crate::sys::signal;

pub(super) fn entry(text: &str) -> EnvEntry {
    let (key, value) = text.split_once('=').unwrap();
    EnvEntry::new(key.as_bytes(), value.as_bytes()).unwrap()
}

pub(super) fn entries(texts: &[&str]) -> Vec<EnvEntry> {
    texts.iter().copied().map(entry).collect()
}

pub(super) fn c_string(text: impl AsRef<std::ffi::OsStr>) -> CString {
    CString::new(text.as_ref().as_encoded_bytes()).unwrap()
}

/// A spawner whose children no other test reaps.
struct Own {
    spawner: Spawner,
    /// Keeps other tests from reaping them.
    _children: Box<dyn Any>,
}

impl Deref for Own {
    type Target = Spawner;

    fn deref(&self) -> &Spawner {
        &self.spawner
    }
}

impl DerefMut for Own {
    fn deref_mut(&mut self) -> &mut Spawner {
        &mut self.spawner
    }
}

fn spawner(features: Features) -> Own {
    spawner_with(features, Box::new(sharing::beside_others()))
}

/// A spawner to use while no other test has children: until it executes its program, a child holds the descriptors
/// that it has inherited.
fn lone_spawner(features: Features) -> Own {
    spawner_with(features, Box::new(sharing::alone()))
}

fn spawner_with(features: Features, children: Box<dyn Any>) -> Own {
    // A spawning thread takes no signals.
    signal::set_mask(SignalSet::ALL);
    let mut spawner = Spawner::new(features, SignalSet::default(), open_files_limit()).unwrap();
    spawner.prepare().unwrap();
    Own {
        spawner,
        _children: children,
    }
}

pub(super) fn worker(argv: &[&str], stdio: [Stdio; 3]) -> WorkerSpec {
    WorkerSpec {
        argv: argv.iter().copied().map(c_string).collect(),
        stdio,
        ..WorkerSpec::default()
    }
}

fn start(spawner: &mut Spawner, worker: WorkerSpec, env: &EnvTable) -> Result<Started, StartFailure> {
    start_watched(spawner, worker, env, &Poller::new().unwrap())
}

fn start_watched(
    spawner: &mut Spawner,
    worker: WorkerSpec,
    env: &EnvTable,
    poller: &Poller,
) -> Result<Started, StartFailure> {
    let launch = LaunchSpec {
        workers: vec![worker],
        ..LaunchSpec::default()
    };
    let context = AttemptContext {
        env,
        cgroup: None,
        foreground_group: None,
        poller,
    };
    spawner.start(&launch, 0, 0, &context)
}

/// Everything that a worker writes to its stdout, and its exit code.
fn run_to_end(started: Started) -> (Vec<u8>, Option<i32>) {
    let [stdout, _] = started.ends.pipes;
    let stdout = stdout.unwrap();
    rustix::io::ioctl_fionbio(&stdout, false).unwrap();
    let mut output = Vec::new();
    io::Read::read_to_end(&mut File::from(stdout), &mut output).unwrap();
    let (_, status) = waitpid(Pid::from_raw(started.pid), WaitOptions::empty())
        .unwrap()
        .unwrap();
    (output, status.exit_status())
}

/// The environment as the program gets it.
fn environment(base: &[&str], extra: &str, own: &[&str]) -> Vec<String> {
    let table = EnvTable::new(&entries(base), &[], entry(extra));
    let mut worker = worker(
        &["/bin/cat", "/proc/self/environ"],
        [Stdio::Null, Stdio::Pipe, Stdio::Null],
    );
    worker.env = entries(own);
    let mut spawner = spawner(Features::from_environment());
    let (output, code) = run_to_end(start(&mut spawner, worker, &table).unwrap());
    assert_eq!(code, Some(0));
    let text = String::from_utf8(output).unwrap();
    text.split_terminator('\0').map(str::to_owned).collect()
}

/// A temporary directory with files of these modes.
pub(super) fn programs(files: &[(&str, u32)]) -> FakeRoot {
    let root = FakeRoot::new();
    for (name, mode) in files {
        root.file(name, b"#!/bin/sh\n");
        std::fs::set_permissions(root.path().join(name), PermissionsExt::from_mode(*mode)).unwrap();
    }
    root
}

#[test]
fn later_entries_win_in_the_place_of_the_first() {
    for (base, extra, own, expected) in [
        (&["A=1", "B=2"][..], "T=t", &[][..], &["A=1", "B=2", "T=t"][..]),
        (&["A=1", "B=2", "A=3"], "T=t", &[], &["A=3", "B=2", "T=t"]),
        (&["A=1", "T=old", "B=2"], "T=t", &[], &["A=1", "T=t", "B=2"]),
        (
            &["A=1", "B=2"],
            "T=t",
            &["C=4", "A=5"],
            &["A=5", "B=2", "T=t", "C=4"],
        ),
        (&["A=1"], "T=t", &["A=2", "A=3"], &["A=3", "T=t"]),
        (&["A=1"], "T=t", &["A="], &["A=", "T=t"]),
        (&["AB=1"], "T=t", &["A=2"], &["AB=1", "T=t", "A=2"]),
        (&["A=x=y"], "T=t", &[], &["A=x=y", "T=t"]),
    ] {
        assert_eq!(
            environment(base, extra, own),
            expected,
            "{base:?} {extra} {own:?}"
        );
    }
}

#[test]
fn of_two_entries_of_a_worker_the_later_wins_also_when_the_group_has_none() {
    assert_eq!(environment(&[], "T=t", &["A=1", "A=2"]), ["T=t", "A=2"]);
}

#[test]
fn without_a_path_the_usual_directories_are_searched() {
    let mut spawner = spawner(Features::from_environment());
    let table = EnvTable::new(&[], &[], entry("T=t"));
    let echo = worker(&["sh", "-c", "echo $T"], [Stdio::Null, Stdio::Pipe, Stdio::Null]);
    let (output, code) = run_to_end(start(&mut spawner, echo, &table).unwrap());
    assert_eq!((&output[..], code), (&b"t\n"[..], Some(0)));
}

#[test]
fn the_workers_own_path_is_searched_and_not_the_groups() {
    let root = programs(&[("group/tool", 0o755), ("own/other", 0o755)]);
    let text = |item: &str| format!("PATH={}", root.path().join(item).display());
    let mut spawner = spawner(Features::from_environment());
    let table = EnvTable::new(&[entry(&text("group"))], &[], entry("T=t"));
    let mut tool = worker(&["tool"], [Stdio::Null, Stdio::Pipe, Stdio::Null]);
    tool.env = vec![entry(&text("own"))];
    let failure = start(&mut spawner, tool, &table).err().unwrap();
    assert_eq!((failure.stage, failure.errno), (Stage::Exec, libc::ENOENT));
    assert_eq!(failure.path.as_deref(), Some(c"tool"));
    let tool = worker(&["tool"], [Stdio::Null, Stdio::Pipe, Stdio::Null]);
    assert_eq!(run_to_end(start(&mut spawner, tool, &table).unwrap()).1, Some(0));
}

#[test]
fn bits_are_set_and_no_others() {
    for (bits, expected) in [
        (&[][..], &[][..]),
        (&[0], &[1]),
        (&[63], &[1 << 63]),
        (&[64], &[0, 1]),
        (&[130, 0, 5, 0], &[0b10_0001, 0, 4]),
    ] {
        assert_eq!(bit_mask(bits), expected, "{bits:?}");
    }
}

#[test]
fn only_what_would_stay_open_in_a_worker_is_listed() {
    let before = inheritable_descriptors().unwrap();
    assert!(before.iter().all(|fd| *fd > 2));
    let (inherited, closed) = rustix::pipe::pipe().unwrap();
    rustix::io::fcntl_setfd(&closed, FdFlags::CLOEXEC).unwrap();
    let listed = inheritable_descriptors().unwrap();
    assert!(listed.contains(&inherited.as_raw_fd()));
    assert!(!listed.contains(&closed.as_raw_fd()));
}

#[test]
fn a_worker_has_its_standard_streams_and_no_other_descriptor() {
    let (kept, _write) = rustix::pipe::pipe().unwrap();
    for close_range in [false, Features::from_environment().close_range] {
        let features = Features {
            close_range,
            ..Features::from_environment()
        };
        let mut spawner = spawner(features);
        let table = EnvTable::new(&[], &[], entry("T=t"));
        // The shell's `test -e` opens no descriptor itself.
        let script = format!(
            "for fd in 3 4 5 6 7 8 9 {}; do test -e /proc/$$/fd/$fd && echo $fd; done; echo end",
            kept.as_raw_fd()
        );
        let look = worker(&["sh", "-c", &script], [Stdio::Null, Stdio::Pipe, Stdio::Stdout]);
        let (output, code) = run_to_end(start(&mut spawner, look, &table).unwrap());
        assert_eq!(
            (String::from_utf8(output).unwrap().as_str(), code),
            ("end\n", Some(0))
        );
    }
}

#[test]
fn room_for_descriptors_beyond_the_soft_limit_leaves_the_limit_as_it_is() {
    let before = open_files_limit();
    let count = before.current.unwrap();
    let limit = Rlimit {
        current: Some(count - 100),
        ..before
    };
    setrlimit(Resource::Nofile, limit).unwrap();
    let open = all_descriptors().unwrap();
    for asked in [0, usize::try_from(count).unwrap(), usize::MAX] {
        reserve_descriptors(asked);
        assert_eq!(open_files_limit(), limit);
        assert_eq!(all_descriptors().unwrap(), open);
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("FDSize:"));
    assert!(size.unwrap().trim().parse::<u64>().unwrap() >= count);
    setrlimit(Resource::Nofile, before).unwrap();
}

#[test]
fn a_worker_keeps_the_descriptors_that_it_is_to_have_under_their_numbers() {
    let (low, write) = rustix::pipe::pipe().unwrap();
    let high = rustix::io::fcntl_dupfd_cloexec(&write, 700).unwrap();
    let other = rustix::io::fcntl_dupfd_cloexec(&write, 702).unwrap();
    rustix::io::fcntl_setfd(&other, FdFlags::empty()).unwrap();
    for close_range in [false, Features::from_environment().close_range] {
        let mut spawner = lone_spawner(Features {
            close_range,
            ..Features::from_environment()
        });
        let table = EnvTable::new(&[], &[], entry("T=t"));
        let script = format!(
            "for fd in $(seq 3 20) {} {} {}; do test -e /proc/$$/fd/$fd && echo $fd; done; echo end",
            write.as_raw_fd(),
            high.as_raw_fd(),
            other.as_raw_fd()
        );
        let mut look = worker(&["sh", "-c", &script], [Stdio::Null, Stdio::Pipe, Stdio::Stdout]);
        look.keep_fds = vec![high.as_raw_fd(), low.as_raw_fd()];
        let (output, code) = run_to_end(start(&mut spawner, look, &table).unwrap());
        let mut found: Vec<i32> = String::from_utf8(output)
            .unwrap()
            .lines()
            .filter_map(|line| line.parse().ok())
            .collect();
        found.sort_unstable();
        found.dedup();
        assert_eq!((found, code), (vec![low.as_raw_fd(), high.as_raw_fd()], Some(0)));
        // Our own descriptors are unchanged.
        assert!(crate::sys::is_close_on_exec(high.as_raw_fd()));
        assert!(!crate::sys::is_close_on_exec(other.as_raw_fd()));
    }
}

#[test]
fn a_descriptor_that_is_not_open_cannot_be_kept() {
    for close_range in [false, Features::from_environment().close_range] {
        let mut spawner = spawner(Features {
            close_range,
            ..Features::from_environment()
        });
        let table = EnvTable::new(&[], &[], entry("T=t"));
        let mut refused = worker(&["true"], [Stdio::Null, Stdio::Null, Stdio::Null]);
        refused.keep_fds = vec![901];
        let failure = start(&mut spawner, refused, &table).err().unwrap();
        assert_eq!((failure.stage, failure.errno), (Stage::Stdio, libc::EBADF));
    }
}

#[test]
fn a_stream_that_cannot_be_had_is_named() {
    let root = FakeRoot::new();
    let absent = c_string(root.path().join("absent"));
    let gone = {
        let (read, _) = rustix::pipe::pipe().unwrap();
        // Moved to a number so high that no other code gets it meanwhile.
        let high = rustix::io::fcntl_dupfd_cloexec(&read, 900).unwrap();
        high.as_raw_fd()
    };
    let input = Stdio::File {
        path: absent.clone(),
        append: false,
    };
    for (stdin, errno, path) in [
        (input, libc::ENOENT, Some(absent)),
        (Stdio::Fd(gone), libc::EBADF, None),
    ] {
        let mut spawner = spawner(Features::from_environment());
        let table = EnvTable::new(&[], &[], entry("T=t"));
        let refused = worker(&["true"], [stdin, Stdio::Null, Stdio::Null]);
        let failure = start(&mut spawner, refused, &table).err().unwrap();
        let expected = StartFailure {
            stage: Stage::Stdio,
            errno,
            path,
        };
        assert_eq!(failure, expected);
    }
}

#[test]
fn a_failed_start_holds_no_stream_open() {
    let (read, write) = rustix::pipe::pipe().unwrap();
    rustix::io::ioctl_fionbio(&read, true).unwrap();
    let mut spawner = lone_spawner(Features::from_environment());
    let table = EnvTable::new(&[], &[], entry("T=t"));
    let absent = Stdio::File {
        path: c"/proc/self/absent".into(),
        append: false,
    };
    let refused = worker(&["true"], [Stdio::Null, Stdio::Fd(write.as_raw_fd()), absent]);
    assert!(start(&mut spawner, refused, &table).is_err());
    drop(write);
    let mut byte = [0];
    assert_eq!(rustix::io::read(&read, &mut byte), Ok(0));
}

/// Sets the flag when it is dropped, even in a panic.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Another thread opens and closes descriptors, which may take the number that the worker's pidfd is about to get.
#[test]
fn a_death_is_heard_of_whatever_other_threads_open_and_close() {
    let features = Features::from_environment();
    if !features.pidfd {
        return;
    }
    for close_range in [false, features.close_range] {
        let mut spawner = spawner(Features {
            close_range,
            ..features
        });
        let table = EnvTable::new(&[], &[], entry("T=t"));
        let poller = Poller::new().unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    drop(rustix::pipe::pipe());
                }
            });
            // Without this, the other thread would never end after a panic here.
            let _end = Done(&done);
            let mut unheard = 0;
            for _ in 0..500 {
                let quick = worker(&["true"], [Stdio::Null, Stdio::Null, Stdio::Null]);
                let started = start_watched(&mut spawner, quick, &table, &poller).unwrap();
                let heard = poller.wait(Some(Duration::from_secs(20))).unwrap();
                unheard += usize::from(heard.is_empty());
                waitpid(Pid::from_raw(started.pid), WaitOptions::empty()).unwrap();
                poller.forget(started.pidfd.unwrap());
                if unheard > 0 {
                    break;
                }
            }
            assert_eq!(unheard, 0, "close_range {close_range}");
        });
    }
}
