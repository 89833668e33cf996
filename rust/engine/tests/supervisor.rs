//! A supervisor with real processes, without an agent: how groups end.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::time::{Duration, Instant};

use dsl_engine::event::{Ending, KillTier, Stage, StopReason};
use dsl_engine::spec::{SpecError, Stdio};
use dsl_engine::{Error, Event, Features, Supervisor};
use rustix::process::WaitIdOptions;

#[path = "supervisor/add.rs"]
mod add;
#[path = "supervisor/forks.rs"]
mod forks;
#[path = "supervisor/handle.rs"]
mod handle;
#[path = "supervisor/harness.rs"]
mod harness;
#[path = "supervisor/remains.rs"]
mod remains;
#[path = "supervisor/scope.rs"]
mod scope;
#[path = "supervisor/start.rs"]
mod start;
#[path = "supervisor/streams.rs"]
mod streams;

use harness::{GRACE, Leash, PIPED, QUIET, Scene, Scratch, Witness, leaves_behind, wait_until_child};
use harness::{exited_count, group, program, report_group, sh, sleeper, started_count};

fn by(number: i32) -> Ending {
    Ending::Signal { number, core: false }
}

/// G2: every ending is reported as what it was.
#[test]
fn codes_and_signals_are_told_apart() {
    let scripts = [
        ("exit 0", Ending::Code(0), 0),
        ("exit 3", Ending::Code(3), 3),
        ("exit 255", Ending::Code(255), 255),
        ("kill -TERM $$", by(libc::SIGTERM), 143),
        ("kill -KILL $$", by(libc::SIGKILL), 137),
        ("exit 143", Ending::Code(143), 143),
    ];
    let workers = scripts.iter().map(|(script, ..)| sh(script, QUIET));
    let (scene, ended) = Scene::run(report_group(workers.collect()));
    let exits = scene.exits();
    for (exit, (script, ending, status)) in exits.iter().zip(scripts) {
        assert_eq!((&exit.ending, exit.status()), (&ending, status), "{script}");
        assert_eq!(exit.pid, scene.pid(exit.worker));
        assert!(!exit.caused_by_stop && exit.max_rss > 0);
        assert!(exit.started.is_some_and(|started| started <= exit.ended));
    }
    let mut orders: Vec<usize> = exits.iter().map(|exit| exit.order).collect();
    orders.sort_unstable();
    assert_eq!(orders, [0, 1, 2, 3, 4, 5]);
    assert!(ended.survivors.is_empty() && ended.stragglers == 0 && ended.oom_kills == 0);
    assert_eq!(ended.stop_signal, None);
}

/// G3, G4: one failure ends the group, and the report tells it from what it caused.
#[test]
fn the_first_failure_stops_the_others_and_is_named() {
    let mut workers = vec![sleeper(), sleeper(), sh("exit 9", QUIET)];
    workers.push(sleeper());
    let (scene, ended) = Scene::run(group(workers));
    let exits = scene.exits();
    for victim in [0, 1] {
        assert_eq!(exits[victim].ending, by(libc::SIGTERM));
        assert!(exits[victim].caused_by_stop);
    }
    assert_eq!(ended.first_failure.as_ref(), Some(&exits[2]));
    assert_eq!((exits[2].ending.clone(), exits[2].order), (Ending::Code(9), 0));
    let stopping = Event::Stopping {
        reason: StopReason::Failure,
        signal: libc::SIGTERM,
        grace: GRACE,
    };
    assert_eq!(scene.events.iter().filter(|event| **event == stopping).count(), 1);
    assert!(!scene.has_killed());
}

#[test]
fn a_worker_that_cannot_start_stops_the_others_and_cancels_the_rest() {
    let mut workers = vec![sleeper(), program(&["/absent/program"], QUIET)];
    workers.extend((0..80).map(|_| sleeper())); // more than several threads start together
    let (scene, ended) = Scene::run(group(workers));
    let exits = scene.exits();
    assert_eq!(exits[0].ending, by(libc::SIGTERM));
    let last = exits.last().unwrap();
    assert_eq!(
        (&last.ending, last.status(), last.pid),
        (&Ending::Cancelled, 143, 0)
    );
    let first = ended.first_failure.unwrap();
    assert_eq!((first.worker, first.status()), (1, 127));
    assert!(matches!(first.ending, Ending::NotStarted(failure) if failure.stage == Stage::Exec));
}

#[test]
fn deaths_are_reported_in_their_order() {
    let leashes: Vec<Leash> = (0..3).map(|_| Leash::new()).collect();
    let worker = |(code, leash): (usize, &Leash)| {
        let stdio = [leash.stdin(), Stdio::Null, Stdio::Null];
        sh(&format!("read line; exit {}", code + 1), stdio)
    };
    let mut scene = Scene::started(report_group(leashes.iter().enumerate().map(worker).collect()));
    scene.until(|events| started_count(events) == 3);
    let mut leashes: Vec<Option<Leash>> = leashes.into_iter().map(Some).collect();
    for (before, index) in [2, 0, 1].into_iter().enumerate() {
        leashes[index].take().unwrap().let_go();
        scene.until(|events| exited_count(events) == before + 1);
    }
    let ended = scene.end();
    let order: Vec<_> = scene
        .exits_in_order()
        .iter()
        .map(|exit| (exit.worker, exit.order))
        .collect();
    assert_eq!(order, [(2, 0), (0, 1), (1, 2)]);
    assert_eq!(ended.first_failure.map(|exit| exit.worker), Some(2));
}

