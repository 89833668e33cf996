//! What outlives a worker, and what does not belong to the job.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use dsl_engine::event::Ending;
use dsl_engine::spec::{LaunchSpec, Stdio};
use rustix::process::WaitIdOptions;

use crate::harness::{
    QUIET, Scene, Scratch, Witness, group, leaves_behind, output, sh, sleeper, started_count,
    wait_until_child,
};

/// G1: leaving the session and the parent does not mean leaving the job.
#[test]
fn a_daemon_left_behind_is_ended_and_counted() {
    let (scratch, witness) = (Scratch::new(), Witness::new());
    let worker = sh(&leaves_behind(&scratch, ""), witness.stdio());
    let (scene, ended) = Scene::run(group(vec![worker]));
    assert!(witness.no_one_holds());
    assert_eq!((ended.stragglers, ended.survivors.len()), (1, 0));
    assert_eq!(scene.exits()[0].ending, Ending::Code(0));
    assert!(!scene.has_killed());
}

/// G1: nor does ignoring the signal that asks.
#[test]
fn a_daemon_that_ignores_the_question_is_killed_after_the_grace() {
    let (scratch, witness) = (Scratch::new(), Witness::new());
    let worker = sh(&leaves_behind(&scratch, "trap \"\" TERM;"), witness.stdio());
    let (scene, ended) = Scene::run(LaunchSpec {
        grace: Duration::from_millis(100),
        ..group(vec![worker])
    });
    assert!(witness.no_one_holds() && scene.has_killed());
    assert_eq!((ended.stragglers, ended.survivors.len()), (1, 0));
}

/// G1: the end of the supervisor is the end of the job.
#[test]
fn a_supervisor_dropped_in_the_middle_leaves_nothing() {
    let (scratch, witness) = (Scratch::new(), Witness::new());
    let daemon = leaves_behind(&scratch, "trap \"\" TERM;");
    let worker = sh(&format!("{daemon}; echo up >&2; exec sleep 600"), {
        let [stdin, stdout, _] = witness.stdio();
        [stdin, stdout, Stdio::Pipe]
    });
    let mut scene = Scene::started(group(vec![worker, sleeper()]));
    scene.until(|events| output(events, 0, 2) == b"up\n");
    drop(scene);
    assert!(witness.no_one_holds());
}

/// G1: nobody else's child is waited for or signalled.
#[test]
#[expect(clippy::disallowed_types, reason = "a child that is not the engine's")]
fn children_of_the_host_program_are_left_alone() {
    let command = |name: &str| std::process::Command::new(name);
    let mut bystander = command("/bin/sleep").arg("600").spawn().unwrap();
    let mut dead = command("/bin/sh").args(["-c", "exit 6"]).spawn().unwrap();
    wait_until_child(dead.id() as i32, WaitIdOptions::EXITED);
    let scratch = Scratch::new();
    let worker = sh(&leaves_behind(&scratch, ""), QUIET);
    let (_, ended) = Scene::run(group(vec![worker]));
    assert_eq!(ended.stragglers, 1);
    let mut scene = Scene::started(group(vec![sleeper()]));
    scene.until(|events| started_count(events) == 1);
    scene.supervisor.kill();
    scene.end();
    assert_eq!(dead.wait().unwrap().code(), Some(6));
    assert_eq!(bystander.try_wait().unwrap(), None);
    bystander.kill().unwrap();
    assert_eq!(bystander.wait().unwrap().signal(), Some(libc::SIGKILL));
}
