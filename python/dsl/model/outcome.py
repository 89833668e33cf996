"""What has happened to a job: attempts, decisions, and how it ended."""

from __future__ import annotations

from dsl._record import Record
from dsl.model.request import Count, HangAction, RankOrNone, Shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal, TypeAlias

    from dsl import Ended, EngineError, Exit, ForkServerLost
    from dsl.errors import DslError
    from dsl.model.job import Label, NodePlan
    from dsl.model.judgement import Failure, Report
    from dsl.model.observation import Look, RankStacks, SignalRank

    News: TypeAlias = object
    """An event."""
    DecisionKind: TypeAlias = Literal["go_on", "stop", "signal", "start", "end"]

REQUEUE_CODE = 75
"""Exit code of a job that was preempted (``EX_TEMPFAIL`` of sysexits.h): start it again."""

HANG_CODE = 124
"""Exit code of a job that was ended because it hung, as of a command that ``timeout`` has ended."""

SIGKILL = 9
SIGNAL_CODES = 128
"""Exit codes above this one stand for signals."""

END_ACTIONS = ("stop", "ignore", "preempt")
"""Values of `dsl.SignalReceived.action` that end the job. ``ignore``: its workers were ending already."""


def own_code(status: int, *, is_stopped: bool) -> int:
    """The exit code that stands for a failed worker (G2).

    ``is_stopped``: we signalled the worker before it ended. Then a code such as 143 comes from our stop
    signal, or from the worker's handler for it, and counts as 1, as an exception does.
    """
    return 1 if is_stopped and status > SIGNAL_CODES else status or 1


def exit_code(exits: Sequence[Exit], ended: Ended, cause: Exit | None = None) -> int:
    """The command's exit code (G2).

    0 only if every worker ended with 0. Otherwise the status of ``cause`` (default: the first failure), or
    128 + the signal by which the user ended the job. A cause that we had to stop has recorded an exception:
    it counts as 1, because we sent the signal.
    """
    cause = cause or ended.first_failure
    if cause is not None:
        return own_code(cause.status, is_stopped=cause.caused_by_stop)
    if ended.stop_signal is not None:
        return SIGNAL_CODES + ended.stop_signal
    failed = [own_code(exit_.status, is_stopped=exit_.caused_by_stop) for exit_ in exits if exit_.status]
    if failed:
        return failed[0]
    return 1 if ended.survivors else 0


def signal_code(signum: int, preempt_signal: int | None) -> int:
    """The exit code of a job that a signal ends while no worker runs (G2)."""
    return REQUEUE_CODE if signum == preempt_signal else SIGNAL_CODES + signum


class TimerExpired(Record):
    """A process of the job has not released a timer in time: an event of the timers."""

    pid: int
    """The process that took it."""
    scope: str
    """Name of the timer."""
    signum: int
    """The signal that was sent to the process; 0: none was asked for."""


class Hang(Record):
    """The job hangs: an event of the watch for hangs."""

    attempt: int
    """The attempt that hangs."""
    still_s: float
    """For how many seconds no rank had made any progress."""
    action: HangAction
    """What the user wants to follow."""
    lines: tuple[str, ...]
    """What the ranks do, as `dsl-stacks` prints it."""
    ranks: tuple[int, ...]
    """Global ranks that have to end, so that the job can start again."""

    @property
    def why(self) -> str:
        """The hang in one clause."""
        return f"the job hung, without progress for {self.still_s:g} s: {self.lines[0]}"


class EndHung(Record):
    """conductor to agent, and an event: the job hangs. Those of the ranks that run here have to end."""

    attempt: Count
    """The attempt that hangs."""
    ranks: tuple[RankOrNone, ...]
    """Their global ranks."""
    why: Shown
    """The hang in one clause."""


