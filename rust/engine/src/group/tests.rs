use super::*;
use crate::spec::WorkerSpec;

mod world;

const GRACE: Duration = Duration::from_secs(10);
const REQUEST: Input = Input::Stop {
    reason: StopReason::Request,
    signal: libc::SIGINT,
    grace: GRACE,
};
const CLEAN: Input = Input::WorkerEnded {
    running: true,
    failed: false,
};
const FAILED: Input = Input::WorkerEnded {
    running: true,
    failed: true,
};
const NEVER_RAN: Input = Input::WorkerEnded {
    running: false,
    failed: true,
};
const GONE: Input = Input::Tree { empty: true };
const LEFT: Input = Input::Tree { empty: false };
const KILL: Input = Input::Kill {
    reason: StopReason::Request,
};
const FIRST_KILL: Action = Action::KillTree { first: true };
const END: Action = Action::End { survivors: false };

fn launch(workers: usize, on_failure: OnFailure, grace: Duration) -> LaunchSpec {
    LaunchSpec {
        workers: vec![WorkerSpec::default(); workers],
        on_failure,
        grace,
        ..LaunchSpec::default()
    }
}

/// A group with a clock that starts at zero.
struct Scene {
    group: Group,
    zero: Instant,
}

impl Scene {
    fn with(workers: usize, on_failure: OnFailure, grace: Duration) -> Self {
        Self {
            group: Group::new(&launch(workers, on_failure, grace), false),
            zero: Instant::now(),
        }
    }

    /// A group whose first `running` workers have started.
    fn started(workers: usize, running: usize) -> Self {
        let mut scene = Self::with(workers, OnFailure::Stop, GRACE);
        for _ in 0..running {
            scene.is(0, Input::Started, &[]);
        }
        scene
    }

    /// A group whose workers hear signals alone.
    fn of_ranks(workers: usize, grace: Duration) -> Self {
        let mut scene = Self::with(workers, OnFailure::Stop, grace);
        scene.group.scope = SignalScope::Rank;
        for _ in 0..workers {
            scene.is(0, Input::Started, &[]);
        }
        scene
    }

    fn step(&mut self, ms: u64, input: Input) -> Vec<Action> {
        self.group.step(self.zero + Duration::from_millis(ms), input)
    }

    #[track_caller]
    fn is(&mut self, ms: u64, input: Input, expected: &[Action]) {
        assert_eq!(self.step(ms, input), expected, "{input:?} after {ms} ms");
    }

    fn is_ending(&self) -> bool {
        self.group.moment() != Moment::Running
    }

    fn has_ended(&self) -> bool {
        self.group.phase == Phase::Ended
    }

    #[track_caller]
    fn next_tick_is(&self, ms: u64) {
        let expected = self.zero + Duration::from_millis(ms);
        assert_eq!(self.group.next_tick(), Some(expected));
    }
}

fn stop_after(grace_ms: u64) -> Input {
    Input::Stop {
        reason: StopReason::Request,
        signal: libc::SIGTERM,
        grace: Duration::from_millis(grace_ms),
    }
}

fn signalled(number: i32) -> Input {
    Input::Stop {
        reason: StopReason::Signal(number),
        signal: number,
        grace: GRACE,
    }
}

fn preempt(grace_ms: u64) -> Input {
    Input::Preempt {
        signal: libc::SIGUSR1,
        grace: Duration::from_millis(grace_ms),
    }
}

fn report(reason: StopReason, signal: i32, grace: Duration) -> Action {
    Action::ReportStop {
        reason,
        signal,
        grace,
    }
}

#[test]
fn a_group_that_ends_by_itself_asks_for_what_is_left_once_and_never_ticks() {
    let mut scene = Scene::started(2, 2);
    scene.is(1, CLEAN, &[]);
    assert_eq!(scene.group.next_tick(), None);
    scene.is(2, CLEAN, &[Action::CheckTree]);
    assert!(!scene.is_ending());
    scene.is(2, GONE, &[END]);
    assert!(scene.has_ended());
    assert_eq!(scene.group.next_tick(), None);
    assert_eq!(scene.group.stop_signal, None);
}

