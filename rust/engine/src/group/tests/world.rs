//! Tests the state machine in a small model of workers, stray processes and time, with events in any order.

use proptest::prelude::*;

use super::*;

/// Kills are repeated every 100 ms for 5 s, after at most two deadlines and a notice.
const TICKS_MAX: usize = 5_000 / 100 + 3;

#[derive(Debug, Clone, Copy)]
enum Event {
    Add,
    Start { obeys: bool },
    CannotStart,
    Die { failed: bool },
    LeaveStray { obeys: bool },
    Stop { reason: StopReason, grace_ms: u64 },
    Preempt { grace_ms: u64 },
    Kill { reason: StopReason },
    Wait { ms: u64 },
}

fn event() -> impl Strategy<Value = Event> {
    let reason = || {
        prop_oneof![
            Just(StopReason::Request),
            Just(StopReason::Signal(libc::SIGINT)),
            Just(StopReason::Signal(libc::SIGTERM)),
        ]
    };
    prop_oneof![
        2 => Just(Event::Add),
        6 => any::<bool>().prop_map(|obeys| Event::Start { obeys }),
        1 => Just(Event::CannotStart),
        3 => any::<bool>().prop_map(|failed| Event::Die { failed }),
        2 => any::<bool>().prop_map(|obeys| Event::LeaveStray { obeys }),
        2 => (reason(), 0..4_000u64).prop_map(|(reason, grace_ms)| Event::Stop { reason, grace_ms }),
        1 => (0..8_000u64).prop_map(|grace_ms| Event::Preempt { grace_ms }),
        1 => Just(Event::Kill { reason: StopReason::GuardLost }),
        3 => (0..3_000u64).prop_map(|ms| Event::Wait { ms }),
    ]
}

/// Each process is a flag: whether it ends when it is asked to.
struct World {
    group: Group,
    now: Instant,
    pending: usize,
    running: Vec<bool>,
    strays: Vec<bool>,
    /// SIGKILL has no effect, as on a process in uninterruptible sleep.
    immortal: bool,
    actions: Vec<Action>,
    /// When the grace period of a stop is over.
    deadline: Option<Instant>,
    first_signal: Option<i32>,
    /// Whether the stop began with a preemption; the stop signal itself may follow.
    preempted: bool,
}

impl World {
    fn new(group: Group, workers: usize, immortal: bool) -> Self {
        Self {
            group,
            now: Instant::now(),
            pending: workers,
            running: Vec::new(),
            strays: Vec::new(),
            immortal,
            actions: Vec::new(),
            deadline: None,
            first_signal: None,
            preempted: false,
        }
    }

    fn is_ending(&self) -> bool {
        self.group.moment() != Moment::Running
    }

    fn has_ended(&self) -> bool {
        self.group.phase == Phase::Ended
    }

    fn feed(&mut self, input: Input) {
        let over = self.has_ended();
        let is_told = self.group.tells_signals()
            && matches!(
                input,
                Input::Preempt { .. }
                    | Input::Stop {
                        reason: StopReason::Signal(_),
                        ..
                    }
            );
        let heeded = match input {
            _ if is_told => None,
            Input::Stop { grace, .. } if !over => Some(grace),
            Input::Preempt { grace, .. } if !self.is_ending() => Some(grace),
            _ => None,
        };
        if let Some(grace) = heeded {
            self.deadline = Some((self.now + grace).min(self.deadline.unwrap_or(self.now + grace)));
        }
        let actions = self.group.step(self.now, input);
        assert!(!is_told || actions.is_empty(), "{actions:?} for {input:?}");
        assert!(!over || actions.is_empty(), "{actions:?} after the end");
        for action in actions {
            self.actions.push(action);
            self.carry_out(action);
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Broadcast(_) => self.end_workers(|obeys| obeys),
            Action::CancelPending => {
                for _ in 0..std::mem::take(&mut self.pending) {
                    self.feed(NEVER_RAN);
                }
            }
            Action::CheckTree => self.look(),
            Action::ReportLeftovers { .. } => assert!(self.running.is_empty() && !self.group.has_failed),
            Action::TerminateTree => self.strays.retain(|obeys| !obeys),
            Action::TerminateHelpers => {
                assert!(self.group.scope == SignalScope::Rank && !self.running.is_empty());
                assert!(self.deadline.is_some_and(|deadline| self.now < deadline));
                self.strays.retain(|obeys| !obeys);
            }
            Action::KillTree { .. } => self.kill(),
            Action::ReportStop { grace, .. } => {
                self.deadline.get_or_insert(self.now + grace);
            }
            Action::End { survivors } => assert_eq!(survivors, !self.is_empty(), "survivors"),
        }
    }

