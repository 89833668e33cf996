"""Programs and packages that are installed beside us, and their versions. No package is imported."""

from __future__ import annotations

import os

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from subprocess import Popen
    from typing import Any

DEADLINE_S = 5.0
"""What all programs together get to tell their versions."""

QUESTIONS: dict[str, tuple[str, ...]] = {
    "ssh": ("-V",),
    "pdsh": ("-V",),
    "mpirun": ("--version",),
    "srun": ("--version",),
    "nvcc": ("--version",),
}
"""What makes a program tell its version."""


@record
class Program:
    """A program on ``PATH``."""

    path: str
    kind: str = ""
    """What it is, where several share the name: ``openmpi``, ``mpich``, ``impi``, ``mvapich``."""
    version: str = ""
    """Empty: it did not say."""


@record
class Package:
    """An installed Python package."""

    version: str
    path: str
    facts: tuple[tuple[str, str], ...] = ()
    """Constants of a file of it that are text or None (empty)."""


def find_programs(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, Program | None]:
    """Where programs are and what they say of themselves, all asked at once; None for what is not there."""
    import time
    from shutil import which

    paths = {name: which(name, path=environ.get("PATH", os.defpath)) for name in names}
    asked = {name: _ask([path, *QUESTIONS[name]]) for name, path in paths.items() if path}
    deadline_s = time.monotonic() + DEADLINE_S
    found: dict[str, Program | None] = {}
    for name, path in paths.items():
        if path is None:
            found[name] = None
            continue
        kind, version = read_version(name, _answer(asked[name], deadline_s - time.monotonic()))
        found[name] = Program(path, kind, version)
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
    """What a program is and its version, of what it says when it is asked.

    ``mpirun`` is the name of four: Open MPI's says so, Intel's too, and what calls itself Hydra is MPICH's,
    or MVAPICH's if that name stands in the arguments of its configuration.
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
    """An installed package, by the name of its distribution and of its module; None if it is not there.

    ``file`` of it is read, not run, for ``constants``; a ``__version__`` there says more than the
    distribution's, such as the build.
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
    """Constants of a Python file, as text; those that are not there, or are computed, are left out."""
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
