"""Summaries of tunings that nobody has run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsl.tune.experiment import Experiment, Result, Space, Summary, Trial


def make_trial(
    name: str,
    value: float | None = None,
    *,
    config: dict[str, Any] | None = None,
    metric: str = "throughput",
    **facts: Any,
) -> Trial:
    """A run of the experiment ``z1_gas2_tmbspg8`` and such; without a value it was out of memory."""
    space = facts.pop("space", name.partition("_")[0])
    kind = facts.pop("kind", "run")
    if config is None:
        stage, size = int(space[1:]), int(name.rpartition("tmbspg")[2])
        config = {"train_micro_batch_size_per_gpu": size, "zero_optimization": {"stage": stage}}
    experiment = Experiment(name, config, kind, space, facts.pop("repeat", 0))
    metrics = {} if value is None else {metric: value}
    outcome, reason = ("ok", "") if value is not None else ("oom", "out of memory")
    result = Result(outcome, metrics, reason, 0 if value is not None else 1, 1.5)  # type: ignore[arg-type]
    return Trial(experiment, result, value)


def make_summary(trials: Sequence[Trial], *, is_minimised: bool = False, **facts: Any) -> Summary:
    """What a search that has run just these would say."""
    runs = [one for one in trials if one.experiment.kind == "run"]
    names = list(dict.fromkeys(one.experiment.space for one in runs))
    better = min if is_minimised else max

    def best_of(members: list[Trial]) -> Trial | None:
        found = [one for one in members if one.value is not None]
        return better(found, key=lambda one: one.value or 0.0) if found else None

    spaces = []
    for name in names:
        members = [one for one in runs if one.experiment.space == name and not one.experiment.repeat]
        best = best_of(members)
        spaces.append(
            Space(name, len(members), best.experiment.name if best else "", best.value if best else None)
        )
    best = best_of([one for one in runs if not one.experiment.repeat])
    return Summary(
        metric=facts.pop("metric", "throughput"),
        is_minimised=is_minimised,
        best=best.experiment if best else None,
        value=best.value if best else None,
        spaces=tuple(spaces),
        ties=facts.pop("ties", ()),
        trials=tuple(trials),
        ended=facts.pop("ended", "all stages are tried"),
        notes=facts.pop("notes", ()),
    )
