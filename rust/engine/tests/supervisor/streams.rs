//! Where the streams of workers go.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;

use dsl_engine::Event;
use dsl_engine::spec::{LaunchSpec, Stdio};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::harness::{
    LIMIT, Leash, PIPED, QUIET, Scene, Scratch, c_string, group, program, report_group, sh, started_count,
};

/// 1 MiB in which no two neighbouring pages are the same.
fn pattern() -> Vec<u8> {
    (0..1u32 << 20)
        .map(|at| (at ^ at >> 8 ^ at >> 13) as u8)
        .collect()
}

fn file(path: &std::path::Path, append: bool) -> Stdio {
    Stdio::File {
        path: c_string(path),
        append,
    }
}

#[test]
fn a_pipe_brings_every_byte_and_one_end_for_each_stream() {
    let scratch = Scratch::new();
    let data = pattern();
    let input = scratch.file("input", &data, 0o600);
    let script = format!("cat {}; echo oops >&2", input.display());
    let (scene, _) = Scene::run(group(vec![sh(&script, PIPED), sh(":", PIPED)]));
    assert!(scene.output(0, 1) == data, "stdout differs");
    assert_eq!(scene.output(0, 2), b"oops\n");
    for (worker, stream) in [(0, 1), (0, 2), (1, 1), (1, 2)] {
        let sizes: Vec<usize> = scene
            .events
            .iter()
            .filter_map(|event| match event {
                Event::Output {
                    worker: from,
                    stream: through,
                    data,
                } => ((*from, *through) == (worker, stream)).then_some(data.len()),
                _ => None,
            })
            .collect();
        let ends = sizes.iter().filter(|size| **size == 0).count();
        assert_eq!(
            (ends, sizes.last()),
            (1, Some(&0)),
            "worker {worker} stream {stream}"
        );
    }
}

#[test]
fn a_pipe_is_read_to_its_end_though_the_worker_is_killed() {
    let mut scene = Scene::started(group(vec![sh("printf kept; kill -KILL $$", PIPED)]));
    scene.end();
    assert_eq!(scene.output(0, 1), b"kept");
}

/// G6: a worker writes its files itself.
#[test]
fn files_hold_exactly_what_was_written() {
    let scratch = Scratch::new();
    let data = pattern();
    let input = scratch.file("input", &data, 0o600);
    let path = |name: &str| scratch.path().join(name);
    let kept = scratch.file("kept", b"before\n", 0o600);
    let emptied = scratch.file("emptied", b"before\n", 0o600);
    let copy = |output: Stdio| program(&["/bin/cat"], [file(&input, false), output, Stdio::Null]);
    let both = sh(
        "printf one; printf two >&2; printf three",
        [Stdio::Null, file(&path("both"), false), Stdio::Stdout],
    );
    let apart = sh(
        "printf out; printf err >&2",
        [Stdio::Null, file(&path("out"), false), file(&path("err"), false)],
    );
    let workers = vec![
        copy(file(&path("fresh"), false)),
        copy(file(&kept, true)),
        copy(file(&emptied, false)),
        both,
        apart,
    ];
    let (scene, ended) = Scene::run(group(workers));
    assert_eq!(ended.first_failure, None);
    let read = |name: &str| std::fs::read(path(name)).unwrap();
    assert!(read("fresh") == data && read("emptied") == data);
    assert_eq!(read("kept"), [b"before\n", &data[..]].concat());
    assert_eq!((&read("out")[..], &read("err")[..]), (&b"out"[..], &b"err"[..]));
    assert_eq!(read("both"), b"onetwothree");
    let mode = std::fs::metadata(path("fresh")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7137, 0, "{mode:o}");
    assert!(
        !scene
            .events
            .iter()
            .any(|event| matches!(event, Event::Output { .. }))
    );
}

