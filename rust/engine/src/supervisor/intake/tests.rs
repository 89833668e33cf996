//! Tests an agent with real workers. It gets each signal as if it had read it, so that no signal hits the test's
//! process.

use std::ffi::CString;
use std::sync::RwLockWriteGuard;

use super::*;
use crate::event::{Ending, Exit};
use crate::features::Features;
use crate::guard::{Agent, is_parent};
use crate::orphans::sharing;
use crate::signals::Table;
use crate::spawn::open_files_limit;
use crate::spec::{EnvEntry, LaunchSpec, Stdio, WorkerSpec};
use crate::sys::signal::SignalSet;

const GRACE: Duration = Duration::from_secs(60);
/// Longer than any test needs on a busy machine.
const LIMIT: Duration = Duration::from_secs(20);
/// A worker that prints a line when it is ready, and ends when it must write a checkpoint or stop.
const POLITE: &str = "trap 'exit 0' USR1; trap 'exit 4' TERM; echo ready; while :; do sleep 0.02; done";
/// A worker that prints the signals that it gets, and goes on.
const DEAF: &str = "trap 'echo usr1' USR1; trap 'echo term' TERM; echo ready; while :; do sleep 0.02; done";

fn table() -> Table {
    Table::new([
        (libc::SIGTERM, Meaning::Stop),
        (libc::SIGHUP, Meaning::Stop),
        (libc::SIGUSR1, Meaning::Preempt),
        (libc::SIGUSR2, Meaning::Forward),
        (40, Meaning::Preempt),
    ])
    .unwrap()
}

fn parent() -> i32 {
    rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get())
}

fn group(scripts: &[&str]) -> LaunchSpec {
    let worker = |script: &&str| WorkerSpec {
        argv: ["/bin/sh", "-c", script]
            .map(|word| CString::new(word).unwrap())
            .to_vec(),
        stdio: [Stdio::Null, Stdio::Pipe, Stdio::Null],
        ..WorkerSpec::default()
    };
    LaunchSpec {
        workers: scripts.iter().map(worker).collect(),
        env: vec![EnvEntry::new(b"PATH", b"/usr/bin:/bin").unwrap()],
        grace: GRACE,
        ..LaunchSpec::default()
    }
}

struct Scene {
    supervisor: Supervisor,
    events: Vec<Event>,
    /// Dropped last.
    _alone: RwLockWriteGuard<'static, ()>,
}

impl Scene {
    fn new(preempt_grace: Option<Duration>, guard_pid: i32) -> Self {
        let alone = sharing::alone();
        let agent = Agent {
            guard: None,
            guard_pid,
            foreground_group: crate::sys::process_group(),
            token: crate::token::random(),
            table: table(),
            preempt_grace,
            mask: SignalSet::default(),
            open_files: open_files_limit(),
            features: Features {
                cgroup: false,
                ..Features::from_environment()
            },
            cgroup: None,
        };
        Self {
            supervisor: Supervisor::new(Some(agent)).unwrap(),
            events: Vec::new(),
            _alone: alone,
        }
    }

    fn started(preempt_grace: Option<Duration>, scripts: &[&str]) -> Self {
        let mut scene = Self::new(preempt_grace, parent());
        scene.start(scripts);
        for worker in 0..scripts.len() {
            scene.until(|scene| scene.said(worker).ends_with("ready\n"));
        }
        scene
    }

    fn start(&mut self, scripts: &[&str]) {
        self.events.clear();
        self.supervisor.start(group(scripts)).unwrap();
    }

    /// A group whose owner decides what a signal does.
    fn start_telling(&mut self, scripts: &[&str]) {
        self.events.clear();
        let spec = LaunchSpec {
            tells_signals: true,
            ..group(scripts)
        };
        self.supervisor.start(spec).unwrap();
    }

    fn hear(&mut self, signal: i32) {
        self.take(Received::own(signal));
    }

    fn take(&mut self, received: Received) {
        self.supervisor.take_signal(received);
    }

