"""An interpreter that enters namespaces of its own leads no signal to a stranger, and its workers run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import ran
from tests.support.forks import HIDDEN
from tests.support.namespaces import unshared

from dsl._core import kernel_interfaces

pytestmark = [
    pytest.mark.engine,
    pytest.mark.linux_5_4,
    pytest.mark.needs_pidfd,
    pytest.mark.root,
    pytest.mark.skipif(kernel_interfaces()["pidfd"] != "", reason="needs a kernel with pidfds"),
    pytest.mark.guarantee("G1"),
]

SCENARIO = Path(__file__).parent.parent / "workers" / "among_strangers.py"
STRANGERS = 40
# What the interpreter enters, and what is said of it.
WRAPPERS = {
    "pid": ("unshare --pid --fork --mount-proc", "another pid namespace"),
    "pid-proc-of-others": ("unshare --pid --fork", "another pid namespace"),
    "pid-of-children": ("unshare --pid", "another pid namespace"),
    "user": ("unshare --user --map-root-user", "another user namespace"),
    "mount": ("unshare --mount --mount-proc", "another mount namespace"),
    "time": ("unshare --time --boottime 1000000 --monotonic 1000000 --fork", "another time namespace"),
    "all": (
        "unshare --pid --user --map-root-user --time --boottime 1000000 --fork --mount-proc",
        "another pid namespace",
    ),
}
# The interpreters of fork servers and workers enter it, as a program that leads to Python may do. Scripts of a shell
# that do are no fork servers in any case.
ENTER = """
import os, sys
if "-u" in sys.orig_argv and (wrapper := os.environ.pop("WRAPPER", None)):
    words = [*wrapper.split(), sys.executable, *sys.orig_argv[1:]]
    os.execvp(words[0], words)
"""
TRAIN = (
    """
import os, pathlib, signal, sys, time
rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = pathlib.Path(sys.argv[1])
print("decimal" in """
    + HIDDEN
    + """, flush=True)
(folder / f"begun{rank}").touch()
while not all((folder / f"begun{one}").exists() for one in range(count)):
    time.sleep(0.01)
if rank == 1:
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.pause()
"""
)


def among_strangers(wrapper: str, testchild: Path, folder: Path) -> dict[str, Any]:
    """Have rank 1 of 4 fail, and the others be stopped, where 40 strangers have the lowest pids of all."""
    unshared(*wrapper.split()[1:])
    script = folder / "train.py"
    (folder / "sitecustomize.py").write_text(ENTER)
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "dsl.run", "--nproc-per-node=4", "--start-method=forkserver"]
    command += ["--preload=decimal", "--grace=2", str(script), str(folder)]
    line = [*unshared("--pid", "--fork", "--kill-child", "--mount-proc"), "env", f"WRAPPER={wrapper}"]
    line += [f"PYTHONPATH={os.pathsep.join([str(folder), *sys.path])}"]
    line += [sys.executable, str(SCENARIO), str(testchild), str(folder), str(STRANGERS), *command]
    result = ran(line, stdin=subprocess.DEVNULL, timeout_s=90)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.guarantee("G1", "G2")
@pytest.mark.parametrize("kind", WRAPPERS)
def test_no_stranger_is_signalled_for_an_interpreter_in_other_namespaces(
    kind: str, testchild: Path, tmp_path: Path, repeats: int
) -> None:
    """The numbers of its workers there are those of strangers here, who are asked for nothing."""
    wrapper, said = WRAPPERS[kind]
    for run in range(repeats):
        folder = tmp_path / str(run)
        folder.mkdir()
        found = among_strangers(wrapper, testchild, folder)
        assert len(found["numbers"]) == STRANGERS
        assert found["numbers"][-1] < 2 * STRANGERS
        assert (found["dead"], found["signalled"]) == ([], []), found["err"]
        assert (found["code"], found["left"]) == (3, {}), found["err"]
        assert found["out"].split() == ["False"] * 4, found["err"]
        (line,) = [line for line in found["err"].splitlines() if "fork server" in line]
        assert line == f"dslrun: warning: fork server 0 runs in {said}: workers are executed instead"
