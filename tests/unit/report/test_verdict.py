"""The verdict and the exit code, from exits that never happened."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
from tests.support.events import A_JOB, a_plan, an_attempt, an_exit, end

from dsl import Ended, Exit, SignalReceived
from dsl._record import replace
from dsl.conductor.judge import Context, judge_alone
from dsl.evidence.reports import memory_evidence, report_of
from dsl.model.job import NodePlan
from dsl.model.outcome import Outcome, exit_code
from dsl.model.request import SignalRequest
from dsl.report.narrator import Narrator
from dsl.report.verdict import name_workers, reason, verdict
from dsl.words import signal_name

pytestmark = pytest.mark.guarantee("G2", "G3")


def judge(
    plan: NodePlan,
    exits: Sequence[Exit],
    ended: Ended,
    known: str = "",
    tail: bytes = b"",
    log_path: str | None = None,
) -> list[str]:
    report = report_of(an_attempt(plan, exits, replace(ended, tail=tail)))
    if known or log_path:
        report = replace(report, evidence=replace(report.evidence, known=known, log_path=log_path))
    return verdict(judge_alone(report, Context(signum=ended.stop_signal)))


@pytest.mark.parametrize(
    "exits, ended, code",
    [
        ([an_exit(0, code=0), an_exit(1, code=0)], end(), 0),
        ([an_exit(1, code=3), an_exit(0, signal=15, by_us=True)], end(an_exit(1, code=3)), 3),
        ([an_exit(0, signal=9)], end(an_exit(0, signal=9)), 137),
        ([an_exit(0, failed_at=("exec", 2, "x"))], end(an_exit(0, failed_at=("exec", 2, "x"))), 127),
        ([an_exit(0, failed_at=("exec", 13, "x"))], end(an_exit(0, failed_at=("exec", 13, "x"))), 126),
        ([an_exit(0, signal=2, by_us=True)], end(stop_signal=2), 130),
        ([an_exit(0, code=0, by_us=True)], end(stop_signal=15), 143),
        ([an_exit(0, code=7)], end(an_exit(0, code=7), stop_signal=15), 7),
        ([an_exit(0, signal=15, by_us=True)], end(), 1),
        ([an_exit(0, code=0)], end(survivors=[(5, "D", "stuck", None, None)]), 1),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure_else_of_the_signal(
    exits: list[Exit], ended: Ended, code: int
) -> None:
    assert exit_code(exits, ended) == code


def test_the_cause_comes_first_with_rank_host_pid_and_reason() -> None:
    cause = an_exit(1, code=42)
    lines = judge(a_plan(3, first_rank=8), [cause, an_exit(0, signal=15, by_us=True)], end(cause))
    assert lines[0] == "rank 9 (local rank 1, pid 1001, host node7) failed first: exit code 42"
    assert lines[1] == "stopped by dsl: rank 8 (SIGTERM)"


def test_what_we_did_to_the_others_is_told_from_what_they_did() -> None:
    cause = an_exit(0, signal=11, core=True)
    exits = [
        cause,
        *(an_exit(worker, signal=15, by_us=True) for worker in (1, 2, 3, 7)),
        an_exit(4, signal=9, by_us=True),
        an_exit(5, code=0, by_us=True),
        an_exit(6, by_us=True, failed_at=("cancelled", 0, None)),
        an_exit(8, code=1, by_us=True),
        an_exit(9, signal=6, by_us=True),
        an_exit(10, code=143, by_us=True),
    ]
    first, second, third = judge(a_plan(11), exits, end(cause))
    assert first.endswith("killed by SIGSEGV (signal 11, core dumped)")
    assert second == (
        "stopped by dsl: ranks 1-3,7 (SIGTERM), rank 4 (SIGKILL), rank 6 (not started), rank 10 (exit code 143)"
    )
    assert third == "ended because of it: rank 5 (exit code 0), rank 8 (exit code 1), rank 9 (SIGABRT)"


def test_later_failures_of_their_own_are_told_with_their_delay() -> None:
    cause, later = an_exit(2, code=1, at_ms=10), an_exit(0, code=5, at_ms=13.25)
    lines = judge(a_plan(3), [cause, later], end(cause))
    assert lines[1] == "also failed: rank 0 (+3.2 ms): exit code 5"


def test_a_crowd_of_failures_stays_short() -> None:
    exits = [an_exit(worker, code=1, at_ms=worker) for worker in range(1000)]
    lines = judge(a_plan(1000), exits, end(exits[0]))
    assert len(lines) == 10
    assert lines[-1] == "also failed: ranks 9-999"


@pytest.mark.parametrize(
    "signum, is_key, line",
    [
        (2, True, "interrupted (Ctrl-C): ranks 0,4 ended"),
        (2, False, "interrupted (SIGINT): ranks 0,4 ended"),
        (3, True, "terminated (Ctrl-\\): ranks 0,4 ended"),
        (15, False, "terminated (SIGTERM): ranks 0,4 ended"),
        (10, False, "preempted (SIGUSR1): ranks 0,4 ended"),
    ],
)
def test_a_user_who_ended_the_job_hears_how_the_workers_took_it(
    signum: int, line: str, capfd: pytest.CaptureFixture[str], *, is_key: bool
) -> None:
    exits = [
        an_exit(0, signal=signum, by_us=True),
        an_exit(1, code=0, by_us=True),
        an_exit(2, signal=9, by_us=True),
        an_exit(3, by_us=True, failed_at=("cancelled", 0, None)),
        an_exit(4, code=128 + signum, by_us=True),
    ]
    signal = Mock(spec=SignalReceived, signum=signum, from_terminal=is_key)
    attempt = an_attempt(
        a_plan(5, job=replace(A_JOB, signals=SignalRequest(preempt=10))),
        exits,
        end(stop_signal=signum),
        news=(object(), signal),
    )
    rest = "rank 1 ended (exit code 0), rank 2 killed (SIGKILL), rank 3 not started"
    Narrator(attempt.plan).hear(Outcome(1, attempt))
    assert capfd.readouterr().err.splitlines()[-1] == f"dsl: {line}, {rest}"


@pytest.mark.parametrize(
    "failed_at, text",
    [
        (("exec", 2, "/no/prog"), "could not be executed: /no/prog: No such file or directory"),
        (("exec", 2, "prog"), "could not be executed: prog: No such file or directory, it is not on PATH"),
        (
            ("exec", 2, "/bin/sh"),
            "could not be executed: /bin/sh: No such file or directory, the interpreter of its #! line is missing",
        ),
        (
            ("exec", 13, "/etc/passwd"),
            "could not be executed: /etc/passwd: Permission denied, make it executable with chmod +x /etc/passwd",
        ),
        (("exec", 13, "/etc"), "could not be executed: /etc: Permission denied, it is a directory"),
        (("exec", 8, "/s"), "could not be executed: /s: Exec format error, a script needs a #! line"),
        (("chdir", 2, "/gone"), "cannot enter the working directory /gone: No such file or directory"),
        (("affinity", 22, None), "could not be started: cannot be bound to its CPUs: Invalid argument"),
        (
            ("mempolicy", 1, None),
            (
                "could not be started: cannot be given its memory policy: Operation not permitted, a container needs "
                "the capability SYS_NICE for it, or use --mem-policy none"
            ),
        ),
        (
            ("mempolicy-check", 22, None),
            (
                "could not be started: it got another memory policy than it was given, the cpuset of this job may "
                "have changed"
            ),
        ),
        (
            ("stdio", 28, "/full/log"),
            "could not be started (its log file or stream): /full/log: No space left on device",
        ),
    ],
)
def test_a_start_that_failed_says_what_to_do(failed_at: tuple[str, int, str | None], text: str) -> None:
    assert reason(an_exit(0, failed_at=failed_at)) == text


def test_a_lost_status_is_called_lost() -> None:
    assert reason(an_exit(0)) == "its exit status was lost"


@pytest.mark.parametrize(
    "log, kills, words",
    [
        (
            ["oom-kill:constraint=NONE,task=python,pid=1000,uid=0"],
            0,
            "the kernel killed it because memory ran out",
        ),
        (["Out of memory: Killed process 1000 (python)"], 0, "the kernel killed it because memory ran out"),
        (["Out of memory: Killed process 10001 (python)"], 0, ""),
        ([], 2, "memory of this job's cgroup ran out (2 out-of-memory kill"),
        ([], 0, ""),
    ],
)
def test_memory_evidence_is_the_kernels_line_about_the_pid_or_a_counter(
    log: list[str], kills: int, words: str
) -> None:
    evidence = memory_evidence(an_exit(0, signal=9), log, kills)
    assert evidence.startswith(words)
    assert bool(evidence) == bool(words)
    assert not evidence or "512 MiB" in evidence


def test_only_a_sigkill_is_taken_for_an_out_of_memory_kill() -> None:
    assert memory_evidence(an_exit(0, signal=15), ["Killed process 1000 (x)"], 3) == ""


def test_signals_have_their_names() -> None:
    import signal

    named = {one.value: one.name for one in signal.Signals if one < signal.SIGRTMIN}
    assert {number: signal_name(number) for number in named} == named
    assert len(named) >= 30
    assert signal_name(16) == "SIGSTKFLT"  # Python knows it from 3.11 on
    assert signal_name(40) == "signal 40"


CAUSE = "rank 1 (local rank 1, pid 1001, host node7) failed first"
TRACEBACK = b"""\
step 40
Traceback (most recent call last):
  File "/home/ann/train.py", line 41, in step
    raise ValueError("bad batch")
