"""Checks whether a program can run, before anything is started."""

from __future__ import annotations

import os
import sys

from dsl.errors import ProgramNotExecutableError, ProgramNotFoundError, ScriptError, ScriptSyntaxError
from dsl.words import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from dsl.model.job import Flavour
    from dsl.model.request import Program

NO_PYTHON = "--no-python"

LARGEST_SCRIPT = 4 * 1024
"""Most bytes of a script that is compiled to find mistakes: Python compiles two to four in a microsecond."""
MOST_SCRIPTS = 1000
"""So many scripts of a directory are compared with one that does not exist."""
NEAR = 0.8
"""How much a name must be like another one to be meant instead, up to 1."""
LARGEST_SHELL_SCRIPT = 256 * 1024
"""The same limit for a script that names a shell: the compiler stops early in it."""
SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh", "csh", "tcsh", "fish"})

# A package that contains one of these words may look for its modules in other places.
_MOVES_MODULES = (b"__path__", b"modules", b"meta_path", b"path_hooks")


def check_program(
    program: Program,
    flavour: Flavour,
    environ: Mapping[str, str],
    folder: str = "",
    *,
    option: str = NO_PYTHON,
) -> None:
    """Refuse a script, module or program that cannot run.

    ``flavour``: that of the job; messages spell options as its command does. ``folder``: where relative paths
    begin; empty: the working directory. ``option``: the option by which the user asked for a program instead
    of a script, for messages; empty: there is no such option. Python code is checked only if the workers use
    our own interpreter.

    Raises:
        ScriptError: the script or module does not exist, cannot be reached or read, is a directory without
            ``__main__.py``, or is not Python.
        ScriptSyntaxError: it is not correct Python.
        ProgramNotFoundError: the program of ``--no_python`` does not exist.
        ProgramNotExecutableError: the program of ``--no_python`` may not be executed, or not be reached.
    """
    if program.kind == "program":
        check_executable(program.script, option and flavour.spell(option), environ, folder)
    elif program.kind == "script":
        _check_script(program.script, flavour, folder)
    if (environ.get(flavour.interpreter_variable) or sys.executable) != sys.executable:
        return
    if program.kind == "script":
        _check_text(program.script, flavour, folder)
    elif program.kind == "module":
        _check_module(program.script, flavour, environ, folder)


def find_executable(name: str, environ: Mapping[str, str], folder: str = "") -> str:
    """The path of an executable program, found by the rules of `execvpe`; empty if there is none."""
    return next(filter(_is_executable, _candidates(name, environ, folder)), "")


def is_out_of_reach(path: str) -> bool:
    """Whether this user may not enter a directory of a path: then nobody can tell whether it exists."""
    try:
        os.stat(path)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return False


def _check_script(script: str, flavour: Flavour, folder: str) -> None:
    path, why = os.path.join(folder, script), ""
    if script.endswith(".ipynb"):
        why = "is a notebook, make it a script: jupyter nbconvert --to script"
    elif is_out_of_reach(os.path.join(path, "__main__.py")):  # of a file, this is a path that makes no sense
        why = "cannot be reached by this user, check the permissions of its directories"
    elif os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            why = "is a directory without a __main__.py, name the script in it"
    elif not os.path.exists(path):
        why = _bad_link(path) or f"does not exist{_script_hint(script, flavour, path)}"
    elif not os.access(path, os.R_OK):
        why = "cannot be read by this user, check its permissions"
    if why:
        raise ScriptError(f"script {script!r} {why}")


def _bad_link(path: str) -> str:
    """What is wrong with a path if a symbolic link makes it lead nowhere; else empty."""
    from errno import ELOOP

    try:
        os.stat(path)
    except OSError as error:
        if error.errno == ELOOP:
            return "leads through a loop of symbolic links, name the file itself"
        if os.path.islink(path):
            return f"is a link to {os.readlink(path)!r}, which does not exist"
    except ValueError:
        pass  # no file can have that name
    return ""


