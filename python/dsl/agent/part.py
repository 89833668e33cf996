"""One host's part of a job that a head on another host conducts: its plans, policy and reports."""

from __future__ import annotations

from dsl import Ended, Exited
from dsl._record import record, replace
from dsl.agent.planner import Planner
from dsl.agent.policy import GO_ON
from dsl.control.checks import meeting_problem
from dsl.control.messages import Failing, Forward, Lost, Over, Running, Said, Stop
from dsl.errors import ControlError
from dsl.model.job import Meeting, Notice
from dsl.model.outcome import AttemptOutcome, AttemptStarted, Decision, Membership, own_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from dsl.control.messages import Assignment
    from dsl.facts import Facts
    from dsl.model.node import NodePlan
    from dsl.model.outcome import History
    from dsl.model.request import Level
    from dsl.plan.job import JobPlan

    class Conversation(Protocol):
        """The way to the head and back."""

        def fileno(self) -> int:
            """Give a descriptor that is readable while `receive` would return something."""

        def receive(self) -> Sequence[object]:
            """Take the messages that are there, without waiting."""

        def wait(self) -> None:
            """Wait until there is a message."""

        def send(self, message: object) -> None:
            """Send a message, without waiting. The message is lost if the head is lost."""


LOST_GRACE_S = 30.0
"""Most time that workers get to end when the head is lost: no user can ask for the end any more."""


@record
class HeadSaid:
    """The head wants something of the workers: an event of `Orders`."""

    message: object
    """A `Stop`, a `Forward`, an `Over` or a `Lost`."""


class Orders:
    """Messages of the head: a channel of the agent, and the meetings of its planner (a `Rendezvous`).

    ``first`` is the meeting of the first attempt here, which has come already. The head counts attempts over
    all hosts, so a host that comes late or is left out for a while misses some numbers.
    """

    def __init__(self, conversation: Conversation, first: Meeting) -> None:
        self._conversation = conversation
        self._meeting, self._met = first, 1
        self._events: list[HeadSaid] = []
        self._stale = 0
        """Number of events that came before the last meeting."""
        self._node_count = first.node_count
        self.is_over = False
        """The head wants no further attempt, or is lost."""

    @property
    def deadline_s(self) -> float | None:
        """0 if messages came together with the meeting of the attempt that has begun; otherwise None."""
        return 0.0 if self._events else None

    def fileno(self) -> int:
        """The descriptor of the conversation."""
        return self._conversation.fileno()

    def read(self) -> list[HeadSaid]:
        """Take what the head wants of the running workers."""
        self._take()
        events, self._events, self._stale = self._events, [], 0
        return events

    def meet(self, attempt: int, local_world_size: int) -> Meeting:  # noqa: ARG002  the head knows
        """The meeting of an attempt, which the head has made. Call `await_word` first."""
        assert self._meeting.attempt == attempt
        return self._meeting

    def await_word(self, count: int) -> Meeting | None:
        """Wait for the meeting that follows ``count`` others; None if the head wants no further one.

        Orders for workers that have ended already are dropped.
        """
        while self._met <= count and not self.is_over:
            self._conversation.wait()
            self._take()
        del self._events[: self._stale]
        self._stale = 0
        return None if self.is_over else self._meeting

    def membership(self) -> Membership:
        """All nodes. The head decides which of them take part in an attempt."""
        return Membership(self._node_count)

    def _take(self) -> None:
        for message in self._conversation.receive():
            if isinstance(message, Meeting):
                self._meeting, self._met = message, self._met + 1
                self._stale = len(self._events)
            elif isinstance(message, (Stop, Forward, Over, Lost)):
                self.is_over |= isinstance(message, (Over, Lost))
                self._events.append(HeadSaid(message))


def decide(history: History, event: object, membership: Membership) -> Decision:  # noqa: ARG001  as every policy
    """What follows from an event on a conducted host: what the head says."""
    if isinstance(event, Ended):
        return Decision("restart", code=history.attempts[-1].code)
    if isinstance(event, HeadSaid):
        message = event.message
        if isinstance(message, Stop):
            return Decision("stop", signum=message.signum, grace_s=message.grace_s)
        if isinstance(message, Forward):
            return Decision("signal", signum=message.signum)
        return Decision("stop")
    return GO_ON


