#![expect(clippy::disallowed_types, reason = "the processes here are what is looked at")]

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};
use std::sync::RwLockReadGuard;

use proptest::prelude::*;
use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, getuid, waitid};

use super::fake_root::FakeRoot;
use super::*;
use crate::orphans::sharing;

const CAPTURED: &[u8] =
    b"6133 (cat) R 6129 6129 3051 0 -1 4194304 98 0 0 0 0 0 0 0 20 0 1 0 264981 3133440 433 \
18446744073709551615 94 94 140 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 94 94 94 140 140 140 140 0\n";

fn line(pid: i32, comm: &[u8], parent: i32) -> Vec<u8> {
    let mut text = format!("{pid} (").into_bytes();
    text.extend_from_slice(comm);
    text.extend_from_slice(
        format!(") S {parent} 7 8 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 99 1 2\n").as_bytes(),
    );
    text
}

fn process(pid: i32, parent: i32) -> Stat {
    Stat {
        pid,
        ppid: parent,
        pgrp: pid,
        session: pid,
        state: b'S',
        threads: 1,
        start_time: 1,
    }
}

fn pids(stats: &[Stat]) -> Vec<i32> {
    let mut pids: Vec<i32> = stats.iter().map(|stat| stat.pid).collect();
    pids.sort_unstable();
    pids
}

/// A child that is killed and reaped at the end of the test, however the test ends.
struct Reaped(
    Child,
    #[expect(dead_code, reason = "held")] RwLockReadGuard<'static, ()>,
);

