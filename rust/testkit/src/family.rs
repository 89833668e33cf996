//! Shapes of process trees that a launcher may meet, each bounded in number.

use crate::{fail, sys};
use rustix::thread::{NanosleepRelativeResult, nanosleep};
use rustix::time::Timespec;

/// Sleeps for `duration_us` microseconds, however many signals arrive.
pub fn sleep_us(duration_us: u64) {
    let mut left = Timespec {
        tv_sec: (duration_us / 1_000_000) as i64,
        tv_nsec: ((duration_us % 1_000_000) * 1000) as i64,
    };
    while let NanosleepRelativeResult::Interrupted(rest) = nanosleep(&left) {
        left = rest;
    }
}

/// Sleeps until a signal ends the process.
pub fn pause() -> ! {
    sys::suspend_until(|| false);
    fail("woke up from an endless sleep")
}

fn new_session() {
    // Fails only for a group leader, which the tests do not need here.
    let _ = rustix::process::setsid();
}

/// Does `work` in a child and goes on; the child ends after it.
pub fn child(work: impl FnOnce()) {
    match sys::fork() {
        Ok(None) => {
            work();
            sys::exit_now(0);
        }
        Ok(Some(_)) => {}
        Err(error) => fail(&format!("cannot fork: {error}")),
    }
}

/// Does `work` in a daemon: a grandchild in its own session whose parent has gone.
pub fn daemon(work: impl FnOnce()) {
    match sys::fork() {
        Ok(None) => {
            new_session();
            child(work);
            sys::exit_now(0);
        }
        Ok(Some(pid)) => sys::wait_for(pid),
        Err(error) => fail(&format!("cannot fork: {error}")),
    }
}

/// Does `work` in a child forked by a second thread, which then sleeps forever.
pub fn thread_child(work: impl FnOnce() + Send + 'static) {
    let (forked, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        child(work);
        let _ = forked.send(());
        pause()
    });
    let _ = wait.recv();
}

/// Becomes a new process `generations` times: each forks its heir into a new session and ends at once.
/// The last one sleeps.
pub fn hop(generations: u64, pause_us: u64) -> ! {
    for _ in 0..generations {
        sleep_us(pause_us);
        match sys::fork() {
            Ok(None) => new_session(),
            Ok(Some(_)) => sys::exit_now(0),
            Err(_) => {}
        }
    }
    pause()
}

/// Forks `total` sleeping children, each in its own session, one every `pause_us`; then sleeps.
/// A fork that fails (a process limit) counts as tried.
pub fn churn(total: u64, pause_us: u64) -> ! {
    for _ in 0..total {
        if matches!(sys::fork(), Ok(None)) {
            new_session();
            pause();
        }
        sleep_us(pause_us);
    }
    pause()
}

/// Doubles `depth` times: 2^depth processes, each in its own session, all sleeping in the end.
pub fn bloom(depth: u64, pause_us: u64) -> ! {
    for _ in 0..depth.min(8) {
        if matches!(sys::fork(), Ok(None)) {
            new_session();
        }
        sleep_us(pause_us);
    }
    pause()
}
