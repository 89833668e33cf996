//! Tests of news: one thread plays both sides, or two threads race.

use std::time::SystemTime;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

const LIMIT: Duration = Duration::from_secs(20);
const NOW: Option<Duration> = Some(Duration::ZERO);

fn start(worker: usize) -> Event {
    Event::Started {
        worker,
        pid: 1,
        time: SystemTime::UNIX_EPOCH,
    }
}

fn urgent() -> Event {
    Event::Output {
        worker: 0,
        stream: 1,
        data: Vec::new(),
    }
}

fn end() -> Event {
    Event::Ended {
        first_failure: None,
        stop_signal: None,
        stragglers: 0,
        survivors: Vec::new(),
        oom_kills: 0,
        tail: Vec::new(),
        shown_since: None,
    }
}

fn is_readable(news: &News, timeout: Duration) -> bool {
    let timeout = Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    poll(&mut [PollFd::new(news, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

fn is_readable_now(news: &News) -> bool {
    is_readable(news, Duration::ZERO)
}

fn wait(news: &News, routine: bool) -> Option<Vec<Event>> {
    match news.wait(NOW, routine, || false).unwrap() {
        Waited::Events(events) => Some(events),
        Waited::TimedOut => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn it_is_readable_while_there_is_something_to_take() {
    let news = News::new().unwrap();
    assert!(!is_readable_now(&news));
    assert_eq!(wait(&news, true), None);
    for _ in 0..2 {
        news.publish(vec![start(0)], false);
        news.publish(vec![start(1)], false);
        assert!(is_readable_now(&news));
        assert_eq!(wait(&news, true), Some(vec![start(0), start(1)]));
        assert!(!is_readable_now(&news));
    }
}

#[test]
fn it_follows_the_last_wait_in_what_is_routine() {
    let news = News::new().unwrap();
    assert_eq!(wait(&news, false), None);
    news.publish(vec![start(0)], false);
    assert!(!is_readable_now(&news), "nobody wants to hear of a start");
    assert_eq!(wait(&news, false), None);
    news.publish(vec![urgent()], false);
    assert!(is_readable_now(&news));
    assert_eq!(wait(&news, false), Some(vec![start(0), urgent()]));
    news.publish(vec![start(1)], false);
    assert_eq!(
        wait(&news, true),
        Some(vec![start(1)]),
        "who asks for all gets all"
    );
    news.publish(vec![start(2)], false);
    assert!(is_readable_now(&news));
}

#[test]
fn what_was_told_can_be_taken_by_whoever_comes() {
    let news = News::new().unwrap();
    news.publish(vec![start(0)], false);
    assert!(is_readable_now(&news));
    assert_eq!(wait(&news, false), Some(vec![start(0)]), "or a poll would spin");
    assert!(!is_readable_now(&news));
}

#[test]
fn while_workers_are_started_the_owner_is_told_now_and_then() {
    let news = News::new().unwrap();
    news.lock().last_told = Instant::now() + LIMIT;
    news.publish(vec![start(0), urgent()], true);
    assert!(!is_readable_now(&news));
    assert_eq!(
        wait(&news, false),
        Some(vec![start(0), urgent()]),
        "patience keeps nothing from whoever asks"
    );
    news.publish(vec![start(1)], false);
    assert_eq!(wait(&news, true), Some(vec![start(1)]));
    news.lock().last_told = Instant::now() + LIMIT;
    news.publish(vec![start(2)], true);
    assert!(!is_readable_now(&news));
    news.publish(Vec::new(), false);
    assert!(is_readable_now(&news), "the last start ends the patience");
}

#[test]
fn a_wake_before_the_wait_ends_it_once_and_keeps_the_events() {
    let news = News::new().unwrap();
    news.wake();
    news.wake();
    assert!(!is_readable_now(&news), "it is no event");
    news.publish(vec![start(0)], false);
    assert!(matches!(
        news.wait(Some(LIMIT), true, || false).unwrap(),
        Waited::Woken
    ));
    assert_eq!(wait(&news, true), Some(vec![start(0)]));
    assert_eq!(wait(&news, true), None);
}

#[test]
fn a_wake_out_of_a_signal_handler_ends_the_wait_that_it_interrupts() {
    let news = News::new().unwrap();
    let handler = || {
        news.wake();
        false
    };
    assert!(matches!(
        news.wait(Some(LIMIT), true, handler).unwrap(),
        Waited::Woken
    ));
}

#[test]
fn a_thread_that_ended_of_itself_is_an_error_for_ever() {
    let news = News::new().unwrap();
    news.publish(vec![start(0)], false);
    let error = Error::os("epoll_wait")(std::io::Error::from(std::io::ErrorKind::Other));
    news.end(Some(error));
    assert_eq!(wait(&news, false), Some(vec![start(0)]), "nothing is lost");
    assert!(is_readable_now(&news));
    assert!(matches!(
        news.wait(None, true, || false),
        Err(Error::Os {
            what: "epoll_wait",
            ..
        })
    ));
    assert!(matches!(news.wait(None, true, || false), Err(Error::Closed)));
}

#[test]
fn whoever_waits_without_a_limit_and_without_a_group_is_told_so() {
    let news = News::new().unwrap();
    let wait = || news.wait(None, true, || false);
    assert!(matches!(wait(), Err(Error::Idle)));
    news.wake();
    assert!(matches!(wait(), Ok(Waited::Woken)));
    news.begin();
    news.publish(vec![end()], false);
    // Another group may begin before the owner has taken the end of the first.
    news.begin();
    assert!(matches!(wait(), Ok(Waited::Events(_))));
    news.publish(vec![start(0)], false);
    assert!(matches!(wait(), Ok(Waited::Events(_))));
    news.publish(vec![end()], false);
    assert!(matches!(wait(), Ok(Waited::Events(_))));
    assert!(matches!(wait(), Err(Error::Idle)));
}

/// Otherwise a child that a handler starts would begin with all signals blocked.
#[test]
fn handlers_run_under_the_callers_mask_before_a_look_with_all_blocked() {
    let news = News::new().unwrap();
    let before = signal::block(SignalSet::of(&[libc::SIGWINCH]));
    let mut masks = Vec::new();
    let waited = news.wait(NOW, true, || {
        masks.push(signal::block(SignalSet::default()));
        false
    });
    assert!(matches!(waited, Ok(Waited::TimedOut)));
    let own = signal::set_mask(before);
    assert_eq!(own, SignalSet(before.0 | SignalSet::of(&[libc::SIGWINCH]).0));
    assert_eq!(
        masks,
        [
            own,
            SignalSet(SignalSet::ALL.0 & !SignalSet::of(&[libc::SIGKILL, libc::SIGSTOP]).0)
        ]
    );
}

/// Each way of waiting may hear of an event late, but must never miss it.
#[test]
fn no_event_is_lost_between_a_look_and_a_sleep() {
    const COUNT: usize = 20_000;
    let news = News::new().unwrap();
    let mut heard = Vec::new();
    std::thread::scope(|scope| {
        let publisher = scope.spawn(|| {
            for number in 0..COUNT {
                news.publish(vec![start(number)], number % 7 == 0);
            }
            news.publish(vec![urgent()], false);
        });
        let mut turn = 0;
        while heard.last() != Some(&urgent()) {
            turn += 1;
            match turn % 3 {
                0 => heard.extend(wait(&news, false).unwrap_or_default()),
                1 => {
                    heard.extend(wait(&news, true).unwrap_or_default());
                    if heard.last() != Some(&urgent()) {
                        assert!(is_readable(&news, LIMIT), "{} of {COUNT}", heard.len());
                    }
                }
                _ => match news.wait(Some(LIMIT), true, || false).unwrap() {
                    Waited::Events(events) => heard.extend(events),
                    other => panic!("{other:?} after {} of {COUNT}", heard.len()),
                },
            }
        }
        publisher.join().unwrap();
    });
    let expected: Vec<Event> = (0..COUNT).map(start).chain([urgent()]).collect();
    assert!(heard == expected, "{} of {COUNT}", heard.len());
    assert!(!is_readable_now(&news));
}
