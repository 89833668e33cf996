"""The user's config: where it is among the words of the script, and how an experiment gets its own.

DeepSpeed's options take a config as URL-safe base64 in place of the path. A script that takes its config by
``--config`` cannot read base64, so it gets the path of a file.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from json import dumps, loads

from dsl._record import Record
from dsl.errors import AutotuningError
from dsl.lists import parse_number, quote, shorten, show
from dsl.tune.section import AUTOTUNING, Section

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
