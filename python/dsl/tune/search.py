"""The search: decides which experiments are worth a run. It sees results and nothing else.

It leaves out what cannot fit into memory by DeepSpeed's estimate of what a model needs before any activation,
corrected where that ignores the config: bfloat16, offload and the optimizer count.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsl._record import Record
from dsl.errors import AutotuningError
from dsl.tune.config import (
    AUTOTUNING,
    MOST_BYTES,
    STAGE,
    ZERO,
    Section,
    is_number,
    section_of,
    without_tuning,
)
from dsl.tune.experiment import PROFILE_NAME, Experiment, Resources, Summary
from dsl.tune.spaces import Grid, count_own, first_config, make_sampler, own_grid, zero_grid
from dsl.tune.steps import (
    Entry,
    Found,
    NotFound,
    Results,
    Stage,
    Steps,
    Stopped,
    read_batches,
    with_batch,
    with_stage,
)
from dsl.words import counted, show

# Numbers of four bytes that an optimizer keeps for each parameter. Adam and its like keep two.
_STATES = {"sgd": 0, "lion": 1, "muon": 1, "adagrad": 1}
_ADAM = 2
_OFF_DEVICE = ("cpu", "nvme")


class Model(Record):
    """What is known about a model."""

    params: float
    """Parameters, over all workers that share a copy."""
    trainable: float
    """Parameters that are trained, and so have gradients and a place in the optimizer."""
    activation_bytes: float
    """Memory that a forward pass of one sample takes; 0: unknown."""
    hidden_size: int = 0
    """Width of a layer; 0: unknown."""


def read_model(facts: Mapping[str, object]) -> Model | None:
    """The model from a profile's file or ``model_info``; None if its size is unknown."""
    params = _count(facts, "num_params")
    if not params:
        return None
    return Model(
        params=params,
        trainable=_count(facts, "trainable_num_params") or params,
        activation_bytes=_count(facts, "activation_mem_per_gpu"),
        hidden_size=int(_count(facts, "hidden_size")),
    )


def estimate(model: Model, stage: int, config: Mapping[str, object], devices: int, mp_size: int) -> float:
    """Bytes of one device that a ZeRO stage needs to hold the model, without activations.

    Args:
        model: what is known about it.
        stage: 0 to 3.
        config: we use its precision, optimizer and offload.
        devices: devices of the job; a stage divides its share of the memory among them.
        mp_size: how many devices share a copy of the model.
    """
    zero = section_of(config, ZERO)
    is_half = any(section_of(config, key).get("enabled") is True for key in ("fp16", "bf16", "bfloat16"))
    width = 2 if is_half else 4
    # Half precision keeps a full copy of parameters and gradients beside the states.
    states = _states(config) * 4 + (8 if is_half else 0)
    params = model.params * width
    gradients = model.trainable * width
    optimizer = model.trainable * states
    if stage >= 1:
        optimizer *= _share_on_device(zero, "offload_optimizer", "cpu_offload") / devices
    if stage >= 2:
        gradients /= devices
    if stage >= 3:
        params *= _share_on_device(zero, "offload_param", "cpu_offload_params") / devices
    return (params + gradients + optimizer) / mp_size


def _states(config: Mapping[str, object]) -> int:
    optimizer = section_of(config, "optimizer")
    kind = str(optimizer.get("type", "")).lower()
    momentum = section_of(optimizer, "params").get("momentum")
    if kind == "sgd" and is_number(momentum) and momentum > 0:
        return 1
    return _STATES.get(kind, _ADAM)


def _share_on_device(zero: Mapping[str, object], key: str, old_key: str) -> float:
    """The share that is not offloaded. Newer configs have a section for it, older ones a switch."""
    section = section_of(zero, key)
    if section.get("device") in _OFF_DEVICE:
        ratio = section.get("ratio", 1)
        return 1 - min(max(float(ratio), 0), 1) if is_number(ratio) else 0
    return 0 if zero.get(old_key) is True else 1


def _count(facts: Mapping[str, object], key: str) -> float:
    """A number about a model; 0: it is missing or impossible."""
    value = facts.get(key)
    return float(value) if is_number(value) and 1 <= value <= MOST_BYTES else 0


_STAGES = (0, 1, 2, 3)
# With `model_info`, DeepSpeed may treat a run as a profile.
_NOT_FOR_RUNS = ("results_dir", "exps_dir", "metric_path", "model_info", "model_info_path")


