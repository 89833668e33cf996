"""Spares of a job whose nodes have fixed places, as several commands on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.jobs import Job, complete_lines
from tests.support.places import WAITS, Nodes
from tests.support.recorded import recorded

TELLS = """#!/bin/sh
echo "$RANK $PLACE $TORCHELASTIC_RESTART_COUNT $DSL_RESTART_REASON" >> "$1/seen"
"""
HOST = os.uname().nodename


class Table:
    """The commands of one job, by their node ranks."""

    def __init__(self, nodes: Nodes, directory: Path, count: int) -> None:
        self._nodes, self._count = nodes, count
        self._directory = directory
        self._program = directory / "teller"
        self._program.write_text(TELLS + WAITS.replace("ATTEMPT", "TORCHELASTIC_RESTART_COUNT"))
        self._program.chmod(0o755)
        self.jobs: dict[int, Job] = {}

    def start(self, *places: int, options: str = "--max-restarts=2") -> None:
        """Start nodes. The job has one spare."""
        words = ("--no-python", str(self._program), str(self._directory))
        for place in places:
            self.jobs[place] = self._nodes.start(
                f"--spares=1 --grace=2 {options.format(place)}",
                count=self._count,
                first=place,
                program=words,
                environ={"PLACE": str(place)},
            )[0]

    def places(self, attempt: int) -> list[str]:
        """The node of each rank in an attempt, then the restarts so far and the reason."""
        first, last = attempt * self._count, (attempt + 1) * self._count

        def found() -> list[str]:
            return complete_lines(self._directory / "seen")

        until(lambda: len(found()) >= last, timeout_s=30)
        ranks = sorted(found()[first:last])
        assert [one.split()[0] for one in ranks] == [str(rank) for rank in range(self._count)]
        (how,) = {one.split(maxsplit=2)[2] for one in ranks}
        return [*[one.split()[1] for one in ranks], how]

    def until_said(self, place: int, text: str) -> None:
        """Wait until a node has said this."""
        until(lambda: text in self.jobs[place].stderr(), timeout_s=30)


@pytest.mark.guarantee("G1", "G2")
def test_a_bad_node_gives_its_place_to_a_late_spare_and_then_takes_that_of_a_lost_one(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Every other node keeps its rank."""
    table = Table(nodes, tmp_path, 4)
    table.start(0, 1, 2, 3)
    assert table.places(0) == ["0", "1", "2", "3", "0 start"]
    table.start(4)
    table.until_said(0, f"node 4 ({HOST}) is a spare")
    nodes.fail(1, 0)
    assert table.places(1) == ["0", "1", "2", "3", "1 failure"]
    nodes.fail(1, 1)
    assert table.places(2) == ["0", "4", "2", "3", "2 failure"]
    line = f"dslrun: node 1 ({HOST}) failed first twice in a row: node 4 ({HOST}) takes its place"
    for place in range(5):
        table.until_said(place, line)
    lost = table.jobs.pop(2)
    for one in lost.left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
    assert table.places(3) == ["0", "4", "1", "3", "2 membership"]
    table.until_said(4, f"dslrun: node 1 ({HOST}) takes the place of node 2 ({HOST})")
    nodes.end()
    assert [job.wait(30) for job in table.jobs.values()] == [0, 0, 0, 0]
    assert not any(job.left() for job in table.jobs.values())


@pytest.mark.guarantee("G2", "G3")
@pytest.mark.parametrize("code", [0, 7, 143])
def test_the_workers_of_the_node_that_conducts_may_move_and_the_verdict_says_so(
    code: int, nodes: Nodes, tmp_path: Path
) -> None:
    """A signal to that node still ends the job."""
    table = Table(nodes, tmp_path, 2)
    table.start(0, 1, 2)
    table.places(0)
    table.until_said(0, "is a spare")
    for attempt in (0, 1):
        nodes.fail(0, attempt)
        places = table.places(attempt + 1)
    assert places == ["2", "1", "2 failure"]
    view = [str(nodes.bin / "dsl-top"), "--once", str(table.jobs[0].guard)]
    shown = subprocess.run(view, capture_output=True, text=True, timeout=30, check=True).stdout
    assert [line.split()[0] for line in shown.splitlines()[2:]] == ["RANK", "0", "1"], shown
    if code == 143:
        os.kill(table.jobs[0].guard, signal.SIGTERM)
    elif code:
        nodes.fail(1, 2)
    else:
        nodes.end()
    line = f"dslrun: before: node 0 ({HOST}) failed first twice in a row: node 2 ({HOST}) takes its place"
    for job in table.jobs.values():
        assert job.wait(30) == code, job.stderr()
        assert (line in job.stderr()) is (code != 0)
        assert job.stderr().count("failed first: exit code 7") == (3 if code == 7 else 2)


