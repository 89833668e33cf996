"""The rooms of a machine, which are made when they are asked for."""

from __future__ import annotations

import sys

import pytest
from tests.support.command import ran
from tests.support.machine import ROOMS, make_facts
from tests.support.outcome import error_of

from dsl.facts import Facts, this_machine

CODE = """
import sys, os, _socket
from functools import cached_property
before = set(sys.modules)
from dsl.facts import this_machine
facts = this_machine()
print(sorted(name for name in sys.modules if name.startswith("dsl.") and name not in before))
getattr(facts, sys.argv[1])
print(sorted(name for name in sys.modules if name.startswith("dsl.") and name not in before))
"""


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("room", [*ROOMS, "console", "environ"])
def test_a_room_is_imported_when_it_is_asked_for(room: str) -> None:
    result = ran([sys.executable, "-I", "-c", CODE, room], check=True)
    before, after = [set(eval(line)) for line in result.stdout.splitlines()]
    assert before - {"dsl._core", "dsl._record", "dsl.engine"} == {"dsl.facts"}
    rooms = {name for name in after - before if name.startswith(("dsl.machine", "dsl.devices"))}
    process = {"dsl.machine"}
    expected = {
        "environ": set(),
        "console": process,
        "names": process,
        "files": process,
        "cpus": {*process, "dsl.machine.kernel"},
        "devices": {*process, "dsl.devices", "dsl.devices.offered", "dsl.machine.kernel"},
        "ports": process,
        "network": {*process, "dsl.machine.network"},
    }
    assert rooms == expected[room]


def test_a_room_is_made_once() -> None:
    facts = this_machine()
    assert all(getattr(facts, room) is getattr(facts, room) for room in ROOMS)
    assert facts.devices.other_count is not None
    assert this_machine().devices is not facts.devices


def test_a_room_that_is_given_is_the_one_that_is_asked() -> None:
    ports = make_facts(taken=(7,)).ports
    assert not Facts(ports=ports).ports.is_free(7)


def test_what_is_no_room_is_refused() -> None:
    said = error_of(TypeError, lambda: Facts(port=1))
    assert said.startswith("port is no room of Facts, which has environ, console,")
    assert not hasattr(this_machine(), "port")
