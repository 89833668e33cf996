"""The commands that pages show, and what they print.

A fenced block in `sh` or `bash` is run as one script, which has to end with 0. A block in `console` has commands after ``$``;
each is followed by what it prints. A line ``...`` stands for any lines, ``…`` for any part of a line. Lines may come in another
order than shown, because workers race. A command that shows no output has to end with 0.

The line above a block may be a comment of HTML:

* ``<!-- not run: REASON -->``: the block is not run
* ``<!-- file: NAME -->``: the block is written to that file
* ``<!-- first: COMMAND -->``: a command that is run before the block, and is not shown
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.support.command import ran

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SHELL = ("sh", "bash", "console")
PROGRAM = re.compile(
    r" *(\$ )?([A-Z_]+=\S+ )*(dsl|dslrun|dsl-[a-z]+|torchrun|pip|python3?|ssh|sbatch|kubectl) +\S"
)
MARK = re.compile(r"<!-- (not run|file|first): (.+?) -->")
END_OF_COMMAND = "\x1e"
BY_CHANCE = re.compile(r"dsl: master port N is taken, using N|")
"""Lines that depend on what else runs on this machine."""


class Block(NamedTuple):
    """A piece of code in a page."""

    page: Path
    number: int
    """Its first line in the page, from 1."""
    language: str
    """What stands after the fence; ``indented`` for a block without a fence."""
    marks: dict[str, str]
    """The comments above it: what they say by their kind."""
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.number}"


def blocks(page: Path, text: str | None = None) -> Iterator[Block]:
    """All code of a page, in order; `text` in place of what the file holds."""
    marks: dict[str, str] = {}
    fence = language = ""
    held: list[str] = []
    is_list = False
    for number, line in enumerate((text or page.read_text(encoding="utf-8")).splitlines(), start=1):
        bare = line.strip()
        if fence:
            if bare == fence:
                yield Block(page, number - len(held), language, marks, "\n".join(held) + "\n")
                fence, marks = "", {}
            else:
                held.append(line)
        elif bare.startswith(("```", "~~~")):
            fence, language, held = bare[:3], bare[3:].strip(), []
        elif found := MARK.fullmatch(bare):
            marks = {**marks, found[1]: found[2]}
        else:
            if line.startswith("    ") and not is_list:
                yield Block(page, number, "indented", marks, bare)
            if bare:
                is_list = line.startswith(("* ", "- ", "  ")) or line[:1].isdigit()
                marks = {}


def is_command(block: Block) -> bool:
    """Whether a block belongs to those that are run, or are marked as not run."""
    return block.language in SHELL


def hides_command(block: Block) -> bool:
    """Whether a block of another language holds a command line, so that it is not run. Brackets make a synopsis."""
    lines = [line for line in block.text.splitlines() if not re.search(r"\[[-\w].*\]", line)]
    return (
        not is_command(block)
        and not block.marks
        and block.language in {"", "text", "indented"}
        and "└" not in block.text  # a drawing of processes
        and any(map(PROGRAM.match, lines))
    )


def run(block: Block, folder: Path, environ: dict[str, str], timeout_s: float) -> str:
    """Do in `folder` what a block says. Returns what differs from the page; empty if nothing does."""
    if "file" in block.marks:
        (folder / block.marks["file"]).write_text(block.text, encoding="utf-8")
        return ""
    script = [block.marks["first"]] if "first" in block.marks else []
    shown = _commands(block.text) if block.language == "console" else [(block.text, [])]
    for command, _ in shown:
        script.append(
            f'{command.rstrip()}\n_code=$?; printf "{END_OF_COMMAND}%s\\n" "$_code"; (exit "$_code")'
        )
    strict = "" if block.language == "console" else "set -e\n"
    line = ["bash", "-c", "exec 2>&1\n" + strict + "\n".join(script)]
    result = ran(line, timeout_s, cwd=folder, env=environ, stdin=subprocess.DEVNULL)
    parts = re.split(f"{END_OF_COMMAND}([0-9]+)\n", result.stdout)
    codes, printed = parts[1::2], parts[0::2]
    if len(codes) < len(shown):
        return f"{block.place}: ended with {result.returncode} after:\n{result.stdout}"
    for (command, expected), code, output in zip(shown, codes, printed, strict=False):
        if expected:
            missing = differences(expected, output, folder)
            if missing:
                return f"{block.place}: {command}\n{missing}\nit printed:\n{output}"
        elif code != "0":
            return f"{block.place}: {command}\nended with {code}:\n{output}"
    return ""


def _commands(text: str) -> list[tuple[str, list[str]]]:
    """Each command of a console with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].endswith("\\") and not found[-1][1]:
            found[-1] = (f"{found[-1][0]}\n{line}", [])
        elif found:
            found[-1][1].append(line)
    return found


def differences(expected: list[str], output: str, folder: Path) -> str:
    """The first line that a page shows and a command has not printed, or the first that is not shown; empty if none is."""
    left = [_plain(line) for line in output.replace(str(folder), "/home/me").splitlines()]
    for line in expected:
        if line.strip() in {"...", ""}:
            continue
        pattern = re.compile(".*".join(map(re.escape, _plain(line).split("…"))))
        found = next((index for index, one in enumerate(left) if pattern.fullmatch(one)), None)
        if found is None:
            return f"the page shows: {line}"
        del left[found]
    extra = [one for one in left if not BY_CHANCE.fullmatch(one)]
    return "" if "..." in map(str.strip, expected) or not extra else f"the page does not show: {extra[0]}"


def _plain(line: str) -> str:
    """A line without what is different in every run: long numbers, and the rest of a line is kept."""
    return re.sub(r"[0-9]{4,}", "N", line.rstrip())
