use super::*;

struct Scene {
    requests: Requests,
    zero: Instant,
}

impl Scene {
    fn new() -> Self {
        Self {
            requests: Requests::default(),
            zero: Instant::now(),
        }
    }

    fn is_copy(&mut self, millis: u64, received: Received) -> bool {
        let table = Table::new([
            (libc::SIGTERM, Meaning::Stop),
            (libc::SIGINT, Meaning::Stop),
            (libc::SIGHUP, Meaning::Stop),
            (libc::SIGUSR1, Meaning::Preempt),
            (libc::SIGUSR2, Meaning::Forward),
        ]);
        let now = self.zero + Duration::from_millis(millis);
        self.requests.is_copy(&table.unwrap(), received, now)
    }
}

fn sent_by(sender: i32, signal: i32) -> Received {
    Received {
        sender,
        ..Received::own(signal)
    }
}

fn passed_on(signal: i32) -> Received {
    Received {
        passed_on: true,
        ..Received::own(signal)
    }
}

fn hang_up(sender: i32) -> Received {
    Received {
        from_terminal: true,
        ..sent_by(sender, libc::SIGHUP)
    }
}

#[test]
fn a_direct_and_a_passed_on_copy_are_one_request_in_either_order() {
    for (first, second) in [
        (sent_by(1, libc::SIGTERM), passed_on(libc::SIGTERM)),
        (passed_on(libc::SIGTERM), sent_by(1, libc::SIGTERM)),
        (sent_by(7, libc::SIGUSR2), passed_on(libc::SIGUSR2)),
    ] {
        let mut scene = Scene::new();
        assert!(!scene.is_copy(0, first));
        assert!(scene.is_copy(2999, second));
    }
}

#[test]
fn a_second_request_by_the_same_ways_is_another_one() {
    let mut scene = Scene::new();
    for begin in [0, 400, 800] {
        assert!(!scene.is_copy(begin, sent_by(1, libc::SIGTERM)), "{begin}");
        assert!(scene.is_copy(begin + 10, passed_on(libc::SIGTERM)), "{begin}");
    }
}

#[test]
fn a_request_of_another_sender_is_another_one_by_whichever_way_it_comes() {
    let passed_on_of = |sender| Received {
        sender,
        ..passed_on(libc::SIGTERM)
    };
    // The kernel has merged the two copies of each request into one.
    for (first, second) in [
        (sent_by(1, libc::SIGTERM), passed_on_of(2)),
        (passed_on_of(1), sent_by(2, libc::SIGTERM)),
    ] {
        let mut scene = Scene::new();
        assert!(!scene.is_copy(0, first));
        assert!(!scene.is_copy(400, second));
    }
    let mut scene = Scene::new();
    assert!(!scene.is_copy(0, sent_by(1, libc::SIGTERM)));
    assert!(scene.is_copy(400, passed_on_of(1)));
}

#[test]
fn a_second_key_at_the_terminal_insists_at_once() {
    let key = Received {
        from_terminal: true,
        ..passed_on(libc::SIGINT)
    };
    let mut scene = Scene::new();
    for millis in [0, 1, 2, 500] {
        assert!(!scene.is_copy(millis, key), "{millis}");
    }
}

#[test]
fn what_comes_the_other_way_after_three_seconds_or_by_another_number_is_another_request() {
    let mut scene = Scene::new();
    assert!(!scene.is_copy(0, sent_by(1, libc::SIGTERM)));
    assert!(!scene.is_copy(100, passed_on(libc::SIGINT)));
    assert!(!scene.is_copy(3100, passed_on(libc::SIGTERM)));
}

#[test]
fn signals_of_one_process_at_once_are_one_request_unless_they_are_forwarded() {
    let mut scene = Scene::new();
    assert!(!scene.is_copy(0, sent_by(1, libc::SIGTERM)));
    assert!(scene.is_copy(1, sent_by(1, libc::SIGHUP)), "as systemd sends it");
    assert!(!scene.is_copy(60, sent_by(1, libc::SIGTERM)));
    assert!(!scene.is_copy(61, sent_by(2, libc::SIGTERM)));
    assert!(
        !scene.is_copy(62, sent_by(2, libc::SIGUSR1)),
        "a preemption is no stop"
    );
    assert!(scene.is_copy(63, sent_by(2, libc::SIGUSR1)));
    let mut scene = Scene::new();
    for signal in [libc::SIGUSR2, libc::SIGCONT] {
        assert!(!scene.is_copy(0, sent_by(1, signal)));
        assert!(!scene.is_copy(1, sent_by(1, signal)));
    }
    assert!(!scene.is_copy(2, Received::own(libc::SIGTERM)));
    assert!(
        !scene.is_copy(3, Received::own(libc::SIGTERM)),
        "it may be another's"
    );
}

#[test]
fn a_terminal_hangs_up_once() {
    let mut scene = Scene::new();
    assert!(!scene.is_copy(0, hang_up(7)), "the shell's word");
    assert!(scene.is_copy(900, hang_up(0)), "the kernel's");
    assert!(!scene.is_copy(6000, hang_up(7)));
    let mut scene = Scene::new();
    assert!(!scene.is_copy(0, sent_by(7, libc::SIGHUP)));
    assert!(!scene.is_copy(900, sent_by(7, libc::SIGHUP)), "no terminal's");
}

#[test]
fn the_first_ctrl_backslash_asks_and_a_second_one_soon_after_insists() {
    let mut requests = Requests::default();
    let zero = Instant::now();
    let key = Received {
        from_terminal: true,
        ..Received::own(libc::SIGQUIT)
    };
    let mut asks = |table: &Table, millis, received| {
        requests.asks(table, received, zero + Duration::from_millis(millis))
    };
    let table = Table::default();
    assert!(
        !asks(&table, 0, Received::own(libc::SIGQUIT)),
        "no terminal sent it"
    );
    assert!(asks(&table, 0, key));
    assert!(!asks(&table, 4999, key));
    assert!(asks(&table, 5000, key), "the pair is complete");
    assert!(asks(&table, 10_000, key), "the second comes too late");
    let forwards = Table::new([(libc::SIGQUIT, Meaning::Forward)]).unwrap();
    assert!(!asks(&forwards, 60_000, key), "it is the workers' own");
}