#[test]
fn the_first_failure_stops_the_others_with_one_deadline() {
    let mut scene = Scene::started(3, 3);
    let stopping = [
        report(StopReason::Failure, libc::SIGTERM, GRACE),
        Action::Broadcast(libc::SIGTERM),
    ];
    scene.is(5, FAILED, &stopping);
    assert!(scene.is_ending() && !scene.group.may_start());
    scene.next_tick_is(10_005);
    scene.is(6, FAILED, &[]);
    scene.next_tick_is(10_005);
    scene.is(7, FAILED, &[Action::CheckTree]);
    scene.is(7, GONE, &[END]);
}

#[test]
fn the_failure_of_the_only_worker_leaves_nobody_to_stop() {
    let mut scene = Scene::started(1, 1);
    scene.is(0, FAILED, &[Action::CheckTree]);
    scene.is(0, GONE, &[END]);
}

#[test]
fn a_failure_cancels_what_has_not_started() {
    for running in [1, 3] {
        let mut scene = Scene::started(5, running);
        let mut expected = vec![
            report(StopReason::Failure, libc::SIGTERM, GRACE),
            Action::Broadcast(libc::SIGTERM),
            Action::CancelPending,
        ];
        if running == 1 {
            expected.push(Action::CheckTree);
        }
        scene.is(0, FAILED, &expected);
        for _ in running..4 {
            scene.is(0, NEVER_RAN, &[]);
        }
    }
}

#[test]
fn a_worker_that_cannot_be_started_is_a_failure_too() {
    let mut scene = Scene::started(3, 1);
    let stopping = [
        report(StopReason::Failure, libc::SIGTERM, GRACE),
        Action::Broadcast(libc::SIGTERM),
        Action::CancelPending,
    ];
    scene.is(0, NEVER_RAN, &stopping);
    scene.is(0, NEVER_RAN, &[]);
    scene.is(1, FAILED, &[Action::CheckTree]);
}

#[test]
fn under_report_a_failure_changes_nothing_for_the_others() {
    let mut scene = Scene::with(3, OnFailure::Report, GRACE);
    scene.is(0, Input::Started, &[]);
    scene.is(0, FAILED, &[]);
    assert!(scene.group.may_start() && !scene.is_ending());
    scene.is(1, NEVER_RAN, &[]);
    scene.is(2, Input::Started, &[]);
    scene.is(3, FAILED, &[Action::CheckTree]);
    scene.is(3, GONE, &[END]);
}

#[test]
fn an_added_worker_is_one_of_the_group() {
    let mut scene = Scene::started(1, 1);
    scene.is(0, Input::Added, &[]);
    assert!(scene.group.may_start());
    scene.is(1, CLEAN, &[]);
    scene.is(2, Input::Started, &[]);
    scene.is(3, CLEAN, &[Action::CheckTree]);
    scene.is(3, LEFT, &[Action::TerminateTree]);
    assert!(!scene.group.may_add());
    scene.is(4, GONE, &[END]);
    assert!(!scene.group.may_add());
}

#[test]
fn the_failure_of_an_added_worker_stops_the_others_and_theirs_cancels_it() {
    let stopping = [
        report(StopReason::Failure, libc::SIGTERM, GRACE),
        Action::Broadcast(libc::SIGTERM),
    ];
    let mut scene = Scene::started(1, 1);
    scene.is(0, Input::Added, &[]);
    scene.is(0, Input::Started, &[]);
    scene.is(1, FAILED, &stopping);
    assert!(!scene.group.may_add());
    let mut scene = Scene::started(2, 2);
    scene.is(0, Input::Added, &[]);
    scene.is(1, FAILED, &[&stopping[..], &[Action::CancelPending]].concat());
    scene.is(1, NEVER_RAN, &[]);
    scene.is(2, FAILED, &[Action::CheckTree]);
}

