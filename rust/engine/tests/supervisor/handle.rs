//! A supervisor on a thread of its own.

use std::time::Duration;

use dsl_engine::event::Ending;
use dsl_engine::spec::{LaunchSpec, Stdio};
use dsl_engine::{Error, Event, Handle, Waited};

use crate::harness::{
    LIMIT, Leash, PIPED, QUIET, Witness, ended, group, output, program, sh, sleeper, started_count,
};

fn started(spec: LaunchSpec) -> Handle {
    let handle = Handle::new(None).unwrap();
    handle.start(spec).unwrap();
    handle
}

fn next(handle: &Handle, routine: bool) -> Vec<Event> {
    match handle.wait(Some(LIMIT), routine, || false).unwrap() {
        Waited::Events(events) => events,
        other => panic!("{other:?}"),
    }
}

/// All events up to one that is wanted.
fn until(handle: &Handle, is_so: impl Fn(&[Event]) -> bool) -> Vec<Event> {
    let mut events = Vec::new();
    while !is_so(&events) {
        events.extend(next(handle, true));
    }
    events
}

fn has_ended(events: &[Event]) -> bool {
    matches!(events.last(), Some(Event::Ended { .. }))
}

#[test]
fn a_group_runs_while_nobody_waits_and_its_events_keep() {
    let witness = Witness::new();
    let handle = started(group(vec![
        sh("exit 0", witness.stdio()),
        sh("exit 3", witness.stdio()),
    ]));
    let events = until(&handle, has_ended);
    assert!(witness.no_one_holds());
    assert_eq!(
        ended(&events).first_failure.map(|exit| exit.ending),
        Some(Ending::Code(3))
    );
}

#[test]
fn a_wait_for_nothing_ends_with_its_time() {
    let handle = Handle::new(None).unwrap();
    for timeout in [Duration::ZERO, Duration::from_millis(20)] {
        let waited = handle.wait(Some(timeout), true, || false).unwrap();
        assert!(matches!(waited, Waited::TimedOut), "{waited:?}");
    }
}

#[test]
fn a_wait_is_interrupted_by_what_is_pending_before_it_looks() {
    let handle = started(group(vec![sh("exit 0", QUIET)]));
    let waited = handle.wait(None, true, || true).unwrap();
    assert!(matches!(waited, Waited::Interrupted), "{waited:?}");
    assert!(has_ended(&until(&handle, has_ended)));
}

#[test]
fn starts_and_clean_exits_wake_only_those_who_ask() {
    let leash = Leash::new();
    let handle = Handle::new(None).unwrap();
    let short = Some(Duration::from_millis(30));
    assert!(matches!(
        handle.wait(Some(Duration::ZERO), false, || false).unwrap(),
        Waited::TimedOut
    ));
    let waits = sh("read line; exit 0", [leash.stdin(), Stdio::Null, Stdio::Null]);
    handle.start(group(vec![waits, sh("exit 0", QUIET)])).unwrap();
    assert!(matches!(
        handle.wait(short, false, || false).unwrap(),
        Waited::TimedOut
    ));
    let events = until(&handle, |events| started_count(events) == 2);
    assert!(!has_ended(&events));
    assert!(matches!(
        handle.wait(Some(Duration::ZERO), false, || false).unwrap(),
        Waited::TimedOut | Waited::Events(_)
    ));
    leash.let_go();
    assert!(
        has_ended(&next(&handle, false)),
        "the end is told at once, with all that came before"
    );
}

#[test]
fn a_failure_wakes_everybody() {
    let handle = Handle::new(None).unwrap();
    assert!(matches!(
        handle.wait(Some(Duration::ZERO), false, || false).unwrap(),
        Waited::TimedOut
    ));
    let leash = Leash::new();
    let stubborn = sh("trap '' TERM; echo ready; exec sleep 600", PIPED);
    let fails = sh("read line; exit 3", [leash.stdin(), Stdio::Null, Stdio::Null]);
    handle.start(group(vec![stubborn, fails])).unwrap();
    until(&handle, |events| output(events, 0, 1) == b"ready\n");
    leash.let_go();
    let mut events = Vec::new();
    let failed = |event: &Event| matches!(event, Event::Exited(exit) if exit.worker == 1);
    while !events.iter().any(failed) {
        events.extend(next(&handle, false));
    }
    handle.kill().unwrap();
    until(&handle, has_ended);
}

