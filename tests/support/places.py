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

TELLS = """
words="$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE"
echo "$words $ROLE_NAME:$ROLE_RANK/$ROLE_WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $DSL_RESTART_REASON" >> "$1/seen"
trap 'exit 0' TERM
"""
WAITS = """
until [ -e "$1/end" ]; do
  [ ! -e "$1/fail.$RANK.$ATTEMPT" ] || exit 7
  sleep 0.02
done
"""


class Commands:
    """Commands of one job, whose workers tell of their place, and run until they are told to fail, or all to end."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack, tells: str, attempt: str) -> None:
        self.directory = directory
        self._stack = stack
        self.program = directory / "worker"
        self.program.write_text(f"#!/bin/sh\n{tells}{WAITS.replace('ATTEMPT', attempt)}")
        self.program.chmod(0o755)

    def run(self, name: str, line: Sequence[str], environ: Mapping[str, str] | None = None) -> Job:
        """Start one in a directory of this name."""
        return self._stack.enter_context(running(line, self.directory / name, environ=environ))

    def lines(self) -> list[str]:
        """What workers have told so far."""
        return complete_lines(self.directory / "seen")

    def fail(self, rank: int, attempt: int | str) -> None:
        """Make a worker fail."""
        (self.directory / f"fail.{rank}.{attempt}").touch()

    def end(self) -> None:
        """Make all workers end."""
        (self.directory / "end").touch()


class Nodes(Commands):
    """Those whose places are fixed."""

    def __init__(self, dslrun: Path, directory: Path, stack: contextlib.ExitStack) -> None:
        super().__init__(directory, stack, TELLS, "TORCHELASTIC_RESTART_COUNT")
        self._dslrun = dslrun
        self.bin = dslrun.parent
        self.port = free_port()

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
        words = program or ("--no-python", str(self.program), str(self.directory))
        jobs = []
        for rank, options in reversed(list(enumerate(each, first))):
            line = [str(self._dslrun), f"--nnodes={count or len(each)}", f"--node-rank={rank}"]
            line += [f"--master-addr={address}", f"--master-port={self.port}", *options.split(), *words]
            jobs.append(self.run(f"node{rank}", line, environ))
        return jobs[::-1]

    def seen(self, count: int) -> list[str]:
        """What so many workers have told, in no order."""
        until(lambda: len(self.lines()) >= count, timeout_s=20)
        return sorted(self.lines())


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
