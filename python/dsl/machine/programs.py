"""Programs and packages on this machine that matter to dsl, and their versions. No package is imported."""

from __future__ import annotations

import os

from dsl.errors import OptionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEADLINE_S = 5.0
"""Each program gets this long to print its version."""

QUESTIONS = {"ssh": "-V", "pdsh": "-V", "mpirun": "--version", "srun": "--version", "nvcc": "--version"}
"""The argument that makes a program print its version."""

FIND_DEBUGPY = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('debugpy') else 3)"
LACKS_DEBUGPY = 3
DEBUGPY_S = 30.0


def find_programs(environ: Mapping[str, str]) -> dict[str, dict[str, str] | None]:
    """The programs of `QUESTIONS` on ``PATH``; None for a missing program.

    ``path``; ``kind``: which of several programs with this name it is (``openmpi``, ``mpich``, ``impi``,
    ``mvapich``), or empty; ``version``: empty if the program did not print it.
    """
    from shutil import which
    from subprocess import DEVNULL, PIPE, STDOUT, TimeoutExpired, run

    found: dict[str, dict[str, str] | None] = {}
    for name, word in QUESTIONS.items():
        path = which(name, path=environ.get("PATH", os.defpath))
        if path is None:
            found[name] = None
            continue
        try:
            answer = run(
                [path, word], stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, timeout=DEADLINE_S, check=False
            )
            said = answer.stdout.decode(errors="replace")
        except (OSError, TimeoutExpired):
            said = ""
        kind, version = read_version(name, said)
        found[name] = {"path": path, "kind": kind, "version": version}
    return found


def read_version(name: str, said: str) -> tuple[str, str]:
    """Kind and version of a program, from the text that it prints about its version.

    There are four programs named ``mpirun``. Those of Open MPI and Intel MPI print their names. A program
    that prints HYDRA is MPICH's, or MVAPICH's if that name is in the arguments of its configuration.
    """
    import re

    pattern = r"OpenSSH_([\w.]+)" if name == "ssh" else r"(\d+(?:\.\d+)+[\w.]*)"
    kind, text = "", said
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


def find_package(name: str, file: str, constants: Sequence[str]) -> dict[str, str | None] | None:
    """Version and path of an installed package, and these constants of its ``file``; None if not installed.

    The file is read, not run, and None stands for a constant without a value. A ``__version__`` in that file
    is used first: it may say more than the distribution's version, such as the build.
    """
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = next(iter(spec.submodule_search_locations))
    known = read_constants(os.path.join(folder, file), ("__version__", *constants))
    number = known.pop("__version__", None)
    if not number:
        try:
            number = version(name)
        except PackageNotFoundError:
            number = None
    return {"version": number, "path": folder, **{one: known[one] for one in constants if one in known}}


def read_constants(path: str, names: Sequence[str]) -> dict[str, str | None]:
    """Constants of a Python file, as text. Missing and computed ones are left out; None for an empty one."""
    import ast

    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, str | None] = {}
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        try:
            value = ast.literal_eval(node.value)
        except (ValueError, TypeError):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{name} {one}" for name, one in value.items() if one not in (None, ""))
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        known = [target.id for target in targets if isinstance(target, ast.Name) and target.id in names]
        found.update(dict.fromkeys(known, None if value in (None, "") else str(value)))
    return found


def check_debugger(interpreter: str, environ: Mapping[str, str]) -> None:
    """Refuse an interpreter without debugpy. Another check refuses an interpreter that cannot be executed.

    Raises:
        OptionError: the interpreter has no debugpy.
    """
    import subprocess

    quiet = subprocess.DEVNULL
    words = [interpreter, "-c", FIND_DEBUGPY]
    try:
        result = subprocess.run(
            words, env=dict(environ), stdin=quiet, stdout=quiet, stderr=quiet, timeout=DEBUGPY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    if result.returncode == LACKS_DEBUGPY:
        raise OptionError(
            f"--debug needs debugpy, which {interpreter} does not have: pip install debugpy there"
        )
