//! How workers are started: programs, arguments, environment, directory, binding, descriptors, signals.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use dsl_engine::Error;
use dsl_engine::affinity::{Allowed, NUMBER_MAX, format_cpulist};
use dsl_engine::event::{Ending, Event, Stage, StartFailure};
use dsl_engine::spec::{LaunchSpec, Strictness, WorkerSpec};

use crate::harness::{
    PIPED, QUIET, Scene, Scratch, c_string, env, group, program, report_group, sh, sleeper,
};

/// Every byte that a C string can hold.
fn every_byte() -> Vec<u8> {
    (1..=255).collect()
}

fn status_line(status: &str, key: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    line.unwrap().trim().to_owned()
}

/// G2, G8: which step failed, on what, and why.
#[test]
fn a_start_that_fails_says_where_and_why() {
    let scratch = Scratch::new();
    let plain = scratch.file("plain", b"#!/bin/sh\n", 0o644);
    let garbage = scratch.file("garbage", b"\x00\x01\x02\x03", 0o755);
    let no_interpreter = scratch.file("orphan", b"#!/absent/interpreter\n", 0o755);
    let below = plain.join("below");
    let absent = scratch.path().join("absent");
    let exec = |path: &Path| program(&[path], QUIET);
    let within = |path: &Path| WorkerSpec {
        cwd: Some(c_string(path)),
        ..sleeper()
    };
    let table = [
        (
            program(&["absent-program"], QUIET),
            Stage::Exec,
            libc::ENOENT,
            Path::new("absent-program"),
            127,
        ),
        (exec(&absent), Stage::Exec, libc::ENOENT, &absent, 127),
        (exec(&below), Stage::Exec, libc::ENOTDIR, &below, 127),
        (
            exec(&no_interpreter),
            Stage::Exec,
            libc::ENOENT,
            &no_interpreter,
            127,
        ),
        (exec(&plain), Stage::Exec, libc::EACCES, &plain, 126),
        (
            exec(scratch.path()),
            Stage::Exec,
            libc::EACCES,
            scratch.path(),
            126,
        ),
        (exec(&garbage), Stage::Exec, libc::ENOEXEC, &garbage, 126),
        (within(&absent), Stage::Chdir, libc::ENOENT, &absent, 126),
        (within(&plain), Stage::Chdir, libc::ENOTDIR, &plain, 126),
    ];
    let workers = table.iter().map(|(worker, ..)| worker.clone()).collect();
    let (scene, ended) = Scene::run(report_group(workers));
    for (exit, (_, stage, errno, path, status)) in scene.exits().iter().zip(table) {
        let expected = StartFailure {
            stage,
            errno,
            path: Some(c_string(path)),
        };
        assert_eq!(
            (&exit.ending, exit.status()),
            (&Ending::NotStarted(expected), status)
        );
        assert_eq!((exit.pid, exit.started, exit.caused_by_stop), (0, None, false));
    }
    assert_eq!(ended.first_failure.map(|exit| exit.worker), Some(0));
}

/// G5: arguments reach the program as they are.
#[test]
fn arguments_are_passed_byte_for_byte() {
    let bytes = every_byte();
    let argv: [&[u8]; 8] = [
        b"/bin/sh",
        b"-c",
        b"cat /proc/$$/cmdline; exit 0",
        b"",
        &bytes,
        b"",
        b" two words ",
        b"\xff",
    ];
    let worker = program(&argv.map(OsStr::from_bytes), PIPED);
    let (scene, _) = Scene::run(group(vec![worker]));
    let mut expected = argv.join(&0);
    expected.push(0);
    assert_eq!(scene.output(0, 1), expected);
}

/// G5: so does the environment, and nothing is added to it but the job's mark.
#[test]
fn the_environment_is_passed_byte_for_byte() {
    let bytes = every_byte();
    let mut worker = program(&["/bin/cat", "/proc/self/environ"], PIPED);
    worker.env = vec![env("OWN", &bytes), env("SHARED", b"own")];
    let spec = LaunchSpec {
        env: vec![env("BYTES", &bytes), env("SHARED", b"group"), env("EMPTY", b"")],
        ..group(vec![worker])
    };
    let (scene, _) = Scene::run(spec);
    let output = scene.output(0, 1);
    let entries: Vec<&[u8]> = output.split(|byte| *byte == 0).collect();
    let [one, shared, empty, token, own, last] = entries[..] else {
        panic!("{entries:?}");
    };
    assert_eq!(one, [b"BYTES=", &bytes[..]].concat());
    assert_eq!(
        (shared, empty, last),
        (&b"SHARED=own"[..], &b"EMPTY="[..], &b""[..])
    );
    assert_eq!(own, [b"OWN=", &bytes[..]].concat());
    assert!(
        token
            .strip_prefix(b"DSL_JOB_ID=")
            .is_some_and(|token| !token.is_empty())
    );
}

fn mark_of(scene: &Scene, worker: usize) -> String {
    let output = String::from_utf8(scene.output(worker, 1)).unwrap();
    let mark = output
        .split('\0')
        .find_map(|entry| entry.strip_prefix("DSL_JOB_ID="));
    mark.unwrap().to_owned()
}

#[test]
fn a_job_within_a_job_carries_the_marks_of_both() {
    let worker = program(&["/bin/cat", "/proc/self/environ"], PIPED);
    let spec = LaunchSpec {
        env: vec![env("DSL_JOB_ID", b"outermost:outer")],
        ..group(vec![worker])
    };
    let (scene, _) = Scene::run(spec);
    let mark = mark_of(&scene, 0);
    let own = mark.strip_prefix("outermost:outer:").unwrap();
    assert!(!own.is_empty() && !own.contains(':'));
}

