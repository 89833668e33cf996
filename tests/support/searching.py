"""A search that is played with made-up results."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dsl._record import Record
from dsl.tune.config import read_section
from dsl.tune.experiment import Experiment, Resources, Result, Summary
from dsl.tune.search import search

ONE = Resources(nodes=1, slots_per_node=1, lanes=1, memory_bytes=None)
PROFILE: Mapping[str, float] = {"num_params": 1000, "activation_mem_per_gpu": 1}
STOPPED = Result("stopped", {}, "interrupted", 130, 0.0)
OOM = Result("oom", {}, "CUDA out of memory", 1, 1.0)


def ok(**metrics: float) -> Result:
    """A run that wrote metrics."""
    return Result("ok", metrics, "", 0, 1.0)


def crash(reason: str = "ValueError: no") -> Result:
    """A run that failed, and not for memory."""
    return Result("crash", {}, reason, 1, 1.0)


class Played(Record):
    """What a search did."""

    batches: tuple[tuple[Experiment, ...], ...]
    """What it asked for, in order."""
    summary: Summary
    """What it found."""

    @property
    def ran(self) -> list[str]:
        """Names of all experiments, in order."""
        return [one.name for batch in self.batches for one in batch]

    def config(self, name: str) -> Mapping[str, object]:
        """The config of an experiment."""
        return next(one.config for batch in self.batches for one in batch if one.name == name)


def play(
    config: Mapping[str, object], answer: Callable[[Experiment], Result], resources: Resources = ONE
) -> Played:
    """Run a search to its end. Profiles are answered here, unless `answer` has something else for them."""
    steps = search(read_section(config), config, resources)
    batches: list[tuple[Experiment, ...]] = []
    results: dict[str, Result] | None = None
    while True:
        try:
            batch = next(steps) if results is None else steps.send(results)
        except StopIteration as end:
            return Played(tuple(batches), end.value)
        batches.append(batch)
        results = {one.name: answer(one) for one in batch}


def size_of(experiment: Experiment) -> int:
    """The micro batch of an experiment."""
    size = experiment.config["train_micro_batch_size_per_gpu"]
    assert isinstance(size, int)
    return size


def up_to(most: int, half: float = 5, **facts: float) -> Callable[[Experiment], Result]:
    """Answers of a model that has room for so many samples, and gets faster with each."""

    def answer(experiment: Experiment) -> Result:
        if experiment.kind == "profile":
            return ok(**{**PROFILE, **facts})
        size = size_of(experiment)
        return ok(throughput=100 * size / (size + half)) if size <= most else OOM

    return answer
