"""Settings of a rendezvous backend, checked before torch is asked."""

from __future__ import annotations

import pytest

from dsl.rendezvous.settings import check_settings, number


@pytest.mark.parametrize(
    "backend, key, value",
    [
        ("c10d", "join_timeout", "600"),
        ("c10d", "join_timeout", " 600 "),
        ("c10d", "is_host", "True"),
        ("c10d", "is_host", "0"),
        ("c10d", "store_type", "FILE"),
        ("c10d", "cas_backoff_max_seconds", "0"),
        ("c10d", "timeout", "900"),
        ("etcd-v2", "protocol", "https"),
        ("etcd-v2", "ssl_cert", "/etc/cert"),
        ("etcd", "etcd_prefix", "/jobs"),
        ("somebody-elses", "join_timout", "soon"),
    ],
)
def test_what_torch_takes_is_right(backend: str, key: str, value: str) -> None:
    assert check_settings(backend, [(key, value)]) == ""


@pytest.mark.parametrize(
    "backend, key, value, problem",
    [
        ("c10d", "join_timeout", "0", "setting join_timeout='0' of backend c10d is wrong, expected a whole number above 0"),
        ("c10d", "join_timeout", "5.5", "setting join_timeout='5.5' of backend c10d is wrong, expected a whole number above 0"),
        ("c10d", "join_timeout", "-1", "setting join_timeout='-1' of backend c10d is wrong, expected a whole number above 0"),
        ("c10d", "join_timeout", "9" * 5000, f"setting join_timeout={'9' * 5000!r} of backend c10d is wrong, expected a whole number above 0"),
        ("c10d", "is_host", "maybe", "setting is_host='maybe' of backend c10d is wrong, expected 1 or 0"),
        ("c10d", "store_type", "etcd", "setting store_type='etcd' of backend c10d is wrong, expected tcp or file"),
        ("c10d", "cas_backoff_max_seconds", "soon", "setting cas_backoff_max_seconds='soon' of backend c10d is wrong, expected seconds, 0 or more"),
        ("c10d", "cas_backoff_max_seconds", "inf", "setting cas_backoff_max_seconds='inf' of backend c10d is wrong, expected seconds, 0 or more"),
        ("c10d", "join_timout", "5", "backend c10d has no setting 'join_timout', did you mean join_timeout?"),
        ("c10d", "join-timeout", "5", "backend c10d has no setting 'join-timeout', did you mean join_timeout?"),
        ("c10d", "ishost", "1", "backend c10d has no setting 'ishost', did you mean is_host?"),
        ("etcd", "color", "red", "backend etcd has no setting 'color', it knows cacert, cert, etcd_prefix, key, last_call_timeout, protocol, rank, timeout"),
        ("etcd-v2", "is_host", "1", "backend etcd-v2 has no setting 'is_host', it knows ca_cert, cas_backoff_max_seconds, close_timeout, heartbeat_timeout, join_timeout, keep_alive_interval, keep_alive_max_attempt, last_call_timeout, protocol, rank, read_timeout, ssl_cert, ssl_cert_key, timeout"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(backend: str, key: str, value: str, problem: str) -> None:
    assert check_settings(backend, [("timeout", "1"), (key, value)]) == problem


def test_what_is_not_said_has_torchs_default() -> None:
    assert number((), "join_timeout") == 600
    assert number((("join_timeout", "7"),), "join_timeout") == 7
