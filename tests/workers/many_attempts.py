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
from dsl.agent.roles import Listener  # noqa: E402
from dsl.agent.session import OneNode, Session  # noqa: E402
from dsl.cli import deepspeed, torchrun  # noqa: E402
from dsl.conductor import restarts  # noqa: E402
from dsl.facts import this_machine  # noqa: E402
from dsl.model.job import NodePlan  # noqa: E402
from dsl.model.outcome import AttemptOutcome  # noqa: E402
from dsl.plan.job import plan_job  # noqa: E402

EVERY = 100


class Meter:
    """Listens for the ends of attempts."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._count = 0

    def hear(self, event: object) -> None:
        """Write a line now and then."""
        self._count += isinstance(event, AttemptOutcome)
        if isinstance(event, AttemptOutcome) and self._count % EVERY == 0:
            with open("/proc/self/statm", "rb") as file:
                pages = int(file.read().split()[1])
            os.write(self._file, f"{self._count} {pages * os.sysconf('SC_PAGESIZE')}\n".encode())


def main() -> int:
    """See the module."""
    path, command, *words = sys.argv[1:]
    read = {"dsl": deepspeed.read, "dslrun": torchrun.read}[command]
    facts = this_machine()
    restarts.SAME_HOSTS = replace(restarts.SAME_HOSTS, at_once=1 << 30)  # no pauses
    planner = Planner(plan_job(read(words, os.environ)[0], facts), facts)

    class Metered(OneNode):
        def listeners(self, plan: NodePlan) -> list[Listener]:
            return [*super().listeners(plan), Meter(path)]

    return Session(Metered(planner)).run_guarded()


sys.exit(main())
