"""Where the process table cannot be read, what may be left is said, and never passes for success."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.users import as_ordinary_user
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.group import Group
from tests.support.jobs import Helpers, complete_lines, running
from tests.support.namespaces import unshared

from dsl.report.verdict import survivor

pytestmark = [pytest.mark.root, pytest.mark.guarantee("G1", "G2")]

COVER = "mount -t tmpfs -o size=64k none /proc"
MAY_BE_LEFT = "processes of the job may be left: /proc cannot be read, so nobody can look"


def _covered(line: Sequence[str], script: str = COVER) -> list[str]:
    """The command in a mount namespace of its own, without a usable /proc."""
    return [*unshared("--mount"), "/bin/sh", "-c", f'{script} && exec "$@"', "sh", *line]


def _deaf(testchild: Path, ready: Path) -> list[str]:
    deaf = ["ignore", "TERM,INT,HUP", "note", str(ready), "%p", "pause"]
    return [str(testchild), "daemon", "[", *deaf, "]", "wait", str(ready)]


def test_a_job_that_leaves_nothing_needs_no_process_table(tmp_path: Path, helpers: Helpers) -> None:
    with running(_covered(helpers.line(2, "exit 0")), tmp_path) as job:
        assert job.wait() == 0, job.stderr()
        assert job.stderr() == ""


def test_a_survivor_that_cannot_be_looked_for_is_no_success(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The kernel says that a child lives, and not which one."""
    line = dsl_line(dsl_command, 1, [*_deaf(testchild, tmp_path / "ready"), "exit", "0"])
    with running(_covered(line), tmp_path / "job") as job:
        assert job.wait() == 1, job.stderr()
        assert job.stderr() == f"dsl: {MAY_BE_LEFT}\n"


