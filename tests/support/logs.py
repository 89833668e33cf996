"""Groups whose output the engine passes on, run in a program of their own: their console is its stdout."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

PROGRAM = Path(__file__).parent.parent / "workers" / "log_group.py"


def is_full(fd: int) -> bool:
    """Whether a pipe takes nothing more. The bytes in it do not tell: its pages may be used in part."""
    end = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return not select.select([], [end], [], 0)[1]
    finally:
        os.close(end)


class Found(NamedTuple):
    """What a check of numbered lines has found, see the testkit's module `output`."""

    lines: int
    torn: int
    misattributed: int
    gaps: int
    foreign: int


class LogGroup:
    """One group; `directory` takes its files and its result."""

    def __init__(
        self,
        directory: Path,
        argv: Sequence[str],
        workers: int,
        *,
        stdout: int | IO[bytes] | None = subprocess.PIPE,
        stderr: int | IO[bytes] | None = subprocess.PIPE,
        files: bool = False,
        console: int | None = 1,
        joined: bool = False,
        prefix: bool = True,
        terminal: bool = False,
        **options: object,
    ) -> None:
        self.directory = directory
        self._result = directory / "result.json"
        group = {
            "workers": workers,
            "argv": list(argv),
            "files": str(directory) if files else None,
            "console": console,
            "joined": joined,
            "prefix": prefix,
            "terminal": terminal,
            "options": options,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(group), str(self._result)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )

    def output(self, timeout_s: float = 60.0) -> tuple[bytes, bytes]:
        """Wait for the end; what came out of stdout and stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, err
        return out or b"", err or b""

    def finish(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait for the end without reading a byte of the output; the result."""
        try:
            assert self.process.wait(timeout_s) == 0
        finally:
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()
        return self.result()

    def result(self) -> dict[str, Any]:
        """What the group's program saw."""
        found: dict[str, Any] = json.loads(self._result.read_text())
        return found


def check(linecheck: Path, source: IO[bytes] | Path | bytes) -> Found:
    """Check numbered lines from a file, a pipe or memory."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            return check(linecheck, file)
    if isinstance(source, bytes):
        result = subprocess.run([str(linecheck)], input=source, capture_output=True, check=True)
    else:
        result = subprocess.run([str(linecheck)], stdin=source, capture_output=True, check=True)
    return Found(*map(int, result.stdout.split()))
