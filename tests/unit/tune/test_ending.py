"""What became of an experiment: exit code and metrics decide, words never fail one that ended well."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.events import a_report

from dsl._record import replace
from dsl.conductor.judge import Context, judge_alone
from dsl.model.judgement import Evidence, Judgement
from dsl.tune.experiment import Done, ExperimentOutput, judge

METRICS = '{"throughput": 12.5, "latency": 3, "rank": 0, "note": "fast", "done": true}'
KEYS = ("throughput",)


def ending(
    code: int = 0, written: str | None = METRICS, stop: str = "", **fields: Any
) -> tuple[Done, ExperimentOutput]:
    return Done("a", code, 1.5, stop), ExperimentOutput(written, **fields)


def test_an_experiment_that_ends_well_with_its_metric_is_ok_whatever_it_says() -> None:
    result = judge(*ending(stderr="Error: out of memory, ERROR, error\n"), KEYS)
    assert (result.outcome, result.reason, result.exit_code, result.elapsed_s) == ("ok", "", 0, 1.5)
    assert result.metrics == {"throughput": 12.5, "latency": 3.0, "rank": 0.0}


@pytest.mark.parametrize(
    "written, outcome, words",
    [
        (None, "no metric", "wrote no metrics"),
        ('{"throughput": 12', "torn metric", "cut off"),
        ("", "torn metric", "it is empty"),
        ('{"throughput": 1}{', "torn metric", "cut off"),
        ("[1]", "torn metric", "no JSON object"),
        ("{}", "no metric", "lack throughput, they have nothing"),
        ('{"latency": 3}', "no metric", "lack throughput, they have latency"),
        ('{"throughput": "12"}', "no metric", "is no number that can be compared: '12'"),
        ('{"throughput": true}', "no metric", "compared: True"),
        ('{"throughput": NaN}', "no metric", "compared: nan"),
        ('{"throughput": Infinity}', "no metric", "compared: inf"),
        ('{"throughput": 1' + "0" * 400 + "}", "no metric", "compared: 1000"),
    ],
)
def test_a_metric_that_is_missing_is_told_from_one_that_is_torn(
    written: str | None, outcome: str, words: str
) -> None:
    result = judge(*ending(written=written), KEYS)
    assert (result.outcome, dict(result.metrics)) == (outcome, {})
    assert words in result.reason


def test_what_is_there_in_place_of_metrics_is_said() -> None:
    result = judge(*ending(written=None, instead="a pipe is at autotuning.metric_path"), KEYS)
    assert (result.outcome, result.reason) == (
        "no metric",
        "it ended well and wrote no metrics: a pipe is at autotuning.metric_path",
    )


@pytest.mark.parametrize(
    "said",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
        "MemoryError",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_a_failure_for_want_of_memory_is_known_by_its_words(said: str) -> None:
    assert judge(*ending(1, stderr=f"step 1\n{said}\n"), KEYS).outcome == "oom"
    assert judge(*ending(1, stdout=f"{said}\n"), KEYS).outcome == "oom"


def test_any_other_failure_is_a_crash_even_with_its_metrics() -> None:
    result = judge(*ending(7, stderr="ZeroDivisionError: division by zero\n"), KEYS)
    assert (result.outcome, result.exit_code, dict(result.metrics)) == ("crash", 7, {})
    assert result.reason == "exit code 7: ZeroDivisionError: division by zero"


def failed(**evidence: Any) -> Judgement:
    report = a_report(0, 1, rank=1, ended=2)
    return judge_alone(replace(report, evidence=Evidence(**evidence)), Context())


RANK_1 = "rank 1 (local rank 0, pid 1001, host n0) failed first: exit code 1"


def test_the_reason_is_the_verdict_of_the_job() -> None:
    judgement = failed(said="ValueError: no (t.py:1 in f)", lines=("Traceback", "ValueError: no"))
    said = "dsl: rank 0 failed: error: a lie\n"
    assert judge(*ending(1, stderr=said, judgement=judgement), KEYS).reason == (
        f"{RANK_1}: ValueError: no (t.py:1 in f)"
    )
    assert judge(*ending(1, judgement=failed(lines=("bad data",))), KEYS).reason == f"{RANK_1}: bad data"
    said = "torch: CUDA out\ndsl: rank 1 failed\n"
    assert judge(*ending(1, stderr=said, judgement=failed()), KEYS).reason == f"{RANK_1}: torch: CUDA out"
    assert judge(*ending(3), KEYS).reason == "exit code 3"


def test_without_a_judgement_the_last_line_says_why_nothing_ran() -> None:
    told = "dsl: error: script 'x.py' does not exist\n"
    assert judge(*ending(2, stderr=told), KEYS).reason == f"exit code 2: {told.strip()}"


def test_a_failure_for_want_of_memory_is_known_by_its_evidence() -> None:
    judgement = failed(known="memory of this job's cgroup ran out", is_out_of_memory=True)
    assert judge(*ending(137, judgement=judgement), KEYS).outcome == "oom"
    assert judge(*ending(137, judgement=failed(known="a timer")), KEYS).outcome == "crash"


@pytest.mark.parametrize(
    "stop, outcome, words",
    [("timeout", "timeout", "did not end in 2.5 s"), ("stopped", "stopped", "stopped")],
)
def test_what_we_ended_is_no_crash(stop: str, outcome: str, words: str) -> None:
    result = judge(*ending(143, stop=stop, stderr="out of memory"), KEYS, 2.5)
    assert result.outcome == outcome
    assert words in result.reason


def test_a_reason_does_not_repeat_all_that_was_written() -> None:
    written = "{" + ", ".join(f'"key{n}": 1' for n in range(5000)) + "}"
    assert len(judge(*ending(written=written), KEYS).reason) < 300


def test_one_of_several_keys_is_enough() -> None:
    assert judge(*ending(written='{"FLOPS_per_gpu": 3}'), ("FLOPS", "FLOPS_per_gpu")).outcome == "ok"
