"""One job on several hosts, watched from outside: who runs where, how it ends, what is left of it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.kit import processes
from tests.kit.cluster import Cluster, Host
from tests.kit.cluster.host import HostProcess, Running
from tests.kit.waiting import until

Identity = tuple[str, int, int]
Others = AbstractSet[Identity]

PLAIN = ("note", "{}/ready", "%r %p", "pause")
"""Words of a worker that waits."""

WILD = (
    *("ignore", "TERM,INT,HUP"),
    *("child", "[", "setsid", "note", "{}/ready", "s%p %p", "pause", "]"),
    *("daemon", "[", "note", "{}/ready", "d%p %p", "pause", "]"),
    *PLAIN,
)
"""Words of a worker that does not want to end, and has processes elsewhere: three announce themselves."""

OF_THE_WAY = ("sshd", "slurmstepd", "orted", "prted", "hydra_pmi_proxy")
"""Servers on the way to a host. They hold nothing of the job, and end when they have told their client: with
a head that says nothing any more, never. At the end of a test they must be gone, too.
"""

SLOTS = 2
LEFT_S = 10.0
"""What a job may take to be gone from every host, beyond the grace of its workers."""


class Ways(NamedTuple):
    """How the hosts of a job are reached."""

    launcher: str
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = {}


SSH = Ways("ssh")


class Fleet:
    """A command that runs a job on hosts, launched on one of them."""

    def __init__(self, hosts: Sequence[Host], folder: Path, head: Host, process: HostProcess) -> None:
        self.hosts = hosts
        self.folder = folder
        self.head = head
        self.process = process
        self.pids: dict[str, int] = {}
        """What `ready` has found last."""

    @property
    def ready_file(self) -> Path:
        """Each worker has a line there: its rank and its pid."""
        return self.folder / "ready"

    def ready(self, count: int, timeout_s: float = 60.0) -> dict[str, int]:
        """Wait until so many processes have announced themselves; their pids on their hosts, by name."""

        def announced() -> list[str]:
            if self.process.poll() is not None:
                raise AssertionError(f"the command has ended with {self.process.returncode}: {self.stderr}")
            lines = _text(self.ready_file).splitlines()
            return lines if len(lines) >= count else []

        lines = until(announced, timeout_s)
        self.pids = {name: int(pid) for name, pid in (line.split() for line in lines)}
        return self.pids

    def until_said(self, text: str, timeout_s: float = 20.0) -> None:
        """Wait until the command has said that on stderr."""
        until(lambda: text in self.stderr, timeout_s)

    def let_go(self) -> None:
        """Let the workers go on that wait for it."""
        (self.folder / "go").touch()

    def struck_s(self, name: str = "struck") -> float:
        """`time.monotonic` when a worker was about to fail."""
        return int(until(lambda: _text(self.folder / name))) / 1e9

    def wait(self, timeout_s: float = 20.0) -> int:
        """Wait for the end of the command, to the millisecond; its exit code, negative for a signal."""
        if not self.ends_within(timeout_s):
            raise AssertionError(f"still runs after {timeout_s} s: {self.stderr[-2000:]}")
        return self.process.wait()

    def ends_within(self, timeout_s: float) -> bool:
        """Whether the command ends within that time, to the millisecond."""
        fd = os.pidfd_open(self.process.pid)
        try:
            return bool(select.select([fd], [], [], timeout_s)[0])
        finally:
            os.close(fd)

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return _text(self.folder / "stdout")

    @property
    def stderr(self) -> str:
        return _text(self.folder / "stderr")

    def agents(self, host: Host, but: Others = frozenset()) -> list[tuple[int, int]]:
        """Guard and agent, as pids of that host; one pair for each agent of a host or rank."""
        proc = f"{host.root}/proc"
        pids = {
            one.pid
            for one in host.strangers()
            if "-m dsl_launcher.node" in one.command
            and "python" in one.name
            and identity(host, one) not in but
        }
        above = {pid: found.ppid for pid in pids if (found := processes.find(pid, proc)) is not None}
        return sorted((parent, pid) for pid, parent in above.items() if parent in pids)

    def own_agent(self) -> int:
        """The agent of the command, as the machine counts."""
        guard = self.process.child
        (agent,) = processes.children(guard)
        return agent

    def starters(self) -> list[int]:
        """The programs that reach the hosts, as the machine counts."""
        return sorted(processes.children(self.own_agent()))


@contextlib.contextmanager
def running(
    cluster: Cluster,
    command: Path,
    folder: Path,
    words: Sequence[str],
    *,
    ways: Ways,
    options: Sequence[str] = (),
    hosts: Sequence[Host] | None = None,
    head: Host | None = None,
    slots: int = SLOTS,
    is_python: bool = False,
    has_terminal: bool = False,
    lets_rank: bool = False,
    **popen: Any,
) -> Iterator[Fleet]:
    """Launch a program on all hosts; at the end the command is killed if it still runs.

    ``words``: the program; or the script, if ``is_python``. ``lets_rank``: nothing is said about its option for the
    local rank. ``popen`` are options of Popen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hosts = cluster.hosts if hosts is None else hosts
    head = cluster[0] if head is None else head
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{host.name} slots={slots}\n" for host in hosts), encoding="utf-8")
    with contextlib.ExitStack() as stack:
        for stream in ("stdout", "stderr"):
            if stream not in popen:
                popen[stream] = stack.enter_context((folder / stream).open("wb"))
        if has_terminal:
            outer, inner = os.openpty()
            stack.callback(os.close, outer)
            popen["stdin"] = inner
        else:
            popen.setdefault("stdin", subprocess.DEVNULL)
        process = head.start(
            [str(command), "-H", str(hostfile), "--launcher", ways.launcher, *ways.options,
             *([] if is_python else ["--no_python"]), *([] if lets_rank else ["--no_local_rank"]), *options,
             *map(str, words)],
            env={"DS_ACCELERATOR": "cpu", **ways.env},
            has_terminal=has_terminal,
            **popen,
        )  # fmt: skip
        if has_terminal:
            os.close(inner)
        try:
            yield Fleet(hosts, folder, head, process)
        finally:
            if head.is_up:
                process.kill()
            with contextlib.suppress(Exception):
                process.wait(10)


