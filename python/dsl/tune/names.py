"""Names of experiments and spaces, as in DeepSpeed. They are also the names of folders."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dsl.tune.ds_config import ACCUMULATION, MICRO_BATCH

_LONGEST = 180
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-=")
_OFFLOAD = {"offload_param": "op_", "offload_optimizer": "oo_"}


def full_name(
    config: Mapping[str, object], tuned: Collection[str], prefix: str, *, has_values: bool = True
) -> str:
    """Name of an experiment of a full space: initials of each tuned key, and its value.

    ``has_values``: if false, it is the name of the space, without the values.
    """
    keys = {*tuned, MICRO_BATCH, ACCUMULATION}
    return as_folder(prefix + (_join(config, keys, has_values=has_values) or "exp"))


def dotted_name(values: Mapping[str, object]) -> str:
    """Name of an experiment of the user's own space: ``batch=8_lr=0.1``, each key by its last part."""
    return as_folder("_".join([f"{key.rpartition('.')[2]}={value}" for key, value in values.items()]))


def as_folder(text: str) -> str:
    """A text as the name of a folder that cannot lead out of its parent folder."""
    name = "".join([one if one in _PLAIN or one == "_" else "-" for one in text])
    return (name if name.strip(".") else "exp")[:_LONGEST]


def _join(config: Mapping[str, object], keys: Collection[str], *, has_values: bool) -> str:
    text = ""
    for key, value in config.items():
        if key == "arg_mappings":
            continue
        if key in _OFFLOAD:
            text += _OFFLOAD[key]
            if has_values:
                inner = value.items() if isinstance(value, dict) else None
                text += "None_" if inner is None else "".join([_word(name, one) for name, one in inner])
            continue
        if isinstance(value, dict):
            inside = _join(value, keys, has_values=has_values)
            text += f"{inside}_" if inside else ""
        if key in keys:
            text += _word(key, value) if has_values else f"{_initials(key)}_"
    return text[:-1]


def _word(key: str, value: object) -> str:
    if isinstance(value, bool):
        return f"{_initials(key)}{'T' if value else 'F'}_"
    if isinstance(value, int | float) and value > 9000:
        return f"{_initials(key)}{value:.1e}_"
    return f"{_initials(key)}{value}_"


def _initials(key: str) -> str:
    return "".join([part[:1] for part in key.split("_")])
