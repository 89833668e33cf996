"""On several hosts each byte of words and variables arrives in every rank, and no host shows a secret."""

from __future__ import annotations

import ast
import contextlib
import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.cluster import MPI, Cluster
from tests.support.backends import Backend

from dsl.plan.remote import RANK_LAUNCHERS

pytestmark = pytest.mark.guarantee("G5")

HOSTFILE = "node1 slots=1\nnode0 slots=1\nnode2 slots=2\n"
RANKS = 4
COUNT = 500
"""Words of a job, and as many variables."""

TAKE = """
import os, sys
assert b"DSL_CONTROL_KEY" not in open("/proc/self/environ", "rb").read(), "a worker has the key"
with open("got" + os.environ["RANK"], "xb") as file:
    file.write(ascii([os.fsencode(word) for word in sys.argv[1:]]).encode() + b"\\n")
    file.write(ascii({k: v for k, v in os.environb.items() if k.startswith((b"UCX_T", b"FILE_T"))}).encode())
"""
PIECES = (
    *(bytes([code]) for code in b"'\"\\\n\r\t $`;&|<>()*?[]{}~#!%^,=:@+-/.aZ0"),
    *(b"--", b"$HOME", b"${PATH}", b"$(id)", b"`id`", b"$'x'", b"!!", b"%n", b"%h", b"%%", b"\\n", b"\\\n"),
    *(b"EOF", b" : ", b'{"a": [1, "b c"], "d": null}', b"{'a': 1}", b"-x", b"--help", b"A=1", b"word"),
    *(b"&&", b"||", b"2>&1", b"\x01", b"\x7f", b"\x1b[0m", b"\xff\xfe", b"\xc3(", b"\x80"),
    *("é".encode(), "漢字".encode(), "🙂".encode(), "\u2028".encode()),
)


def odd(chance: random.Random) -> bytes:
    """Up to six pieces, or none."""
    return b"".join(chance.choices(PIECES, k=chance.randrange(7)))


class Watch(threading.Thread):
    """Reads the command line of every process on every host, again and again."""

    def __init__(self, hosts: Cluster) -> None:
        super().__init__()
        self.lines: set[bytes] = set()
        self.keys: set[bytes] = set()
        """Values of DSL_CONTROL_KEY that some process has in its environment."""
        self.rounds = 0
        self._folders = [f"{host.root}/proc" for host in hosts]
        self._over = threading.Event()

    def run(self) -> None:
        """Until `end`."""
        while not self._over.wait(0.005):
            for folder in self._folders:
                for name in os.listdir(folder):
                    if name.isdecimal():
                        self._look(f"{folder}/{name}")
            self.rounds += 1

    def _look(self, process: str) -> None:
        with contextlib.suppress(OSError):  # it has ended
            with open(f"{process}/cmdline", "rb") as file:
                self.lines.add(file.read())
            with open(f"{process}/environ", "rb") as file:
                self.keys.update(re.findall(rb"(?:^|\0)DSL_CONTROL_KEY=(\w{64})\0", file.read()))

    def end(self) -> None:
        """Stop."""
        self._over.set()
        self.join()


@contextlib.contextmanager
def watched(hosts: Cluster) -> Iterator[Watch]:
    watch = Watch(hosts)
    watch.start()
    try:
        yield watch
    finally:
        watch.end()


def in_double_quotes(value: bytes) -> bytes:
    return b'"' + re.sub(rb'(["$\\])', rb"\\\1", value) + b'"'


def check(hosts: Cluster, backend: Backend, dsl: Path, folder: Path, seed: int) -> None:
    """One job with `COUNT` odd words, and as many odd variables: from the environment and from a file."""
    chance = random.Random(seed)
    folder.mkdir()
    words = [odd(chance) for _ in range(COUNT - 2)] + [b"", b"x" * 99 * 1024 + b"'\"\n"]
    variables = {b"UCX_T%d" % at: odd(chance) for at in range(COUNT // 2 - 1)}
    variables[b"UCX_TLONG"] = b"y" * 99 * 1024 + b"'\"\n"
    in_file = {b"FILE_T%d" % at: re.sub(rb"[\r\n]", b"", odd(chance)) for at in range(COUNT // 2)}
    secret = f"s3cret{chance.getrandbits(64):x}".encode()
    variables[b"UCX_TOKEN"] = secret
    (folder / "take.py").write_text(TAKE, encoding="utf-8")
    (folder / "hosts").write_text(HOSTFILE, encoding="utf-8")
    lines = [name + b"=" + in_double_quotes(value) for name, value in in_file.items()]
    (folder / ".deepspeed_env").write_bytes(b"\n".join(lines))

    own = ["--no_local_rank", "--log_level=warning", "take.py"]
    command: list[str | Path] = [dsl, "-H", "hosts", *backend.words, *own]
    env = {"DS_ACCELERATOR": "cpu", **backend.env}
    env |= {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
    with watched(hosts) as watch:
        result = hosts[0].run([*command, *[os.fsdecode(word) for word in words]], env=env, cwd=folder)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    for rank in range(RANKS):
        got_words, got_variables = map(ast.literal_eval, (folder / f"got{rank}").read_text().split("\n"))
        assert got_words == words
        assert got_variables == {**variables, **in_file}

    assert watch.rounds > 3
    assert any(b"take.py" in line for line in watch.lines)
    assert not [line for line in watch.lines if secret in line]
    if backend.launcher in RANK_LAUNCHERS:
        assert watch.keys
    assert not [line for line in watch.lines for key in watch.keys if key in line]


def test_words_and_variables_arrive_byte_for_byte(
    hosts: Cluster, backend: Backend, dsl_command: Path, tmp_path: Path
) -> None:
    check(hosts, backend, dsl_command, tmp_path / "job", 1)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_ten_thousand_words_and_variables_arrive_byte_for_byte(
    hosts: Cluster, backend: Backend, dsl_command: Path, tmp_path: Path
) -> None:
    for seed in range(10):
        check(hosts, backend, dsl_command, tmp_path / f"job{seed}", seed)


@pytest.mark.stress
@pytest.mark.parametrize("backend", [*MPI, "slurm"], indirect=True)
def test_one_agent_a_node_is_given_the_same(
    hosts: Cluster, backend: Backend, dsl_command: Path, tmp_path: Path
) -> None:
    per_node = backend._replace(options=("--one-agent-per-node",))
    check(hosts, per_node, dsl_command, tmp_path / "job", 2)