def _check_text(script: str, flavour: Flavour, folder: str) -> None:
    """Check the text of a script, unless it is long: the check must cost next to nothing."""
    path = os.path.join(folder, script)
    if not os.path.isfile(path):  # a directory, or a pipe that can be read once
        return
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read(LARGEST_SHELL_SCRIPT + 1)
    except OSError:
        return
    kind = _foreign_kind(text)
    is_long = b"\0" in text or len(text) > (LARGEST_SHELL_SCRIPT if kind else LARGEST_SCRIPT)
    mistake = None if kind == "ELF" or is_long else _mistake(text, script)
    if kind == "ELF" and (habit := _habit(os.path.basename(script), flavour)):
        raise ScriptError(f"script {script!r} is no script{habit}")
    if kind == "ELF" or (kind and mistake):
        program = script if os.sep in script else f"./{script}"
        marked = "" if os.access(path, os.X_OK) else ", and mark it with chmod +x"
        raise ScriptError(
            f"script {script!r} is {'a program' if kind == 'ELF' else f'for {kind}'}, not Python: "
            f"to run it give {flavour.spell(NO_PYTHON)} {program}{marked}"
        )
    if mistake is None:
        return
    name = script if script.isprintable() else quote(script)
    where = f"{name}:{mistake.lineno}" if mistake.lineno else name
    line = (mistake.text or "").strip()
    raise ScriptSyntaxError(
        f"{where}: {type(mistake).__name__}: {mistake.msg}{f': {quote(line)}' if line else ''}"
    )


def _foreign_kind(text: bytes) -> str:
    """``ELF``, or the name of a shell, if the text is most likely not Python; else empty."""
    if text.startswith(b"\x7fELF"):
        return "ELF"
    if not text.startswith(b"#!"):
        return ""
    words = text[2:].partition(b"\n")[0].decode("ascii", "replace").split()
    names = [word.rpartition("/")[2] for word in words if word[:1] != "-" and "=" not in word]
    name = next((name for name in names if name != "env"), "")
    return name if name in SHELLS else ""


