"""Help of all commands: as wide as the terminal, with colours there, and in a pager if it is long."""

from __future__ import annotations

import argparse
import os
import re
import sys
from shutil import get_terminal_size

from dsl import __version__
from dsl.machine.this_process import can_move_cursor
from dsl.model.options import DEEPSPEED, TORCHRUN, dashed
from dsl.output.routes import may_colour
from dsl.report.speak import show_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from _typeshed import SupportsWrite

MOST_COLUMNS = 100
"""Longer lines are hard to read, however wide the terminal is."""

MORE = "https://github.com/dsl-project/dsl/blob/main/docs/cli.md"

EXAMPLES = {
    DEEPSPEED: (
        ("train.py --lr 1e-3", "a worker for each device of this machine"),
        ("--num_gpus 2 train.py", "two workers"),
        ("--hostfile hosts train.py", "workers on each host of the file"),
    ),
    TORCHRUN: (
        ("--nproc-per-node 4 train.py --lr 1e-3", "four workers"),
        ("--nproc-per-node gpu train.py", "one for each GPU"),
        ("--nnodes 2 --node-rank 0 --master-addr n0 train.py", "node 0 of 2"),
    ),
}
"""Example arguments of each command, and what they start."""

_ALSO_BRIEF = ("module", "max_restarts", "log_dir", "bind", "start_method", "strict", "dry_run")
BRIEF = {
    DEEPSPEED: ("num_gpus", "include", "hostfile", "num_nodes", "no_python", *_ALSO_BRIEF),
    TORCHRUN: ("nproc_per_node", "nnodes", "node_rank", "master_addr", "no_python", *_ALSO_BRIEF),
}
"""The values whose options stand in the short help, which fits on one screen."""

EXIT_CODES = (
    "The exit code is 0 if every worker has ended with 0; else that of the worker that failed first, 128 + N "
    "for signal N; 127 or 126 if the program cannot be executed; 2 for bad usage; 130 or 143 if you have "
    "interrupted or terminated the job."
)

HEADING, NAME, END = "\x1b[1m", "\x1b[36m", "\x1b[0m"


class HelpFormatter(argparse.HelpFormatter):
    """Help with defaults, as wide as the terminal."""

    def __init__(self, prog: str) -> None:
        # Without a width argparse imports shutil for it, each time an option is added.
        super().__init__(prog, max_help_position=32, width=_terminal_size()[0])

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # Help shows one spelling of each name, and the value once.
        shown = without_sisters(action.option_strings)
        if not shown or action.nargs == 0:
            return ", ".join(shown) if shown else super()._format_action_invocation(action)
        if action.nargs == "?":
            return f"{', '.join(shown)}[={action.metavar}]"
        return f"{', '.join(shown)} {self._format_args(action, action.dest.upper())}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        shown = action.default not in (None, False, "", -1, "None", argparse.SUPPRESS)
        return f"{text} (default: %(default)s)" if shown and "(default: " not in text else text

    def describe(self, option: argparse.Action) -> tuple[str, str]:
        """An option with its value, and what it is for."""
        return self._format_action_invocation(option), " ".join(self._expand_help(option).split())


class AtOnce(argparse.Action):
    """An option whose work is done when it is read, and ends the program."""

    def __init__(self, option_strings: Sequence[str], do: Callable[[Any], object], **more: Any) -> None:
        """``do`` gets the value of the option."""
        super().__init__(option_strings, **{"nargs": 0, "default": argparse.SUPPRESS, **more, "dest": "help"})
        self._do = do

    def __call__(self, parser: argparse.ArgumentParser, _: object, value: object, *_more: object) -> None:
        """Do it, as argparse asks."""
        self._do(value)
        parser.exit()


class HelpParser(argparse.ArgumentParser):
    """A parser with ``--help`` and ``--version``, whose help has colours and a pager on a terminal."""

    def __init__(self, prog: str, words: str, description: str, epilog: str = "", **more: Any) -> None:
        """``words``: what follows the name of the command in its usage."""
        super().__init__(
            prog=prog, usage=f"%(prog)s {words}", description=description, epilog=epilog or None,
            formatter_class=HelpFormatter, add_help=False, **more,
        )  # fmt: skip
        self.color = False  # from Python 3.14 on, argparse has colours of its own

    def add_standard(self, *help_names: str, text: str = "show this help, and exit") -> None:
        """Add the options that every command has. ``help_names`` show the whole help."""
        self.add_argument(*help_names, action="help", help=text)
        # argparse's own action does not notice if stdout cannot be written.
        self.add_argument(
            "--version", action=AtOnce, do=self._show_version, help="show the version, and exit"
        )

    def _show_version(self, _: object) -> None:
        show_text(f"{self.prog} {__version__}")

    def valued(self) -> list[str]:
        """The spellings of the options whose value may be the next word."""
        return [name for one in self._actions if one.nargs is None for name in one.option_strings]

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Show the whole help to the user, or write it to a file as it is."""
        if file is None:
            show_help(self.format_help())
        else:
            super().print_help(file)


def in_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Lines of two columns."""
    width = max(len(left) for left, _ in rows)
    return "".join(f"  {left.ljust(width)}  {right}\n" for left, right in rows)


def without_sisters(names: Iterable[str]) -> list[str]:
    """The first spelling of each name, with dashes or with underscores."""
    return list({dashed(name): name for name in reversed(list(names))}.values())[::-1]


def brief_row(option: argparse.Action) -> tuple[str, str]:
    """An option in the short help: one spelling, and its text up to the first semicolon."""
    name = next(name for name in option.option_strings if name.startswith("--"))
    words = "|".join(option.choices or ())
    word = str(option.metavar).partition("|")[0] if option.metavar else words if len(words) < 12 else "WORD"
    text = (option.help or "").partition(";")[0].partition(" (default")[0]
    return name if option.nargs == 0 else f"{name} {word}", text


def show_help(text: str) -> None:
    """Print help. On a terminal it has colours, and a pager shows it if it is longer than the screen."""
    text = text.rstrip("\n")
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    if may_colour(os.environ, is_terminal=is_terminal):
        text = _coloured(text)
    is_long = is_terminal and text.count("\n") + 1 >= _terminal_size()[1]
    if not (is_long and can_move_cursor() and _page(text)):
        show_text(text)


def _coloured(text: str) -> str:
    """Headings and the names of options in colour."""
    text = re.sub(r"^(usage:|\S.*:$)", rf"{HEADING}\1{END}", text, flags=re.MULTILINE)
    # A row begins with its options; two blanks end them.
    rows = re.compile(r"^  -\S*(?: \S+)*", re.MULTILINE)
    names = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
    return rows.sub(lambda row: names.sub(lambda name: f"{NAME}{name[0]}{END}", row[0]), text)


def _page(text: str) -> bool:
    """Show text in the user's pager. False: there is none."""
    import shlex
    import signal
    import subprocess

    try:
        words = shlex.split(os.environ.get("PAGER", "less"))
        # As git does: leave the text on the screen, show colours, and end if the text fits.
        pager = subprocess.Popen(words, stdin=subprocess.PIPE, env={"LESS": "FRX", "LV": "-c", **os.environ})
    except (OSError, ValueError, IndexError):
        return False
    handled = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pager
    pager.communicate(text.encode(errors="backslashreplace") + b"\n")
    signal.signal(signal.SIGINT, handled)
    return True


def _terminal_size() -> tuple[int, int]:
    """Columns for a text, and lines."""
    columns, lines = get_terminal_size()
    return max(min(columns, MOST_COLUMNS) - 2, 40), lines
