"""The engine on kernels and seccomp profiles that lack its favourite system calls, for real (not by its own switch)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.command import dsl_line
from tests.support.jobs import Helpers, running

DENIED = [
    ("ENOSYS", "clone3"),
    ("ENOSYS", "pidfd_open"),
    ("ENOSYS", "pidfd_send_signal"),
    ("ENOSYS", "pidfd_open,pidfd_send_signal"),
    ("ENOSYS", "close_range"),
    ("EPERM", "pidfd_open"),
    ("EPERM", "close_range"),
    ("EPERM", "rt_sigqueueinfo"),
    ("ENOSYS", "clone3,pidfd_open,pidfd_send_signal,close_range"),
]

NO_DEVICES = {"CUDA_VISIBLE_DEVICES": ""}


def _without(testchild: Path, errno: str, calls: str, line: Sequence[str]) -> list[str]:
    return [str(testchild.with_name("dsl-deny")), errno, calls, *line]


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("errno, calls", DENIED)
def test_codes_are_true(errno: str, calls: str, testchild: Path, tmp_path: Path, helpers: Helpers) -> None:
    line = helpers.line(4, "only 2 [ exit 7 ] pause")
    with running(_without(testchild, errno, calls, line), tmp_path) as job:
        assert job.wait() == 7, job.stderr()
        assert job.left() == []


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("errno, calls", DENIED)
def test_nothing_survives(errno: str, calls: str, testchild: Path, tmp_path: Path, helpers: Helpers) -> None:
    """Deaf workers with a daemon each, ended through the command."""
    deaf = ["ignore", "TERM,INT,HUP", "note", str(tmp_path / "ready")]
    words = ["daemon", "[", *deaf, "d%p %p", "pause", "]", *deaf, "%r %p", "pause"]
    with running(_without(testchild, errno, calls, helpers.line(2, words, 0.3)), tmp_path) as job:
        job.ready(4)
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143, job.stderr()
        assert job.left() == []


@pytest.mark.parametrize("errno", ["ENOSYS", "EPERM"])
def test_a_grace_of_more_than_24_days_is_a_grace(
    errno: str, testchild: Path, tmp_path: Path, helpers: Helpers
) -> None:
    """Before Linux 5.11 no wait for events may be as long as that."""
    line = helpers.line(
        2, "catch TERM note {}/ready '%r %p' await TERM 1 sleep 300 note {}/cleaned %r", 3_000_000
    )
    with running(_without(testchild, errno, "epoll_pwait2", line), tmp_path) as job:
        job.ready(2)
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143, job.stderr()
        assert job.left() == []
    assert sorted((tmp_path / "cleaned").read_text().split()) == ["0", "1"]


# What a kernel or a profile may do about a binding, and what is said of it.
NOT_BOUND = [
    ("EPERM", "sched_setaffinity", "cannot be bound to its CPUs: Operation not permitted"),
    ("NOTHING", "sched_setaffinity", "got other CPUs than it was bound to"),
    (
        "EPERM",
        "set_mempolicy",
        "cannot be given its memory policy: Operation not permitted, a container needs",
    ),
    ("ENOSYS", "set_mempolicy", "cannot be given its memory policy: Function not implemented"),
    ("NOTHING", "set_mempolicy", "got another memory policy than it was given"),
]
needs_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs several CPUs")


@needs_cpus
@pytest.mark.parametrize(
    "options", [["--bind_cores_to_rank"], ["--bind=auto", "--bind-strict"]], ids=" ".join
)
@pytest.mark.parametrize("errno, call, text", NOT_BOUND)
def test_a_worker_that_is_not_bound_as_asked_does_not_run(
    errno: str, call: str, text: str, options: list[str], testchild: Path, tmp_path: Path, helpers: Helpers
) -> None:
    """Docker's profile refuses set_mempolicy; a cpuset that shrinks cuts a mask without a word."""
    line = helpers.line(2, "touch {}/ran.%r", None, *options)
    with running(_without(testchild, errno, call, line), tmp_path, environ=NO_DEVICES) as job:
        assert job.wait() == 126, job.stderr()
    assert text in job.stderr()
    assert not list(tmp_path.glob("ran.*"))


@needs_cpus
@pytest.mark.parametrize("errno, call, text", NOT_BOUND)
def test_an_automatic_binding_that_fails_is_said_once_and_the_job_runs(
    errno: str, call: str, text: str, testchild: Path, tmp_path: Path, helpers: Helpers
) -> None:
    line = helpers.line(2, "touch {}/ran.%r", None, "--bind=auto")
    with running(_without(testchild, errno, call, line), tmp_path, environ=NO_DEVICES) as job:
        assert job.wait() == 0, job.stderr()
    (said,) = [line for line in job.stderr().splitlines() if "warning" in line]
    assert said.startswith("dsl: warning: rank 0 ")
    assert text in said
    assert len(list(tmp_path.glob("ran.*"))) == 2


@pytest.mark.parametrize("policy, code", [([], 0), (["--mem-policy=preferred"], 126)], ids=["own", "asked"])
@pytest.mark.parametrize("errno, text", [("EPERM", "SYS_NICE"), ("NOTHING", "another memory policy")])
def test_numa_binding_fails_for_memory_only_if_that_was_asked_for(
    errno: str, text: str, policy: list[str], code: int, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """torchrun's leaves memory alone, and so works in a container that refuses set_mempolicy."""
    words = [testchild, "touch", tmp_path / "ran.%r"]
    line = dsl_line(dsl_command.with_name("dslrun"), 2, words, None, "--numa-binding=node", *policy)
    with running(_without(testchild, errno, "set_mempolicy", line), tmp_path, environ=NO_DEVICES) as job:
        assert job.wait() == code, job.stderr()
    assert text in job.stderr()
    assert len(list(tmp_path.glob("ran.*"))) == (0 if code else 2)


def test_clone3_refused_with_eperm_gives_one_line_where_no_thread_can_start(
    testchild: Path, tmp_path: Path, helpers: Helpers
) -> None:
    """Some profiles answer EPERM: a C library that makes threads by clone3 takes it as final, an older one works."""
    thread = [sys.executable, "-c", "import threading; threading.Thread(target=print).start()"]
    tried = subprocess.run(_without(testchild, "EPERM", "clone3", thread), capture_output=True, check=False)
    said = "" if tried.returncode == 0 else "dsl: error: start the engine thread: Operation not permitted"
    with running(_without(testchild, "EPERM", "clone3", helpers.line(2, "exit 0")), tmp_path) as job:
        assert job.wait() == (1 if said else 0)
        assert job.left() == []
    assert [text.partition(" (")[0] for text in job.stderr().splitlines()] == ([said] if said else [])
