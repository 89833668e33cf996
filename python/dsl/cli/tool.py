"""Commands that start no job: their parser, and how all of them run."""

from __future__ import annotations

import argparse

from dsl.cli.command import Command
from dsl.cli.help import HelpParser
from dsl.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn


class ToolParser(HelpParser):
    """The parser of a command that starts no job."""

    def __init__(self, prog: str, words: str, description: str, epilog: str = "", **more: Any) -> None:
        """As `HelpParser`; also adds the options that every command has."""
        super().__init__(prog, words, description, epilog, **more)
        self.add_standard("-h", "--help")

    def add_job(self, text: str, name: str = "job", nargs: str = "?") -> None:
        """Add the word that names a job; None: the user has given none. ``text``: its help."""
        self.add_argument(name, metavar="JOB", nargs=nargs, type=_job_word, help=text)

    def error(self, message: str) -> NoReturn:
        """End with 2 and one line. For an unknown option, the line names a similar one."""
        subject, _, rest = message.partition(": ")
        if subject == "unrecognized arguments":
            from difflib import get_close_matches

            word = rest.split()[0].partition("=")[0]
            near = get_close_matches(word, self._option_string_actions, 1) if word[:1] == "-" else []
            message += f", did you mean {near[0]}?" if near else f", see {self.prog} --help"
        super().error(message)


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
    ) -> None:
        """``words``, ``description`` and ``epilog``: as `HelpParser`. ``add`` adds the options.

        ``work`` returns the exit code.
        """
        super().__init__(name)
        self._about = words, description, epilog
        self._add, self._work = add, work

    def make_parser(self) -> ToolParser:
        """The parser of the options."""
        parser = ToolParser(self.name, *self._about)
        self._add(parser)
        return parser

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command, and return its exit code. ``argv`` does not include the program's name."""
        return self.run(lambda: self._work(self.make_parser().parse_args(argv)))


def _job_word(text: str) -> str:
    if not text.strip():
        raise UsageError(f"{text!r} names no job, give the pid that dsl-ps shows")
    return text