/// An open group of no workers, which reports failures.
fn open() -> Scene {
    let mut scene = Scene::with(0, OnFailure::Report, GRACE);
    scene.group.stays_open = true;
    scene
}

#[test]
fn an_open_group_goes_on_without_workers_until_it_is_stopped() {
    let report = |signal, grace| report(StopReason::Request, signal, grace);
    let stopping = [
        report(libc::SIGINT, GRACE),
        Action::Broadcast(libc::SIGINT),
        Action::CheckTree,
    ];
    let killing = [
        report(libc::SIGKILL, Duration::ZERO),
        FIRST_KILL,
        Action::CheckTree,
    ];
    for (ends, expected) in [(REQUEST, &stopping), (KILL, &killing)] {
        let mut scene = open();
        for end in [CLEAN, FAILED] {
            scene.is(0, Input::Added, &[]);
            scene.is(0, Input::Started, &[]);
            scene.is(1, end, &[]);
        }
        assert!(scene.group.may_add() && scene.group.next_tick().is_none());
        scene.is(2, ends, expected);
        assert!(!scene.group.may_add());
        scene.is(2, GONE, &[END]);
    }
}

#[test]
fn what_the_workers_of_an_open_group_have_left_running_ends_with_the_group() {
    let mut scene = open();
    scene.step(0, REQUEST);
    scene.is(0, LEFT, &[Action::TerminateTree]);
    scene.next_tick_is(2_000);
    scene.is(2_000, Input::Tick, &[FIRST_KILL]);
}

#[test]
fn a_failure_ends_an_open_group_if_it_stops_the_others() {
    let mut scene = Scene::started(1, 1);
    scene.group.stays_open = true;
    scene.is(0, FAILED, &[Action::CheckTree]);
    scene.is(0, GONE, &[END]);
}

#[test]
fn so_many_workers_run_at_once_and_ordered_ones_count() {
    let mut scene = Scene::with(4, OnFailure::Report, GRACE);
    assert!(scene.group.has_room(1_000_000));
    scene.group.at_once = 2;
    assert!(scene.group.has_room(1) && !scene.group.has_room(2));
    for _ in 0..2 {
        scene.is(0, Input::Started, &[]);
    }
    assert!(scene.group.may_start() && !scene.group.has_room(0));
    scene.is(1, CLEAN, &[]);
    assert!(scene.group.has_room(0) && scene.group.left() == 3);
}

#[test]
fn a_stop_before_anybody_started_cancels_all_and_starts_nobody() {
    let mut scene = Scene::started(2, 0);
    let stopping = [
        report(StopReason::Request, libc::SIGINT, GRACE),
        Action::Broadcast(libc::SIGINT),
        Action::CancelPending,
    ];
    assert!(scene.group.may_start());
    scene.is(0, REQUEST, &stopping);
    assert!(!scene.group.may_start());
    scene.is(0, NEVER_RAN, &[]);
    scene.is(0, NEVER_RAN, &[Action::CheckTree]);
    scene.is(0, GONE, &[END]);
}

#[test]
fn another_stop_can_only_shorten_the_deadline_and_signals_nobody_again() {
    let mut scene = Scene::started(1, 1);
    scene.step(0, REQUEST);
    scene.next_tick_is(10_000);
    scene.is(100, stop_after(60_000), &[]);
    scene.next_tick_is(10_000);
    scene.is(200, stop_after(500), &[]);
    scene.next_tick_is(700);
    scene.is(300, signalled(libc::SIGTERM), &[]);
    scene.next_tick_is(700);
    scene.is(400, stop_after(0), &[FIRST_KILL]);
    scene.is(401, stop_after(0), &[]);
    scene.is(402, KILL, &[]);
}

#[test]
fn a_first_stop_without_grace_signals_before_it_kills() {
    let mut scene = Scene::started(1, 1);
    let stopping = [
        report(StopReason::Request, libc::SIGTERM, Duration::ZERO),
        Action::Broadcast(libc::SIGTERM),
    ];
    scene.is(3, stop_after(0), &stopping);
    scene.next_tick_is(3);
    scene.is(3, Input::Tick, &[FIRST_KILL]);
}

