"""The user's config: its ``autotuning`` section, and how each experiment gets a config of its own.

Keys and defaults of the section are those of ``deepspeed.autotuning`` (0.19.8). Keys that only dsl has are
marked "Ours". DeepSpeed's options take a config as URL-safe base64 in place of the path. A script that takes
its config by ``--config`` cannot read base64, so it gets the path of a file.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from hashlib import sha256
from json import dumps, loads
from typing import Any, Literal, NoReturn, TypeAlias, TypeGuard

from dsl._record import Record
from dsl.errors import AutotuningError
from dsl.model.job import Notice
from dsl.words import BEYOND, MOST_SECONDS, parse_number, parse_size, quote, shorten, show

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


Count: TypeAlias = int
"""A whole number from 0 on."""
Natural: TypeAlias = int
"""A whole number from 1 on."""


class Section(Record):
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
    start_profile_step: Count = 3
    """First step that is measured."""
    end_profile_step: Count = 5
    """An experiment ends after this step."""
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    """In which order the configs of a full space are tried."""
    tuner_early_stopping: Count = 5
    """Trials without improvement after which a full space ends; 0, or not set beside ``space``: never."""
    tuner_num_trials: Natural = 50
    """Most trials of a full space."""
    arg_mappings: tuple[tuple[str, str], ...] = ()
    """Pairs of a key of the config and the option of the script that repeats its value."""
    max_train_batch_size: int | None = None
    """Most samples of a step over all workers; None: no bound."""
    min_train_batch_size: Natural = 1
    """Fewest samples of a step over all workers."""
    max_train_micro_batch_size_per_gpu: Natural = 1024
    """Most samples that a worker takes at a time."""
    min_train_micro_batch_size_per_gpu: Natural = 1
    """Fewest samples that a worker takes at a time."""
    num_tuning_micro_batch_sizes: Natural = 3
    """How many micro batches are tried below the largest one that runs."""
    mp_size: Natural = 1
    """Workers that share one copy of the model."""
    model_info: Mapping[str, object] | None = None
    """What the user knows about the model (``num_params``, ``hidden_size``, ``activation_mem_per_gpu`` and so
    on). With ``num_params``, no profile is run."""
    space: Mapping[str, tuple[object, ...]] | None = None
    """Ours. Dotted keys of the config with the values to try, for any script; None: DeepSpeed's phases."""
    seed: Count = 0
    """Ours. With the same seed and the same results, two searches make the same decisions."""
    repeats: Count = 1
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
    given = _mapping(AUTOTUNING, config[AUTOTUNING])
    values = {
        key: (_READERS.get(key) or _READERS[kind])(f"{AUTOTUNING}.{key}", given[key])
        for key, kind in Section.__annotations__.items()
        if given.get(key) is not None  # null counts as not set
    }
    if values.get("metric") in DURATIONS:
        values.setdefault("mode", "min")
    if "space" in values:
        values.setdefault("tuner_early_stopping", 0)
    section = Section(**values)
    _check_order(section, "end_profile_step", "start_profile_step", "before")
    _check_order(section, "max_train_micro_batch_size_per_gpu", "min_train_micro_batch_size_per_gpu", "below")
    _check_order(section, "max_train_batch_size", "min_train_batch_size", "below")
    return section


def find_slips(config: Mapping[str, object]) -> tuple[Notice, ...]:
    """Notices about likely mistakes in a section."""
    section = section_of(config, AUTOTUNING)
    known = (*Section.__match_args__, *OF_SCRIPTS)
    found = [_unknown(key, known) for key in section if key not in known]
    metric = section.get("metric")
    is_known = metric in (None, "throughput", *DURATIONS) or str(metric).upper() in FLOPS
    if not is_known and section.get("mode") is None:
        line = f'more {show(metric)} is better: where less is, say "mode": "min" in autotuning'
        found.append(Notice("info", line))
    return tuple(found)


def _unknown(key: str, known: Sequence[str]) -> Notice:
    near = get_close_matches(key, known, 1)
    line = f"autotuning: dsl does not know the key {show(key)} and leaves it to the script"
    return Notice("warning", f"{line}, did you mean {near[0]}?" if near else line)


def metric_keys(section: Section) -> tuple[str, ...]:
    """Where the tuned metric may be in a file of metrics."""
    # What DeepSpeed's documents call FLOPS, its file calls FLOPS_per_gpu.
    metric = section.metric
    return (metric, "FLOPS_per_gpu", "FLOPS") if metric.upper() == "FLOPS" else (metric,)


def read_metric(section: Section, metrics: Mapping[str, float]) -> float | None:
    """The tuned metric from a file of metrics. None: it is missing, or is no finite number."""
    found = [metrics[key] for key in metric_keys(section) if key in metrics]
    return found[0] if found and found[0] - found[0] == 0 else None


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number, and no switch."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number from 1 on, and no switch."""
    return isinstance(value, int) and is_number(value) and value > 0


def _refuse(where: str, expected: str, value: object) -> NoReturn:
    raise AutotuningError(f"{where}: expected {expected}, got {show(value)}")


