"""What the set-up says before it changes a machine, and what the end of `scripts/test` says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from scripts import machine
from scripts.machine import Need, meet
from tests import conftest
from tests.support.skips import ALLOWED, skip_without_its_needs

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = Need("a C compiler", ("gcc", "libc6-dev"))
BROWSER = Need("tests in a browser", ("chromium",), is_must=False)


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who may install nothing."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Root with apt-get. Each command that the set-up would run, without running it."""
    commands: list[str] = []
    monkeypatch.setattr(machine, "may_install", lambda: True)
    monkeypatch.setattr(machine, "call", lambda *words, env: commands.append(" ".join(words)))
    monkeypatch.setattr(machine, "output", lambda *words: words[-1] != "chromium")
    return commands


@pytest.mark.usefixtures("ordinary")
def test_what_has_to_be_there_is_named_at_once() -> None:
    with pytest.raises(SystemExit) as ended:
        meet([COMPILER, BROWSER, Need("Python's venv module", ("python3-venv",))])
    assert str(ended.value) == (
        "set-up: missing: a C compiler, Python's venv module: first run "
        "`sudo apt-get install gcc libc6-dev python3-venv`"
    )


@pytest.mark.usefixtures("ordinary")
def test_what_only_some_tests_need_is_said_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert meet([BROWSER]) == []
    assert capsys.readouterr().err == (
        "set-up: tests in a browser will be skipped: to have them, run `sudo apt-get install chromium`\n"
    )


def test_packages_of_the_machine_are_named_before_they_are_installed(
    installed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert meet([COMPILER, BROWSER]) == [BROWSER]  # which apt does not offer
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        "set-up: apt-get installs on this machine: gcc libc6-dev (a C compiler); chromium (tests in a browser)"
    )
    assert installed[-1].endswith("gcc libc6-dev")


@pytest.mark.parametrize("answer, count", [("n\n", 0), ("\n", 2), ("y\n", 2)])
def test_whoever_sits_at_a_terminal_is_asked(
    answer: str, count: int, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal:
        isatty = staticmethod(lambda: True)
        readline = staticmethod(lambda: answer)

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(sys, "stdin", Terminal)
    meet([Need("tests of completion", ("zsh",), is_must=False)])
    assert len(installed) == count


def test_tests_say_that_the_installed_package_is_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    conftest.check_that_the_package_is_current()  # not installed by the set-up
    (tmp_path / "dsl-setup.json").write_text(json.dumps({"code": "of an older state"}))
    with pytest.raises(pytest.exit.Exception, match="older than its sources: run `make build`"):
        conftest.check_that_the_package_is_current()


@pytest.mark.parametrize(
    "kind, there, missing", [("program", "sh", "no-such-sh"), ("package", "pytest", "no-pytest")]
)
def test_a_test_whose_needs_are_not_here_is_skipped_and_says_what_it_needs(
    kind: str, there: str, missing: str, request: pytest.FixtureRequest
) -> None:
    mark = getattr(pytest.mark, f"needs_{kind}")
    request.node.add_marker(mark(there))
    skip_without_its_needs(request.node)
    assert request.node.get_closest_marker("skip") is None
    request.node.add_marker(mark(missing))
    skip_without_its_needs(request.node)
    assert request.node.get_closest_marker("skip").kwargs == {"reason": f"needs the {kind} {missing}"}
    assert f"needs the {kind} {missing}".startswith(ALLOWED) == (kind == "program"), (
        "the set-up installs packages"
    )


PYTEST = """\
SKIPPED [2] tests/a.py:12: needs an NVIDIA GPU
SKIPPED [1] tests/b.py:7: needs a kernel with IPv6
FAILED tests/a.py::test_one[a b] - AssertionError: 3 passed
=========== 1 failed, 120 passed, 3 skipped, 5 deselected in 12.33s (0:00:12) ===========
=== 2 passed, 1 error in 1.00s ===
"""
RUST = """\
     Summary [  12.3s] 345 tests run: 344 passed (1 slow), 1 failed, 2 skipped
        FAIL [   0.006s] ( 3/345) dsl-engine cgroup::tests::one
test group::two ... FAILED
test result: FAILED. 10 passed; 1 failed; 3 ignored; 0 measured; 0 filtered out; finished in 0.01s
"""
TABLE = """\
step        result     time  passed  failed  skipped  why
rust        failed     20 s     354       2        5  dsl-engine cgroup::tests::one; group::two
unit        failed     12 s     122       2        3  tests/a.py::test_one[a b]
site        passed      9 s       4       0        2  2 needs an NVIDIA GPU
pythons     passed      3 s       0       0        1  1 needs a Python 3.10
example     failed      1 s       0       0        0  no such file
cluster     not run
480 passed, 4 failed, 11 skipped
"""


def test_the_end_of_all_tests_is_a_table_of_steps(tmp_path: Path) -> None:
    (tmp_path / "rust").write_text(RUST)
    (tmp_path / "unit").write_text(PYTEST)
    (tmp_path / "site").write_text("SKIPPED [2] a.py:1: needs an NVIDIA GPU\n4 passed, 2 skipped in 0.10s\n")
    (tmp_path / "pythons").write_text("SKIPPED [1] needs a Python 3.10\n")
    (tmp_path / "example").write_text("=== example\nno such file\n\n")
    (tmp_path / "results").write_text(
        "failed rust 20\nfailed unit 12\npassed site 9\npassed pythons 3\nfailed example 1\n"
    )
    script = conftest.ROOT / "scripts" / "tally.py"
    steps = ["rust", "unit", "site", "pythons", "example", "cluster"]
    text = subprocess.check_output([sys.executable, script, tmp_path, *steps], text=True)
    assert text == TABLE


CARGO = """\
#!/bin/sh
[ "$1" = test ] || exit 1
echo "$*" >>calls
case "$*" in
*--exact*|*--doc*) echo "test result: ok. 1 passed; 0 failed" ;;
*)
    for name in $FAILING; do echo "$name --- FAILED"; done
    printf 'failures:\\n\\n---- %s stdout ----\\n\\n    at line 3\\n\\nfailures:\\n' "$FAILING"
    for name in $FAILING; do echo "    $name"; done
    exit 101
esac
"""


@pytest.mark.parametrize(
    "failing, code", [("group::one", 0), ("group::one group::two", 0), ("group::one two three", 1), ("", 1)]
)
def test_up_to_two_rust_tests_that_fail_run_once_more_and_are_named(
    failing: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "cargo").write_text(CARGO)
    (tmp_path / "cargo").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.defpath}", "FAILING": failing}
    script = conftest.ROOT / "scripts" / "test"
    text = script.read_text(encoding="utf-8").replace('cd "$(dirname "$0")/.."', "")
    command = ["bash", "-c", text, "test", "--step", "rust"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    named = [line.removeprefix("UNSTEADY ") for line in ended.stdout.splitlines() if "UNSTEADY" in line]
    assert named == (failing.split() if code == 0 else [])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.partition("--exact ")[2] for call in calls if "--exact" in call] == [failing] * (code == 0)


def test_the_bare_debian_asks_for_root() -> None:
    """Whoever is not root gets one line, before anything is made."""
    drop = ["setpriv", "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    run = (conftest.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    result = subprocess.run(
        [*drop, "bash", "-s"], input=run.replace('"$(dirname "$0")/.."', "/"), cwd="/", text=True,
        capture_output=True, check=False, env={"PATH": os.defpath, "HOME": "/nonexistent"},
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        ".ci/run: needs root, which makes a bare Debian to test in: run it as root, or run scripts/test here"
    ]