#[test]
fn a_wait_is_ended_by_what_another_thread_does() {
    let handle = started(group(vec![sleeper(), sleeper()]));
    let events = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| until(&handle, has_ended));
        handle.stop(libc::SIGTERM, None).unwrap();
        waiter.join().unwrap()
    });
    assert_eq!(ended(&events).first_failure, None);
}

#[test]
fn a_wait_is_ended_by_a_wake_and_the_group_goes_on() {
    let handle = started(group(vec![sleeper()]));
    until(&handle, |events| started_count(events) == 1);
    let waited = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| handle.wait(Some(LIMIT), true, || false).unwrap());
        handle.wake();
        waiter.join().unwrap()
    });
    assert!(matches!(waited, Waited::Woken), "{waited:?}");
    handle.kill().unwrap();
    until(&handle, has_ended);
}

/// G1: closing ends the job, and says so to whoever comes later.
#[test]
fn a_closed_supervisor_has_ended_its_group_and_answers_at_once() {
    let witness = Witness::new();
    let script = "trap '' TERM; setsid sleep 600 & exec sleep 600";
    let handle = started(group(vec![sh(script, witness.stdio())]));
    until(&handle, |events| started_count(events) == 1);
    handle.close();
    assert!(witness.no_one_holds());
    while !next(&handle, true).is_empty() {}
    assert!(
        matches!(handle.wait(None, false, || false).unwrap(), Waited::Events(events) if events.is_empty())
    );
    let refused = handle.start(group(vec![sleeper()]));
    assert!(matches!(refused, Err(Error::Closed)));
    for result in [
        handle.stop(libc::SIGTERM, None),
        handle.kill(),
        handle.signal(libc::SIGTERM, None),
    ] {
        assert!(matches!(result, Err(Error::Closed)));
    }
    handle.close();
}

#[test]
fn a_handle_dropped_on_another_thread_leaves_nothing() {
    let witness = Witness::new();
    let handle = started(group(vec![program(&["/bin/sleep", "600"], witness.stdio())]));
    until(&handle, |events| started_count(events) == 1);
    std::thread::spawn(move || drop(handle)).join().unwrap();
    assert!(witness.no_one_holds());
}

#[test]
fn a_refusal_comes_back_from_start() {
    let handle = started(group(vec![sleeper()]));
    assert!(matches!(handle.start(group(vec![sleeper()])), Err(Error::Busy)));
    handle.kill().unwrap();
    until(&handle, has_ended);
    assert!(matches!(handle.start(group(Vec::new())), Err(Error::Spec(_))));
    handle.start(group(vec![sh("exit 0", QUIET)])).unwrap();
    assert_eq!(ended(&until(&handle, has_ended)).first_failure, None);
}

#[test]
fn more_output_than_may_wait_arrives_whole() {
    const BYTES: usize = 24 << 20;
    // The backlog, the read that filled it, and the pipe of a worker that has ended.
    const MOST_WAITING: usize = (8 << 20) + (64 << 10) + (64 << 10);
    let script = format!("head -c {BYTES} /dev/zero");
    let handle = started(group(vec![sh(&script, PIPED)]));
    let mut total = 0;
    loop {
        let events = next(&handle, true);
        let bytes = output(&events, 0, 1).len();
        assert!(bytes <= MOST_WAITING, "{bytes} bytes waited");
        total += bytes;
        if has_ended(&events) {
            break;
        }
    }
    assert_eq!(total, BYTES);
}

fn blocked(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
}

#[test]
fn no_signal_of_the_host_program_lands_on_the_engines_thread() {
    let mine = || blocked(&std::fs::read_to_string("/proc/thread-self/status").unwrap());
    let before = mine();
    let handle = started(group(vec![program(&["/bin/cat", "/proc/self/status"], PIPED)]));
    assert_eq!(mine(), before);
    let threads: Vec<String> = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .map(|entry| std::fs::read_to_string(entry.unwrap().path().join("status")).unwrap_or_default())
        .filter(|status| status.starts_with("Name:\tdsl-engine\n"))
        .collect();
    let external = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGTERM,
        libc::SIGCHLD,
        libc::SIGWINCH,
    ];
    let external = external.iter().fold(0, |set, signal| set | 1 << (signal - 1));
    assert!(
        threads
            .iter()
            .any(|status| blocked(status) & external == external),
        "{threads:?}"
    );
    let events = until(&handle, has_ended);
    assert_eq!(
        blocked(&String::from_utf8(output(&events, 0, 1)).unwrap()),
        before
    );
    assert_eq!(mine(), before);
}
