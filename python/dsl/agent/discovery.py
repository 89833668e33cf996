"""The list of hosts of an elastic job that a program prints again and again (``--discover``).

The program runs below a small process, which is one of those that the head's engine supervises.
"""

from __future__ import annotations

import json
import sys
import time

from dsl import Exited, Output, Started
from dsl._own_process import START
from dsl._record import replace
from dsl.agent.starters import LineCutter
from dsl.conductor.terms import reached_terms
from dsl.errors import UsageError
from dsl.launchers.base import Start
from dsl.machine.listing import MOST_BYTES
from dsl.model.job import Notice
from dsl.plan.listed import relisted
from dsl.plan.remote import accepted_sizes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl.agent.starters import Starters
    from dsl.conductor.listed import ListedConductor
    from dsl.control.messages import Assignment
    from dsl.facts import Facts
    from dsl.model.job import Job
    from dsl.plan.remote import Remote

    StartsOf = Callable[[Job, Remote], Sequence[Start]]

_START = f"{START}from dsl.machine.listing import main; main()"


class Discovery:
    """What the program says while the job runs, and what follows for the job."""

    relist: Callable[[Job, Sequence[object]], None]
    """Takes the job with all hosts that were ever listed, and the orders of the conductor."""

    def __init__(
        self,
        conductor: ListedConductor,
        starters: Starters,
        assignment: Assignment,
        remote: Remote,
        facts: Facts,
        starts_of: StartsOf,
    ) -> None:
        """``starts_of``: the programs that reach the hosts of a job."""
        self._conductor, self._starters, self._starts_of = conductor, starters, starts_of
        self._assignment, self._remote, self._facts = assignment, remote, facts
        self._number = len(assignment.job.hosts)
        starters.beside = Start((sys.executable, "-c", _START, *remote.discover))
        self._lines = LineCutter(8 * MOST_BYTES)  # JSON writes up to six characters for one

    def hear(self, event: object) -> bool:
        """Hear an event of the engine. Whether it is one of ours."""
        number = event.exit.worker if isinstance(event, Exited) else None
        number = event.worker if isinstance(event, (Output, Started)) else number
        if number != self._number:
            return False
        if isinstance(event, Output) and event.stream == 1:
            for line in self._lines.feed(event.data):
                self._read(json.loads(line))
        elif isinstance(event, Exited) and not event.exit.caused_by_stop:
            self._warn("the process that runs --discover has ended")
        return True

    def _warn(self, what: str) -> None:
        self._starters.tell(Notice("warning", f"{what}; the hosts stay as they are"))

    def _read(self, said: dict[str, str]) -> None:
        problem = said.get("problem", "")
        if not problem:
            try:
                self._take(said["hosts"])
            except UsageError as error:
                problem = str(error)
        if problem:
            self._warn(problem)

    def _take(self, text: str) -> None:
        """Take another list. Raises UsageError: it has mistakes, and nothing has changed."""
        job, remote, listed = relisted(self._assignment.job, self._remote, text, self._facts.names.executable)
        if job != self._assignment.job:
            remote = replace(remote, world_sizes=accepted_sizes(job, self._facts))
            self._starters.extend(job, self._starts_of(job, remote))
        self._assignment, self._remote = replace(self._assignment, job=job), remote
        terms = reached_terms(job, remote, self._assignment)
        self.relist(job, self._conductor.list_hosts(terms, listed, time.monotonic()))
