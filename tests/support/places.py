"""A job whose nodes have fixed places, as several commands on this machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.kit.waiting import until
from tests.support.jobs import Job, complete_lines, running

from dsl import __version__
from dsl.agent.joining import job_key
from dsl.control.hub import Hub, Link, connect
from dsl.control.messages import Hello

KEY = "a key that the nodes of a test share"

# Tells of its place, and runs until it is told to fail, or all are told to end.
WORKER = """#!/bin/sh
words="$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE"
echo "$words $ROLE_NAME:$ROLE_RANK/$ROLE_WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $DSL_RESTART_REASON" >> "$1/seen"
trap 'exit 0' TERM
until [ -e "$1/end" ]; do
  [ ! -e "$1/fail.$RANK.$TORCHELASTIC_RESTART_COUNT" ] || exit 7
  sleep 0.02
done
"""


class Nodes:
    """Commands that form one job, each with a directory of its own."""

    def __init__(self, dslrun: Path, directory: Path, stack: contextlib.ExitStack) -> None:
        self._dslrun = dslrun
        self.bin = dslrun.parent
        self._directory = directory
        self._stack = stack
        self.port = free_port()
        self.program = directory / "worker"
        self.program.write_text(WORKER)
        self.program.chmod(0o755)

    def start(
        self,
        *each: str,
        count: int = 0,
        first: int = 0,
        address: str = "127.0.0.1",
        program: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> list[Job]:
        """Start nodes from the ``first`` on, each with these options, the last one first."""
        words = program or ("--no-python", str(self.program), str(self._directory))
        jobs = []
        for rank, options in reversed(list(enumerate(each, first))):
            line = [str(self._dslrun), f"--nnodes={count or len(each)}", f"--node-rank={rank}"]
            line += [f"--master-addr={address}", f"--master-port={self.port}", *options.split(), *words]
            jobs.append(
                self._stack.enter_context(running(line, self._directory / f"node{rank}", environ=environ))
            )
        return jobs[::-1]

    def seen(self, count: int) -> list[str]:
        """What so many workers have told, in no order."""
        until(lambda: len(self._lines()) >= count, timeout_s=20)
        return sorted(self._lines())

    def _lines(self) -> list[str]:
        return complete_lines(self._directory / "seen")

    def fail(self, rank: int, restarts: int) -> None:
        """Make a worker fail."""
        (self._directory / f"fail.{rank}.{restarts}").touch()

    def end(self) -> None:
        """Make all workers end."""
        (self._directory / "end").touch()


@contextlib.contextmanager
def caller(port: int, hello: Hello, key: str = "", run_id: str = "none") -> Iterator[Link]:
    """The link of an agent that has greeted node 0 of a job at a port."""
    secret, is_keyed = job_key({"DSL_JOB_KEY": key} if key else {}, run_id)
    hub = Hub(20.0)
    try:
        link = hub.add(connect([f"127.0.0.1:{port}"], secret, hello.place, 20, keyed=is_keyed), "node 0")
        link.send_now(hello)
        yield link
    finally:
        hub.close(0)


def a_hello(place: int = 1, nodes: int = 2, host: str = "h", **fields: object) -> Hello:
    """What a node says about itself."""
    made = {"workers": 1, "role": "default", "run_id": "none", "nodes": nodes, **fields}
    return Hello(str(made.pop("version", __version__)), place, host, 1, **made)  # type: ignore[arg-type]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
