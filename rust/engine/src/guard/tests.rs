use super::*;

const GRACE: Duration = Duration::from_secs(30);
const PREEMPT_GRACE: Duration = Duration::from_secs(600);

/// An agent that gets nothing: no process has this pid.
fn nobody() -> AgentProcess {
    AgentProcess {
        pid: i32::MAX,
        pidfd: None,
    }
}

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
            (libc::SIGUSR1, Meaning::Preempt),
            (libc::SIGUSR2, Meaning::Forward),
        ]);
        Self {
            watch: Watch {
                deadline: None,
                terminal_interrupt: false,
                table: table.unwrap(),
                grace: GRACE,
                preempt_grace: PREEMPT_GRACE,
                reopens,
                last: None,
            },
            zero: Instant::now(),
        }
    }

    /// Takes a signal at this second; the second at which the agent is killed from then on.
    fn hear(&mut self, second: u64, received: Received) -> Option<u64> {
        let now = self.zero + Duration::from_secs(second);
        self.watch.pass_on(&nobody(), received, now);
        self.watch
            .deadline
            .map(|deadline| (deadline - self.zero).as_secs())
    }
}

#[test]
fn an_agent_has_the_grace_and_a_little_more_and_no_later_signal_lengthens_it() {
    let mut scene = Scene::new(false);
    assert_eq!(scene.hear(1, Received::own(libc::SIGUSR2)), None);
    assert_eq!(scene.hear(2, Received::own(libc::SIGTERM)), Some(42));
    assert_eq!(scene.hear(20, Received::own(libc::SIGTERM)), Some(42));
    assert_eq!(scene.hear(21, Received::own(libc::SIGUSR1)), Some(42));
}

#[test]
fn a_preempted_agent_has_the_time_of_the_preemption_until_a_stop_signal_shortens_it() {
    let mut scene = Scene::new(false);
    assert_eq!(scene.hear(0, Received::own(libc::SIGUSR1)), Some(610));
    assert_eq!(scene.hear(100, Received::own(libc::SIGUSR1)), Some(610));
    assert_eq!(scene.hear(200, Received::own(libc::SIGTERM)), Some(240));
    assert_eq!(scene.hear(210, Received::own(libc::SIGINT)), Some(240));

    let mut scene = Scene::new(false);
    scene.hear(0, Received::own(libc::SIGUSR1));
    assert_eq!(scene.hear(595, Received::own(libc::SIGTERM)), Some(610));
}

#[test]
fn a_wish_for_new_files_sets_no_deadline_and_a_hang_up_does() {
    let mut scene = Scene::new(true);
    assert_eq!(scene.hear(0, Received::own(libc::SIGHUP)), None);
    let hang_up = Received {
        from_terminal: true,
        ..Received::own(libc::SIGHUP)
    };
    assert_eq!(scene.hear(1, hang_up), Some(41));
}