def _mapping(where: str, value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else _refuse(where, "an object with keys", value)


def _check_order(section: Section, most: str, least: str, word: str) -> None:
    high, low = getattr(section, most), getattr(section, least)
    if high is not None and high < low:
        raise AutotuningError(f"autotuning: {most} {high} is {word} {least} {low}")


def _flag(where: str, value: object) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        _refuse(where, "true or false", value)
    return bool(value)


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        _refuse(where, "a word", value)
    return value.strip()


def _whole(least: int, where: str, value: object) -> int:
    # JSON writes a whole number also as 1e3.
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number < BEYOND:
        _refuse(where, f"a whole number from {least} on", value)
    return number


def _number(most: float, expected: str, where: str, value: object) -> float:
    if not is_number(value) or not 0 <= value <= most:
        _refuse(where, expected, value)
    return value


def _word(words: Sequence[str], expected: str, where: str, value: object) -> str:
    if value not in words:
        _refuse(where, expected, value)
    return str(value)


def _arg_mappings(where: str, value: object) -> tuple[tuple[str, str], ...]:
    given = _mapping(where, value)
    for key, option in given.items():
        if not isinstance(option, str) or not option.strip() or not key.strip() or "\0" in option:
            _refuse(where, f"an option of the script for {show(key)}", option)
    return tuple([(key.strip(), str(option).strip()) for key, option in given.items()])


def _model_info(where: str, value: object) -> Mapping[str, object]:
    facts = _mapping(where, value)
    for key in COUNTS:
        _number(MOST_BYTES, f"a number from 0 to {MOST_BYTES:.0e}", f"{where}.{key}", facts.get(key) or 0)
    return facts


def _space(where: str, value: object) -> Mapping[str, tuple[object, ...]]:
    space: dict[str, tuple[object, ...]] = {}
    for key, values in _mapping(where, value).items():
        if not isinstance(values, list) or not values:
            _refuse(where, f"a list of values for {show(key)}", values)
        if not all(key.split(".")) or key.split(".")[0] == AUTOTUNING:
            raise AutotuningError(f"{where}: {show(key)} is no key of the config")
        space[key] = tuple(values)
    if not space:
        raise AutotuningError(f"{where} is empty: name at least one key and its values")
    for key in space:
        inner = next((one for one in space if one.startswith(f"{key}.")), None)
        if inner is not None:
            raise AutotuningError(f"{where}: {show(inner)} is a part of {show(key)}, leave one of them out")
    return space


def _memory(where: str, value: object) -> int:
    size = parse_size(value) if isinstance(value, str) else value
    if not is_count(size) or size > MOST_BYTES:
        _refuse(where, "bytes, or a number with K, M or G", value)
    return size


_READERS: dict[str, Callable[[str, object], Any]] = {
    "bool": _flag,
    "bool | None": _flag,
    "str": _text,
    "Count": partial(_whole, 0),
    "Natural": partial(_whole, 1),
    "mode": partial(_word, ("min", "max"), "min or max"),
    "tuner_type": partial(_word, TUNERS, f"one of {', '.join(TUNERS)}"),
    "arg_mappings": _arg_mappings,
    "max_train_batch_size": lambda where, value: _whole(0, where, value) or None,  # as in DeepSpeed
    "model_info": _model_info,
    "space": _space,
    "near": partial(_number, 1, "a share from 0 to 1"),
    "exp_timeout_s": partial(_number, MOST_SECONDS, "a number of seconds"),
    "device_memory": _memory,
}
"""Readers of values: by key, or else by the annotation of the key's field."""


MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
TRAIN_BATCH = "train_batch_size"
ZERO = "zero_optimization"
STAGE = "stage"
AUTO = "auto"
"""In a config, marks a value that Hugging Face's Trainer takes from its own arguments."""

MOST_NESTED = 100
"""Most levels of objects and lists inside one another: a config with more is a mistake."""

_OPTIONS = (("--deepspeed_config", True), ("--deepspeed", True), ("--config", False))


class ConfigWord(Record):
    """Where the path of the config is among the words of the script."""

    option: str
    """Option that it belongs to."""
    place: int
    """Index of the word that holds the path, behind the option or in the same word (``OPTION=PATH``)."""
    path: str
    """The path as the user wrote it."""
    is_encoded: bool
    """Whether the script reads base64 there (DeepSpeed's options), or only paths (``--config``)."""


def find_config(words: Sequence[str]) -> ConfigWord:
    """Find the config in the words behind the script.

    It is at ``--deepspeed_config``, else ``--deepspeed``, else ``--config``. If an option is given twice, the
    last one counts, as in argparse.

    Raises:
        AutotuningError: there is no config.
    """
    for option, is_encoded in _OPTIONS:
        for place, path in list(_values(words, option))[-1:]:
            # `--deepspeed` alone is a switch: the next word is its value only if it looks like a config.
            if option == "--deepspeed_config" or ".json" in path:
                return ConfigWord(option, place, path, is_encoded)
    raise AutotuningError(
        "autotuning needs the config of the script: give --deepspeed_config FILE, --deepspeed FILE.json "
        "or --config FILE.json behind the script"
    )


def parse_config(text: str, path: str) -> dict[str, object]:
    """Read a config, which is strict JSON.

    Raises:
        AutotuningError: the text is no JSON object, is nested too deeply, has a key twice, or has a value
            that no file or float can hold.
    """
    try:
        config = loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
        is_flat = _depth(config) <= MOST_NESTED
        if is_flat:
            dumps(config, ensure_ascii=False).encode()
    except RecursionError:
        is_flat = False
    except UnicodeEncodeError as error:  # half of a character, from broken UTF-16 or UTF-8
        half = show(error.object[error.start : error.end])
        raise AutotuningError(f"{path}: {half} is no text: write it in UTF-8") from None
    except ValueError as error:
        raise AutotuningError(f"{path}: {error}") from None
    if not is_flat:
        raise AutotuningError(
            f"{path}: more than {MOST_NESTED} objects or lists inside one another: make it flatter"
        )
    if not isinstance(config, dict):
        raise AutotuningError(f"{path}: expected a JSON object, got {show(config)}")
    return config


def resolve_auto(config: Mapping[str, object], section: Section, words: Sequence[str]) -> dict[str, object]:
    """The config with numbers from the script's arguments.

    If the micro batch or the accumulation steps are ``auto``, or the micro batch is missing, the number comes
    from the option that ``arg_mappings`` names.
    """
    options = dict(section.arg_mappings)
    resolved = dict(config)
    for key, asks in ((MICRO_BATCH, (AUTO, None)), (ACCUMULATION, (AUTO,))):
        if key in options and resolved.get(key) in asks:
            _, value = ((0, ""), *_values(words, options[key]))[-1]
            if number := parse_number(value):
                resolved[key] = number
    return resolved


def experiment_words(
    words: Sequence[str], place: ConfigWord, config: Mapping[str, object], path: str, section: Section
) -> tuple[str, ...]:
    """The words of the script for one experiment, as a copy.

    Args:
        words: as the user gave them.
        place: where the config is among the words.
        config: the whole config of the experiment.
        path: path of a file with this config, for a script that reads no base64.
        section: its ``arg_mappings`` name the options that repeat values of the config.
    """
    own = list(words)
    _put(own, place.option, place.place, encode(config) if place.is_encoded else path)
    for key, option in section.arg_mappings:
        mapped = look_up(config, key)
        if isinstance(mapped, str | int | float) and mapped != AUTO:
            found = list(_values(own, option))
            own += [] if found else [option, ""]
            for at, _ in found or [(len(own) - 1, "")]:
                _put(own, option, at, str(mapped))
    return tuple(own)


def encode(config: Mapping[str, object]) -> str:
    """A config as the URL-safe base64 that DeepSpeed takes for a path."""
    return urlsafe_b64encode(dumps(config).encode()).decode()


def fingerprint(*parts: object) -> str:
    """SHA-256 of the content in hex: the same content gives the same text, in any order of keys."""
    return sha256(dumps(parts, sort_keys=True).encode()).hexdigest()


def section_of(config: Mapping[str, object], key: str) -> Mapping[str, Any]:
    """A section of a config; empty if there is none."""
    section = config.get(key)
    return section if isinstance(section, dict) else {}


def without_tuning(config: Mapping[str, object]) -> dict[str, object]:
    """The config for real training: without ``autotuning``, which ends a run after a few steps."""
    return {key: value for key, value in config.items() if key != AUTOTUNING}


def look_up(config: Mapping[str, object], key: str) -> object:
    """The first value of a key, which may be dotted or inside any section. None: there is no value."""
    if key in config:
        return config[key]
    first, _, rest = key.partition(".")
    inner = config.get(first)
    if rest and isinstance(inner, dict):
        return look_up(inner, rest)
    for name, section in config.items():
        # The section about tuning holds no values of the config.
        if isinstance(section, dict) and name != AUTOTUNING:
            found = look_up(section, key)
            if found is not None:
                return found
    return None


def _values(words: Sequence[str], option: str) -> Iterator[tuple[int, str]]:
    """Each value of an option, behind it or joined to it, with the index of the word that holds it."""
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            yield place + 1, words[place + 1]
        elif word.startswith(f"{option}="):
            yield place, word[len(option) + 1 :]


def _put(words: list[str], option: str, place: int, value: str) -> None:
    words[place] = f"{option}={value}" if words[place].startswith(f"{option}=") else value


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {quote(key)}: keep one of them")
        found[key] = value
    return found


def _refuse_constant(word: str) -> object:
    raise ValueError(f"{word} is no JSON: write a number")


def _parse_float(word: str) -> float:
    number = float(word)
    if number - number:  # neither infinite nor NaN
        raise ValueError(f"{shorten(word)} is beyond all numbers: write a smaller one")
    return number


def _parse_int(word: str) -> int:
    _parse_float(word)  # so that code can also use it as a float
    return int(word)


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)
