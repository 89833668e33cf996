"""The settings of torch's rendezvous backends, checked before torch is asked: ``--rdzv-conf``.

torch ignores a key that it does not know, so a typing error would leave a timeout at its default.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

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

WORDS = {
    "store": ("tcp", "file"),
    "protocol": ("http", "https"),
    "yes or no": ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n"),
}
"""The allowed words of a kind."""

DEFAULTS = {
    "join_timeout": 600,
    "last_call_timeout": 30,
    "close_timeout": 30,
    "read_timeout": 60,
    "keep_alive_interval": 5,
    "keep_alive_max_attempt": 3,
}
"""torch's defaults, in seconds or counts."""


def check_settings(backend: str, settings: Iterable[tuple[str, str]]) -> str:
    """The problem with the settings of a backend, as one line; empty without a problem."""
    known = KNOWN.get(backend)
    if known is None:
        return ""
    for key, value in settings:
        if key not in known:
            from difflib import get_close_matches

            near = get_close_matches(key.replace("-", "_").lower(), known, 1, 0.8)
            advice = f"did you mean {near[0]}?" if near else f"it knows {', '.join(sorted(known))}"
            return f"backend {backend} has no setting {key!r}, {advice}"
        expected = _expected(known[key], value)
        if expected:
            return f"setting {key}={value!r} of backend {backend} is wrong, expected {expected}"
    return ""


def number(settings: Iterable[tuple[str, str]], key: str) -> int:
    """The value of a count, or torch's default for it."""
    return int(dict(settings).get(key, DEFAULTS[key]))


def _expected(kind: str, value: str) -> str:
    if kind in WORDS:
        shown = WORDS[kind] if len(WORDS[kind]) == 2 else ("1", "0")
        return "" if value.strip().lower() in WORDS[kind] else " or ".join(shown)
    if kind == "count":
        return "" if value.strip().isdecimal() and int(value) > 0 else "a whole number above 0"
    if kind == "seconds":
        try:
            is_right = 0 <= float(value) < float("inf")
        except ValueError:
            is_right = False
        return "" if is_right else "seconds, 0 or more"
    return ""
