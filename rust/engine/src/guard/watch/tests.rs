use super::*;
use crate::signals::Meaning;

const GRACE: Duration = Duration::from_secs(30);
const PREEMPT_GRACE: Duration = Duration::from_secs(600);

struct Scene {
    watch: Watch,
    zero: Instant,
}

impl Scene {
    fn new(reopens: bool) -> Self {
        let table = Table::new([
            (libc::SIGTERM, Meaning::Stop),
            (libc::SIGINT, Meaning::Stop),
            (libc::SIGHUP, Meaning::Stop),
            (libc::SIGQUIT, Meaning::Stop),
            (libc::SIGUSR1, Meaning::Preempt),
            (libc::SIGUSR2, Meaning::Forward),
        ]);
        Self {
            watch: Watch::new(table.unwrap(), GRACE, Some(PREEMPT_GRACE), reopens),
            zero: Instant::now(),
        }
    }

    /// Passes in a signal at this second. Returns the second at which the agent would then be killed.
    fn hear(&mut self, second: u64, received: Received) -> Option<u64> {
        let now = self.zero + Duration::from_secs(second);
        self.watch.hear(received, now);
        self.watch.timeout(self.zero).map(|left| left.as_secs())
    }

    fn overdue(&mut self, second: u64) -> bool {
        self.watch.is_overdue(self.zero + Duration::from_secs(second))
    }
}

fn sent_by(sender: i32, signal: i32) -> Received {
    Received {
        sender,
        ..Received::own(signal)
    }
}

#[test]
fn an_agent_has_the_grace_and_a_little_more_and_no_later_signal_lengthens_it() {
    let mut scene = Scene::new(false);
    assert_eq!(scene.hear(1, Received::own(libc::SIGUSR2)), None);
    assert_eq!(scene.hear(2, Received::own(libc::SIGTERM)), Some(72));
    assert_eq!(scene.hear(20, Received::own(libc::SIGTERM)), Some(72));
    assert_eq!(scene.hear(21, Received::own(libc::SIGUSR1)), Some(72));
}

#[test]
fn a_preempted_agent_has_the_time_of_the_preemption_until_a_stop_signal_shortens_it() {
    let mut scene = Scene::new(false);
    assert_eq!(scene.hear(0, Received::own(libc::SIGUSR1)), Some(640));
    assert_eq!(scene.hear(100, Received::own(libc::SIGUSR1)), Some(640));
    assert_eq!(scene.hear(200, Received::own(libc::SIGTERM)), Some(270));
    assert_eq!(scene.hear(210, Received::own(libc::SIGINT)), Some(270));

    let mut scene = Scene::new(false);
    scene.hear(0, Received::own(libc::SIGUSR1));
    assert_eq!(scene.hear(595, Received::own(libc::SIGTERM)), Some(640));
}

#[test]
fn a_wish_for_new_files_sets_no_deadline_and_a_hang_up_does() {
    let mut scene = Scene::new(true);
    assert_eq!(scene.hear(0, Received::own(libc::SIGHUP)), None);
    let hang_up = Received {
        from_terminal: true,
        ..Received::own(libc::SIGHUP)
    };
    assert_eq!(scene.hear(1, hang_up), Some(71));
}

#[test]
fn an_agent_is_overdue_once_and_again_after_another_signal() {
    let mut scene = Scene::new(false);
    assert!(!scene.overdue(1000));
    scene.hear(0, Received::own(libc::SIGTERM));
    assert!(!scene.overdue(69));
    assert!(scene.overdue(70));
    assert!(!scene.overdue(71));
    assert_eq!(scene.watch.timeout(scene.zero), None);
    assert_eq!(scene.hear(80, Received::own(libc::SIGTERM)), Some(150));
}

#[test]
fn an_agent_that_writes_as_long_as_it_may_is_not_taken_to_be_stuck() {
    let mut scene = Scene::new(false);
    scene.hear(0, Received::own(libc::SIGTERM));
    // The workers use all their grace, then five seconds go to processes that survive SIGKILL, then consoles are
    // slow.
    let kill_patience = Duration::from_secs(5);
    let last = scene.zero + GRACE + kill_patience + crate::mux::LAST_OUTPUT;
    assert!(!scene.watch.is_overdue(last));
}

#[test]
fn without_a_time_of_its_own_a_preemption_leaves_the_grace() {
    let table = Table::new([(libc::SIGUSR1, Meaning::Preempt)]).unwrap();
    let mut watch = Watch::new(table, GRACE, None, false);
    let now = Instant::now();
    watch.hear(Received::own(libc::SIGUSR1), now);
    assert_eq!(watch.timeout(now), Some(GRACE + AGENT_PATIENCE));
}

#[test]
fn the_same_signal_of_the_same_process_at_once_is_one_request() {
    let mut scene = Scene::new(false);
    let hear = |scene: &mut Scene, millis: u64, received| {
        let now = scene.zero + Duration::from_millis(millis);
        scene.watch.hear(received, now)
    };
    let term = sent_by(7, libc::SIGTERM);
    assert_eq!(hear(&mut scene, 0, term), Passage::Stop);
    assert_eq!(hear(&mut scene, 1, term), Passage::Repeated);
    assert_eq!(hear(&mut scene, 49, term), Passage::Repeated);
    assert_eq!(hear(&mut scene, 50, sent_by(8, libc::SIGTERM)), Passage::Stop);
    assert_eq!(hear(&mut scene, 51, term), Passage::Stop);
    assert_eq!(hear(&mut scene, 101, term), Passage::Stop);
    assert_eq!(hear(&mut scene, 102, sent_by(7, libc::SIGUSR1)), Passage::Preempt);
    assert_eq!(hear(&mut scene, 103, term), Passage::Stop);
}

#[test]
fn an_interrupt_is_the_terminals_only_if_the_terminal_made_it() {
    let mut scene = Scene::new(false);
    scene.hear(0, sent_by(7, libc::SIGINT));
    assert!(!scene.watch.terminal_interrupt);
    let from_terminal = |signal| Received {
        from_terminal: true,
        ..Received::own(signal)
    };
    scene.hear(1, from_terminal(libc::SIGHUP));
    assert!(!scene.watch.terminal_interrupt);
    scene.hear(2, from_terminal(libc::SIGINT));
    assert!(scene.watch.terminal_interrupt);
}

#[test]
fn the_exit_code_is_the_agents_or_128_and_its_signal() {
    for (status, signaled, code) in [(0, false, 0), (3, false, 3), (9, true, 137), (64, true, 192)] {
        let death = Death {
            status,
            signaled,
            core: false,
            user: Duration::ZERO,
            system: Duration::ZERO,
            max_rss: 0,
        };
        assert_eq!(exit_code(&death), code, "{status} {signaled}");
    }
}

#[test]
fn a_question_of_the_user_sets_no_deadline_and_the_second_key_does() {
    let mut scene = Scene::new(false);
    let key = Received {
        from_terminal: true,
        ..Received::own(libc::SIGQUIT)
    };
    assert_eq!(scene.hear(1, key), None);
    assert_eq!(scene.hear(3, key), Some(73));
}
