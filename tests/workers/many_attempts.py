"""A command that starts its workers again without a pause, and writes what memory its agent has.

argv: the file for ``ATTEMPTS RESIDENT-BYTES`` lines, dsl or dslrun, and the command line of that.
"""

from __future__ import annotations

import os
import sys

from dsl import _own_process

_own_process.claim()  # as the commands do

from dsl._record import replace  # noqa: E402
from dsl.agent.planner import Planner  # noqa: E402
from dsl.agent.policy import decide  # noqa: E402
from dsl.agent.session import Crew, Session, listen  # noqa: E402
from dsl.cli import deepspeed, torchrun  # noqa: E402
from dsl.facts import this_machine  # noqa: E402
from dsl.model.job import NodePlan  # noqa: E402
from dsl.model.outcome import AttemptEnded, Decision, History, Membership  # noqa: E402
from dsl.plan.job import plan_job  # noqa: E402

EVERY = 100


def hurry(history: History, event: object, membership: Membership) -> Decision:
    """The policy of the commands, but for its pauses."""
    decision = decide(history, event, membership)
    return replace(decision, kind="restart", within_s=0.0) if decision.kind == "pause" else decision


class Meter:
    """Listens for the ends of attempts."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._count = 0

    def hear(self, event: object) -> None:
        """Write a line now and then."""
        self._count += isinstance(event, AttemptEnded)
        if isinstance(event, AttemptEnded) and self._count % EVERY == 0:
            with open("/proc/self/statm", "rb") as file:
                pages = int(file.read().split()[1])
            os.write(self._file, f"{self._count} {pages * os.sysconf('SC_PAGESIZE')}\n".encode())


def main() -> int:
    """See the module."""
    path, command, *words = sys.argv[1:]
    read = {"dsl": deepspeed.read, "dslrun": torchrun.read}[command]
    facts = this_machine()
    planner = Planner(plan_job(read(words, os.environ)[0], facts), facts)

    def crew(plan: NodePlan) -> Crew:
        return Crew([*listen(planner, plan), Meter(path)], policy=hurry)

    return Session(planner, crew).run_guarded()


sys.exit(main())
