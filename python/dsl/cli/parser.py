"""Reads a command line with argparse, when `dsl.cli.reader` declines it: help, mistakes, abbreviations."""

from __future__ import annotations

import argparse
import sys

from dsl.cli.help import (
    BRIEF,
    EXAMPLES,
    EXIT_CODES,
    MORE,
    AtOnce,
    HelpParser,
    brief_row,
    in_columns,
    show_help,
    without_sisters,
)
from dsl.cli.reader import complete, is_free_text, variables_of
from dsl.lists import shorten
from dsl.model.options import SHELLS, BadValueError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, NoReturn

    from dsl.model.options import CommandLine, Option


MOST_TOLD = 5
"""Most unknown options that an error message lists."""


_UNSAID = object()
"""Stands for the value of an option that the command line does not have."""


class Parser(HelpParser):
    """A parser for ``OPTIONS SCRIPT ARGUMENTS`` that never reads the words after the script.

    Plain argparse does: it refuses ``train.py --n 3`` because ``--n`` could stand for several of its options.
    """

    def __init__(self, line: CommandLine, environ: Mapping[str, str] | None = None) -> None:
        """``environ`` may have defaults of options. They are read only if the command line has none."""
        super().__init__(line.program, "[OPTIONS] SCRIPT [ARGUMENTS]", line.description, EXIT_CODES)
        self._whole: set[str] = set()
        """Spellings that cannot be shortened, so that abbreviations of others stay unambiguous."""
        self._texts = {option.dest for option in line.options if option.is_text}
        self.origin = line.origin
        """The tool that the command replaces."""
        self._rest = line.rest
        for title, options in line.groups.items():
            group = self.add_argument_group(title)
            for option in options:
                group.add_argument(*option.names, **_facts(option))
                whole = option.names if option.origin != line.origin else option.own_names
                self._whole.update([name for name in whole if name.startswith("--")])
        self.add_argument("-h", action=AtOnce, do=self._show_brief, help="show what most jobs need, and exit")
        self.add_standard("--help", text="show all options, and exit")
        self.add_argument(
            "--completion", action=AtOnce, do=self._refuse_completion, nargs=None, choices=SHELLS,
            help="show the script by which a shell completes all commands of dsl, and exit",
        )  # fmt: skip
        self._whole.update(("--version", "--completion"))
        self.add_argument(line.script, metavar="SCRIPT", help="what each worker runs")
        action = self.add_argument(
            line.rest, nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="passed on as they are"
        )
        action.required = False
        self._unknown: list[str] = []
        """The unknown options of the last command line."""
        self._line, self._environ = line, environ or {}
        self._inherited: dict[str, str] = {}
        """Values of the last command line that are from the environment, each with its variable."""
        for dest, variable in variables_of(line, self._environ).items():
            self.set_defaults(**{dest: f"{self._environ[variable]}, from {variable}"})  # for the help
        self._defaults_of_ours = {option.dest: self.get_default(option.dest) for option in line.options}

    def format_brief(self) -> str:
        """Help for one screen."""
        chosen = {action.dest: action for action in self._actions}
        options = in_columns([brief_row(chosen[dest]) for dest in BRIEF[self.origin]])
        return (
            f"{self.format_usage()}\n{self.description}\n\n{self._format_examples()}\n{options}\n"
            f"{self.prog} --help shows all options, and more is at\n{MORE}\n"
        )

    def _format_examples(self) -> str:
        return in_columns([(f"{self.prog} {words}", text) for words, text in EXAMPLES[self.origin]])

    def _show_brief(self, _: object) -> None:
        show_help(self.format_brief())

    def _refuse_completion(self, shell: object) -> NoReturn:
        # A command line that has it alone never gets here.
        self.error(f"--completion stands alone, as in {self.prog} --completion {shell}")

    def option(self, name: str) -> argparse.Action:
        """The option with that spelling."""
        return self._option_string_actions[name]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse; values from the environment are read, too. Exits with 2 for bad values."""
        found = argparse.Namespace() if namespace is None else namespace
        for option in self._line.options:
            is_theirs = self.get_default(option.dest) is not self._defaults_of_ours[option.dest]
            if not hasattr(found, option.dest) and not is_theirs:  # a default that the program has set counts
                setattr(found, option.dest, _UNSAID)
        found, rest = super().parse_known_args(args, found)
        given = {name: value for name, value in vars(found).items() if value is not _UNSAID}
        inherited = variables_of(self._line, self._environ)
        self._inherited = {dest: name for dest, name in inherited.items() if dest not in given}
        try:
            vars(found).update(complete(self._line, given, self._environ))
        except BadValueError as error:
            self.error(str(error))
        return found, rest

    def name_variables(self, argv: Sequence[str], message: str) -> str:
        """Add to a message about options the names of the variables that have set them, if any."""
        self.parse_script_args(argv)
        words = set(message.replace(":", " ").replace(",", " ").split())
        found = []
        for option in self._line.options:
            named = [name for name in option.names if name in words]
            if option.dest in self._inherited and named:
                found.append(f"{named[0]} is from {self._inherited[option.dest]}")
        return f"{message} ({', '.join(found)})" if found else message

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except BadValueError as error:
            raise argparse.ArgumentError(action, str(error)) from None

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # argparse calls this only for a word that is not exactly an option.
        found: list[Any] = super()._get_option_tuples(option_string)
        found = [
            item for item in found if item[1] not in self._whole or item[1] == option_string.partition("=")[0]
        ]
        # Two spellings of the same option are not ambiguous.
        return list({id(item[0]): item for item in reversed(found)}.values())[::-1]

    def error(self, message: str) -> NoReturn:
        """End with 2 and one line. For an unknown option, it names the one you probably mean."""
        subject, _, rest = message.partition(": ")
        names = subject.removeprefix("argument ")
        if rest == "SCRIPT":  # it is missing
            subject = "unrecognized arguments" if self._unknown else subject
            rest = " ".join(self._unknown) or f"{rest}, see {self.prog} -h"
        if subject == "unrecognized arguments":
            rest = self._advise(rest.split())
        elif names != subject:
            shown = without_sisters(names.split("/"))
            subject = f"argument {'/'.join(shown)}"
            if rest == "expected one argument" and self.option(shown[-1]).dest in self._texts:
                rest += f", one that begins with a dash stands behind =, as in {shown[-1]}=-x"
        super().error(f"{subject}: {rest}" if rest else message)

    def _advise(self, unknown: Iterable[str]) -> str:
        """Unknown options, each with a hint at what the user probably meant."""
        parts = [(shorten(word), self._hint(word)) for word in list(dict.fromkeys(unknown))[:MOST_TOLD]]
        if not parts[-1][1]:
            parts[-1] = (parts[-1][0], f"see {self.prog} --help")
        return "; ".join(", ".join(filter(None, part)) for part in parts)

    def _hint(self, word: str) -> str:
        from dsl.cli.hints import hint

        return hint(word.partition("=")[0], self.origin, self._option_string_actions)

    def parse_script_args(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse up to the script, and keep the words after it unchanged. Exits with 2 for bad usage.

        As in argparse, the first ``--`` is a separator if it comes before the script or right after it.
        """
        if not argv:
            self.print_usage(sys.stderr)
            what = f"the following arguments are required: SCRIPT, see {self.prog} -h"
            self.exit(2, f"{self._format_examples()}{self.prog}: error: {what}\n")
        own, rest = self._split(argv)
        self._unknown = self._find_unknown(argv)
        namespace, unknown = self.parse_known_args(own)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(self._unknown or unknown)}")
        follows = rest[1:] if rest[:1] == ["--"] and "--" not in own else rest
        setattr(namespace, self._rest, follows)
        return namespace

    def _split(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split the words: ours, up to and with the script, and the rest. argparse finds the mistakes later.

        A value that argparse would not read as the value of its option is joined to the option with ``=``.
        """
        own: list[str] = []
        words = iter(argv)
        for word in words:
            own.append(word)
            if word == "--":
                own += [script for script in [next(words, None)] if script is not None]
                break
            action, has_value = self._read_option(word)
            if action is None and self._is_value(word):
                break
            if action is None or has_value or action.nargs == 0:
                continue
            if action.nargs == "?":  # argparse would read the next word as its value
                own[-1] = f"{word}={action.const}"
            elif (text := next(words, None)) is not None:
                joined = action.dest in self._texts and text[:1] == "-"
                if joined and is_free_text(text, self._option_string_actions):
                    own[-1] = f"{word}={text}"
                else:
                    own.append(text)
        return own, list(words)

    def _find_unknown(self, argv: Sequence[str]) -> list[str]:
        """The unknown options, up to a word that may be the script or a value."""
        found: list[str] = []
        takes_next = False
        for word in argv:
            if word == "--" or (self._is_value(word) and not takes_next):
                break
            if self._is_value(word):
                takes_next = False
                continue
            action, has_value = self._read_option(word)
            if action is None:
                found.append(word)
                meant = self._hint(word).rstrip("?").split()
                action, has_value = self._option_string_actions.get(meant[-1] if meant else ""), "=" in word
            takes_next = action is not None and action.nargs is None and not has_value
        return found

    def _is_value(self, word: str) -> bool:
        """Whether argparse reads a word that is no option as a value."""
        is_number = self._negative_number_matcher.match(word) is not None
        return word[:1] != "-" or word == "-" or " " in word or is_number

    def _read_option(self, word: str) -> tuple[argparse.Action | None, bool]:
        """The last option that argparse finds in a word, if any, and whether the word contains its value."""
        actions = self._option_string_actions
        name, equals, _ = word.partition("=")
        if name in actions:
            return actions[name], bool(equals)
        if name.startswith("--"):
            matches = [
                action
                for option, action in actions.items()
                if option.startswith(name) and option not in self._whole
            ]
            return (matches[0] if len(set(map(id, matches))) == 1 else None), bool(equals)
        action = None
        if word[:1] == "-":
            for index, letter in enumerate(word[1:], start=2):  # flags may be joined: -qH PATH
                action = actions.get(f"-{letter}")
                if action is None or action.nargs is None:
                    return action, index < len(word)
        return action, False


def _facts(option: Option) -> dict[str, Any]:
    """The arguments of `argparse.ArgumentParser.add_argument` for an option, besides its names."""
    facts: dict[str, Any] = {"help": option.help, "default": option.default}
    if option.is_flag:
        return {**facts, "action": "store_true"}
    facts.update(type=option.read, metavar=option.metavar or None)
    if option.bare is not None:
        facts.update(nargs="?", const=option.bare)
    facts["choices"] = None if option.choices is None else list(option.choices)
    return facts
