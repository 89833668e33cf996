"""What lint looks for in the documents: rows of docs/troubleshooting.md, and words that we do not use."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benches import tables

if TYPE_CHECKING:
    from types import ModuleType

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("messages")


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


@pytest.mark.parametrize(
    "line",
    [
        "Take one that is free.",
        "It does not wait, nor does it poll.",
        "In order to start, utilize a hostfile.",
        "The coordinator starts each worker process.",
    ],
)
def test_a_word_that_we_do_not_use_is_found(line: str) -> None:
    (fault, *_) = load("word_list").faults("docs/dsl.md:1", line)
    assert fault.startswith("docs/dsl.md:1: write ")


def test_words_in_code_and_plain_words_are_left_alone() -> None:
    check = load("word_list").faults
    assert (
        check("docs/dsl.md:1", "`whoever` is a name; the controller-runtime and the worker that is free")
        == []
    )


def test_comments_and_texts_of_modules_are_read() -> None:
    source = 'x = 1  # whoever\ny = f"{x} in order to"\nwhoever = """a\nprior to"""\n'
    lines = dict(load("word_list").python_prose(source))
    assert sorted(lines) == [1, 2, 3, 4]
    assert "prior to" in lines[4]


def test_the_pages_of_benchmarks_have_the_rows_that_are_kept() -> None:
    assert tables.stale() == [], "run `make pictures`"


def test_a_row_that_was_measured_again_replaces_the_old_one_and_a_missed_bar_is_marked() -> None:
    machine = {"cpus": 2, "cpu": "A", "gpu": "", "kernel": "6.1-x"}
    old = {
        "name": "n",
        "value": 2.0,
        "unit": "x",
        "bar": 1.5,
        "at_most": False,
        "detail": "3 (2-4) s against 1 s",
    }
    kept = tables.merged([], [tables.measured("start", {**old, "bars": None}, machine)])
    times = tables.TIMES
    assert f"| n | 2{times} | ≥ 1.5{times} |" in tables.all_rows(kept)
    new = tables.measured("start", {**old, "value": 1.0, "bars": None}, {**machine, "cpu": "B"})
    kept = tables.merged(kept, [new, tables.measured("hosts-start", {**old, "bars": None}, machine)])
    assert [row["section"] for row in kept] == ["One host", "Several hosts"]
    assert f"| n | 1{times} | ≥ 1.5{times}, **missed**: 3 s against 1 s |" in tables.all_rows(kept)
    assert "2 CPUs (B), Linux 6.1:" in tables.all_rows(kept)


def test_the_five_rows_have_two_cells_for_each_kind_of_machine() -> None:
    lines = tables.five_rows(tables.load()).splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + len(tables.FIVE)
    assert {line.count("|") for line in lines if line.startswith("|")} == {6}
