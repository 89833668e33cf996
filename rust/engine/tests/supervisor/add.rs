//! Workers that are added to a running group, groups that stay open, and the limit of workers that run at once.

use std::path::Path;
use std::time::Duration;

use dsl_engine::Error;
use dsl_engine::event::{Ending, Event, Exit, Stage, StartFailure, StopReason};
use dsl_engine::spec::{Console, LaunchSpec, SpecError, Stdio, WorkerSpec};

use crate::harness::{
    Leash, PIPED, QUIET, Scene, Scratch, Witness, c_string, env, exited_count, group, leaves_behind, program,
    report_group, sh, sleeper, started_count,
};

/// A group that goes on when its workers have ended.
fn open(workers: Vec<WorkerSpec>) -> LaunchSpec {
    LaunchSpec {
        stays_open: true,
        ..report_group(workers)
    }
}

fn add(scene: &mut Scene, worker: WorkerSpec) -> usize {
    scene.supervisor.add(worker).unwrap()
}

fn is_refused(scene: &mut Scene) -> bool {
    matches!(scene.supervisor.add(sleeper()), Err(Error::Ending))
}

#[test]
fn an_added_worker_has_all_that_a_worker_has() {
    let leash = Leash::new();
    let first = sh("read line; exit 0", [leash.stdin(), Stdio::Null, Stdio::Null]);
    let mut scene = Scene::started(LaunchSpec {
        env: vec![env("PATH", b"/usr/bin:/bin"), env("SHARED", b"group")],
        ..group(vec![first])
    });
    scene.until(|events| started_count(events) == 1);
    let mut worker = sh("echo $SHARED $OWN; echo words >&2; exit 0", PIPED);
    worker.env = vec![env("OWN", b"own")];
    assert_eq!(add(&mut scene, worker), 1);
    scene.until(|events| exited_count(events) == 1);
    assert!(scene.supervisor.is_running());
    leash.let_go();
    let ended = scene.end();
    assert_eq!((ended.first_failure, ended.stragglers), (None, 0));
    assert_eq!(scene.output(1, 1), b"group own\n");
    assert_eq!(scene.output(1, 2), b"words\n");
    let order: Vec<usize> = scene.exits_in_order().iter().map(|exit| exit.worker).collect();
    assert_eq!(order, [1, 0]);
}

#[test]
fn the_first_failure_may_be_that_of_an_added_worker() {
    let mut scene = Scene::started(group(vec![sleeper(), sleeper()]));
    scene.until(|events| started_count(events) == 2);
    assert_eq!(add(&mut scene, sh("exit 7", QUIET)), 2);
    let ended = scene.end();
    assert_eq!(
        ended.first_failure.map(|exit| (exit.worker, exit.ending)),
        Some((2, Ending::Code(7)))
    );
    assert!(scene.exits()[..2].iter().all(|exit| exit.caused_by_stop));
}

/// G2, G8: the step and the error are as exact as for the first workers.
#[test]
fn an_added_worker_that_cannot_be_executed_says_why_and_the_others_go_on() {
    let mut scene = Scene::started(open(vec![sleeper()]));
    let absent = Path::new("/absent/program");
    add(&mut scene, program(&[absent], QUIET));
    scene.until(|events| exited_count(events) == 1);
    let failure = StartFailure {
        stage: Stage::Exec,
        errno: libc::ENOENT,
        path: Some(c_string(absent)),
    };
    assert_eq!(scene.exits_in_order()[0].ending, Ending::NotStarted(failure));
    assert_eq!(add(&mut scene, sh("exit 3", QUIET)), 2);
    scene.until(|events| exited_count(events) == 2);
    scene.supervisor.stop(libc::SIGTERM, None);
    scene.end();
    assert!(scene.exits()[0].caused_by_stop);
}

#[test]
fn a_worker_that_cannot_be_added_changes_nothing() {
    let mut scene = Scene::new();
    assert!(is_refused(&mut scene), "there is no group");
    scene.start(group(vec![sleeper()]));
    scene.until(|events| started_count(events) == 1);
    let empty = scene.supervisor.add(program(&[""], QUIET));
    assert!(
        matches!(empty, Err(Error::Spec(SpecError::EmptyArgv(1)))),
        "{empty:?}"
    );
    let mut foreign = sleeper();
    foreign.cpus = vec![99_999];
    let unbound = scene.supervisor.add(foreign);
    assert!(matches!(unbound, Err(Error::Binding(_))), "{unbound:?}");
    assert_eq!(add(&mut scene, sleeper()), 1);
    scene.until(|events| started_count(events) == 2);
    scene.supervisor.stop(libc::SIGTERM, None);
    assert!(is_refused(&mut scene), "it is being stopped");
    scene.end();
    assert!(is_refused(&mut scene), "it has ended");
    assert_eq!(scene.exits().len(), 2);
}

