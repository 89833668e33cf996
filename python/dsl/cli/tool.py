"""Commands that start no job: how all of them run, and the help of all commands.

Help is as wide as the terminal, has colours there, and is shown in a pager if it is long.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from shutil import get_terminal_size

from dsl import __version__
from dsl.cli.command import Command
from dsl.errors import UsageError
from dsl.machine import can_move_cursor
from dsl.model.options import BadValueError, dashed
from dsl.output import may_colour
from dsl.report.speak import show_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, NoReturn

    from _typeshed import SupportsWrite

MOST_COLUMNS = 100
"""Longer lines are hard to read, however wide the terminal is."""

HEADING, NAME, END = "\x1b[1m", "\x1b[36m", "\x1b[0m"


class HelpFormatter(argparse.HelpFormatter):
    """Help with defaults, as wide as the terminal."""

    def __init__(self, prog: str) -> None:
        # Without a width argparse imports shutil for it, each time an option is added.
        super().__init__(prog, max_help_position=32, width=terminal_size()[0])

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


class ToolParser(argparse.ArgumentParser):
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
            "--version", action=AtOnce, do=lambda _: show_text(f"{self.prog} {__version__}"),
            help="show the version, and exit",
        )  # fmt: skip

    def add_job(self, text: str, name: str = "job", nargs: str = "?") -> None:
        """Add the word that names a job; None: the user has given none. ``text``: its help."""
        self.add_argument(name, metavar="JOB", nargs=nargs, type=_job_word, help=text)

    def split(self, argv: Sequence[str], index: int) -> tuple[list[str], list[str]]:
        """Split the words: first ours, with the options from ``index`` on and their values, then the rest."""
        valued = [name for action in self._actions if action.nargs is None for name in action.option_strings]
        while index < len(argv) and argv[index].startswith("-") and argv[index] not in ("-", "--"):
            index += 2 if argv[index] in valued else 1
        rest = list(argv[index:])
        return list(argv[:index]), rest[1:] if rest[:1] == ["--"] else rest

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except BadValueError as error:
            raise argparse.ArgumentError(action, str(error)) from None

    def error(self, message: str) -> NoReturn:
        """End with 2 and one line. For an unknown option, the line has a hint at what the user may mean."""
        subject, _, rest = message.partition(": ")
        if subject == "unrecognized arguments":
            message = f"{subject}: {self.advise(rest)}"
        super().error(message)

    def advise(self, unknown: str) -> str:
        """Unknown words, with a hint."""
        from difflib import get_close_matches

        word = unknown.split(maxsplit=1)[0].partition("=")[0]
        near = get_close_matches(word, self._option_string_actions, 1) if word[:1] == "-" else []
        return f"{unknown}, did you mean {near[0]}?" if near else f"{unknown}, see {self.prog} --help"

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Show the whole help to the user, or write it to a file as it is."""
        if file is None:
            show_help(self.format_help())
        else:
            super().print_help(file)


class Tool(Command):
    """A command that starts no job: its options, and what it does with them."""

    def __init__(
        self,
        name: str,
        words: str,
        description: str,
        add: Callable[[ToolParser], object],
        work: Callable[[argparse.Namespace], int],
        epilog: str = "",
        *,
        options_at: Callable[[Sequence[str]], int | None] = lambda _: None,
        **more: Any,
    ) -> None:
        """``words``, ``description``, ``epilog`` and ``more``: as `ToolParser`. ``add`` adds the options.

        ``work`` returns the exit code. ``options_at``: where our options begin in such words, if a command
        line that is not ours follows, which ``work`` gets as ``words``; None: all words are ours.
        """
        super().__init__(name)
        self._about, self._more = (words, description, epilog), more
        self._add, self._work, self._options_at = add, work, options_at

    def make_parser(self) -> ToolParser:
        """The parser of the options."""
        parser = ToolParser(self.name, *self._about, **self._more)
        parser.add_standard("-h", "--help")
        self._add(parser)
        return parser

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The values of these words. Exits with 2 for bad usage."""
        parser = self.make_parser()
        index = self._options_at(argv)
        own, words = (argv, []) if index is None else parser.split(argv, index)
        return parser.parse_args(own, argparse.Namespace(words=words))

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command, and return its exit code. ``argv`` does not include the program's name."""
        return self.run(lambda: self._work(self.read(sys.argv[1:] if argv is None else argv)))


def _job_word(text: str) -> str:
    if not text.strip():
        raise UsageError(f"{text!r} names no job, give the pid that dsl-ps shows")
    return text


def without_sisters(names: Iterable[str]) -> list[str]:
    """The first spelling of each name, with dashes or with underscores."""
    return list({dashed(name): name for name in reversed(list(names))}.values())[::-1]


def show_help(text: str) -> None:
    """Print help. On a terminal it has colours, and a pager shows it if it is longer than the screen."""
    text = text.rstrip("\n")
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    if may_colour(os.environ, is_terminal=is_terminal):
        text = _coloured(text)
    is_long = is_terminal and text.count("\n") + 1 >= terminal_size()[1]
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


def terminal_size() -> tuple[int, int]:
    """Columns for a text, and lines."""
    columns, lines = get_terminal_size()
    return max(min(columns, MOST_COLUMNS) - 2, 40), lines
