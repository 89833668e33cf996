"""The program of ``dsl-ssh``: one command on many hosts, in rounds, and the report of its failures."""

from __future__ import annotations

from collections.abc import Sequence

from dsl import Exit
from dsl.agent.session import Crew, Session
from dsl.facts import Facts
from dsl.launchers.base import Start, plan_starts
from dsl.launchers.ssh import SSH_FAILED
from dsl.model.job import NodePlan
from dsl.model.outcome import Membership, Outcome
from dsl.report.narrator import Narrator
from dsl.report.verdict import name_workers, reason, survivor

COMMAND, SSH = "dsl-ssh", "ssh"
GRACE_S = 5.0


def plan_rounds(
    starts: Sequence[Start], names: Sequence[str], fd: int, at_once: int, facts: Facts
) -> list[NodePlan]:
    """Plan rounds of at most ``at_once`` hosts. Each ssh reads from the descriptor ``fd``."""
    rounds = [starts[first : first + at_once] for first in range(0, len(starts), at_once)]
    return [
        plan_starts(
            some,
            names,
            [fd] * len(some),
            facts.environ,
            is_shown=True,
            command=COMMAND,
            name=SSH,
            grace_s=GRACE_S,
        )
        for some in rounds
    ]


class _Teller:
    """Reports the hosts on which the command failed. The narrator reports all other events."""

    def __init__(self, plan: NodePlan) -> None:
        self._narrator = Narrator(plan)

    def hear(self, event: object) -> None:
        """Report an event to the user."""
        if not isinstance(event, Outcome):
            self._narrator.hear(event)
            return
        for line in failure_lines(event.last.plan, event.last.exits):
            self._narrator.say(line)
        for one in event.last.ended.survivors:
            self._narrator.say(survivor(*one))


def failure_lines(plan: NodePlan, exits: Sequence[Exit]) -> list[str]:
    """A line for each kind of failure, the first failure first; each line lists its hosts in order."""
    alike: dict[str, list[int]] = {}
    for exit_ in exits:
        if exit_.status and not exit_.caused_by_stop:
            why = "ssh has failed, the host cannot be reached" if exit_.code == SSH_FAILED else reason(exit_)
            alike.setdefault(why, []).append(exit_.worker)
    names = [worker.label.name for worker in plan.workers]
    noun = plan.workers[0].noun
    told = [(name_workers([names[one] for one in sorted(some)], noun), why) for why, some in alike.items()]
    return [f"{who}: {why}" for who, why in told]


class _Once:
    """A source of one plan, which exists already."""

    max_restarts = 0

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan

    def plan(self, _attempt: int) -> NodePlan:
        return self._plan

    def prepare(self, plan: NodePlan) -> NodePlan:
        return plan

    def membership(self) -> Membership:
        return Membership(1)

    def finish(self, *, succeeded: bool) -> None:
        pass

    def tidy(self) -> None:
        pass


def run_rounds(plans: Sequence[NodePlan]) -> int:
    """Run the rounds one after another; return the exit code of the first one that failed, or 0."""
    code = 0
    for plan in plans:
        session = Session(_Once(plan), lambda plan: Crew((_Teller(plan),), is_visible=False))
        ended = session.run_here(lambda outcome: outcome.code)
        code = code or ended or 0
    return code
