"""Fork servers as the tests use them: see ``tests/workers/fork_server.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kit import processes
from tests.support.command import WITH_ODD_ENTRIES

from dsl import WorkerSpec

SERVER = str(Path(__file__).parent.parent / "workers" / "fork_server.py")


def server(mode: str = "serve") -> list[str]:
    """The command of a fork server."""
    program = f"import sys; sys.path[:0] = {sys.path!r}; exec(open({SERVER!r}).read())"
    return [sys.executable, "-S", "-c", program, mode]


def forked(testchild: Path | str, *words: str, **options: Any) -> WorkerSpec:
    """A worker of the helper program that the first fork server forks."""
    return WorkerSpec(["/usr/bin/env", str(testchild), *words], fork_server=0, fork_entry=1, **options)


def server_pids(parent: int | None = None) -> list[int]:
    """Living fork servers of a process, or of this one."""
    found = []
    for pid in processes.children(parent or os.getpid()):
        process = processes.find(pid)
        words = Path(f"/proc/{pid}/cmdline").read_bytes() if process and process.state not in "ZX" else b""
        if b"fork_server.py" in words:
            found.append(pid)
    return found


AGENT = str(Path(SERVER).with_name("fork_agent.py"))


class Command:
    """A program with a fork server's workers: a guard with its agent, or an embedded supervisor."""

    def __init__(
        self,
        testchild: Path,
        *workers: Sequence[str],
        how: str = "guarded",
        odd: str = "",
        mode: str = "serve",
    ) -> None:
        commands = [["/usr/bin/env", str(testchild), *words] for words in workers]
        words = [sys.executable, AGENT, how, json.dumps(server(mode)), json.dumps(commands)]
        if odd:
            words = [sys.executable, "-c", WITH_ODD_ENTRIES, odd, *words]
        mark = {"FORK_SERVER_TEST": uuid.uuid4().hex}
        self.mark = "=".join(*mark.items())
        self.process = subprocess.Popen(words, env=os.environ | mark, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        self.guard, self.agent = map(int, self.lines.readline().split())

    def __enter__(self) -> Command:  # noqa: PYI034  typing.Self needs 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.lines.close()

    def until_said(self, name: str, times: int = 1) -> None:
        """Wait for events of this name."""
        for _ in range(times):
            while self.lines.readline().strip() != name:
                pass

    def is_gone(self) -> bool:
        """Whether nothing is left of it, of its server and of its workers."""
        return not processes.carrying(self.mark)


def leaver(path: Path) -> list[str]:
    """Words of a worker that ignores SIGTERM and leaves a daemon that does so, too."""
    deaf = ["ignore", "TERM"]
    return ["daemon", "[", *deaf, "touch", str(path), "pause", "]", "wait", str(path), *deaf, "pause"]
