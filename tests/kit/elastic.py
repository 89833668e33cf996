"""An elastic training on several hosts, one command on each: who takes part, and how far it has come.

The command is `dslrun`, torchrun, or some of both. The training is `examples/train_elastic.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.kit import processes
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.kit.cluster import Cluster, Host
    from tests.kit.cluster.host import HostProcess
    from typing_extensions import Self  # for the type checker alone

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_elastic.py"
PORT = 29400
STEP = re.compile(r"\bstep (\d+) world (\d+) restarts (\d+) reason (\w+) loss (\S+)$", re.MULTILINE)
FROM = re.compile(r"\bfrom step (\d+) world (\d+) restarts (\d+) reason (\w+)$", re.MULTILINE)
# A store that belongs to no node: nodes may come and go as they like.
STORE = """
import sys, threading
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
print("up", flush=True)
threading.Event().wait()
"""


class Step(NamedTuple):
    """A line of rank 0."""

    number: int
    world: int
    restarts: int
    reason: str
    loss: float


class Beginning(NamedTuple):
    """The first line of an attempt."""

    step: int
    world: int
    restarts: int
    reason: str


class Node:
    """One command on one host."""

    def __init__(self, host: Host, process: HostProcess, stem: Path) -> None:
        self.host = host
        self.process = process
        self.out = stem.with_suffix(".out")
        self.err = stem.with_suffix(".err")
        self.is_told = False
        """Whether its end was asked for."""

    def __repr__(self) -> str:
        return self.out.stem

    @property
    def is_alive(self) -> bool:
        return self.host.is_up and self.process.poll() is None

    @property
    def text(self) -> str:
        """What it has written so far."""
        return _text(self.out)

    @property
    def errors(self) -> str:
        """What it has said on stderr so far."""
        return _text(self.err)

    @property
    def last_words(self) -> str:
        """The end of what it has said."""
        return "\n".join(line[:300] for line in self.errors.splitlines()[-4:])

    def pids(self) -> list[int]:
        """The command and all that descends from it, as the machine counts."""
        if not self.is_alive:
            return []
        found = [self.process.child]
        for pid in found:
            found += processes.children(pid)
        return found

    def guard(self) -> int:
        return self.process.child

    def agent(self) -> int:
        """The process that starts the workers: the command itself if that is torchrun."""
        return next((_parent(pid) for pid in self.workers()), self.guard())

    def delegate(self) -> int:
        """The process that takes part in the rendezvous: the command itself if that is torchrun."""
        children = processes.children(self.guard())
        return next((pid for pid in children if b"dsl.rendezvous" in _words(pid)), self.guard())

    def workers(self) -> list[int]:
        """Those that have been told their rank, and have no such parent."""
        told = {pid for pid in self.pids() if _value(pid, "LOCAL_RANK") is not None}
        return sorted(pid for pid in told if _parent(pid) not in told)

    def restart_counts(self) -> set[int]:
        """What its workers have been told."""
        found = {_value(pid, "TORCHELASTIC_RESTART_COUNT") for pid in self.workers()}
        return {int(count) for count in found if count is not None}


class Training:
    """One elastic job. A context manager: at its end every command is killed."""

    def __init__(self, cluster: Cluster, folder: Path, *, nodes: str, options: Mapping[str, str]) -> None:
        self.cluster = cluster
        self.folder = folder
        self.nodes_wanted = nodes
        self.options = options
        self.nodes: list[Node] = []
        """All that ever took part."""
        self.script: list[str] = []
        """More words for the example."""
        self.env = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.is_alive:
                for pid in reversed(node.pids()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
            with contextlib.suppress(Exception):
                node.process.wait(10)

    @property
    def stop_file(self) -> Path:
        """Once it is there, the training ends in order."""
        return self.folder / "stop"

    @property
    def checkpoints(self) -> Path:
        """On a file system that all hosts share."""
        return self.folder / "checkpoints"

    def join(self, host: Host, command: Path | str, *, workers: int = 1) -> Node:
        """Start the command on a host."""
        stem = self.folder / f"{host.name}-{sum(node.host is host for node in self.nodes)}"
        words = [str(command), "--nnodes", self.nodes_wanted, "--nproc-per-node", str(workers)]
        words += [word for pair in self.options.items() for word in pair]
        words += [str(EXAMPLE), "--device", "cpu", "--checkpoints", str(self.checkpoints)]
        words += ["--stop-file", str(self.stop_file), *self.script]
        with stem.with_suffix(".out").open("wb") as out, stem.with_suffix(".err").open("wb") as err:
            process = host.start(words, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        node = Node(host, process, stem)
        self.nodes.append(node)
        return node

    def alive(self) -> list[Node]:
        """Nodes whose command runs."""
        return [node for node in self.nodes if node.is_alive]

    def on(self, host: Host) -> Node | None:
        """The command that runs on a host."""
        return next((node for node in self.alive() if node.host is host), None)

    def steps(self) -> list[Step]:
        """All that have been told of, by their numbers; one that was done twice stands there twice."""
        return sorted(step for node in self.nodes for step in steps(node.text))

    def beginnings(self) -> list[Beginning]:
        """The first line of each attempt."""
        found = (match for node in self.nodes for match in FROM.findall(node.text))
        return sorted(Beginning(int(step), int(world), int(count), why) for step, world, count, why in found)

    def last(self) -> int:
        return max((step.number for step in self.steps()), default=0)

    def until_step(self, number: int, timeout_s: float, world: int | Callable[[], int] | None = None) -> Step:
        """Wait for a step of at least that number, done by that many workers; a call tells how many, each time."""

        def found() -> Step | None:
            assert self.alive(), "every command has ended"
            size = world() if callable(world) else world
            good = (step for step in self.steps() if step.number >= number and size in (None, step.world))
            return next(good, None)

        try:
            step = until(found, timeout_s)
        except AssertionError as error:
            last = self.steps()[-1:]
            size = world() if callable(world) else world
            what = f"no step {number} of {size} workers, the last is {last}"
            raise AssertionError(f"{what}: {error}: {self.said()}") from None
        assert step is not None
        return step

    def advances(self, timeout_s: float, world: int | Callable[[], int] | None = None) -> Step:
        """Wait for two steps that are new, done by that many workers."""
        return self.until_step(self.last() + 2, timeout_s, world)

    def finish(self, timeout_s: float) -> list[int]:
        """Let the training end in order; the exit codes of those that took part in it."""
        nodes = self.alive()
        self.stop_file.touch()
        until(lambda: not any(node.is_alive for node in nodes), timeout_s)
        return [node.process.wait() for node in nodes]

    def said(self) -> str:
        """The last words of every node that runs, and of the last command of each host."""
        last = {node.host: node for node in self.nodes}
        return "\n".join(f"--- {node} ({node.process.poll()}): {node.last_words}" for node in last.values())


def c10d(endpoint: str, **settings: float | str) -> dict[str, str]:
    """Options of a rendezvous that is held by torch's own store, or by any host that has that address."""
    return rendezvous("c10d", endpoint, **settings)


