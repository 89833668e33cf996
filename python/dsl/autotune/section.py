"""The ``autotuning`` section of a config, checked.

Keys and defaults are those of ``deepspeed.autotuning`` (0.19.8). Keys that only dsl has are marked "Ours".
"""

from __future__ import annotations

from dsl._record import record
from dsl.errors import AutotuningError
from dsl.lists import BEYOND, MOST_SECONDS, parse_size, shorten
from dsl.model.job import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

AUTOTUNING = "autotuning"
"""Key of the section in a config."""

DURATIONS = ("latency", "fwd", "bwd", "step")
"""Metrics in DeepSpeed's file for which less is better."""

MOST_BYTES = 10**18
"""Most bytes of a device, and most parameters of a model: a larger number is a mistake."""

COUNTS = ("num_params", "trainable_num_params", "activation_mem_per_gpu", "hidden_size")
"""Keys of ``model_info`` that the search uses."""

FLOPS = ("FLOPS", "FLOPS_PER_GPU")
"""Two names of one metric, in upper case."""

OF_SCRIPTS = ("enabled", "metric_path", "model_info_path")
"""Other keys of a section, which only scripts use."""

TUNERS = ("gridsearch", "random", "model_based")
"""Values of ``tuner_type``."""


@record
class Section:
    """The values of a section. ``enabled`` is ignored: the option ``--autotuning`` enables tuning."""

    fast: bool = True
    """Only ZeRO stage and micro batch are tuned."""
    results_dir: str = "autotuning_results"
    """Folder of results, relative to the working directory."""
    exps_dir: str = "autotuning_exps"
    """Folder of the descriptions of experiments, relative to the working directory."""
    overwrite: bool | None = None
    """Start anew instead of going on with existing results; None: not set."""
    metric: str = "throughput"
    """Key of the metric that is tuned. ``FLOPS`` also stands for ``FLOPS_per_gpu``."""
    mode: Literal["min", "max"] = "max"
    """Ours. Whether less or more is better; the default is ``min`` for the metrics in `DURATIONS`."""
    start_profile_step: int = 3
    """First step that is measured."""
    end_profile_step: int = 5
    """An experiment ends after this step."""
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    """In which order the configs of a full space are tried."""
    tuner_early_stopping: int = 5
    """Trials without improvement after which a full space ends; 0, or not set beside ``space``: never."""
    tuner_num_trials: int = 50
    """Most trials of a full space."""
    arg_mappings: tuple[tuple[str, str], ...] = ()
    """Pairs of a key of the config and the option of the script that repeats its value."""
    max_train_batch_size: int | None = None
    """Most samples of a step over all workers; None: no bound."""
    min_train_batch_size: int = 1
    """Fewest samples of a step over all workers."""
    max_train_micro_batch_size_per_gpu: int = 1024
    """Most samples that a worker takes at a time."""
    min_train_micro_batch_size_per_gpu: int = 1
    """Fewest samples that a worker takes at a time."""
    num_tuning_micro_batch_sizes: int = 3
    """How many micro batches are tried below the largest one that runs."""
    mp_size: int = 1
    """Workers that share one copy of the model."""
    model_info: Mapping[str, object] | None = None
    """What the user knows about the model (``num_params``, ``hidden_size``, ``activation_mem_per_gpu`` and so
    on). With ``num_params``, no profile is run."""
    space: Mapping[str, tuple[object, ...]] | None = None
    """Ours. Dotted keys of the config with the values to try, for any script; None: DeepSpeed's phases."""
    seed: int = 0
    """Ours. With the same seed and the same results, two searches make the same decisions."""
    repeats: int = 1
    """Ours. How often a config is run again at most, if it comes near the best; 0: never."""
    near: float = 0.05
    """Ours. Configs whose values differ by no more than this share of the better one are near-ties."""
    exp_timeout_s: float = 3600.0
    """Ours. An experiment that takes longer is ended; 0: never."""
    device_memory: int | None = None
    """Ours. Memory of a device in bytes, instead of what the device reports."""


def read_section(config: Mapping[str, object]) -> Section:
    """The section of a whole config.

    Raises:
        AutotuningError: there is no section, or a value is not allowed.
    """
    if AUTOTUNING not in config:
        raise AutotuningError(
            'the config has no "autotuning" section: add one, such as "autotuning": {"enabled": true}'
        )
    return _Reader(_mapping(AUTOTUNING, config[AUTOTUNING])).read()


