//! Signal masks, dispositions, intake and delivery.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::{ForkedChild, checked};

/// The kernel's signal set: bit `n - 1` is signal `n`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SignalSet(pub(crate) u64);

impl SignalSet {
    pub(crate) const NONE: Self = Self(0);
    /// Every signal, including those of the C library.
    pub(crate) const EVERY: Self = Self(u64::MAX);
    /// Every signal but those that the C library sends between its threads: with one of them blocked in some
    /// thread, `setuid` and its like wait for that thread forever.
    ///
    /// [nptl(7)](https://man7.org/linux/man-pages/man7/nptl.7.html); musl has a third one.
    pub(crate) const ALL: Self = Self(!(Self::bit(32) | Self::bit(33) | Self::MUSL));
    const MUSL: u64 = if cfg!(target_env = "musl") {
        Self::bit(34)
    } else {
        0
    };

    pub(crate) fn of(signals: &[i32]) -> Self {
        Self(signals.iter().fold(0, |set, signal| set | Self::bit(*signal)))
    }

    pub(crate) const fn has(self, signal: i32) -> bool {
        self.0 & Self::bit(signal) != 0
    }

    const fn bit(signal: i32) -> u64 {
        1 << (signal - 1)
    }
}

/// The last of the kernel's signals.
pub(crate) const LAST_SIGNAL: i32 = 64;
/// Size that the kernel expects of a signal set.
pub(crate) const SET_BYTES: usize = 8;

/// Replaces this thread's mask and returns the old one.
///
/// [sigprocmask(2)](https://man7.org/linux/man-pages/man2/sigprocmask.2.html)
pub(crate) fn set_mask(set: SignalSet) -> SignalSet {
    change_mask(libc::SIG_SETMASK, set)
}

/// Adds to this thread's mask and returns the old one.
pub(crate) fn block(set: SignalSet) -> SignalSet {
    change_mask(libc::SIG_BLOCK, set)
}

/// Removes from this thread's mask and returns the old one.
pub(crate) fn unblock(set: SignalSet) -> SignalSet {
    change_mask(libc::SIG_UNBLOCK, set)
}

/// A raw call, because the C library's leaves out the signals that it uses itself.
fn change_mask(how: i32, set: SignalSet) -> SignalSet {
    let mut old = SignalSet::default();
    // SAFETY: both sets are eight bytes owned by this frame; the call fails only on a bad address or size.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            how,
            &raw const set.0,
            &raw mut old.0,
            SET_BYTES,
        );
    }
    old
}

/// Whether the process ignores the signal (as under `nohup`). Rustix has nothing about dispositions.
///
/// [sigaction(2)](https://man7.org/linux/man-pages/man2/sigaction.2.html)
pub(crate) fn is_ignored(signal: i32) -> bool {
    // SAFETY: a sigaction of zeroes is valid (default action).
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    // SAFETY: only reads the disposition into a buffer of ours.
    let result = unsafe { libc::sigaction(signal, core::ptr::null(), &raw mut action) };
    result == 0 && action.sa_sigaction == libc::SIG_IGN
}

/// Gives a signal its default action. Of SIGCHLD, an inherited "ignore" makes the kernel discard exit statuses.
pub(crate) fn reset(signal: i32) -> io::Result<()> {
    // SAFETY: a sigaction of zeroes is valid (default action).
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    action.sa_flags = libc::SA_NOCLDSTOP;
    // SAFETY: installs no handler, so no code of ours runs in signal context.
    let result = unsafe { libc::sigaction(signal, &raw const action, core::ptr::null_mut()) };
    checked(result).map(drop)
}

/// What this process does on a signal, in the C library's form.
pub(crate) struct Action {
    signal: i32,
    action: libc::sigaction,
}

/// The actions of this process on signals, except default actions.
///
/// [sigaction(2)](https://man7.org/linux/man-pages/man2/sigaction.2.html)
pub(crate) fn own_actions() -> Vec<Action> {
    let read = |signal| {
        // SAFETY: a sigaction of zeroes is valid (default action).
        let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
        // SAFETY: only reads the disposition into a buffer of ours.
        let result = unsafe { libc::sigaction(signal, core::ptr::null(), &raw mut action) };
        (result == 0).then_some(Action { signal, action })
    };
    let is_own = |one: &Action| one.action.sa_sigaction != libc::SIG_DFL;
    (1..=LAST_SIGNAL).filter_map(read).filter(is_own).collect()
}

