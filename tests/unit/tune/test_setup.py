"""What an experiment is known by, besides its config."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsl.tune.setup import digest_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("plain.py", "pack/__init__.py", "pack/inner.py", "pack/sub/__main__.py", "space/in/deep.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"raise SystemExit('{name} was run')")
    return tmp_path


@pytest.mark.parametrize(
    "name, file",
    [
        ("plain.py", "plain.py"),
        ("plain", "plain.py"),
        ("pack.inner", "pack/inner.py"),
        ("pack.sub", "pack/sub/__main__.py"),
        ("space.in.deep", "space/in/deep.py"),
    ],
)
def test_a_script_or_module_is_known_by_its_content(folder: Path, name: str, file: str) -> None:
    before = digest_of(name)
    assert before
    (folder / file).write_text("pass")
    assert digest_of(name) not in ("", before)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "name", ["", "pack", "pack.absent", "plain.inner", "absent", "a..b", "a-b", "/", "pack/"]
)
def test_what_cannot_be_found_has_no_content(name: str) -> None:
    assert digest_of(name) == ""


def test_a_module_is_found_where_python_would_find_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert digest_of("plain") == ""
    monkeypatch.setenv("PYTHONPATH", f":{folder}")
    assert digest_of("plain")
