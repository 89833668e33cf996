"""What a tuning has found: ``summary.txt`` for people, and ``summary.json`` for programs.

Columns of the table, their order, the last row and the last line are those of ``deepspeed.autotuning``
(0.19.8), which has the table made by tabulate (its format ``pipe``). Counts are true: a config that is reused
counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from json import dumps
from typing import Any

from dsl.tune.experiment import Resources, Summary
from dsl.tune.section import AUTOTUNING, Section

GLOBAL = "global"
"""Name of the last row of the table, which has the best of all spaces."""

HEADERS = ("tuning_space", "num_experiments", "best_metric_val", "best_exp_name")
IS_NUMBER = (False, True, True, False)
LEAST_PADDING = 2
"""A column is wider than its header by at least this many characters."""

FORMAT = 1
"""Raised with every change that would mislead a reader of an earlier ``summary.json``."""


def summary_table(summary: Summary) -> str:
    """A row for each tuning space and one for all of them, without a line end behind the last.

    A space in which nothing ran has empty cells.
    """
    best = "" if summary.best is None else summary.best.name
    rows = [(one.name, one.configs, one.value, one.best) for one in summary.spaces]
    rows.append((GLOBAL, sum(one.configs for one in summary.spaces), summary.value, best))
    cells = [(name, str(count), "" if value is None else f"{value:g}", of) for name, count, value, of in rows]
    columns = [_aligned(*column) for column in zip(HEADERS, IS_NUMBER, zip(*cells, strict=True), strict=True)]
    header, *lines = [f"| {' | '.join(line)} |" for line in zip(*columns, strict=True)]
    marks = ["-" * (len(column[0]) + 1) for column in columns]
    rule = [f"{mark}:" if right else f":{mark}" for mark, right in zip(marks, IS_NUMBER, strict=True)]
    return "\n".join([header, f"|{'|'.join(rule)}|", *lines])


def summary_text(summary: Summary, elapsed_s: float) -> str:
    """``summary.txt``: the table, a blank line, and how long it took and how many runs."""
    count = len(summary.runs)
    ended = f"Tuning completed in {duration(elapsed_s)}. Total number of experiments: {count}."
    return f"{summary_table(summary)}\n\n{ended}\n"


def duration(seconds: float) -> str:
    """``H:MM:SS.ffffff``."""
    whole = round(seconds * 1_000_000)
    minutes, rest = divmod(whole, 60_000_000)
    return f"{minutes // 60}:{minutes % 60:02}:{rest // 1_000_000:02}.{rest % 1_000_000:06}"


def summary_json(
    summary: Summary,
    section: Section,
    size: Resources,
    elapsed_s: float,
    reused: Collection[str] = (),
) -> str:
    """``summary.json``: everything that was found; docs/autotuning.md explains each key.

    ``reused``: names of experiments that an earlier tuning has run.
    """
    configs = differences([one.experiment.config for one in summary.runs])
    by_name = {one.experiment.name: config for one, config in zip(summary.runs, configs, strict=True)}
    best = summary.best
    found = {
        "format": FORMAT,
        "metric": summary.metric,
        "mode": "min" if summary.is_minimised else "max",
        "seed": section.seed,
        "ended": summary.ended,
        "elapsed_s": round(elapsed_s, 3),
        "experiments": len(summary.runs),
        "resources": {
            "nodes": size.nodes,
            "slots_per_node": size.slots_per_node,
            "side_by_side": size.lanes,
        },
        "best": best
        and {
            "name": best.name,
            "space": best.space,
            "value": _plain(summary.value),
            "config": by_name.get(best.name, {}),
        },
        "spaces": [_fields(one) for one in summary.spaces],
        "ties": [_fields(one) for one in summary.ties],
        "notes": list(summary.notes),
        "trials": [
            {
                **_fields(one.experiment),
                **_fields(one.result),
                "config": by_name.get(one.experiment.name, {}),
                "value": _plain(one.value),
                "elapsed_s": round(one.result.elapsed_s, 3),
                "is_reused": one.experiment.name in reused,
            }
            for one in summary.trials
        ],
    }
    return dumps(found, indent=2, allow_nan=False) + "\n"


def differences(configs: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The values of each config that differ between configs, by dotted key, without ``autotuning``."""
    flat = [_flat({key: value for key, value in one.items() if key != AUTOTUNING}) for one in configs]
    keys = dict.fromkeys(key for one in flat for key in one)
    absent = object()
    differing = [
        key for key in keys if any(one.get(key, absent) != flat[0].get(key, absent) for one in flat[1:])
    ]
    return [{key: one[key] for key in differing if key in one} for one in flat]


def _flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def _fields(one: Any) -> dict[str, object]:
    return {name: _plain(getattr(one, name)) for name in one.__match_args__}


def _plain(value: object) -> object:
    """A value for JSON: null for an empty text, and for the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    is_odd = isinstance(value, float) and not abs(value) < float("inf")
    return None if value == "" or is_odd else value


def _aligned(header: str, is_number: bool, cells: Sequence[str]) -> list[str]:  # noqa: FBT001  a column of `IS_NUMBER`
    """The header and the cells of a column, all of one width; numbers have their points below one another."""
    texts = [cell.replace("|", "\\|") for cell in cells]
    if is_number:
        behind = [_behind_point(text) for text in texts]
        texts = [
            text + " " * (max(behind) - places) if text else ""
            for text, places in zip(texts, behind, strict=True)
        ]
    width = max(len(header) + LEAST_PADDING, *map(len, texts))
    return [text.rjust(width) if is_number else text.ljust(width) for text in (header, *texts)]


def _behind_point(text: str) -> int:
    """Characters behind the point, or else behind the letter of an exponent; -1: there is neither."""
    place = text.rfind(".") if "." in text else text.rfind("e")
    return -1 if place < 0 else len(text) - place - 1