#[test]
fn the_deadline_kills_and_not_a_millisecond_before() {
    let mut scene = Scene::started(2, 2);
    scene.step(0, REQUEST);
    scene.is(9_999, Input::Tick, &[]);
    scene.is(10_000, Input::Tick, &[FIRST_KILL]);
    scene.is(10_001, FAILED, &[]);
    scene.is(10_002, FAILED, &[Action::CheckTree]);
    scene.is(10_002, GONE, &[END]);
}

#[test]
fn a_kill_says_why_and_does_not_wait() {
    for reason in [StopReason::Request, StopReason::GuardLost] {
        let mut scene = Scene::started(3, 2);
        let killing = [
            report(reason, libc::SIGKILL, Duration::ZERO),
            FIRST_KILL,
            Action::CancelPending,
        ];
        scene.is(0, Input::Kill { reason }, &killing);
        assert!(scene.group.is_clearing() && !scene.group.may_start());
        scene.is(0, NEVER_RAN, &[]);
        scene.is(1, FAILED, &[]);
        scene.is(1, FAILED, &[Action::CheckTree]);
    }
}

#[test]
fn a_guard_lost_while_stopping_kills_without_a_second_report() {
    let lost = Input::Kill {
        reason: StopReason::GuardLost,
    };
    let mut scene = Scene::started(1, 1);
    scene.step(0, REQUEST);
    scene.is(1, lost, &[FIRST_KILL]);

    let mut scene = Scene::started(1, 1);
    scene.step(0, CLEAN);
    scene.is(0, LEFT, &[Action::TerminateTree]);
    scene.is(1, lost, &[FIRST_KILL]);
}

#[test]
fn what_outlived_its_worker_is_asked_and_killed_after_the_shorter_of_grace_and_two_seconds() {
    for (grace_ms, expected_ms) in [(10_000, 2_000), (2_000, 2_000), (300, 300), (0, 0)] {
        let mut scene = Scene::with(1, OnFailure::Stop, Duration::from_millis(grace_ms));
        scene.step(0, Input::Started);
        scene.is(50, CLEAN, &[Action::CheckTree]);
        scene.is(50, LEFT, &[Action::TerminateTree]);
        assert!(scene.group.is_clearing());
        scene.next_tick_is(50 + expected_ms);
        scene.is(50, LEFT, &[]);
        scene.is(50 + expected_ms, Input::Tick, &[FIRST_KILL]);
        scene.is(60 + expected_ms, GONE, &[END]);
    }
}

/// A group of one worker that has ended well and left something running.
fn lingering(grace_ms: u64) -> Scene {
    let mut scene = Scene::with(1, OnFailure::Stop, Duration::from_millis(grace_ms));
    scene.group.lingers = true;
    scene.is(0, Input::Started, &[]);
    scene.is(0, CLEAN, &[Action::CheckTree]);
    scene.is(0, LEFT, &[]);
    assert!(scene.group.is_clearing());
    scene
}

fn leftovers(grace_ms: u64) -> Action {
    Action::ReportLeftovers {
        grace: Duration::from_millis(grace_ms),
    }
}

#[test]
fn what_outlives_workers_that_ended_well_has_the_grace_and_is_asked_shortly_before_its_end() {
    let mut scene = lingering(30_000);
    scene.next_tick_is(2_000);
    scene.is(1_999, Input::Tick, &[]);
    scene.is(2_000, Input::Tick, &[leftovers(28_000)]);
    scene.is(2_001, LEFT, &[]);
    scene.next_tick_is(29_000);
    scene.is(29_000, Input::Tick, &[leftovers(0), Action::TerminateTree]);
    scene.is(29_500, LEFT, &[]);
    scene.is(30_000, Input::Tick, &[FIRST_KILL]);
    scene.is(30_010, GONE, &[END]);
}