impl Reaped {
    fn spawn(command: &mut Command) -> Self {
        let children = sharing::beside_others();
        let command = command.stdin(Stdio::null()).stdout(Stdio::null());
        Self(command.spawn().unwrap(), children)
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_line_of_the_kernel_is_read_field_by_field() {
    let stat = parse_stat(CAPTURED).unwrap();
    let expected = Stat {
        pid: 6133,
        ppid: 6129,
        pgrp: 6129,
        session: 3051,
        state: b'R',
        threads: 1,
        start_time: 264_981,
    };
    assert_eq!(stat, expected);
}

#[test]
fn a_command_name_cannot_forge_other_fields() {
    for comm in [
        &b") R 1 1 1 "[..],
        b"((((",
        b"))))",
        b"a b",
        b"x\n9 (y) Z 1",
        b"",
        b"\xff\xfe",
        b") ",
    ] {
        let stat = parse_stat(&line(41, comm, 40)).unwrap();
        assert_eq!(
            (stat.pid, stat.ppid, stat.state, stat.start_time),
            (41, 40, b'S', 99),
            "{comm:?}"
        );
    }
}

#[test]
fn what_is_no_whole_line_is_refused() {
    let cut = CAPTURED.iter().position(|&byte| byte == b'-').unwrap();
    let texts = [
        &b""[..],
        b"1",
        b"1 (a",
        b"1 (a)",
        b"1 a) S 1",
        b")1 (",
        &CAPTURED[..cut],
    ];
    for text in texts {
        assert_eq!(parse_stat(text), None, "{text:?}");
    }
    for pid in ["0", "-1", "+1", "x", ""] {
        assert_eq!(
            parse_stat(format!("{pid} (a) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 0 0 0 0 5 ").as_bytes()),
            None
        );
    }
}

#[test]
fn only_a_whole_item_under_the_whole_key_counts_as_the_token() {
    let environ = b"PATH=/bin\0XJOB=one\0JOB=zero:one:three\0JOBS=four\0LAST=five";
    let carries = |key: &str, token: &str| environ_carries(environ, key.as_bytes(), token.as_bytes());
    assert!(
        carries("JOB", "zero") && carries("JOB", "one") && carries("JOB", "three") && carries("LAST", "five")
    );
    for (key, token) in [
        ("JOB", "on"),
        ("JOB", "ones"),
        ("JOB", "four"),
        ("OB", "one"),
        ("JOB", "zero:one"),
        ("JOB", ""),
        ("", ""),
    ] {
        assert!(!carries(key, token), "{key}={token}");
    }
    assert!(!environ_carries(b"", b"JOB", b"one"));
}

#[test]
fn descendants_are_all_below_the_roots_and_never_the_roots() {
    let zombie = Stat {
        state: b'Z',
        ..process(5, 3)
    };
    let all = [
        process(1, 0),
        process(2, 1),
        process(3, 2),
        process(4, 3),
        zombie,
        process(6, 1),
        process(7, 6),
    ];
    assert_eq!(pids(&descendants(&all, &[2])), [3, 4, 5]);
    assert_eq!(pids(&descendants(&all, &[2, 6])), [3, 4, 5, 7]);
    assert_eq!(
        pids(&descendants(&all, &[2, 3])),
        [4, 5],
        "a root below another is still a root"
    );
    assert_eq!(pids(&descendants(&all, &[99])), [0; 0]);
    let order = pids_in_order(&descendants(&all, &[1]));
    assert!(
        order.iter().position(|&pid| pid == 3) < order.iter().position(|&pid| pid == 4),
        "{order:?}"
    );
}

fn pids_in_order(stats: &[Stat]) -> Vec<i32> {
    stats.iter().map(|stat| stat.pid).collect()
}

#[test]
fn no_parent_never_means_the_whole_machine() {
    let all = [process(1, 0), process(2, 0), process(3, 1), process(4, -1)];
    assert_eq!(descendants(&all, &[0, -1]), []);
}

#[test]
fn a_snapshot_that_contradicts_itself_ends_and_doubles_nothing() {
    let all = [
        process(2, 4),
        process(3, 2),
        process(4, 3),
        process(5, 5),
        process(6, 5),
        process(6, 5),
    ];
    assert_eq!(pids(&descendants(&all, &[3])), [2, 4]);
    assert_eq!(pids(&descendants(&all, &[5])), [6, 6], "each entry once");
}

#[test]
fn a_chain_of_processes_may_be_as_deep_as_the_pid_space() {
    let all: Vec<Stat> = (2..200_000).map(|pid| process(pid, pid - 1)).collect();
    assert_eq!(descendants(&all, &[1]).len(), all.len());
}

#[test]
fn a_scan_sees_own_children_again_and_again() {
    let child = Reaped::spawn(Command::new("sleep").arg("600"));
    let mut procfs = ProcFs::open().unwrap();
    let own = getpid().as_raw_pid();
    for _ in 0..2 {
        let all = procfs.scan().unwrap();
        let myself = all.iter().find(|stat| stat.pid == own).unwrap();
        assert_eq!(myself.ppid, std::os::unix::process::parent_id() as i32);
        let below = descendants(&all, &[own]);
        let found = below.iter().find(|stat| stat.pid == child.pid()).unwrap();
        assert_eq!(
            *found,
            Stat {
                state: found.state,
                ..procfs.stat(child.pid()).unwrap()
            }
        );
        assert_eq!((found.pgrp, found.session), (myself.pgrp, myself.session));
        assert!(found.start_time >= myself.start_time && !found.is_dead());
    }
    assert_eq!(procfs.comm(child.pid()), "sleep");
    assert_eq!(procfs.uid(child.pid()).unwrap(), getuid().as_raw());
}

#[test]
fn the_mark_of_a_job_is_found_in_the_environment_of_a_child() {
    let child = Reaped::spawn(
        Command::new("sleep")
            .arg("600")
            .env("DSL_TEST_JOB", "outer:inner"),
    );
    let mut procfs = ProcFs::open().unwrap();
    let mut carries = |token: &[u8]| procfs.carries_token(child.pid(), b"DSL_TEST_JOB", token).unwrap();
    assert!(carries(b"outer") && carries(b"inner"));
    assert!(!carries(b"inn"));
}

#[test]
fn a_child_that_is_still_in_its_exec_is_not_missed() {
    let mut procfs = ProcFs::open().unwrap();
    for round in 0..100 {
        let child = Reaped::spawn(Command::new("sleep").arg("600").env("DSL_TEST_JOB", "inner"));
        // The kernel wakes us a moment before the child has a memory of its own; until then it has our environment.
        let exe = format!("/proc/{}/exe", child.pid());
        while std::fs::read_link(&exe).unwrap() == std::env::current_exe().unwrap() {}
        let start = Instant::now();
        let is_found = procfs.carries_token(child.pid(), b"DSL_TEST_JOB", b"inner");
        // On a busy machine an exec may take longer than we wait for it.
        assert!(
            is_found.unwrap() || start.elapsed() > EXEC_PATIENCE,
            "round {round}"
        );
    }
}

#[test]
fn a_process_without_environment_is_not_waited_for() {
    let child = Reaped::spawn(Command::new("sleep").arg("600").env_clear());
    let mut procfs = ProcFs::open().unwrap();
    // Waits for the end of the exec, so that the test does not time it.
    while procfs.starts(child.pid(), "cmdline").unwrap().is_empty() {}
    let mut is_quick = || {
        let start = Instant::now();
        let is_found = procfs.carries_token(child.pid(), b"DSL_TEST_JOB", b"inner");
        assert!(!is_found.unwrap());
        start.elapsed() < EXEC_PATIENCE
    };
    // A busy machine holds up one look or another, and not all of them.
    assert!((0..100).any(|_| is_quick()));
}

#[test]
fn kernel_threads_and_ending_processes_have_no_memory() {
    let flagged = |flags: u32| has_no_memory(format!("7 (a) b) R 2 0 0 0 -1 {flags} 0 0").as_bytes());
    assert!(!has_no_memory(CAPTURED) && !flagged(0x0040_0100));
    assert!(flagged(0x0020_8040) && flagged(0x0040_000c) && has_no_memory(b"") && has_no_memory(b"7 (a"));
}

#[test]
fn a_process_whose_main_thread_has_ended_lives_on() {
    let text = b"18443 (python3) Z 18402 18399 3051 0 -1 4227084 1992 0 0 0 2 0 0 0 20 0 2 0 294669 0 0";
    let stat = parse_stat(text).unwrap();
    assert_eq!((stat.state, stat.threads), (b'Z', 2));
    assert!(!stat.is_dead());
    assert!(Stat { threads: 1, ..stat }.is_dead());
}

#[test]
fn a_zombie_is_dead_and_a_reaped_process_is_not_found() {
    let mut child = Reaped::spawn(&mut Command::new("true"));
    let pid = child.pid();
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(Pid::from_raw(pid).unwrap()), ended).unwrap();
    let mut procfs = ProcFs::open().unwrap();
    assert!(procfs.stat(pid).unwrap().is_dead());
    assert!(
        !procfs.carries_token(pid, b"PATH", b"/bin").unwrap(),
        "it has no environment any more"
    );
    child.0.wait().unwrap();
    assert_eq!(procfs.stat(pid).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(procfs.uid(pid).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!((procfs.comm(pid).as_str(), procfs.wchan(pid)), ("?", None));
}

#[test]
fn a_stopped_process_is_seen_as_stopped() {
    let child = Reaped::spawn(Command::new("sleep").arg("600"));
    let pid = Pid::from_raw(child.pid()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT).unwrap();
    let stat = ProcFs::open().unwrap().stat(child.pid()).unwrap();
    assert!(stat.is_stopped() && !stat.is_dead());
}

#[test]
fn a_process_that_vanishes_during_a_scan_is_skipped_but_a_real_error_is_not() {
    let root = FakeRoot::with(&[
        ("5/comm", "no stat here\n"),
        ("8/stat", "nonsense"),
        ("mounts", ""),
    ]);
    root.file("7/stat", &line(7, b"ok", 1));
    let mut procfs = ProcFs::open_at(root.path()).unwrap();
    assert_eq!(pids(&procfs.scan().unwrap()), [7]);
    std::fs::create_dir_all(root.path().join("9/stat")).unwrap();
    assert_eq!(procfs.scan().unwrap_err().kind(), ErrorKind::IsADirectory);
}

#[test]
fn more_processes_than_one_listing_holds_are_all_seen() {
    let root = FakeRoot::new();
    for pid in 1..=60 {
        root.file(&format!("{pid}/stat"), &line(pid, b"many", 1));
    }
    let mut procfs = ProcFs::open_at(root.path()).unwrap();
    procfs.listing = Vec::with_capacity(256);
    assert_eq!(pids(&procfs.scan().unwrap()), (1..=60).collect::<Vec<_>>());
}

#[test]
fn an_environment_of_any_size_is_read_to_its_end() {
    let root = FakeRoot::new();
    for size in [CHUNK - 9, CHUNK, 3 * CHUNK + 1] {
        let mut environ = vec![b'x'; size];
        environ.extend_from_slice(b"\0JOB=token\0");
        root.file("3/environ", &environ);
        let mut procfs = ProcFs::open_at(root.path()).unwrap();
        assert!(procfs.carries_token(3, b"JOB", b"token").unwrap(), "{size}");
    }
}

#[test]
fn a_command_name_cannot_write_to_the_terminal() {
    let root = FakeRoot::new();
    root.file("3/comm", b"a\x1b[2J\r\xe2\x80\xae\xff\n\n");
    root.file("3/wchan", b"0");
    root.file("4/wchan", b"do_wait");
    let mut procfs = ProcFs::open_at(root.path()).unwrap();
    assert_eq!(procfs.comm(3), "a?[2J????");
    assert_eq!(
        (procfs.wchan(3), procfs.wchan(4).as_deref()),
        (None, Some("do_wait"))
    );
}

/// A process of the other namespace may have our number by chance.
#[test]
fn a_proc_of_another_pid_namespace_is_refused() {
    let own = getpid().as_raw_pid();
    let refused = Err(ErrorKind::Unsupported);
    for (shown, numbers, expected) in [
        (own, String::new(), Ok(())),
        (own, format!("NSpid:\t{own}\n"), Ok(())),
        (own + 1, String::new(), refused),
        (own + 1, format!("NSpid:\t{}\t{own}\n", own + 1), refused),
        (own, format!("NSpid:\t{own}\t{own}\n"), refused),
    ] {
        let root = FakeRoot::new();
        root.file(&format!("{shown}/status"), numbers.as_bytes());
        symlink(shown.to_string(), root.path().join("self")).unwrap();
        let mut procfs = ProcFs::open_at(root.path()).unwrap();
        let outcome = procfs.require_own_namespace().map_err(|error| error.kind());
        assert_eq!(outcome, expected, "{shown} {numbers}");
    }
}

#[test]
fn a_pidfd_tells_a_process_until_it_is_reaped_and_none_of_elsewhere() {
    let root = FakeRoot::new();
    let (file, _) = rustix::pipe::pipe().unwrap();
    let mut procfs = ProcFs::open_at(root.path()).unwrap();
    for (pid, expected) in [
        ("17", Ok(Some(17))),
        ("-1", Ok(None)),
        ("0", Err(ErrorKind::Unsupported)),
        ("-2", Err(ErrorKind::InvalidData)),
        ("", Err(ErrorKind::InvalidData)),
    ] {
        let name = format!("thread-self/fdinfo/{}", file.as_raw_fd());
        root.file(
            &name,
            format!("pos:\t0\nflags:\t02000002\nPid:\t{pid}\nNSpid:\t{pid}\n").as_bytes(),
        );
        let told = procfs.pid_of(file.as_fd()).map_err(|error| error.kind());
        assert_eq!(told, expected, "{pid}");
    }
}

#[test]
fn a_namespace_of_its_own_is_named() {
    let root = FakeRoot::new();
    for (file, _) in NAMESPACES.iter().filter(|(file, _)| *file != "time") {
        for who in ["thread-self", "7", "8"] {
            root.file(&format!("{who}/ns/.keep"), b"");
            let number = if (who, *file) == ("8", "user") { 2 } else { 1 };
            let link = root.path().join(format!("{who}/ns/{file}"));
            symlink(format!("{file}:[{number}]"), link).unwrap();
        }
    }
    for (who, target) in [("thread-self", "."), ("7", "."), ("8", ".")] {
        symlink(target, root.path().join(format!("{who}/root"))).unwrap();
    }
    let mut procfs = ProcFs::open_at(root.path()).unwrap();
    assert_eq!(procfs.foreign_place(8).unwrap(), Some("user namespace"));
    assert_eq!(procfs.foreign_place(7).unwrap(), Some("root directory"));
    // Process 9 has a mount namespace alone: a namespace for children does not exist before the first child.
    root.file("9/ns/.keep", b"");
    symlink("mnt:[1]", root.path().join("9/ns/mnt")).unwrap();
    assert_eq!(procfs.foreign_place(9).unwrap(), Some("pid namespace"));
    // Process 10 has none left: it is about to end.
    assert_eq!(procfs.foreign_place(10).unwrap_err().kind(), ErrorKind::NotFound);
    let own = getpid().as_raw_pid();
    let mut procfs = ProcFs::open().unwrap();
    assert_eq!(procfs.foreign_place(own).unwrap(), None);
    let parent = rustix::process::getppid().unwrap().as_raw_pid();
    assert!(procfs.descends(own, own).unwrap() && procfs.descends(own, parent).unwrap());
    assert!(!procfs.descends(parent, own).unwrap());
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(text: Vec<u8>, key: Vec<u8>, token: Vec<u8>) {
        parse_stat(&text);
        environ_carries(&text, &key, &token);
        status_value(&text, "Uid");
        printable(&text);
    }

    #[test]
    fn any_command_name_leaves_the_fields_alone(comm: Vec<u8>, pid in 1..i32::MAX, parent: i32) {
        let stat = parse_stat(&line(pid, &comm, parent)).unwrap();
        prop_assert_eq!((stat.pid, stat.ppid, stat.start_time), (pid, parent, 99));
    }

    #[test]
    fn a_token_is_found_in_any_environment_that_holds_it(
        before in "[^\0]{0,40}", after in "[^\0]{0,40}", token in "[a-z0-9]{1,8}",
    ) {
        let environ = format!("{before}\0JOB=outer:{token}\0{after}");
        prop_assert!(environ_carries(environ.as_bytes(), b"JOB", token.as_bytes()));
    }

    #[test]
    fn descendants_agree_with_the_definition(
        parents in prop::collection::vec(0..20_i32, 0..20), roots in prop::collection::vec(-1..20_i32, 0..4),
    ) {
        let all: Vec<Stat> = (1..).zip(&parents).map(|(pid, &parent)| process(pid, parent)).collect();
        let mut below: BTreeSet<i32> = roots.iter().copied().filter(|&pid| pid > 0).collect();
        for _ in &all {
            below.extend(all.iter().filter(|stat| below.contains(&stat.ppid)).map(|stat| stat.pid).collect::<Vec<_>>());
        }
        let expected: Vec<i32> =
            all.iter().map(|stat| stat.pid).filter(|pid| below.contains(pid) && !roots.contains(pid)).collect();
        prop_assert_eq!(pids(&descendants(&all, &roots)), expected);
    }
}

#[test]
fn the_status_of_a_zombie_is_in_its_line() {
    let captured = String::from_utf8(CAPTURED.to_vec()).unwrap();
    let zombie = |status: &str| {
        let line = captured.replace(") R ", ") Z ");
        format!("{} {status}\n", line.trim_end().rsplit_once(' ').unwrap().0)
    };
    for (text, expected) in [
        (captured.clone(), None),
        (zombie("0"), Some(0)),
        (zombie("768"), Some(768)),
        (zombie("139"), Some(139)),
        (String::from_utf8(line(1, b"short", 2)).unwrap(), None),
    ] {
        assert_eq!(parse_exit_status(text.as_bytes()), expected, "{text}");
    }
}

#[test]
fn how_a_child_ended_is_seen_before_it_is_reaped() {
    let _children = sharing::beside_others();
    for (words, expected) in [("exit 0", 0), ("exit 5", 5 << 8), ("kill -9 $$", 9)] {
        let mut child = Command::new("sh").args(["-c", words]).spawn().unwrap();
        let pid = child.id() as i32;
        waitid(
            WaitId::Pid(Pid::from_raw(pid).unwrap()),
            WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
        )
        .unwrap();
        assert_eq!(exit_status(pid), Some(expected), "{words}");
        child.wait().unwrap();
        assert_eq!(exit_status(pid), None);
    }
    assert_eq!(exit_status(getpid().as_raw_nonzero().get()), None);
}
