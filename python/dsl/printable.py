"""Makes text of unknown origin harmless for a terminal."""

from __future__ import annotations

_ESCAPE = (
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b\r]*(?:\x07|\x1b\\)?|[PX^_][^\x1b\r]*(?:\x1b\\)?"
    r"|[ -/]*[0-Z\\`-~]?)|\x9b[0-?]*[ -/]*[@-~]?"
)


def printable(text: str) -> str:
    r"""Remove terminal sequences and control characters; tabs stay, other white space becomes a space.

    Bytes that are no text, which Python holds as lone surrogates, are shown as ``\xff``.
    """
    if text.isprintable():
        return text
    return "".join([_shown(char) for char in without_sequences(text)])


def _shown(char: str) -> str:
    if char.isprintable() or char == "\t":
        return char
    if "\udc80" <= char <= "\udcff":
        return f"\\x{ord(char) - 0xDC00:02x}"
    return " " if char.isspace() else ""


def without_sequences(text: str) -> str:
    """The text without terminal sequences, complete or cut off."""
    if "\x1b" not in text and "\x9b" not in text:
        return text
    import re

    return re.sub(_ESCAPE, "", text)
