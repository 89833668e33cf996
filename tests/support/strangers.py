"""Processes of this user in other namespaces, as in a container that shares `/tmp`, which try the doors of dsl."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kit.waiting import until
from tests.support.namespaces import unshared
from tests.support.warm import Place

PROGRAM = Path(__file__).parent.parent / "workers" / "stranger.py"
MESSAGES = Path(__file__).parent.parent.parent / "rust" / "engine" / "src" / "forkserver" / "message.rs"

# The namespaces that a stranger enters, and how a refusal names them. "--kill-child": it ends with this process.
ELSEWHERE = {
    "pid": ("--pid --fork --kill-child --mount-proc", "pid namespace"),
    "pid-of-children": ("--pid", "pid namespace"),
    "mount": ("--mount", "mount namespace"),
    "net": ("--net", "network namespace"),
    "user": ("--user --map-root-user", "user namespace"),
    "uts": ("--uts", "uts namespace"),
    "ipc": ("--ipc", "ipc namespace"),
    "cgroup": ("--cgroup", "cgroup namespace"),
    "time": ("--time --fork --kill-child", "time namespace"),
    "all-but-net": (
        "--pid --mount --user --map-root-user --uts --ipc --cgroup --time --fork --kill-child --mount-proc",
        "pid namespace",
    ),
    "all": (
        "--pid --mount --net --user --map-root-user --uts --ipc --cgroup --time --fork --kill-child --mount-proc",
        "pid namespace",
    ),
}
HERE = "here"
"""A process without namespaces of its own: you. What it tries succeeds, so the attempts are real ones."""


class Stranger:
    def __init__(self, kind: str) -> None:
        words = [] if kind == HERE else unshared(*ELSEWHERE[kind][0].split())
        [version] = re.findall(r"const VERSION: u32 = (\d+);", MESSAGES.read_text())
        self._process = subprocess.Popen(
            [*words, sys.executable, str(PROGRAM), version],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tries(self, do: str, **arguments: object) -> list[str]:
        """Give an order. Returns all that the stranger got, piece by piece."""
        self._give({"do": do, **arguments})
        return self._got()

    @contextlib.contextmanager
    def posing(
        self, path: Path, *, is_job: bool = False, says: str = "", names: str = ""
    ) -> Iterator[list[str]]:
        """For the time of a ``with`` block, somebody else is at that path. Afterwards the list has what was said there."""
        self._give({"do": "pose", "path": str(path), "is_job": is_job, "says": says, "names": names})
        assert self._answer() == {"ready": True}
        got: list[str] = []
        try:
            yield got
        finally:
            self._give({})
            got += self._got()

    def _give(self, order: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def _got(self) -> list[str]:
        return [one for one in self._answer()["got"] if one]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


@contextlib.contextmanager
def stranger(kind: str) -> Iterator[Stranger]:
    """A stranger of one kind of `ELSEWHERE`, or of `HERE`. A test is skipped where its namespaces are refused."""
    one = Stranger(kind)
    try:
        yield one
    finally:
        one.close()


TRAIN = """
import os, signal, sys, textwrap, time
print("the worker has its secret:", os.environ["HF_TOKEN"] == {secret!r}, flush=True)
if sys.argv[1:] == ["hold"]:
    for number in (1, 2, 3, 10, 12, 15, 18):
        signal.signal(number, lambda number, _: open("caught", "a").close())
    open("held", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
"""


class Victim:
    """Somebody with a warm server, who runs jobs with a secret. Leave the ``with`` block to end the server."""

    PLAIN = "variable-of-the-victim"
    """Value of a variable that the server has, too."""
    SAYS = "the worker has its secret: True"

    def __init__(self, folder: Path, secret: str) -> None:
        self.folder = folder
        self.place = Place()
        self._more = {"HF_TOKEN": secret, "PLAIN_VARIABLE": self.PLAIN}
        (folder / "train.py").write_text(TRAIN.format(secret=secret))

    def __enter__(self) -> Victim:  # noqa: PYI034  typing.Self needs 3.11
        self._settle()
        return self

    def _settle(self) -> None:
        # A server that has read files of this very moment serves no second job.
        until(lambda: self.runs() is not None and self.place.told(), 40)

    def __exit__(self, *_: object) -> None:
        self.place.end()

    @property
    def socket(self) -> Path:
        self.place.server()
        [(folder, name)] = self.place.sockets()
        return Path(folder, name)

    def runs(self) -> str:
        """Run a job, which has to end well. Returns what the command says."""
        done = self.place.run("train.py", cwd=self.folder, more=self._more)
        assert (done.returncode, done.stdout.strip()) == (0, self.SAYS), done.stderr
        return done.stderr

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """A job runs, and hears no signal before it ends well."""
        held, caught, go = [self.folder / name for name in ("held", "caught", "go")]
        job = subprocess.Popen(
            self.place.command("train.py", "hold"),
            cwd=self.folder,
            env=self.place.environ(self._more),
            stdout=subprocess.DEVNULL,
        )
        try:
            until(held.exists)
            yield
            assert not caught.exists()
            go.touch()
            assert job.wait(20) == 0
        finally:
            job.kill()
            job.wait()

    def stolen_request(self) -> str:
        """What the command sends to the server for a job, as a process gets it that is here."""
        with stranger(HERE) as other, other.posing(self.socket) as got:
            self.runs()
        [request] = [one for one in got if re.match(r"[^\0]\0\0\0\0", one)]
        self._settle()  # the server whose name was taken has ended
        return request
