"""What has happened to a job: attempts, decisions, and how it ended."""

from __future__ import annotations

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    from dsl import Ended, EngineError, Exit, ForkServerLost
    from dsl.errors import DslError
    from dsl.model.failure import Failure
    from dsl.model.node import Label, NodePlan

    News: TypeAlias = object
    """An event."""
    DecisionKind: TypeAlias = Literal[
        "go_on", "restart", "stop", "signal", "end", "pause", "meet", "finish", "doubt", "leave"
    ]

REQUEUE_CODE = 75
"""Exit code of a job that was preempted (``EX_TEMPFAIL`` of sysexits.h): start it again."""

KEPT = 3
"""How many of the attempts that have ended are kept whole."""

SIGNAL_CODES = 128
"""An exit code above it stands for a signal."""


def own_code(status: int, *, is_stopped: bool) -> int:
    """The exit code that stands for a failed worker (G2). ``is_stopped``: we signalled it before it ended.

    Then 143 and the like are our stop, or what a handler made of it: it counts as 1, as an exception does.
    """
    return 1 if is_stopped and status > SIGNAL_CODES else status or 1


@record
class TimerExpired:
    """A process of the job has not released a timer in time: an event of the timers."""

    pid: int
    """Who took it."""
    scope: str
    """What it is called."""
    signum: int
    """The signal that was sent to the process; 0: none was asked for."""


@record
class PatienceOver:
    """The time is over that was to be waited."""


@record
class AttemptOutcome:
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
    """From there to the end."""
    failures: tuple[Failure, ...] = ()
    """Workers that failed by themselves, if they were told where to leave an account of it."""
    cause: Exit | None = None
    """The failure that the others follow from; None if no worker failed by itself."""
    timers: tuple[TimerExpired, ...] = ()
    """Timers of its workers that have expired."""
    lost_servers: tuple[ForkServerLost, ...] = ()
    """Fork servers that were lost meanwhile."""
    news: tuple[News, ...] = ()
    """What came meanwhile from elsewhere than the engine, and signals; see `History.news`."""

    @property
    def is_preempted(self) -> bool:
        """The scheduler had announced the end, and no worker failed before."""
        return self.ended.stop_signal is not None and self.ended.stop_signal == self.plan.preempt_signal

    @property
    def cause_timer(self) -> TimerExpired | None:
        """The timer whose signal ended the cause."""
        cause = self.cause
        if cause is None or cause.caused_by_stop:
            return None
        mine = [one for one in self.timers if one.pid == cause.pid and one.signum == cause.signal]
        return mine[0] if mine else None

    @property
    def cause_server(self) -> ForkServerLost | None:
        """The fork server whose death took the cause along."""
        cause = self.cause
        if cause is None or cause.caused_by_stop or cause.signal != 9:
            return None
        taken = [one for one in self.lost_servers if cause.worker in one.workers]
        return taken[0] if taken else None

    @property
    def label(self) -> Label | None:
        """What the cause is called."""
        return None if self.cause is None else self.plan.workers[self.cause.worker].label


@record
class Tried:
    """Attempts in a row that have ended alike: what is kept of each."""

    duration_s: float
    """From the first start to the end, of the longest of them."""
    cause: str = ""
    """How they failed, in words that are equal for equal failures; empty: no worker failed."""
    count: int = 1
    """How many."""


@record
class Membership:
    """Who takes part in the job at this moment."""

    node_count: int
    """Nodes of the present round."""
    waiting: int = 0
    """Nodes that wait for the next round."""
    is_closed: bool = False
    """No round can follow: the nodes have agreed that the job is over."""


@record
class MembershipChanged:
    """A node has left, or waits to join: an event of the rendezvous."""

    membership: Membership
    left: tuple[str, ...] = ()
    """Names of the nodes that have left: several may have one name."""
    has_dropped_us: bool = False
    """This node is the one that the others have missed."""


