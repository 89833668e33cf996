use super::*;

/// The verdict after each look, for a guard with or without strangers. The looks are a millisecond apart.
fn follow(has_strangers: bool, looks: &[Look]) -> Vec<Next> {
    let zero = Instant::now();
    let mut progress = Progress::new(zero, has_strangers);
    let times = (0..).map(|index| zero + Duration::from_millis(index));
    times
        .zip(looks)
        .map(|(now, look)| progress.after(*look, now))
        .collect()
}

const SOON: Next = Next::LookAgain(KILL_RETRY);
const AT_ONCE: Next = Next::LookAgain(Duration::ZERO);

/// A child is alive, and nothing of the job shows.
const NOTHING: Look = Look {
    is_childless: false,
    is_populated: false,
    reached: Reached { count: 0, refused: 0 },
};
const KILLED: Look = Look {
    reached: Reached { count: 2, refused: 0 },
    ..NOTHING
};
/// Something of the job shows, and we may not signal it.
const REFUSED: Look = Look {
    reached: Reached { count: 0, refused: 1 },
    ..NOTHING
};
const POPULATED: Look = Look {
    is_populated: true,
    ..NOTHING
};
const CHILDLESS: Look = Look {
    is_childless: true,
    ..NOTHING
};

#[test]
fn a_job_is_gone_when_there_is_no_child_and_nothing_was_found() {
    assert_eq!(follow(false, &[CHILDLESS]), [Next::Done]);
    assert_eq!(follow(false, &[KILLED, CHILDLESS]), [SOON, Next::Done]);
    let killed = Look {
        reached: KILLED.reached,
        ..CHILDLESS
    };
    let populated = Look {
        is_populated: true,
        ..CHILDLESS
    };
    assert_eq!(
        follow(false, &[killed, populated, CHILDLESS]),
        [SOON, SOON, Next::Done]
    );
}

#[test]
fn a_child_that_is_not_found_is_looked_for_at_once() {
    let quiet = [NOTHING; QUIET_LOOKS as usize + 1];
    assert!(follow(false, &quiet).iter().all(|next| *next == AT_ONCE));
}

#[test]
fn children_that_were_there_before_are_all_that_is_left_after_some_quiet_looks_in_a_row() {
    let mut looks = vec![NOTHING; QUIET_LOOKS as usize - 1];
    looks.push(POPULATED);
    looks.extend([NOTHING; QUIET_LOOKS as usize]);
    let next = follow(true, &looks);
    let (last, before) = next.split_last().unwrap();
    assert_eq!(*last, Next::Done);
    assert!(!before.contains(&Next::Done));
}

#[test]
fn what_does_not_die_is_given_up_in_the_end() {
    let zero = Instant::now();
    for look in [KILLED, POPULATED] {
        let mut progress = Progress::new(zero, false);
        let early = zero + CLEAR_PATIENCE.saturating_sub(KILL_RETRY);
        assert_ne!(progress.after(look, early), Next::GiveUp);
        assert_eq!(progress.after(look, zero + CLEAR_PATIENCE), Next::GiveUp);
    }
    let mut progress = Progress::new(zero, false);
    assert_eq!(progress.after(CHILDLESS, zero + CLEAR_PATIENCE), Next::Done);
}

#[test]
fn what_may_not_be_signalled_is_given_up_soon_and_without_haste() {
    let next = follow(false, &[REFUSED; QUIET_LOOKS as usize]);
    let (last, before) = next.split_last().unwrap();
    assert_eq!(*last, Next::GiveUp);
    assert!(before.iter().all(|next| *next == SOON));
    assert_eq!(
        follow(true, &[REFUSED; QUIET_LOOKS as usize]).last(),
        Some(&Next::GiveUp)
    );
}

#[test]
fn a_child_that_never_shows_is_given_up_and_not_looked_for_in_a_loop() {
    let next = follow(false, &[NOTHING; HURRIED_LOOKS as usize]);
    assert_eq!(next.last(), Some(&SOON));
    let zero = Instant::now();
    let mut progress = Progress::new(zero, false);
    assert_eq!(progress.after(KILLED, zero + QUIET_PATIENCE), SOON);
    assert_eq!(progress.after(NOTHING, zero + QUIET_PATIENCE), AT_ONCE);
    let later = zero + 2 * QUIET_PATIENCE;
    assert_eq!(
        progress.after(NOTHING, later.checked_sub(KILL_RETRY).unwrap()),
        AT_ONCE
    );
    assert_eq!(progress.after(NOTHING, later), Next::GiveUp);
}
