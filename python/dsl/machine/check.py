"""Whether a program can be executed, before anything is started."""

from __future__ import annotations

import os

from dsl.errors import ProgramNotExecutableError, ProgramNotFoundError, ScriptError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.model.job import Flavour, Program


NO_PYTHON = "--no-python"


def check_program(program: Program, flavour: Flavour, environ: Mapping[str, str], folder: str = "") -> None:
    """Refuse a script or program that cannot run. A module is left for Python to find.

    ``flavour`` is that of the job: messages spell options as its command does. ``folder`` is where relative
    paths begin; empty: where we are.

    Raises:
        ScriptError: the script does not exist, cannot be read, or is a directory without ``__main__.py``.
        ProgramNotFoundError: the program of ``--no_python`` does not exist.
        ProgramNotExecutableError: it may not be executed.
    """
    if program.kind == "program":
        _check_executable(program.script, flavour, environ, folder)
    elif program.kind == "script":
        _check_script(program.script, flavour, folder)


def find_executable(name: str, environ: Mapping[str, str], folder: str = "") -> str:
    """Where a program lies that may be executed, by the rules of `execvpe`; empty if there is none."""
    return next((one for one in _candidates(name, environ, folder) if _is_executable(one)), "")


def _check_script(script: str, flavour: Flavour, folder: str) -> None:
    path = os.path.join(folder, script)
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise ScriptError(
                f"script {script!r} is a directory without a __main__.py, name the script in it"
            )
    elif not os.path.exists(path):
        raise ScriptError(f"script {script!r} does not exist{_script_hint(script, flavour)}")
    elif not os.access(path, os.R_OK):
        raise ScriptError(f"script {script!r} cannot be read by this user, check its permissions")


def _script_hint(script: str, flavour: Flavour) -> str:
    from shutil import which

    if script.startswith("-"):
        return f", options of {flavour.command} come before the script"
    if os.sep not in script and which(script):
        return f", to run a program that is not Python give {flavour.spell(NO_PYTHON)}"
    return ", check the path" if os.path.isabs(script) else ", check the path and the working directory"


def _check_executable(program: str, flavour: Flavour, environ: Mapping[str, str], folder: str) -> None:
    existing = [path for path in _candidates(program, environ, folder) if os.path.exists(path)]
    if any(_is_executable(path) for path in existing):
        return
    if existing:
        if os.path.isdir(existing[0]):
            raise ProgramNotExecutableError(f"program {existing[0]!r} is a directory")
        mend = f"mark it with chmod +x or leave out {flavour.spell(NO_PYTHON)}"
        raise ProgramNotExecutableError(f"program {existing[0]!r} is not executable, {mend}")
    if os.sep in program:
        raise ProgramNotFoundError(f"program {program!r} does not exist, check the path")
    is_here = os.path.exists(os.path.join(folder, program))
    raise ProgramNotFoundError(
        f"program {program!r} is not on PATH{f', did you mean ./{program}?' if is_here else ''}"
    )


def _candidates(program: str, environ: Mapping[str, str], folder: str) -> list[str]:
    if os.sep in program:
        return [os.path.join(folder, program)]
    path = environ.get("PATH", os.defpath)
    return [os.path.join(folder, one, program) for one in path.split(os.pathsep)]


def _is_executable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