def find_slips(config: Mapping[str, object]) -> tuple[Notice, ...]:
    """Notices about likely mistakes in a section."""
    given = config.get(AUTOTUNING)
    section = given if isinstance(given, dict) else {}
    known = (*Section.__match_args__, *OF_SCRIPTS)
    found = [_unknown(key, known) for key in section if key not in known]
    metric = section.get("metric")
    is_known = metric in (None, "throughput", *DURATIONS) or str(metric).upper() in FLOPS
    if not is_known and section.get("mode") is None:
        line = f'more {show(metric)} is better: where less is, say "mode": "min" in autotuning'
        found.append(Notice("info", line))
    return tuple(found)


def _unknown(key: str, known: Sequence[str]) -> Notice:
    from difflib import get_close_matches

    near = get_close_matches(key, known, 1)
    line = f"autotuning: dsl does not know the key {show(key)} and leaves it to the script"
    return Notice("warning", f"{line}, did you mean {near[0]}?" if near else line)


def read_metric(section: Section, metrics: Mapping[str, float]) -> float | None:
    """The tuned metric from a file of metrics. None: it is missing, or is no finite number."""
    metric = section.metric
    # What DeepSpeed's documents call FLOPS, its file calls FLOPS_per_gpu.
    keys = (metric, "FLOPS_per_gpu", "FLOPS") if metric.upper() == "FLOPS" else (metric,)
    found = [metrics[key] for key in keys if key in metrics]
    return found[0] if found and found[0] - found[0] == 0 else None


def show(value: object) -> str:
    """A value of a config on one line, short enough for a message."""
    return shorten(" ".join(repr(value).split()))


