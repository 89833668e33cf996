"""Every command that a page shows is run here, or a note above it says why not."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
from tests.support import pages

BIN = Path(sysconfig.get_path("scripts"))
TIMEOUT_S = 60
TRAIN = """
import os
import time

for step in range(1, 4):
    print(f"step {step} of rank {os.environ['RANK']}", flush=True)
    time.sleep(0.05)
"""
"""The `train.py` of pages that show none."""

NEEDS = {"hangs": pytest.mark.needs_package("py-spy")}
"""Of pages that show what only another package tells."""

CODE = [block for page in pages.PAGES for block in pages.blocks(page)]


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, one_thread: None, tmp_path: Path) -> dict[str, str]:
    """Of a new user of this machine, who has installed dsl."""
    del one_thread
    for name in ("tmp", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "train.py").write_text(TRAIN)
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    changes = {
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path / "tmp"),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "EXAMPLES": str(pages.ROOT / "examples"),
    }
    return {**os.environ, **changes}


def commands_of(page: Path) -> list[pages.Block]:
    """What is done for a page, in order."""
    return [
        block
        for block in CODE
        if block.page == page
        and "not run" not in block.marks
        and (pages.is_command(block) or "file" in block.marks)
    ]


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=NEEDS.get(page.stem, ()))
        for page in pages.PAGES
        if commands_of(page)
    ],
)
def test_what_a_page_shows_can_be_typed(page: Path, environ: dict[str, str], tmp_path: Path) -> None:
    for block in commands_of(page):
        assert pages.run(block, tmp_path / "work", environ, TIMEOUT_S) == ""


def test_no_command_hides_in_a_block_that_is_not_run() -> None:
    assert [block.place for block in CODE if pages.hides_command(block)] == []


CONSOLE = """
<!-- first: x=3 -->

```console
$ echo $x; echo two
two
…3
$ false
$ true
```
"""


def test_a_page_that_is_not_true_is_found(tmp_path: Path) -> None:
    """A command that fails without a word on the page, a line that does not come, and one too many."""

    def said(text: str) -> str:
        (block,) = pages.blocks(pages.ROOT / "README.md", text)
        return pages.run(block, tmp_path, dict(os.environ), 10)

    assert "README.md:5: false\nended with 1" in said(CONSOLE)
    assert said(CONSOLE.replace("$ false\n", "")) == ""
    assert "the page shows: four" in said(CONSOLE.replace("two\n…3", "four"))
    assert "the page does not show: 3" in said(CONSOLE.replace("…3\n", ""))
    assert "ended with 1" in said("```sh\nfalse\ntrue\n```\n")
    assert said("```sh\ntrue\n```\n") == ""


def test_a_command_in_a_block_of_text_is_found() -> None:
    def hidden(text: str) -> bool:
        return any(map(pages.hides_command, pages.blocks(pages.ROOT / "README.md", text)))

    assert hidden("Type:\n\n    dsl train.py\n")
    assert hidden("```text\n$ A=1 dslrun train.py\n```\n")
    assert not hidden("```text\ndsl: rank 1 failed\n```\n")
    assert not hidden("```sh\ndsl train.py\n```\n")
