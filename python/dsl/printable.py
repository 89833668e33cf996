"""Makes text of unknown origin harmless for a terminal."""

from __future__ import annotations

_ESCAPE = (
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b\r]*(?:\x07|\x1b\\)?|[PX^_][^\x1b\r]*(?:\x1b\\)?"
    r"|[ -/]*[0-Z\\`-~]?)|\x9b[0-?]*[ -/]*[@-~]?"
)


def printable(text: str) -> str:
    """Remove terminal sequences and control characters; tabs stay, other white space becomes a space."""
    if text.isprintable():
        return text
    text = without_sequences(text)
    kept = (char if char.isprintable() or char == "\t" else " " if char.isspace() else "" for char in text)
    return "".join(kept)


def without_sequences(text: str) -> str:
    """The text without terminal sequences, complete or cut off."""
    if "\x1b" not in text and "\x9b" not in text:
        return text
    import re

    return re.sub(_ESCAPE, "", text)
