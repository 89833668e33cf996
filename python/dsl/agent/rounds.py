"""The program of ``dsl-ssh``: one command on many hosts, and the report of its failures."""

from __future__ import annotations

from collections.abc import Sequence

from dsl import Exit
from dsl.agent.roles import Listener
from dsl.agent.session import Session, Side
from dsl.facts import Facts
from dsl.launchers.base import Start, plan_starts
from dsl.launchers.ssh import SSH_FAILED
from dsl.model.job import NodePlan
from dsl.model.outcome import Outcome
from dsl.report.narrator import Narrator
from dsl.report.verdict import name_workers, reason, survivor

COMMAND, SSH = "dsl-ssh", "ssh"
GRACE_S = 5.0


def plan_hosts(
    starts: Sequence[Start], names: Sequence[str], fd: int, at_once: int, facts: Facts
) -> NodePlan:
    """Plan one ssh for each host, at most ``at_once`` at a time. Each reads from the descriptor ``fd``."""
    return plan_starts(
        starts,
        names,
        [fd] * len(starts),
        facts.environ,
        is_shown=True,
        command=COMMAND,
        name=SSH,
        grace_s=GRACE_S,
        at_once=at_once,
    )


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


class _Once(Side):
    """A source of one plan, which exists already, and its report."""

    job = None
    is_visible = False

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan

    def plan(self, _attempt: int) -> NodePlan:
        return self._plan

    def prepare(self, plan: NodePlan) -> NodePlan:
        return plan

    def listeners(self, plan: NodePlan) -> list[Listener]:
        return [_Teller(plan)]

    def finish(self, *, succeeded: bool) -> None:
        pass

    def tidy(self) -> None:
        pass


def run_once(plan: NodePlan) -> int:
    """Run the plan, and return its exit code."""
    once = _Once(plan)
    return Session(once, once).run_here(lambda outcome: outcome.code) or 0
