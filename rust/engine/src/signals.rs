//! What a signal to the job means: one table, and how the agent and the guard react.

use std::time::{Duration, Instant};

use crate::sys::signal::{Received, SignalSet};

/// The numbers of signals.
const NUMBERS: std::ops::RangeInclusive<i32> = 1..=64;
/// Signals by which a terminal and a shell control a job. Workers always need them.
const JOB_CONTROL: [i32; 3] = [libc::SIGTSTP, libc::SIGCONT, libc::SIGWINCH];
/// Signals by which a terminal stops a background process group that reads from the terminal or writes to it.
pub(crate) const STALLING: [i32; 2] = [libc::SIGTTIN, libc::SIGTTOU];
/// Signals that act on processes whatever their program says, and so on all that a worker has started.
const FORCED: [i32; 2] = [libc::SIGKILL, libc::SIGSTOP];
/// Signals that stop the job unless a table says otherwise.
const STOPPING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];
/// Signals that a job hears even if it has inherited that they are ignored: a shell without job control does so for
/// SIGINT and SIGQUIT of what it starts with `&`, to spare it the keys of the terminal.
const HEARD: [i32; 5] = [
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
];
/// Signals that a terminal sends when a key is pressed.
const KEYS: [i32; 2] = [libc::SIGINT, libc::SIGQUIT];
/// Signals that are passed on to the program unless a table says otherwise.
const USERS: [i32; 2] = [libc::SIGUSR1, libc::SIGUSR2];
/// Signals that report a fault of the program itself.
const FAULTS: [(i32, &str); 7] = [
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGTRAP, "SIGTRAP"),
    (libc::SIGABRT, "SIGABRT"),
    (libc::SIGSYS, "SIGSYS"),
];
/// Signals of one process within this time are one request: `timeout` signals its child and then the group that
/// both are in, and systemd sends SIGHUP behind SIGTERM. No user repeats a request so quickly.
const SAME_REQUEST: Duration = Duration::from_millis(50);
/// An agent may hear one request twice: from its guard, which may be slow on a busy machine, and from the sender
/// (or from the terminal, if guard and agent are both in its group). The kernel may merge the two signals into one,
/// so each must count as the request.
const TWINS: Duration = Duration::from_secs(3);
/// A terminal hangs up once. A job hears of it from the shell, and from the kernel when the shell is gone.
const HANG_UP: Duration = Duration::from_secs(5);
/// After the first Ctrl-\ a second one within this time ends the job.
const INSISTS: Duration = Duration::from_secs(5);
/// The signal that an agent gets when its guard dies, if the agent cannot watch the guard through a descriptor. It is
/// the last real-time signal. If another process sends it, the agent sees that the guard is still alive.
pub(crate) const GUARD_DEATH: i32 = 64;

/// What a signal to the job means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// Pass it on, and kill what is left after the grace period. A second one kills at once.
    Stop,
    /// Pass it on and go on.
    Forward,
    /// The job will lose its machine soon: pass it on, and leave the workers the time of a preemption to write a
    /// checkpoint and end.
    Preempt,
}

/// Why a signal cannot be in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what it is about")]
pub enum Refusal {
    #[error("there is no signal {0}: signals have the numbers 1 to 64")]
    NoSignal(i32),
    #[error("signal {0} is used by the C library itself: take one from 34 on")]
    Reserved(i32),
    #[error("{0} cannot be taken, because no process can catch it: leave it out")]
    Uncatchable(&'static str),
    #[error("SIGCHLD cannot be taken, because it tells of the ends of workers: leave it out")]
    Child,
    #[error("{0} cannot be taken, because it tells a process of its own fault: leave it out")]
    Fault(&'static str),
}

/// Which signals a guard and its agent take, and what each of them means.
///
/// A signal that is not in the table keeps its default action: it ends the guard, and the agent then ends the job.
/// SIGTSTP, SIGCONT and SIGWINCH are in every table, and forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table {
    /// The signals of each meaning, by its number.
    sets: [SignalSet; 3],
    /// Signals that do not count if a key of the terminal has sent them.
    deaf: SignalSet,
}

impl Default for Table {
    /// SIGINT, SIGTERM, SIGHUP and SIGQUIT stop the job, SIGUSR1 and SIGUSR2 are forwarded.
    fn default() -> Self {
        let stop = STOPPING.map(|signal| (signal, Meaning::Stop));
        let users = USERS.map(|signal| (signal, Meaning::Forward));
        stop.into_iter()
            .chain(users)
            .fold(Self::job_control(), Self::with)
    }
}

impl Table {
    /// Makes a table of the named signals and the job control signals. Entries do not change the meaning of job
    /// control signals. The last entry for a signal counts.
    pub fn new(entries: impl IntoIterator<Item = (i32, Meaning)>) -> Result<Self, Refusal> {
        let mut table = Self::job_control();
        for (signal, meaning) in entries {
            check(signal)?;
            if JOB_CONTROL.contains(&signal) {
                continue;
            }
            table = table.with((signal, meaning));
        }
        Ok(table)
    }