    fn kill(&mut self) {
        let limit = self.deadline.map(|deadline| deadline + STRAGGLER_GRACE);
        let repeats = self.count(|action| matches!(action, Action::KillTree { first: false }));
        assert!(
            repeats > 0 || limit.is_none_or(|limit| self.now <= limit),
            "killed too late"
        );
        if !self.immortal {
            self.strays.clear();
            self.end_workers(|_| true);
        }
    }

    fn end_workers(&mut self, ends: impl Fn(bool) -> bool) {
        let before = self.running.len();
        self.running.retain(|obeys| !ends(*obeys));
        for _ in self.running.len()..before {
            self.feed(FAILED);
        }
    }

    fn is_empty(&self) -> bool {
        self.pending + self.running.len() + self.strays.len() == 0
    }

    fn look(&mut self) {
        let empty = self.running.is_empty() && self.strays.is_empty();
        self.feed(Input::Tree { empty });
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Add if self.group.may_add() => {
                self.pending += 1;
                self.feed(Input::Added);
            }
            Event::Start { obeys } if self.group.may_start() => {
                self.pending -= 1;
                self.running.push(obeys);
                self.feed(Input::Started);
            }
            Event::CannotStart if self.group.may_start() => {
                self.pending -= 1;
                self.feed(NEVER_RAN);
            }
            Event::Die { failed } if !self.has_ended() && self.running.pop().is_some() => {
                self.feed(Input::WorkerEnded {
                    running: true,
                    failed,
                });
            }
            Event::LeaveStray { obeys } if !self.running.is_empty() => self.strays.push(obeys),
            Event::Stop { reason, grace_ms } => {
                if let (StopReason::Signal(number), false) = (reason, self.group.tells_signals()) {
                    self.first_signal.get_or_insert(number);
                }
                self.feed(Input::Stop {
                    reason,
                    signal: libc::SIGTERM,
                    grace: Duration::from_millis(grace_ms),
                });
            }
            Event::Preempt { grace_ms } => {
                if !self.is_ending() && !self.group.tells_signals() {
                    self.first_signal.get_or_insert(libc::SIGUSR1);
                    self.preempted = true;
                }
                self.feed(Input::Preempt {
                    signal: libc::SIGUSR1,
                    grace: Duration::from_millis(grace_ms),
                });
            }
            Event::Kill { reason } => self.feed(Input::Kill { reason }),
            Event::Wait { ms } => self.wait_until(self.now + Duration::from_millis(ms)),
            Event::Add
            | Event::Start { .. }
            | Event::CannotStart
            | Event::Die { .. }
            | Event::LeaveStray { .. } => {}
        }
        if self.group.is_clearing() {
            self.look();
        }
    }

    /// Lets time pass like the supervisor, which sleeps until the next tick.
    fn wait_until(&mut self, end: Instant) {
        while let Some(due) = self.group.next_tick().filter(|due| *due <= end) {
            self.tick(due);
        }
        self.now = end;
    }

    fn tick(&mut self, due: Instant) {
        self.now = due.max(self.now);
        self.feed(Input::Tick);
        let next = self.group.next_tick();
        assert!(
            next.is_none_or(|next| next > self.now),
            "a tick must not be due again at once"
        );
    }

    /// Runs the group to its end, without further events from outside.
    fn run_out(&mut self) -> usize {
        let mut ticks = 0;
        while !self.has_ended() && ticks <= TICKS_MAX {
            match self.group.next_tick() {
                Some(due) => {
                    self.tick(due);
                    ticks += 1;
                }
                // A healthy group waits only for its workers.
                None if self.pending > 0 => self.happen(Event::Start { obeys: true }),
                None if !self.running.is_empty() => self.happen(Event::Die { failed: false }),
                None => {
                    assert!(self.group.stays_open, "the group waits for nobody");
                    let reason = StopReason::Request;
                    self.happen(Event::Stop { reason, grace_ms: 0 });
                }
            }
        }
        ticks
    }

    fn count(&self, is_wanted: impl Fn(&Action) -> bool) -> usize {
        self.actions.iter().filter(|action| is_wanted(action)).count()
    }

    fn check(&self) {
        assert!(self.has_ended(), "not over after {TICKS_MAX} ticks");
        assert_eq!(self.count(|action| matches!(action, Action::End { .. })), 1);
        assert!(matches!(
            self.actions.last(),
            Some(Action::End { .. } | Action::CheckTree)
        ));
        let broadcasts = self.count(|action| matches!(action, Action::Broadcast(_)));
        let reports = self.count(|action| matches!(action, Action::ReportStop { .. }));
        let first_kills = self.count(|action| *action == FIRST_KILL);
        let broadcasts_max = reports + usize::from(self.preempted);
        assert!(reports <= 1 && broadcasts <= broadcasts_max && first_kills <= 1);
        assert!(self.count(|action| *action == Action::TerminateHelpers) <= 1);
        assert!(broadcasts == 0 || self.immortal || self.is_empty());
    }
}

