"""Whether a program can be executed, before anything is started."""

from __future__ import annotations

import os

from dsl.errors import ProgramNotExecutableError, ProgramNotFoundError, ScriptError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.model.job import Flavour, Program


NO_PYTHON = "--no-python"


def check_program(program: Program, flavour: Flavour, environ: Mapping[str, str]) -> None:
    """Refuse a script or program that cannot run. A module is left for Python to find.

    ``flavour`` is that of the job: messages spell options as its command does.

    Raises:
        ScriptError: the script does not exist, cannot be read, or is a directory without ``__main__.py``.
        ProgramNotFoundError: the program of ``--no_python`` does not exist.
        ProgramNotExecutableError: it may not be executed.
    """
    if program.kind == "program":
        _check_executable(program.script, flavour, environ)
    elif program.kind == "script":
        _check_script(program.script, flavour)


def _check_script(script: str, flavour: Flavour) -> None:
    if os.path.isdir(script):
        if not os.path.exists(os.path.join(script, "__main__.py")):
            raise ScriptError(
                f"script {script!r} is a directory without a __main__.py, name the script in it"
            )
    elif not os.path.exists(script):
        raise ScriptError(f"script {script!r} does not exist{_script_hint(script, flavour)}")
    elif not os.access(script, os.R_OK):
        raise ScriptError(f"script {script!r} cannot be read by this user, check its permissions")


def _script_hint(script: str, flavour: Flavour) -> str:
    from shutil import which

    if script.startswith("-"):
        return f", options of {flavour.command} come before the script"
    if os.sep not in script and which(script):
        return f", to run a program that is not Python give {flavour.spell(NO_PYTHON)}"
    return ", check the path" if os.path.isabs(script) else ", check the path and the working directory"


def _check_executable(program: str, flavour: Flavour, environ: Mapping[str, str]) -> None:
    if os.sep in program:
        candidates = [program]
    else:
        path = environ.get("PATH", os.defpath)
        candidates = [os.path.join(folder, program) for folder in path.split(os.pathsep)]
    existing = [candidate for candidate in candidates if os.path.exists(candidate)]
    if any(os.path.isfile(candidate) and os.access(candidate, os.X_OK) for candidate in existing):
        return
    if existing:
        if os.path.isdir(existing[0]):
            raise ProgramNotExecutableError(f"program {existing[0]!r} is a directory")
        mend = f"mark it with chmod +x or leave out {flavour.spell(NO_PYTHON)}"
        raise ProgramNotExecutableError(f"program {existing[0]!r} is not executable, {mend}")
    if os.sep in program:
        raise ProgramNotFoundError(f"program {program!r} does not exist, check the path")
    hint = f", did you mean ./{program}?" if os.path.exists(program) else ""
    raise ProgramNotFoundError(f"program {program!r} is not on PATH{hint}")
