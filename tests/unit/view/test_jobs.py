"""The list of running jobs, with jobs that are only sockets."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from dsl.model.codec import to_line
from dsl.model.observation import JobView
from dsl.view.jobs import running_jobs


def test_all_jobs_are_asked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says who it is only when all others have been called: asked in turns, none would answer."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "dsl"
    folder.mkdir(mode=0o700)
    count = 4
    all_called = threading.Barrier(count)

    def answer(listener: socket.socket, pid: int) -> None:
        caller, _ = listener.accept()
        with caller:
            all_called.wait(20)
            view = JobView("1", "dsl", ("a",), pid, "/", "here", count - pid, 0, 0, 1, 1)
            caller.sendall(to_line(view))
            caller.recv(1)

    listeners = [socket.socket(socket.AF_UNIX) for _ in range(count)]
    here = os.open(folder, os.O_PATH)
    threads = []
    for pid, listener in enumerate(listeners):
        listener.bind(f"/proc/self/fd/{here}/{pid}-0.sock")
        listener.listen()
        threads.append(threading.Thread(target=answer, args=(listener, pid)))
        threads[-1].start()
    os.close(here)
    try:
        jobs = running_jobs()
        pids = [one.view.pid for one in jobs]
        for one in jobs:
            one.close()
    finally:
        for thread in threads:
            thread.join()
        for listener in listeners:
            listener.close()
    assert [pid for pid in pids if pid < count] == [3, 2, 1, 0]


def test_a_socket_that_nobody_listens_at_is_removed_unless_its_process_will(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / "dsl"
    folder.mkdir(mode=0o700)
    here = os.open(folder, os.O_PATH)
    for name in ("1-0.sock", ".2-0.sock"):
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{name}")
    os.close(here)
    for job in running_jobs():  # a session of this user may have some
        job.close()
    assert os.listdir(folder) == [".2-0.sock"], "one that gets its name once a process listens there"