    fn job_control() -> Self {
        let mut sets = [SignalSet::NONE; 3];
        sets[Meaning::Forward as usize] = SignalSet::of(&JOB_CONTROL);
        Self {
            sets,
            deaf: SignalSet::NONE,
        }
    }

    /// What a signal means; `None` if the table does not have it.
    pub fn meaning(&self, signal: i32) -> Option<Meaning> {
        let meanings = [Meaning::Stop, Meaning::Forward, Meaning::Preempt];
        meanings
            .into_iter()
            .find(|meaning| has(self.set(*meaning), signal))
    }

    fn set(&self, meaning: Meaning) -> SignalSet {
        self.sets[meaning as usize]
    }

    /// Whether a signal announces a preemption.
    pub(crate) fn has_preemption(&self) -> bool {
        self.set(Meaning::Preempt) != SignalSet::NONE
    }

    /// All signals of the table.
    pub(crate) fn taken(&self) -> SignalSet {
        SignalSet(self.sets.iter().fold(0, |all, set| all | set.0))
    }

    /// The table of a process that has inherited that some signals are ignored, as under `nohup` or behind `&`: what is
    /// meant for the terminal's processes does not count.
    pub(crate) fn of_process(self, is_ignored: impl Fn(i32) -> bool) -> Self {
        let taken = self.taken();
        let unheard = |signal: &i32| has(taken, *signal) && is_ignored(*signal) && !HEARD.contains(signal);
        let keys = KEYS.into_iter().filter(|key| is_ignored(*key));
        Self {
            deaf: SignalSet::of(&keys.collect::<Vec<i32>>()),
            ..NUMBERS.filter(unheard).fold(self, Self::without)
        }
    }

    /// Whether this process is not meant: it has inherited that this key is ignored.
    pub(crate) fn is_deaf_to(&self, received: Received) -> bool {
        received.from_terminal && has(self.deaf, received.signal)
    }

    /// The signals that stop the job.
    pub(crate) fn stopping(&self) -> impl Iterator<Item = i32> {
        let stop = self.set(Meaning::Stop);
        NUMBERS.filter(move |signal| has(stop, *signal))
    }

    fn without(self, signal: i32) -> Self {
        let others = !SignalSet::of(&[signal]).0;
        Self {
            sets: self.sets.map(|set| SignalSet(set.0 & others)),
            ..self
        }
    }

    fn with(self, (signal, meaning): (i32, Meaning)) -> Self {
        let mut table = self.without(signal);
        table.sets[meaning as usize].0 |= SignalSet::of(&[signal]).0;
        table
    }

    /// Whether this is a SIGHUP that would stop the job but does not come from a terminal: log rotation sends it to
    /// ask for new files.
    pub(crate) fn is_reopening(&self, received: Received) -> bool {
        received.signal == libc::SIGHUP
            && !received.from_terminal
            && self.meaning(libc::SIGHUP) == Some(Meaning::Stop)
    }
}

/// Whether a signal to a worker concerns its whole process group in any case, as it does when the terminal sends it.
pub(crate) fn acts_on_groups(signal: i32) -> bool {
    FORCED.contains(&signal) || JOB_CONTROL.contains(&signal)
}

fn has(set: SignalSet, signal: i32) -> bool {
    NUMBERS.contains(&signal) && set.0 & SignalSet::of(&[signal]).0 != 0
}

fn check(signal: i32) -> Result<(), Refusal> {
    if let Some((_, name)) = FAULTS.iter().find(|(fault, _)| *fault == signal) {
        return Err(Refusal::Fault(name));
    }
    match signal {
        libc::SIGKILL => Err(Refusal::Uncatchable("SIGKILL")),
        libc::SIGSTOP => Err(Refusal::Uncatchable("SIGSTOP")),
        libc::SIGCHLD => Err(Refusal::Child),
        32 | 33 => Err(Refusal::Reserved(signal)),
        _ if NUMBERS.contains(&signal) => Ok(()),
        _ => Err(Refusal::NoSignal(signal)),
    }
}

/// Who of the workers has got a signal beside us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Reach {
    /// Nobody.
    #[default]
    Nobody,
    /// Those in the terminal's foreground group.
    Foreground,
    /// All workers, and what they have started.
    Everybody,
}

/// How far a group is from its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Moment {
    /// It runs.
    Running,
    /// It has the time of a preemption, and no stop was requested.
    Preempted,
    /// It is being stopped or killed.
    Ending,
}

/// How an agent reacts to a signal, given the signals before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Pass it on.
    Forward,
    /// Pass it on, and give the group at most its grace period.
    Stop,
    /// Pass it on, and give the group the time of a preemption.
    Preempt,
    /// The user insists: end the grace period.
    Hurry,
    /// The group is ending already; a second stop signal would hurry it.
    Note,
    /// Nothing.
    Ignore,
}

