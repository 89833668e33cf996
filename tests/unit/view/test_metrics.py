"""The text of ``--metrics``, read by the reference parser."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dsl._record import replace
from dsl.errors import MetricsError
from dsl.model.observation import JobView, NodeStatus, RankStatus
from dsl.view.metrics import Metrics, Tally, metrics_text

DOCS = Path(__file__).parents[3] / "docs"
VIEW = JobView("1.0", "dsl", ("python", "train.py"), 7, "/home", "here", 1_500_000_000, 0, 2, 2, 3)
NODES = [
    NodeStatus(
        0, 0, "here", 1,
        (
            RankStatus(0, 0, 11, "R", 1500, 4096, 3, gpu_percent=50, gpu_bytes=1024, wait_percent=58),
            RankStatus(1, 1, 12, "D", 10, 8192, 1),
        ),
        2, 2500,
    ),
    NodeStatus(0, 1, "there", 1, (RankStatus(2, 0, 0),), 2, 2400),
]  # fmt: skip


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Each sample by its name and labels. No sample comes twice."""
    found = [one for family in text_string_to_metric_families(text) for one in family.samples]
    by_name = {(one.name, frozenset(one.labels.items())): one.value for one in found}
    assert len(by_name) == len(found)
    return by_name


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, frozenset(labels.items())]


def test_a_parser_reads_the_figures_of_all_ranks() -> None:
    tally = Tally()
    tally.hangs = 1
    text = metrics_text(VIEW, NODES, tally, missing=1)
    here = {"node": "0", "host": "here"}
    assert value(text, "dsl_job_start_time_seconds") == 1.5
    assert value(text, "dsl_job_restarts_total") == 2
    assert value(text, "dsl_job_hangs_total") == 1
    assert value(text, "dsl_job_silent_hosts") == 1
    assert value(text, "dsl_ranks", state="running") == 1
    assert value(text, "dsl_ranks", state="disk") == 1
    assert value(text, "dsl_ranks", state="ended") == 1
    assert value(text, "dsl_node_attempt_seconds", **here) == 2.5
    assert value(text, "dsl_rank_cpu_seconds_total", rank="0", **here) == 1.5
    assert value(text, "dsl_rank_resident_memory_bytes", rank="1", **here) == 8192
    assert value(text, "dsl_rank_gpu_utilization_ratio", rank="0", **here) == 0.5
    assert value(text, "dsl_rank_wait_ratio", rank="0", **here) == 0.58
    # A rank that has ended, and a GPU that is unknown, have no figures.
    ranks = [labels for name, labels in samples(text) if name == "dsl_rank_threads"]
    assert {dict(labels)["rank"] for labels in ranks} == {"0", "1"}
    assert len([name for name, _ in samples(text) if name.startswith(("dsl_rank_gpu", "dsl_rank_wait"))]) == 3


def test_a_job_that_has_ended_has_its_exit_code() -> None:
    text = metrics_text(VIEW, (), Tally(), ended=(137, 1e9))
    assert value(text, "dsl_job_exit_code") == 137
    assert value(text, "dsl_job_end_time_seconds") == 1e9


def test_failures_are_counted_by_how_workers_ended() -> None:
    tally = Tally()
    for signum, code in ((None, 3), (9, 137), (9, 137)):
        tally.count_failure(signum, code)
    text = metrics_text(VIEW, (), tally)
    assert value(text, "dsl_job_failures_total", how="exit code 3") == 1
    assert value(text, "dsl_job_failures_total", how="SIGKILL") == 2


@given(st.text(), st.text())
def test_hostile_names_are_labels_that_a_parser_reads(word: str, host: str) -> None:
    view = replace(VIEW, words=(word,), host=host)
    text = metrics_text(view, [replace(NODES[0], host=host)], Tally())
    assert text.replace("\n", "").replace("\t", "").isprintable()
    assert len(samples(text)) == len(samples(metrics_text(VIEW, NODES[:1], Tally())))
    assert all(len(line) < 2000 for line in text.splitlines())


def test_the_page_names_every_figure() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    rows = "".join([line.split("|")[1] for line in page.splitlines() if line.startswith("| `dsl_")])
    tally = Tally()
    tally.count_failure(9, 137)
    text = metrics_text(VIEW, NODES, tally, ended=(0, 1.0))
    assert set(re.findall(r"`(dsl_\w+)`", rows)) == {name for name, _ in samples(text)}


def test_without_the_package_a_line_says_before_the_start_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MetricsError, match="prometheus-client: pip install prometheus-client"):
        Metrics(str(tmp_path / "figures"), "dsl", counts_exits=True)
    assert not list(tmp_path.iterdir())
