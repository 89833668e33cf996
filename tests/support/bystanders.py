"""Processes that are not of the job but look as if they were: same user, program, group of limits, variables."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import uuid
from pathlib import Path

from tests.kit import processes
from tests.kit.processes import Process
from tests.kit.waiting import until
from tests.support.arena import Arena

MEMBERS = 4


class Bystanders:
    """A small process tree that notices every signal: parent, child, child in another session, and daemon."""

    def __init__(self, testchild: Path, directory: Path, arena: Arena) -> None:
        directory.mkdir(parents=True)
        self._trace = directory / "trace"
        ready = directory / "ready"
        sleeper = ["note", str(ready), "%p %p", "pause"]
        words = ["catch", "ALL", "trace", str(self._trace)]
        words += ["child", "[", *sleeper, "]", "child", "[", "setsid", *sleeper, "]"]
        words += ["daemon", "[", *sleeper, "]", *sleeper]
        self._token = uuid.uuid4().hex
        # What a worker of another job on this machine has in its environment.
        disguise = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "DSL_JOB_ID": uuid.uuid4().hex}
        self._process = subprocess.Popen(
            arena.inside([str(testchild), *words]),
            env={**os.environ, **disguise, "DSL_TEST_BYSTANDER": self._token},
            stdin=subprocess.DEVNULL,
        )
        until(lambda: ready.exists() and len(ready.read_text().splitlines()) == MEMBERS)
        self.members: list[Process] = []
        for line in ready.read_text().splitlines():
            process = processes.find(int(line.split()[0]))
            assert process is not None
            self.members.append(process)

    def harm(self) -> list[str]:
        """What has been done to them so far, one line each; empty while they were left alone."""
        found = []
        for member in self.members:
            now = processes.find(member.pid)
            if now is None or now.start != member.start or now.state in "ZX":
                found.append(f"bystander {member.pid} has died")
            elif now.state in "Tt":
                found.append(f"bystander {member.pid} was stopped")
        if self._trace.exists():
            found += [f"bystander was signalled: {line}" for line in self._trace.read_text().splitlines()]
        return found

    def close(self) -> None:
        for process in processes.carrying(f"DSL_TEST_BYSTANDER={self._token}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._process.wait(10)