#[test]
fn what_ends_by_itself_in_that_time_is_neither_asked_nor_reported() {
    let mut scene = lingering(30_000);
    scene.is(1_500, GONE, &[END]);
}

#[test]
fn a_short_grace_is_not_announced() {
    let mut scene = lingering(1_000);
    scene.is(500, Input::Tick, &[leftovers(0), Action::TerminateTree]);
    scene.is(1_000, Input::Tick, &[FIRST_KILL]);
    let mut scene = lingering(0);
    scene.is(0, Input::Tick, &[leftovers(0), Action::TerminateTree]);
    scene.is(0, Input::Tick, &[FIRST_KILL]);
}

#[test]
fn a_stop_ends_what_workers_have_left_and_a_second_one_kills_it() {
    let mut scene = lingering(30_000);
    let report = report(StopReason::Signal(libc::SIGINT), libc::SIGINT, GRACE);
    let asked = [report, leftovers(0), Action::TerminateTree];
    assert_eq!(
        scene.group.moment(),
        Moment::Preempted,
        "the first signal does not insist"
    );
    scene.is(3_000, signalled(libc::SIGINT), &asked);
    scene.next_tick_is(5_000);
    scene.is(3_100, stop_after(0), &[FIRST_KILL]);
    assert_eq!(scene.group.stop_signal, Some(libc::SIGINT));
    let mut scene = lingering(30_000);
    scene.is(3_000, KILL, &[FIRST_KILL]);
}

#[test]
fn what_outlives_a_failure_or_a_stop_gets_no_more_time() {
    for on_failure in [OnFailure::Stop, OnFailure::Report] {
        let mut scene = Scene::with(1, on_failure, GRACE);
        scene.group.lingers = true;
        scene.is(0, Input::Started, &[]);
        scene.is(0, FAILED, &[Action::CheckTree]);
        scene.is(0, LEFT, &[Action::TerminateTree]);
    }
    let mut scene = Scene::with(1, OnFailure::Stop, GRACE);
    scene.group.lingers = true;
    scene.is(0, Input::Started, &[]);
    scene.step(0, REQUEST);
    scene.is(0, CLEAN, &[Action::CheckTree]);
    scene.is(0, LEFT, &[Action::TerminateTree]);
}

#[test]
fn a_stop_shortens_the_time_of_what_outlived_its_worker() {
    let mut scene = Scene::started(1, 1);
    scene.step(0, CLEAN);
    scene.step(0, LEFT);
    scene.is(100, stop_after(60_000), &[]);
    scene.next_tick_is(2_000);
    scene.is(100, stop_after(50), &[]);
    scene.next_tick_is(150);
    scene.is(120, stop_after(0), &[FIRST_KILL]);
}

#[test]
fn what_is_left_matters_only_when_no_worker_is() {
    let mut scene = Scene::started(2, 1);
    scene.is(0, GONE, &[]);
    scene.is(0, LEFT, &[]);
    scene.step(0, REQUEST);
    scene.is(0, NEVER_RAN, &[]);
    scene.is(1, LEFT, &[]);
    scene.is(1, GONE, &[]);
    assert!(!scene.group.is_clearing() && !scene.has_ended());
}

#[test]
fn a_kill_is_repeated_every_100_ms_and_given_up_after_5_s() {
    let mut scene = Scene::started(1, 1);
    scene.step(0, KILL);
    let again = [Action::KillTree { first: false }, Action::CheckTree];
    for ms in (100..5_000).step_by(100) {
        scene.next_tick_is(ms);
        scene.is(ms - 1, Input::Tick, &[]);
        scene.is(ms, Input::Tick, &again);
        scene.is(ms, LEFT, &[]);
    }
    scene.is(4_999, Input::Tick, &[]);
    scene.is(5_000, Input::Tick, &[Action::End { survivors: true }]);
    assert!(scene.has_ended());
}

