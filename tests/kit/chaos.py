"""Random harm to an elastic training on several hosts, from a seed: the same for `dslrun` and torchrun.

    python -m tests.kit.chaos --command .venv/bin/torchrun --events 20 --seed 1

After each event the training has to go on, with as many nodes as are there, whenever that is enough of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.kit.cluster import Cluster, Host
from tests.kit.elastic import Node, Training, etcd, rendezvous, store

LEAST, MOST = 2, 4
SETTINGS = {"last_call_timeout": 1, "keep_alive_interval": 1, "read_timeout": 5, "join_timeout": 300}
"""Those of torch's rendezvous: its defaults take half a minute to begin, and as long to miss a node."""
GRACE_S = 2.0
PACE_S = 0.05
CUT_S = 6.0
"""How long a cable is out at least: longer than the others take to miss the host."""
START_S = 120.0
"""What the first steps may take: some imports of torch on a cold disk."""


class Harm(NamedTuple):
    """What one event has come to."""

    number: int
    what: str
    nodes: int
    """How many commands run behind it on hosts that the others can reach."""
    recovered_s: float | None
    """Until the first new step of as many workers as there are nodes; None where too few are there."""
    failure: str
    """Empty, or why the training did not go on."""


class Chaos:
    """A training, and what happens to it."""

    def __init__(
        self, training: Training, hosts: list[Host], command: str, seed: int, *, bound_s: float = 60.0
    ) -> None:
        self.training = training
        self.hosts = hosts
        self.command = command
        self.bound_s = bound_s
        self.random = random.Random(seed)
        self.harms: list[Harm] = []
        self.deserters: list[str] = []
        """Commands that ended although nobody had asked, on hosts that nothing had happened to."""
        self._known: set[Node] = set()

    def begin(self) -> None:
        for host in self.hosts:
            self.training.join(host, self.command)
        self.training.advances(START_S, world=len(self.hosts))

    def run(self, events: int, tell: Callable[[Harm], None] = lambda _: None) -> None:
        """Let things happen, one after the other."""
        for number in range(events):
            harm = self._once(number)
            self.harms.append(harm)
            tell(harm)

    def settle(self) -> None:
        """Bring all hosts back and wait until all take part."""
        for host in self.hosts:
            self._mend(host)
        self.training.advances(self.bound_s, world=len(self.hosts))

    def present(self) -> list[Node]:
        """Commands that run on hosts that can be reached."""
        return [node for node in self.training.alive() if node.host.is_plugged]

    def _once(self, number: int) -> Harm:
        what, act = self._choose()
        self._note_deserters()
        try:
            act()
            seconds = self._recovers()
        except AssertionError as error:
            return Harm(number, what, len(self.present()), None, str(error))
        finally:
            self._note_deserters()
        return Harm(number, what, len(self.present()), seconds, "")

    def _recovers(self) -> float | None:
        """Wait for steps of as many workers as there are nodes. AssertionError: none came.

        A node without its delegate is still there when it loses its conductor, and ends a moment later.
        """
        begin_s = time.monotonic()
        if len(self.present()) < LEAST:
            return None
        self.training.advances(self.bound_s, world=lambda: len(self.present()))
        return time.monotonic() - begin_s

    def _choose(self) -> tuple[str, Callable[[], None]]:
        """Who is hit by what. Fewer than enough nodes are allowed for one event, then somebody comes."""
        present = self.present()
        away = [host for host in self.hosts if all(node.host is not host for node in present)]
        if len(present) < LEAST or (away and self.random.random() < len(away) / len(self.hosts)):
            host = self.random.choice(away)
            return f"{host} comes", lambda: self._mend(host)
        node = self.random.choice(present)
        kinds = ["worker", "leave", "agent", "guard", "delegate", "crash", "cable"]
        kind = self.random.choice(kinds)
        return f"{node.host} {kind}", lambda: self._harm(node, kind)

    def _harm(self, node: Node, kind: str) -> None:
        if kind == "worker":
            workers = node.workers()
            if workers:
                _kill(self.random.choice(workers))
            return
        node.is_told = True
        if kind == "leave":
            node.process.send_signal(signal.SIGTERM)
        elif kind == "agent":
            _kill(node.agent())
        elif kind == "guard":
            _kill(node.guard())
        elif kind == "delegate":
            _kill(node.delegate())  # its node takes part as long as its conductor does
        elif kind == "crash":
            node.host.crash()
        else:
            node.host.unplug()
            time.sleep(CUT_S)  # a cut is a time: nothing tells that it has been long enough
        if kind not in ("cable", "delegate"):
            node.process.wait(self.bound_s)

    def _mend(self, host: Host) -> None:
        """Whatever has happened to it: it is up, has its cable, and takes part."""
        if not host.is_up:
            host.boot()
        if not host.is_plugged:
            host.plug()
            self._back(host)
        node = self.training.on(host)
        if node is None:
            self.training.join(host, self.command)

    def _back(self, host: Host) -> None:
        """A command that was cut off joins again, or ends: then another is started, as a scheduler does."""
        node = self.training.on(host)
        if node is not None:
            with contextlib.suppress(Exception):
                node.process.wait(CUT_S)

    def _note_deserters(self) -> None:
        for node in self.training.nodes:
            if not node.is_alive and not node.is_told and node not in self._known:
                self._known.add(node)
                self.deserters.append(f"{node} {node.process.poll()}: {node.last_words}")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def grace_option() -> dict[str, str]:
    """How long stopped workers have; both commands know the word."""
    return {"--shutdown-timeout": f"{GRACE_S:g}", "--max-restarts": "1000"}


def chaos(
    cluster: Cluster, folder: Path, endpoint: str, command: str, seed: int, backend: str = "c10d"
) -> Chaos:
    """A training on all hosts but the last, which holds the store."""
    options = {**rendezvous(backend, endpoint, **SETTINGS), **grace_option()}
    training = Training(cluster, folder, nodes=f"{LEAST}:{MOST}", options=options)
    training.script = ["--steps", "1000000000", "--pace", str(PACE_S)]
    return Chaos(training, cluster.hosts[:-1], command, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description="random harm to an elastic training on four hosts")
    parser.add_argument("--command", type=Path, default=Path(sys.executable).with_name("dslrun"))
    parser.add_argument("--backend", choices=["c10d", "etcd-v2"], default="c10d")
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    command = str(options.command.absolute())
    with Cluster(MOST + 1) as cluster, tempfile.TemporaryDirectory() as folder:
        with (store if options.backend == "c10d" else etcd)(cluster[-1]) as endpoint:
            job = chaos(cluster, Path(folder), endpoint, command, options.seed, options.backend)
            with job.training:
                failed = _tell(job, options.events)
        print("left:", cluster.leftovers())
    return failed


def _tell(job: Chaos, events: int) -> int:
    """Run it to its end and print what comes of it; how many events the training did not survive."""
    job.begin()
    job.run(events, lambda harm: print(_line(harm), flush=True))
    try:
        job.settle()
        print("codes:", job.training.finish(60))
    except AssertionError as error:
        print("never ended:", error)
    for one in job.deserters:
        print("deserted:", one)
    failed = sum(bool(harm.failure) for harm in job.harms)
    print(f"{failed} of {len(job.harms)} events were not survived")
    return failed


def _line(harm: Harm) -> str:
    seconds = "-" if harm.recovered_s is None else f"{harm.recovered_s:.1f} s"
    return f"{harm.number:3} {harm.what:16} {harm.nodes} nodes  {seconds}  {harm.failure[:3000]}"


if __name__ == "__main__":
    sys.exit(main())