/// Decides how an agent reacts to one signal. `stops`: how many stop signals came before.
pub(crate) fn decide(meaning: Option<Meaning>, stops: usize, moment: Moment) -> Verdict {
    match (meaning, moment) {
        (Some(Meaning::Forward), Moment::Running) => Verdict::Forward,
        (Some(Meaning::Preempt), Moment::Running) => Verdict::Preempt,
        (Some(Meaning::Stop), _) if stops > 0 => Verdict::Hurry,
        // After the notice of a preemption the first stop signal starts the stop, and does not yet insist.
        (Some(Meaning::Stop), Moment::Running | Moment::Preempted) => Verdict::Stop,
        (Some(Meaning::Stop), Moment::Ending) => Verdict::Note,
        // A group that is being stopped must be able to run, and needs no other signal. Schedulers repeat the notice
        // of a preemption.
        (Some(Meaning::Forward | Meaning::Preempt) | None, _) => Verdict::Ignore,
    }
}

/// How a guard reacts to a signal. The agent decides what the signal means for the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passage {
    /// Do nothing: it repeats the same request, or is meant for others.
    Repeated,
    /// Pass it on.
    Plain,
    /// Pass it on, and stop as well: the shell waits for its child, the guard, to stop.
    Suspend,
    /// Stop by it, and do not pass it on: the terminal has stopped the worker in our group, and the shell waits for
    /// its child, the guard, to stop.
    Stall,
    /// Pass it on, continue the agent if it is stopped, and give the agent at most the grace period.
    Stop,
    /// Pass it on, continue the agent if it is stopped, and give the agent the time of a preemption.
    Preempt,
}

/// Decides how a guard reacts to one signal. `is_copy`: the signal repeats the request of a moment ago. `reopens`:
/// the job has log files.
pub(crate) fn decide_passage(table: &Table, received: Received, is_copy: bool, reopens: bool) -> Passage {
    let meaning = table.meaning(received.signal);
    if is_copy {
        return Passage::Repeated;
    }
    if reopens && table.is_reopening(received) {
        return Passage::Plain;
    }
    match meaning {
        Some(Meaning::Stop) => Passage::Stop,
        Some(Meaning::Preempt) => Passage::Preempt,
        Some(Meaning::Forward) if received.signal == libc::SIGTSTP => Passage::Suspend,
        None if STALLING.contains(&received.signal) => Passage::Stall,
        Some(Meaning::Forward) | None => Passage::Plain,
    }
}

/// The signals that have come lately.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    last: Option<(Received, Instant)>,
    hang_up: Option<Instant>,
    /// Signals that have come one way, directly or through the guard, and may still come the other way.
    singles: Vec<(Received, Instant)>,
    explained: Option<Instant>,
}

impl Requests {
    /// Notes a signal. Returns whether it is only a copy of an earlier request.
    pub(crate) fn is_copy(&mut self, table: &Table, received: Received, now: Instant) -> bool {
        if JOB_CONTROL.contains(&received.signal) {
            return false;
        }
        let has_twin = self.has_twin(received, now);
        let last = self.last.replace((received, now));
        let is_repeated =
            last.is_some_and(|(last, at)| now - at < SAME_REQUEST && is_same_request(table, last, received));
        let is_hang_up = received.signal == libc::SIGHUP && received.from_terminal;
        let hung_up = if is_hang_up {
            self.hang_up.replace(now)
        } else {
            None
        };
        has_twin || is_repeated || hung_up.is_some_and(|at| now - at < HANG_UP)
    }

    /// Whether a signal, which is no copy, only asks what the workers do: it is the first Ctrl-\ of a terminal, where
    /// that would stop the job.
    pub(crate) fn asks(&mut self, table: &Table, received: Received, now: Instant) -> bool {
        let is_key = received.signal == libc::SIGQUIT && received.from_terminal;
        if !is_key || table.meaning(libc::SIGQUIT) != Some(Meaning::Stop) {
            return false;
        }
        let insists = self.explained.is_some_and(|at| now - at < INSISTS);
        self.explained = if insists { None } else { Some(now) };
        !insists
    }

    /// Whether the same signal has just come the other way. Each signal can be the twin of one other signal.
    fn has_twin(&mut self, received: Received, now: Instant) -> bool {
        self.singles.retain(|(_, at)| now - *at < TWINS);
        let is_twin = |(other, _): &(Received, Instant)| {
            let may_be_one_senders =
                other.sender == received.sender || [other.sender, received.sender].contains(&0);
            other.signal == received.signal && other.passed_on != received.passed_on && may_be_one_senders
        };
        if let Some(place) = self.singles.iter().position(is_twin) {
            self.singles.remove(place);
            return true;
        }
        self.singles.push((received, now));
        false
    }
}

/// Whether two signals are one request. A signal without a known sender may come from another process, and a
/// forwarded signal may be meant twice.
fn is_same_request(table: &Table, last: Received, received: Received) -> bool {
    let ends = |received: Received| table.meaning(received.signal) == Some(Meaning::Stop);
    let is_forwarded = table.meaning(received.signal) == Some(Meaning::Forward);
    let is_alike = last.signal == received.signal || (ends(last) && ends(received));
    last.sender == received.sender && received.sender != 0 && is_alike && !is_forwarded
}

#[cfg(test)]
mod tests;
