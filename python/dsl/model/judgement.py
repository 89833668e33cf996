"""Facts about the end of an attempt: what each member reports, and what follows from all reports.

All but `Failure` travel between hosts. None holds a line for the user: `dsl.report.verdict` does. A field
without a line of documentation means the same as that of a record above, of `dsl.Exit` or `dsl.Ended`;
``noun`` and ``names`` are what reports call the workers, ``host`` is the name of their host.
"""

from __future__ import annotations

from dsl._record import Record
from dsl.model.observation import NodeStacks, RankStacks
from dsl.model.request import Code, Count, Moment, RankOrNone, Shown, Signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Annotated, Literal, TypeAlias

# Text, as in `dsl.model.request`.
FailureCode: TypeAlias = "Annotated[int, 1, 255]"

MOST_OTHERS = 8
"""Failures of one member that are reported whole, besides its cause."""

MOST_STACKS = 256
"""Workers whose stacks a judgement holds."""

MOST_SURVIVORS = 64
"""Surviving processes of one member that are reported."""


class Failed(Record):
    """A worker that failed by itself."""

    noun: Shown
    """What reports call such a worker: ``rank``."""
    name: Shown
    """Its name among these, such as its rank."""
    rank: RankOrNone
    local_rank: Count
    pid: Count
    """Its process id; 0: it never started."""
    status: FailureCode
    """Its exit code, or 128 + the signal."""
    ended_ns: Moment
    """CLOCK_REALTIME of its host when its death was noticed, or before, when it recorded an exception."""
    code: Code | None = None
    signal: Signal | None = None
    core_dumped: bool = False
    caused_by_stop: bool = False
    exec_stage: Shown | None = None
    exec_errno: Count | None = None
    exec_path: Shown | None = None
    target: Literal["missing", "file", "folder"] = "missing"
    """What its host has at ``exec_path``."""


class ServerLost(Record):
    """A fork server that died and took its workers along."""

    pid: Count
    signum: Signal | None
    """The signal that ended it; None: it ended in another way."""
    text: Shown
    """How it ended, as a clause."""
    noun: Shown
    names: tuple[Shown, ...]


class Evidence(Record):
    """What is known about a failure besides the exit."""

    known: Shown = ""
    """One clause from elsewhere, such as an out-of-memory kill or an expired timer."""
    is_out_of_memory: bool = False
    """``known`` is that memory ran out."""
    recorded: Shown = ""
    """The message that the worker recorded, in one line."""
    said: Shown = ""
    """The exception in its output and where it was raised, in one line."""
    lines: tuple[Shown, ...] = ()
    """The lines of its last output that tell most."""
    log_path: Shown | None = None
    """The file with all of its output."""
    log_problem: Shown = ""
    """Why that file may lack the end of the output."""
    is_on_screen: bool = False
    """The user's terminal still shows ``lines``."""
    mends: tuple[Shown, ...] = ()
    """What mends the failure, where its cause is known."""


NO_EVIDENCE = Evidence()


class Alike(Record):
    """Workers of one member that ended alike after a stop had begun."""

    names: tuple[Shown, ...]
    by_stop: bool = True
    """The stop ended them: by one of our signals, or before they were started."""
    code: Code | None = None
    signal: Signal | None = None
    is_started: bool = True
    """They ran."""
    noun: Shown = "rank"


class Survivor(Record):
    """A process that did not end."""

    pid: Count
    """0: /proc does not show whether processes are left."""
    state: Shown = "?"
    name: Shown = "?"
    wchan: Shown | None = None
    errno: Count | None = None
    host: Shown = ""


class Absence(Record):
    """A member that ends an attempt without a report of its own."""

    name: Shown
    """The member: ``host n1``."""
    why: Shown
    """A clause with its subject: ``it has closed the connection``."""
    is_lost: bool = True
    """True: the member is gone. False: it refused its part, for the reason in ``why``."""
    first_rank: Count = 0
    """Rank of its first worker."""
    rank_count: Count = 0
    """Number of its workers."""
    rank: RankOrNone = -1
    """A worker that had failed before; -1: none is known."""
    status: Code = 0
    """The exit code of that worker."""
    ended_ns: Moment = 0
    """When that worker failed, on the clock of its host."""


