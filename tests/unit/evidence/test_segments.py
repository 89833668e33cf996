"""Shared memory that killed ranks have left: what is removed, and what is only named."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.events import an_exit

from dsl._record import replace
from dsl.evidence import reports
from dsl.evidence.reports import clear_segments

START_S = 1_000_000_000
pytestmark = pytest.mark.guarantee("G1")


def _exit(worker: int, **how: Any) -> Any:
    ended_ns = (START_S + 100) * 10**9
    return replace(an_exit(worker, **how), started_ns=START_S * 10**9, ended_ns=ended_ns)


def _segment(folder: Path, name: str, at_s: int = 50) -> str:
    path = folder / name
    path.write_bytes(bytes(4096))
    os.utime(path, (START_S + at_s, START_S + at_s))
    return str(path)


@pytest.fixture(autouse=True)
def in_the_first_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "FIRST_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)


def test_what_a_killed_rank_has_made_is_removed_and_the_rest_is_named(tmp_path: Path) -> None:
    own = [_segment(tmp_path, "__KMP_REGISTERED_LIB_1001_0"), _segment(tmp_path, "torch_1001_7_0")]
    doubtful = [_segment(tmp_path, "nccl-abc"), _segment(tmp_path, "psm_12ab")]
    doubtful += [_segment(tmp_path, "torch_1000_1_0"), _segment(tmp_path, "torch_1001_8_0", at_s=101)]
    for name in ("torch_1001_before", "psm_before"):
        _segment(tmp_path, name, at_s=-1)
    _segment(tmp_path, "my dataset")
    (tmp_path / "torch_1001_9_0").mkdir()
    before = set(os.listdir(tmp_path))
    assert clear_segments([_exit(0, code=0), _exit(1, signal=9)], str(tmp_path)) == [
        f"removed shared memory that killed ranks had left: {', '.join(own)}",
        f"killed ranks may have left shared memory, remove what no other job needs: {', '.join(doubtful)}",
    ]
    assert before - set(os.listdir(tmp_path)) == {os.path.basename(path) for path in own}


def test_what_a_process_has_open_is_left_alone(tmp_path: Path) -> None:
    _segment(tmp_path, "torch_1001_1_0")
    _segment(tmp_path, "torch_1001_2_0")
    with (tmp_path / "torch_1001_1_0").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    with mapped, (tmp_path / "torch_1001_2_0").open():
        assert clear_segments([_exit(1, signal=9)], str(tmp_path)) == []
    assert len(os.listdir(tmp_path)) == 2


def test_where_not_all_processes_can_be_seen_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "FIRST_NAMESPACE", 0)
    path = _segment(tmp_path, "torch_1001_1_0")
    (said,) = clear_segments([_exit(1, signal=9)], str(tmp_path))
    assert said.endswith(f"remove what no other job needs: {path}")
    assert os.path.exists(path)


def test_nothing_is_looked_for_if_no_rank_was_killed(tmp_path: Path) -> None:
    _segment(tmp_path, "torch_1001_1_0")
    assert clear_segments([_exit(1, code=3)], str(tmp_path / "missing")) == []
    assert clear_segments([_exit(1, signal=9)], str(tmp_path / "missing")) == []
