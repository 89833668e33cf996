"""Running the command as an ordinary user from tests and benches that run as root."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import dsl

NOBODY = 65534

_MAIN = "import sys; sys.argv[0] = 'dsl'; from dsl.__main__ import main; sys.exit(main())"


def as_ordinary_user(arguments: Sequence[str], directory: Path, *, limit: int | None = None) -> list[str]:
    """A command line that runs `dsl` as user nobody, from a copy of the package in `directory`.

    What lies in root's home, which nobody can enter, is copied, too, if the arguments name it; instead of an
    interpreter there, another Python of at least 3.10 is taken (the extension is built for the stable ABI).
    `limit`: RLIMIT_NPROC for that user.
    """
    for parent in (directory, *directory.parents):
        if parent.is_relative_to(tempfile.gettempdir()) and parent.owner() == "root":
            parent.chmod(parent.stat().st_mode | 0o011)  # pytest closes its directories to others
    package = directory / "site"
    if not package.exists():
        shutil.copytree(
            Path(dsl.__file__).parent, package / "dsl", ignore=shutil.ignore_patterns("__pycache__")
        )
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    bound = [] if limit is None else ["prlimit", f"--nproc={limit}"]
    python = _python_of_everybody(drop)
    words = [_reachable(word, directory) for word in arguments]
    return [*drop, *bound, "env", f"PYTHONPATH={package}", python, "-c", _MAIN, *words]


def _reachable(word: str, directory: Path) -> str:
    """The same, or the path of a copy if it is the path of a program below a closed directory."""
    path = Path(word)
    if not (path.is_absolute() and path.is_file()):
        return word
    if all(parent.stat().st_mode & 0o001 for parent in path.parents):
        return word
    copy = directory / path.name
    shutil.copy(path, copy)
    copy.chmod(0o755)
    return str(copy)


def _python_of_everybody(drop: Sequence[str]) -> str:
    check = "import sys, ctypes; sys.exit(sys.version_info < (3, 10))"
    candidates = [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
    for candidate in candidates:
        result = subprocess.run([*drop, "env", candidate, "-c", check], capture_output=True, check=False)
        if result.returncode == 0:
            return candidate
    msg = f"none of {candidates} can be run by an ordinary user"
    raise AssertionError(msg)
