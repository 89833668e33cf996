"""Reads a plain command line without argparse, whose import costs half a launch.

This reader declines everything else (abbreviations, joined flags, help, mistakes), and then `dsl.cli.parser`
reads the same words. Whenever this reader accepts a command line, the parser gives the same values.
"""

from __future__ import annotations

from dsl.model.options import BadValueError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence
    from typing import Any

    from dsl.model.options import CommandLine


class Options:
    """The values of all options, the script and its arguments, as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


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
        return Options(complete(line, given, environ))
    except BadValueError:
        return None


def variables_of(line: CommandLine, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set and hold defaults, by the names of the values."""
    found = {dest: name for name, dest in line.variables if name in environ}
    if line.prefix and any(name.startswith(line.prefix) for name in environ):
        for option in line.options:
            for name in option.names:
                variable = line.prefix + name[2:].replace("-", "_").upper()
                if name[:2] == "--" and variable in environ:
                    found[option.dest] = variable
    return found


def complete(line: CommandLine, given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """All values: the given ones, those of the environment, and defaults. Raises `BadValueError`."""
    variables = variables_of(line, environ)
    values = dict(given)
    for option in line.options:
        dest = option.dest
        if dest not in given and dest in variables:
            try:
                values[dest] = option.value_of(environ[variables[dest]])
            except BadValueError as error:
                raise BadValueError(f"{variables[dest]}: {error}") from None
        if option.given:
            values[option.given] = dest in values
        values.setdefault(dest, option.default)
    return values


def is_free_text(word: str, known: Container[str]) -> bool:
    """Whether a word that begins with a dash is the value of the free-text option before it.

    Like argparse, it is a value if it has a blank and is no option with a value after ``=``. Unlike here,
    argparse reads ``-t 7 -u 30`` as ``-t`` with a value, if there is a ``-t``. ``known``: the spellings of
    all options.
    """
    return " " in word and word.partition("=")[0] not in known


def _is_value(word: str) -> bool:
    """Whether argparse surely reads the word as a value or a script."""
    return word[:1] != "-" or (word[1:].isascii() and word[1:].isdecimal())
