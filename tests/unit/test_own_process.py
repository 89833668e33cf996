"""What the commands change in their process, and that user code finds it as Python leaves it."""

from __future__ import annotations

import compileall
import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import ran

import dsl
from dsl import _own_process


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The collector is on before and after a test."""
    assert gc.isenabled()
    handler = signal.getsignal(signal.SIGINT)
    yield
    _own_process.restore()
    gc.enable()
    signal.signal(signal.SIGINT, handler)


def test_what_was_claimed_is_restored() -> None:
    _own_process.claim()
    assert not gc.isenabled()
    _own_process.restore()
    assert gc.isenabled()


@pytest.mark.parametrize(
    "pid, has_terminal, before, after",
    [
        (7, True, signal.default_int_handler, signal.SIG_DFL),
        (7, True, signal.SIG_DFL, signal.SIG_DFL),
        (7, True, signal.SIG_IGN, signal.SIG_IGN),
        (1, True, signal.SIG_IGN, signal.SIG_IGN),
        (7, False, signal.SIG_IGN, signal.SIG_DFL),
    ],
)
def test_an_interrupt_of_a_claimed_process_has_its_default_effect(
    pid: int, has_terminal: Any, before: Any, after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal no Ctrl-C can come, so an inherited ignore (``&`` in a script) says nothing."""
    monkeypatch.setattr(os, "getpid", lambda: pid)
    monkeypatch.setattr(_own_process, "_has_terminal", lambda: has_terminal)
    signal.signal(signal.SIGINT, before)
    _own_process.claim()
    assert signal.getsignal(signal.SIGINT) == after


def test_the_first_process_of_a_container_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would not end it by a signal that it leaves alone."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    _own_process.claim()
    with pytest.raises(SystemExit, match="130"):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "steps", ["disable restore", "disable claim restore", "claim restore disable restore"]
)
def test_a_collector_that_others_have_turned_off_stays_off(steps: str) -> None:
    for step in steps.split():
        getattr(gc if step == "disable" else _own_process, step)()
    assert not gc.isenabled()


@pytest.mark.parametrize(
    "module, claims",
    [
        ("dsl.__main__ as door; door.main()", True),
        ("dsl.run as door; door.command()", True),
        ("dsl.__main__", False),
        ("dsl.run", False),
        ("dsl.launch", False),
        ("dsl.runner", False),
        ("dsl.functions", False),
    ],
)
def test_the_commands_claim_their_process_and_the_library_never_does(module: str, *, claims: bool) -> None:
    code = f"""
import gc, sys
sys.argv[1:] = ["--bad"]
try:
    import {module}
except SystemExit:
    pass
print(gc.isenabled())
"""
    result = ran([sys.executable, "-c", code], check=True)
    assert result.stdout == f"{not claims}\n"


FINDS = """
import sys
import dsl
from dsl import _own_process
_own_process.claim()
from dsl.model import job
print(type(job.__loader__).__module__, job.__file__ == job.__spec__.origin, job.__spec__.cached == job.__cached__)
print(dsl.model.__path__, job.__name__, job.__package__)
"""


def _in_a_copy(tmp_path: Path, code: str, *flags: str) -> list[str]:
    """What a program prints that runs with a copy of the package, compiled as an installer does it."""
    folder = tmp_path / "dsl"
    if not folder.exists():
        shutil.copytree(Path(dsl.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(folder, quiet=2)
    environ = {"PATH": os.defpath, "PYTHONPATH": str(tmp_path)}
    done = ran([sys.executable, *flags, "-c", code], env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_modules_are_found_where_they_lie_and_look_as_if_python_had_found_them(tmp_path: Path) -> None:
    first, second = _in_a_copy(tmp_path, FINDS)
    assert first == "dsl._own_process True True"
    assert second == f"['{tmp_path}/dsl/model'] dsl.model.job dsl.model"


def test_a_source_that_has_changed_since_is_compiled_anew(tmp_path: Path) -> None:
    _in_a_copy(tmp_path, FINDS)
    source = tmp_path / "dsl" / "model" / "job.py"
    source.write_text(source.read_text() + "CHANGED = True\n")
    code = FINDS.replace("print(dsl.model", "print(job.CHANGED)\nprint(dsl.model")
    first, changed, _ = _in_a_copy(tmp_path, code)
    assert (first.split()[0], changed) == ("_frozen_importlib_external", "True")


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 64])
def test_a_compiled_file_that_is_damaged_is_left_to_python(tmp_path: Path, damage: bytes) -> None:
    _in_a_copy(tmp_path, FINDS)
    (compiled,) = (tmp_path / "dsl" / "model" / "__pycache__").glob("job.*.pyc")
    compiled.write_bytes(damage)
    assert _in_a_copy(tmp_path, FINDS)[0].startswith("_frozen_importlib_external")


@pytest.mark.parametrize("flag", ["-O", "-Xpycache_prefix=PREFIX"])
def test_what_is_compiled_in_another_way_is_left_to_python(tmp_path: Path, flag: str) -> None:
    prefix = tmp_path / "compiled"
    prefix.mkdir()  # or Python makes it in the current directory
    assert _in_a_copy(tmp_path, FINDS, flag.replace("PREFIX", str(prefix)))[0].startswith(
        "_frozen_importlib_external"
    )


def test_modules_of_others_are_none_of_its_business_and_it_goes_when_their_code_is_about_to_run() -> None:
    before = list(sys.meta_path)
    _own_process.claim()
    (finder,) = [one for one in sys.meta_path if one not in before]
    _own_process.restore()
    assert sys.meta_path == before
    assert finder.find_spec("json", None) is None
    assert finder.find_spec("dslx.model", None) is None
    assert finder.find_spec("dsl.no_such_module", None) is None
