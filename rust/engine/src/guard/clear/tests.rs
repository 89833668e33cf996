use super::*;

/// What follows each look, for a process with these strangers; the looks are a millisecond apart.
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
    killed: 0,
};
const KILLED: Look = Look { killed: 2, ..NOTHING };
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
        killed: 1,
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
    for look in [KILLED, POPULATED, NOTHING] {
        let mut progress = Progress::new(zero, false);
        let early = zero + CLEAR_PATIENCE.saturating_sub(KILL_RETRY);
        assert_ne!(progress.after(look, early), Next::GiveUp);
        assert_eq!(progress.after(look, zero + CLEAR_PATIENCE), Next::GiveUp);
    }
    let mut progress = Progress::new(zero, false);
    assert_eq!(progress.after(CHILDLESS, zero + CLEAR_PATIENCE), Next::Done);
}