class Launch:
    """Launches jobs of the helper program, each in a directory of its own."""

    def __init__(self, cluster: Cluster, command: Path, program: Path, folder: Path) -> None:
        self.cluster = cluster
        self.command = command
        self.program = program
        self.folder = folder

    def __call__(
        self, words: Sequence[str], ways: Ways, *options: str, name: str = "job", **more: Any
    ) -> AbstractContextManager[Fleet]:
        """Launch words of the program; ``{}`` in a word is the directory of the job. ``more``: see `running`."""
        folder = self.folder / name
        line = [str(self.program), *(word.replace("{}", str(folder)) for word in words)]
        options = tuple(word.replace("{}", str(folder)) for word in options)
        return running(self.cluster, self.command, folder, line, ways=ways, options=options, **more)


def identity(host: Host, one: Running) -> Identity:
    """A process of any host: a pid may be used again, this may not."""
    return (host.name, one.pid, one.start)


def everybody(cluster: Iterable[Host]) -> set[Identity]:
    """Who runs now on any host, beyond its daemons."""
    return {identity(host, one) for host in cluster for one in host.strangers()}


def gone_within(cluster: Iterable[Host], timeout_s: float = LEFT_S, but: Others = frozenset()) -> float:
    """Seconds until nothing is left on any host but ``but``. AssertionError: too long."""
    begin_s = time.monotonic()

    def left() -> list[str]:
        return [
            f"{host} {one.pid} {one.command}"
            for host in cluster
            for one in host.strangers()
            if identity(host, one) not in but and not one.name.startswith(OF_THE_WAY)
        ]

    try:
        until(lambda: not left(), timeout_s)
    except AssertionError:
        raise AssertionError(f"left after {timeout_s} s: {'; '.join(left())}") from None
    return time.monotonic() - begin_s


@contextlib.contextmanager
def lost(host: Host, how: str) -> Iterator[None]:
    """Lose a host for a while; whoever has crashed or has no power stays so."""
    if how == "freeze" and host.cgroup is None:
        pytest.skip("needs a writable cgroup v2")
    getattr(host, how)()
    try:
        yield
    finally:
        if how == "unplug":
            host.plug()
        elif how == "freeze":
            host.thaw()


def kill(host: Host, pid: int, signum: int = signal.SIGKILL) -> None:
    """Send a signal to a process of a host, which counts its pids by itself."""
    host.run(["kill", f"-{int(signum)}", str(pid)], check=True)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
