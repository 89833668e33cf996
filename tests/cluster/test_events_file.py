"""One record of a job on several hosts, where the command was typed."""

from __future__ import annotations

from pathlib import Path

from tests.kit.cluster import Cluster
from tests.support.backends import Backend
from tests.support.recorded import only, recorded

FAILS_ONCE = """#!/bin/sh
echo "$RANK is here"
[ "$RANK" != 2 ] || [ -e "$1" ] || { : > "$1"; exit 3; }
"""


def test_one_file_has_the_events_of_all_hosts(
    hosts: Cluster, backend: Backend, dsl_command: Path, tmp_path: Path
) -> None:
    program = tmp_path / "worker"
    program.write_text(FAILS_ONCE)
    program.chmod(0o755)
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=2\n")
    words = [
        "-H",
        "hosts",
        *backend.words,
        "--max-restarts=1",
        "--no_local_rank",
        "--no_python",
        "--events=e",
    ]
    line: list[str | Path] = [dsl_command, *words, program, tmp_path / "mark"]
    result = hosts[0].run(line, env={"DS_ACCELERATOR": "cpu", **backend.env}, cwd=tmp_path, timeout_s=120)
    found = recorded(tmp_path / "e")
    assert len({one["job"] for one in found}) == 1
    assert [one["name"] for one in found[0]["hosts"]] == ["node0", "node1"]
    # Some launchers start an agent for each rank.
    joined = {name for one in only("Membership", found) for name in one["joined"]}
    assert {name.rpartition("host ")[2] for name in joined} == {"node0", "node1"}
    meetings = {(one["attempt"], one["member"]): one["local_world_sizes"] for one in only("Meeting", found)}
    assert meetings == {(number, name): [1, 2] for number in (0, 1) for name in joined}
    for kind in ("Started", "FirstOutput", "Exited"):
        seen = {(one["attempt"], one["host"], one["rank"]) for one in only(kind, found)}
        last = {(1, "node0", 0), (1, "node1", 1), (1, "node1", 2)}
        assert seen >= last
    assert (0, "node1", 2) in {(one["attempt"], one["host"], one["rank"]) for one in only("Exited", found)}
    (cause,) = [one["cause"] for one in only("Report", found) if one["cause"]]
    assert (cause["rank"], cause["code"]) == (2, 3)
    (restart,) = only("Restarting", found)
    assert "rank 2" in restart["why"]
    assert "host node1" in restart["why"]
    assert all("clock_offset_ns" in one for one in only("Started", found))
    assert (found[-1]["event"], found[-1]["code"], found[-1]["attempts"]) == ("JobEnded", 0, 2), result