/// Gives a forked child its parent's actions on signals, which [`own_actions`] has read.
///
/// [sigaction(2)](https://man7.org/linux/man-pages/man2/sigaction.2.html)
pub(crate) fn take_actions(_child: ForkedChild, actions: &[Action]) {
    for one in actions {
        // SAFETY: a handler is code that was there before the fork, and is in the copy. Fails for no valid signal.
        let _ = unsafe { libc::sigaction(one.signal, &raw const one.action, core::ptr::null_mut()) };
    }
}

/// Asks for a signal to this process when the thread that forked it ends. The signal is a real-time one, which
/// rustix takes from unsafe code only.
///
/// [PR_SET_PDEATHSIG(2const)](https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html)
pub(crate) fn die_with_parent(signal: i32) -> io::Result<()> {
    // SAFETY: the option takes a signal number and touches no memory.
    let result = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal) };
    checked(result).map(drop)
}

/// A descriptor from which blocked signals are read. Rustix has none; libc's `sigset_t` is not the kernel's set.
///
/// [signalfd(2)](https://man7.org/linux/man-pages/man2/signalfd.2.html)
pub(crate) fn intake(set: SignalSet) -> io::Result<OwnedFd> {
    let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
    // SAFETY: the set is eight bytes owned by this frame.
    let fd = unsafe { libc::syscall(libc::SYS_signalfd4, -1, &raw const set.0, SET_BYTES, flags) };
    let fd = checked(fd)?;
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A signal as the intake saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Received {
    /// Its number.
    pub(crate) signal: i32,
    /// The terminal made it: by a key (Ctrl-C, Ctrl-Z), which every foreground process got too, or by hanging up.
    pub(crate) from_terminal: bool,
    /// The process that sent it by `kill(2)`, even if a guard has passed it on. 0 for a signal of any other origin,
    /// and for a sender outside the pid namespace.
    pub(crate) sender: i32,
    /// A guard has heard it and passes it on.
    pub(crate) passed_on: bool,
}

impl Received {
    /// A signal that we send of our own accord.
    pub(crate) fn own(signal: i32) -> Self {
        Self {
            signal,
            from_terminal: false,
            sender: 0,
            passed_on: false,
        }
    }

    /// A signal that a key of the terminal sends.
    pub(crate) fn key(signal: i32) -> Self {
        Self {
            from_terminal: true,
            ..Self::own(signal)
        }
    }
}

/// Values that a guard attaches to the signals it passes on: to one from the terminal, and to any other.
const TERMINAL_MARK: i32 = 0x7474;
const PLAIN_MARK: i32 = 0x7470;

/// Reads one pending signal, if there is one.
pub(crate) fn read_intake(fd: BorrowedFd<'_>) -> io::Result<Option<Received>> {
    let mut bytes = [0u8; size_of::<libc::signalfd_siginfo>()];
    match rustix::io::read(fd, &mut bytes) {
        Ok(read) if read == bytes.len() => {}
        Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    // SAFETY: the buffer holds exactly one record, which the kernel filled; the type has no invalid values.
    let info: libc::signalfd_siginfo = unsafe { core::mem::transmute_copy(&bytes) };
    let is_marked = info.ssi_code == libc::SI_QUEUE && [TERMINAL_MARK, PLAIN_MARK].contains(&info.ssi_int);
    // The kernel shows all eight bytes of the value: four of the mark, then four of the sender.
    let [_, _, _, _, sender @ ..] = info.ssi_ptr.to_ne_bytes();
    let sender = match info.ssi_code {
        libc::SI_USER => info.ssi_pid as i32,
        libc::SI_QUEUE if is_marked => i32::from_ne_bytes(sender),
        _ => 0,
    };
    let signal = info.ssi_signo as i32;
    let from_terminal = info.ssi_code == libc::SI_KERNEL
        || (is_marked && info.ssi_int == TERMINAL_MARK)
        || (signal == libc::SIGHUP && is_shell(sender, super::session_leader()));
    Ok(Some(Received {
        signal,
        from_terminal,
        sender,
        passed_on: is_marked,
    }))
}

/// Reads all pending signals, which only wake the reader.
pub(crate) fn drain(fd: BorrowedFd<'_>) {
    while let Ok(Some(_)) = read_intake(fd) {}
}

/// Whether the sender is the shell, which tells its jobs that its terminal has gone away. Both numbers are 0
/// outside the pid namespace, so two zeroes need not be the same process.
fn is_shell(sender: i32, session_leader: i32) -> bool {
    sender != 0 && sender == session_leader
}

/// Sends a signal of any number to a process or (negative) to a group. Rustix takes real-time signals from unsafe
/// code only.
///
/// Only for pids that an unreaped child pins. [kill(2)](https://man7.org/linux/man-pages/man2/kill.2.html)
pub(crate) fn send(pid: i32, number: i32) -> io::Result<()> {
    if pid == 0 || pid == -1 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: takes numbers only.
    checked(unsafe { libc::kill(pid, number) }).map(drop)
}

#[repr(C)]
struct QueuedInfo {
    signo: i32,
    errno: i32,
    code: i32,
    pad: i32,
    pid: i32,
    uid: u32,
    value: i32,
    sender: i32,
    rest: [u8; 128 - 32],
}

/// Passes a signal on to an unreaped child, whose pid cannot be reused, with the mark of the terminal and the
/// sender. Rustix cannot queue signals.
///
/// [rt_sigqueueinfo(2)](https://man7.org/linux/man-pages/man2/rt_sigqueueinfo.2.html)
pub(crate) fn forward(child: i32, received: Received) -> io::Result<()> {
    let info = QueuedInfo {
        signo: received.signal,
        errno: 0,
        code: libc::SI_QUEUE,
        pad: 0,
        pid: rustix::process::getpid().as_raw_nonzero().get(),
        uid: rustix::process::getuid().as_raw(),
        value: if received.from_terminal {
            TERMINAL_MARK
        } else {
            PLAIN_MARK
        },
        sender: received.sender,
        rest: [0; 96],
    };
    // SAFETY: the record has the size and leading layout of siginfo_t and outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, child, received.signal, &raw const info) };
    if result < 0 {
        // A seccomp profile may refuse this call. Then the signal goes without the mark.
        return send(child, received.signal);
    }
    Ok(())
}

/// Whether `pidfd_send_signal` exists and is not refused: signal 0 to ourselves does nothing. Rustix cannot send
/// signal 0.
pub(crate) fn can_signal_pidfd(own: &OwnedFd) -> bool {
    // SAFETY: signal 0 is only checked, and a null record is allowed.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            own.as_raw_fd(),
            0,
            core::ptr::null::<u8>(),
            0,
        )
    };
    result == 0
}