class Report(Record):
    """agent to head: an attempt has ended at one member, and nothing of its workers is left."""

    attempt: Count
    code: Code
    """The exit code that the member alone would give (G2)."""
    host: Shown = ""
    ended: Count = 0
    """Number of its workers that have ended."""
    cause: Failed | None = None
    """Its failure that the others follow from; None: no worker failed by itself."""
    evidence: Evidence = NO_EVIDENCE
    """What is known about the cause."""
    server: ServerLost | None = None
    """The fork server whose death killed the worker of the cause."""
    others: tuple[Failed, ...] = ()
    """Other workers that failed by themselves, in the order of their deaths, at most `MOST_OTHERS`."""
    more: tuple[Shown, ...] = ()
    """Names of further such workers."""
    after: tuple[Alike, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    """Processes that did not end, at most `MOST_SURVIVORS`."""
    stop_signal: Signal | None = None
    """The signal by which a user or scheduler ended the attempt there; None without such a signal."""
    stopped_ns: Moment = 0
    """When the first of its workers ended, on the clock of its host; 0: none has."""
    stacks: tuple[RankStacks, ...] = ()
    """What its workers executed when one of the job had failed, as far as they ran then."""
    is_silent: bool = False
    """With a policy of restarts: no worker had any output before it was stopped or failed. What Python shows
    of an exception is none."""
    absence: Absence | None = None
    """The member did not report: the head has made this record, and knows only this."""

    @property
    def rank(self) -> int:
        """The rank that failed there; -1: none is known."""
        failed = self.cause or self.absence
        return -1 if failed is None else failed.rank

    @property
    def failed_ns(self) -> int:
        """When that rank failed, on the clock of its host; 0: no rank is known."""
        failed = self.cause or self.absence
        return 0 if failed is None else failed.ended_ns

    @property
    def is_cause(self) -> bool:
        """Whether the member failed by itself, and not only because it was stopped."""
        return bool(self.code) and (self.cause is not None or self.absence is not None)


class Judgement(Record):
    """What follows from the reports of all members about one attempt."""

    code: Code
    """Exit code of the job (G2), if no attempt follows."""
    command: Shown = "dsl"
    """What messages call the command that stops workers."""
    members: Count = 1
    """Number of members."""
    causes: tuple[Report, ...] = ()
    """Members that failed by themselves: the first failure, then rivals, then the others, by time."""
    rivals: Count = 0
    """How many of the next causes may have been first: the clocks of the hosts cannot tell."""
    scope: Literal["worker", "node", "job"] = "job"
    """What the first failure was compared with: nothing, as it is the only worker; one node; the job."""
    after: tuple[Alike, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    signum: Signal | None = None
    """The signal that ended the job; None: it ended in another way."""
    is_key: bool = False
    """A key of the terminal sent it."""
    is_preempted: bool = False
    """The signal announced a preemption."""
    fault: Shown = ""
    """Why the job was ended without a failure of its own, as a clause: no member could be reached any more,
    or it hung. Empty: for another reason."""
    stacks: tuple[NodeStacks, ...] = ()
    """What the other workers executed when one had failed, of `MOST_STACKS` workers at most."""
    not_tried: Shown = ""
    """Why the policy of restarts forbids another attempt, as a clause; empty: it does not."""
    quitter: Shown = ""
    """The member that stopped its workers for a reason of its own, without a failure."""
    replaced: tuple[Shown, ...] = ()
    """Lines about members whose places others had taken before."""


class ErrorRecord(Record):
    """What a worker recorded about the exception that ended it. Texts are as written, with line ends."""

    message: str
    """What the exception says, or the whole text of the file."""
    traceback: str
    """Its stack; empty if there is none."""
    time_s: float | None
    """Seconds since the epoch, as recorded."""
    exit_code: int | None
    """Exit code of a process below the worker, if the worker took the record over from that process."""
    is_text: bool = False
    """The file holds a plain message, not the parts of an exception."""


COARSE_NS = 10_000_000
"""Times of files lag behind the clock by up to a tick of the kernel, at most 10 ms."""


class Failure(Record):
    """A worker that failed by itself, as torchrun's error tells it."""

    rank: int
    local_rank: int
    host: str
    pid: int
    """Process id; 0 if it never started."""
    exitcode: int
    """Exit code; for a signal, minus its number; 126 or 127 if the worker could not be executed."""
    time_ns: int
    """CLOCK_REALTIME when its death was noticed."""
    order: int
    """Position among the deaths of the group as the kernel reported them."""
    error_file: str | None
    """Path of its record, if it left one that can be read."""
    recorded: ErrorRecord | None
    """That record."""
    recorded_ns: int | None
    """CLOCK_REALTIME of the file, if that time is plausible."""
    reason: str
    """Why it failed, as one clause."""
    is_stopped: bool = False
    """It recorded its failure before the first death, and was still cleaning up when we stopped the group."""

    @property
    def moment_ns(self) -> int:
        """When it failed: when it recorded an exception, if that was clearly before its death."""
        return min(self.time_ns, self.time_ns if self.recorded_ns is None else self.recorded_ns + COARSE_NS)