    /// Lets the group take it that so much time is over.
    fn pass(&mut self, time: Duration) {
        let job = self.supervisor.job.as_mut().unwrap();
        for action in job.group.step(Instant::now() + time, Input::Tick) {
            self.supervisor.act(action);
        }
    }

    /// Turns until `is_so` returns true. Every turn is woken, because the test's first thread takes the SIGCHLD that
    /// would wake it.
    #[track_caller]
    fn until(&mut self, is_so: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        loop {
            self.events.extend(self.supervisor.take_events());
            if is_so(self) {
                return;
            }
            assert!(begin.elapsed() < LIMIT, "too late: {:?}", self.events);
            self.supervisor.check_if_clearing();
            rustix::io::write(&self.supervisor.wake, &1u64.to_ne_bytes()).unwrap();
            self.supervisor.turn().unwrap();
        }
    }

    /// Waits for the end of the group. Returns the signal that ended the group, and its first failure.
    fn end(&mut self) -> (Option<i32>, Option<Exit>) {
        self.until(|scene| matches!(scene.events.last(), Some(Event::Ended { .. })));
        let Some(Event::Ended {
            stop_signal,
            first_failure,
            ..
        }) = self.events.last().cloned()
        else {
            unreachable!()
        };
        (stop_signal, first_failure)
    }

    fn said(&self, wanted: usize) -> String {
        let data = |event: &Event| match event {
            Event::Output { worker, data, .. } if *worker == wanted => Some(data.clone()),
            _ => None,
        };
        let bytes: Vec<u8> = self.events.iter().filter_map(data).flatten().collect();
        String::from_utf8(bytes).unwrap()
    }

    fn endings(&self) -> Vec<(usize, Ending, bool)> {
        let ending = |event: &Event| match event {
            Event::Exited(exit) => Some((exit.worker, exit.ending.clone(), exit.caused_by_stop)),
            _ => None,
        };
        let mut endings: Vec<_> = self.events.iter().filter_map(ending).collect();
        endings.sort_by_key(|(worker, ..)| *worker);
        endings
    }

    /// The signals so far, each with the agent's reaction.
    fn signals(&self) -> Vec<(i32, SignalAction)> {
        let heard = |event: &Event| match event {
            Event::SignalReceived { signal, action, .. } => Some((*signal, *action)),
            _ => None,
        };
        self.events.iter().filter_map(heard).collect()
    }

    fn stops(&self) -> Vec<(StopReason, i32, Duration)> {
        let stop = |event: &Event| match event {
            Event::Stopping {
                reason,
                signal,
                grace,
            } => Some((*reason, *signal, *grace)),
            _ => None,
        };
        self.events.iter().filter_map(stop).collect()
    }

    fn has_killed(&self) -> bool {
        self.events
            .iter()
            .any(|event| matches!(event, Event::Killing { .. }))
    }
}

fn killed() -> Ending {
    Ending::Signal {
        number: libc::SIGKILL,
        core: false,
    }
}

#[test]
fn preempted_workers_end_by_themselves_and_the_job_was_stopped_by_that_signal() {
    let mut scene = Scene::started(Some(Duration::from_secs(600)), &[POLITE, POLITE]);
    scene.hear(libc::SIGUSR1);
    assert_eq!(scene.end(), (Some(libc::SIGUSR1), None));
    let ended = |worker| (worker, Ending::Code(0), true);
    assert_eq!(scene.endings(), [ended(0), ended(1)]);
    assert_eq!(scene.signals(), [(libc::SIGUSR1, SignalAction::Preempt)]);
    let stopping = (
        StopReason::Signal(libc::SIGUSR1),
        libc::SIGUSR1,
        Duration::from_secs(600),
    );
    assert_eq!(scene.stops(), [stopping]);
    assert!(!scene.has_killed());
}

/// A process that is called so, as long as this lives.
struct Namesake(std::process::Child);