#[test]
fn a_kill_ends_as_soon_as_nothing_is_left() {
    let mut scene = Scene::started(1, 1);
    scene.step(0, KILL);
    scene.is(1, FAILED, &[Action::CheckTree]);
    scene.is(1, LEFT, &[]);
    scene.step(100, Input::Tick);
    scene.is(101, GONE, &[END]);
}

#[test]
fn the_stop_signal_is_the_users_first_and_nobody_elses() {
    let mut scene = Scene::started(2, 2);
    scene.step(0, REQUEST);
    assert_eq!(scene.group.stop_signal, None);
    scene.step(1, signalled(libc::SIGTERM));
    scene.step(2, signalled(libc::SIGINT));
    assert_eq!(scene.group.stop_signal, Some(libc::SIGTERM));
    assert_eq!(scene.group.wanted_end(), Some(libc::SIGTERM));

    let mut scene = Scene::started(2, 2);
    scene.step(0, FAILED);
    scene.step(1, KILL);
    assert_eq!(scene.group.stop_signal, None);
}

#[test]
fn a_users_signal_is_the_one_that_is_sent() {
    let mut scene = Scene::started(1, 1);
    let stopping = [
        report(StopReason::Signal(libc::SIGQUIT), libc::SIGQUIT, GRACE),
        Action::Broadcast(libc::SIGQUIT),
    ];
    scene.is(0, signalled(libc::SIGQUIT), &stopping);
}

#[test]
fn a_preemption_is_reported_passed_on_and_has_a_deadline_of_its_own() {
    let mut scene = Scene::started(3, 2);
    let grace = Duration::from_secs(120);
    let stopping = [
        report(StopReason::Signal(libc::SIGUSR1), libc::SIGUSR1, grace),
        Action::Broadcast(libc::SIGUSR1),
        Action::CancelPending,
    ];
    scene.is(5, preempt(120_000), &stopping);
    assert!(scene.is_ending() && !scene.group.may_start());
    assert_eq!(scene.group.moment(), Moment::Preempted);
    scene.is(5, NEVER_RAN, &[]);
    scene.next_tick_is(120_005);
    scene.is(120_004, Input::Tick, &[]);
    scene.is(120_005, Input::Tick, &[FIRST_KILL]);
    assert_eq!(scene.group.moment(), Moment::Ending);
    assert_eq!(scene.group.stop_signal, Some(libc::SIGUSR1));
}

#[test]
fn a_preempted_group_ends_as_always_and_a_failure_in_it_stops_nobody() {
    let mut scene = Scene::started(2, 2);
    scene.step(0, preempt(60_000));
    scene.is(1, FAILED, &[]);
    scene.next_tick_is(60_000);
    scene.is(2, CLEAN, &[Action::CheckTree]);
    scene.is(2, GONE, &[END]);
    assert_eq!(scene.group.stop_signal, Some(libc::SIGUSR1));
}

#[test]
fn a_second_preemption_changes_nothing() {
    let mut scene = Scene::started(1, 1);
    scene.step(0, preempt(60_000));
    for grace_ms in [0, 1_000, 90_000] {
        scene.is(100, preempt(grace_ms), &[]);
        scene.next_tick_is(60_000);
        assert_eq!(scene.group.moment(), Moment::Preempted);
    }
}

#[test]
fn the_first_stop_after_a_preemption_is_passed_on_and_can_only_shorten_the_deadline() {
    for (preempt_ms, at_ms, stop_ms, expected_ms) in [
        (60_000, 1_000, 10_000, 11_000),
        (5_000, 1_000, 10_000, 5_000),
        (60_000, 1_000, 0, 1_000),
    ] {
        let mut scene = Scene::started(1, 1);
        scene.step(0, preempt(preempt_ms));
        scene.is(at_ms, stop_after(stop_ms), &[Action::Broadcast(libc::SIGTERM)]);
        scene.next_tick_is(expected_ms);
        assert_eq!(scene.group.moment(), Moment::Ending);
        scene.is(at_ms, preempt(1), &[]);
        scene.next_tick_is(expected_ms);
        scene.is(expected_ms, Input::Tick, &[FIRST_KILL]);
    }
}

