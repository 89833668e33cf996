"""Write the completion scripts, which the wheel has twice, man pages, and tables of docs/, from the options.

scripts/command_files.py           write them
scripts/command_files.py --check   end with 1 if they are not what would be written
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from dsl.cli.parser import DOCS, EXAMPLES, Parser
from dsl.cli.tool import HelpFormatter

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # started as a file, not with -m
    sys.path.insert(0, str(ROOT))

from scripts.completion_scripts import WRITERS, option_groups, parsers  # noqa: E402  as above

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dsl.cli.tool import ToolParser

SHARE = ROOT / "python" / "dsl.data" / "data" / "share"
PRINTED = ROOT / "python" / "dsl" / "cli" / "completions"
"""What ``dsl --completion SHELL`` prints."""

DATE = "2026-11-24"
"""Of the last change to what is the same in all pages."""

PAGES = tuple(ROOT / "docs" / name for name in ("dsl.md", "dslrun.md", "tools.md"))
"""The pages with a table of the options of each command."""

TABLE = re.compile(
    r"(<!-- options of (\S+): made by scripts/command_files.py -->\n).*?(<!-- end of what is made -->\n)",
    re.DOTALL,
)

EXAMPLES_OF_GROUPS = {
    "several hosts": "--hostfile hosts --launcher ssh --wait-hosts 60 train.py",
    "where to meet": "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 train.py",
    "workers": "--max-restarts 3 --module package.train --lr 1e-3",
    "ending": "--grace 60 --preempt-signal SIGUSR1 train.py",
    "starting workers": "-x 'WANDB_*' --start-method warm train.py",
    "output": "--log-dir logs --tee 3 --ranks-filter 0 train.py",
    "cores and memory": "--bind auto --report-bindings train.py",
    "debugging": "--debug=0 --debug-wait train.py",
    "seeing into the job": "--hang-timeout 600 --metrics 9400 train.py",
    "showing the plan": "--dry-run train.py",
    "signals": "--forward-signals SIGUSR1 train.py",
}
"""What stands behind the command in the example of a group."""

STANDARD = ("show this help, and exit", "show the version, and exit")
"""What the options do that all commands have."""

BACKSLASH = "\\"

VARIABLES = (
    ("NO_COLOR", "If it is set and not empty, nothing has colours."),
    ("FORCE_COLOR", "If it is set and not empty, there are colours even where there is no terminal."),
    ("PAGER", "Shows a help that is longer than the terminal; less(1) if it is not set."),
)


def files() -> dict[Path, str]:
    """All files with their texts. The shells look for a file with the name of each command."""
    commands = parsers()
    scripts = {shell: write(commands) for shell, write in WRITERS.items()}
    found = {PRINTED / shell: text for shell, text in scripts.items()}
    found[SHARE / "bash-completion/completions/dsl"] = scripts["bash"]
    found[SHARE / "fish/vendor_completions.d/dsl.fish"] = scripts["fish"]
    found[SHARE / "zsh/site-functions/_dsl"] = scripts["zsh"]
    for parser in commands:
        name = parser.prog
        found.setdefault(SHARE / "bash-completion/completions" / name, '. "${BASH_SOURCE[0]%/*}/dsl"\n')
        found.setdefault(
            SHARE / "fish/vendor_completions.d" / f"{name}.fish", "source (status dirname)/dsl.fish\n"
        )
        found[SHARE / "man/man1" / f"{name}.1"] = man_page(parser, [one.prog for one in commands])
    tables = {parser.prog: "".join(_table(parser)) for parser in commands}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found[page] = TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}{match[3]}", text)
    return found


def _table(parser: ToolParser) -> Iterator[str]:
    """The options of a command in Markdown. Those of a job have a heading and an example for each group."""
    formatter = HelpFormatter(parser.prog)
    for title, options in option_groups(parser).items():
        if isinstance(parser, Parser) and title != "options":
            examples = {**EXAMPLES_OF_GROUPS, "where to run": EXAMPLES[parser.origin][1][0]}
            yield f"\n### {title.capitalize()}\n\n`{parser.prog} {examples[title]}`\n"
        shown = [one for one in options if isinstance(parser, Parser) or one.help not in STANDARD]
        if shown:
            yield "\n| option | meaning |\n| --- | --- |\n"
        for option in shown:
            names, text = (word.replace("|", "\\|") for word in formatter.describe(option))
            spelled = ", ".join(f"`{name}`" for name in names.split(", "))
            yield f"| {spelled} | {text.replace('*', BACKSLASH + '*')} |\n"
    yield "\n"


def man_page(parser: ToolParser, commands: Sequence[str]) -> str:
    """The man page of a command. ``commands``: the names of all commands."""
    return "\n".join(_lines(parser, commands)) + "\n"


def _lines(parser: ToolParser, commands: Sequence[str]) -> Iterator[str]:
    name, about = parser.prog, str(parser.description)
    yield f'.TH {_word(name.upper())} 1 {DATE} "dsl" "User Commands"'
    yield ".SH NAME"
    first = about.partition(". ")[0]
    yield f"{_word(name)} \\- {_word(first[:1].lower() + first[1:].rstrip('.'))}"
    yield ".SH SYNOPSIS"
    yield f".B {_word(name)}"
    yield _text(str(parser.usage).removeprefix("%(prog)s "))
    yield ".SH DESCRIPTION"
    yield _text(about)
    if parser.epilog:
        yield ".PP"
        yield _text(parser.epilog)
    yield from _options(parser)
    if isinstance(parser, Parser):
        yield ".SH EXAMPLES"
        for words, text in EXAMPLES[parser.origin]:
            yield from (".TP", f".B {_word(f'{name} {words}')}", _text(f"{text[:1].upper()}{text[1:]}."))
    yield ".SH ENVIRONMENT"
    for variable, text in VARIABLES:
        yield from (".TP", f".B {_word(variable)}", _text(text))
    yield ".SH SEE ALSO"
    others = [one for one in commands if one != name]
    yield from (f".BR {_word(one)} (1)," for one in others[:-1])
    yield f".BR {_word(others[-1])} (1)"
    yield ".PP"
    yield _text(f"{DOCS}/{name if isinstance(parser, Parser) else 'tools'}.md")


def _options(parser: ToolParser) -> Iterator[str]:
    formatter = HelpFormatter(parser.prog)
    yield ".SH OPTIONS"
    for title, options in option_groups(parser).items():
        if title != "options":
            yield f'.SS "{_word(title.capitalize())}"'
        for option in options:
            names, text = formatter.describe(option)
            yield from (".TP", f".B {_word(names)}", _text(f"{text[:1].upper()}{text[1:]}."))


def _word(text: str) -> str:
    """Text with dashes that stay dashes when they are copied."""
    return text.replace("\\", "\\e").replace("-", "\\-")


def _text(text: str) -> str:
    """Lines that no macro is read from."""
    lines = textwrap.wrap(_word(text), 78, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"\\&{line}" if line[:1] in ".'" else line for line in lines)


def _here() -> set[Path]:
    """The files that are there."""
    return {path for folder in (SHARE, PRINTED) for path in folder.rglob("*") if path.is_file()}


def problems() -> list[str]:
    """One line for each file that is not what would be written."""
    wanted, here = files(), _here()
    wrong = [path for path in sorted(here | wanted.keys()) if not _is_right(path, wanted.get(path))]
    return [f"{path.relative_to(ROOT)} is not what the options say: run make docs" for path in wrong]


def _is_right(path: Path, text: str | None) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def main() -> None:
    """Write the files, or compare them."""
    if "--check" in sys.argv[1:]:
        found = problems()
        print("\n".join(found) or "completion scripts and man pages are up to date")
        sys.exit(bool(found))
    wanted = files()
    for path in _here() - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
