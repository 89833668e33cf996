"""Our commands and modules under the names of torch's and DeepSpeed's: ``--stand-in`` and ``--make-links``.

This folder is the first in ``PATH`` and ``PYTHONPATH`` of a program below ``--stand-in``: it has the commands
``torchrun`` and ``deepspeed``, and the module `sitecustomize`, which each Python imports before its program.
Workers get neither (`dsl.facts.own_environ`).
"""

from __future__ import annotations

import os
import signal
import sys

from dsl.errors import OptionError, ProgramNotExecutableError
from dsl.facts import own_environ
from dsl.machine.check import check_program, find_executable
from dsl.model.options import dashed
from dsl.model.request import Program
from dsl.plan.worker import TORCH
from dsl.report.speak import show_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

FOLDER = os.path.dirname(os.path.abspath(__file__))

COMMANDS = {"torchrun": "dslrun", "deepspeed": "dsl"}
"""The commands of others, and ours."""


def reply(words: Sequence[str]) -> bool:
    """Do what a command line that begins with ``--stand-in`` or ``--make-links`` asks; false: it is wrong.

    Raises:
        ProgramError: the program cannot be executed.
        OptionError: the links cannot be made.
    """
    option, equals, folder = words[0].partition("=")
    rest = list(words[1:])
    if dashed(option) == "--make-links":
        folders = [folder] * bool(equals) + rest
        if len(folders) == 1 and folders[0]:
            make_links(folders[0])
        return len(folders) == 1 and folders[0] != ""
    program = rest[1:] if rest[:1] == ["--"] else rest
    if not equals and program and (program != rest or program[0][:1] != "-"):
        become(program)
    return False


def become(program: list[str]) -> NoReturn:
    """Execute a program in place of this process. What it starts finds our commands and modules.

    Raises:
        ProgramError: it does not exist, or cannot be executed.
    """
    environ = environment(own_environ())
    check_program(Program("program", program[0]), TORCH, environ, option="")
    for path in [os.path.join(FOLDER, name) for name in COMMANDS]:
        if not os.access(path, os.X_OK):
            raise ProgramNotExecutableError(f"{path} is not executable, mark it with chmod +x")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what it executes would, too
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(program[0], program, environ)  # noqa: S606  users name it
    except OSError as error:
        raise ProgramNotExecutableError(f"program {program[0]!r}: {error.strerror}") from None


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """This environment with our folder first in ``PATH`` and ``PYTHONPATH``."""
    found = {**environ, "DSL_STAND_IN": FOLDER, "DSL_STAND_IN_PYTHON": sys.executable}
    for name, default in (("PATH", os.defpath), ("PYTHONPATH", "")):
        found[name] = os.pathsep.join(filter(None, (FOLDER, environ.get(name, default))))
    return found


def make_links(folder: str) -> None:
    """Make links to our commands, with the names of others, in a folder. Raises OptionError."""
    places = [os.path.dirname(os.path.abspath(path)) for path in (sys.argv[0], sys.executable)]
    links = {}
    for name, ours in COMMANDS.items():
        target = find_executable(ours, {"PATH": os.pathsep.join(places)})
        if not target:
            raise OptionError(f"--make-links: there is no command {ours} in {' or '.join(places)}")
        link = os.path.join(folder, name)
        if os.path.lexists(link) and os.path.realpath(link) != os.path.realpath(target):
            raise OptionError(f"--make-links: {link} exists already, remove it or name another directory")
        links[link] = target
    try:
        os.makedirs(folder, exist_ok=True)
        for link, target in links.items():
            if not os.path.lexists(link):
                os.symlink(target, link)
            show_text(f"{link} -> {target}")
    except OSError as error:
        raise OptionError(f"--make-links {folder}: {error.strerror}, name another directory") from None
