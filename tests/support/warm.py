"""Warm fork servers of one test: a folder for their sockets, what they tell, and their end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.kit import processes
from tests.kit.processes import Process
from tests.kit.waiting import until
from tests.support.command import ran

from dsl._core import warm_answer, warm_call

OURS = "WARM_TEST_PLACE"
"""Variable that the servers of a place carry, and all that they fork."""

ENGINE_VARIABLES = ("DSL_ENGINE_DISABLE", "DSL_ENGINE_THREADS", "DSL_ENGINE_FORKERS")
TOLD_S = 5.0


class Told(NamedTuple):
    """What a server says of itself."""

    pid: int
    jobs: int
    busy: int
    """How many jobs run."""


class Place:
    """Where the warm servers of one test have their sockets. Leave the ``with`` block to end them."""

    def __init__(self) -> None:
        # Sockets of programs that workers run may be there: their paths must not be long.
        self.temporary = Path(tempfile.mkdtemp(prefix="w."))
        self.mark = uuid.uuid4().hex
        self.dslrun = str(Path(sys.executable).with_name("dslrun"))

    def __enter__(self) -> Place:  # noqa: PYI034  typing.Self needs 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def variables(self) -> dict[str, str]:
        """Variables that lead to this place. A folder of the user's session would be that of other tests, too."""
        return {"TMPDIR": str(self.temporary), "XDG_RUNTIME_DIR": str(self.temporary), OURS: self.mark}

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """A small environment of a command. Tests have a variable of their own, which would make other servers."""
        kept = ("PATH", "HOME", "LD_LIBRARY_PATH", "LANG", "DSL_TEST_TOKEN", *ENGINE_VARIABLES)
        found = {name: os.environ[name] for name in kept if name in os.environ}
        return {**found, **self.variables(), **(more or {})}

    def command(self, *words: str, workers: int = 1, method: str = "warm") -> list[str]:
        """The command line of a job."""
        options = ["--nproc-per-node", str(workers), "--start-method", method]
        return [self.dslrun, *options, *words]

    def run(
        self,
        *words: str,
        cwd: Path,
        before: Sequence[str] = (),
        more: Mapping[str, str] | None = None,
        workers: int = 1,
        method: str = "warm",
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a job to its end. ``before``: words before the command, such as those of ``taskset``."""
        line = [*before, *self.command(*words, workers=workers, method=method)]
        return ran(line, timeout_s, cwd=cwd, env=self.environ(more), stdin=subprocess.DEVNULL)

    def tool(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside dslrun to its end."""
        line = [Path(self.dslrun).with_name(name), *words]
        return ran(line, env=self.environ(), stdin=subprocess.DEVNULL)

    def sockets(self) -> list[tuple[str, str]]:
        """Folder and name of each socket."""
        return [
            (str(path.parent), path.name)
            for path in self.temporary.glob("dsl*/*")
            if path.name.endswith((".new", ".warm"))
        ]

    def told(self) -> list[Told]:
        """What each server says that takes calls at once."""
        found = []
        for folder, name in self.sockets():
            if name.endswith(".warm"):
                with contextlib.suppress(OSError):
                    answer = warm_answer(warm_call(folder, name, "tell"), TOLD_S)
                    if answer:
                        pid, jobs, busy = map(int, answer.split()[:3])
                        found.append(Told(pid, jobs, busy))
        return found

    def server(self) -> Told:
        """The only server, once it takes calls at once and serves no job."""

        def idle() -> list[Told]:
            found = self.told()
            return found if len(found) == len(self.sockets()) == 1 and not found[0].busy else []

        return until(idle)[0]

    def all(self) -> list[Process]:
        """Servers, branches and workers that run."""
        return processes.carrying(f"{OURS}={self.mark}")

    def servers(self) -> list[Process]:
        """Servers and branches that run: a worker shows its own command line."""
        return [one for one in self.all() if "forkserver/boot.py" in command_line(one.pid)]

    def branches(self, server: int) -> list[Process]:
        return [one for one in self.servers() if one.ppid == server]

    def end(self) -> None:
        """End all servers, also those that another one has started in its place, and wait for that."""
        for folder, name in self.sockets():
            try:
                stops = warm_answer(warm_call(folder, name, "stop"), TOLD_S)
            except (ConnectionRefusedError, FileNotFoundError):
                continue
            except OSError:  # it runs in other namespaces, or may not see ours because we may do more
                stops = None
            if not stops:
                self._kill()
        try:
            until(lambda: not self.all(), 10)
        finally:
            self._kill()
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _kill(self) -> None:
        for one in self.all():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)


def command_line(pid: int) -> str:
    """The words of a process, with spaces between them; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


@contextlib.contextmanager
def variables(more: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process for the time of a ``with`` block."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def read_json(path: Path) -> dict[str, object]:
    """What a worker has written with `tests/workers/observed.py`."""
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found
