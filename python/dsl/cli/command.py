"""What both commands do around their plan: speak to the user, and make an exit code of a mistake."""

from __future__ import annotations

import sys

from dsl.errors import DslError
from dsl.model import LEVELS, Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


class Command:
    """A command by the name that its messages start with."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, work: Callable[[], int]) -> int:
        """The exit code of ``work``; a mistake of the user is one line on stderr."""
        try:
            return work()
        except DslError as error:
            self.say(f"error: {error}")
            return error.exit_code
        except KeyboardInterrupt:
            return 130

    def say(self, text: str) -> None:
        """One line on stderr."""
        if sys.stderr is None:
            return
        try:
            print(f"{self.name}: {' '.join(text.splitlines())}", file=sys.stderr, flush=True)
        except OSError:
            return  # nobody reads it

    def show(self, notices: Sequence[Notice], log_level: str) -> None:
        """The notices that are at least of this level."""
        for notice in notices:
            if LEVELS[notice.level] >= LEVELS[log_level]:
                self.say(f"{notice.level}: {notice.text}" if notice.level == "warning" else notice.text)

    def stray_flags(
        self,
        argv: Sequence[str],
        script: str,
        script_args: Sequence[str],
        flags: Collection[str],
        spell: Callable[[str], str] = str,
    ) -> list[Notice]:
        """A warning for the first of ``flags`` that stands after the script and not before it.

        ``script_args`` are the last words of ``argv``. ``spell`` gives an option the spelling of ``flags``.
        """
        own = {spell(word.partition("=")[0]) for word in argv[: len(argv) - len(script_args)]}
        for word in script_args:
            written = word.partition("=")[0]
            flag = spell(written)
            if flag in flags and flag not in own:
                mend = f"put it before the script if it was meant for {self.name}"
                return [Notice("warning", f"{written} comes after the script and goes to {script}, {mend}")]
        return []
