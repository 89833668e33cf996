"""One host's part of a job that a head on another host conducts: its plans, policy and reports."""

from __future__ import annotations

from dsl import Ended, Exited, SignalReceived, Stopping
from dsl._record import replace
from dsl.agent.agent import Asked
from dsl.agent.planner import Planner
from dsl.agent.policy import END_ACTIONS, GO_ON, signal_code
from dsl.agent.preflight import meeting_problem
from dsl.control.messages import Assignment, Failing, Forward, Lost, Over, Preempted, Running, Said, Stop
from dsl.errors import ControlError
from dsl.model.job import Meeting, Notice
from dsl.model.observation import Look, SignalRank
from dsl.model.outcome import AttemptOutcome, AttemptStarted, Decision, History, Membership, own_code
from dsl.plan.worker import shared_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Protocol

    from dsl.facts import Facts
    from dsl.model.job import NodePlan
    from dsl.model.judgement import Judgement
    from dsl.model.request import Level
    from dsl.plan.job import JobPlan

    class Conversation(Protocol):
        """The way to the conductor and back."""

        @property
        def deadline_s(self) -> float | None:
            """`time.monotonic` when `receive` returns something even if nothing is readable; None: never."""

        def fileno(self) -> int:
            """Give a descriptor that is readable when `receive` may return something."""

        def receive(self) -> Sequence[object]:
            """Take the messages that are there, without waiting."""

        def send(self, message: object) -> None:
            """Send a message, without waiting. The message is lost if the conductor is lost."""


FAILURE = 1


class Orders:
    """Messages of the conductor: a channel of the agent, and the meetings of its planner (a `Rendezvous`).

    ``first`` is the meeting of the first attempt here. The conductor counts attempts over all members, so a
    member that comes late or is left out for a while misses some numbers.
    """

    def __init__(self, conversation: Conversation, first: Meeting) -> None:
        self._conversation = conversation
        self.meeting = first
        """The latest meeting."""
        self.judgement: Judgement | None = None
        """How the job has ended, once the conductor has said so; None also if it has ended well."""

    @property
    def deadline_s(self) -> float | None:
        """The deadline of the conversation."""
        return self._conversation.deadline_s

    def fileno(self) -> int:
        """The descriptor of the conversation."""
        return self._conversation.fileno()

    def read(self) -> Sequence[object]:
        """Take the messages of the conductor: they are events for `decide`."""
        said = list(self._conversation.receive())
        for index, message in enumerate(said):
            if isinstance(message, Meeting):
                self.meeting = message
            elif isinstance(message, Over):
                self.judgement = message.judgement
            elif isinstance(message, (Look, SignalRank)):
                said[index] = Asked(message, self._conversation.send)
        return said

    def meet(self, attempt: int, local_world_size: int) -> Meeting:  # noqa: ARG002  the conductor knows
        """The meeting of an attempt, which the conductor has made."""
        assert self.meeting.attempt == attempt
        return self.meeting

    def membership(self) -> Membership:
        """All nodes. The conductor decides which of them take part in an attempt."""
        return Membership(self.meeting.node_count)


def decide(history: History, event: object, membership: Membership) -> Decision:  # noqa: ARG001  as every policy
    """What follows from an event at a conducted part: what the conductor says."""
    if isinstance(event, Ended):
        return _after(history)
    if history.awaits:
        return _while_waiting(history, event)
    if isinstance(event, Stop):
        return Decision("stop", signum=event.signum, grace_s=event.grace_s, why=event.why)
    if isinstance(event, Forward):
        return Decision("signal", signum=event.signum)
    return Decision("stop") if isinstance(event, (Over, Lost)) else GO_ON


def _after(history: History) -> Decision:
    """The conductor says what follows an attempt, unless it has said so already."""
    last = history.attempts[-1]
    # Without a guard the workers may not start again.
    ending = [one for one in last.news if isinstance(one, (Over, Lost, Stopping))]
    if history.gives_up or ending:
        return Decision("end", code=_code(last, ending))
    return Decision("meet", code=last.code)


def _while_waiting(history: History, event: object) -> Decision:
    last = history.attempts[-1]
    if isinstance(event, SignalReceived) and event.action in END_ACTIONS:
        return Decision("end", code=signal_code(event.signum, last.plan.preempt_signal))
    if isinstance(event, Meeting):
        return Decision("restart", restarts=event.restarts)
    if isinstance(event, (Over, Lost, Stopping)):
        return Decision("end", code=_code(last, [event]))
    return GO_ON


def _code(last: AttemptOutcome, ending: Sequence[object]) -> int:
    """The exit code: that of the job if the conductor has judged, else that of the last attempt here."""
    judged = [one.judgement for one in ending if isinstance(one, Over) and one.judgement is not None]
    return judged[0].code or FAILURE if judged else last.code


class Part(Planner):
    """A source of plans for the host, or the one rank of it, that the head has assigned."""

    def __init__(self, planned: JobPlan, facts: Facts, assignment: Assignment, orders: Orders) -> None:
        """Raises UsageError: the logs plug-in cannot be used."""
        super().__init__(planned, facts, orders, shares_dirs=assignment.task is not None)
        self.max_restarts = 0  # the head counts restarts
        self._task = assignment.task
        self._orders = orders

    def plan(self, attempt: int) -> NodePlan:  # noqa: ARG002  the head counts attempts over all hosts
        """Decide what this host starts in the attempt that the head has made the last meeting for.

        Raises:
            DslError: a wish cannot be fulfilled here.
        """
        meeting = self._orders.meeting
        problem = meeting_problem(meeting, self.job)
        if problem:
            raise ControlError(f"the head of the job has said what cannot be: {problem}")
        ranks = {} if self._task is None else shared_ranks(self._facts.environ, meeting, self._task)
        return conducted(super().plan(meeting.attempt), self._task, ranks)


def conducted(plan: NodePlan, task: int | None, ranks: Mapping[str, str]) -> NodePlan:
    """The part of a node's plan that a conducted agent starts.

    ``task`` is the one local rank that it starts; None: all. ``ranks``: what the launcher has told this task.
    ``PMI_FD`` is the descriptor by which a program of MPICH's family talks to its process manager.
    """
    if task is not None and plan.fork_servers:
        from dsl.plan.starting import with_notice, without_fork_servers

        text = "start method forkserver has no effect on tasks of one rank each, give --one-agent-per-node"
        plan = with_notice(without_fork_servers(plan), "warning", text)
    workers = plan.workers if task is None else plan.workers[task : task + 1]
    env = {**ranks, **plan.env}
    pmi_fd = env.get("PMI_FD", "")
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
    return replace(
        plan,
        workers=workers,
        env=env,
        run_dirs=run_dirs,
        pid_file=pid_file,
        is_conducted=True,
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
        elif isinstance(event, SignalReceived) and event.action == "preempt":
            self._send(Preempted(self._plan.attempt, event.signum))
        elif isinstance(event, AttemptOutcome):
            from dsl.evidence.reports import report_of

            self._send(event.report or report_of(event))
