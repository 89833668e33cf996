"""The words that this project does not use, and what to write in their place.

They are looked for in the prose of the documents, and in the texts and comments of the package. A general
checker, such as vale or proselint, does not know our glossary; vale also downloads a program.
"""

from __future__ import annotations

import io
import re
import tokenize
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

RIDDLES = {
    r"ones? that (is|are|was|were|has|have)": "the thing again, by its name",
    r"who(m)?ever": "who it is: the user, the caller",
    r"nor (do|does|did|is|are|has|have|can|will)": "a sentence of its own, with 'not'",
    r"(is|are|was|were) said": "who says it: 'dsl reports'",
    r"(is|are) told(?! apart)": "who tells whom: 'the worker gets'",
    r"stands? in the place": "'replaces'",
    r"nobody else|no one else": "'only'",
    r"(what|as|how) one \w+s|one (can|has to)": "'you'",
}
"""Turns of phrase that have to be read twice, each with what to write."""

HEAVY = {
    r"in order to": "'to'",
    r"utili[sz]e[sd]?|leverages?": "'use'",
    r"prior to": "'before'",
    r"upon": "'on', 'after'",
    r"thus|hence|thereby|whereby|whence|therein|thereof": "'so', or a sentence of its own",
    r"the (former|latter)|respectively": "both names",
    r"due to the fact|in terms of": "'because', 'by'",
    r"simply|obviously": "nothing",
    r"e\.g\.|i\.e\.|etc\.": "'such as', 'that is', 'and so on'",
}
"""Words that say nothing, or that are long for a short one."""

GLOSSARY = {
    r"re-?launch(es|ed)?|re-?spawn(s|ed)?": "'start again', 'restart'",
    r"incarnations?": "'attempt'",
    r"worker (sub)?process(es)?": "'worker'",
    r"slaves?|master nodes?": "'worker', 'node 0'",
    r"coordinators?|controllers?": "'conductor', or 'head' for its process",
}
"""Words of other projects for things that have a name here: the glossary is in docs/design.md."""

RULES = [
    (re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE), instead)
    for pattern, instead in {**RIDDLES, **HEAVY, **GLOSSARY}.items()
]
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->")
PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
"""Tokens with prose; Python 3.12 and later split an f-string."""


def faults(place: str, text: str) -> list[str]:
    """A line for each word of a line of prose that we do not use."""
    bare = CODE.sub("", text)
    return [
        f"{place}: write {instead} in place of {found[0]!r}"
        for rule, instead in RULES
        for found in rule.finditer(bare)
    ]


def python_prose(source: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of the comments and the texts of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in PROSE:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line
