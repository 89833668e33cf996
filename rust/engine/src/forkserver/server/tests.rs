#![expect(clippy::disallowed_types, reason = "the process here stands for a server")]

use std::process;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::getpid;

use super::*;
use crate::event::Stage;
use crate::sys::clone::Failure;

/// A server without a process, with this process as its speaker. The descriptors keep its link, its pidfd and its
/// output open.
fn server() -> (Server, [OwnedFd; 3]) {
    let (alive, writer) = rustix::pipe::pipe().unwrap();
    let (output, words) = pipe_with(PipeFlags::NONBLOCK).unwrap();
    let (link, theirs) = socket::pair().unwrap();
    let mut server = Server::new(0, Some(alive), link, Some(output), Patience::default());
    server.speaker = Some(Speaker::own());
    (server, [theirs, writer, words])
}

/// A child of this process in the place of a worker. It ends when this value is dropped.
struct Child(process::Child);

impl Child {
    fn new() -> Self {
        Self(process::Command::new("sleep").arg("600").spawn().unwrap())
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    fn pidfd(&self) -> OwnedFd {
        open_pidfd(self.pid())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn open_pidfd(pid: i32) -> OwnedFd {
    pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap()
}

fn lost(text: &str) -> News {
    News::Lost(text.to_owned())
}

fn death(status: i32) -> Death {
    Death {
        status,
        signaled: false,
        core: false,
        user: Duration::ZERO,
        system: Duration::ZERO,
        max_rss: 0,
    }
}

#[test]
fn it_is_ready_once_and_lost_once() {
    let refused = || Report::Refused {
        text: b"a thread\nruns".to_vec(),
    };
    for (reports, state, news) in [
        (vec![], State::Preparing, vec![]),
        (
            vec![Some(Report::Ready), Some(Report::Ready)],
            State::Ready,
            vec![News::Ready],
        ),
        (
            vec![Some(refused()), Some(Report::Ready), Some(refused())],
            State::Closed,
            vec![lost("refused: a thread runs")],
        ),
        (
            vec![Some(Report::Hello { version: 9 }), Some(Report::Ready)],
            State::Closed,
            vec![lost(&format!("speaks version 9 of the protocol, not {VERSION}"))],
        ),
        (
            vec![Some(Report::Ready), None],
            State::Closed,
            vec![News::Ready, lost("cannot be understood")],
        ),
    ] {
        let (mut server, _open) = server();
        for report in reports {
            server.hear(report, Vec::new());
        }
        assert_eq!((server.state, std::mem::take(&mut server.news)), (state, news));
    }
}

#[test]
fn nobody_is_listened_to_who_has_not_said_who_it_is() {
    let _children = crate::orphans::sharing::beside_others();
    let child = Child::new();
    let hello = || Some(Report::Hello { version: VERSION });
    for (report, fds) in [
        (Some(Report::Ready), vec![]),
        (Some(Report::Forked { order: 1 }), vec![child.pidfd()]),
        (hello(), vec![]),
    ] {
        let (mut server, _open) = server();
        server.speaker = None;
        server.hear(report, fds);
        assert_eq!(
            (server.state, std::mem::take(&mut server.news)),
            (State::Closed, vec![lost(NONSENSE)])
        );
    }
    // A second hello is refused.
    let (mut server, _open) = server();
    server.hear(hello(), vec![child.pidfd()]);
    assert_eq!(std::mem::take(&mut server.news), [lost(NONSENSE)]);
}

/// G1: the kernel tells which process speaks and which was forked, no matter which descriptors come.
#[test]
fn who_says_hello_is_the_process_that_was_executed_or_descends_from_it() {
    let _children = crate::orphans::sharing::beside_others();
    let (child, other) = (Child::new(), Child::new());
    let own = getpid().as_raw_pid();
    let another = "is another process than the one that was started";
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let unknown = "cannot be told from other processes: invalid data";
    for (executed, fd, why) in [
        (child.pid(), child.pidfd(), ""),
        (own, child.pidfd(), ""),
        (child.pid(), other.pidfd(), another),
        (child.pid(), open_pidfd(own), another),
        (child.pid(), pipe, unknown),
    ] {
        let (mut server, _open) = server();
        (server.speaker, server.pid) = (None, executed);
        server.hear(Some(Report::Hello { version: VERSION }), vec![fd]);
        let news = if why.is_empty() { vec![] } else { vec![lost(why)] };
        assert_eq!(
            (std::mem::take(&mut server.news), server.is_distrusted()),
            (news, !why.is_empty())
        );
    }
}

/// G1: the other end of the link may send any pidfd, but the engine only signals a descendant of the server that it has
/// called, and never itself or a process above it.
#[test]
fn a_branch_is_a_descendant_of_the_warm_server_that_was_called() {
    let _children = crate::orphans::sharing::beside_others();
    let (child, own) = (Child::new(), getpid().as_raw_pid());
    let parent = rustix::process::getppid().unwrap().as_raw_pid();
    let another = "is another process than the one that was started";
    for (fd, why) in [
        (child.pidfd(), ""),
        (open_pidfd(own), another),
        (open_pidfd(parent), another),
        (open_pidfd(1), another),
    ] {
        let (link, _other) = socket::pair().unwrap();
        // The server that was called is this process.
        let warm = Peer::of(&link).unwrap();
        let mut server = Server::branch(link, warm, 1, true);
        assert_eq!(server.shown_pid(), own);
        server.hear(Some(Report::Hello { version: VERSION }), vec![fd]);
        let told: Vec<News> = std::mem::take(&mut server.news);
        if why.is_empty() {
            assert_eq!(told, []);
            assert_eq!(server.shown_pid(), child.pid());
            assert_eq!(server.identity().map(|(pid, _)| pid), Some(child.pid()));
        } else {
            // Process 1 may run in other namespaces than this test.
            assert!(matches!(&told[..], [News::Lost(_)]), "{told:?}");
            assert!(server.is_distrusted() && server.identity().is_none());
            // There is nobody to signal.
            assert_eq!((server.pid, server.pidfd.is_none()), (0, true));
        }
    }
}

/// G1: the server names init, the engine itself, an unrelated process, or no process. A worker that has just ended is
/// no lie.
#[test]
fn a_server_that_lies_about_whom_it_has_forked_is_closed_and_nobody_gets_that_number() {
    let _children = crate::orphans::sharing::beside_others();
    let mut child = Child::new();
    let stranger = process::Command::new("sh")
        .args(["-c", "sleep 600 >/dev/null 2>&1 & echo $!"])
        .output()
        .unwrap();
    let stranger: i32 = String::from_utf8(stranger.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let gone = Child::new().pidfd();
    wait_readable(&[gone.as_fd()], Duration::from_secs(10));
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let dead = {
        child.0.kill().unwrap();
        let fd = child.pidfd();
        wait_readable(&[fd.as_fd()], Duration::from_secs(10));
        fd
    };
    let named = "named a process that it has not forked";
    for (fds, why, is_worker) in [
        (vec![dead], "", true),
        (vec![gone], BARREN, false),
        (vec![open_pidfd(1)], named, false),
        (vec![open_pidfd(getpid().as_raw_pid())], named, false),
        (vec![open_pidfd(stranger)], named, false),
        (
            vec![pipe],
            "forked a worker that cannot be told from other processes: invalid data",
            false,
        ),
        (vec![], NONSENSE, false),
    ] {
        let (mut server, _open) = server();
        (server.state, server.orders) = (State::Ready, 1);
        let entered = Entered {
            in_cgroup: false,
            result: Ok(None),
        };
        let (ours, theirs) = socket::pair().unwrap();
        let ordered = Ordered { order: 1, gate: ours };
        socket::send(&theirs, &entered.encode(), &[], false).unwrap();
        server.hear(Some(Report::Forked { order: 1 }), fds);
        let delivered = server.deliver(&ordered, false, &Poller::new().unwrap());
        let news = if why.is_empty() { vec![] } else { vec![lost(why)] };
        assert_eq!(std::mem::take(&mut server.news), news);
        assert!(match delivered {
            Delivered::Worker(delivery) => is_worker && delivery.pid == child.pid(),
            Delivered::Nothing => !is_worker,
            _ => false,
        });
        // The server may have workers, so it is not killed.
        assert!(!server.is_distrusted());
    }
    let _ = signal::send(stranger, libc::SIGKILL);
}

#[test]
fn imports_are_told_of_once_they_are_slow_and_are_waited_for_until_they_are_lost() {
    let begin = Instant::now();
    let second = |number| Duration::from_secs(number);
    let long = lost("ran out of time: while it imported x");
    let slow = |number| News::Slow(second(number));
    for (state, patience, looks, news, last) in [
        (State::Preparing, (2, 4), vec![1], vec![], State::Preparing),
        (
            State::Preparing,
            (2, 4),
            vec![2, 3],
            vec![slow(2)],
            State::Preparing,
        ),
        (
            State::Preparing,
            (2, 4),
            vec![3, 4],
            vec![slow(3), long.clone()],
            State::Closed,
        ),
        (
            State::Preparing,
            (2, 4),
            vec![5, 6],
            vec![long.clone()],
            State::Closed,
        ),
        (
            State::Preparing,
            (4, 4),
            vec![3, 4],
            vec![long.clone()],
            State::Closed,
        ),
        (
            State::Preparing,
            (u64::MAX, 4),
            vec![3, 4],
            vec![long],
            State::Closed,
        ),
        (State::Ready, (2, 4), vec![2, 4], vec![], State::Ready),
        (State::Closed, (2, 4), vec![2, 4], vec![], State::Closed),
    ] {
        let (mut server, [_link, _life, words]) = server();
        // There is no process to kill.
        server.pidfd = None;
        server.state = state;
        let [slow, lost] = [patience.0, patience.1].map(second);
        server.imports = Imports::begin(begin, Patience { slow, lost });
        rustix::io::write(&words, b"while it imported x\n").unwrap();
        for look in looks {
            assert_eq!(server.due().is_some(), server.state == State::Preparing);
            server.look_at_imports(begin + second(look));
        }
        assert_eq!((std::mem::take(&mut server.news), server.state), (news, last));
    }
}

#[test]
fn deaths_are_kept_until_nothing_is_left_of_their_group() {
    let (mut server, _open) = server();
    server.orders = 2;
    let ended = |order, pid| {
        let death = death(pid);
        Some(Report::Ended { order, death })
    };
    server.hear(ended(2, 12), Vec::new());
    // A second question gets the same answer.
    assert_eq!(server.death_of(2), Some(death(12)));
    assert_eq!(server.death_of(2), Some(death(12)));
    server.reap_all();
    server.hear(ended(1, 11), Vec::new());
    server.hear(ended(3, 13), Vec::new());
    assert_eq!(server.deaths.keys().copied().collect::<Vec<_>>(), [3]);
}

#[test]
fn answers_to_the_orders_of_a_group_that_has_ended_are_not_kept() {
    let (mut server, _open) = server();
    server.orders = 2;
    server.reap_all();
    let _children = crate::orphans::sharing::beside_others();
    let child = Child::new();
    server.hear(Some(Report::Forked { order: 1 }), vec![child.pidfd()]);
    server.hear(Some(Report::NotForked { order: 2, errno: 11 }), Vec::new());
    server.hear(Some(Report::Forked { order: 3 }), vec![child.pidfd()]);
    assert_eq!(server.answers.keys().copied().collect::<Vec<_>>(), [3]);
}

#[test]
fn what_is_heard_by_who_asks_for_something_else_is_to_be_acted_on() {
    let (mut server, [theirs, _life, _words]) = server();
    let poller = Poller::new().unwrap();
    assert!(!server.has_told(1, &poller) && !server.has_heard);
    let answer = Report::NotForked { order: 2, errno: 11 };
    socket::send(&theirs, &answer.encode(), &[], false).unwrap();
    assert!(!server.has_told(1, &poller));
    assert!(server.has_heard);
}

#[test]
fn one_that_cannot_be_watched_leaves_no_zombie() {
    let _children = crate::orphans::sharing::beside_others();
    let mut child = process::Command::new("sleep").arg("600").spawn().unwrap();
    let pid = child.id() as i32;
    let (link, _theirs) = socket::pair().unwrap();
    Server::new(pid, None, link, None, Patience::default()).give_up(&Poller::new().unwrap());
    assert_eq!(child.wait().unwrap_err().raw_os_error(), Some(libc::ECHILD));
}

#[test]
fn an_order_comes_to_a_worker_or_to_nothing_and_is_not_waited_for() {
    let entered = |result| Entered {
        in_cgroup: true,
        result,
    };
    let lost_parent = Failure {
        step: Stage::ParentDeath,
        errno: 3,
    };
    let forked = Report::Forked { order: 1 };
    let not_forked = Report::NotForked { order: 1, errno: 11 };
    let late = format!("did not fork in {} s", FORK_PATIENCE.as_secs());
    let barren = "could not fork: Resource temporarily unavailable (os error 11)";
    let good = || Some(entered(Ok(None)).encode());
    let orphan = || Some(entered(Err(lost_parent)).encode());
    let answer = || Some(forked.clone());
    for (report, gate, is_late, what, why) in [
        (None, None, false, "ordered", ""),
        (None, None, true, "nothing", late.as_str()),
        (Some(not_forked), None, false, "nothing", barren),
        (answer(), None, false, "forked", ""),
        (answer(), None, true, "nothing", BARREN),
        (answer(), good(), false, "worker", ""),
        (answer(), good(), true, "worker", ""),
        (answer(), orphan(), false, "nothing", BARREN),
        (answer(), Some(b"x".to_vec()), false, "nothing", BARREN),
    ] {
        let (mut server, _open) = server();
        server.state = State::Ready;
        let delivered = deliver(&mut server, report, gate, is_late);
        let news = if why.is_empty() { vec![] } else { vec![lost(why)] };
        assert_eq!((delivered, std::mem::take(&mut server.news)), (what, news));
    }
}

/// The result of an order after this report of the server and this message through the gate.
fn deliver(
    server: &mut Server,
    report: Option<Report>,
    gate: Option<Vec<u8>>,
    is_late: bool,
) -> &'static str {
    let (ours, theirs) = socket::pair().unwrap();
    let ordered = Ordered { order: 1, gate: ours };
    if let Some(bytes) = gate {
        socket::send(&theirs, &bytes, &[], false).unwrap();
    }
    let _children = crate::orphans::sharing::beside_others();
    let child = Child::new();
    if let Some(report) = report {
        server.hear(Some(report), vec![child.pidfd()]);
    }
    match server.deliver(&ordered, is_late, &Poller::new().unwrap()) {
        Delivered::Worker(delivery) => {
            assert_eq!((delivery.pid, delivery.entered.result), (child.pid(), Ok(None)));
            "worker"
        }
        Delivered::Ordered => "ordered",
        Delivered::Forked => "forked",
        Delivered::Nothing => "nothing",
    }
}

#[test]
fn a_worker_that_is_cancelled_finds_its_gate_shut_whoever_holds_a_copy() {
    let (gate, theirs) = socket::pair().unwrap();
    let _copy = gate.try_clone().unwrap();
    let ordered = Ordered { order: 1, gate };
    ordered.cancel();
    assert_eq!(rustix::io::read(&theirs, &mut [0; 1]), Ok(0));
}

#[test]
fn a_refusal_is_heard_although_the_server_has_ended() {
    let (ours, theirs) = socket::pair().unwrap();
    socket::send(&theirs, &Report::Importing.encode(), &[], false).unwrap();
    let text = b"cannot import half".to_vec();
    socket::send(&theirs, &Report::Refused { text }.encode(), &[], false).unwrap();
    drop(theirs);
    assert_eq!(refusal(&ours).unwrap(), "refused: cannot import half");
    assert_eq!(refusal(&ours), None);
}