@record
class History:
    """What policy knows of a job so far."""

    max_restarts: int
    """How many restarts may be counted."""
    attempts: tuple[AttemptOutcome, ...] = ()
    """The last of those that have ended, in order: at most `KEPT`."""
    count: int = 0
    """How many have ended."""
    tried: tuple[Tried, ...] = ()
    """What is kept of all of them."""
    restarts: int = 0
    """Restarts that were counted."""
    regroups: bool = False
    """The group was stopped to be started again with other nodes."""
    news: tuple[News, ...] = ()
    """Since the last start: events of channels but timers, signals, and the loss of the guard, in order."""
    awaits: str = ""
    """No worker runs, and this is waited for (see `Decision.kind`)."""
    gives_up: bool = False
    """No other attempt can be begun."""


@record
class Decision:
    """What the agent does next."""

    kind: DecisionKind
    """``go_on``; ``stop``, ``signal`` or ``restart`` the group, stopped if it runs; ``end`` the job.

    Once nothing of the group is left: ``pause`` before a restart. Where nodes come and go: ``meet`` them for
    another attempt, ``finish`` when all have done so, leave them time for word that they are lost
    (``doubt``), or ``leave`` them before the end."""
    counted: bool = True
    """Of a restart: it is one of those that the user has granted."""
    code: int = 0
    """Of an end, and of a leave: the exit code (G2). Of a restart: that of the job if it is the last word."""
    signum: int = 15
    """Of a stop, and of a signal: which one the workers get."""
    grace_s: float | None = None
    """Of a stop: seconds until SIGKILL; None: those of the plan."""
    restarts: int | None = None
    """Of a restart: how many the nodes have counted; None: as many as before, and this one if it counts."""
    within_s: float = 0.0
    """Of a pause, and of a meeting: seconds to wait before; of a doubt and a leave: most that is waited."""
    closes: bool = False
    """Of a leave: the job is over on the other nodes, too."""
    why: str = ""
    """Of an end, and of a leave: what kept the group from being started again, if that was to be."""


@record
class AttemptStarted:
    """The workers of an attempt are being started."""

    plan: NodePlan


@record
class Awaiting:
    """Nothing of an attempt is left, and what follows depends on other nodes."""

    history: History
    """It is the last one here."""
    decision: Decision
    """What is waited for."""


@record
class AttemptEnded:
    """An attempt has ended, and it is decided what follows."""

    history: History
    """It is the last one here."""
    decision: Decision


@record
class RestartFailed:
    """The group should have been started again and could not be: the job ends as its last attempt did."""

    error: DslError | EngineError


@record
class Prewarmed:
    """What the first workers need was read into the page cache, before they start."""

    files: int
    """Number of files."""
    file_bytes: int
    """Their size."""
    read_bytes: int
    """What of that was not in memory yet, and was read."""
    duration_s: float
    """Seconds that it took."""
    is_whole: bool = True
    """Nothing was left out: no limit was reached, and no signal came."""


@record
class OutputCut:
    """Lines that were given up at the end, because nobody read them."""

    lines: int
    """How many."""
    signum: int | None
    """The signal that ended the waiting for their reader."""


@record
class Outcome:
    """How the job ended on this node."""

    code: int
    """Exit code of the command (G2)."""
    attempts: tuple[AttemptOutcome, ...]
    """The last attempts, in order; at least one."""
    error: DslError | EngineError | None = None
    """What kept the group from being started again, if that was to be."""
    count: int = 1
    """How many attempts there were."""
    tried: tuple[Tried, ...] = ()
    """What is kept of all of them."""

    @property
    def last(self) -> AttemptOutcome:
        """The attempt that decided."""
        return self.attempts[-1]

    @property
    def cause(self) -> Exit | None:
        """The failure that ended the job."""
        return self.last.cause

    @property
    def victims(self) -> tuple[Label, ...]:
        """What was stopped because of it."""
        workers = self.last.plan.workers
        stopped = [exit_ for exit_ in self.last.exits if exit_.caused_by_stop and exit_ is not self.cause]
        return tuple([workers[exit_.worker].label for exit_ in stopped])
