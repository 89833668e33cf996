"""Man pages and completion scripts: all made from the options, for every command."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from scripts.command_files import ROOT, SHARE, files, man_page, problems
from scripts.completion_scripts import WRITERS, option_groups, parsers
from tests.support.command import ran

from dsl._record import replace
from dsl.cli import options_torch
from dsl.cli.options_deepspeed import COMMAND_LINE
from dsl.cli.parser import Parser
from dsl.model.options import OURS, CommandLine, Option

COMMANDS = sorted(path.name for path in (SHARE.parent.parent / "scripts").iterdir())


def test_the_files_are_what_the_options_say() -> None:
    assert problems() == []


def test_every_command_has_its_files() -> None:
    assert sorted(parser.prog for parser in parsers()) == COMMANDS
    names = {path.relative_to(SHARE).as_posix() for path in files() if path.is_relative_to(SHARE)}
    for command in COMMANDS:
        assert f"man/man1/{command}.1" in names
        assert f"bash-completion/completions/{command}" in names
        assert f"fish/vendor_completions.d/{command}.fish" in names


@pytest.mark.parametrize("line", [COMMAND_LINE, options_torch.COMMAND_LINE], ids=lambda line: line.program)
def test_the_examples_on_the_pages_can_be_read(line: CommandLine) -> None:
    page = (ROOT / "docs" / f"{line.program}.md").read_text(encoding="utf-8")
    examples = re.findall(rf"^### .*\n\n`{line.program} (.*)`$", page, re.MULTILINE)
    assert len(examples) == len(line.groups)
    for example in examples:
        Parser(line).parse_script_args(shlex.split(example))


@pytest.mark.parametrize("shell", sorted(WRITERS))
def test_a_new_option_is_in_help_man_page_and_completion_by_itself(shell: str) -> None:
    new = Option(OURS, "--colour-of-logs", "", "colour of the logs; dark or light", choices=("dark", "light"))
    parser = Parser(replace(COMMAND_LINE, groups={**COMMAND_LINE.groups, "looks": (new,)}))
    page = man_page(parser, COMMANDS)
    assert (
        '.SS "Looks"\n.TP\n.B \\-\\-colour\\-of\\-logs {dark,light}\nColour of the logs; dark or light.\n'
        in page
    )
    assert "--colour-of-logs {dark,light}" in parser.format_help()
    (line,) = (
        one
        for one in WRITERS[shell]([parser]).splitlines()
        if re.search(r"dark.* light", one) and "spelled" not in one and "!" not in one
    )
    assert "colour-of-logs" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_man_page_is_well_formed(command: str) -> None:
    judge = shutil.which("mandoc")
    if judge is None and "CI" not in os.environ:
        pytest.skip("needs the program mandoc")
    assert judge is not None, "mandoc is missing, scripts/with-environment --shells installs it"
    path = SHARE / "man" / "man1" / f"{command}.1"
    result = ran([judge, "-Tlint", "-Wwarning", path])
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    shown = ran([judge, "-Tascii", path], check=True).stdout
    assert "SYNOPSIS" in shown or "S\bSY\bY" in shown


def test_each_page_names_every_option_of_its_command() -> None:
    for parser in parsers():
        text = (
            Path(SHARE / "man" / "man1" / f"{parser.prog}.1").read_text(encoding="utf-8").replace("\\-", "-")
        )
        names = [option.option_strings[0] for group in option_groups(parser).values() for option in group]
        assert [name for name in names if name not in text] == []
