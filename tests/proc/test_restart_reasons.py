"""``--restart-on`` and ``--give-up-on``: real workers that fail for one reason or another."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.support.command import dsl_line, ran
from tests.support.places import Nodes

from dsl.functions import ChildFailedError, LaunchConfig, elastic_launch

pytestmark = pytest.mark.guarantee("G2", "G3")

ANY = "--restart-on=any"
COUNTS = 'echo >> "$0"; count=$(wc -l < "$0"); '
"""Each attempt of rank 0 adds a line to the file that the worker is given."""
WAITS = '[ "$RANK" = 0 ] || { trap "exit 0" TERM; while :; do sleep 0.02; done; }; '
SILENT = "3 times in a row, before any output of the script"


class Command:
    """One of the two commands, and a file in which its rank 0 counts the attempts."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.file = path, folder / "attempts"

    def run(self, text: str, *options: str, workers: int = 2) -> CompletedProcess[str]:
        """Run a text of the shell as rank 0, which fails; other ranks wait."""
        words = ["/bin/sh", "-c", WAITS + COUNTS + text, str(self.file)]
        line = dsl_line(self.path, workers, words, 2.0, "--max-restarts=5", *options)
        return ran(line, environ={"DS_ACCELERATOR": "cpu"})

    @property
    def attempts(self) -> int:
        return len(self.file.read_text().splitlines())


@pytest.fixture(params=["dsl", "dslrun"])
def command(request: pytest.FixtureRequest, dsl_command: Path, tmp_path: Path) -> Command:
    return Command(dsl_command.with_name(request.param), tmp_path)


def reasons(result: CompletedProcess[str]) -> list[str]:
    """Why no attempt follows."""
    return [line.partition(": ")[2] for line in result.stderr.splitlines() if "not tried again" in line]


@pytest.mark.parametrize(
    "text, options, code, attempts, reason",
    [
        ('exit "$count"', ["--give-up-on=3"], 3, 3, "exit code 3 is in --give-up-on"),
        ('exit "$count"', ["--restart-on=1-2"], 3, 3, "exit code 3 is not in --restart-on"),
        ('exit "$count"', [ANY, "--give-up-on=2,4"], 2, 2, "exit code 2 is in --give-up-on"),
        ("kill -9 $$", ["--restart-on=1"], 137, 1, "SIGKILL is not in --restart-on"),
        ("kill -9 $$", ["--give-up-on=signal"], 137, 1, "SIGKILL is in --give-up-on"),
        ('[ "$count" = 2 ] && exit 4; kill -9 $$', ["--restart-on=signal"], 4, 2, "exit code 4 is not in --restart-on"),
        ("echo here; exit 4", [ANY], 4, 6, ""),
        ("exit 4", [], 4, 6, ""),
    ],
)  # fmt: skip
def test_a_policy_says_which_failures_are_tried_again(
    command: Command, text: str, options: list[str], code: int, attempts: int, reason: str
) -> None:
    result = command.run(text, *options)
    assert (result.returncode, command.attempts) == (code, attempts), result.stderr
    assert reasons(result) == ([f"not tried again: {reason}"] if reason else [])
    assert "rank 0 (local rank 0, pid" in result.stderr


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [[], ["--local-ranks-filter=1"], ["--redirects=3", "--log-dir={}"]])
def test_a_failure_before_any_output_is_tried_three_times(
    command: Command, options: list[str], workers: int, tmp_path: Path
) -> None:
    """Also of a lone worker, and where the output is not shown."""
    words = [ANY, *[option.format(tmp_path / "logs") for option in options]]
    result = command.run("exit 4", *words, workers=workers)
    assert (result.returncode, command.attempts) == (4, 3), result.stderr
    assert reasons(result) == [f"not tried again: exit code 4 {SILENT}"]
    command.file.unlink()
    result = command.run("echo here; exit 4", *words, workers=workers)
    assert (result.returncode, command.attempts, reasons(result)) == (4, 6, []), result.stderr


def test_a_lone_worker_says_the_same_as_ever(command: Command) -> None:
    """Its output passes through us."""
    result = command.run('echo "out $count"; echo "err $count" >&2; exit 4', "--give-up-on=4", workers=1)
    assert result.stdout == "out 1\n"
    assert result.stderr.splitlines()[0] == "err 1"


@pytest.mark.parametrize("line, attempts", [("", 3), ("import sys; sys.stderr.write('here\\n')", 6)])
def test_an_exception_is_no_output_of_the_script(
    dslrun: Path, tmp_path: Path, line: str, attempts: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"open({str(tmp_path / 'attempts')!r}, 'a').write('x')\n{line}\nimport no_such_module\n"
    )
    result = ran([dslrun, "--max-restarts=5", ANY, script])
    assert (result.returncode, (tmp_path / "attempts").read_text()) == (1, "x" * attempts)
    assert reasons(result) == ([f"not tried again: exit code 1 {SILENT}"] if attempts == 3 else [])


def test_without_restarts_a_policy_has_no_effect_which_is_said(command: Command) -> None:
    result = command.run("exit 3", "--max-restarts=0", "--give-up-on=3", "--restart-on=4")
    assert (result.returncode, command.attempts, reasons(result)) == (3, 1, [])
    for name in ("--restart-on", "--give-up-on"):
        assert f"{name} has no effect without --max-restarts" in result.stderr


def test_all_nodes_with_fixed_places_hear_why_no_attempt_follows(nodes: Nodes) -> None:
    jobs = nodes.start(*["--max-restarts=3 --give-up-on=7"] * 2)
    nodes.seen(2)
    nodes.fail(1, 0)
    assert [job.wait() for job in jobs] == [7, 7], [job.stderr() for job in jobs]
    for job in jobs:
        assert "dslrun: not tried again: exit code 7 is in --give-up-on" in job.stderr().splitlines()


def fail() -> None:
    sys.exit(6)


def test_a_function_has_the_same_policy(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(LaunchConfig(1, 1, 2, give_up_on=[6]), fail)()
    assert caught.value.exit_code == 6
    assert "not tried again: exit code 6 is in --give-up-on" in caplog.text
