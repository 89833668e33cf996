"""Random attempts of this user's processes in other namespaces: no secret seen, no command run, nobody signalled."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.bystanders import Bystanders
from tests.support.command import dsl_line
from tests.support.jobs import Job, running
from tests.support.namespaces import are_allowed
from tests.support.places import free_port
from tests.support.strangers import ELSEWHERE, Stranger, Victim, stranger

from dsl.model.codec import to_line
from dsl.model.observation import Follow, JobView, Look, SignalRank
from dsl.view.jobs import running_jobs

pytestmark = [pytest.mark.guarantee("G1"), pytest.mark.timeout(1800)]

ATTEMPTS = [12, pytest.param(200, marks=pytest.mark.stress)]
SECRET = "hf_secret_of_the_victim"
READY_S = 60.0


class Siege:
    """Strangers of all kinds that this machine allows, and what they got."""

    def __init__(self, seed: str, stack: contextlib.ExitStack, folder: Path) -> None:
        self.dice = random.Random(seed)
        self.marker = folder / "ran"
        self._stack = stack
        self._strangers: dict[str, Stranger] = {}
        self.tried: Counter[str] = Counter()
        self._kinds = [kind for kind, (words, _) in ELSEWHERE.items() if are_allowed(*words.split())]
        if not self._kinds:
            pytest.skip("needs namespaces that are refused here: unshare")

    def stranger(self) -> Stranger:
        """One of any kind."""
        kind = self.dice.choice(self._kinds)
        self.tried[kind] += 1
        if kind not in self._strangers:
            self._strangers[kind] = self._stack.enter_context(stranger(kind))
        return self._strangers[kind]

    def words(self, *sayings: str) -> str:
        """One of these, whole or in part, or noise."""
        saying = self.dice.choice(sayings)
        noise = self.dice.randbytes(self.dice.randrange(1, 300)).decode("latin-1")
        return self.dice.choice([saying, saying, saying[: self.dice.randrange(len(saying))], noise])

    def call(self, path: Path, request: str) -> list[str]:
        """Call a warm server with the request of another job, changed or not, and order a command."""
        command = ["/bin/sh", "-c", f"touch {self.marker}"]
        seed = self.dice.randrange(1 << 30)
        return self.stranger().tries("call_warm", path=str(path), request=request, command=command, seed=seed)


@pytest.fixture
def siege(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Siege]:
    with contextlib.ExitStack() as stack:
        siege = Siege(request.node.name, stack, tmp_path)
        yield siege
    print(f"{siege.tried.total()} attempts, by what the stranger had of its own:", dict(siege.tried))
    assert not siege.marker.exists()


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sockets of jobs lie in a directory of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", SECRET)


def noting(testchild: Path, folder: Path) -> list[str]:
    """A worker that notes each signal."""
    words = ["catch", "ALL", "trace", str(folder / "trace")]
    return [str(testchild), *words, "note", str(folder / "ready"), "%r %p", "pause"]


@contextlib.contextmanager
def unharmed(job: Job, bystanders: Bystanders) -> Iterator[None]:
    """During the ``with`` block nobody of the job ends or hears a signal, and no bystander either."""
    ranks = job.ready(1, READY_S)
    before = [processes.find(pid) for pid in (job.guard, *processes.children(job.guard), *ranks.values())]
    yield
    assert all(one is not None and processes.alive(one) for one in before), job.stderr()
    assert job.caught() == []
    assert bystanders.harm() == []


def besiege(attempts: int, *ways: Callable[[], list[str]], dice: random.Random) -> None:
    """Try these ways in turns that dice decide. No answer tells a secret."""
    for _ in range(attempts):
        got = "".join(dice.choice(ways)())
        assert SECRET not in got
        assert Victim.PLAIN not in got


@pytest.mark.parametrize("attempts", ATTEMPTS)
def test_a_warm_server_is_not_taken_for_another_and_takes_nobody_for_its_job(
    attempts: int, siege: Siege, bystanders: Bystanders, tmp_path: Path
) -> None:
    with Victim(tmp_path, SECRET) as victim:
        request = victim.stolen_request()
        targets = ["caller", "1", "", *[str(one.pid) for one in bystanders.members]]

        def ready() -> list[Path]:
            return [Path(folder, name) for folder, name in victim.place.sockets() if name.endswith(".warm")]

        def call() -> list[str]:
            got = siege.call(siege.dice.choice(until(ready)), request)
            assert got == []
            return got

        def pose() -> list[str]:
            path = siege.dice.choice(until(ready))
            if siege.dice.random() < 0.5:  # beside the server, which is called next
                path = path.with_name(f"{path.name.partition('-')[0]}-00000000.warm")
            names = siege.dice.choice(targets)
            says = siege.words("\1", "\0\6\0\0\0") if siege.dice.random() < 0.3 else ""
            with siege.stranger().posing(path, says=says, names=names) as got:
                victim.runs()
            assert got == []
            return got

        besiege(attempts, call, pose, dice=siege.dice)
        assert victim.place.told()
    assert bystanders.harm() == []


@pytest.mark.parametrize("attempts", ATTEMPTS)
def test_a_branch_and_its_worker_are_out_of_reach(
    attempts: int, siege: Siege, bystanders: Bystanders, tmp_path: Path
) -> None:
    with Victim(tmp_path, SECRET) as victim:
        request, server = victim.stolen_request(), victim.socket
        with victim.holding():
            [branch] = victim.place.branches(victim.place.told()[0].pid)
            besiege(attempts, lambda: siege.call(server, request), dice=siege.dice)
            assert processes.alive(branch)
    assert bystanders.harm() == []


@pytest.mark.parametrize("attempts", ATTEMPTS)
@pytest.mark.usefixtures("alone")
def test_the_socket_of_a_job_serves_no_stranger_and_no_stranger_is_taken_for_a_job(
    attempts: int, siege: Siege, bystanders: Bystanders, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    false = to_line(JobView("1", "dsl", ("false.py",), 4242, "/", "n0", 1, 0, 0, 1, 1)).decode()

    def seen() -> list[tuple[int, Path]]:
        jobs = running_jobs()
        for one in jobs:
            one.close()
        return [(one.view.pid, Path(one.path)) for one in jobs]

    with running(dsl_line(dsl_command, 1, noting(testchild, tmp_path)), tmp_path) as job:
        [rank] = job.ready(1).values()
        [(pid, path)] = until(seen)
        assert pid == job.guard

        def call() -> list[str]:
            signal_rank = SignalRank(2, 0, 0, rank, siege.dice.randrange(1, 65))
            questions = [to_line(one).decode() for one in (Look(1, "status"), signal_rank, Follow())]
            got = siege.stranger().tries("call_job", path=str(path), says=siege.words(*questions))
            assert all(one.startswith('{"NoAnswer":') for one in got)
            return got

        def pose() -> list[str]:
            with siege.stranger().posing(
                path.with_name("4242-0.sock"), is_job=True, says=siege.words(false)
            ) as got:
                assert seen() == [(pid, path)]
            assert got == []
            return got

        with unharmed(job, bystanders):
            besiege(attempts, call, pose, dice=siege.dice)


@pytest.mark.parametrize("attempts", ATTEMPTS)
@pytest.mark.usefixtures("alone")
def test_the_metrics_tell_no_secret_and_take_no_order(
    attempts: int, siege: Siege, bystanders: Bystanders, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    port = free_port()
    options = ["--metrics", str(port)]
    program = noting(testchild, tmp_path)
    with running(dsl_line(dsl_command, 1, program, None, *options), tmp_path) as job:
        lines = [
            "GET /metrics HTTP/1.0\r\n\r\n",
            "POST /metrics HTTP/1.1\r\n\r\nHF_TOKEN",
            "GET /../environ HTTP/1.0\n\n",
        ]
        with unharmed(job, bystanders):
            heard: list[str] = []

            def call() -> list[str]:
                got = siege.stranger().tries("call_port", port=port, says=siege.words(*lines))
                heard.extend(got)
                return got

            besiege(attempts, call, dice=siege.dice)
            assert any("dsl_" in one for one in heard)


@pytest.mark.torch
@pytest.mark.parametrize("attempts", ATTEMPTS)
@pytest.mark.usefixtures("alone")
def test_delegates_have_no_door_but_the_store_of_torch(
    attempts: int, siege: Siege, bystanders: Bystanders, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    port = free_port()
    words = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    words += ["--rdzv-conf=last_call_timeout=1", "--nproc-per-node=1", "--no-python"]
    line = [str(dsl_command.with_name("dslrun")), *words, *noting(testchild, tmp_path)]
    with running(line, tmp_path) as job, unharmed(job, bystanders):
        # The one for views, once the job has settled.
        until(lambda: [Path(one).suffix for one in named_sockets(job.guard)] == [".sock"])
        orders = [to_line(Follow()).decode(), "GET / HTTP/1.0\r\n\r\n", "\x00\xce\xf7\x85\x3c" + "\0" * 40]
        besiege(
            attempts,
            lambda: siege.stranger().tries("call_port", port=port, says=siege.words(*orders)),
            dice=siege.dice,
        )


def named_sockets(guard: int) -> list[str]:
    """Paths and abstract names of the unix sockets that children of a command have open."""
    own = set()
    for pid in processes.children(guard):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(str(fd.readlink()).removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if row[6] in own and len(row) > 7]
