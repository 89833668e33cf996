"""Programs run twice: by an interpreter of their own, and by a fork server, which may be a warm one."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.warm import Place, variables

from dsl import (
    Ended,
    Exit,
    Exited,
    ForkServerLost,
    ForkServerReady,
    LaunchSpec,
    Stdio,
    Supervisor,
    WorkerSpec,
)
from dsl._record import replace
from dsl.agent import warm
from dsl.forkserver.boot import words_of
from dsl.model.job import ForkServer, Warm
from dsl.plan.starting import SHELL_VARIABLES, may_be_secret

ARE_WARM = False
"""Whether the fork servers are warm ones. Tests set it."""
HIDDEN = "getattr(getattr(__import__('_frozen_importlib')._find_and_load, '__self__', None), 'modules', ())"
"""An expression for programs: the modules that the server has imported and the program has not; if executed, none."""


class Result(NamedTuple):
    """How a program ended and what it wrote."""

    code: int | None
    signal: int | None
    out: str
    err: str


class Forks:
    """A fork server of its own supervisor. Leave the ``with`` block to end it."""

    def __init__(
        self,
        folder: Path,
        *,
        interpreter: Sequence[str] = (sys.executable,),
        program: Sequence[str] = (),
        preload: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        is_warm: bool | None = None,
    ) -> None:
        """``folder``: directory of server and programs. ``program``: (script,) or ("-m", module)."""
        self.folder = folder
        self.interpreter = tuple(interpreter)
        self.env = dict(os.environ if env is None else env)
        self.lost: str | None = None
        self.is_ready = False
        self.supervisor = Supervisor()
        self.place: Place | None = None
        server = ForkServer(
            interpreter=self.interpreter,
            env=self.env,
            preload=tuple(preload),
            script=program[-1] if program else "",
            is_module=len(program) > 1,
        )
        if ARE_WARM if is_warm is None else is_warm:
            self.number = self._join(server)
            return
        self.number = self.supervisor.start_fork_server(words_of(server), env=self.env, cwd=folder)

    def __enter__(self) -> Forks:  # noqa: PYI034  typing.Self needs 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.close()
        if self.place is not None:
            self.place.end()

    def _join(self, server: ForkServer) -> int:
        """Start a warm server as a command does, and take its branch."""
        self.place = Place()
        self.env.update(self.place.variables())
        secrets = sorted(filter(may_be_secret, self.env))
        server = replace(
            server,
            env={name: self.env[name] for name in self.env if name not in {*secrets, *SHELL_VARIABLES}},
            warm=Warm(stay_s=60.0, memory=0, withheld=tuple(secrets)),
        )
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            with variables(self.place.variables()):
                found = warm.call(server, start_mask=())
        finally:
            os.chdir(before)
        assert found is not None
        return self.supervisor.join_fork_server(found.fds[0], found.is_ready)

    def run(
        self,
        *programs: Sequence[str],
        is_forked: bool = True,
        env: Mapping[str, str] | None = None,
        terminal: int | None = None,
        timeout_s: float = 25.0,
    ) -> list[Result]:
        """Run programs at once, by the fork server or plainly. ``terminal``: a descriptor for all their streams."""
        places = [Path(tempfile.mkdtemp(prefix="run.", dir=self.folder)) for _ in programs]
        workers = []
        for program, place in zip(programs, places, strict=True):
            (place / "in").write_text("input\n")
            with (place / "in").open() as stdin:
                workers.append(
                    WorkerSpec(
                        [*self.interpreter, *program],
                        cwd=self.folder,
                        stdin=Stdio.fd(os.dup(stdin.fileno() if terminal is None else terminal)),
                        stdout=Stdio.file(place / "out") if terminal is None else Stdio.fd(terminal),
                        stderr=Stdio.file(place / "err") if terminal is None else Stdio.fd(terminal),
                        fork_server=self.number if is_forked else None,
                        fork_entry=len(self.interpreter) if is_forked else 0,
                    )
                )
        try:
            spec = LaunchSpec(workers, env={**self.env, **(env or {})}, on_failure="report")
            self.supervisor.start(spec)
            exits = self._exits(timeout_s)
        finally:
            for worker in workers:
                assert worker.stdin.descriptor is not None
                os.close(worker.stdin.descriptor)
        return [
            Result(exits[number].code, exits[number].signal, _text(place / "out"), _text(place / "err"))
            for number, place in enumerate(places)
        ]

    def wait(self, timeout_s: float = 25.0) -> str | None:
        """Wait until the server is ready or lost; return why it is lost."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready and self.lost is None:
            assert time.monotonic() < deadline, f"neither ready nor lost after {timeout_s} s"
            for event in self.supervisor.wait(0.05):
                self._hear(event)
        return self.lost

    def _exits(self, timeout_s: float) -> dict[int, Exit]:
        exits: dict[int, Exit] = {}
        deadline = time.monotonic() + timeout_s
        while True:
            for event in self.supervisor.wait(0.05):
                self._hear(event)
                if isinstance(event, Exited):
                    exits[event.exit.worker] = event.exit
                elif isinstance(event, Ended):
                    return exits
            assert time.monotonic() < deadline, f"has not ended after {timeout_s} s: {exits}, {self.lost}"

    def _hear(self, event: object) -> None:
        if isinstance(event, ForkServerLost):
            self.lost = event.text
        elif isinstance(event, ForkServerReady):
            self.is_ready = True


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""


def environment(**more: str) -> dict[str, str]:
    """A small one, in which `PYTHONHASHSEED` and the like are not set."""
    kept = ("PATH", "HOME", "LD_LIBRARY_PATH", "DSL_TEST_TOKEN", "DSL_ENGINE_DISABLE")
    return {**{name: os.environ[name] for name in kept if name in os.environ}, "OBSERVED": "yes", **more}


# `puts` is called by C, when there is no Python any more.
AT_EXIT = """
import ctypes
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b"{}")), None)
"""
