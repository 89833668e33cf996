"""The settings of torch's rendezvous backends, checked before torch is asked: ``--rdzv-conf``.

torch ignores a key that it does not know, so a typing error would leave a timeout at its default. But files
that people use have keys that no backend knows. So a key that resembles a known one is an error, and any
other brings a warning.
"""

from __future__ import annotations

from dsl.words import parse_number, parse_seconds, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_DYNAMIC = {
    "join_timeout": "count",
    "last_call_timeout": "count",
    "close_timeout": "count",
    "heartbeat_timeout": "count",
    "keep_alive_interval": "count",
    "keep_alive_max_attempt": "count",
    "cas_backoff_max_seconds": "seconds",
    "read_timeout": "count",
    # Keys that torchrun adds for other backends.
    "timeout": "count",
    "rank": "text",
}
KNOWN: dict[str, dict[str, str]] = {
    # dsl checks these values where it uses them.
    "static": dict.fromkeys(("timeout", "keep_alive_interval", "keep_alive_max_attempt", "rank"), "text"),
    "c10d": {**_DYNAMIC, "store_type": "store", "is_host": "yes or no"},
    "etcd-v2": {
        **_DYNAMIC,
        "protocol": "protocol",
        "ssl_cert": "text",
        "ssl_cert_key": "text",
        "ca_cert": "text",
    },
    "etcd": {
        "timeout": "count",
        "last_call_timeout": "count",
        "etcd_prefix": "text",
        "protocol": "protocol",
        "cert": "text",
        "key": "text",
        "cacert": "text",
        "rank": "text",
    },
}
"""Keys of each backend, with the kinds of their values. Keys of other backends are not checked."""

YES_OR_NO = ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n")
KINDS: dict[str, tuple[Callable[[str], bool], str]] = {
    "count": (lambda value: (parse_number(value) or 0) > 0, "a whole number above 0"),
    "seconds": (
        lambda value: (found := parse_seconds(value)) is not None and 0 <= found < float("inf"),
        "seconds, 0 or more",
    ),
    "store": (lambda value: value.lower() in ("tcp", "file"), "tcp or file"),
    "protocol": (lambda value: value.lower() in ("http", "https"), "http or https"),
    "yes or no": (lambda value: value.lower() in YES_OR_NO, "1 or 0"),
    "text": (lambda _: True, ""),
}
"""Whether a value of a kind is right, and what is expected."""

DEFAULTS = {
    "join_timeout": 600,
    "last_call_timeout": 30,
    "read_timeout": 60,
    "keep_alive_interval": 5,
    "keep_alive_max_attempt": 3,
}
"""torch's defaults, in seconds or counts."""

SIMILAR = 0.85
"""How much a slip resembles a known key, at least: ``joint_timeout`` does, ``rdzv_timeout`` does not."""


def check_settings(backend: str, settings: Iterable[tuple[str, str]], *, keys_only: bool = False) -> str:
    """The problem with the settings of a backend, as one line; empty without a problem."""
    for key in unknown_settings(backend, settings):
        from difflib import get_close_matches

        near = get_close_matches(key.replace("-", "_").lower(), KNOWN[backend], 1, SIMILAR)
        if near and not any(key in known for known in KNOWN.values()):
            return f"backend {backend} has no setting {quote(key)}, did you mean {near[0]}?"
    for key, value in () if keys_only else settings:
        is_right, expected = KINDS[KNOWN.get(backend, {}).get(key, "text")]
        if not is_right(value.strip()):
            return f"setting {key}={quote(value)} of backend {backend} is wrong, expected {expected}"
    return ""


def unknown_settings(backend: str, settings: Iterable[tuple[str, str]]) -> list[str]:
    """The keys that a backend does not know; of a backend that we do not know ourselves, none."""
    return [key for key, _ in settings if key not in KNOWN.get(backend, {key})]


def number(settings: Iterable[tuple[str, str]], key: str) -> int:
    """The value of a count, or torch's default for it."""
    return int(dict(settings).get(key, DEFAULTS[key]))