class AttemptOutcome(Record):
    """How one attempt ended."""

    plan: NodePlan
    """What was started."""
    exits: tuple[Exit, ...]
    """How each worker ended, in the order of the deaths."""
    ended: Ended
    """The group's last event."""
    begin_s: float = 0.0
    """`time.monotonic` just before the first start."""
    duration_s: float = 0.0
    """Seconds from there to the end."""
    failures: tuple[Failure, ...] = ()
    """Workers that failed by themselves, if the workers had files to record errors in."""
    cause: Exit | None = None
    """The failure that the others follow from; None if no worker failed by itself."""
    timers: tuple[TimerExpired, ...] = ()
    """Timers of its workers that expired."""
    lost_servers: tuple[ForkServerLost, ...] = ()
    """Fork servers that were lost during the attempt."""
    news: tuple[News, ...] = ()
    """In order: signals, the loss of the guard, and all events of channels but timers, during the attempt."""
    stacks: tuple[RankStacks, ...] = ()
    """What the other workers executed when one had failed, with ``--stacks-on-failure``."""
    spoke_ns: int = 0
    """With a policy of restarts: CLOCK_REALTIME of the first output; 0: there was none before the stop."""
    stopped_ns: int = 0
    """CLOCK_REALTIME of the stop because of a failure elsewhere; 0: there was none."""
    not_tried: str = ""
    """Why the policy of restarts forbids another attempt, as a clause; empty: it does not."""
    report: Report | None = None
    """The facts for a judgement; None: no worker failed, no signal came, and nothing is left."""

    @property
    def code(self) -> int:
        """The exit code that this attempt alone gives (G2)."""
        if self.fatal_hang is not None:
            return HANG_CODE
        return exit_code(self.exits, self.ended, self.cause)

    @property
    def final_code(self) -> int:
        """The exit code of the job, if this was its last attempt."""
        return REQUEUE_CODE if self.is_preempted else self.code

    @property
    def fatal_hang(self) -> Hang | None:
        """The hang for which its workers were stopped; None: they ended for another reason."""
        if self.cause is not None or self.ended.stop_signal is not None:
            return None
        return next((one for one in self.news if isinstance(one, Hang) and one.action == "stop"), None)

    @property
    def cause_hang(self) -> EndHung | None:
        """The hang for which the worker of `cause` was ended."""
        cause = self.cause
        if cause is None or cause.caused_by_stop or cause.signal != SIGKILL:
            return None
        rank = self.plan.workers[cause.worker].rank
        return next((one for one in self.news if isinstance(one, EndHung) and rank in one.ranks), None)

    @property
    def is_preempted(self) -> bool:
        """The scheduler had announced the end, and no worker failed before."""
        return self.ended.stop_signal is not None and self.ended.stop_signal == self.plan.job.signals.preempt

    @property
    def cause_timer(self) -> TimerExpired | None:
        """The timer whose signal ended the worker of `cause`."""
        cause = self.cause
        if cause is None or cause.caused_by_stop:
            return None
        mine = [one for one in self.timers if one.pid == cause.pid and one.signum == cause.signal]
        return mine[0] if mine else None

    @property
    def cause_server(self) -> ForkServerLost | None:
        """The fork server whose death killed the worker of `cause`."""
        cause = self.cause
        if cause is None or cause.caused_by_stop or cause.signal != SIGKILL:
            return None
        taken = [one for one in self.lost_servers if cause.worker in one.workers]
        return taken[0] if taken else None

    @property
    def label(self) -> Label | None:
        """What reports call the worker of `cause`."""
        return None if self.cause is None else self.plan.workers[self.cause.worker].label


class Decision(Record):
    """What the agent does next."""

    kind: DecisionKind
    """``go_on``: wait for the next event; ``stop`` or ``signal`` the workers, which run. When nothing of them
    is left: ``start`` an attempt, or ``end`` the job."""
    code: int = 0
    """End: the exit code (G2)."""
    signum: int = 15
    """Stop and signal: the signal that the workers get."""
    grace_s: float | None = None
    """Stop: seconds until SIGKILL; None: those of the plan."""
    attempt: int = 0
    """Start: the number of the attempt."""
    why: str = ""
    """End: why the group could not be started again, if it should have been. Stop: the failure elsewhere that
    is the reason."""
    not_tried: str = ""
    """End: see `AttemptOutcome.not_tried`."""
    told: object = None
    """Start and go on: an event for the listeners; None: they need none."""


GO_ON = Decision("go_on")


class Asked:
    """An event of a channel: the head of the job asks about our workers. ``reply`` sends an answer."""

    def __init__(self, look: Look | SignalRank, reply: Callable[[object], None]) -> None:
        self.look, self.reply = look, reply


class AttemptStarted(Record):
    """The workers of an attempt are being started."""

    plan: NodePlan


class Awaiting(Record):
    """Nothing of an attempt is left, and what follows depends on other nodes."""

    last: AttemptOutcome
    """The attempt."""
    what: Literal["word", "meeting", "end"] = "word"
    """The ``word`` of the conductor, another ``meeting``, or the ``end`` of the other nodes."""


class Restarting(Record):
    """Another attempt follows."""

    last: AttemptOutcome
    """The attempt before it."""
    number: int
    """How many restarts were counted, with this one if it counts."""
    is_counted: bool = True
    """It uses one of the restarts that the user has granted."""
    wait_s: float = 0.0
    """Seconds until it begins: attempts that fail one after the other soon after their start have pauses."""


class RestartFailed(Record):
    """The group could not be started again as it should have been: the job ends as its last attempt did."""

    error: DslError | EngineError


class OutputCut(Record):
    """Lines that were dropped at the end, because the reader of the output did not take them."""

    lines: int
    """Number of lines."""
    signum: int | None
    """The signal that ended the wait for the reader."""


class Outcome(Record):
    """How the job ended on this node."""

    code: int
    """Exit code of the command (G2)."""
    last: AttemptOutcome
    """The attempt that decided."""
    error: DslError | EngineError | None = None
    """Why the group could not be started again, if it should have been."""
    count: int = 1
    """How many attempts there were."""
    lost_output: bool = False
    """The job has succeeded. The code is not 0 because some of its output could not be written."""

    @property
    def cause(self) -> Exit | None:
        """The failure that ended the job."""
        return self.last.cause