#[test]
fn a_second_stop_after_a_preemption_is_one_of_any_other_stop() {
    let mut scene = Scene::started(1, 1);
    scene.step(0, preempt(60_000));
    scene.step(1_000, signalled(libc::SIGTERM));
    scene.is(2_000, stop_after(20_000), &[]);
    scene.next_tick_is(11_000);
    scene.is(3_000, stop_after(0), &[FIRST_KILL]);
    assert_eq!(scene.group.stop_signal, Some(libc::SIGUSR1));
}

#[test]
fn a_preemption_of_a_group_that_is_being_stopped_changes_nothing() {
    let ends = [REQUEST, signalled(libc::SIGTERM), FAILED, KILL];
    for end in ends {
        let mut scene = Scene::started(2, 2);
        scene.step(0, end);
        let (due, signal) = (scene.group.next_tick(), scene.group.stop_signal);
        scene.is(1, preempt(5), &[]);
        assert_eq!(scene.group.next_tick(), due);
        assert_eq!(scene.group.stop_signal, signal);
        assert_eq!(scene.group.moment(), Moment::Ending);
    }
}

#[test]
fn a_kill_ends_the_time_of_a_preemption() {
    let mut scene = Scene::started(1, 1);
    scene.step(0, preempt(60_000));
    scene.is(1, KILL, &[FIRST_KILL]);
}

#[test]
fn what_outlived_preempted_workers_is_asked_to_end() {
    let mut scene = Scene::started(1, 1);
    scene.step(0, preempt(60_000));
    scene.is(100, CLEAN, &[Action::CheckTree]);
    scene.is(100, LEFT, &[Action::TerminateTree]);
    scene.next_tick_is(2_100);
    assert_eq!(scene.group.moment(), Moment::Ending);
}

#[test]
fn nothing_is_done_after_the_end() {
    let late = [REQUEST, stop_after(0), preempt(0), KILL, GONE, LEFT, Input::Tick];
    let mut scene = Scene::started(1, 1);
    scene.step(0, CLEAN);
    scene.step(0, GONE);
    for input in late {
        scene.is(60_000, input, &[]);
        assert!(scene.has_ended());
        assert_eq!(scene.group.next_tick(), None);
    }
}

#[test]
fn a_death_after_the_end_is_no_reason_to_look_at_the_tree_again() {
    let mut scene = Scene::started(1, 1);
    scene.step(0, KILL);
    scene.is(5_000, Input::Tick, &[Action::End { survivors: true }]);
    scene.is(5_001, FAILED, &[]);
}

/// A running group whose owner decides what a signal does.
fn telling(workers: usize) -> Scene {
    let mut scene = Scene::with(workers, OnFailure::Report, GRACE);
    scene.group.told = Some(UNTOLD);
    for _ in 0..workers {
        scene.is(0, Input::Started, &[]);
    }
    scene
}

#[test]
fn a_signal_that_is_only_told_changes_what_the_next_one_means_and_nothing_else() {
    let mut scene = telling(2);
    for (input, moment) in [
        (preempt(500), Moment::Preempted),
        (signalled(libc::SIGTERM), Moment::Ending),
        (signalled(libc::SIGINT), Moment::Ending),
        (preempt(500), Moment::Ending),
    ] {
        scene.is(10, input, &[]);
        assert_eq!(scene.group.moment(), moment, "{input:?}");
    }
    assert_eq!(scene.group.next_tick(), None);
    assert_eq!(scene.group.stop_signal, None);
    assert_eq!(scene.group.wanted_end(), Some(libc::SIGUSR1));
    scene.is(20, CLEAN, &[]);
    scene.is(30, CLEAN, &[Action::CheckTree]);
    scene.is(30, GONE, &[END]);
    assert_eq!(scene.group.stop_signal, None);
}

#[test]
fn a_signal_that_is_only_told_leaves_workers_to_be_started() {
    let mut scene = Scene::with(2, OnFailure::Stop, GRACE);
    scene.group.told = Some(UNTOLD);
    scene.is(0, signalled(libc::SIGTERM), &[]);
    assert!(scene.group.may_start());
}