#[test]
fn an_open_group_waits_for_workers_and_ends_when_it_is_stopped() {
    let mut scene = Scene::started(open(Vec::new()));
    for code in 0..3 {
        assert_eq!(add(&mut scene, sh(&format!("exit {code}"), QUIET)), code);
        scene.until(|events| exited_count(events) == code + 1);
        assert!(scene.supervisor.is_running());
    }
    scene.supervisor.stop(libc::SIGTERM, Some(Duration::ZERO));
    let ended = scene.end();
    assert_eq!(ended.first_failure.map(|exit| exit.worker), Some(1));
    let reason = |event: &Event| match event {
        Event::Stopping { reason, .. } => Some(*reason),
        _ => None,
    };
    let reasons: Vec<StopReason> = scene.events.iter().filter_map(reason).collect();
    assert_eq!(reasons, [StopReason::Request]);
    scene.start(open(Vec::new()));
    scene.supervisor.kill();
    assert_eq!(scene.end().survivors.len(), 0);
}

/// G1: what an ended worker has left is ended with the group, however the group ends.
#[test]
fn nothing_of_an_added_worker_outlives_the_group() {
    for is_dropped in [false, true] {
        let (scratch, witness) = (Scratch::new(), Witness::new());
        let mut scene = Scene::started(open(Vec::new()));
        add(&mut scene, sh(&leaves_behind(&scratch, ""), witness.stdio()));
        add(&mut scene, program(&["/bin/sleep", "600"], witness.stdio()));
        scene.until(|events| started_count(events) == 2 && exited_count(events) == 1);
        if is_dropped {
            drop(scene);
        } else {
            scene.supervisor.kill();
            scene.end();
        }
        assert!(witness.no_one_holds(), "{is_dropped}");
    }
}

#[test]
fn the_lines_of_an_added_worker_go_to_its_log_file_even_if_no_other_worker_has_one() {
    let scratch = Scratch::new();
    let path = scratch.path().join("log");
    let log = |console: Option<Console>| Stdio::Log {
        path: Some(c_string(&path)),
        console,
        terminal: false,
        prefix: None,
    };
    let mut scene = Scene::started(open(vec![sh("exit 0", QUIET)]));
    for _ in 0..2 {
        add(
            &mut scene,
            sh("echo line", [Stdio::Null, log(None), Stdio::Stdout]),
        );
    }
    scene.until(|events| exited_count(events) == 3);
    scene.supervisor.stop(libc::SIGTERM, None);
    scene.end();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "line\nline\n");
}

#[test]
fn the_next_worker_starts_when_one_of_so_many_has_ended() {
    let leashes: Vec<Leash> = (0..3).map(|_| Leash::new()).collect();
    let held = |leash: &Leash| sh("read line; exit 0", [leash.stdin(), Stdio::Null, Stdio::Null]);
    let mut scene = Scene::started(LaunchSpec {
        at_once: Some(2),
        ..group(leashes.iter().map(held).collect())
    });
    add(&mut scene, sleeper());
    scene.until(|events| started_count(events) == 2);
    for (ended, leash) in leashes.into_iter().take(2).enumerate() {
        assert!(!scene.supervisor.is_starting(), "two run");
        leash.let_go();
        scene.until(|events| exited_count(events) == ended + 1);
        scene.until(|events| started_count(events) == ended + 3);
    }
    scene.supervisor.stop(libc::SIGTERM, None);
    scene.end();
    assert_eq!(scene.exits().len(), 4);
}

#[test]
fn a_program_that_cannot_be_executed_holds_no_place() {
    let absent = || program(&["/absent/program"], QUIET);
    let (scene, _) = Scene::run(LaunchSpec {
        at_once: Some(1),
        ..report_group(vec![
            absent(),
            absent(),
            sh("exit 0", QUIET),
            absent(),
            sh("exit 0", QUIET),
        ])
    });
    let statuses: Vec<u8> = scene.exits().iter().map(Exit::status).collect();
    assert_eq!(statuses, [127, 127, 0, 127, 0]);
}

#[test]
fn a_stop_cancels_those_that_had_no_place() {
    let mut scene = Scene::started(LaunchSpec {
        at_once: Some(1),
        ..group(vec![sleeper(), sleeper(), sleeper()])
    });
    scene.until(|events| started_count(events) == 1);
    scene.supervisor.stop(libc::SIGTERM, None);
    scene.end();
    let endings: Vec<Ending> = scene.exits().into_iter().map(|exit| exit.ending).collect();
    assert_eq!(endings[1..], [Ending::Cancelled, Ending::Cancelled]);
    let nobody = scene.supervisor.start(LaunchSpec {
        at_once: Some(0),
        ..group(vec![sleeper()])
    });
    assert!(
        matches!(nobody, Err(Error::Spec(SpecError::NoneAtOnce))),
        "{nobody:?}"
    );
}
