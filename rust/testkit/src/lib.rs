//! Parts shared by the helper programs of dsl's tests and benches.
//!
//! `dsl-testchild` is a worker that misbehaves by arguments, `dsl-floor` is the cheapest launcher the
//! kernel allows, `dsl-deny` runs a command on a kernel that lacks some system calls. None is shipped.
//! The programs have a C `main`: Rust's own start-up ignores SIGPIPE and opens closed standard streams,
//! which would hide what a launcher hands to its workers.

pub mod action;
pub mod dump;
pub mod family;
pub mod output;
pub mod signals;
pub mod sys;

/// Command line of this process after the program name, bytes that are not UTF-8 replaced.
pub fn arguments() -> Vec<String> {
    std::env::args_os()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect()
}

/// Says on stderr why the program cannot go on and ends it with code 100.
///
/// No test asks a worker for this code, so a broken test program is never mistaken for a result.
pub fn fail(reason: &str) -> ! {
    sys::write_all(2, format!("dsl test program: {reason}\n").as_bytes());
    sys::exit_now(100)
}
