//! Signal names and numbers as tests write them.

/// Names of the classic signals, by number.
const NAMES: [(&str, i32); 25] = [
    ("HUP", libc::SIGHUP),
    ("INT", libc::SIGINT),
    ("QUIT", libc::SIGQUIT),
    ("ILL", libc::SIGILL),
    ("TRAP", libc::SIGTRAP),
    ("ABRT", libc::SIGABRT),
    ("BUS", libc::SIGBUS),
    ("FPE", libc::SIGFPE),
    ("KILL", libc::SIGKILL),
    ("USR1", libc::SIGUSR1),
    ("SEGV", libc::SIGSEGV),
    ("USR2", libc::SIGUSR2),
    ("PIPE", libc::SIGPIPE),
    ("ALRM", libc::SIGALRM),
    ("TERM", libc::SIGTERM),
    ("CHLD", libc::SIGCHLD),
    ("CONT", libc::SIGCONT),
    ("STOP", libc::SIGSTOP),
    ("TSTP", libc::SIGTSTP),
    ("TTIN", libc::SIGTTIN),
    ("TTOU", libc::SIGTTOU),
    ("WINCH", libc::SIGWINCH),
    ("XCPU", libc::SIGXCPU),
    ("XFSZ", libc::SIGXFSZ),
    ("SYS", libc::SIGSYS),
];

/// Number of a signal given as `TERM` or `15`.
pub fn parse(text: &str) -> Option<i32> {
    let named = NAMES
        .iter()
        .find(|(name, _)| *name == text)
        .map(|&(_, number)| number);
    named.or_else(|| text.parse().ok().filter(|number| (1..=64).contains(number)))
}

/// Numbers of a comma list of signals. `ALL` is every signal a program can catch, except `CHLD` (which a parent
/// gets from its own children) and the two that glibc reserves.
pub fn parse_list(text: &str) -> Option<Vec<i32>> {
    if text == "ALL" {
        let caught = |number: &i32| ![libc::SIGKILL, libc::SIGSTOP, libc::SIGCHLD, 32, 33].contains(number);
        return Some((1..=64).filter(caught).collect());
    }
    text.split(',').map(parse).collect()
}
