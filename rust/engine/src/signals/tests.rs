use super::*;

const MEANINGS: [Meaning; 3] = [Meaning::Stop, Meaning::Forward, Meaning::Preempt];
const MOMENTS: [Moment; 3] = [Moment::Running, Moment::Preempted, Moment::Ending];

fn numbers(table: &Table, wanted: Option<Meaning>) -> Vec<i32> {
    (0..=65)
        .filter(|signal| table.meaning(*signal) == wanted)
        .collect()
}

fn hang_up(from_terminal: bool) -> Received {
    Received {
        from_terminal,
        ..Received::own(libc::SIGHUP)
    }
}

#[test]
fn the_default_stops_at_four_signals_and_forwards_five() {
    let table = Table::default();
    let stops = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];
    let forwards = [
        libc::SIGUSR1,
        libc::SIGUSR2,
        libc::SIGCONT,
        libc::SIGTSTP,
        libc::SIGWINCH,
    ];
    assert_eq!(numbers(&table, Some(Meaning::Stop)), stops);
    assert_eq!(numbers(&table, Some(Meaning::Forward)), forwards);
    assert_eq!(numbers(&table, Some(Meaning::Preempt)), [0; 0]);
    assert_eq!(
        table.taken(),
        SignalSet(SignalSet::of(&stops).0 | SignalSet::of(&forwards).0)
    );
}

#[test]
fn a_table_takes_what_it_names_and_job_control_and_nothing_else() {
    let table = Table::new([
        (libc::SIGTERM, Meaning::Forward),
        (libc::SIGUSR1, Meaning::Preempt),
        (34, Meaning::Stop),
        (64, Meaning::Forward),
    ])
    .unwrap();
    assert_eq!(numbers(&table, Some(Meaning::Stop)), [34]);
    assert_eq!(numbers(&table, Some(Meaning::Preempt)), [libc::SIGUSR1]);
    let forwards = [libc::SIGTERM, libc::SIGCONT, libc::SIGTSTP, libc::SIGWINCH, 64];
    assert_eq!(numbers(&table, Some(Meaning::Forward)), forwards);
    assert_eq!(table.meaning(libc::SIGINT), None);
}

#[test]
fn nobody_changes_the_meaning_of_job_control() {
    for meaning in MEANINGS {
        let table = Table::new(JOB_CONTROL.map(|signal| (signal, meaning))).unwrap();
        assert_eq!(Ok(table), Table::new([]));
        assert_eq!(
            numbers(&table, Some(Meaning::Forward)),
            [libc::SIGCONT, libc::SIGTSTP, libc::SIGWINCH]
        );
    }
}

#[test]
fn the_last_entry_for_a_signal_counts() {
    let table = Table::new(MEANINGS.map(|meaning| (libc::SIGUSR2, meaning))).unwrap();
    assert_eq!(table.meaning(libc::SIGUSR2), Some(Meaning::Preempt));
    let again = Table::new([(libc::SIGUSR2, Meaning::Preempt), (libc::SIGUSR2, Meaning::Stop)]);
    assert_eq!(
        again.map(|table| table.meaning(libc::SIGUSR2)),
        Ok(Some(Meaning::Stop))
    );
}

#[test]
fn what_cannot_be_taken_is_refused_with_its_reason() {
    let refused: Vec<i32> = (-1..=66)
        .filter(|signal| Table::new([(*signal, Meaning::Stop)]).is_err())
        .collect();
    // SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGKILL, SIGSEGV, SIGCHLD, SIGSTOP, SIGSYS.
    assert_eq!(refused, [-1, 0, 4, 5, 6, 7, 8, 9, 11, 17, 19, 31, 32, 33, 65, 66]);
    let says = |signal| Table::new([(signal, Meaning::Forward)]).unwrap_err().to_string();
    assert_eq!(
        says(libc::SIGKILL),
        "SIGKILL cannot be taken, because no process can catch it: leave it out"
    );
    assert!(says(libc::SIGSTOP).starts_with("SIGSTOP "));
    assert!(says(libc::SIGCHLD).contains("ends of workers"));
    assert!(says(libc::SIGSEGV).starts_with("SIGSEGV ") && says(libc::SIGSEGV).contains("fault"));
    assert!(says(33).starts_with("signal 33 is used by the C library"));
    assert!(says(65).starts_with("there is no signal 65"));
}

#[test]
fn a_signal_that_was_ignored_is_left_out_of_the_table() {
    let ignored = [libc::SIGHUP, libc::SIGTSTP, 40];
    let table = Table::default().of_process(|signal| ignored.contains(&signal));
    assert_eq!(
        numbers(&table, Some(Meaning::Stop)),
        [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM]
    );
    assert_eq!(table.meaning(libc::SIGTSTP), None);
    assert_eq!(table.meaning(libc::SIGCONT), Some(Meaning::Forward));
}

