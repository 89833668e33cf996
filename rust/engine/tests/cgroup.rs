//! The job's cgroup on a real kernel. Every test is skipped, and says so, where no cgroup can be had.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]
#![expect(
    clippy::disallowed_types,
    reason = "the processes here are what the cgroup is tried on"
)]

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dsl_engine::cgroup::{Cgroup, job_name, keyed_value, sweep_in, sweep_stale};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_getfd};

const LIMIT: Duration = Duration::from_secs(20);
static NEXT: AtomicU32 = AtomicU32::new(0);

/// A job's cgroup that is emptied and removed at the end of the test, however it ends.
struct Job(Cgroup);

impl Job {
    fn new() -> Option<Self> {
        let token = format!("test{}", NEXT.fetch_add(1, Ordering::Relaxed));
        match Cgroup::create(&job_name(std::process::id(), &token)) {
            Ok(job) => Some(Self(job)),
            Err(reason) => {
                skip(&reason.to_string());
                None
            }
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.0.path().exists() {
            return;
        }
        let killed = self.0.kill();
        let removed = until(|| self.0.remove());
        assert!(
            std::thread::panicking() || (killed.is_ok() && removed),
            "{} is left",
            self.0.path().display()
        );
    }
}

#[expect(clippy::print_stderr, reason = "the reason must be seen")]
fn skip(reason: &str) {
    eprintln!("skipped: {reason}");
}

/// Asks again until it is so or the limit has passed. For kernel states that no descriptor reports.
fn until(mut is_so: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        if is_so() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

/// Waits on the events of an attempt, as the engine does.
fn wait_until_empty(attempt: &Cgroup) {
    let timeout = Timespec {
        tv_sec: 20,
        tv_nsec: 0,
    };
    while attempt.populated().unwrap() {
        let events = attempt.events();
        let mut fds = [PollFd::new(&events, PollFlags::PRI)];
        assert_ne!(
            poll(&mut fds, Some(&timeout)).unwrap(),
            0,
            "the kernel did not report that it is empty"
        );
    }
}

/// Moves a process in. Workers are born inside.
fn join(attempt: &Cgroup, child: &Child) {
    fs::write(attempt.path().join("cgroup.procs"), child.id().to_string()).unwrap();
}

/// How many processes are in it.
fn members(attempt: &Cgroup) -> usize {
    let pids = fs::read_to_string(attempt.path().join("cgroup.procs")).unwrap();
    pids.lines().count()
}

fn start(program: &str, arguments: &[&str]) -> Child {
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn sleeper() -> Child {
    start("sleep", &["600"])
}

fn reap(mut child: Child) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap())
}

#[test]
fn an_attempt_holds_what_joins_it_and_one_write_kills_it() {
    let Some(job) = Job::new() else { return };
    let attempt = job.0.attempt(0).unwrap();
    assert!(!attempt.populated().unwrap());
    let children = [sleeper(), sleeper()];
    for child in &children {
        join(&attempt, child);
    }
    assert!(attempt.populated().unwrap() && job.0.populated().unwrap());
    attempt.kill().unwrap();
    for child in children {
        assert_eq!(reap(child), Some(9));
    }
    wait_until_empty(&attempt);
    assert!(until(|| attempt.remove()));
    assert!(attempt.remove(), "what is gone counts as removed");
}

#[test]
fn children_that_leave_their_session_are_killed_with_the_job() {
    let Some(job) = Job::new() else { return };
    let attempt = job.0.attempt(0).unwrap();
    // The shell waits for a line, so that it forks only after it has joined.
    let mut shell = Command::new("sh")
        .args([
            "-c",
            "read line; setsid sh -c 'trap \"\" TERM; sleep 600 & sleep 600' & exec sleep 600",
        ])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    join(&attempt, &shell);
    drop(shell.stdin.take());
    assert!(until(|| members(&attempt) >= 4));
    job.0.kill().unwrap();
    assert_eq!(reap(shell), Some(9));
    wait_until_empty(&attempt);
    assert_eq!(members(&attempt), 0);
}

#[test]
fn each_attempt_is_fresh_and_a_number_is_never_reused() {
    let Some(job) = Job::new() else { return };
    let first = job.0.attempt(0).unwrap();
    first.kill().unwrap();
    assert_eq!(job.0.attempt(0).unwrap_err().kind(), ErrorKind::AlreadyExists);
    let second = job.0.attempt(1).unwrap();
    assert_ne!(first.path(), second.path());
    let child = sleeper();
    join(&second, &child);
    first.kill().unwrap();
    assert!(
        second.populated().unwrap(),
        "another attempt's kill must not reach it"
    );
    second.kill().unwrap();
    assert_eq!(reap(child), Some(9));
}

#[test]
fn a_cgroup_in_use_is_not_removed_but_its_empty_siblings_are() {
    let Some(job) = Job::new() else { return };
    let (first, second) = (job.0.attempt(0).unwrap(), job.0.attempt(1).unwrap());
    let child = sleeper();
    join(&second, &child);
    // It does not wait: the process lives.
    assert!(!job.0.remove() && !second.remove());
    assert!(!first.path().exists() && second.path().exists());
    job.0.kill().unwrap();
    assert_eq!(reap(child), Some(9));
    assert!(until(|| job.0.remove()) && !job.0.path().exists());
}

#[test]
fn cgroups_that_workers_made_below_are_counted_and_removed_too() {
    let Some(job) = Job::new() else { return };
    let attempt = job.0.attempt(0).unwrap();
    let inner = Cgroup::create_in(attempt.path(), "dsl-nested")
        .unwrap()
        .attempt(0)
        .unwrap();
    let child = sleeper();
    join(&inner, &child);
    assert!(attempt.populated().unwrap());
    attempt.kill().unwrap();
    assert_eq!(reap(child), Some(9));
    wait_until_empty(&attempt);
    assert!(until(|| attempt.remove()));
}

#[test]
fn another_process_of_the_job_can_kill_it_by_its_path() {
    let Some(job) = Job::new() else { return };
    let attempt = job.0.attempt(0).unwrap();
    let child = sleeper();
    join(&attempt, &child);
    Cgroup::open_existing(job.0.path()).unwrap().kill().unwrap();
    assert_eq!(reap(child), Some(9));
    assert_eq!(
        Cgroup::open_existing(&job.0.path().join("none"))
            .unwrap_err()
            .kind(),
        ErrorKind::NotFound
    );
}

#[test]
fn no_descriptor_outlives_an_exec() {
    let Some(job) = Job::new() else { return };
    let attempt = job.0.attempt(0).unwrap();
    assert!(fcntl_getfd(attempt.dir()).unwrap().contains(FdFlags::CLOEXEC));
    assert!(fcntl_getfd(attempt.events()).unwrap().contains(FdFlags::CLOEXEC));
    let output = Command::new("readlink")
        .arg("-f")
        .args((3..256).map(|fd| format!("/proc/self/fd/{fd}")))
        .output();
    let shown = String::from_utf8_lossy(&output.unwrap().stdout).into_owned();
    assert!(!shown.contains(&*job.0.path().to_string_lossy()), "{shown}");
}

#[test]
fn out_of_memory_kills_are_counted_only_with_the_controller() {
    let Some(job) = Job::new() else { return };
    let attempt = job.0.attempt(0).unwrap();
    let counted = attempt.path().join("memory.events").exists();
    assert_eq!(attempt.oom_kills(), counted.then_some(0));
    assert_eq!(
        keyed_value(b"low 0\noom 3\noom_kill 2\noom_group_kill 0\n", b"oom_kill"),
        Some(2)
    );
    assert_eq!(keyed_value(b"oom_kills 2\noom_kill x\n", b"oom_kill"), None);
}

fn dead_pid() -> u32 {
    let mut child = start("true", &[]);
    child.wait().unwrap();
    child.id()
}

#[test]
fn only_empty_cgroups_of_dead_owners_are_swept() {
    let Some(job) = Job::new() else { return };
    let parent = job.0.path();
    let dead = dead_pid();
    let make = |name: &str| {
        let path = parent.join(name);
        fs::create_dir_all(path.join("a0")).unwrap();
        path
    };
    let token = |digit: char| digit.to_string().repeat(32);
    let own = token('0');
    let stale = make(&job_name(dead, &own));
    let mut stays = vec![
        make(&job_name(std::process::id(), &own)),
        make(&format!("dsl-{dead}")),
        make(&format!("dsl-{dead}-")),
        make(&format!("dsl-{dead}-modem")),
        make(&format!("dsl-0{dead}x-{own}")),
        make(&format!("dsl--{dead}-{own}")),
        make(&format!("other-{dead}-{own}")),
    ];
    if rustix::process::geteuid().is_root() {
        let others = make(&job_name(dead, &token('a')));
        std::os::unix::fs::chown(&others, Some(65534), None).unwrap();
        stays.push(others);
    }
    let busy = make(&job_name(dead, &token('b')));
    let child = sleeper();
    fs::write(busy.join("a0/cgroup.procs"), child.id().to_string()).unwrap();
    let locked = make(&job_name(dead, &token('c')));
    let owner = Cgroup::open_existing(&locked).unwrap();

    assert_eq!(sweep_in(parent), 1);
    assert!(!stale.exists());
    for path in stays.iter().chain([&busy, &locked]) {
        assert!(path.join("a0").exists(), "{path:?} is not ours to remove");
    }
    drop(owner);
    job.0.kill().unwrap();
    reap(child);
    assert!(until(|| {
        sweep_in(parent);
        !busy.exists() && !locked.exists()
    }));
}

#[test]
fn a_sweep_of_the_own_cgroup_leaves_a_living_job_alone() {
    let Some(job) = Job::new() else { return };
    sweep_stale();
    assert!(job.0.path().exists());
}

fn refused(parent: &Path, name: &str) -> String {
    Cgroup::create_in(parent, name).unwrap_err().to_string()
}

#[test]
fn a_place_where_no_cgroup_can_be_made_says_why() {
    let directory = std::env::temp_dir();
    let message = refused(&directory, "dsl-test");
    assert!(
        message.starts_with("no cgroup for the job: cannot make ")
            && message.ends_with("not in a cgroup v2 hierarchy")
    );
    assert!(!directory.join("dsl-test").exists());
    assert!(refused(Path::new("/nonexistent"), "dsl-test").contains("No such file or directory"));
    for name in ["", ".", "..", "a/b", "a\nb"] {
        assert!(
            refused(&directory, name).ends_with("cannot name a directory"),
            "{name:?}"
        );
    }
    let Some(job) = Job::new() else { return };
    fs::create_dir(job.0.path().join("taken")).unwrap();
    assert!(refused(job.0.path(), "taken").contains("File exists"));
    assert!(job.0.path().join("taken").exists(), "it was not ours to remove");
}

#[test]
fn a_place_in_a_threaded_cgroup_is_refused_and_left_clean() {
    let Some(job) = Job::new() else { return };
    let threaded: PathBuf = job.0.path().join("threads");
    fs::create_dir(&threaded).unwrap();
    if let Err(error) = fs::write(threaded.join("cgroup.type"), "threaded") {
        return skip(&format!("no threaded cgroup: {error}"));
    }
    let message = refused(&threaded, "dsl-test");
    assert!(message.ends_with("its type is \"domain invalid\""), "{message}");
    assert!(!threaded.join("dsl-test").exists());
}
