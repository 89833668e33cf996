"""An elastic job on several hosts, watched by what its workers tell when they begin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.kit.cluster import Cluster
from tests.kit.waiting import until
from tests.support.fleet import Fleet, Ways, running

HEARTBEAT_S = 3.0
SLOTS = 2
BOUND_S = 60.0
"""Far more than a job needs to go on; what it takes is measured by the benches."""

WORKER = """\
#!/bin/sh
echo "$DSL_ATTEMPT $RANK $WORLD_SIZE $(uname -n) $DSL_RESTART_REASON $TORCHELASTIC_RESTART_COUNT" >>"$1/log"
while ! [ -e "$1/done" ]; do
    [ -e "$1/fail.$RANK.$DSL_ATTEMPT" ] && exit 7
    [ -e "$1/fail.$RANK" ] && exit 9
    sleep 0.05
done
"""


class Line(NamedTuple):
    """What a worker has told of itself when it began."""

    attempt: int
    rank: int
    world_size: int
    host: str
    reason: str
    restarts: int


class Job:
    """An elastic job, watched by what its workers tell."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.folder = fleet.folder

    def lines(self, attempt: int) -> list[Line]:
        """The workers of an attempt, by rank."""
        try:
            rows = [row.split() for row in (self.folder / "log").read_text().splitlines()]
        except OSError:
            return []
        found = [Line(int(a), int(r), int(w), host, reason, int(n)) for a, r, w, host, reason, n in rows]
        return sorted([one for one in found if one.attempt == attempt], key=lambda one: one.rank)

    def until_attempt(self, attempt: int, workers: int) -> list[Line]:
        """Wait until so many workers of an attempt run."""

        def there() -> list[Line]:
            if self.fleet.process.poll() is not None:
                raise AssertionError(f"ended with {self.fleet.process.returncode}: {self.fleet.stderr}")
            lines = self.lines(attempt)
            return lines if len(lines) >= workers else []

        try:
            return until(there, BOUND_S)
        except AssertionError:
            raise AssertionError(f"attempt {attempt}: {self.lines(attempt)}; {self.fleet.stderr}") from None

    def newest(self) -> list[Line]:
        """The workers of the last attempt that has any."""
        try:
            rows = (self.folder / "log").read_text().splitlines()
        except OSError:
            return []
        return self.lines(max(int(row.split()[0]) for row in rows)) if rows else []

    def touch(self, name: str) -> None:
        """Let the workers see a file."""
        (self.folder / name).touch()

    def finish(self) -> None:
        """Let the workers end well."""
        self.touch("done")
        assert self.fleet.wait(BOUND_S) == 0, self.fleet.stderr


@contextlib.contextmanager
def elastic(
    cluster: Cluster, command: Path, folder: Path, ways: Ways, nodes: str, *options: str, **more: Any
) -> Iterator[Job]:
    """Launch such a job on the hosts of a cluster. ``more``: see `running`."""
    folder.mkdir()
    worker = folder / "worker.sh"
    worker.write_text(WORKER)
    worker.chmod(0o755)
    head = cluster[0]
    few = ("--heartbeat", f"{HEARTBEAT_S:g}", "--grace", "2", "--num_nodes", nodes)
    with running(
        cluster,
        command,
        folder,
        [str(worker), str(folder)],
        ways=Ways(
            ways.launcher, (*ways.options, "--elastic_training", "--master_addr", head.address), ways.env
        ),
        options=(*few, *options),
        lets_rank=True,
        **more,
    ) as fleet:
        yield Job(fleet)