impl Namesake {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("dsl-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let program = folder.join(name);
        std::fs::copy("/bin/sleep", &program).unwrap();
        #[expect(clippy::disallowed_types, reason = "the process here is no worker")]
        let child = std::process::Command::new(&program).arg("60").spawn().unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        Self(child)
    }

    fn sends(&self, signal: i32, passed_on: bool) -> Received {
        Received {
            sender: self.0.id() as i32,
            passed_on,
            ..Received::own(signal)
        }
    }
}

impl Drop for Namesake {
    fn drop(&mut self) {
        // The agent may have ended it: it is a child of this process.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn what_slurm_sends_to_every_process_is_not_passed_on() {
    let daemon = Namesake::new("slurmstepd");
    let mut scene = Scene::started(Some(Duration::from_millis(300)), &[DEAF]);
    scene.take(daemon.sends(libc::SIGUSR1, false));
    assert_eq!(scene.end(), (Some(libc::SIGUSR1), None));
    assert_eq!(scene.said(0), "ready\n");
    assert_eq!(scene.signals(), [(libc::SIGUSR1, SignalAction::Preempt)]);
}

#[test]
fn what_slurm_sends_to_the_guard_alone_and_others_to_us_is_passed_on() {
    for (name, passed_on) in [("slurmstepd", true), ("other", false)] {
        let daemon = Namesake::new(name);
        let mut scene = Scene::started(Some(Duration::from_secs(600)), &[POLITE]);
        scene.take(daemon.sends(libc::SIGUSR1, passed_on));
        assert_eq!(scene.end(), (Some(libc::SIGUSR1), None), "{name}");
        assert_eq!(scene.endings(), [(0, Ending::Code(0), true)], "{name}");
    }
}

#[test]
fn a_preemption_without_a_time_of_its_own_leaves_the_groups_grace() {
    let mut scene = Scene::started(None, &[POLITE]);
    scene.hear(libc::SIGUSR1);
    scene.end();
    assert_eq!(scene.stops()[0].2, GRACE);
}

#[test]
fn whoever_does_not_end_in_the_time_of_a_preemption_is_killed_and_is_no_cause() {
    let grace = Duration::from_secs(600);
    let mut scene = Scene::started(
        Some(grace),
        &[
            DEAF,
            "trap 'exit 3' USR1; echo ready; while :; do sleep 0.02; done",
        ],
    );
    scene.hear(libc::SIGUSR1);
    scene.until(|scene| scene.said(0).contains("usr1") && scene.endings().len() == 1);
    scene.pass(grace);
    assert_eq!(scene.end(), (Some(libc::SIGUSR1), None));
    assert_eq!(scene.endings(), [(0, killed(), true), (1, Ending::Code(3), true)]);
}

#[test]
fn what_is_repeated_or_forwarded_during_a_preemption_changes_nothing() {
    let mut scene = Scene::started(Some(Duration::from_secs(600)), &[DEAF]);
    scene.hear(libc::SIGUSR1);
    scene.until(|scene| scene.said(0).contains("usr1"));
    for signal in [libc::SIGUSR1, 40, libc::SIGUSR2, libc::SIGCONT] {
        scene.hear(signal);
    }
    assert_eq!(scene.supervisor.moment(), Moment::Preempted);
    scene.hear(libc::SIGTERM);
    scene.until(|scene| scene.said(0).ends_with("term\n"));
    assert_eq!(scene.said(0), "ready\nusr1\nterm\n");
    scene.hear(libc::SIGTERM);
    assert_eq!(scene.end(), (Some(libc::SIGUSR1), None));
    let (preempt, stop) = (SignalAction::Preempt, SignalAction::Stop);
    let heard = [
        (libc::SIGUSR1, preempt),
        (libc::SIGTERM, stop),
        (libc::SIGTERM, stop),
    ];
    assert_eq!(scene.signals(), heard);
}

#[test]
fn the_first_stop_signal_of_a_preempted_group_shortens_the_time_and_the_second_ends_it() {
    let mut scene = Scene::started(Some(Duration::from_secs(600)), &[DEAF]);
    let next_tick = |scene: &Scene| scene.supervisor.job.as_ref().unwrap().group.next_tick().unwrap();
    scene.hear(libc::SIGUSR1);
    scene.until(|scene| scene.said(0).contains("usr1"));
    assert!(next_tick(&scene) > Instant::now() + GRACE);
    scene.hear(libc::SIGTERM);
    scene.until(|scene| scene.said(0).contains("term"));
    assert!(next_tick(&scene) <= Instant::now() + GRACE);
    assert!(!scene.has_killed());
    scene.hear(libc::SIGTERM);
    scene.end();
    assert_eq!(scene.endings(), [(0, killed(), true)]);
}

#[test]
fn a_signal_between_two_groups_stops_the_next_at_once() {
    for (first, later) in [
        (libc::SIGUSR1, libc::SIGTERM),
        (libc::SIGTERM, libc::SIGUSR1),
        (40, libc::SIGUSR1),
    ] {
        let mut scene = Scene::new(Some(Duration::from_secs(600)), parent());
        scene.hear(first);
        scene.hear(later);
        scene.start(&[POLITE, POLITE]);
        assert_eq!(scene.end(), (Some(first), None));
        let cancelled = |worker| (worker, Ending::Cancelled, true);
        assert_eq!(scene.endings(), [cancelled(0), cancelled(1)]);
        assert_eq!(
            scene.stops(),
            [(StopReason::Signal(first), first, Duration::ZERO)]
        );
        scene.start(&["exit 0"]);
        assert_eq!(scene.end(), (None, None));
    }
}

#[test]
fn a_signal_while_a_failed_group_ends_stops_the_attempt_after_it() {
    for signal in [libc::SIGTERM, libc::SIGUSR1] {
        let mut scene = ending_scene();
        scene.hear(signal);
        scene.supervisor.kill();
        let (stop_signal, cause) = scene.end();
        assert_eq!((stop_signal, cause.map(|exit| exit.worker)), (None, Some(0)));
        scene.start(&[POLITE]);
        assert_eq!(scene.end(), (Some(signal), None));
        assert_eq!(scene.endings(), [(0, Ending::Cancelled, true)]);
    }
}

/// A group with one worker that has failed, and another that does not end.
fn ending_scene() -> Scene {
    let mut scene = Scene::started(
        None,
        &[
            "trap 'exit 3' USR2; echo ready; while :; do sleep 0.02; done",
            "trap '' TERM USR2; echo ready; exec sleep 600",
        ],
    );
    scene.hear(libc::SIGUSR2);
    scene.until(|scene| scene.endings().len() == 1);
    scene
}

#[test]
fn a_job_that_stands_still_starts_nobody_until_it_goes_on() {
    let stop = |scene: &mut Scene| scene.hear(libc::SIGTSTP);
    let before: [fn(&mut Scene); 2] = [
        |scene| scene.start(&[POLITE]),
        |scene| {
            scene.start_telling(&[POLITE]);
        },
    ];
    for start in before {
        let mut scene = Scene::new(None, parent());
        stop(&mut scene);
        start(&mut scene);
        assert!(!scene.supervisor.is_starting());
        scene.hear(libc::SIGCONT);
        assert!(scene.supervisor.is_starting());
        scene.supervisor.kill();
        scene.end();
    }
}

#[test]
fn ctrl_z_and_fg_while_a_group_ends_hold_for_the_next_attempt() {
    for (heard, is_starting) in [
        (&[libc::SIGTSTP][..], false),
        (&[libc::SIGTSTP, libc::SIGCONT], true),
        (&[libc::SIGTSTP, libc::SIGCONT, libc::SIGTSTP], false),
    ] {
        let mut scene = ending_scene();
        for signal in heard {
            scene.hear(*signal);
        }
        scene.supervisor.kill();
        scene.end();
        scene.start(&[POLITE]);
        assert_eq!(scene.supervisor.is_starting(), is_starting, "{heard:?}");
        scene.hear(libc::SIGCONT);
        assert!(scene.supervisor.is_starting());
        scene.supervisor.kill();
        scene.end();
    }
}

#[test]
fn a_group_that_is_ended_while_the_job_stands_still_is_followed_by_one_that_waits() {
    let mut scene = Scene::started(None, &[POLITE]);
    scene.hear(libc::SIGTSTP);
    scene.supervisor.stop(libc::SIGTERM, None);
    // The worker may have been stopped after the SIGCONT, so kill it.
    scene.supervisor.kill();
    scene.end();
    scene.start(&[POLITE]);
    assert!(!scene.supervisor.is_starting());
    scene.supervisor.kill();
    scene.end();
}

#[test]
fn what_the_owner_of_a_group_has_stopped_is_that_group() {
    let mut scene = Scene::started(None, &[POLITE]);
    scene.supervisor.signal(libc::SIGTSTP, None);
    scene.supervisor.kill();
    scene.end();
    scene.start(&[POLITE]);
    assert!(scene.supervisor.is_starting());
    scene.supervisor.kill();
    scene.end();
}

#[test]
fn a_signal_of_no_meaning_here_does_nothing() {
    let mut scene = Scene::started(None, &[DEAF]);
    for signal in [libc::SIGINT, libc::SIGQUIT, 41, 64] {
        scene.hear(signal);
    }
    assert_eq!(scene.supervisor.moment(), Moment::Running);
    assert_eq!(scene.signals(), []);
    scene.supervisor.kill();
    scene.end();
}

/// G1, where a guard cannot be watched through a descriptor.
#[test]
fn the_last_signal_of_all_means_the_guards_death_when_the_guard_is_dead() {
    let stranger = std::process::id() as i32;
    assert!(!is_parent(stranger));
    let mut scene = Scene::new(None, stranger);
    scene.start(&[DEAF]);
    scene.until(|scene| scene.said(0).contains("ready"));
    scene.hear(64);
    assert_eq!(scene.end(), (None, None));
    assert_eq!(scene.endings(), [(0, killed(), true)]);
    assert_eq!(
        scene.stops(),
        [(StopReason::GuardLost, libc::SIGKILL, Duration::ZERO)]
    );
    // The next group has no guard, either.
    scene.start(&["exit 0"]);
    scene.end();
    assert_eq!(scene.endings(), [(0, Ending::Cancelled, true)]);
}

/// systemd, Slurm and `pkill` send a signal to both guard and agent, and the guard passes its copy on.
#[test]
fn a_stop_that_comes_directly_and_through_the_guard_leaves_the_grace() {
    let direct = Received {
        sender: 1,
        ..Received::own(libc::SIGTERM)
    };
    let passed_on = Received {
        passed_on: true,
        ..Received::own(libc::SIGTERM)
    };
    for (first, second) in [(direct, passed_on), (passed_on, direct)] {
        let mut scene = Scene::started(None, &[DEAF]);
        scene.take(first);
        scene.take(second);
        scene.until(|scene| scene.said(0).ends_with("term\n"));
        assert!(!scene.has_killed());
        assert_eq!(scene.signals(), [(libc::SIGTERM, SignalAction::Stop)]);
        // A real second request counts.
        scene.take(passed_on);
        assert_eq!(scene.end(), (Some(libc::SIGTERM), None));
        assert_eq!(scene.endings(), [(0, killed(), true)]);
    }
}

#[test]
fn a_group_whose_owner_is_told_of_signals_gets_none_of_them() {
    let mut scene = Scene::new(Some(Duration::from_secs(600)), parent());
    scene.start_telling(&[DEAF]);
    scene.until(|scene| scene.said(0).contains("ready"));
    let heard = [
        (libc::SIGUSR2, SignalAction::Forward),
        (libc::SIGUSR1, SignalAction::Preempt),
        (libc::SIGTERM, SignalAction::Stop),
        (libc::SIGTERM, SignalAction::Stop),
        (libc::SIGHUP, SignalAction::Stop),
    ];
    for (signal, _) in heard {
        scene.hear(signal);
    }
    scene.until(|scene| scene.signals() == heard);
    assert_eq!(scene.stops(), []);
    // They are not forwarded to an ending group, and not reported.
    scene.hear(libc::SIGUSR2);
    scene.hear(libc::SIGUSR1);
    scene.supervisor.signal(libc::SIGUSR1, None);
    scene.until(|scene| scene.said(0).ends_with("usr1\n"));
    scene.supervisor.stop(libc::SIGTERM, None);
    scene.until(|scene| scene.said(0).ends_with("term\n"));
    assert_eq!(scene.said(0), "ready\nusr1\nterm\n");
    scene.hear(libc::SIGTERM);
    scene.supervisor.kill();
    assert_eq!(scene.end(), (None, None));
    assert_eq!(scene.signals().len(), heard.len() + 1);
    assert_eq!(scene.stops(), [(StopReason::Request, libc::SIGTERM, GRACE)]);
    // The next group does not end by these signals, either.
    scene.start(&["exit 0"]);
    assert_eq!(scene.end(), (None, None));
    assert_eq!(scene.endings(), [(0, Ending::Code(0), false)]);
}

#[test]
fn a_first_stop_to_a_group_that_its_owner_stops_is_told_as_one_that_changes_nothing() {
    let mut scene = Scene::new(None, parent());
    scene.start_telling(&[DEAF]);
    scene.until(|scene| scene.said(0).contains("ready"));
    scene.supervisor.stop(libc::SIGTERM, None);
    scene.hear(libc::SIGTERM);
    scene.hear(libc::SIGTERM);
    let (ignore, stop) = (SignalAction::Ignore, SignalAction::Stop);
    scene.until(|scene| scene.signals() == [(libc::SIGTERM, ignore), (libc::SIGTERM, stop)]);
    assert!(!scene.has_killed());
    scene.supervisor.kill();
    assert_eq!(scene.end(), (None, None));
}

#[test]
fn a_signal_before_a_group_whose_owner_is_told_stops_nobody() {
    let mut scene = Scene::new(None, parent());
    scene.hear(libc::SIGTERM);
    scene.events.extend(scene.supervisor.take_events());
    assert_eq!(scene.signals(), [(libc::SIGTERM, SignalAction::Stop)]);
    scene.start_telling(&["exit 0"]);
    assert_eq!(scene.end(), (None, None));
    assert_eq!(scene.endings(), [(0, Ending::Code(0), false)]);
    assert_eq!(scene.stops(), []);
    scene.start(&["exit 0"]);
    assert_eq!(scene.end(), (None, None));
}

/// G1, where a guard cannot be watched through a descriptor.
#[test]
fn a_lost_guard_ends_also_a_group_whose_owner_is_told_of_signals() {
    let mut scene = Scene::new(None, std::process::id() as i32);
    scene.start_telling(&[DEAF]);
    scene.until(|scene| scene.said(0).contains("ready"));
    scene.hear(64);
    assert_eq!(scene.end(), (None, None));
    assert_eq!(scene.endings(), [(0, killed(), true)]);
}

#[test]
fn a_key_reaches_the_foreground_group_and_a_hang_up_only_when_the_kernel_tells_the_group() {
    let scene = Scene::new(None, parent());
    let guard = parent();
    let shell = guard + 1;
    for (signal, from_terminal, sender, leader, expected) in [
        (libc::SIGINT, true, 0, guard, true),
        (libc::SIGTSTP, true, 0, shell, true),
        (libc::SIGHUP, true, 0, shell, true),
        (libc::SIGHUP, true, 0, guard, false),
        (libc::SIGHUP, true, shell, shell, false),
        (libc::SIGHUP, false, 1, shell, false),
        (libc::SIGINT, false, shell, shell, false),
    ] {
        let received = Received {
            from_terminal,
            sender,
            ..Received::own(signal)
        };
        let link = scene.supervisor.link.as_ref().unwrap();
        let reached = link.has_reached_foreground(received, leader);
        assert_eq!(reached, expected, "{received:?}, session of {leader}");
    }
}
