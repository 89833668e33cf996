"""Where the standard streams of a worker go."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest
from tests.support.group import Group

from dsl import Output, SpecError, Stdio, WorkerSpec

pytestmark = pytest.mark.engine


def _piped(group: Group, worker: int, stream: int) -> bytes:
    return b"".join(e.data for e in group.of(Output) if (e.worker, e.stream) == (worker, stream))


@pytest.mark.guarantee("G6")
def test_pipes_bring_every_byte_and_the_end_of_each_stream(testchild: Path) -> None:
    """The streams of a worker stay apart and lose nothing."""
    words = ["lines", "3000", "90", "complain", "to stderr", "say", "last"]
    spec = WorkerSpec([str(testchild), *words], env={"RANK": "5"}, stdout=Stdio.pipe(), stderr=Stdio.pipe())
    with Group([spec, spec]) as group:
        group.finish()
    expected = b"".join(b"5 %d %s\n" % (index, b"x" * 90) for index in range(3000)) + b"last\n"
    for worker in (0, 1):
        assert _piped(group, worker, 1) == expected
        assert _piped(group, worker, 2) == b"to stderr\n"
        for stream in (1, 2):
            ends = [e.data for e in group.of(Output) if (e.worker, e.stream) == (worker, stream)]
            assert ends[-1] == b""
            assert b"" not in ends[:-1]


@pytest.mark.guarantee("G6")
def test_output_written_just_before_the_end_is_not_lost(testchild: Path) -> None:
    """60 kB sit in the pipe when the worker is already dead."""
    spec = WorkerSpec([str(testchild), "lines", "600", "95", "raise", "KILL"], stdout=Stdio.pipe())
    with Group([spec]) as group:
        group.finish()
    assert _piped(group, 0, 1).count(b"\n") == 600


def test_stderr_can_share_the_stream_of_stdout_in_order(testchild: Path) -> None:
    words = ["say", "1", "complain", "2", "say", "3", "complain", "4"]
    spec = WorkerSpec([str(testchild), *words], stdout=Stdio.pipe(), stderr=Stdio.stdout())
    with Group([spec]) as group:
        group.finish()
    assert _piped(group, 0, 1) == b"1\n2\n3\n4\n"


def test_a_grandchild_that_keeps_the_pipe_does_not_keep_the_group(testchild: Path, tmp_path: Path) -> None:
    held = str(tmp_path / "held")
    words = ["daemon", "[", "touch", held, "pause", "]", "wait", held, "say", "done", "exit", "0"]
    with Group([WorkerSpec([str(testchild), *words], stdout=Stdio.pipe())]) as group:
        ended = group.finish()
    assert _piped(group, 0, 1) == b"done\n"
    assert group.exits()[0].code == 0
    assert ended.stragglers == 1


def test_a_file_is_truncated_or_continued_and_private_to_the_group(testchild: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    path.unlink()
    old_mask = os.umask(0)
    try:
        for append, expected in ((False, "one\n"), (True, "one\none\n"), (False, "one\n")):
            stdout = Stdio.file(path, append=append)
            with Group([WorkerSpec([str(testchild), "say", "one"], stdout=stdout)]) as group:
                group.finish()
            assert path.read_text() == expected
    finally:
        os.umask(old_mask)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_that_cannot_be_opened_is_an_exec_error_of_that_worker(
    testchild: Path, tmp_path: Path
) -> None:
    path = tmp_path / "missing" / "log"
    specs = [WorkerSpec([str(testchild), "pause"]), WorkerSpec([str(testchild)], stdout=Stdio.file(path))]
    with Group(specs) as group:
        ended = group.finish()
    failure = ended.first_failure
    assert failure is not None
    assert (failure.worker, failure.exec_stage, failure.exec_path) == (1, "stdio", str(path))


def test_null_and_a_given_descriptor(testchild: Path, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    read_end, write_end = os.pipe()
    try:
        spec = WorkerSpec(
            [str(testchild), "dump", str(dump), "say", "to the pipe"],
            stdin=Stdio.null(),
            stdout=Stdio.fd(write_end),
            stderr=Stdio.null(),
        )
        with Group([spec]) as group:
            group.finish()
        assert os.read(read_end, 100) == b"to the pipe\n"
        os.fstat(write_end)
    finally:
        os.close(read_end)
        os.close(write_end)
    fds = json.loads(dump.read_text())["fds"]
    assert {fd: target for fd, (target, _) in fds.items() if fd != "1"} == {
        "0": "/dev/null",
        "2": "/dev/null",
    }


def test_a_worker_keeps_a_descriptor_under_its_number(testchild: Path, tmp_path: Path) -> None:
    """Also one of many, which is marked close-on-exec here; the others stay ours alone."""
    read_end, write_end = os.pipe()
    kept = [fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, number) for number in (40, 200)]
    try:
        dumps = [tmp_path / "keeps", tmp_path / "plain"]
        specs = [
            WorkerSpec(
                [str(testchild), "dump", str(dump)], stdout=Stdio.null(), stderr=Stdio.null(), keep_fds=fds
            )
            for dump, fds in zip(dumps, (kept, []), strict=True)
        ]
        with Group(specs) as group:
            group.finish()
        target = os.readlink(f"/proc/self/fd/{write_end}")
        assert not any(os.get_inheritable(fd) for fd in kept)
    finally:
        for fd in (read_end, write_end, *kept):
            os.close(fd)
    keeps, plain = ({fd: t for fd, (t, _) in json.loads(dump.read_text())["fds"].items()} for dump in dumps)
    streams = dict.fromkeys("012", "/dev/null")
    assert keeps == {**streams, **{str(fd): target for fd in kept}}
    assert plain == streams


def test_a_descriptor_that_is_closed_cannot_be_kept(testchild: Path) -> None:
    with Group([WorkerSpec([str(testchild), "pause"], keep_fds=[901])]) as group:
        failure = group.finish().first_failure
    assert failure is not None
    assert (failure.exec_stage, failure.exec_errno, failure.status) == ("stdio", errno.EBADF, 126)


def test_only_stderr_can_follow_stdout(testchild: Path) -> None:
    with pytest.raises((SpecError, ValueError)):
        Group([WorkerSpec([str(testchild)], stdout=Stdio.stdout())])
