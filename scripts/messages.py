"""Write the second half of docs/troubleshooting.md: every message that says how to mend what it reports.

scripts/messages.py           write it
scripts/messages.py --check   end with 1 if it is not what would be written, or a row has no message

A message is a text of the sources. Its mend is the clause that begins with a verb such as "give" or "check",
up to the end. What comes before is what a user looks up; ``…`` stands for what varies.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "python" / "dsl"
RUST = ROOT / "rust"
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN = "<!-- from here on `make docs` writes this page -->\n"

VERBS = (
    "add|ask|change|check|choose|close|connect|copy|correct|create|delete|end|export|find|follow|give|grant|"
    "increase|install|keep|leave|let|look|lower|make|mark|mend|mount|move|name|open|pass|pick|pip|pull|put|"
    "quote|raise|reload|remove|rename|repair|restart|run|say|send|set|start|stop|submit|switch|take|try|type|"
    "ulimit|unset|update|upgrade|use|wait|widen|write"
)
MEND = re.compile(rf"[,:;] ((?:{VERBS})\b.*)", re.DOTALL)
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
"""A text in Rust."""

NOT_MESSAGES = (
    "cli/completion",
    "cli/parser.py",
    "cli/options",
    "model/options.py",
    "view/top_screen.py",
    "doctor/",
)
"""Modules whose texts are help and keys; findings of the doctor have their rows in docs/doctor.md."""
NOT_MENDS = ("Neovim, ", "PyCharm: ", "starting ", "dsl_script=")
"""How texts begin that only look like a mend: settings of editors, a restart, a shell's code."""

HEADINGS = {
    "Command line and script": (
        "cli",
        "plan",
        "model",
        "output",
        "machine",
        "errors.py",
        "words.py",
    ),
    "Several hosts": ("agent", "conductor", "control", "launchers", "resources", "rendezvous"),
    "Devices and cores": ("devices", "binding"),
    "Logs, records and views": ("report", "view", "evidence"),
    "Fork servers and functions": ("forkserver", "functions"),
    "Elastic configs": ("elasticity",),
    "Autotuning": ("tune",),
}
"""The headings of the page, each with the rooms whose messages stand below."""


class Message(NamedTuple):
    """A text with a mend."""

    room: str
    """The first part of the path of its module."""
    what: str
    """What it says before the mend; empty, or signs alone, for a mend that goes behind other texts."""
    mend: str

    @property
    def is_whole(self) -> bool:
        """Whether what it says can be looked up; otherwise it is the end of other messages."""
        return len(re.findall(r"[A-Za-z]{2,}", self.what)) > 1


def texts(tree: ast.AST) -> Iterator[str]:
    """All texts of a module but its documentation and the help of options; ``…`` for what varies."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.keyword) and node.arg in {"help", "description", "epilog"}:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values)
            for part in node.values:
                yield from texts(part) if isinstance(part, ast.FormattedValue) else ()
            continue
        yield from texts(node)


def literals(path: Path) -> Iterator[str]:
    """All texts of a file of Python or Rust."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from texts(ast.parse(source))
    else:
        yield from (match[1] for match in LITERAL.finditer(source))


def messages(sources: Path) -> list[Message]:
    """Every text of a package that has a mend, once."""
    found = {}
    for path in sorted(sources.rglob("*.py")):
        name = path.relative_to(sources).as_posix()
        for text in (
            () if name.startswith(NOT_MESSAGES) else texts(ast.parse(path.read_text(encoding="utf-8")))
        ):
            match = MEND.search(text)
            if match and "\n" not in text and not text.startswith(NOT_MENDS):
                one = Message(name.split("/")[0], re.sub("…+", "…", text[: match.start()]), match[1])
                found[one.what, one.mend] = one
    return sorted(found.values(), key=lambda one: re.sub("[^a-z0-9]", "", one.what.lower()))


def tables(found: Iterable[Message]) -> str:
    """The rows of the whole messages, by heading."""
    heading_of = {room: heading for heading, rooms in HEADINGS.items() for room in rooms}
    rows: dict[str, list[str]] = {heading: [] for heading in HEADINGS}
    for one in found:
        if one.is_whole:
            rows[heading_of.get(one.room, "Command line and script")].append(
                f"| {_code(one.what)} | {_text(one.mend)} |"
            )
    parts = [
        "\n".join([f"### {heading}\n", "| what it says | what to do |", "| --- | --- |", *lines])
        for heading, lines in rows.items()
        if lines
    ]
    return "\n\n".join(parts) + "\n"


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{_text(text)}{fence}"


def _text(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


def page(written: str, found: Iterable[Message]) -> str:
    """The page with its second half anew."""
    return f"{written.partition(BEGIN)[0]}{BEGIN}\n{tables(found)}"


def row_faults(written: str, sources: Path, rust: Path | None = None) -> list[str]:
    """What is wrong above the tables: rows without a message, and ends of messages without a row."""
    files = [*sources.rglob("*.py"), *(rust.rglob("*.rs") if rust else ())]
    known = [_words(" ".join(literals(path))) for path in files]
    rows = [line for line in written.partition(BEGIN)[0].splitlines() if line.startswith("| `")]
    faults = []
    for row in rows:
        said = re.match(r"\| `+(.*?)`+ \|", row)
        words = _words(said[1]) if said else set()
        if not words or not any(words <= module for module in known):
            faults.append(f"docs/{PAGE.name}: no module has a message with all words of this row: {row}")
    faults += [
        f"docs/{PAGE.name}: no row above the tables has the mend {one.mend!r}, add one"
        for one in messages(sources)
        if not one.is_whole and not any(_words(one.mend) <= _words(row) for row in rows)
    ]
    return faults


def _words(text: str) -> set[str]:
    """The words of a text. A row is compared by them, because several texts may make one message."""
    return set(re.findall(r"[A-Za-z][A-Za-z_]*", text))


def problems() -> list[str]:
    """What is wrong with the page, a line each."""
    written = PAGE.read_text(encoding="utf-8")
    faults = row_faults(written, SOURCES, RUST)
    if written != page(written, messages(SOURCES)):
        faults.append(f"docs/{PAGE.name} does not have the messages of the sources: run make docs")
    return faults


def main() -> None:
    """Write the page, or compare it."""
    if "--check" in sys.argv[1:]:
        found = problems()
        print("\n".join(found) or f"docs/{PAGE.name} is up to date")
        sys.exit(bool(found))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), messages(SOURCES)), encoding="utf-8")


if __name__ == "__main__":
    main()