def test_no_attempt_starts_beside_what_may_be_left(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The group before must be gone."""
    words = [*_deaf(testchild, tmp_path / "ready"), "note", str(tmp_path / "attempts"), "%p", "exit", "7"]
    line = [str(dsl_command.with_name("dslrun")), "--no-python", "--max-restarts", "3", *words]
    with running(_covered(line), tmp_path / "job") as job:
        assert job.wait() == 7, job.stderr()
        assert job.stderr().count(MAY_BE_LEFT) == 1
    assert len(complete_lines(tmp_path / "attempts")) == 1


def test_what_stays_in_the_group_of_its_worker_is_ended_without_a_process_table(
    tmp_path: Path, helpers: Helpers
) -> None:
    """Of a group the kernel says whether a child of ours is in it."""
    ready = tmp_path / "ready"
    left = ["child", "[", "ignore", "TERM", "note", str(ready), "%p", "pause", "]", "wait", str(ready)]
    with running(_covered(helpers.line(1, [*left, "exit", "0"], 0.2)), tmp_path / "job") as job:
        assert job.wait() == 0, job.stderr()
        assert job.left() == []


@pytest.mark.engine
def test_a_process_table_that_is_covered_later_is_still_read(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The one that was there at the start stays open."""
    cover = ["child", "[", "exec", "/bin/sh", "-c", f"{COVER} && echo > {tmp_path}/covered", "]"]
    words = [*_deaf(testchild, tmp_path / "ready"), *cover, "wait", str(tmp_path / "covered"), "exit", "0"]
    line = dsl_line(dsl_command, 1, words, 0.2)
    with running(_covered(line, "true"), tmp_path / "job") as job:
        assert job.wait() == 0, job.stderr()
        assert job.left() == []


LIBRARY = """
import os, sys
os.environ["DSL_ENGINE_DISABLE"] = "cgroup"
from dsl import Ended, LaunchSpec, Supervisor, WorkerSpec
supervisor = Supervisor()
supervisor.start(LaunchSpec([WorkerSpec(sys.argv[1:])], grace_s=0.2))
events = []
while not (events and isinstance(events[-1], Ended)):
    events += supervisor.wait(1)
print(events[-1].survivors)
supervisor.close()
"""


def test_a_library_that_cannot_look_says_so(testchild: Path, tmp_path: Path) -> None:
    """Neither a process table nor a cgroup, and no subreaper."""
    words = [*_deaf(testchild, tmp_path / "ready"), "exit", "0"]
    with running(_covered([sys.executable, "-c", LIBRARY, *words]), tmp_path / "job") as job:
        assert job.wait() == 0, job.stderr()
        assert job.stdout() == "((0, '?', '?', None, 2),)\n"


def _set_uid_copy(testchild: Path, directory: Path) -> Path:
    """The helper program as one that becomes root, whoever starts it."""
    program = directory / "as-root"
    program.write_bytes(testchild.read_bytes())
    program.chmod(0o4755)
    return program


@pytest.mark.parametrize("script", ["true", "mount -t proc -o hidepid=2 none /proc"], ids=["seen", "hidden"])
def test_a_process_of_root_is_said_to_be_none_of_ours_to_end(
    script: str, testchild: Path, tmp_path: Path
) -> None:
    """A worker of an ordinary user starts something through sudo, which may be hidden from that user, too."""
    notes = tmp_path / "notes"
    notes.mkdir()
    notes.chmod(0o777)
    ready = notes / "ready"
    program = [str(_set_uid_copy(testchild, tmp_path)), "daemon", "[", "setuid", "0"]
    words = [*program, "note", str(ready), "%p", "pause", "]", "wait", str(ready), "exit", "0"]
    options = ["--no_python", "--no_local_rank", "--num_gpus", "1", "--grace", "0.2"]
    line = as_ordinary_user([*options, *words], tmp_path)
    before_s = _processor_s()
    with running(_covered(line, script), tmp_path / "job") as job:
        (left,) = [processes.find(int(line)) for line in until(lambda: complete_lines(ready))]
        assert job.wait() == 1, job.stderr()
        assert left is not None
        assert processes.alive(left)
        why = f"process {left.pid} (as-root, state S) is left: no permission to end it"
        if script != "true":
            why = "processes of the job may be left: /proc does not show them to this user"
        assert job.stderr() == f"dsl: {why}\n"
        assert time.monotonic() - job.begin < 10
    assert _processor_s() - before_s < 2


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def freeze() -> Iterator[Callable[[int], None]]:
    """Freezes a process as only version 1 of cgroups does it: not even SIGKILL ends it before it is thawed."""
    group = FREEZER / f"dsl-tests-{uuid.uuid4().hex[:12]}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs a kernel with a freezer of cgroup v1")
    state = group / "freezer.state"

    frozen: list[int] = []

    def carry_out(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        state.write_text("FROZEN")
        until(lambda: state.read_text() == "FROZEN\n")
        frozen.append(pid)

    yield carry_out
    state.write_text("THAWED")
    for pid in frozen:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)  # the engine has given it up
    deadline_s = time.monotonic() + 10
    while group.exists() and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            group.rmdir()


def test_what_would_not_die_is_described_with_where_it_waits(
    testchild: Path, freeze: Callable[[int], None]
) -> None:
    with Group([[str(testchild), "pause"]]) as group:
        (pid,) = group.all_started().values()
        until(lambda: Path(f"/proc/{pid}/wchan").read_text() not in {"", "0"})
        freeze(pid)
        wchan = Path(f"/proc/{pid}/wchan").read_text()
        group.supervisor.kill()
        ended = group.finish(timeout_s=20.0)
    assert ended.survivors == ((pid, "D", "dsl-testchild", wchan, None),)
    assert ended.to_dict()["survivors"] == [
        {"pid": pid, "state": "D", "name": "dsl-testchild", "wchan": wchan, "errno": None}
    ]
    assert survivor(*ended.survivors[0]).endswith(f" did not die of SIGKILL (waits in {wchan})")