/// Waits until `fd` is readable, or a signal outside `mask` is delivered to this thread. Rustix's poll takes no
/// mask.
///
/// [ppoll(2)](https://man7.org/linux/man-pages/man2/poll.2.html)
pub(crate) fn wait_readable(
    fd: BorrowedFd<'_>,
    timeout: Option<std::time::Duration>,
    mask: SignalSet,
) -> io::Result<Wake> {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut spec = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let spec_pointer = timeout.map_or(core::ptr::null_mut(), |timeout| {
        spec.tv_sec = libc::c_long::try_from(timeout.as_secs()).unwrap_or(libc::c_long::MAX);
        spec.tv_nsec = libc::c_long::from(timeout.subsec_nanos());
        &raw mut spec
    });
    // SAFETY: the descriptor is borrowed for the call and every pointer names memory of this frame.
    let result = unsafe {
        libc::syscall(
            libc::SYS_ppoll,
            &raw mut poll,
            1,
            spec_pointer,
            &raw const mask.0,
            SET_BYTES,
        )
    };
    match result {
        0 => Ok(Wake::TimedOut),
        result if result > 0 => Ok(Wake::Readable),
        _ => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(Wake::Interrupted),
            error => Err(error),
        },
    }
}

/// Why [`wait_readable`] came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The descriptor is readable.
    Readable,
    /// A signal handler ran.
    Interrupted,
    /// The time is over.
    TimedOut,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_out_of_sight_is_not_the_shell() {
        assert!(is_shell(7, 7));
        assert!(!is_shell(7, 8));
        assert!(!is_shell(0, 0), "both are outside the pid namespace");
    }

    #[test]
    fn no_thread_blocks_the_signals_of_the_c_library() {
        for signal in [32, 33] {
            assert_eq!(SignalSet::ALL.0 & SignalSet::of(&[signal]).0, 0);
        }
        assert_eq!(
            SignalSet::ALL.0.count_zeros(),
            if cfg!(target_env = "musl") { 3 } else { 2 }
        );
    }
}
