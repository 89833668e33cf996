"""Programs and packages on this machine that matter to dsl, and their versions. No package is imported."""

from __future__ import annotations

import os

from dsl._record import record
from dsl.errors import OptionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from subprocess import Popen
    from typing import Any

DEADLINE_S = 5.0
"""All programs together get this long to print their versions."""

QUESTIONS: dict[str, tuple[str, ...]] = {
    "ssh": ("-V",),
    "pdsh": ("-V",),
    "mpirun": ("--version",),
    "srun": ("--version",),
    "nvcc": ("--version",),
}
"""Arguments that make a program print its version."""


FIND_DEBUGPY = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('debugpy') else 3)"
LACKS_DEBUGPY = 3
DEBUGPY_S = 30.0


@record
class FoundProgram:
    """A program on ``PATH``."""

    path: str
    kind: str = ""
    """Which of several programs with this name it is: ``openmpi``, ``mpich``, ``impi``, ``mvapich``."""
    version: str = ""
    """Empty if the program did not print it."""


@record
class Package:
    """An installed Python package."""

    version: str
    path: str
    facts: tuple[tuple[str, str], ...] = ()
    """Name and text of constants in a file of the package; None becomes an empty text."""


def find_programs(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, FoundProgram | None]:
    """Paths and versions of programs; None for a missing program. All programs run at the same time."""
    import time
    from shutil import which

    paths = {name: which(name, path=environ.get("PATH", os.defpath)) for name in names}
    asked = {name: _ask([path, *QUESTIONS[name]]) for name, path in paths.items() if path}
    deadline_s = time.monotonic() + DEADLINE_S
    found: dict[str, FoundProgram | None] = {}
    for name, path in paths.items():
        if path is None:
            found[name] = None
            continue
        kind, version = read_version(name, _answer(asked[name], deadline_s - time.monotonic()))
        found[name] = FoundProgram(path, kind, version)
    return found


def _ask(command: list[str]) -> Popen[bytes] | None:
    from subprocess import DEVNULL, PIPE, STDOUT, Popen

    try:
        return Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
    except OSError:
        return None


def _answer(process: Popen[bytes] | None, left_s: float) -> str:
    from subprocess import TimeoutExpired

    if process is None:
        return ""
    try:
        said = process.communicate(timeout=max(left_s, 0.0))[0]
    except TimeoutExpired:
        process.kill()
        said = b""
        process.communicate()
    return said.decode(errors="replace")


def read_version(name: str, said: str) -> tuple[str, str]:
    """Kind and version of a program, from the text that it prints about its version.

    There are four programs named ``mpirun``. Those of Open MPI and Intel MPI print their names. A program
    that prints HYDRA is MPICH's, or MVAPICH's if that name is in the arguments of its configuration.
    """
    import re

    pattern = r"(\d+(?:\.\d+)+[\w.]*)"
    kind = ""
    text = said
    if name == "ssh":
        match = re.search(r"OpenSSH_([\w.]+)", said)
        return "", match[1] if match else ""
    if name == "nvcc":
        text = said.partition("release")[2]
    if name == "mpirun":
        is_mvapich = "mvapich" in said.lower()
        for word, own in (("Open MPI", "openmpi"), ("Intel(R) MPI", "impi"), ("HYDRA", "mpich")):
            if word in said:
                kind = "mvapich" if own == "mpich" and is_mvapich else own
                text = said.partition("Version")[2] if own != "openmpi" else said
                break
    match = re.search(pattern, text)
    return kind, match[1] if match else ""


def find_package(name: str, module: str, file: str, constants: Sequence[str]) -> Package | None:
    """An installed package, by the names of its distribution and its module; None if it is not installed.

    ``constants`` are read from ``file`` of the package without running it. A ``__version__`` in that file is
    used first: it may say more than the distribution's version, such as the build.
    """
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = next(iter(spec.submodule_search_locations))
    known = read_constants(os.path.join(folder, file), ("__version__", *constants))
    number = known.pop("__version__", "")
    if not number:
        try:
            number = version(name)
        except PackageNotFoundError:
            number = ""
    return Package(number, folder, tuple([(one, known[one]) for one in constants if one in known]))


def read_constants(path: str, names: Sequence[str]) -> dict[str, str]:
    """Constants of a Python file, as text. Missing and computed ones are left out."""
    import ast

    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        else:
            continue
        value = _constant(node.value)
        known = [target.id for target in targets if isinstance(target, ast.Name) and target.id in names]
        if value is not None:
            found.update(dict.fromkeys(known, value))
    return found


def _constant(node: Any) -> str | None:
    import ast

    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items() if one not in (None, ""))
    return "" if value is None else str(value)


def check_debugger(interpreter: str, environ: Mapping[str, str], cwd: str = "") -> None:
    """Refuse an interpreter without debugpy. Another check refuses an interpreter that cannot be executed.

    Raises:
        OptionError: the interpreter has no debugpy.
    """
    import subprocess

    quiet = subprocess.DEVNULL
    try:
        result = subprocess.run(
            [interpreter, "-c", FIND_DEBUGPY],
            cwd=cwd or None,
            env=dict(environ),
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            timeout=DEBUGPY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    if result.returncode == LACKS_DEBUGPY:
        raise OptionError(
            f"--debug needs debugpy, which {interpreter} does not have: pip install debugpy there"
        )