class Part:
    """A source of plans for the host, or the one rank of it, that the head has assigned."""

    max_restarts = 0
    """The head counts restarts."""

    def __init__(self, planned: JobPlan, facts: Facts, assignment: Assignment, orders: Orders) -> None:
        """Raises UsageError: the logs plug-in cannot be used."""
        self._task = assignment.task
        self._planner = Planner(planned, facts, orders, shares_dirs=self._task is not None)
        self._orders = orders
        self._environ = facts.environ

    def plan(self, attempt: int) -> NodePlan | None:
        """Decide what this host starts in its next attempt; None if the head wants no further one.

        Raises:
            DslError: a wish cannot be fulfilled here.
        """
        meeting = self._orders.await_word(attempt)
        if meeting is None:
            return None
        problem = meeting_problem(meeting, self._planner.job)
        if problem:
            raise ControlError(f"the head of the job has said what cannot be: {problem}")
        return conducted(self._planner.plan(meeting.attempt), self._task, self._environ.get("PMI_FD", ""))

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Make what the plan needs, see `Planner.prepare`."""
        return self._planner.prepare(plan)

    def membership(self) -> Membership:
        """Say which nodes take part."""
        return self._orders.membership()

    def finish(self, *, succeeded: bool) -> None:
        """Remove empty directories, see `Planner.finish`."""
        self._planner.finish(succeeded=succeeded)


def conducted(plan: NodePlan, task: int | None, pmi_fd: str) -> NodePlan:
    """The part of a node's plan that a conducted agent starts.

    ``task`` is the one local rank that it starts; None: all. ``pmi_fd`` is the value of ``PMI_FD``: the
    descriptor by which a program of MPICH's family talks to its process manager; empty without one.
    """
    if task is not None and plan.fork_servers:
        from dsl.plan.starting import without_fork_servers

        text = "start method forkserver has no effect on tasks of one rank each, give --one-agent-per-node"
        notices = plan.notices if plan.attempt else (*plan.notices, Notice("warning", text))
        plan = replace(without_fork_servers(plan), notices=notices)
    if task is not None and plan.import_throttle is not None:
        text = "--import-throttle has no effect on tasks of one rank each, give --one-agent-per-node"
        notices = plan.notices if plan.attempt else (*plan.notices, Notice("warning", text))
        plan = replace(plan, import_throttle=None, notices=notices)
    workers = plan.workers if task is None else plan.workers[task : task + 1]
    if pmi_fd.isascii() and pmi_fd.isdecimal() and int(pmi_fd) > 2:
        workers = tuple([replace(worker, keep_fds=(int(pmi_fd),)) for worker in workers])
    run_dirs, pid_file = plan.run_dirs, plan.pid_file
    if task is not None:
        of_tasks = f"/attempt_{plan.attempt}/"
        run_dirs = tuple(
            [path for path in run_dirs if of_tasks not in path or path.endswith(f"{of_tasks}{task}")]
        )
        pid_file = pid_file if task == 0 else None
    workers = tuple([replace(worker, stdin=False) for worker in workers])
    prewarms = plan.prewarms and task in (None, 0)
    return replace(
        plan, workers=workers, run_dirs=run_dirs, pid_file=pid_file, is_conducted=True, prewarms=prewarms
    )


class HeadSink:
    """Takes the lines of the narrator for the head, which shows them if the user wants their level."""

    has_verdict = False

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send

    def say(self, plan: NodePlan, text: str, level: Level, mark: str) -> None:  # noqa: ARG002  the head marks it
        """Send one line."""
        self._send(Said(Notice(level, f"host {plan.host}: {text}")))


class Reporter:
    """A listener that tells the head the facts that it has to know."""

    def __init__(self, plan: NodePlan, send: Callable[[object], None]) -> None:
        self._plan = plan
        self._send = send

    def hear(self, event: object) -> None:
        """Tell the head."""
        if isinstance(event, AttemptStarted):
            self._plan = event.plan
            self._send(Running(event.plan.attempt))
        elif isinstance(event, Exited):
            exit_ = event.exit
            if exit_.status and not exit_.caused_by_stop:
                worker = self._plan.workers[exit_.worker]
                code = own_code(exit_.status, is_stopped=False)
                self._send(Failing(self._plan.attempt, worker.rank, code, exit_.ended_ns))
        elif isinstance(event, AttemptOutcome):
            from dsl.report.evidence import report_of

            self._send(report_of(event))