def search(section: Section, config: Mapping[str, object], resources: Resources) -> Steps[Summary]:
    """Look for the best config.

    A generator: it yields experiments that may run side by side, takes their results by name with ``send``,
    and returns what it has found. An experiment that was stopped, or has no result, ends the search. The same
    results lead to the same experiments, so you resume a search by sending it the known results.

    Args:
        section: section of the config.
        config: the user's config, with the numbers of `resolve_auto`.
        resources: what an experiment gets.

    Raises:
        AutotuningError: nothing can be tried: a bound is below one sample for each worker, a ZeRO stage or a
            key of the space does not exist, or a tuner needs a package that is not installed.
    """
    results = Results(section, _own_section(config))
    try:
        if section.space is not None:
            ended = yield from _tune_grid(own_grid(without_tuning(config), section.space), results, resources)
        else:
            ended = yield from _Stages(section, without_tuning(config), resources, results).tune()
        yield from results.settle()
        if why := results.why_nothing_ran():
            ended = f"no config ran: {why}"
    except Stopped:
        ended = "stopped before everything was tried"
    return results.summarise(ended)


def count_configs(section: Section) -> int | None:
    """How many configs the search will try; None: that depends on the results."""
    if section.space is None or section.tuner_early_stopping:
        return None
    return min(count_own(section.space), section.tuner_num_trials)


def _own_section(config: Mapping[str, object]) -> Mapping[str, object]:
    """The section that the script reads. The tuner adds the files to write."""
    user = section_of(config, AUTOTUNING)
    return {**{key: value for key, value in user.items() if key not in _NOT_FOR_RUNS}, "enabled": True}


def _tune_grid(grid: Grid, results: Results, resources: Resources) -> Steps[str]:
    """Try points of a space: all, or until enough are tried or no better one comes. Says why it ended."""
    section = results.section
    sampler = make_sampler(grid, section)
    tried, best, best_at, most = 0, None, 0, section.tuner_num_trials
    while tried < most and (points := sampler.propose(min(max(resources.lanes, 1), most - tried))):
        entries = yield from results.run(
            [Experiment(point.name, point.config, "run", grid.name) for point in points]
        )
        for at, (point, entry) in enumerate(zip(points, entries, strict=True), tried):
            sampler.learn(point, entry.value)
            if best is None:
                best_at = at
            if entry.value is not None and results.is_better(entry.value, best):
                best, best_at = entry.value, at
        tried += len(points)
        if section.tuner_early_stopping and tried >= best_at + section.tuner_early_stopping:
            return f"{tried} of {len(grid.points)} configs of {grid.name} were tried, the last ones no better"
    if tried == len(grid.points):
        return f"all {tried} configs of {grid.name} were tried"
    return f"{tried} of {len(grid.points)} configs of {grid.name} were tried (tuner_num_trials)"


