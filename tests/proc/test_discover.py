"""`--discover`: the hosts of an elastic job come from a program, here in a file that changes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.jobs import Job, running

from dsl.errors import HostfileError
from dsl.machine import listing

WAY = """#!/bin/sh
exec sh -c "$2"
"""
TRAIN = """
import json, os, pathlib, time
folder = pathlib.Path(os.environ["FOLDER"])
told = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "DSL_ATTEMPT")}
with open(folder / "seen", "a") as file:
    print(json.dumps(told), file=file, flush=True)
while not (folder / "end").exists():
    time.sleep(0.02)
"""


class Listed:
    """A job whose hosts are those of a file, which all are this machine."""

    def __init__(self, dsl: Path, folder: Path) -> None:
        self.folder = folder
        (folder / "way").write_text(WAY)
        (folder / "way").chmod(0o700)
        (folder / "train.py").write_text(TRAIN)
        self.words = [str(dsl), "--discover", "cat list", "--elastic_training", "--no_ssh_check"]
        self.words += ["--ssh-program", f"{folder}/way {{host}}", "--master_addr", "127.0.0.1"]
        self.words += ["--grace", "5", "--env", f"FOLDER={folder}"]

    def list(self, *lines: str) -> None:
        """Replace the list in one step."""
        new = self.folder / "list.new"
        new.write_text("".join([f"{line}\n" for line in lines]))
        new.rename(self.folder / "list")

    def until_world(self, attempt: int, size: int) -> None:
        """Wait until an attempt runs with so many workers."""
        seen = self.folder / "seen"

        def runs() -> bool:
            lines = seen.read_text().splitlines() if seen.exists() else []
            found = [one for one in map(json.loads, lines) if one["DSL_ATTEMPT"] == attempt]
            return sorted(one["RANK"] for one in found) == [*range(size)] and all(
                one["WORLD_SIZE"] == size for one in found
            )

        until(runs, timeout_s=40)

    def end(self, job: Job) -> None:
        """Let the workers end."""
        (self.folder / "end").touch()
        assert job.wait(30) == 0, job.stderr()
        assert not job.left()


@pytest.fixture
def listed(dsl_command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Listed:
    monkeypatch.chdir(tmp_path)
    return Listed(dsl_command, tmp_path)


@pytest.mark.timeout(120)
def test_hosts_join_and_leave_with_the_list(listed: Listed) -> None:
    listed.list("n0 slots=1", "n1:2")
    with running([*listed.words, "--metrics", "job.prom", "train.py"], listed.folder) as job:
        listed.until_world(0, 3)
        listed.list("n0 slots=1", "n1:2", "n2 slots=1")
        listed.until_world(1, 4)
        jobs = json.loads(ran([listed.words[0] + "-ps", "--json"]).stdout)["jobs"]
        (shown,) = [one for one in jobs if one["cwd"] == str(listed.folder)]
        assert (shown["nodes"], shown["ranks"]) == (3, 4)
        assert (shown["attempt"], shown["restarts"]) == (1, 0)
        listed.list("n2 slots=1", "n0 slots=1")
        listed.until_world(2, 2)
        listed.list("n0 slots=1", "n1:2", "n2 slots=1")
        listed.until_world(3, 4)
        listed.end(job)
    said = job.stderr()
    lines = [line.removeprefix("dsl: ") for line in said.splitlines()]
    for line in (
        "host n2 is listed now",
        "host n2 has come: starting again with all of them",
        "running on 3 of 3 hosts with 4 workers: n0, n1, n2",
        "host n1 is not listed any more",
        "running on 2 of 2 hosts with 2 workers: n0, n2",
        "host n1 is listed now",
    ):
        assert line in lines, said
    assert said.count("warning") == 1, said  # several hosts are one machine
    assert "dsl_job_membership_changes_total 3.0\n" in (listed.folder / "job.prom").read_text()


@pytest.mark.timeout(120)
def test_a_restart_of_all_hosts_is_counted(listed: Listed) -> None:
    listed.list("n0 slots=1", "n1 slots=1")
    script = "import os, sys\nsys.exit(os.environ['RANK'] + os.environ['DSL_ATTEMPT'] == '10')\n"
    (listed.folder / "fails.py").write_text(script)
    result = ran([*listed.words, "--metrics", "job.prom", "fails.py"])
    assert result.returncode == 0, result.stderr
    figures = (listed.folder / "job.prom").read_text()
    assert "dsl_job_restarts_total 1.0\n" in figures
    assert "dsl_job_membership_changes_total 0.0\n" in figures


@pytest.mark.timeout(120)
def test_a_list_that_fails_changes_nothing_and_is_told_once(listed: Listed) -> None:
    """After that the same program works again."""
    listed.list("n0 slots=1")
    with running([*listed.words, "--min_elastic_nodes", "2", "train.py"], listed.folder) as job:
        until(lambda: "1 of at least 2 hosts is there: waiting for more" in job.stderr())
        os.rename("list", "away")
        until(lambda: "'cat' has ended with 1: cat: list: " in job.stderr(), timeout_s=20)
        listed.list("n0 slots=1", "nothing")
        until(lambda: "line 2: hostfile contains a bad entry: 'nothing'" in job.stderr(), timeout_s=20)
        listed.list("n1 slots=1", "n0 slots=1")
        listed.until_world(0, 2)
        listed.end(job)
    assert job.stderr().count("the hosts stay as they are") == 2


@pytest.mark.guarantee("G1")
@pytest.mark.timeout(120)
def test_a_program_that_hangs_when_the_job_ends_ends_with_it(listed: Listed, tmp_path: Path) -> None:
    listed.list("n0 slots=1")
    program = tmp_path / "lists"
    program.write_text("#!/bin/sh\ncat list\n[ -e ran ] && echo $$ > hangs && sleep 1000\ntouch ran\n")
    program.chmod(0o700)
    with running([*listed.words, "--discover", str(program), "train.py"], listed.folder) as job:
        listed.until_world(0, 1)
        until((tmp_path / "hangs").exists)
        listed.end(job)


@pytest.mark.parametrize(
    "line, why",
    [
        ("sleep 60", "has not ended within 0.2 s"),
        ("head -c 2000000 /dev/zero", "prints over 1048576 bytes"),
        ("yes", "prints over 1048576 bytes"),
        ("sh -c exec${IFS}yes>&2", "prints over 1048576 bytes"),
        ("/", "cannot be run: permission denied"),
    ],
)
def test_one_run_of_the_program_is_bounded(line: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "DEADLINE_S", 0.2 if line.startswith("sleep") else 30.0)
    with pytest.raises(HostfileError, match=f"--discover: '[a-z/]+' {why}"):
        listing.ask_for_hosts(line.split())


def test_what_the_program_has_left_running_is_not_waited_for(tmp_path: Path) -> None:
    try:
        assert (
            listing.ask_for_hosts(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/left; echo a:1"]) == "a:1\n"
        )
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "options, said",
    [
        ("--discover false", "--discover: 'false' has ended with 1"),
        ("--discover no-such-program", "--discover 'no-such-program' names no program that can be executed"),
        ("--discover true", "--discover: hostfile is empty or not formatted correctly"),
        ("--include n0", "--include cannot be used with --discover, leave one of them out"),
    ],
)
def test_what_is_refused_at_the_start(listed: Listed, options: str, said: str) -> None:
    listed.list("n0 slots=1")
    done = ran([*listed.words, *options.split(), "train.py"])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line
