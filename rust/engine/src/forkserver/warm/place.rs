//! Where a command is, by the kernel's word: in a sandbox, under a tracer, below a job.
//!
//! A server and its workers are no descendants of the command that they serve. So they are out of a sandbox that the
//! command cannot leave, a tracer does not follow them, and the end of a job that the server lies below would end them.

use std::os::fd::AsFd;
use std::thread;

use rustix::io::Errno;
use rustix::thread::set_no_new_privs;

use crate::cgroup;
use crate::kernel_file;
use crate::procfs::{ProcFs, number, status_value};
use crate::sys::{landlock_ruleset, own_pid, restrict_self};
use crate::tree::TOKEN_VARIABLE;

/// How many sets of rules Landlock puts upon each other (`LANDLOCK_MAX_NUM_LAYERS`).
const LAYERS: usize = 16;
/// Words at the end of a server's command line that differ between servers of one kind: folder and name of the socket,
/// and descriptors.
const WORDS_OF_A_SOCKET: usize = 3;

/// Why no warm server may fork the workers of this command; `None` if one may.
pub fn obstacle() -> Option<&'static str> {
    let own = kernel_file::read("/proc/thread-self/status").unwrap_or_default();
    if status_value(&own, "TracerPid").is_some_and(|pid| pid != b"0") {
        return Some("a tracer follows this command");
    }
    // Those of pid 1 hold for everybody in its container. If we may not see them, ours are too many.
    let first = kernel_file::read("/proc/1/status").unwrap_or_default();
    if is_filtered(&own, &first) {
        return Some("this command is in a sandbox of seccomp");
    }
    is_under_landlock().then_some("this command is in a sandbox of Landlock")
}

/// Whether a process has more filters of system calls than another one. A kernel before Linux 5.9 does not count them.
fn is_filtered(status: &[u8], other: &[u8]) -> bool {
    const FILTERS: &str = "Seccomp_filters";
    let count = |status| status_value(status, FILTERS).and_then(number::<u64>);
    match count(status) {
        Some(filters) => filters > count(other).unwrap_or_default(),
        None => status_value(status, "Seccomp").is_some_and(|mode| mode != b"0"),
    }
}

/// Whether Landlock restricts this thread. No file shows that, but it adds up to [`LAYERS`] sets of rules: a thread that
/// gets fewer has inherited some. What cannot be found out here does not count.
fn is_under_landlock() -> bool {
    let Ok(rules) = landlock_ruleset() else {
        return false;
    };
    let probe = move || {
        set_no_new_privs(true).ok()?;
        for _ in 0..LAYERS {
            if let Err(error) = restrict_self(rules.as_fd()) {
                return Some(Errno::from_io_error(&error) == Some(Errno::TOOBIG));
            }
        }
        Some(false)
    };
    let probe = thread::Builder::new().stack_size(64 << 10).spawn(probe);
    probe.is_ok_and(|probe| probe.join().ok().flatten().unwrap_or(false))
}

/// Whether this process belongs to a job, which would end what it leaves behind.
///
/// A variable of this process can be cleared, so we ask for the control group, which a worker's descendants cannot
/// leave by themselves, and for the environment that each ancestor was started with. What lost its parent has an
/// ancestor of the job, too: agents and guards adopt it.
pub fn is_in_job() -> bool {
    let groups = kernel_file::read("/proc/self/cgroup").unwrap_or_default();
    if cgroup::is_of_job(&String::from_utf8_lossy(&groups)) {
        return true;
    }
    let Ok(mut procfs) = ProcFs::open() else {
        return false;
    };
    let above = procfs.ancestors(own_pid());
    std::iter::once(own_pid())
        .chain(above)
        .any(|pid| procfs.was_started_with(pid, TOKEN_VARIABLE.as_bytes()))
}

/// Whether a server lies below no job that this process is not below as well, and so ends with none of them.
///
/// The parent of a server is the process that adopts what the command left that has started it: pid 1, or an ancestor
/// of that command or the command itself. It has to be one of ours, too.
pub(super) fn is_safe(server: i32) -> bool {
    let Ok(mut procfs) = ProcFs::open() else {
        return false;
    };
    let Ok(mut adopter) = procfs.stat(server).map(|stat| stat.ppid) else {
        return false;
    };
    let words = procfs.words_before(server, WORDS_OF_A_SOCKET);
    // A server that was started in the place of another one may be the child of that one.
    while adopter > 1 && !words.is_empty() && procfs.words_before(adopter, WORDS_OF_A_SOCKET) == words {
        let Ok(stat) = procfs.stat(adopter) else {
            return false;
        };
        adopter = stat.ppid;
    }
    adopter <= 1 || adopter == own_pid() || procfs.ancestors(own_pid()).contains(&adopter)
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    #[test]
    fn filters_are_counted_and_where_the_kernel_does_not_count_them_one_is_too_many() {
        let counted = |count: u32| format!("Seccomp:\t2\nSeccomp_filters:\t{count}\n");
        for (own, first, expected) in [
            (counted(0), counted(0), false),
            (counted(1), counted(0), true),
            (counted(1), counted(1), false),
            (counted(3), counted(2), true),
            (counted(1), String::new(), true),
            (counted(0), String::new(), false),
            ("Seccomp:\t0\n".to_owned(), "Seccomp:\t0\n".to_owned(), false),
            ("Seccomp:\t2\n".to_owned(), "Seccomp:\t2\n".to_owned(), true),
            (String::new(), String::new(), false),
        ] {
            assert_eq!(
                is_filtered(own.as_bytes(), first.as_bytes()),
                expected,
                "{own:?} {first:?}"
            );
        }
    }

    #[test]
    fn a_thread_under_landlock_knows_it_and_the_one_that_asks_stays_free() {
        let was_under = is_under_landlock();
        let restricted = thread::spawn(|| {
            set_no_new_privs(true).unwrap();
            restrict_self(landlock_ruleset().ok()?.as_fd()).ok()?;
            Some(is_under_landlock())
        });
        // `None`: this kernel has no Landlock.
        assert_ne!(restricted.join().unwrap(), Some(false));
        assert_eq!(is_under_landlock(), was_under);
    }

    #[test]
    #[expect(clippy::disallowed_types, reason = "children that are not the engine's")]
    fn a_server_below_this_process_is_safe_and_one_below_another_is_not() {
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "sleep 600 & wait"])
            .spawn()
            .unwrap();
        let shell_pid = shell.id() as i32;
        let mut procfs = ProcFs::open().unwrap();
        let below = loop {
            let all = procfs.scan().unwrap();
            if let Some(stat) = all.iter().find(|stat| stat.ppid == shell_pid) {
                break stat.pid;
            }
            thread::yield_now();
        };
        let found = [shell_pid, below, i32::MAX].map(is_safe);
        for pid in [below, shell_pid] {
            kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        }
        shell.wait().unwrap();
        assert_eq!(found, [true, false, false]);
    }
}