class _Stages:
    """Tries one ZeRO stage after another."""

    def __init__(
        self, section: Section, config: Mapping[str, object], resources: Resources, results: Results
    ) -> None:
        self._section = section
        self._config = config
        self._resources = resources
        self._workers = resources.nodes * resources.slots_per_node
        if self._workers % section.mp_size:
            raise AutotuningError(
                f"autotuning.mp_size {section.mp_size} does not divide the "
                f"{counted(self._workers, 'worker')} of an experiment: lower it, or take as many slots as "
                "it needs"
            )
        self._batches = read_batches(section, config, self._workers)
        self._stages = _read_stages(config)
        self._results = results
        self._model: Model | None = None
        if self._batches.most_of_step == 0:
            raise AutotuningError(
                f"autotuning.max_train_batch_size {section.max_train_batch_size} is less than one sample for "
                f"each of {counted(self._workers // section.mp_size, 'worker')}"
            )
        if self._batches.most < self._batches.least:
            raise AutotuningError(
                f"autotuning.min_train_micro_batch_size_per_gpu {self._batches.least} is more than "
                f"max_train_batch_size leaves for each worker, {self._batches.most}"
            )

    def tune(self) -> Steps[str]:
        if not self._section.fast and any(self._stages):
            # Raises before anything runs, if the tuner's package is missing.
            make_sampler(Grid("", (), ()), self._section)
        if not (yield from self._profile()):
            self._results.notes.append("not even ZeRO 3 with a micro batch of 1 fits into memory")
            return self._results.notes[-1]
        largest, best = 0, None
        for stage in self._stages:
            if not self._is_feasible(stage):
                continue
            try:
                found = yield from self._tune_stage(stage, largest, best)
            except NotFound as problem:
                self._results.notes.append(f"z{stage} ends: {problem}")
                continue
            # As in DeepSpeed: the next stages build on this one only if its best micro batch is larger.
            if _micro_batch(found[1]) > _micro_batch(best):
                largest, best = found
        return "all ZeRO stages that the config asks for were tried"

    def _profile(self) -> Steps[bool]:
        """Learn the size of the model. False: the model is too large for any stage."""
        given = self._section.model_info or {}
        self._model = read_model(given)
        if self._model is not None:
            return True
        steps = self._batches.accumulation
        config = with_batch(with_stage(self._config, 3), 1, steps, self._batches)
        own = {"enabled": True, "model_info": {**given, "profile": True}}
        profile = Experiment(
            PROFILE_NAME, {**config, "memory_break_down": False, AUTOTUNING: own}, "profile", ""
        )
        result = yield from self._results.profile(profile)
        if result.outcome == "oom":
            return False
        if result.outcome == "ok":
            self._model = read_model({**given, **result.metrics})
        if self._model is None:
            self._results.notes.append(
                f"the size of the model is not known: {result.reason or 'its profile tells no num_params'}"
            )
        return True

    def _room(self, stage: int) -> float | None:
        """Bytes of a device that the model leaves for activations; None: unknown."""
        if self._model is None or self._resources.memory_bytes is None:
            return None
        config = first_config(self._config)
        needed = estimate(self._model, stage, config, self._workers, self._section.mp_size)
        return self._resources.memory_bytes - needed

    def _is_feasible(self, stage: int) -> bool:
        room, memory, model = self._room(stage), self._resources.memory_bytes, self._model
        if room is None or memory is None or model is None or room > model.activation_bytes:
            return True
        needed = _gigabytes(memory - room + model.activation_bytes)
        self._results.notes.append(
            f"z{stage} is left out: it needs about {needed} of a device's {_gigabytes(memory)}"
        )
        return False

    def _fits(self, stage: int) -> int | None:
        """The largest micro batch that fits into memory; None: unknown."""
        room = self._room(stage)
        if room is None or self._model is None or not self._model.activation_bytes:
            return None
        return int(room // self._model.activation_bytes)

    def _tune_stage(self, stage: int, before: int, rival: Entry | None) -> Steps[tuple[int, Entry]]:
        """The largest micro batch that ran and the best config of a stage. Raises NotFound.

        ``before``: the same micro batch of the stage before, 0 without one; ``rival``: its best config.
        """
        fits = self._fits(stage)
        if fits is not None and fits < before:
            raise NotFound(
                f"memory suffices for a micro batch of {fits}, less than the {before} of the stage before"
            )
        tried = Stage(stage, self._config, self._batches, self._results, self._resources.lanes)
        found = yield from tried.tune(before, fits)
        best = self._results.best_of(tried.space)
        assert best is not None
        if self._section.fast or stage == 0 or _micro_batch(best) <= _micro_batch(rival):
            return found.largest, best
        # The better of two near-ties decides whether a whole space is tried, so both are measured again.
        if rival is None or (yield from self._results.settle([rival, best])) is not rival:
            best = yield from self._tune_full(stage, found, best)
        return found.largest, best

    def _tune_full(self, stage: int, found: Found, fast: Entry) -> Steps[Entry]:
        """The best config of the full space of a stage, or ``fast``, if that is better."""
        try:
            grid = zero_grid(
                stage,
                self._config,
                found.sizes,
                found.samples,
                hidden_size=self._model.hidden_size if self._model else 0,
                workers=self._workers // self._section.mp_size,
            )
        except AutotuningError as problem:  # what was found until now is worth keeping
            self._results.notes.append(f"the settings of z{stage} are not tuned: {problem}")
            return fast
        self._results.notes.append((yield from _tune_grid(grid, self._results, self._resources)))
        full = self._results.best_of(grid.name)
        if full is None or full.value is None or not self._results.is_better(full.value, fast.value):
            return fast
        return full


def _read_stages(config: Mapping[str, object]) -> tuple[int, ...]:
    """The ZeRO stages that the user asks for, ascending."""
    zero = config.get(ZERO)
    if zero is not None and not isinstance(zero, dict):
        raise AutotuningError(f"{ZERO}: expected an object with keys, got {show(zero)}")
    stage = (zero or {}).get(STAGE, 0)
    stages = stage if isinstance(stage, list) else [stage]
    if "all" in stages:
        return _STAGES
    wrong = [one for one in stages if isinstance(one, bool) or one not in _STAGES]
    if wrong or not stages:
        raise AutotuningError(f'{ZERO}.{STAGE}: expected 0 to 3, a list of them or "all", got {show(stage)}')
    return tuple(sorted(set(stages)))


def _micro_batch(entry: Entry | None) -> int:
    size = 0 if entry is None else entry.experiment.config["train_micro_batch_size_per_gpu"]
    assert isinstance(size, int)
    return size


def _gigabytes(size: float) -> str:
    return f"{size / 1024**3:.1f} GiB"