#[test]
fn whoever_is_told_of_signals_stops_and_kills_as_ever_and_so_does_a_lost_guard() {
    let mut scene = telling(1);
    scene.is(0, signalled(libc::SIGTERM), &[]);
    let stopping = report(StopReason::Request, libc::SIGTERM, Duration::from_millis(400));
    let stop = Input::Stop {
        reason: StopReason::Request,
        signal: libc::SIGTERM,
        grace: Duration::from_millis(400),
    };
    scene.is(100, stop, &[stopping, Action::Broadcast(libc::SIGTERM)]);
    scene.next_tick_is(500);
    scene.is(200, signalled(libc::SIGTERM), &[]);
    scene.next_tick_is(500);
    scene.is(300, KILL, &[FIRST_KILL]);
    assert_eq!(scene.group.stop_signal, None);
    let lost = Input::Kill {
        reason: StopReason::GuardLost,
    };
    let killing = report(StopReason::GuardLost, libc::SIGKILL, Duration::ZERO);
    telling(1).is(0, lost, &[killing, FIRST_KILL]);
}

#[test]
fn helpers_of_ranks_are_told_to_end_shortly_before_the_kill() {
    // Of a grace below two seconds they get the second half.
    for (grace_ms, told_ms) in [(10_000, 9_000), (2_000, 1_000), (1_000, 500), (2, 1)] {
        let mut scene = Scene::of_ranks(1, GRACE);
        scene.step(0, stop_after(grace_ms));
        scene.next_tick_is(told_ms);
        assert!(scene.group.owes_word_to_helpers());
        scene.is(told_ms, Input::Tick, &[Action::TerminateHelpers]);
        assert!(!scene.group.owes_word_to_helpers());
        scene.next_tick_is(grace_ms);
        scene.is(grace_ms, Input::Tick, &[FIRST_KILL]);
    }
}

#[test]
fn without_any_grace_helpers_of_ranks_are_killed_with_them() {
    let mut scene = Scene::of_ranks(1, GRACE);
    scene.step(0, stop_after(0));
    scene.next_tick_is(0);
    scene.is(0, Input::Tick, &[FIRST_KILL]);
}

#[test]
fn helpers_that_hear_the_signals_are_told_nothing_more() {
    let mut scene = Scene::started(1, 1);
    scene.step(0, stop_after(5_000));
    assert!(!scene.group.owes_word_to_helpers());
    scene.next_tick_is(5_000);
}

#[test]
fn a_shorter_grace_is_shorter_for_helpers_too() {
    let mut scene = Scene::of_ranks(1, GRACE);
    scene.step(0, preempt(20_000));
    scene.next_tick_is(19_000);
    scene.is(1_000, stop_after(5_000), &[Action::Broadcast(libc::SIGTERM)]);
    scene.next_tick_is(5_000);
    scene.is(1_500, stop_after(1_000), &[]);
    scene.next_tick_is(2_000);
    scene.is(2_000, Input::Tick, &[Action::TerminateHelpers]);
    scene.next_tick_is(2_500);
    scene.is(2_100, stop_after(60_000), &[]);
    scene.next_tick_is(2_500);
    scene.is(2_200, stop_after(0), &[FIRST_KILL]);
}

#[test]
fn only_helpers_of_a_rank_that_ends_by_a_stop_are_owed_a_word() {
    let mut scene = Scene::of_ranks(3, GRACE);
    scene.is(0, CLEAN, &[]);
    assert!(!scene.group.owes_word_to_helpers());
    scene.step(1, preempt(20_000));
    assert!(scene.group.owes_word_to_helpers());
    scene.is(2, FAILED, &[]);
    scene.is(3, CLEAN, &[Action::CheckTree]);
    scene.is(3, LEFT, &[Action::TerminateTree]);
    assert!(!scene.group.owes_word_to_helpers());
    scene.is(4, GONE, &[END]);
}