ValueError: bad batch
"""


def test_the_verdict_tells_the_exception_shows_the_traceback_and_names_the_log() -> None:
    cause = an_exit(1, code=1)
    exits = [cause, an_exit(2, code=5, at_ms=2), an_exit(0, signal=15, by_us=True)]
    ended = end(cause, survivors=[(77, "D", "reader", "nfs_wait", None)])
    assert judge(a_plan(3), exits, ended, tail=TRACEBACK, log_path="/logs/1.err") == [
        f"{CAUSE}: exit code 1: ValueError: bad batch (train.py:41 in step)",
        "last output of rank 1:",
        "  | Traceback (most recent call last):",
        '  |   File "/home/ann/train.py", line 41, in step',
        '  |     raise ValueError("bad batch")',
        "  | ValueError: bad batch",
        "full log: /logs/1.err",
        "also failed: rank 2 (+2.0 ms): exit code 5",
        "stopped by dsl: rank 0 (SIGTERM)",
        "process 77 (reader, state D) did not die of SIGKILL (waits in nfs_wait)",
    ]


def test_a_long_exception_gets_a_line_of_its_own() -> None:
    cause = an_exit(0, code=1)
    lines = judge(a_plan(1), [cause], end(cause), tail=TRACEBACK.replace(b": bad", b": very" + b" bad" * 40))
    assert lines[0].endswith(" failed: exit code 1")
    assert lines[1].startswith("  ValueError: very bad bad ")
    assert lines[1].endswith(" batch (train.py:41 in step)")
    assert lines[2] == "last output of rank 0:"


@pytest.mark.parametrize("evidence", ["", "the kernel killed it because memory ran out"])
def test_an_exception_is_not_called_the_reason_of_a_kill_from_outside(evidence: str) -> None:
    cause = an_exit(0, signal=9)
    first, second, *_ = judge(a_plan(1), [cause], end(cause), evidence, tail=TRACEBACK)
    assert first.endswith("killed by SIGKILL (signal 9)" + (evidence and ": " + evidence))
    assert second == "  ValueError: bad batch (train.py:41 in step)"


def test_output_without_an_exception_is_shown_as_it_is() -> None:
    cause = an_exit(0, code=3)
    assert judge(a_plan(1), [cause], end(cause), tail=b"loading\n\nno data in /data\n")[1:] == [
        "last output of rank 0:",
        "  | loading",
        "  |",
        "  | no data in /data",
    ]


def test_a_silent_worker_has_no_output_but_a_log() -> None:
    cause = an_exit(0, code=3)
    assert judge(a_plan(1), [cause], end(cause), tail=b"\r\n", log_path="/l")[1:] == ["full log: /l"]


def test_no_output_is_shown_of_a_job_without_a_first_failure() -> None:
    exits = [an_exit(0, signal=2, by_us=True)]
    assert len(judge(a_plan(1), exits, end(stop_signal=2), tail=TRACEBACK, log_path="/l")) == 1


@pytest.mark.parametrize(
    "tail",
    [
        b"bdb.BdbQuit\n",
        b"(Pdb) \nQuitting pdb will kill the process. Quit anyway? [y/n] ",
        b'    name = input("name? ")\n           ^^^^^^^^^^^^^^^\nEOFError: EOF when reading a line\n',
    ],
)
def test_a_debugger_without_input_is_told_how_to_get_it(tail: bytes) -> None:
    cause = an_exit(1, code=1)
    plan = a_plan(2, first_rank=4)
    first, second = plan.workers
    hint = "rank 5 has nothing to read: --stdin 5 gives it the standard input of dsl"
    assert hint in judge(
        replace(plan, workers=(replace(first, stdin=True), second)), [cause], end(cause), tail=tail
    )
    assert hint not in judge(plan, [cause], end(cause), tail=tail), "nobody was to read"
    own = replace(plan, workers=(first, replace(second, stdin=True)))
    assert hint not in judge(own, [cause], end(cause), tail=tail), "it has read to the end"


def test_an_end_of_file_elsewhere_is_no_prompt_without_input() -> None:
    tail = (
        b'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    queue.get()\nEOFError\n'
    )
    plan = a_plan(2)
    first, second = plan.workers
    plan, cause = replace(plan, workers=(replace(first, stdin=True), second)), an_exit(1, code=1)
    assert not any("--stdin" in line for line in judge(plan, [cause], end(cause), tail=tail))


def test_nothing_that_moves_a_terminal_is_in_the_verdict() -> None:
    cause = an_exit(0, failed_at=("exec", 2, "/no/\x1b[2Jprog"))
    ended = end(cause, survivors=[(77, "D", "a\x1b]0;x\x07b\nc", None, None)])
    lines = judge(a_plan(1), [cause], ended, tail=b"\x1b[31mred\tx\x07\n", log_path="/l\x1b[1m/\x9b1m")
    assert "/no/prog" in lines[0]
    assert lines[1:] == [
        "last output of rank 0:",
        "  | red\tx",
        "full log: /l/",
        "process 77 (ab c, state D) did not die of SIGKILL",
    ]


def test_what_is_supervised_is_called_by_its_label() -> None:
    """A program that reaches a host is no rank."""
    cause = an_exit(1, code=255)
    lines = judge(a_plan(2, noun="host"), [cause, an_exit(0, signal=15, by_us=True)], end(cause))
    assert lines == ["host 1 (pid 1001) failed first: exit code 255", "stopped by dsl: host 0 (SIGTERM)"]


@pytest.mark.parametrize(
    "names, text",
    [(["3"], "rank 3"), (["5", "0", "1", "2"], "ranks 0-2,5"), (["n1", "n2"], "ranks n1,n2")],
)
def test_labels_of_one_noun_are_named_together(names: list[str], text: str) -> None:
    assert name_workers(names) == text


def test_the_report_is_loaded_without_what_reads_output() -> None:
    """Reading output is the price of a failure that has some, not of every report."""
    readers = {"re", "dsl.evidence.excerpt"}
    modules = "dsl.report.verdict, dsl.report.failures"
    program = (
        f"import sys; own = set(sys.modules); import {modules}; print({readers} & (set(sys.modules) - own))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize(
    "left, line",
    [
        ((77, "D", "nfs-reader", None, None), "process 77 (nfs-reader, state D) did not die of SIGKILL"),
        ((77, "S", "sudo", None, 1), "process 77 (sudo, state S) is left: no permission to end it"),
        (
            (0, "?", "?", None, 13),
            "processes of the job may be left: /proc does not show them to this user",
        ),
        (
            (0, "?", "?", None, 2),
            "processes of the job may be left: /proc cannot be read, so nobody can look",
        ),
    ],
)
def test_what_is_left_is_said_with_the_reason(
    left: tuple[int, str, str, str | None, int | None], line: str
) -> None:
    assert judge(a_plan(1), [an_exit(0, code=0)], end(survivors=[left])) == [line]