/// G3: what has died before the supervisor looks is no victim, and the kernel's order decides.
#[test]
fn deaths_seen_together_keep_the_kernels_order() {
    if !Features::from_environment().pidfd {
        eprintln!("skipped: without pidfds the order of deaths within a turn is unknown");
        return;
    }
    let leashes = [Leash::new(), Leash::new()];
    let stdio = |leash: &Leash| [leash.stdin(), Stdio::Null, Stdio::Null];
    let mut workers: Vec<_> = leashes
        .iter()
        .map(|leash| sh("read line; exit 1", stdio(leash)))
        .collect();
    workers.push(sleeper());
    let mut scene = Scene::started(group(workers));
    scene.until(|events| started_count(events) == 3);
    let [first, second] = leashes;
    for (index, leash) in [(1, second), (0, first)] {
        leash.let_go();
        wait_until_child(scene.pid(index), WaitIdOptions::EXITED);
    }
    let ended = scene.end();
    let exits = scene.exits_in_order();
    let told: Vec<_> = exits
        .iter()
        .map(|exit| (exit.worker, exit.caused_by_stop))
        .collect();
    assert_eq!(told, [(1, false), (0, false), (2, true)]);
    assert_eq!(ended.first_failure.map(|exit| exit.worker), Some(1));
}

#[test]
fn under_report_the_others_go_on() {
    let leash = Leash::new();
    let waits = sh("read line; exit 0", [leash.stdin(), Stdio::Null, Stdio::Null]);
    let mut scene = Scene::started(report_group(vec![sh("exit 4", QUIET), waits]));
    scene.until(|events| exited_count(events) == 1);
    leash.let_go();
    let ended = scene.end();
    assert_eq!(scene.exits()[1].ending, Ending::Code(0));
    assert_eq!(ended.first_failure.map(|exit| exit.status()), Some(4));
    assert!(
        !scene
            .events
            .iter()
            .any(|event| matches!(event, Event::Stopping { .. }))
    );
}

#[test]
fn whoever_ignores_the_stop_is_killed_after_the_grace_and_nobody_else() {
    let stubborn = sh("trap '' TERM; echo ready; exec sleep 600", PIPED);
    let mut scene = Scene::started(group(vec![stubborn, sleeper()]));
    scene.until_says(0, "ready\n");
    scene.until(|events| started_count(events) == 2);
    scene.supervisor.stop(libc::SIGTERM, None);
    scene.until(|events| exited_count(events) == 1);
    assert!(!scene.has_killed());
    let grace = Duration::from_millis(300);
    let start = Instant::now();
    scene.supervisor.stop(libc::SIGTERM, Some(grace));
    let ended = scene.end();
    assert!(start.elapsed() >= grace);
    let exits = scene.exits();
    assert_eq!(
        (&exits[0].ending, exits[0].caused_by_stop),
        (&by(libc::SIGKILL), true)
    );
    assert_eq!(
        (&exits[1].ending, exits[1].caused_by_stop),
        (&by(libc::SIGTERM), true)
    );
    assert_eq!(ended.first_failure, None);
    let killed = |event: &Event| matches!(event, Event::Killing { workers, .. } if *workers == [0]);
    assert!(scene.events.iter().any(killed), "{:?}", scene.events);
}

#[test]
fn the_last_words_of_a_worker_that_handles_the_stop_are_kept() {
    let polite = sh(
        "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.02; done",
        PIPED,
    );
    let mut scene = Scene::started(group(vec![polite]));
    scene.until_says(0, "ready\n");
    scene.supervisor.stop(libc::SIGTERM, None);
    scene.end();
    assert_eq!(scene.output(0, 1), b"ready\nbye\n");
    let exits = scene.exits();
    assert_eq!(
        (&exits[0].ending, exits[0].caused_by_stop),
        (&Ending::Code(5), true)
    );
}

#[test]
fn a_frozen_worker_hears_the_stop() {
    let mut scene = Scene::started(group(vec![sleeper()]));
    scene.until(|events| started_count(events) == 1);
    scene.supervisor.signal(libc::SIGSTOP, Some(0));
    wait_until_child(scene.pid(0), WaitIdOptions::STOPPED);
    scene.supervisor.stop(libc::SIGTERM, None);
    scene.end();
    assert_eq!(scene.exits()[0].ending, by(libc::SIGTERM));
    assert!(!scene.has_killed());
}