def test_a_spare_that_was_not_needed_ends_well_and_a_node_that_leaves_is_replaced(
    nodes: Nodes, tmp_path: Path
) -> None:
    table = Table(nodes, tmp_path, 2)
    table.start(0, 1, 2)
    table.places(0)
    table.until_said(0, "is a spare")
    os.kill(table.jobs[1].guard, signal.SIGTERM)
    assert table.jobs.pop(1).wait() == 143
    assert table.places(1) == ["0", "2", "0 membership"]
    table.start(1, options=f"--max-restarts=2 --events={tmp_path}/events")
    table.until_said(0, f"node 1 ({HOST}) is a spare")
    nodes.end()
    assert [job.wait(30) for job in table.jobs.values()] == [0, 0, 0]
    assert [one["event"] for one in recorded(tmp_path / "events")] == ["Launched", "JobEnded"]
    assert "the job none has ended without this node, which was a spare" in table.jobs[1].stderr()


@pytest.mark.guarantee("G2")
def test_a_spare_records_how_a_job_has_failed_without_it(nodes: Nodes, tmp_path: Path) -> None:
    table = Table(nodes, tmp_path, 2)
    table.start(0, 1, 2, options=f"--events={tmp_path}/events.{{}}")
    table.places(0)
    table.until_said(0, "is a spare")
    nodes.fail(1, 0)
    assert [job.wait(30) for job in table.jobs.values()] == [7, 7, 7]
    ended = [recorded(tmp_path / f"events.{place}")[-1] for place in table.jobs]
    assert [(one["event"], one["code"], one["attempts"]) for one in ended] == [
        ("JobEnded", 7, 1), ("JobEnded", 7, 1), ("JobEnded", 7, 0)
    ]  # fmt: skip
    assert ended[2]["verdict"][0].endswith(ended[0]["verdict"][0])


@pytest.mark.guarantee("G1", "G3")
def test_without_the_node_that_conducts_the_job_ends(nodes: Nodes, tmp_path: Path) -> None:
    """Though its workers may have moved: nobody claims to know which ranks it had."""
    table = Table(nodes, tmp_path, 2)
    table.start(0, 1)
    table.places(0)
    os.kill(table.jobs[0].agent(), signal.SIGKILL)
    assert [table.jobs[place].wait(30) for place in (0, 1)] == [137, 1]
    assert f"dslrun: node 0 ({HOST}): it has closed the connection" in table.jobs[1].stderr()


@pytest.mark.guarantee("G1", "G3")
def test_a_spare_that_has_lost_the_node_that_conducts_looks_for_it_for_a_moment(
    nodes: Nodes, tmp_path: Path
) -> None:
    """It does not wait as long as a node whose job has not begun."""
    table = Table(nodes, tmp_path, 2)
    table.start(0, 1, 2, options="--rdzv-conf=keep_alive_interval=0.5,keep_alive_max_attempt=2")
    table.places(0)
    table.until_said(2, "is a spare")
    for one in table.jobs[0].left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
    assert [table.jobs[place].wait(30) for place in (1, 2)] == [1, 1]
    last = table.jobs[2].stderr().splitlines()[-1]
    lost = "dslrun: error: node 0 has closed the connection, and cannot be reached again within 1 s: "
    assert last.startswith(lost), last
    assert "waiting for node 0" not in table.jobs[2].stderr()


@pytest.mark.guarantee("G3")
def test_nodes_that_wait_in_vain_for_a_lost_one_all_say_so(nodes: Nodes, tmp_path: Path) -> None:
    table = Table(nodes, tmp_path, 3)
    table.start(0, 1, 2, options="--rdzv-conf=timeout=2")
    table.places(0)
    os.kill(table.jobs[1].agent(), signal.SIGKILL)
    assert [table.jobs[place].wait(30) for place in range(3)] == [1, 137, 1]
    for place in (0, 2):
        said = table.jobs[place].stderr()
        assert "dslrun: not tried again: after 2 s the job is still waiting for nodes 1,3\n" in said
        assert f"dslrun: node 1 ({HOST}) (rank 1) was lost: it has closed the connection\n" in said


def test_nodes_that_differ_about_spares_are_refused(nodes: Nodes, tmp_path: Path) -> None:
    table = Table(nodes, tmp_path, 2)
    table.start(0)
    table.start(1, options="--spares=2")
    assert table.jobs.pop(1).wait(30) == 2
    table.until_said(0, "its --spares is 2, that of node 0 is 1")
