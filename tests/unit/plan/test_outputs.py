"""What the values of ``--metrics`` and ``--events`` mean, and which are refused before anything is made."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.machine import make_facts
from tests.support.requests import make_request

from dsl.errors import EventsFileError, MetricsError, UsageError
from dsl.plan.job import plan_job, read_target


@pytest.mark.parametrize(
    "text, target",
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:9400", ("0.0.0.0", 9400)),
        ("[::]:9400", ("::", 9400)),
        ("::1:9400", ("::1", 9400)),
        ("node-7.cluster:1", ("node-7.cluster", 1)),
        ("job.prom", None),
        ("_", None),
        ("./9400", None),
        ("/var/lib/job:1.prom", None),
        ("./node:9400x", None),
    ],
)
def test_an_address_is_told_from_a_file(text: str, target: tuple[str, int] | None) -> None:
    assert read_target(text) == target


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "-1", "+9400", "9400 ", " 9400", "\t9400", "9400\n", "94OO", "0x24b8", "9400.prom"),
        *("127.0.0.1", "127.0.0.1:22x", "localhost:", ":9400", "[]:9400", "local host:9400", "host:-1"),
        *("host: 9400", "host:9400 ", " host:9400", "٩٤٠٠", "1:2:3:x", "99999999999999999999", "http:9400b"),
    ],
)
def test_a_mistyped_address_is_no_file(text: str) -> None:
    with pytest.raises(MetricsError, match=r"^--metrics .*(is no address|is no port)") as refused:
        read_target(text)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, UsageError)


@pytest.mark.parametrize("port", [0, 65536, 123456])
def test_a_port_that_no_machine_has_is_refused(port: int) -> None:
    with pytest.raises(MetricsError, match=f"{port} is no port, give a number from 1 to 65535"):
        read_target(f"127.0.0.1:{port}")


@pytest.mark.parametrize("flavour", ["deepspeed", "torch", "functions"])
@pytest.mark.parametrize(
    "wish, kind",
    [
        ({"metrics": "-1"}, MetricsError),
        ({"metrics": ""}, MetricsError),
        ({"metrics": "here/job.prom"}, MetricsError),
        ({"events": ""}, EventsFileError),
        ({"events": " \t"}, EventsFileError),
        ({"events": "here"}, EventsFileError),
    ],
)
def test_every_command_refuses_them_when_it_plans(
    flavour: str, wish: dict[str, Any], kind: type[UsageError]
) -> None:
    facts = make_facts(why_not_written=lambda path, **_: "it is a directory" if "here" in path else "")
    with pytest.raises(kind, match=r"^--(events|metrics) .*(is no address|cannot be written: it )"):
        plan_job(make_request(flavour, **wish), facts)