#[test]
fn a_stop_before_the_first_turn_starts_nobody() {
    let mut scene = Scene::started(group(vec![sleeper(), sleeper()]));
    scene.supervisor.stop(libc::SIGTERM, None);
    let ended = scene.end();
    assert_eq!(started_count(&scene.events), 0);
    assert!(
        scene
            .exits()
            .iter()
            .all(|exit| exit.ending == Ending::Cancelled && exit.caused_by_stop)
    );
    assert_eq!(ended.first_failure, None);
}

#[test]
fn a_kill_does_not_ask() {
    let witness = Witness::new();
    let stubborn = || sh("trap '' TERM INT HUP; sleep 600 & sleep 600", witness.stdio());
    let mut scene = Scene::started(group((0..20).map(|_| stubborn()).collect()));
    scene.until(|events| started_count(events) == 20);
    scene.supervisor.kill();
    scene.end();
    assert!(
        scene
            .exits()
            .iter()
            .all(|exit| exit.ending == by(libc::SIGKILL) && exit.caused_by_stop)
    );
    assert!(witness.no_one_holds());
    if !Features::from_environment().cgroup {
        let scan = |event: &Event| {
            matches!(
                event,
                Event::Killing {
                    tier: KillTier::Scan,
                    ..
                }
            )
        };
        assert!(scene.events.iter().any(scan));
    }
}

#[test]
fn a_signal_goes_to_one_or_to_all() {
    let mut scene = Scene::started(report_group(vec![sleeper(), sleeper(), sleeper()]));
    scene.until(|events| started_count(events) == 3);
    scene.supervisor.signal(libc::SIGUSR1, Some(3));
    scene.supervisor.signal(libc::SIGUSR1, Some(1));
    scene.until(|events| exited_count(events) == 1);
    scene.supervisor.signal(libc::SIGUSR1, Some(1));
    scene.supervisor.signal(libc::SIGUSR2, None);
    scene.end();
    let exits = scene.exits();
    let endings: Vec<_> = exits.iter().map(|exit| exit.ending.clone()).collect();
    assert_eq!(endings, [by(libc::SIGUSR2), by(libc::SIGUSR1), by(libc::SIGUSR2)]);
    assert!(exits.iter().all(|exit| !exit.caused_by_stop));
}

#[test]
fn a_realtime_signal_is_sent_too() {
    let leash = Leash::new();
    let worker = program(&["/bin/cat"], [leash.stdin(), Stdio::Null, Stdio::Null]);
    let mut scene = Scene::started(group(vec![worker]));
    scene.until(|events| started_count(events) == 1);
    scene.supervisor.signal(libc::SIGRTMIN() + 1, None);
    leash.let_go();
    scene.end();
    assert_eq!(scene.exits()[0].ending, by(libc::SIGRTMIN() + 1));
}

#[test]
fn one_group_at_a_time_and_another_after_it() {
    let mut scene = Scene::started(group(vec![sleeper()]));
    assert!(scene.supervisor.is_running());
    let second = || group(vec![sh("exit 2", QUIET)]);
    assert!(matches!(scene.supervisor.start(second()), Err(Error::Busy)));
    scene.until(|events| started_count(events) == 1);
    assert!(matches!(scene.supervisor.start(second()), Err(Error::Busy)));
    scene.supervisor.kill();
    assert!(scene.end().first_failure.is_none());
    for attempt in 1..4 {
        let scratch = Scratch::new();
        scene.start(group(vec![sh(&leaves_behind(&scratch, ""), QUIET), sleeper()]));
        scene.until(|events| exited_count(events) == 1);
        scene.supervisor.stop(libc::SIGTERM, None);
        let ended = scene.end();
        assert_eq!(
            (scene.exits().len(), ended.stragglers),
            (2, 1),
            "attempt {attempt}"
        );
        assert_eq!(scene.exits()[0].ending, Ending::Code(0));
    }
}

#[test]
fn a_spec_that_is_refused_starts_nothing_and_blocks_nothing() {
    let mut scene = Scene::new();
    let refused = scene.supervisor.start(group(Vec::new()));
    assert!(matches!(refused, Err(Error::Spec(SpecError::NoWorkers))));
    let mut unbound = sleeper();
    unbound.cpus = vec![dsl_engine::affinity::NUMBER_MAX];
    let refused = scene.supervisor.start(group(vec![sleeper(), unbound]));
    assert!(matches!(refused, Err(Error::Binding(text)) if text.starts_with("worker 1: ")));
    assert!(!scene.supervisor.is_running());
    scene.start(group(vec![sh("exit 0", QUIET)]));
    assert!(scene.end().first_failure.is_none());
}

#[test]
fn requests_without_a_group_are_forgotten() {
    let mut supervisor = Supervisor::new(None).unwrap();
    supervisor.stop(libc::SIGTERM, None);
    supervisor.kill();
    supervisor.signal(libc::SIGTERM, None);
    supervisor.set_reading(true);
    assert_eq!(supervisor.take_events().len(), 0);
    supervisor.start(group(vec![sh("exit 0", QUIET)])).unwrap();
    let mut scene = Scene {
        supervisor,
        events: Vec::new(),
    };
    scene.end();
    assert_eq!(scene.exits()[0].ending, Ending::Code(0));
}