#[test]
fn one_file_can_take_the_streams_of_many_workers() {
    let scratch = Scratch::new();
    let all = scratch.path().join("all");
    std::fs::write(&all, "").unwrap();
    let worker = |number: usize| {
        sh(
            &format!("echo {number}"),
            [Stdio::Null, file(&all, true), Stdio::Stdout],
        )
    };
    Scene::run(group((10..30).map(worker).collect()));
    let mut lines: Vec<usize> = std::fs::read_to_string(&all)
        .unwrap()
        .lines()
        .map(|line| line.parse().unwrap())
        .collect();
    lines.sort_unstable();
    assert!(lines.into_iter().eq(10..30));
}

#[test]
fn a_stream_that_cannot_be_opened_fails_its_worker_only() {
    let scratch = Scratch::new();
    let absent = scratch.path().join("absent/log");
    let refused = program(&["/bin/true"], [Stdio::Null, file(&absent, false), Stdio::Null]);
    let (scene, _) = Scene::run(report_group(vec![
        refused,
        sh("echo fine", PIPED),
        sh(":", QUIET),
    ]));
    let exits = scene.exits();
    let statuses: Vec<u8> = exits.iter().map(dsl_engine::event::Exit::status).collect();
    assert_eq!(statuses, [126, 0, 0]);
    assert_eq!(scene.output(1, 1), b"fine\n");
}

/// A worker that speaks when it is let go, says so to `spoken`, and goes on living.
fn speaker(leash: &Leash, spoken: &OwnedFd) -> LaunchSpec {
    let stdio = [leash.stdin(), Stdio::Pipe, Stdio::Fd(spoken.as_raw_fd())];
    group(vec![sh(
        "read line; echo words; echo up >&2; exec sleep 600",
        stdio,
    )])
}

/// Turns once for a reason of its own, when the speaker has spoken.
fn turn_once_when_spoken(scene: &mut Scene, spoken: &OwnedFd) {
    rustix::io::read(spoken, &mut [0; 8]).unwrap();
    scene.supervisor.waker().ring();
    scene.supervisor.turn().unwrap();
    scene.events.extend(scene.supervisor.take_events());
}

fn words_come_when_wanted(mut scene: Scene, spoken: &OwnedFd) {
    turn_once_when_spoken(&mut scene, spoken);
    assert_eq!(scene.output(0, 1), b"", "read though told not to");
    scene.supervisor.set_reading(true);
    scene.until_says(0, "words\n");
    scene.supervisor.kill();
    scene.end();
}

#[test]
fn pipes_are_left_unread_until_they_are_wanted() {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let leash = Leash::new();
    let mut scene = Scene::started(speaker(&leash, &write));
    scene.until(|events| started_count(events) == 1);
    scene.supervisor.set_reading(false);
    leash.let_go();
    words_come_when_wanted(scene, &read);
}

#[test]
fn pipes_of_workers_that_start_later_are_left_unread_too() {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let leash = Leash::new();
    let mut scene = Scene::new();
    scene.supervisor.set_reading(false);
    scene.start(speaker(&leash, &write));
    scene.until(|events| started_count(events) == 1);
    leash.let_go();
    words_come_when_wanted(scene, &read);
}

#[test]
fn a_pipe_that_a_stranger_holds_open_does_not_keep_the_group() {
    // The pipe's write end is opened again by this process, which is not of the job.
    let mut scene = Scene::started(group(vec![sh("echo here; exec sleep 600", PIPED)]));
    scene.until_says(0, "here\n");
    let opened = std::fs::OpenOptions::new()
        .write(true)
        .open(format!("/proc/{}/fd/1", scene.pid(0)))
        .unwrap();
    scene.supervisor.stop(libc::SIGTERM, Some(LIMIT));
    scene.end();
    assert_eq!(scene.output(0, 1), b"here\n");
    let ends = |event: &&Event| matches!(event, Event::Output { stream: 1, data, .. } if data.is_empty());
    assert_eq!(scene.events.iter().filter(ends).count(), 1);
    drop(opened);
}
