//! The cheapest launcher the kernel allows, as a yardstick.
//!
//! `dsl-floor spawn N PROGRAM…` starts N programs with a bare `posix_spawn` loop and waits for all.
//!
//! `dsl-floor kill N PROGRAM…` starts N sleepers, kills the first, notices, ends and reaps the others. It prints the
//! time when the first was killed (monotonic nanoseconds) and how long it took until the last was reaped.
#![no_main]

use dsl_testkit::{fail, sys};

/// Entry point called by the C library.
#[unsafe(no_mangle)]
pub extern "C" fn main(_argc: i32, _argv: *const *const u8) -> i32 {
    let words = dsl_testkit::arguments();
    let [mode, count, program @ ..] = words.as_slice() else {
        fail("usage: dsl-floor spawn|kill N PROGRAM…")
    };
    let Ok(count) = count.parse::<usize>() else {
        fail("N must be a number")
    };
    let pids: Vec<i32> = (0..count).map(|_| spawn(program)).collect();
    match mode.as_str() {
        "spawn" => i32::from(!reap_all()),
        "kill" => kill_all(&pids),
        _ => fail("the first word must be spawn or kill"),
    }
}

fn spawn(program: &[String]) -> i32 {
    if program.is_empty() {
        fail("PROGRAM is missing");
    }
    sys::spawn(program).unwrap_or_else(|error| fail(&format!("cannot spawn {:?}: {error}", program[0])))
}

/// Reaps every child; true if all ended with 0.
fn reap_all() -> bool {
    let mut good = true;
    while let Some((_, status)) = sys::wait_any() {
        good &= status == 0;
    }
    good
}

fn kill_all(pids: &[i32]) -> i32 {
    let begin = sys::monotonic_ns();
    sys::kill(pids[0], libc::SIGKILL);
    sys::wait_any();
    for &pid in &pids[1..] {
        sys::kill(pid, libc::SIGTERM);
    }
    reap_all();
    let elapsed = sys::monotonic_ns() - begin;
    sys::write_all(1, format!("{begin} {elapsed}\n").as_bytes());
    0
}
