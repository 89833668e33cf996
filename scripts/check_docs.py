"""Check the documents without a network: links, headings, guarantees without a test, generated pages, words.

README is also shown where the package is published, so its links are absolute. They are checked as the files
of this checkout that they name.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import api_docs  # beside this script
import command_files  # as above
import guarantees  # as above
import messages  # as above
import word_list  # as above

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s+(\S+)")
REPOSITORY = re.compile(r'^Repository = "([^"]+)"', re.MULTILINE)
HEADING = re.compile(r"#{1,6}\s+(.*?)\s*#*$")


def prose(path: Path) -> list[tuple[int, str]]:
    """Numbered lines of a Markdown file, without its code blocks."""
    lines, fenced = [], False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced:
            lines.append((number, line))
    return lines


@cache
def anchors(path: Path) -> frozenset[str]:
    """The names by which the headings of a file can be linked, as repository hosts derive them."""
    seen: dict[str, int] = {}
    found = set()
    for _, line in prose(path):
        heading = HEADING.match(line)
        if heading:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = seen.get(slug, 0)
            seen[slug] = count + 1
            found.add(f"{slug}-{count}" if count else slug)
    return frozenset(found)


@cache
def home() -> str:
    """What the absolute links to files of this checkout begin with."""
    found = REPOSITORY.search((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return f"{found[1]}/blob/main/" if found else ""


def broken_links(path: Path) -> list[str]:
    """One line for each link of a file that leads nowhere."""
    problems = []
    for number, line in prose(path):
        for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            problem = fault_of(path, match[1] or match[2])
            if problem:
                problems.append(f"{path.relative_to(ROOT)}:{number}: {problem}")
    return problems


def fault_of(path: Path, target: str) -> str:
    """What is wrong with a link of a file; empty if nothing is, or it leads to other sites."""
    if path == ROOT / "README.md":
        if not re.match(r"#|[a-z][a-z0-9+.-]*:", target):
            return f"{target} leads nowhere where the package is published, write {home()}{target}"
        target = target.removeprefix(home())
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return ""
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    if not file.exists():
        return f"there is no {name}"
    if anchor and anchor not in anchors(file):
        return f"{file.relative_to(ROOT)} has no heading #{anchor}"
    return ""


def faults_of_guarantees() -> list[str]:
    """One line for each guarantee that no test holds, and for each number that only tests know."""
    known = guarantees.promises()
    tests = guarantees.holders()
    return [
        *(f"docs/design.md: no test holds {number}" for number in known if not tests[number]),
        *(f"{tests[number][0]}: docs/design.md has no {number}" for number in tests if number not in known),
    ]


def faults_of_words() -> list[str]:
    """One line for each word of the documents and of the package that this project does not use.

    Passed over: the change log, which is history, and the API page, which has the words of the package.
    """
    lines = [
        (path, *line)
        for path in _pages()
        if path.name not in {"CHANGELOG.md", "api.md"}
        for line in prose(path)
    ]
    for path in (ROOT / "python").rglob("*.py"):
        lines += [(path, *line) for line in word_list.python_prose(path.read_text(encoding="utf-8"))]
    return sorted(
        fault
        for path, number, line in lines
        for fault in word_list.faults(f"{path.relative_to(ROOT)}:{number}", line)
    )


def _pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    """Print every problem and end with 1 if there is one."""
    files = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    problems = (
        [line for file in files for line in broken_links(file)] + faults_of_guarantees() + faults_of_words()
    )
    problems += api_docs.problems() + messages.problems() + command_files.problems()
    print(
        "\n".join(problems)
        if problems
        else f"{len(files)} documents: links, guarantees and generated pages hold"
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
