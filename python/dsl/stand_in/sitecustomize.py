"""Each Python below ``dslrun --stand-in`` imports this before its program: our modules take torch's names.

It is the first module of its name in ``PYTHONPATH``, and imports the next one in its place. Its annotations
are text, because a Python 3.6 reads it, too.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))

OURS = {
    "torch.distributed.run": "dsl.run",
    "torch.distributed.launch": "dsl.launch",
    "torch.distributed.launcher.api": "dsl.functions.launcher",
}
"""Modules of torch, and ours."""


def find_spec(name: str, _path: object = None, _target: object = None) -> "Any":
    """What Python asks a finder of modules for: ours has the name of one of torch's."""
    if name not in OURS:
        return None
    from importlib.machinery import ModuleSpec

    return ModuleSpec(name, _Loader(OURS[name]))  # type: ignore[arg-type]


class _Loader:
    """Puts our module in the place of torch's."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def create_module(self, _spec: object) -> None:
        """Leave it to Python."""

    def exec_module(self, module: "ModuleType") -> None:
        """Load ours."""
        sys.modules[module.__name__] = self._load()

    def get_code(self, _name: str) -> "CodeType":
        """What a debugger or another program runs as the main module."""
        code: CodeType = self._load().__spec__.loader.get_code(self._ours)  # type: ignore[union-attr]
        return code

    def _load(self) -> "ModuleType":
        from importlib import import_module

        if "dsl" not in sys.modules:  # this Python need not have it
            sys.path.insert(0, os.path.dirname(os.path.dirname(FOLDER)))
            try:
                import_module("dsl")
            finally:
                del sys.path[0]
        return import_module(self._ours)


def become_command() -> None:
    """Be our command at once if this is ``python -m`` and one of torch's: nothing imports torch for it."""
    args = getattr(sys, "argv", [""])[1:]  # a program may embed a Python that has none
    flag, module = ["", "", *sys.orig_argv[: len(sys.orig_argv) - len(args)]][-2:]
    if flag == "-m" and module in OURS:
        os.execv(sys.executable, [sys.executable, FOLDER, module, *args])  # noqa: S606  it is Python


def run_next() -> None:
    """Import the module of this name that Python would have found without us, if there is one."""
    this = sys.modules.pop(__name__)
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = this


if __name__ == "sitecustomize":  # else somebody looks at it
    if hasattr(sys, "orig_argv"):  # from Python 3.10 on, as ours need it
        become_command()
        sys.meta_path.insert(0, sys.modules[__name__])
    run_next()
