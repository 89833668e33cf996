use std::collections::HashSet;
use std::os::fd::AsFd;

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};

use super::*;
use crate::event::Stage;
use crate::features::Features;
use crate::orphans::sharing;
use crate::poller::is_readable;
use crate::spawn::open_files_limit;
use crate::spawn::tests::{c_string, entry, worker};
use crate::spec::Stdio;
use crate::sys::signal::{self, SignalSet};

/// Starts these programs, 0 first, on so many threads.
fn start(threads: usize, programs: &[&[&str]]) -> (Helpers, Vec<Outcome>) {
    signal::set_mask(SignalSet::ALL);
    let features = Features {
        threads: Some(threads),
        ..Features::from_environment()
    };
    let mut own = Spawner::new(features, SignalSet::default(), open_files_limit()).unwrap();
    own.prepare().unwrap();
    let mut helpers = Helpers::default();
    helpers.prepare(&own, programs.len());
    assert_eq!(helpers.count(), threads - 1);
    let null = || [Stdio::Null, Stdio::Null, Stdio::Null];
    let shared = Shared {
        spec: Arc::new(LaunchSpec {
            workers: programs.iter().map(|argv| worker(argv, null())).collect(),
            ..LaunchSpec::default()
        }),
        env: Arc::new(EnvTable::new(&[], &[], entry("T=t"))),
        cgroup: None,
        foreground_group: None,
        poller: Arc::new(Poller::new().unwrap()),
        token: |worker| worker as u64,
    };
    let mut batch = helpers.begin(&own, shared, 0..programs.len());
    let outcomes = std::iter::from_fn(|| batch.next(&mut own)).collect();
    (helpers, outcomes)
}

fn end(outcomes: Vec<Outcome>) {
    for started in outcomes.into_iter().filter_map(|outcome| outcome.result.ok()) {
        let pid = Pid::from_raw(started.pid).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
        waitpid(Some(pid), WaitOptions::empty()).unwrap();
    }
}

/// Starts sleepers until this thread has started some of them and another one the others. Returns how many are this
/// thread's, too.
fn start_on_several(threads: usize, count: usize) -> (Helpers, Vec<Outcome>, usize) {
    // On a busy machine one thread may be done with all before another one has a processor.
    for _ in 0..100 {
        let (helpers, outcomes) = start(threads, &vec![&["sleep", "60"][..]; count]);
        let pids = outcomes
            .iter()
            .map(|outcome| outcome.result.as_ref().ok().unwrap().pid);
        let pids: HashSet<i32> = pids.collect();
        let children = std::fs::read_to_string("/proc/thread-self/children").unwrap();
        let children = children.split_whitespace().map(|pid| pid.parse().unwrap());
        let own = children.filter(|pid| pids.contains(pid)).count();
        if (1..count).contains(&own) {
            return (helpers, outcomes, own);
        }
        end(outcomes);
    }
    panic!("one thread has started all of them each time");
}

#[test]
fn several_threads_start_workers_and_the_outcomes_come_in_order() {
    let _children = sharing::beside_others();
    let (_helpers, outcomes, _) = start_on_several(3, 60);
    let order: Vec<usize> = outcomes.iter().map(|outcome| outcome.worker).collect();
    assert_eq!(order, (0..60).collect::<Vec<_>>());
    end(outcomes);
}

#[test]
fn a_worker_that_cannot_start_lets_no_other_start() {
    let _children = sharing::beside_others();
    let mut programs = [&["sleep", "60"][..]; 400];
    programs[7] = &["/nowhere/x"];
    let (_helpers, outcomes) = start(2, &programs);
    assert!((8..400).contains(&outcomes.len()), "{}", outcomes.len());
    for (worker, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.worker, worker);
        let failed = outcome.result.as_ref().err();
        assert_eq!(failed.is_some(), worker == 7);
        if let Some(failure) = failed {
            assert_eq!((failure.stage, failure.errno), (Stage::Exec, libc::ENOENT));
            assert_eq!(failure.path, Some(c_string("/nowhere/x")));
        }
    }
    end(outcomes);
}

#[test]
fn workers_die_with_the_threads_that_have_started_them_and_not_before() {
    let _children = sharing::beside_others();
    let (helpers, outcomes, own) = start_on_several(4, 64);
    let open = |outcome: &Outcome| {
        let pid = Pid::from_raw(outcome.result.as_ref().ok().unwrap().pid).unwrap();
        pidfd_open(pid, PidfdFlags::empty()).unwrap()
    };
    let pidfds: Vec<_> = outcomes.iter().map(open).collect();
    let ended = || pidfds.iter().filter(|pidfd| is_readable(pidfd.as_fd())).count();
    assert_eq!(ended(), 0);
    drop(helpers);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while ended() < 64 - own && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(ended(), 64 - own, "the workers of our own thread live");
    end(outcomes);
}
