"""One host's part of a job that a head on another host conducts: its plans, and what it says."""

from __future__ import annotations

from dsl._record import replace
from dsl.agent.planner import Planner
from dsl.agent.preflight import meeting_problem
from dsl.control.messages import Assignment, Said
from dsl.errors import ControlError
from dsl.model.job import Notice
from dsl.plan.worker import shared_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dsl.agent.member import Member
    from dsl.facts import Facts
    from dsl.model.job import NodePlan
    from dsl.model.request import Level
    from dsl.plan.job import JobPlan


class Part(Planner):
    """A source of plans for the host, or the one rank of it, that the head has assigned."""

    def __init__(self, planned: JobPlan, facts: Facts, assignment: Assignment, member: Member) -> None:
        """Raises UsageError: the logs plug-in cannot be used."""
        super().__init__(planned, facts, member, shares_dirs=assignment.task is not None)
        self._task = assignment.task
        self._member = member

    def plan(self, attempt: int) -> NodePlan:  # noqa: ARG002  the head counts attempts over all hosts
        """Decide what this host starts in the attempt that the head has made the last meeting for.

        Raises:
            DslError: a wish cannot be fulfilled here.
        """
        meeting = self._member.meeting
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
