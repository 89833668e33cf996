"""Settings of a rendezvous backend, checked before torch is asked."""

from __future__ import annotations

import pytest

from dsl.rendezvous.settings import KNOWN, check_settings, number, unknown_settings


@pytest.mark.parametrize(
    "backend, key, value, problem",
    [
        ("c10d", "join_timeout", "600", ""),
        ("c10d", "join_timeout", " 600 ", ""),
        ("c10d", "is_host", "True", ""),
        ("c10d", "is_host", "0", ""),
        ("c10d", "store_type", "FILE", ""),
        ("c10d", "cas_backoff_max_seconds", "0", ""),
        ("c10d", "timeout", "900", ""),
        ("etcd-v2", "protocol", "https", ""),
        ("etcd-v2", "ssl_cert", "/etc/cert", ""),
        ("etcd", "etcd_prefix", "/jobs", ""),
        ("somebody-elses", "join_timout", "soon", ""),
        ("c10d", "join_timeout", "0", "setting join_timeout='0' of backend c10d is wrong, expected a whole number above 0"),
        ("c10d", "join_timeout", "5.5", "setting join_timeout='5.5' of backend c10d is wrong, expected a whole number above 0"),
        ("c10d", "join_timeout", "-1", "setting join_timeout='-1' of backend c10d is wrong, expected a whole number above 0"),
        ("c10d", "join_timeout", "9" * 50, f"setting join_timeout={'9' * 50!r} of backend c10d is wrong, expected a whole number above 0"),
        ("c10d", "is_host", "maybe", "setting is_host='maybe' of backend c10d is wrong, expected 1 or 0"),
        ("c10d", "store_type", "etcd", "setting store_type='etcd' of backend c10d is wrong, expected tcp or file"),
        ("c10d", "cas_backoff_max_seconds", "soon", "setting cas_backoff_max_seconds='soon' of backend c10d is wrong, expected seconds, 0 or more"),
        ("c10d", "cas_backoff_max_seconds", "inf", "setting cas_backoff_max_seconds='inf' of backend c10d is wrong, expected seconds, 0 or more"),
        ("c10d", "join_timout", "5", "backend c10d has no setting 'join_timout', did you mean join_timeout?"),
        ("c10d", "join-timeout", "5", "backend c10d has no setting 'join-timeout', did you mean join_timeout?"),
        ("c10d", "ishost", "1", "backend c10d has no setting 'ishost', did you mean is_host?"),
        ("etcd", "etcd_prefx", "/", "backend etcd has no setting 'etcd_prefx', did you mean etcd_prefix?"),
        ("static", "timeouts", "5", "backend static has no setting 'timeouts', did you mean timeout?"),
    ],
)  # fmt: skip
def test_what_torch_takes_is_right_and_what_is_wrong_is_said_in_one_line(
    backend: str, key: str, value: str, problem: str
) -> None:
    assert check_settings(backend, [("timeout", "1"), (key, value)]) == problem


@pytest.mark.parametrize("backend", list(KNOWN))
@pytest.mark.parametrize(
    "key", ["rdzv_backend", "rdzv_endpoint", "rdzv_timeout", "overlap_timeout", "nnodes", "color", "endpoint"]
)
def test_a_key_that_resembles_none_is_unknown_and_no_error(backend: str, key: str) -> None:
    settings = [("timeout", "1"), (key, "x")]
    assert check_settings(backend, settings) == ""
    assert unknown_settings(backend, settings) == [key]


def test_a_setting_of_another_backend_is_unknown_and_no_error() -> None:
    for backend, key in (("etcd-v2", "is_host"), ("static", "read_timeout"), ("etcd", "ca_cert")):
        assert check_settings(backend, [(key, "1")]) == ""
        assert unknown_settings(backend, [(key, "1")]) == [key]
    assert unknown_settings("somebody-elses", [("color", "red")]) == []


def test_only_keys_are_checked_where_values_have_no_effect() -> None:
    assert check_settings("c10d", [("join_timeout", "0")], keys_only=True) == ""
    assert "did you mean" in check_settings("c10d", [("jointimeout", "0")], keys_only=True)


def test_what_is_not_said_has_torchs_default() -> None:
    assert number((), "join_timeout") == 600
    assert number((("join_timeout", "7"),), "join_timeout") == 7