def _mapping(where: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise AutotuningError(f"{where}: expected an object with keys, got {show(value)}")
    return value


class _Reader:
    """Reads the values of a section; null counts as not set."""

    def __init__(self, section: Mapping[str, object]) -> None:
        self._section = section

    def read(self) -> Section:
        metric = self._text("metric", "throughput")
        first = self._whole("start_profile_step", 3, 0)
        last = self._whole("end_profile_step", 5, 0)
        if last < first:
            raise AutotuningError(f"autotuning: end_profile_step {last} is before start_profile_step {first}")
        least = self._whole("min_train_micro_batch_size_per_gpu", 1, 1)
        most = self._whole("max_train_micro_batch_size_per_gpu", 1024, 1)
        if most < least:
            raise AutotuningError(
                f"autotuning: max_train_micro_batch_size_per_gpu {most} is below "
                f"min_train_micro_batch_size_per_gpu {least}"
            )
        samples, fewest = self._bound("max_train_batch_size"), self._whole("min_train_batch_size", 1, 1)
        if samples is not None and samples < fewest:
            raise AutotuningError(
                f"autotuning: max_train_batch_size {samples} is below min_train_batch_size {fewest}"
            )
        space = self._space()
        return Section(
            fast=self._flag("fast", default=True),
            results_dir=self._text("results_dir", "autotuning_results"),
            exps_dir=self._text("exps_dir", "autotuning_exps"),
            overwrite=None if self._get("overwrite", None) is None else self._flag("overwrite", default=True),
            metric=metric,
            mode=self._mode(metric),
            start_profile_step=first,
            end_profile_step=last,
            tuner_type=self._tuner(),
            tuner_early_stopping=self._whole("tuner_early_stopping", 0 if space else 5, 0),
            tuner_num_trials=self._whole("tuner_num_trials", 50, 1),
            arg_mappings=self._arg_mappings(),
            max_train_batch_size=samples,
            min_train_batch_size=fewest,
            max_train_micro_batch_size_per_gpu=most,
            min_train_micro_batch_size_per_gpu=least,
            num_tuning_micro_batch_sizes=self._whole("num_tuning_micro_batch_sizes", 3, 1),
            mp_size=self._whole("mp_size", 1, 1),
            model_info=self._model_info(),
            space=space,
            seed=self._whole("seed", 0, 0),
            repeats=self._whole("repeats", 1, 0),
            near=self._share("near", 0.05),
            exp_timeout_s=self._seconds("exp_timeout_s", 3600.0),
            device_memory=self._memory(),
        )

    def _get(self, key: str, default: object) -> object:
        value = self._section.get(key)
        return default if value is None else value

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool | int) or value not in (0, 1):
            raise AutotuningError(f"autotuning.{key}: expected true or false, got {show(value)}")
        return bool(value)

    def _text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise AutotuningError(f"autotuning.{key}: expected a word, got {show(value)}")
        return value.strip()

    def _whole(self, key: str, default: int, least: int) -> int:
        value = self._get(key, default)
        # JSON writes a whole number also as 1e3.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < BEYOND:
            raise AutotuningError(
                f"autotuning.{key}: expected a whole number from {least} on, got {show(value)}"
            )
        return value

    def _bound(self, key: str) -> int | None:
        # DeepSpeed takes 0 for no bound, too.
        return self._whole(key, 0, 0) or None

    def _number(self, key: str, default: float, most: float, unit: str) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
            raise AutotuningError(f"autotuning.{key}: expected {unit}, got {show(value)}")
        return float(value)

    def _share(self, key: str, default: float) -> float:
        return self._number(key, default, 1, "a share from 0 to 1")

    def _seconds(self, key: str, default: float) -> float:
        return self._number(key, default, MOST_SECONDS, "a number of seconds")

    def _mode(self, metric: str) -> Literal["min", "max"]:
        value = self._get("mode", "min" if metric in DURATIONS else "max")
        if value == "min":
            return "min"
        if value == "max":
            return "max"
        raise AutotuningError(f"autotuning.mode: expected min or max, got {show(value)}")

    def _tuner(self) -> Literal["gridsearch", "random", "model_based"]:
        value = self._get("tuner_type", "gridsearch")
        if value in TUNERS:
            return value  # type: ignore[return-value]
        raise AutotuningError(
            f"autotuning.tuner_type: expected one of {', '.join(TUNERS)}, got {show(value)}"
        )

    def _arg_mappings(self) -> tuple[tuple[str, str], ...]:
        given = _mapping("autotuning.arg_mappings", self._get("arg_mappings", {}))
        for key, option in given.items():
            if not isinstance(option, str) or not option.strip() or not key.strip() or "\0" in option:
                raise AutotuningError(
                    f"autotuning.arg_mappings: expected an option of the script for {show(key)}, "
                    f"got {show(option)}"
                )
        return tuple([(key.strip(), str(option).strip()) for key, option in given.items()])

    def _model_info(self) -> Mapping[str, object] | None:
        given = self._get("model_info", None)
        if given is None:
            return None
        facts = _mapping("autotuning.model_info", given)
        for key in COUNTS:
            value = facts.get(key) or 0
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= MOST_BYTES:  # type: ignore[operator]  # it is one
                raise AutotuningError(
                    f"autotuning.model_info.{key}: expected a number from 0 to {MOST_BYTES:.0e}, "
                    f"got {show(value)}"
                )
        return facts

    def _space(self) -> Mapping[str, tuple[object, ...]] | None:
        given = self._get("space", None)
        if given is None:
            return None
        space = {}
        for key, values in _mapping("autotuning.space", given).items():
            if not isinstance(values, list) or not values:
                raise AutotuningError(
                    f"autotuning.space: expected a list of values for {show(key)}, got {show(values)}"
                )
            if not all(key.split(".")) or key.split(".")[0] == AUTOTUNING:
                raise AutotuningError(f"autotuning.space: {show(key)} is no key of the config")
            space[key] = tuple(values)
        if not space:
            raise AutotuningError("autotuning.space is empty: name at least one key and its values")
        for key in space:
            inner = next((one for one in space if one.startswith(f"{key}.")), None)
            if inner is not None:
                raise AutotuningError(
                    f"autotuning.space: {show(inner)} is a part of {show(key)}, leave one of them out"
                )
        return space

    def _memory(self) -> int | None:
        value = self._get("device_memory", None)
        if value is None:
            return None
        size = parse_size(value) if isinstance(value, str) else value
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= MOST_BYTES:
            raise AutotuningError(
                f"autotuning.device_memory: expected bytes, or a number with K, M or G, got {show(value)}"
            )
        return size
