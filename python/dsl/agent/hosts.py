"""Commands that run once on each host: those of ``dsl-ssh``, and those that try whether a host is there."""

from __future__ import annotations

import os
import time

from dsl import Output
from dsl.agent.session import Session, Side
from dsl.errors import RendezvousError
from dsl.launchers.base import Start, plan_starts
from dsl.launchers.ssh import CONNECT_TIMEOUT_S, SSH_FAILED, way_to
from dsl.model.job import Flavour, Job, MeetingPoint
from dsl.model.outcome import GO_ON, AttemptOutcome, Decision, Outcome
from dsl.model.request import Program, SignalRequest
from dsl.report.narrator import Narrator
from dsl.report.verdict import name_workers, reason, survivor
from dsl.words import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl import Exit
    from dsl.agent.roles import Channel, Listener
    from dsl.facts import Facts
    from dsl.model.job import NodePlan
    from dsl.plan.remote import Remote

GRACE_S = 5.0
AT_ONCE = 64
WAIT_POLL_S = 1.0
"""Between two looks at hosts that cannot be reached yet."""
LONGEST_TRY_S = 2.0 * CONNECT_TIMEOUT_S
"""A command that tries a host and has not ended by then is ended, and the host is tried again."""
TRY_GRACE_S = 1.0
LONGEST_SAID = 4096
"""Bytes that are kept of what a command says."""


def plan_hosts(
    starts: Sequence[Start],
    names: Sequence[str],
    fd: int,
    at_once: int,
    facts: Facts,
    *,
    is_shown: bool = True,
) -> NodePlan:
    """Plan one ssh for each host, at most ``at_once`` at a time. Each reads from the descriptor ``fd``.

    ``is_shown``: see `plan_starts`.
    """
    job = Job(
        Flavour("dsl-ssh", (), ()),
        Program("program", "ssh", name="ssh"),
        MeetingPoint("alone", "", None),
        signals=SignalRequest(grace_s=GRACE_S),
        log_level="warning",
    )
    fds = [fd] * len(starts)
    return plan_starts(job, starts, names, fds, facts.environ, is_shown=is_shown, at_once=at_once)


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


class HostCommands(Side):
    """The source of one plan, which exists already, and the report on it."""

    is_visible = False

    def __init__(self, plan: NodePlan) -> None:
        self.source, self._plan, self._narrator = self, plan, Narrator(plan)

    def plan(self, attempt: int) -> NodePlan:  # noqa: ARG002  there is only one
        """The plan."""
        return self._plan

    def prepare(self, plan: NodePlan) -> NodePlan:
        """It needs nothing."""
        return plan

    def listeners(self, plan: NodePlan) -> list[Listener]:  # noqa: ARG002  it is known
        """The report alone."""
        return [self]

    def hear(self, event: object) -> None:
        """Report the hosts on which the command failed. The narrator reports all other events."""
        if not isinstance(event, Outcome):
            self._narrator.hear(event)
            return
        for line in failure_lines(event.last.plan, event.last.exits):
            self._narrator.say(line)
        for one in event.last.ended.survivors:
            self._narrator.say(survivor(*one))

    def finish(self, *, succeeded: bool) -> None:
        """No files were made."""

    def tidy(self) -> None:
        """No files are left."""


class _Probe(HostCommands):
    """The source of commands that only try their hosts, and of no report.

    It is the decider and a channel, too, and ends what has not ended by itself at ``deadline_s``.
    """

    def __init__(self, plan: NodePlan, deadline_s: float) -> None:
        super().__init__(plan)
        self.decider = self
        self.deadline_s: float | None = deadline_s
        self._said = [b""] * len(plan.workers)
        self.failed: dict[int, str] = {}
        """The last line of each command that has not ended with 0; empty: it was still running."""

    def channels(self) -> list[Channel]:
        """The deadline."""
        return [self]

    def fileno(self) -> int:
        """Nothing is ever readable."""
        return -1

    def read(self) -> Sequence[object]:
        """The deadline has passed."""
        self.deadline_s = None
        return (self,)

    def decide(self, event: object, last: AttemptOutcome | None) -> Decision:
        """Stop at the deadline. There is one attempt."""
        if last is not None:
            return Decision("end", code=last.final_code)
        return Decision("stop", grace_s=TRY_GRACE_S) if event is self else GO_ON

    def hear(self, event: object) -> None:
        """Keep what a command says, and how it ends."""
        if isinstance(event, Output):
            self._said[event.worker] = (self._said[event.worker] + event.data)[-LONGEST_SAID:]
        if not isinstance(event, Outcome):
            return
        for exit_ in event.last.exits:
            if exit_.status:
                lines = self._said[exit_.worker].decode(errors="replace").strip().splitlines()
                why = printable(lines[-1]) if lines else reason(exit_)
                self.failed[exit_.worker] = "" if exit_.caused_by_stop else why


def wait_for_hosts(
    names: Sequence[str], remote: Remote, facts: Facts, tell: Callable[[str, str], None]
) -> None:
    """Wait until a command runs on each of these hosts. ``tell`` hears which are missing, and a line.

    Raises:
        RendezvousError: some hosts cannot be reached in time.
    """
    until_s = time.monotonic() + remote.hosts_wait_s
    missing = dict.fromkeys(names, "")
    while found := _out_of_reach([*missing], remote, facts, until_s):
        for name, why in found.items():  # a try that was cut short says less than the one before
            found[name] = why or missing[name] or f"no answer from {way_to(remote, name)[0]}"
        shown, last = name_workers(list(found), "host"), next(iter(found.values()))
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            why = f"{shown} cannot be reached within {remote.hosts_wait_s:g} s"
            raise RendezvousError(f"{why}: {last}; check the name, or wait longer")
        if not any(missing.values()) or len(found) < len(missing):
            tell(shown, f"waiting up to {left_s:.0f} s for {shown}: {last}")
        missing = found
        time.sleep(min(left_s, WAIT_POLL_S))


def _out_of_reach(names: Sequence[str], remote: Remote, facts: Facts, until_s: float) -> dict[str, str]:
    """The hosts on which no command can be run by then, each with the last line of its command.

    The line is empty if the command was still running.
    """
    starts = [Start((*way_to(remote, name), "true"), node_rank=place) for place, name in enumerate(names)]
    reading, writing = os.pipe()
    try:
        plan = plan_hosts(starts, names, reading, AT_ONCE, facts, is_shown=False)
        probe = _Probe(plan, min(until_s, time.monotonic() + LONGEST_TRY_S))
        Session(probe).run_here(lambda _: None)
    finally:
        os.close(reading)
        os.close(writing)
    return {names[place]: said for place, said in sorted(probe.failed.items())}
