"""Where the workers of `dslrun` meet: three kinds of jobs, and every way to say it wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.machine import make_facts
from tests.support.outcome import assert_one_line, error_of
from tests.support.requests import make_request

from dsl.errors import OptionError, PortError
from dsl.plan.meeting_point import (
    check_meeting,
    meeting_notices,
    meeting_point,
    parse_endpoint,
    parse_settings,
    run_id,
)

NODES: dict[str, Any] = {"min_nodes": 2, "max_nodes": 2}
TWO: dict[str, Any] = {**NODES, "master_addr": "a"}


def ask(**wish: Any) -> tuple[Any, tuple[int, int]]:
    request = make_request("torch", **{"min_nodes": 1, "max_nodes": 1, "rdzv_id": "none", **wish})
    return request.meeting, (request.resources.min_nodes or 0, request.resources.max_nodes or 0)


@pytest.mark.parametrize(
    "wish, kind, point",
    [
        ({}, "alone", ("127.0.0.1", None)),
        ({"standalone": True, **NODES, "master_port": 7}, "alone", ("127.0.0.1", None)),
        ({"local_addr": "10.0.0.9"}, "alone", ("10.0.0.9", None)),
        ({"master_addr": "10.0.0.1"}, "alone", ("127.0.0.1", None)),
        ({"rdzv_backend": "c10d"}, "alone", ("127.0.0.1", None)),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "h:29400"}, "alone", ("127.0.0.1", None)),
        ({"rdzv_backend": "etcd", "local_addr": "10.0.0.9"}, "alone", ("10.0.0.9", None)),
        ({"master_port": 7}, "static", ("127.0.0.1", 7)),
        ({"master_port": 0}, "static", ("127.0.0.1", None)),
        ({"master_addr": "h", "master_port": 7, "local_addr": "l"}, "static", ("h", 7)),
        ({"rdzv_endpoint": "h:7"}, "static", ("h", 7)),
        ({"rdzv_endpoint": "h:0"}, "static", ("h", None)),
        ({"rdzv_endpoint": "[fe80::1%eth0]:7"}, "static", ("fe80::1%eth0", 7)),
        (TWO, "static", ("a", 29500)),
        ({**TWO, "master_port": 7, "node_rank": 1}, "static", ("a", 7)),
        ({**NODES, "master_addr": "[::1]"}, "static", ("::1", 29500)),
        ({**NODES, "master_addr": "::1"}, "static", ("::1", 29500)),
        ({**NODES, "rdzv_endpoint": "h:7", "master_addr": "other", "master_port": 9}, "static", ("h", 7)),
        ({"max_nodes": 2, "master_addr": "a"}, "static", ("a", 29500)),
    ],
)
def test_the_kind_of_a_job_and_its_meeting_point(
    wish: dict[str, Any], kind: str, point: tuple[str, int | None]
) -> None:
    request = ask(**wish)
    check_meeting(*request)
    meeting = meeting_point(*request)
    assert meeting.kind == kind
    assert (meeting.address, meeting.port or None) == point


MISSPELLED = "backend c10d has no setting 'joint_timeout', did you mean"


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "wish, said",
    [
        ({"min_nodes": 0}, "--nnodes 0:1: MIN must be at least 1"),
        ({"min_nodes": 3, "max_nodes": 2}, "--nnodes 3:2"),
        ({"max_nodes": 1 << 23}, "at most 65536 nodes can take part"),
        ({"rdzv_backend": " "}, "--rdzv-backend ' ': expected one of static, c10d"),
        ({**NODES, "rdzv_backend": "c10d", "rdzv_endpoint": "/a"}, "--rdzv-endpoint '/a'"),
        ({"max_nodes": 4, "rdzv_backend": "etcd-v2", "rdzv_endpoint": "h:x"}, "'h:x'"),
        ({"node_rank": 1, "master_port": 7}, "--node-rank 1: with 1 node it must be 0"),
        ({**TWO, "node_rank": 2}, "--node-rank 2: with 2 nodes it must be 0 to 1"),
        ({**TWO, "node_rank": -1}, "--node-rank -1"),
        ({**TWO, "master_port": 65536}, "--master-port 65536 is not a port"),
        ({**TWO, "master_port": -1}, "--master-port -1 is not a port"),
        ({**TWO, "master_port": 0}, "port 0 of a: a job on several nodes needs the same port on each"),
        ({**TWO, "master_port": 0, "node_rank": 1}, "port 0 of a"),
        ({**NODES, "rdzv_endpoint": "h"}, "--rdzv-endpoint 'h': the port is missing"),
        ({**NODES, "rdzv_endpoint": "[::1]"}, "the port is missing"),
        ({**NODES, "rdzv_endpoint": "exec:h:7"}, "--rdzv-endpoint 'exec:h:7': expected HOST:PORT"),
        ({**NODES, "master_addr": ""}, "--master-addr '': expected a host name or an address"),
        ({**NODES, "master_addr": "h h"}, "--master-addr 'h h'"),
        ({**NODES, "master_addr": "h:7"}, "--master-addr 'h:7': expected a host name or an address"),
        ({**NODES, "master_addr": "http://h"}, "--master-addr 'http://h'"),
        ({"rdzv_conf": "timeout"}, "--rdzv-conf 'timeout': expected KEY=VALUE,... but there is 'timeout'"),
        ({**NODES, "rdzv_backend": "c10d", "rdzv_conf": "joint_timeout=5"}, MISSPELLED),
        ({"rdzv_conf": "time_out=5"}, "backend static has no setting 'time_out', did you mean"),
        ({"standalone": True, "rdzv_conf": "ishost=1"}, "backend c10d has no setting 'ishost'"),
        ({"rdzv_conf": "a=1,,b=2"}, "but there is ''"),
        ({"rdzv_conf": "=1"}, "but there is '=1'"),
        ({"rdzv_conf": "a="}, "but there is 'a='"),
    ],
)
def test_a_meeting_that_makes_no_sense_is_refused_in_one_line(wish: dict[str, Any], said: str) -> None:
    def decide() -> None:
        check_meeting(*ask(**wish))
        meeting_point(*ask(**wish))

    message = error_of(PortError if "port 0 " in said or "not a port" in said else OptionError, decide)
    assert said in message
    assert_one_line(message)


@pytest.mark.parametrize(
    "wish, said",
    [
        ({}, "--spares needs a job of several nodes"),
        ({"master_addr": "a", "master_port": 7}, "--spares needs a job of several nodes"),
        ({**NODES, "standalone": True}, "--spares needs a job of several nodes"),
        ({"rdzv_backend": "c10d"}, "--spares needs a job of several nodes"),
        (
            {**NODES, "rdzv_backend": "etcd"},
            "--spares cannot be used with --rdzv-backend etcd: its nodes meet by",
        ),
        ({**NODES, "rdzv_backend": "zeus"}, "--spares cannot be used with --rdzv-backend zeus"),
        ({"min_nodes": 1, "max_nodes": 65536, "master_addr": "a"}, "--spares 2: it must be 0 to 0"),
        ({**TWO, "node_rank": 4}, "--node-rank 4: with 2 nodes and 2 spares it must be 0 to 3"),
    ],
)
def test_spares_that_nobody_could_send_are_refused_in_one_line(wish: dict[str, Any], said: str) -> None:
    message = error_of(OptionError, lambda: check_meeting(*ask(**wish), spares=2))
    assert said in message
    assert_one_line(message)


@pytest.mark.parametrize(
    "wish", [{**TWO, "node_rank": 3}, {**NODES, "rdzv_backend": "etcd-v2", "node_rank": 7}]
)
def test_spares_of_nodes_that_one_of_them_conducts(wish: dict[str, Any]) -> None:
    check_meeting(*ask(**wish), spares=2)
    assert meeting_point(*ask(**wish), spares=2).spares == 2


@pytest.mark.parametrize(
    "text, pairs",
    [("", ()), (" ", ()), ("timeout=9", (("timeout", "9"),)), ("a = 1 , b=x=y", (("a", "1"), ("b", "x=y")))],
)
def test_settings_of_a_backend_are_pairs(text: str, pairs: tuple[tuple[str, str], ...]) -> None:
    assert parse_settings(text) == pairs


@pytest.mark.parametrize(
    "wish, least, most",
    [
        ({"max_nodes": 2, "rdzv_backend": "c10d"}, 1, 2),
        ({**NODES, "rdzv_backend": "c10d", "rdzv_endpoint": "h"}, 2, 2),
        ({**NODES, "rdzv_backend": "etcd-v2", "rdzv_endpoint": "h:0", "local_addr": "10.0.0.9"}, 2, 2),
        ({**NODES, "rdzv_backend": "c10d", "rdzv_endpoint": "/a b", "rdzv_conf": "store_type=file"}, 2, 2),
        ({"rdzv_backend": "zeus", "rdzv_endpoint": "zeus://h"}, 1, 1),
    ],
)
def test_nodes_that_find_each_other(wish: dict[str, Any], least: int, most: int) -> None:
    request = ask(**wish)
    check_meeting(*request)
    point = meeting_point(*request)
    assert (point.kind, point.address, point.port) == ("dynamic", "", None)
    assert point.least_nodes == least
    assert point.backend == wish["rdzv_backend"]
    assert point.endpoint == wish.get("rdzv_endpoint", "")
    assert point.local_address == wish.get("local_addr", "")
    assert point.settings == parse_settings(wish.get("rdzv_conf", ""))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("h:7", ("h", 7)),
        (" h:7 ", ("h", 7)),
        ("h", ("h", None)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:7", ("::1", 7)),
        ("[::1]", ("::1", None)),
        ("fe80::1:7", ("fe80::1", 7)),
        ("a_b-c.d:7", ("a_b-c.d", 7)),
    ],
)
def test_an_endpoint(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize(
    "text", ["h:", "h:x", "h:65536", "h:123456", "h:-1", "h:٣", ":7", "[]:7", "h/x:7", "::1"]
)
def test_an_endpoint_that_is_none(text: str) -> None:
    assert error_of(OptionError, parse_endpoint, text)


@given(st.text(max_size=12))
def test_whatever_is_given_as_an_endpoint_is_read_or_refused_in_one_line(text: str) -> None:
    message = error_of(OptionError, parse_endpoint, text)
    if not message:
        host, port = parse_endpoint(text)
        assert host
        assert port is None or 0 <= port < 65536
    else:
        assert_one_line(message)


@pytest.mark.parametrize(
    "wish, expected",
    [
        ({}, "01234567-89ab-cdef-0123-456789abcdef"),
        ({"rdzv_id": "mine"}, "01234567-89ab-cdef-0123-456789abcdef"),
        ({"rdzv_id": "mine", "standalone": True}, "01234567-89ab-cdef-0123-456789abcdef"),
        ({"rdzv_id": "", "rdzv_backend": "c10d"}, "01234567-89ab-cdef-0123-456789abcdef"),
        ({"rdzv_id": "mine", "rdzv_backend": "c10d"}, "mine"),
        ({"master_port": 7}, "none"),
        (TWO, "none"),
        ({**TWO, "rdzv_id": "mine"}, "mine"),
    ],
)
def test_the_name_of_a_job_is_the_users_unless_the_node_is_alone(wish: dict[str, Any], expected: str) -> None:
    assert run_id(*ask(**wish), make_facts().names.random) == expected


STATIC = (
    "--nnodes 1:3: nodes cannot join later with --rdzv-backend static, the job starts when all 3 are there"
)
ALONE = "--nnodes has no effect with --standalone, which is one node"
C10D: dict[str, Any] = {"rdzv_backend": "c10d"}


@pytest.mark.parametrize(
    "wish, said",
    [
        ({}, []),
        ({**TWO, "node_rank": 1, "master_port": 7}, []),
        ({"node_rank": 3}, ["--node-rank has no effect with one node"]),
        ({**C10D, "node_rank": 3}, ["--node-rank has no effect with --rdzv-backend c10d"]),
        ({**C10D, "master_port": 7}, ["--master-port has no effect with --rdzv-backend c10d"]),
        ({"standalone": True, **NODES}, [ALONE]),
        ({"standalone": True, "master_port": 7}, ["--master-port has no effect with --standalone"]),
        ({"max_nodes": 3}, [STATIC]),
        ({"max_nodes": 3, **C10D}, []),
        ({"max_nodes": 3, **C10D, "node_rank": 2}, ["--node-rank has no effect with --rdzv-backend c10d"]),
    ],
)
def test_what_has_no_effect_is_said(wish: dict[str, Any], said: list[str]) -> None:
    notices = meeting_notices(*ask(**wish))
    assert [notice.text for notice in notices] == said
    assert {notice.level for notice in notices} <= {"warning"}


@pytest.mark.parametrize(
    "backend, wish",
    [
        ("static", {**TWO, "node_rank": 1}),
        ("static", {}),
        ("c10d", {"standalone": True}),
        ("c10d", {**NODES, **C10D}),
        ("etcd", {**NODES, "rdzv_backend": "etcd"}),
    ],
)
def test_settings_that_a_backend_does_not_have_are_named(backend: str, wish: dict[str, Any]) -> None:
    notices = meeting_notices(*ask(**wish, rdzv_conf="rdzv_backend=c10d,timeout=9,overlap_timeout=600"))
    what = f"has no effect: backend {backend} has no such setting"
    assert [one.text for one in notices] == [
        f"--rdzv-conf {key} {what}" for key in ("rdzv_backend", "overlap_timeout")
    ]
