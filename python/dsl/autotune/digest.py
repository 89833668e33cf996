"""``summary.json``: everything that a tuning has found, for programs."""

from __future__ import annotations

from dsl.autotune.section import AUTOTUNING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dsl.autotune.experiment import Experiment, Resources, Summary, Trial
    from dsl.autotune.section import Section

FORMAT = 1
"""Raised with every change that would mislead a reader of the earlier format."""


def summary_json(
    summary: Summary,
    section: Section,
    size: Resources,
    elapsed_s: float,
    reused: Collection[str] = (),
) -> str:
    """The file as text. ``reused``: names of experiments that an earlier tuning has run."""
    from json import dumps

    return dumps(summary_data(summary, section, size, elapsed_s, reused), indent=2, allow_nan=False) + "\n"


def summary_data(
    summary: Summary, section: Section, size: Resources, elapsed_s: float, reused: Collection[str]
) -> dict[str, object]:
    """The same as data; docs/autotuning.md explains each key."""
    configs = differences([one.experiment.config for one in summary.runs])
    by_name = {one.experiment.name: config for one, config in zip(summary.runs, configs, strict=True)}
    return {
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
        "best": _best(summary.best, summary.value, by_name),
        "spaces": [
            {"name": one.name, "configs": one.trials, "best": one.best or None, "value": _finite(one.value)}
            for one in summary.spaces
        ],
        "ties": [
            {"name": one.name, "least": _finite(one.least), "most": _finite(one.most), "runs": one.runs}
            for one in summary.ties
        ],
        "notes": list(summary.notes),
        "trials": [
            _trial(one, by_name.get(one.experiment.name, {}), is_reused=one.experiment.name in reused)
            for one in summary.trials
        ],
    }


def differences(configs: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The values of each config that differ between configs, by dotted key, without ``autotuning``."""
    flat = [_flat({key: value for key, value in one.items() if key != AUTOTUNING}) for one in configs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
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


def _best(
    best: Experiment | None, value: float | None, configs: Mapping[str, Mapping[str, object]]
) -> dict[str, object] | None:
    if best is None:
        return None
    return {
        "name": best.name,
        "space": best.space,
        "value": _finite(value),
        "config": dict(configs.get(best.name, {})),
    }


def _trial(trial: Trial, config: Mapping[str, object], *, is_reused: bool) -> dict[str, object]:
    experiment, result = trial.experiment, trial.result
    return {
        "name": experiment.name,
        "kind": experiment.kind,
        "space": experiment.space or None,
        "repeat": experiment.repeat,
        "config": dict(config),
        "outcome": result.outcome,
        "reason": result.reason or None,
        "value": _finite(trial.value),
        "metrics": {key: _finite(value) for key, value in result.metrics.items()},
        "exit_code": result.exit_code,
        "elapsed_s": round(result.elapsed_s, 3),
        "is_reused": is_reused,
    }


def _finite(value: float | None) -> float | None:
    """The value if it is finite, else None: JSON has no other numbers."""
    return value if value is not None and abs(value) < float("inf") else None
