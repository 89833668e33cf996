//! Who hears a signal: a worker alone, or what it has started, too.

use std::time::Duration;

use dsl_engine::Event;
use dsl_engine::event::Ending;
use dsl_engine::spec::{LaunchSpec, SignalScope, Stdio, WorkerSpec};

use crate::harness::{Leash, PIPED, Scene, exited_count, group, output, sh, sleeper};

/// Starts a helper that tells what it hears, and ends by SIGTERM.
const HELPER: &str = "(trap 'echo helper heard usr1' USR1; trap 'echo helper heard term; exit' TERM; echo helper; \
                      while :; do sleep 0.02; done) &";

/// A worker that has a helper and then does this.
fn with_helper(then: &str) -> WorkerSpec {
    sh(&format!("{HELPER} {then}"), PIPED)
}

fn ranks(workers: Vec<WorkerSpec>) -> LaunchSpec {
    LaunchSpec {
        signal_scope: SignalScope::Rank,
        ..group(workers)
    }
}

/// Lines of a worker and its helper, in the order of the alphabet.
fn lines(scene: &Scene) -> Vec<String> {
    let text = String::from_utf8(scene.output(0, 1)).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn a_signal_that_is_passed_on_reaches_the_helpers_in_the_scope_of_the_group_alone() {
    let then =
        "trap 'echo rank heard usr1' USR1; trap 'exit 7' TERM; echo rank; while :; do sleep 0.02; done";
    for (scope, heard) in [
        (SignalScope::Group, &["helper heard usr1"][..]),
        (SignalScope::Rank, &[]),
    ] {
        let mut scene = Scene::started(LaunchSpec {
            signal_scope: scope,
            ..group(vec![with_helper(then)])
        });
        scene.until(|events| output(events, 0, 1).len() == "helper\nrank\n".len());
        scene.supervisor.signal(libc::SIGUSR1, None);
        let says_so = |events: &[Event]| {
            String::from_utf8(output(events, 0, 1))
                .unwrap()
                .contains("rank heard")
        };
        scene.until(says_so);
        // The helper handles this after the first signal, if that has reached it.
        scene.supervisor.stop(libc::SIGTERM, None);
        scene.end();
        assert_eq!(scene.exits()[0].ending, Ending::Code(7));
        let expected = [
            &["helper", "helper heard term"][..],
            heard,
            &["rank", "rank heard usr1"],
        ]
        .concat();
        assert_eq!(lines(&scene), expected, "{scope:?}");
    }
}

#[test]
fn helpers_live_until_their_rank_has_ended_and_not_until_the_others_have() {
    let leash = Leash::new();
    let slow = sh(
        "trap '' TERM; echo deaf; read line",
        [leash.stdin(), Stdio::Pipe, Stdio::Null],
    );
    let helped = with_helper("trap 'echo saved; exit 0' TERM; echo rank; while :; do sleep 0.02; done");
    let mut scene = Scene::started(ranks(vec![helped, slow]));
    scene.until(|events| {
        output(events, 0, 1).len() == "helper\nrank\n".len() && output(events, 1, 1) == b"deaf\n"
    });
    scene.supervisor.stop(libc::SIGTERM, None);
    scene.until_says(0, "saved\nhelper heard term\n");
    assert_eq!(exited_count(&scene.events), 1);
    leash.let_go();
    scene.end();
    assert!(!scene.has_killed());
}

#[test]
fn helpers_of_a_rank_that_does_not_end_are_asked_before_they_are_killed() {
    let deaf = with_helper("trap 'echo rank heard term' TERM; echo rank; while :; do sleep 0.02; done");
    let mut scene = Scene::started(ranks(vec![deaf, sleeper()]));
    scene.until(|events| output(events, 0, 1).len() == "helper\nrank\n".len());
    scene.supervisor.stop(libc::SIGTERM, Some(Duration::from_secs(2)));
    scene.end();
    assert!(scene.has_killed());
    let expected = ["helper", "helper heard term", "rank", "rank heard term"];
    assert_eq!(lines(&scene), expected);
}

/// Whatever the scope, they are no messages to a program.
#[test]
fn the_signals_of_job_control_are_for_the_helpers_too() {
    let helper = "(trap 'echo cont' CONT; echo helper; while :; do sleep 0.02; done) &";
    let worker = sh(&format!("{helper} trap '' USR1; echo rank; wait"), PIPED);
    let mut scene = Scene::started(ranks(vec![worker]));
    scene.until(|events| output(events, 0, 1).len() == "helper\nrank\n".len());
    scene.supervisor.signal(libc::SIGCONT, None);
    scene.until_says(0, "cont\n");
    scene.supervisor.kill();
    scene.end();
}
