"""No line is lost, torn or given to another rank, files are byte-exact, and nobody waits for a console."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.logs import Found, LogGroup, check, is_full

pytestmark = [pytest.mark.engine, pytest.mark.guarantee("G6")]

BIG = 10 << 20


@pytest.fixture
def linecheck(testchild: Path) -> Path:
    """Path of the helper program that checks numbered lines."""
    return testchild.with_name("dsl-linecheck")


@pytest.mark.parametrize("style", ["one", "two", "split", "block"])
def test_every_line_comes_once_whole_and_from_its_rank(
    style: str, testchild: Path, linecheck: Path, tmp_path: Path
) -> None:
    workers, lines = 30, 400
    words = [str(testchild), "numbered", "1", str(lines), "100", style]
    group = LogGroup(tmp_path, words, workers, files=True)
    assert group.process.stdout is not None
    found = check(linecheck, group.process.stdout)
    group.output()
    assert found == Found(workers * lines, 0, 0, 0, 0)
    for rank in (0, 17):
        alone = subprocess.run(words, env={"RANK": str(rank)}, capture_output=True, check=True)
        assert (tmp_path / f"{rank}.out").read_bytes() == alone.stdout


def test_stdout_and_stderr_stay_apart(testchild: Path, linecheck: Path, tmp_path: Path) -> None:
    words = [str(testchild), "numbered", "1", "50", "40", "two", "numbered", "2", "70", "40", "two"]
    out, err = LogGroup(tmp_path, words, 5).output()
    assert check(linecheck, out) == Found(5 * 50, 0, 0, 0, 0)
    assert check(linecheck, err) == Found(5 * 70, 0, 0, 0, 0)


def test_joined_streams_keep_their_order(testchild: Path, tmp_path: Path) -> None:
    words = [str(testchild)]
    for number in range(100):
        words += ["say" if number % 2 else "complain", str(number)]
    out, err = LogGroup(tmp_path, words, 2, joined=True).output()
    for rank in range(2):
        own = [line.split()[2] for line in out.splitlines() if line.startswith(b"[rank %d]" % rank)]
        assert own == [b"%d" % number for number in range(100)]
    assert err == b""


def test_a_line_of_ten_megabytes_stays_one(testchild: Path, linecheck: Path, tmp_path: Path) -> None:
    words = [str(testchild), "numbered", "1", "2", str(BIG), "block"]
    group = LogGroup(tmp_path, words, 3)
    assert group.process.stdout is not None
    assert check(linecheck, group.process.stdout) == Found(6, 0, 0, 0, 0)
    group.output()


def test_a_missing_line_feed_at_the_end_is_added_on_the_console_only(testchild: Path, tmp_path: Path) -> None:
    out, _ = LogGroup(tmp_path, [str(testchild), "raw", "a\\nlast"], 2, files=True).output()
    assert sorted(out.splitlines()) == [b"[rank 0] a", b"[rank 0] last", b"[rank 1] a", b"[rank 1] last"]
    assert (tmp_path / "0.out").read_bytes() == b"a\nlast"


def test_a_stopped_reader_holds_neither_the_files_nor_the_end(testchild: Path, tmp_path: Path) -> None:
    """Nobody reads our stdout: what is in files may be left out there, is counted, and the job ends."""
    group = LogGroup(tmp_path, [str(testchild), "flood", "16", "100", "4000"], 4, files=True)
    result = group.finish()
    assert set(result["exits"].values()) == {0}
    assert [kind for kind, *_ in result["notices"]] == ["lines_dropped"]
    for rank in range(4):
        assert (tmp_path / f"{rank}.out").stat().st_size >= 16 << 20


def test_what_is_shown_only_in_a_pipe_waits_for_its_reader(
    testchild: Path, linecheck: Path, tmp_path: Path
) -> None:
    """A slow reader that does read gets everything, however long the workers have to wait."""
    workers, lines = 4, 30_000
    group = LogGroup(tmp_path, [str(testchild), "numbered", "1", str(lines), "200", "block"], workers)
    engine = group.process.pid
    # The queue of the console is full: the workers stand still, and none has ended.
    assert group.process.stdout is not None
    descriptor = group.process.stdout.fileno()
    until(lambda: is_full(descriptor) and len(processes.children(engine)) == workers)
    os.kill(engine, 0)
    assert check(linecheck, group.process.stdout) == Found(workers * lines, 0, 0, 0, 0)
    group.output()


def test_a_reader_that_has_had_enough_does_not_end_the_job(testchild: Path, tmp_path: Path) -> None:
    group = LogGroup(tmp_path, [str(testchild), "flood", "4", "100", "4000"], 3)
    assert group.process.stdout is not None
    assert group.process.stdout.read(1000)
    group.process.stdout.close()
    result = group.finish()
    assert set(result["exits"].values()) == {0}
    assert [kind for kind, *_ in result["notices"]] == ["console_closed"]


def test_a_full_disk_is_told_once_and_the_job_goes_on(testchild: Path, tmp_path: Path) -> None:
    (tmp_path / "0.out").symlink_to("/dev/full")
    group = LogGroup(tmp_path, [str(testchild), "numbered", "1", "3000", "100", "one"], 2, files=True)
    out, _ = group.output()
    assert len(out.splitlines()) == 6000
    result = group.result()
    assert set(result["exits"].values()) == {0}
    failed, lost = result["notices"]
    assert failed[:4] == ["file_failed", 0, str(tmp_path / "0.out"), errno.ENOSPC]
    assert lost[0] == "bytes_lost"
    assert lost[4] == (tmp_path / "1.out").stat().st_size


def test_a_directory_in_the_place_of_a_log_fails_the_start(testchild: Path, tmp_path: Path) -> None:
    (tmp_path / "1.out").mkdir()
    group = LogGroup(tmp_path, [str(testchild), "pause"], 2, files=True, grace_s=1.0)
    group.output()
    assert group.result()["exits"]["1"] == 126


def test_the_end_has_the_last_words_of_the_worker_that_failed_first(testchild: Path, tmp_path: Path) -> None:
    words = ["complain", "hello", "only", "1", "[", "complain", "why", "exit", "3", "]", "pause"]
    LogGroup(tmp_path, [str(testchild), *words], 3, grace_s=1.0).output()
    group = LogGroup(tmp_path, [str(testchild), *words], 3, console=None, grace_s=1.0)
    group.output()
    assert group.result()["tail"] == "hello\nwhy\n"


def test_a_worker_may_see_a_terminal(tmp_path: Path) -> None:
    words = ["/bin/sh", "-c", "test -t 1 && test -t 2 && echo yes; stty -a < /dev/stderr | grep -o -e -opost"]
    out, _ = LogGroup(tmp_path, words, 2, terminal=True, files=True).output()
    assert sorted(out.splitlines()) == [
        b"[rank 0] -opost",
        b"[rank 0] yes",
        b"[rank 1] -opost",
        b"[rank 1] yes",
    ]
    assert (tmp_path / "0.out").read_bytes() == b"yes\n-opost\n"


def test_equal_lines_are_shown_once_with_a_count(testchild: Path, tmp_path: Path) -> None:
    group = LogGroup(tmp_path, [str(testchild), "say", "loading", "say", "of %r"], 4, collapse=True)
    out, _ = group.output()
    assert out.count(b"loading") == 1
    assert b"[4 workers] loading" in out
    assert all(b"[rank %d] of %d\n" % (rank, rank) in out for rank in range(4))


def test_a_capped_file_keeps_its_begin_and_its_end(testchild: Path, tmp_path: Path) -> None:
    words = [str(testchild), "numbered", "1", "100000", "60", "block"]
    group = LogGroup(tmp_path, words, 1, files=True, console=None, log_max_bytes=1 << 20)
    group.output()
    text = (tmp_path / "0.out").read_bytes()
    assert 3 << 18 < len(text) < (1 << 20) + 100
    assert text.startswith(b"0 0 ")
    assert b" 99999 " in text[-200:]
    assert b"bytes left out]" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.err", "0.out", "result.json"]


def test_lines_with_a_word_are_copied(testchild: Path, tmp_path: Path) -> None:
    path = tmp_path / "filtered"
    words = [str(testchild), "say", "an ERROR of %r", "say", "nothing", "complain", "ERROR elsewhere"]
    group = LogGroup(tmp_path, words, 3, line_files=[[1, str(path), ["ERROR", "FATAL"]]])
    group.output()
    assert sorted(path.read_text().splitlines()) == [f"[rank {rank}] an ERROR of {rank}" for rank in range(3)]


def test_a_grandchild_that_keeps_the_pipe_does_not_hold_the_end(testchild: Path, tmp_path: Path) -> None:
    words = ["say", "before", "daemon", "[", "ignore", "TERM", "pause", "]", "exit", "0"]
    group = LogGroup(tmp_path, [str(testchild), *words], 2, grace_s=0.3)
    out, _ = group.output(20)
    assert sorted(out.splitlines()) == [b"[rank 0] before", b"[rank 1] before"]


def test_output_of_a_worker_that_was_killed_is_not_lost(testchild: Path, tmp_path: Path) -> None:
    words = [str(testchild), "numbered", "1", "500", "60", "one", "raw", "unfinished", "raise", "KILL"]
    group = LogGroup(tmp_path, words, 1)
    out, _ = group.output()
    assert len(out.splitlines()) == 501
    assert out.endswith(b"[rank 0] unfinished\n")
    assert group.result()["exits"] == {"0": 128 + signal.SIGKILL}
