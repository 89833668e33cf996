//! Fork servers that never serve.

use std::path::Path;
use std::time::Duration;

use dsl_engine::event::Ending;
use dsl_engine::forkserver::Patience;
use dsl_engine::spec::{Fork, WorkerSpec};
use dsl_engine::{Event, Features};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::WaitIdOptions;

use crate::harness::{LIMIT, QUIET, Scene, Scratch, group, sh, wait_until_child};

/// Nobody waits for ever for a server that does not hear of its own timer.
#[test]
fn one_that_is_frozen_while_it_imports_is_done_without_and_killed() {
    if !Features::from_environment().pidfd {
        eprintln!("skipped: without pidfds there are no fork servers");
        return;
    }
    let scratch = Scratch::new();
    let fifo = scratch.path().join("pid");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let frozen = format!(
        "echo while it imported x; echo $$ >{}; kill -STOP $$",
        fifo.display()
    );
    let mut scene = Scene::new();
    let server = group(vec![sh(&frozen, QUIET)]);
    let patience = Patience {
        slow: Duration::from_millis(100),
        lost: LIMIT,
    };
    let number = scene.supervisor.start_fork_server(server, patience).unwrap();
    let pid = std::fs::read_to_string(fifo).unwrap();
    wait_until_child(pid.trim().parse().unwrap(), WaitIdOptions::STOPPED);
    let worker = WorkerSpec {
        fork: Some(Fork {
            server: number,
            entry: 1,
        }),
        ..sh("exit 0", QUIET)
    };
    scene.start(group(vec![worker.clone(), worker]));
    let ended = scene.end();
    assert_eq!(ended.first_failure, None);
    assert!(scene.exits().iter().all(|exit| exit.ending == Ending::Code(0)));
    let texts: Vec<&str> = scene
        .events
        .iter()
        .filter_map(|event| match event {
            Event::ForkServerSlow {
                server: 0, pid: slow, ..
            } => (slow.to_string() == pid.trim()).then_some("slow"),
            Event::ForkServerLost { server: 0, text, .. } => Some(text.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(
        texts,
        ["slow", "was stopped and did not go on: while it imported x"]
    );
    let process = format!("/proc/{}", pid.trim());
    scene.until(|_| !Path::new(&process).exists());
}