#[test]
fn a_stop_that_was_ignored_is_heard_but_for_keys_of_the_terminal() {
    let ignored = [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1];
    let table = Table::default().of_process(|signal| ignored.contains(&signal));
    assert_eq!(table.taken(), Table::default().taken());
    for signal in [libc::SIGINT, libc::SIGQUIT] {
        assert!(table.is_deaf_to(Received::key(signal)) && !table.is_deaf_to(Received::own(signal)));
        assert!(!Table::default().is_deaf_to(Received::key(signal)));
    }
    assert!(!table.is_deaf_to(Received::key(libc::SIGTSTP)));
    let hung_up = Table::default().of_process(|signal| signal == libc::SIGHUP);
    assert!(!hung_up.is_deaf_to(Received::key(libc::SIGINT)));
}

#[test]
fn only_a_hang_up_that_would_stop_the_job_may_be_a_wish_for_new_files() {
    assert!(Table::default().is_reopening(hang_up(false)));
    assert!(!Table::default().is_reopening(hang_up(true)));
    assert!(!Table::default().is_reopening(Received::own(libc::SIGTERM)));
    for meaning in [Meaning::Forward, Meaning::Preempt] {
        let table = Table::new([(libc::SIGHUP, meaning)]).unwrap();
        assert!(!table.is_reopening(hang_up(false)));
    }
}

#[test]
fn a_first_stop_signal_stops_and_a_second_hurries() {
    let stop = Some(Meaning::Stop);
    assert_eq!(decide(stop, 0, Moment::Running), Verdict::Stop);
    for moment in MOMENTS {
        assert_eq!(decide(stop, 1, moment), Verdict::Hurry);
        assert_eq!(decide(stop, 7, moment), Verdict::Hurry);
    }
}

#[test]
fn a_stop_signal_during_a_stop_for_failure_leaves_the_grace() {
    assert_eq!(decide(Some(Meaning::Stop), 0, Moment::Ending), Verdict::Note);
}

#[test]
fn the_first_stop_signal_of_a_preempted_group_does_not_insist() {
    assert_eq!(decide(Some(Meaning::Stop), 0, Moment::Preempted), Verdict::Stop);
}

#[test]
fn user_signals_and_preemptions_count_only_while_the_group_runs() {
    let wanted = [
        (Some(Meaning::Forward), Verdict::Forward),
        (Some(Meaning::Preempt), Verdict::Preempt),
        (None, Verdict::Ignore),
    ];
    for (meaning, verdict) in wanted {
        for stops in [0, 1] {
            assert_eq!(decide(meaning, stops, Moment::Running), verdict);
            assert_eq!(decide(meaning, stops, Moment::Preempted), Verdict::Ignore);
            assert_eq!(decide(meaning, stops, Moment::Ending), Verdict::Ignore);
        }
    }
}

#[test]
fn a_guard_passes_every_signal_on_but_the_same_request_once_more() {
    let table = Table::new([
        (libc::SIGTERM, Meaning::Stop),
        (libc::SIGHUP, Meaning::Stop),
        (libc::SIGUSR1, Meaning::Preempt),
        (libc::SIGUSR2, Meaning::Forward),
    ])
    .unwrap();
    let sent = |signal| Received {
        sender: 7,
        ..Received::own(signal)
    };
    let hang_up = Received {
        from_terminal: true,
        ..Received::own(libc::SIGHUP)
    };
    for (received, is_copy, reopens, expected) in [
        (sent(libc::SIGTERM), false, false, Passage::Stop),
        (sent(libc::SIGTERM), true, false, Passage::Repeated),
        (sent(libc::SIGUSR1), false, false, Passage::Preempt),
        (sent(libc::SIGUSR1), true, false, Passage::Repeated),
        (sent(libc::SIGUSR2), false, false, Passage::Plain),
        (sent(libc::SIGHUP), false, false, Passage::Stop),
        (sent(libc::SIGHUP), false, true, Passage::Plain),
        (sent(libc::SIGHUP), true, true, Passage::Repeated),
        (hang_up, false, true, Passage::Stop),
        (sent(libc::SIGTSTP), false, false, Passage::Suspend),
        (sent(libc::SIGTTIN), false, false, Passage::Stall),
        (sent(libc::SIGTTOU), false, true, Passage::Stall),
        (sent(libc::SIGCONT), false, false, Passage::Plain),
        (sent(libc::SIGALRM), false, false, Passage::Plain),
    ] {
        let passage = decide_passage(&table, received, is_copy, reopens);
        assert_eq!(passage, expected, "{received:?} {is_copy} {reopens}");
    }
}

#[test]
fn what_acts_on_processes_and_is_no_message_to_a_program_acts_on_groups() {
    let found: Vec<i32> = NUMBERS.filter(|signal| acts_on_groups(*signal)).collect();
    let expected = [
        libc::SIGKILL,
        libc::SIGCONT,
        libc::SIGSTOP,
        libc::SIGTSTP,
        libc::SIGWINCH,
    ];
    assert_eq!(found, expected);
}

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

fn hang_up_by(sender: i32) -> Received {
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
    assert!(!scene.is_copy(0, hang_up_by(7)), "the shell's word");
    assert!(scene.is_copy(900, hang_up_by(0)), "the kernel's");
    assert!(!scene.is_copy(6000, hang_up_by(7)));
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
