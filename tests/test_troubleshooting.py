"""docs/troubleshooting.md has a row for each message with a mend, and no row without a message."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "messages.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("messages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["messages"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A package with one message, one documentation that looks like one, and one help text."""
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "ports.py").write_text(
        '"""A module: give it a try."""\n'
        'add("--port", help="the port: give a number")\n'
        'raise PortError(f"port {number} is taken by {holder}, give another with {option}")\n'
    )
    return tmp_path


def test_the_page_has_the_messages_of_the_sources(script: ModuleType) -> None:
    assert script.problems() == []
    assert len(script.messages(script.SOURCES)) > 100


def test_a_message_is_found_with_its_constant_part_and_its_mend(script: ModuleType, sources: Path) -> None:
    (found,) = script.messages(sources)
    assert (found.what, found.mend) == ("port … is taken by …", "give another with …")
    assert "| `port … is taken by …` | give another with … |" in script.tables([found])


def test_a_new_message_changes_the_page(script: ModuleType, sources: Path) -> None:
    written = script.page("# Troubleshooting\n", script.messages(sources))
    assert script.page(written, script.messages(sources)) == written
    path = sources / "plan" / "ports.py"
    path.write_text(path.read_text() + 'notices.append("port 0 is taken, choose another")\n')
    assert script.page(written, script.messages(sources)) != written


def test_a_row_without_a_message_is_found(script: ModuleType, sources: Path) -> None:
    row = "| `port … is taken by …` | a process listens there | end it |\n"
    assert script.row_faults(row, sources) == []
    (fault,) = script.row_faults(row.replace("taken", "burning"), sources)
    assert "burning" in fault


def test_the_end_of_other_messages_needs_a_row_above_the_tables(script: ModuleType, sources: Path) -> None:
    path = sources / "plan" / "ports.py"
    path.write_text(path.read_text() + 'hint = ", choose one above 1023"\n')
    (fault,) = script.row_faults("", sources)
    assert "choose one above 1023" in fault
    assert script.row_faults("| `port … is taken by …` | | choose one above 1023 |\n", sources) == []
