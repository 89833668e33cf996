"""World info: DeepSpeed's text form of the hosts of a job and their slots.

It is a JSON object of hosts and slot ids in rank order, with Python's default separators, in URL-safe base64
with padding.
"""

from __future__ import annotations

from dsl.errors import WorldInfoError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """``{"localhost": [0, 1]}`` -> ``"eyJsb2NhbGhvc3QiOiBbMCwgMV19"``."""
    from base64 import urlsafe_b64encode
    from json import dumps

    return urlsafe_b64encode(dumps(world_info).encode()).decode()


def decode_world_info(text: str) -> dict[str, list[int]]:
    """The reverse of `encode_world_info`.

    Raises:
        WorldInfoError: not base64, not JSON, not an object of hosts and distinct slots, or empty.
    """
    from base64 import urlsafe_b64decode
    from json import loads

    if text == "None":
        raise WorldInfoError("world_info can not be None: it names the hosts and slots of the job")
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    if not set(text) <= _ALPHABET:
        raise WorldInfoError(f"world info {shown!r} is not URL-safe base64")
    try:
        data = urlsafe_b64decode(text.encode())
    except ValueError as error:
        raise WorldInfoError(f"world info {shown!r} is not URL-safe base64: {_first_lower(error)}") from None
    try:
        world = loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise WorldInfoError(f"world info {shown!r} does not hold JSON: {_first_lower(error)}") from None
    if not isinstance(world, dict) or not world:
        raise WorldInfoError(f"world info {shown!r} does not hold an object of hosts and their slots")
    for host, slots in world.items():
        if not _is_slot_list(slots):
            raise WorldInfoError(
                f"world info {shown!r}: the slots of {host!r} are not distinct whole numbers"
            )
    return world


_ALPHABET = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")


def _is_slot_list(slots: object) -> bool:
    if not isinstance(slots, list):
        return False
    # In Python bool is an int, in JSON it is not.
    whole = all(type(slot) is int and slot >= 0 for slot in slots)
    return whole and len(set(slots)) == len(slots)


def _first_lower(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]