/// G1: by this mark what a worker leaves behind is found, so a worker's own entries must not hide it.
#[test]
fn a_workers_own_entries_do_not_take_the_jobs_mark_away() {
    let worker = || program(&["/bin/cat", "/proc/self/environ"], PIPED);
    let mut other = worker();
    other.env = vec![env("DSL_JOB_ID", b"outer")];
    let (scene, _) = Scene::run(group(vec![worker(), other]));
    let (mark, other) = (mark_of(&scene, 0), mark_of(&scene, 1));
    assert!(
        other.split(':').any(|part| part == mark),
        "{mark:?} is not in {other:?}"
    );
}

#[test]
fn a_worker_runs_in_its_directory() {
    let scratch = Scratch::new();
    let at = |path: &Path| WorkerSpec {
        cwd: Some(c_string(path)),
        ..sh("pwd -P", PIPED)
    };
    let (scene, _) = Scene::run(group(vec![at(scratch.path()), sh("pwd -P", PIPED)]));
    let said = |worker| String::from_utf8(scene.output(worker, 1)).unwrap();
    let expected = scratch.path().canonicalize().unwrap();
    assert_eq!(said(0), format!("{}\n", expected.display()));
    assert_eq!(
        said(1),
        format!("{}\n", std::env::current_dir().unwrap().display())
    );
}

#[test]
fn a_relative_item_of_the_path_is_below_the_workers_directory() {
    let scratch = Scratch::new();
    scratch.file("bin/tool", b"#!/bin/sh\nexit 7\n", 0o755);
    let mut worker = program(&["tool"], QUIET);
    worker.cwd = Some(c_string(scratch.path()));
    worker.env = vec![env("PATH", b"bin")];
    let (scene, _) = Scene::run(group(vec![worker]));
    assert_eq!(scene.exits()[0].ending, Ending::Code(7));
}

#[test]
fn a_worker_is_bound_to_its_cpus_and_the_supervisor_is_not() {
    let allowed = Allowed::read(Path::new("/")).unwrap();
    let bound = |cpus: &[u32]| WorkerSpec {
        cpus: cpus.to_vec(),
        ..program(&["/bin/cat", "/proc/self/status"], PIPED)
    };
    let (first, last) = (allowed.cpus[0], *allowed.cpus.last().unwrap());
    let sets = [vec![first], vec![last], allowed.cpus.clone()];
    let (scene, _) = Scene::run(group(sets.iter().map(|cpus| bound(cpus)).collect()));
    for (worker, cpus) in sets.iter().enumerate() {
        let status = String::from_utf8(scene.output(worker, 1)).unwrap();
        assert_eq!(status_line(&status, "Cpus_allowed_list:"), format_cpulist(cpus));
    }
    assert_eq!(Allowed::read(Path::new("/")).unwrap(), allowed);
}

#[test]
fn a_binding_that_is_only_wanted_leaves_a_worker_to_run_and_is_told() {
    let nowhere = WorkerSpec {
        cpus: vec![NUMBER_MAX],
        ..program(&["/bin/cat", "/proc/self/status"], PIPED)
    };
    let (scene, ended) = Scene::run(LaunchSpec {
        binding: Strictness::Wanted,
        ..group(vec![nowhere.clone()])
    });
    assert_eq!(ended.first_failure, None);
    let told = scene.events.iter().any(|event| {
        matches!(
            event,
            Event::Unbound {
                worker: 0,
                stage: Stage::Affinity,
                errno: libc::EINVAL
            }
        )
    });
    assert!(told, "{:?}", scene.events);
    let status = String::from_utf8(scene.output(0, 1)).unwrap();
    let allowed = Allowed::read(Path::new("/")).unwrap();
    assert_eq!(
        status_line(&status, "Cpus_allowed_list:"),
        format_cpulist(&allowed.cpus)
    );

    let refused = Scene::new().supervisor.start(group(vec![nowhere.clone()]));
    assert!(matches!(refused, Err(Error::Binding(_))), "{refused:?}");

    let without_memory = LaunchSpec {
        binding: Strictness::CpusRequired,
        ..group(vec![nowhere])
    };
    let refused = Scene::new().supervisor.start(without_memory);
    assert!(matches!(refused, Err(Error::Binding(_))), "{refused:?}");
}

#[test]
fn a_worker_starts_with_the_masks_of_the_host_program_and_hears_sigpipe() {
    let mine = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let worker = program(&["/bin/cat", "/proc/self/status"], PIPED);
    let (scene, _) = Scene::run(group(vec![worker]));
    let status = String::from_utf8(scene.output(0, 1)).unwrap();
    assert_eq!(status_line(&status, "SigBlk:"), status_line(&mine, "SigBlk:"));
    let ignored = u64::from_str_radix(&status_line(&status, "SigIgn:"), 16).unwrap();
    assert_eq!(ignored >> (libc::SIGPIPE - 1) & 1, 0);
}

#[test]
fn a_worker_leads_its_process_group_and_inherits_no_descriptor() {
    let (kept, _write) = rustix::pipe::pipe().unwrap();
    let kept = std::os::fd::AsRawFd::as_raw_fd(&kept);
    let script = format!(
        "for fd in 3 4 5 6 7 8 9 {kept}; do test -e /proc/$$/fd/$fd && echo $fd; done; \
         read -r pid name state parent group rest </proc/$$/stat; test $pid = $group && echo leader"
    );
    let (scene, _) = Scene::run(group((0..3).map(|_| sh(&script, PIPED)).collect()));
    for worker in 0..3 {
        assert_eq!(String::from_utf8(scene.output(worker, 1)).unwrap(), "leader\n");
    }
}