proptest! {
    #[test]
    fn every_group_ends_once_and_leaves_nobody_unreported(
        workers in 1..6usize,
        report in any::<bool>(),
        grace_ms in 0..4_000u64,
        immortal in any::<bool>(),
        ranks in any::<bool>(),
        tells in any::<bool>(),
        lingers in any::<bool>(),
        stays_open in any::<bool>(),
        events in prop::collection::vec(event(), 0..60),
    ) {
        let on_failure = if report { OnFailure::Report } else { OnFailure::Stop };
        let scope = if ranks { SignalScope::Rank } else { SignalScope::Group };
        let launch = LaunchSpec {
            signal_scope: scope,
            tells_signals: tells,
            stays_open,
            ..launch(workers, on_failure, Duration::from_millis(grace_ms))
        };
        let group = Group::new(&launch, lingers);
        let mut world = World::new(group, workers, immortal);
        for event in events {
            let was_over = world.has_ended();
            world.happen(event);
            if !was_over {
                prop_assert_eq!(world.group.stop_signal, world.first_signal);
            }
        }
        world.run_out();
        world.check();
    }

    #[test]
    fn whoever_does_not_end_when_asked_is_killed_at_the_deadline(
        workers in 1..6usize,
        grace_ms in 0..60_000u64,
        delays in prop::collection::vec((0..2_000u64, 0..60_000u64), 0..6),
    ) {
        let grace = Duration::from_millis(grace_ms);
        let group = Group::new(&launch(workers, OnFailure::Stop, GRACE), false);
        let mut world = World::new(group, workers, false);
        for _ in 0..workers {
            world.happen(Event::Start { obeys: false });
        }
        world.happen(Event::Stop { reason: StopReason::Request, grace_ms });
        let mut deadline = world.now + grace;
        for (wait_ms, grace_ms) in delays {
            world.happen(Event::Wait { ms: wait_ms });
            if !world.has_ended() {
                deadline = deadline.min(world.now + Duration::from_millis(grace_ms));
                world.happen(Event::Stop { reason: StopReason::Request, grace_ms });
                prop_assert!(world.has_ended() || world.group.next_tick() == Some(deadline));
            }
        }
        prop_assert!(world.run_out() <= 1);
        world.check();
        prop_assert_eq!(world.count(|action| *action == FIRST_KILL), 1);
    }
}