def rendezvous(backend: str, endpoint: str, **settings: float | str) -> dict[str, str]:
    options = {"--rdzv-backend": backend, "--rdzv-endpoint": endpoint, "--rdzv-id": "job"}
    if settings:
        options["--rdzv-conf"] = ",".join(f"{name}={value}" for name, value in settings.items())
    return options


@contextlib.contextmanager
def store(host: Host, port: int = PORT) -> Iterator[str]:
    """A store of torch on a host of its own; its endpoint."""
    words = [sys.executable, "-c", STORE, host.name, str(port)]
    with _daemon(host, words):
        yield f"{host.name}:{port}"


@contextlib.contextmanager
def etcd(host: Host, port: int = 2379) -> Iterator[str]:
    """An etcd with both of its protocols; its endpoint."""
    peer = "http://127.0.0.1:2380"
    words = [
        "sh", "-c", 'exec "$@" 2>/dev/null', "etcd", "etcd", "--enable-v2", "--data-dir", "/run/etcd-data",
        "--listen-client-urls", f"http://0.0.0.0:{port}",
        "--advertise-client-urls", f"http://{host.name}:{port}",
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"default={peer}",
    ]  # fmt: skip
    check = [
        sys.executable,
        "-c",
        f"import urllib.request as u; u.urlopen('http://{host.name}:{port}/health')",
    ]
    host.run(["rm", "-rf", "/run/etcd-data"])
    with host.start(words, stdin=subprocess.DEVNULL) as process:
        try:
            until(lambda: host.run(check).returncode == 0, 20)
            yield f"{host.name}:{port}"
        finally:
            process.kill()
            process.wait(10)


@contextlib.contextmanager
def _daemon(host: Host, words: Sequence[str]) -> Iterator[HostProcess]:
    with host.start(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n", f"{words} did not come up on {host.name}"
            yield process
        finally:
            process.kill()
            process.wait(10)


def steps(text: str) -> list[Step]:
    """Those that a text tells of."""
    return [
        Step(int(number), int(world), int(restarts), reason, float(loss))
        for number, world, restarts, reason, loss in STEP.findall(text)
    ]


def _parent(pid: int) -> int:
    found = processes.find(pid)
    return found.ppid if found else 0


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def _value(pid: int, name: str) -> str | None:
    try:
        return processes.environment_value(pid, name)
    except OSError:  # it has ended
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