def _mistake(text: bytes, name: str) -> SyntaxError | None:
    """Why Python cannot compile a text; None if it can, or if we cannot tell."""
    import _warnings

    # The workers show the warnings of a text. We avoid the module `warnings`, which takes long to import.
    filters: list[Any] = getattr(sys.modules.get("warnings"), "filters", _warnings.filters)
    ignored = ("ignore", None, Warning, None, 0)
    filters.insert(0, ignored)
    try:
        compile(text, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return error
    except (ValueError, OverflowError, RecursionError, MemoryError):
        return None
    finally:
        filters.remove(ignored)
    return None


def _check_module(name: str, flavour: Flavour, environ: Mapping[str, str], folder: str) -> None:
    """Refuse a module that Python will not find. Nothing is imported for this."""
    if sys.flags.isolated or sys.flags.no_site or sys.flags.no_user_site:
        return  # the workers look in more places
    more = [os.path.join(folder, path) for path in environ.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        missing = _missing_module(name, [folder or os.getcwd(), *more, *sys.path])
    except Exception:  # noqa: BLE001  a foreign finder, or a finder that needs an imported package
        return
    if not missing:
        return
    whole = "" if missing == name else f" (there is no {missing!r})"
    mend = "check the name and the working directory"
    for place in (os.path.join(folder, *name.split(".")), folder or "."):
        if is_out_of_reach(place) or (os.path.isdir(place) and not os.access(place, os.R_OK | os.X_OK)):
            raise ScriptError(
                f"module {name!r} cannot be read by this user, check the permissions of {place!r}"
            )
    if os.path.isfile(os.path.join(folder, name)):
        mend = f"leave out {flavour.spell('--module')} to run the file"
    raise ScriptError(f"module {name!r} does not exist{whole}, {mend}")


def _missing_module(name: str, path: Sequence[str]) -> str:
    """The first part of a module's name that surely does not exist; empty if all parts exist or may exist."""
    parts = name.split(".")
    if not all(parts):
        return name
    locations: Sequence[str] | None = None
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        spec = _find_module(part, path if locations is None else locations, is_top=locations is None)
        if spec is None:
            return part
        locations = spec.submodule_search_locations
        if locations is None or _may_move(spec):
            return ""
        locations = list(locations)
    found = _find_module(f"{name}.__main__", locations or (), is_top=False)
    return "" if found else f"{name}.__main__"


def _find_module(name: str, path: Sequence[str], *, is_top: bool) -> Any:
    """The spec of a module from Python's finders, which only read directories; None if there is none."""
    for finder in sys.meta_path:
        places = path if not is_top or getattr(finder, "__name__", "") == "PathFinder" else None
        spec = finder.find_spec(name, places)
        if spec is not None:
            return spec
    return None


def _may_move(spec: Any) -> bool:
    """Whether the code of a package may change where Python looks for its modules."""
    if not spec.origin:
        return False  # a folder without code
    if not spec.origin.endswith(".py"):
        return True
    try:
        with open(spec.origin, "rb") as file:
            text = file.read()
    except OSError:
        return True
    return any(word in text for word in _MOVES_MODULES)


def _script_hint(script: str, flavour: Flavour, path: str) -> str:
    from difflib import get_close_matches
    from shutil import which

    if script.startswith("-"):
        return f", options of {flavour.command} come before the script"
    if script in ("help", "version"):
        return f", did you mean {flavour.command} --{script}?"
    if habit := _habit(script, flavour):
        return habit
    if os.sep not in script and which(f"dsl-{script}"):
        return f", did you mean the command dsl-{script}?"
    if os.sep not in script and which(script):
        return f", to run a program that is not Python give {flavour.spell(NO_PYTHON)}"
    folder, name = os.path.split(path)
    try:
        scripts = [one for one in os.listdir(folder or os.curdir) if one.endswith(".py")][:MOST_SCRIPTS]
    except OSError:
        scripts = []
    if near := get_close_matches(name, scripts, 1, NEAR):
        return f", did you mean {os.path.join(os.path.dirname(script), near[0])!r}?"
    return ", check the path" if os.path.isabs(script) else ", check the path and the working directory"


def _habit(name: str, flavour: Flavour) -> str:
    """What to do about a program that users write in front of a script, out of habit."""
    is_habit = name.rstrip("0123456789.") in ("python", "torchrun", "deepspeed", "dsl", "dslrun")
    return f": leave it out, {flavour.command} starts scripts itself" if is_habit else ""


def check_executable(program: str, option: str, environ: Mapping[str, str], folder: str) -> None:
    """Refuse a program that cannot be executed. ``option``: that by which the user asked for it.

    Raises:
        ProgramNotFoundError: it does not exist.
        ProgramNotExecutableError: it may not be executed, or not be reached.
    """
    existing = [path for path in _candidates(program, environ, folder) if os.path.exists(path)]
    if any(map(_is_executable, existing)):
        return
    if existing:
        if os.path.isdir(existing[0]):
            raise ProgramNotExecutableError(f"program {existing[0]!r} is a directory")
        mend = "mark it with chmod +x" + (f" or leave out {option}" if option else "")
        raise ProgramNotExecutableError(f"program {existing[0]!r} is not executable, {mend}")
    if os.sep in program and is_out_of_reach(os.path.join(folder, program)):
        raise ProgramNotExecutableError(
            f"program {program!r} cannot be reached by this user, check the permissions of its directories"
        )
    if os.sep in program:
        why = _bad_link(os.path.join(folder, program)) or "does not exist, check the path"
        raise ProgramNotFoundError(f"program {program!r} {why}")
    is_here = os.path.exists(os.path.join(folder, program))
    raise ProgramNotFoundError(
        f"program {program!r} is not on PATH{f', did you mean ./{program}?' if is_here else ''}"
    )


def _candidates(program: str, environ: Mapping[str, str], folder: str) -> list[str]:
    if os.sep in program:
        return [os.path.join(folder, program)]
    path = environ.get("PATH", os.defpath)
    return [os.path.join(folder, place, program) for place in path.split(os.pathsep)]


def _is_executable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
