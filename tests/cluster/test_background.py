"""A job on several hosts in the background, and views that follow one in another terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.kit.cluster import Cluster
from tests.kit.waiting import until
from tests.support.backends import Backend
from tests.support.jobs import complete_lines

HOSTS = "node0 slots=1\nnode1 slots=2\nnode2 slots=1\n"
WORKER = """#!/bin/sh
echo "early $RANK"
echo "$RANK" >> "$1/ready"
while ! test -e "$1/go"; do sleep 0.01; done
i=0
while [ $i -lt 200 ]; do echo "late $RANK $i"; i=$((i + 1)); done
test "$RANK" != 2 || exit 6
sleep 60
"""


@pytest.fixture
def line(dsl_command: Path, tmp_path: Path, backend: Backend) -> tuple[list[str | Path], dict[str, Any]]:
    """The command of a job whose rank 2 fails, once it may go on; and the options of the process."""
    (tmp_path / "hosts").write_text(HOSTS)
    program = tmp_path / "worker"
    program.write_text(WORKER)
    program.chmod(0o755)
    env = {
        "DS_ACCELERATOR": "cpu",
        "XDG_RUNTIME_DIR": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        **backend.env,
    }
    words: list[str | Path] = [
        dsl_command,
        "-H",
        "hosts",
        *backend.words,
        "--no_local_rank",
        "--no_python",
        program,
        tmp_path,
    ]
    return words, {"env": env, "cwd": tmp_path}


@pytest.mark.guarantee("G1", "G2", "G6")
def test_the_head_of_a_job_goes_to_the_background(
    hosts: Cluster, line: tuple[list[str | Path], dict[str, Any]], dsl_command: Path, tmp_path: Path
) -> None:
    words, options = line
    started = hosts[0].run([words[0], "--detach", *words[1:]], timeout_s=60, **options)
    assert started.returncode == 0, started.stderr
    assert " runs in the background; " in started.stderr
    (folder,) = (tmp_path / "state/dsl/jobs").iterdir()
    until(lambda: len(complete_lines(tmp_path / "ready")) == 4, timeout_s=60)
    (tmp_path / "go").touch()
    attached = hosts[0].run([dsl_command.with_name("dsl-attach")], timeout_s=60, **options)
    assert attached.returncode == 6
    assert {f"early {rank}" for rank in range(4)} <= set(attached.stdout.splitlines())
    assert {f"late 2 {number}" for number in range(200)} <= set(attached.stdout.splitlines())
    assert attached.stdout == (folder / "output").read_text()
    assert "rank 2" in attached.stdout
    assert hosts[0].run([dsl_command.with_name("dsl-wait")], timeout_s=60, **options).returncode == 6


@pytest.mark.guarantee("G6")
def test_a_view_follows_the_output_of_all_hosts(
    hosts: Cluster, line: tuple[list[str | Path], dict[str, Any]], dsl_command: Path, tmp_path: Path
) -> None:
    words, options = line
    shown, viewed = tmp_path / "shown", tmp_path / "viewed"
    with (
        shown.open("wb") as stdout,
        viewed.open("wb") as view,
        hosts[0].start(words, stdout=stdout, **options) as job,
    ):
        until(lambda: shown.read_text().count("early") == 4, timeout_s=60)
        listed = hosts[0].run([dsl_command.with_name("dsl-ps"), "--json"], timeout_s=60, **options)
        (pid,) = [one["pid"] for one in json.loads(listed.stdout)["jobs"] if one["cwd"] == str(tmp_path)]
        attach: list[str | Path] = [dsl_command.with_name("dsl-attach"), str(pid)]
        with hosts[0].start(attach, stdout=view, **options) as viewer:
            until(lambda: viewed.read_text().count("early") == 4, timeout_s=60)
            (tmp_path / "go").touch()
            assert job.wait(60) == 6
            assert viewer.wait(60) == 0
    assert viewed.read_bytes() == shown.read_bytes()
