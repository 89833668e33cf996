"""Words the figures of a job for Prometheus (``--metrics``). docs/metrics.md lists them.

The text has Prometheus' own format, version 0.0.4, which its text file collector reads, too.
Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dsl.printable import printable
from dsl.signals import signal_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Literal, TypeAlias

    from dsl.model.observation import JobView, NodeStatus, RankStatus

    Kind: TypeAlias = Literal["gauge", "counter"]
    Sample: TypeAlias = tuple[Mapping[str, object], float]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LONGEST_LABEL = 200
"""Characters of the value of a label."""

STATES = {"R": "running", "S": "sleeping", "I": "sleeping", "D": "disk", "T": "stopped", "t": "stopped"}
"""What the kernel's letter means. A rank with another letter, or without a process, has ended."""


class Tally:
    """What has happened in a job so far."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """Workers of this node that have failed, by how they ended."""
        self.hangs = 0
        self.membership_changes = 0

    def count_failure(self, signum: int | None, code: int) -> None:
        """Count a worker that a signal has ended, or that has ended with an exit code."""
        self.failures[f"exit code {code}" if signum is None else signal_name(signum)] += 1


def metrics_text(
    view: JobView,
    nodes: Sequence[NodeStatus],
    tally: Tally,
    *,
    missing: int = 0,
    ended: tuple[int, float] | None = None,
) -> str:
    """The figures of a job. ``missing``: how many hosts have not answered.

    ``ended``: exit code of the command, and when, in seconds since 1970; None while the job runs.
    """
    program = view.words[0].rpartition("/")[2] if view.words else ""  # its arguments may hold secrets
    about = {"version": view.version, "command": view.command, "program": program, "host": view.host}
    families = [
        _family("dsl_job_info", "gauge", "What the job is.", [({**about, "pid": view.pid}, 1)]),
        _one("dsl_job_start_time_seconds", "gauge", "When the job began.", view.started_ns / 1e9),
        _one("dsl_job_nodes", "gauge", "Nodes of the job.", view.nodes),
        _one("dsl_job_ranks", "gauge", "Ranks of the job.", view.workers),
        _one("dsl_job_restarts_total", "counter", "Restarts so far.", view.restarts),
        _one("dsl_job_hangs_total", "counter", "Hangs that --hang-timeout has found.", tally.hangs),
        _one(
            "dsl_job_membership_changes_total", "counter",
            "How often nodes have left or joined.", tally.membership_changes,
        ),
        _family(
            "dsl_job_failures_total", "counter", "Workers of this node that have failed, by how they ended.",
            [({"how": how}, count) for how, count in sorted(tally.failures.items())],
        ),
        _one("dsl_job_silent_hosts", "gauge", "Hosts that have not answered in time.", missing),
    ]  # fmt: skip
    if ended is not None:
        code, ended_s = ended
        families += [
            _one("dsl_job_end_time_seconds", "gauge", "When the job ended.", ended_s),
            _one("dsl_job_exit_code", "gauge", "Exit code of the command.", code),
        ]
    return "".join([*families, *_of_nodes(nodes), *_of_ranks(nodes)])


def _of_nodes(nodes: Sequence[NodeStatus]) -> Iterable[str]:
    states = Counter(_state(one) for node in nodes for one in node.ranks)
    ages = [({"node": node.node_rank, "host": node.host}, node.age_ms / 1000) for node in nodes]
    attempts = [({"node": node.node_rank, "host": node.host}, node.attempt) for node in nodes]
    yield _family(
        "dsl_ranks", "gauge", "Ranks by what the kernel says of them.",
        [({"state": state}, count) for state, count in sorted(states.items())],
    )  # fmt: skip
    yield _family("dsl_node_attempt", "gauge", "The attempt that runs on a node, counted from 0.", attempts)
    yield _family("dsl_node_attempt_seconds", "gauge", "How long this attempt has run.", ages)


def _of_ranks(nodes: Sequence[NodeStatus]) -> Iterable[str]:
    living = [
        ({"rank": one.rank, "node": node.node_rank, "host": node.host}, one)
        for node in nodes
        for one in node.ranks
        if one.pid and one.rank is not None
    ]
    figures: tuple[tuple[str, Kind, str, list[Sample]], ...] = (
        (
            "dsl_rank_cpu_seconds_total", "counter", "Processor time of a rank's process in this attempt.",
            [(labels, one.cpu_ms / 1000) for labels, one in living],
        ),
        (
            "dsl_rank_resident_memory_bytes", "gauge", "Resident memory of a rank's process.",
            [(labels, one.rss_bytes) for labels, one in living],
        ),
        (
            "dsl_rank_threads", "gauge", "Threads of a rank's process.",
            [(labels, one.threads) for labels, one in living],
        ),
        (
            "dsl_rank_gpu_utilization_ratio", "gauge", "Part of the time in which a rank's GPU computed.",
            [(labels, one.gpu_percent / 100) for labels, one in living if one.gpu_percent >= 0],
        ),
        (
            "dsl_rank_gpu_memory_bytes", "gauge", "Memory of its GPU that a rank uses.",
            [(labels, one.gpu_bytes) for labels, one in living if one.gpu_bytes],
        ),
    )  # fmt: skip
    return [_family(*figure) for figure in figures]


def _state(rank: RankStatus) -> str:
    return STATES.get(rank.state, "ended") if rank.pid else "ended"


def _one(name: str, kind: Kind, about: str, value: float) -> str:
    return _family(name, kind, about, [({}, value)])


def _family(name: str, kind: Kind, about: str, samples: Iterable[Sample]) -> str:
    """A figure with its samples; empty without samples."""
    lines = [f"{name}{_labels(labels)} {_number(value)}\n" for labels, value in samples]
    return f"# HELP {name} {about}\n# TYPE {name} {kind}\n{''.join(lines)}" if lines else ""


def _labels(labels: Mapping[str, object]) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{_quoted(str(value))}"' for name, value in labels.items()]) + "}"


def _quoted(text: str) -> str:
    return printable(text)[:LONGEST_LABEL].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
