"""Reads a plain command line without argparse, whose import costs half a launch.

This reader declines everything else (abbreviations, joined flags, help, mistakes), and then `dsl.cli.parser`
reads the same words. Whenever this reader accepts a command line, the parser gives the same values.
"""

from __future__ import annotations

from dsl.cli.options import BadValueError, CommandLine, is_free_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class Options:
    """The values of all options, the script and its arguments, as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def read_line(argv: Sequence[str], line: CommandLine, environ: Mapping[str, str]) -> Options:
    """The values of a command line; ``environ`` may have defaults. Exits with 2 for bad usage."""
    options = read_words(argv, line, environ)
    if options is not None:
        return options
    from dsl.cli.parser import Parser

    return Options(vars(Parser(line, environ).parse_script_args(argv)))


def read_words(
    argv: Sequence[str], line: CommandLine, environ: Mapping[str, str] | None = None
) -> Options | None:
    """The values of a command line; None if it is not plain."""
    environ = environ or {}
    if line.prefix and any(name.startswith(line.prefix) for name in environ):
        return None
    by_name = {name: option for option in line.options for name in option.names}
    given: dict[str, Any] = {}
    words = iter(argv)
    try:
        for word in words:
            option = by_name.get(word)
            if option is None and not _is_value(word):
                name, equals, text = word.partition("=")
                option = by_name.get(name)
                # argparse takes a lone "--" for a separator even here.
                if option is None or option.is_flag or not equals or name[:2] != "--" or text == "--":
                    return None
                given[option.dest] = option.value_of(text)
            elif option is None:
                given[line.script] = word
                break
            elif option.is_flag:
                given[option.dest] = True
            elif option.bare is not None:
                given[option.dest] = option.value_of(option.bare)
            else:
                text = next(words, "--")
                if not _is_value(text) and not (option.is_text and is_free_text(text, by_name)):
                    return None
                given[option.dest] = option.value_of(text)
        else:
            return None  # there is no script
        rest = list(words)
        given[line.rest] = rest[1:] if rest[:1] == ["--"] else rest
        return Options(line.complete(given, environ))
    except BadValueError:
        return None


def _is_value(word: str) -> bool:
    """Whether argparse surely reads the word as a value or a script."""
    return word[:1] != "-" or (word[1:].isascii() and word[1:].isdecimal())
